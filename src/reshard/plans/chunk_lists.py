"""The chunks of stored tensors as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from reshard.metadata import ChunkStorageMetadata
from reshard.planning.columns import Ints
from reshard.planning.packing import pack_array, unpack_array
from reshard.plans.lazy_list import LazyList

__all__ = ["ChunkList", "chunk_columns", "stack_chunks"]


class ChunkList(LazyList[ChunkStorageMetadata]):
    """The chunks of one stored tensor, kept as columns.

    `rows`, if given, are the rows of `offsets` and `sizes` that belong to the tensor, and
    `dims` how many of their columns do.
    """

    def __init__(
        self, offsets: Ints, sizes: Ints, rows: Ints | None = None, dims: int | None = None
    ) -> None:
        super().__init__()
        self._offsets = offsets
        self._sizes = sizes
        self._rows = rows
        self.dims = offsets.shape[1] if dims is None else dims

    def columns(self) -> tuple[Ints, Ints]:
        """Offsets and sizes, if no chunk was handed out."""
        if self._rows is None:
            return self._offsets[:, : self.dims], self._sizes[:, : self.dims]
        return self._offsets[self._rows, : self.dims], self._sizes[self._rows, : self.dims]

    def _column_length(self) -> int:
        return len(self._offsets if self._rows is None else self._rows)

    def _make_one(self, position: int) -> ChunkStorageMetadata:
        row = position if self._rows is None else self._rows[position]
        return ChunkStorageMetadata(
            torch.Size(self._offsets[row, : self.dims].tolist()),
            torch.Size(self._sizes[row, : self.dims].tolist()),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        offsets, sizes = chunk_columns(self, self.dims)
        return _unpack_chunks, (len(offsets), pack_array(offsets), pack_array(sizes))


def _unpack_chunks(rows: int, offsets: Any, sizes: Any) -> ChunkList:
    return ChunkList(unpack_array(offsets, rows), unpack_array(sizes, rows))


def chunk_columns(chunks: Sequence[ChunkStorageMetadata], dims: int) -> tuple[Ints, Ints]:
    """Offsets and sizes of any sequence of chunks of a tensor with `dims` dimensions."""
    if isinstance(chunks, ChunkList) and chunks.untouched:
        return chunks.columns()
    shape = (len(chunks), dims)
    return (
        np.array([tuple(chunk.offsets) for chunk in chunks], dtype=np.int64).reshape(shape),
        np.array([tuple(chunk.sizes) for chunk in chunks], dtype=np.int64).reshape(shape),
    )


def stack_chunks(
    lists: Sequence[Sequence[ChunkStorageMetadata]], dims: Sequence[int], width: int
) -> tuple[Ints, Ints, Ints]:
    """The chunks of several tensors below one another: where each starts, offsets, sizes."""
    starts = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum([len(chunks) for chunks in lists], out=starts[1:])
    shared = _shared_rows(lists)
    if shared is not None:
        base_offsets, base_sizes, rows = shared
        return starts, base_offsets[rows, :width], base_sizes[rows, :width]
    offsets = np.zeros((int(starts[-1]), width), dtype=np.int64)
    sizes = np.ones_like(offsets)
    position = 0
    for chunks, dim in zip(lists, dims, strict=True):
        some_offsets, some_sizes = chunk_columns(chunks, dim)
        end = position + len(some_offsets)
        offsets[position:end, :dim] = some_offsets
        sizes[position:end, :dim] = some_sizes
        position = end
    return starts, offsets, sizes


def _shared_rows(lists: Sequence[Sequence[ChunkStorageMetadata]]) -> tuple[Ints, Ints, Ints] | None:
    """If all chunks are rows of the same columns, those and which rows."""
    rows = []
    for chunks in lists:
        if not isinstance(chunks, ChunkList) or not chunks.untouched or chunks._rows is None:
            return None
        if chunks._offsets is not lists[0]._offsets:  # type: ignore[attr-defined]
            return None
        rows.append(chunks._rows)
    if not rows:
        return None
    first: Any = lists[0]
    return first._offsets, first._sizes, np.concatenate(rows)

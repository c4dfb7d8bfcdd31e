"""Items to read as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from reshard.metadata import MetadataIndex
from reshard.planner import LoadItemType, ReadItem
from reshard.planning.columns import Bools, ChunkTable, Ints
from reshard.planning.packing import pack_array, pack_compressed, unpack_array, unpack_compressed
from reshard.plans.lazy_list import LazyList

Casts: TypeAlias = Mapping[str, tuple[torch.dtype, torch.dtype]]
"""Names of tensors, with the dtype that is stored and the one that they are loaded into."""


@dataclass(frozen=True, eq=False)
class ReadColumns:
    """What one rank reads. Row `i` copies one region of one stored chunk.

    `names` holds each FQN once; `dest_names` and `storage_names` refer to it. `regions`
    has for each row five points: the start of the local shard in the tensor, of the
    region in that shard, of the stored chunk in the tensor, of the region in that
    chunk, and the lengths. Where the chunks are those of `table`, `chunk_rows` are their
    rows in it, -1 for values; neither is sent to other ranks.
    """

    names: tuple[str, ...]
    dest_names: Ints
    storage_names: Ints
    is_value: Ints
    ndims: Ints
    dest_hints: Ints
    storage_hints: Ints
    regions: Ints
    table: ChunkTable | None = None
    chunk_rows: Ints | None = None

    def __len__(self) -> int:
        return len(self.dest_names)

    def select(self, rows: Bools) -> ReadColumns:
        """Some of the rows, in the same order."""
        return replace(
            self,
            dest_names=self.dest_names[rows],
            storage_names=self.storage_names[rows],
            is_value=self.is_value[rows],
            ndims=self.ndims[rows],
            dest_hints=self.dest_hints[rows],
            storage_hints=self.storage_hints[rows],
            regions=self.regions[rows],
            chunk_rows=None if self.chunk_rows is None else self.chunk_rows[rows],
        )

    def rows_in(self, table: ChunkTable) -> Ints:
        """The rows of the chunks in `table`; -1 for values, and where that is not certain."""
        if self.table is table and self.chunk_rows is not None:
            return self.chunk_rows
        tensors = np.array([table.row_of.get(name, -1) for name in self.names], dtype=np.int64)
        tensors = tensors[self.storage_names]
        rows: Ints = np.full(len(self), -1, dtype=np.int64)
        known = np.flatnonzero((tensors >= 0) & (self.storage_hints >= 0) & (self.is_value == 0))
        sources = table.sources[tensors[known]]
        guesses = table.starts[sources] + self.storage_hints[known]
        known, guesses = (c[guesses < table.starts[sources + 1]] for c in (known, guesses))
        # A hint is right if the chunk at that place has the same offsets.
        width = min(self.regions.shape[2], table.offsets.shape[1])
        same = table.offsets[guesses, :width] == self.regions[known, 2, :width]
        right = same.all(axis=1)
        rows[known[right]] = guesses[right]
        return rows


class ReadItems(LazyList[ReadItem]):
    """Read items kept as columns. `casts` is known where they were planned, and not sent."""

    def __init__(self, base: ReadColumns, casts: Casts | None = None) -> None:
        super().__init__()
        self.base = base
        self.casts: Casts = {} if casts is None else casts

    def _column_length(self) -> int:
        return len(self.base)

    def _make_one(self, position: int) -> ReadItem:
        base = self.base
        return _read_item(
            base.names,
            int(base.dest_names[position]),
            int(base.storage_names[position]),
            bool(base.is_value[position]),
            int(base.ndims[position]),
            int(base.dest_hints[position]),
            int(base.storage_hints[position]),
            base.regions[position].tolist(),
        )

    def _make_all(self) -> list[ReadItem]:
        base, names = self.base, self.base.names
        rows = zip(
            base.dest_names.tolist(),
            base.storage_names.tolist(),
            base.is_value.tolist(),
            base.ndims.tolist(),
            base.dest_hints.tolist(),
            base.storage_hints.tolist(),
            base.regions.tolist(),
            strict=True,
        )
        return [_read_item(names, *row) for row in rows]

    def columns(self) -> ReadColumns:
        """These items as columns; made anew if items were handed out."""
        return self.base if self.untouched else read_columns(self._list())

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_read_items, (pack_read_columns(self.columns()),)


_ZERO = torch.Size((0,))


def _read_item(
    names: Sequence[str],
    dest: int,
    stored: int,
    is_value: bool,
    dims: int,
    dest_hint: int,
    storage_hint: int,
    region: Sequence[Sequence[int]],
) -> ReadItem:
    if is_value:
        index = MetadataIndex(names[dest]), MetadataIndex(names[stored])
        return ReadItem(LoadItemType.BYTE_IO, index[0], _ZERO, index[1], _ZERO, _ZERO)
    shard, dest_offsets, chunk, storage_offsets, lengths = region
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(names[dest], shard[:dims], None if dest_hint < 0 else dest_hint),
        torch.Size(dest_offsets[:dims]),
        MetadataIndex(names[stored], chunk[:dims], None if storage_hint < 0 else storage_hint),
        torch.Size(storage_offsets[:dims]),
        torch.Size(lengths[:dims]),
    )


def untouched_reads(items: Sequence[ReadItem]) -> ReadItems | None:
    """`items`, if they are columns of which no item was handed out."""
    return items if isinstance(items, ReadItems) and items.untouched else None


def planned_casts(items: Sequence[ReadItem]) -> Casts:
    """The tensors that `items` fill with data of another dtype, as far as that is known."""
    return items.casts if isinstance(items, ReadItems) else {}


def read_columns(items: Sequence[ReadItem]) -> ReadColumns:
    """The columns of any sequence of read items."""
    if isinstance(items, ReadItems) and items.untouched:
        return items.base
    names: dict[str, int] = {}
    width = max((len(item.lengths) for item in items), default=1)
    regions = np.zeros((len(items), 5, max(width, 1)), dtype=np.int64)
    rows = []
    for row, item in enumerate(items):
        is_value = item.type is LoadItemType.BYTE_IO
        dest, stored = item.dest_index, item.storage_index
        dims = 0 if is_value else len(item.lengths)
        if not is_value:
            points = (
                dest.offset or (0,) * dims,
                item.dest_offsets,
                stored.offset or (0,) * dims,
                item.storage_offsets,
                item.lengths,
            )
            regions[row, :, :dims] = points
        rows.append(
            (
                names.setdefault(dest.fqn, len(names)),
                names.setdefault(stored.fqn, len(names)),
                is_value,
                dims,
                -1 if dest.index is None else dest.index,
                -1 if stored.index is None else stored.index,
            )
        )
    table = np.array(rows, dtype=np.int64).reshape(len(items), 6)
    return _read_columns_of(tuple(names), table, regions)


def _read_columns_of(names: tuple[str, ...], scalars: Ints, regions: Ints) -> ReadColumns:
    dest_names, storage_names, is_value, ndims, dest_hints, storage_hints = scalars.T
    return ReadColumns(
        names, dest_names, storage_names, is_value, ndims, dest_hints, storage_hints, regions
    )


def pack_read_columns(columns: ReadColumns) -> bytes:
    rows = len(columns)
    flat = columns.regions.reshape(rows, 5 * columns.regions.shape[2])
    scalars = np.stack(
        (
            columns.dest_names,
            columns.storage_names,
            columns.is_value,
            columns.ndims,
            columns.dest_hints,
            columns.storage_hints,
        ),
        axis=1,
    )
    return msgspec.msgpack.encode(
        (pack_compressed(columns.names), rows, pack_array(scalars), pack_array(flat))
    )


def unpack_read_columns(data: bytes) -> ReadColumns:
    names, rows, scalars, flat = msgspec.msgpack.decode(data)
    regions = unpack_array(flat, rows).reshape(rows, 5, len(flat) // 5)
    return _read_columns_of(tuple(unpack_compressed(names)), unpack_array(scalars, rows), regions)


def _unpack_read_items(data: bytes) -> ReadItems:
    return ReadItems(unpack_read_columns(data))

"""Items to write, and the properties of their tensors, as columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from reshard.api import PlanError, UnsupportedLayoutError
from reshard.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from reshard.planner import BytesIOWriteData, TensorWriteData, WriteItem, WriteItemType
from reshard.planning.columns import (
    BYTES,
    DTYPE_CODES,
    DTYPES,
    MOST_DIMS,
    SHARD,
    TENSOR,
    Ints,
    Schema,
    WriteColumns,
    pad_rows,
)
from reshard.planning.packing import pack_regions, pack_schema, unpack_regions, unpack_schema
from reshard.plans.lazy_list import LazyList
from reshard.tensors.storages import MKLDNN

_KIND_OF = {WriteItemType.TENSOR: TENSOR, WriteItemType.SHARD: SHARD, WriteItemType.BYTE_IO: BYTES}
_TYPE_OF = {code: kind for kind, code in _KIND_OF.items()}

REQUIRES_GRAD, PINNED, NO_OFFSET = 1, 2, 4
"""Bits in the `flags` column; the last is about the item, not the tensor."""
_FORMATS = (
    torch.contiguous_format,
    torch.channels_last,
    torch.preserve_format,
    torch.channels_last_3d,
)
_FORMAT_SHIFT = 3
_LAYOUTS = (
    torch.strided,
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
    MKLDNN,
    torch.jagged,
)
_LAYOUT_SHIFT = 5


TensorRow: TypeAlias = tuple[str, torch.dtype | None, list[int], list[int], list[int]]
"""Name, dtype (None for a value), shape, offsets and sizes."""


def flags_of(properties: TensorProperties, has_offset: bool = True) -> int:
    """Everything about a tensor's properties but its dtype, in one number."""
    return (
        (REQUIRES_GRAD if properties.requires_grad else 0)
        | (PINNED if properties.pin_memory else 0)
        | (0 if has_offset else NO_OFFSET)
        | _FORMATS.index(properties.memory_format) << _FORMAT_SHIFT
        | _LAYOUTS.index(properties.layout) << _LAYOUT_SHIFT
    )


def properties_from(dtype: torch.dtype, flags: int) -> TensorProperties:
    """The inverse of `flags_of`."""
    return TensorProperties(
        dtype=dtype,
        layout=_LAYOUTS[flags >> _LAYOUT_SHIFT & 7],
        requires_grad=bool(flags & REQUIRES_GRAD),
        memory_format=_FORMATS[flags >> _FORMAT_SHIFT & 3],
        pin_memory=bool(flags & PINNED),
    )


class RowBuilder:
    """Collects items row by row and turns them into `WriteColumns` at once."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._codes: list[tuple[int, int, int]] = []
        self._shapes: list[Sequence[int]] = []
        self._offsets: list[Sequence[int]] = []
        self._sizes: list[Sequence[int]] = []
        self._hints: list[int] = []
        self._nbytes: list[int] = []
        self._aliases: list[int] = []

    def __len__(self) -> int:
        return len(self._names)

    def add_region(
        self,
        name: str,
        kind: int,
        dtype: torch.dtype,
        flags: int,
        shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        hint: int = -1,
        alias: int = -1,
    ) -> None:
        if len(shape) > MOST_DIMS:
            raise UnsupportedLayoutError(
                f"{name!r} has {len(shape)} dimensions, and {MOST_DIMS} can be stored. Reshape it"
            )
        self._names.append(name)
        self._codes.append((kind, DTYPE_CODES[dtype], flags))
        self._shapes.append(shape)
        self._offsets.append(offsets)
        self._sizes.append(sizes)
        self._hints.append(hint)
        self._nbytes.append(-1)
        self._aliases.append(alias)

    def add_value(self, name: str, nbytes: int = -1, hint: int = -1) -> None:
        self.add_region(name, BYTES, DTYPES[0], 0, (), (), (), hint)
        self._nbytes[-1] = nbytes

    def add_item(self, item: WriteItem) -> None:
        name, data = item.index.fqn, item.tensor_data
        hint = -1 if item.index.index is None else item.index.index
        if item.type is WriteItemType.BYTE_IO:
            known = item.bytes_io_data
            self.add_value(name, -1 if known is None else known.nbytes, hint)
            return
        if data is None or data.chunk is None:
            raise PlanError(
                f"the write item of {name!r} is a {item.type.name} without a region: set "
                "tensor_data with its chunk, properties and size"
            )
        offset, chunk = item.index.offset, data.chunk
        dims = len(data.size)
        if len(chunk.offsets) != dims or len(chunk.sizes) != dims:
            raise PlanError(
                f"the chunk of {name!r} has offsets {tuple(chunk.offsets)} and sizes "
                f"{tuple(chunk.sizes)}, but the tensor has {dims} dimensions"
            )
        if offset is not None and tuple(offset) != tuple(chunk.offsets):
            raise PlanError(
                f"the write item of {name!r} is indexed by offset {tuple(offset)} but its chunk "
                f"starts at {tuple(chunk.offsets)}: a load could not find it"
            )
        properties = data.properties
        self.add_region(
            name,
            _KIND_OF[item.type],
            properties.dtype,
            flags_of(properties, offset is not None),
            data.size,
            chunk.offsets,
            chunk.sizes,
            hint,
        )

    def build(self) -> WriteColumns:
        rows = len(self._names)
        width = max(1, max(map(len, self._shapes), default=1))
        codes = np.array(self._codes, dtype=np.uint8).reshape(rows, 3)
        schema = Schema(
            tuple(self._names),
            codes[:, 0],
            codes[:, 1],
            codes[:, 2],
            np.fromiter(map(len, self._shapes), dtype=np.uint8, count=rows),
            pad_rows(self._shapes, width, 1),
        )
        return WriteColumns(
            schema,
            pad_rows(self._offsets, width, 0),
            pad_rows(self._sizes, width, 1),
            np.array(self._hints, dtype=np.int64),
            np.array(self._nbytes, dtype=np.int64),
            np.array(self._aliases, dtype=np.int64),
        )


def write_columns(items: Sequence[WriteItem]) -> WriteColumns:
    """The columns of any sequence of items, without making objects if it has them."""
    if isinstance(items, WriteItems):
        return items.columns()
    builder = RowBuilder()
    for item in items:
        builder.add_item(item)
    return builder.build()


def untouched_items(items: Sequence[WriteItem]) -> WriteItems | None:
    """`items`, if they are columns of which no item was handed out."""
    return items if isinstance(items, WriteItems) and items.untouched else None


_ALL = slice(None)


class WriteItems(LazyList[WriteItem]):
    """Write items kept as columns.

    `rows` selects some of the rows of `base`; `hints`, if given, are the positions of
    the selected chunks in their tensors. So the answer to a rank's plan shares the
    columns of the plan itself.
    """

    def __init__(
        self, base: WriteColumns, rows: Ints | None = None, hints: Ints | None = None
    ) -> None:
        super().__init__()
        self.base = base
        self.rows = rows
        self.hints = hints

    def columns(self) -> WriteColumns:
        """These items as columns; made anew if items were handed out."""
        if not self.untouched:
            return self._from_items()
        if self.rows is None and self.hints is None:
            return self.base
        columns = self.base if self.rows is None else self.base.select(self.rows)
        if self.hints is None:
            return columns
        return dataclasses.replace(columns, hints=self.hints)

    def _from_items(self) -> WriteColumns:
        columns = write_columns(self._list())
        before = self.base if self.rows is None else self.base.select(self.rows)
        if columns.schema.names == before.schema.names:
            # Items do not say which share their memory; looking at them changes nothing.
            columns = dataclasses.replace(columns, aliases=before.aliases)
        return columns

    def _column_length(self) -> int:
        return len(self.base) if self.rows is None else len(self.rows)

    def _make_one(self, position: int) -> WriteItem:
        (row,) = self._rows(slice(position, position + 1))
        return _write_item(*row)

    def _make_all(self) -> list[WriteItem]:
        return [_write_item(*row) for row in self._rows()]

    def tensor_rows(self) -> Iterator[TensorRow]:
        """What the columns say of each item, without making items."""
        for name, kind, code, _, dims, shape, offsets, sizes, _, _ in self._rows():
            dtype = None if kind == BYTES else DTYPES[code]
            yield name, dtype, shape[:dims], offsets[:dims], sizes[:dims]

    def _rows(self, positions: slice = _ALL) -> Iterator[tuple[Any, ...]]:
        base, schema = self.base, self.base.schema
        rows = (np.arange(len(base)) if self.rows is None else self.rows)[positions]
        hints = base.hints[rows] if self.hints is None else self.hints[positions]
        return zip(
            map(schema.names.__getitem__, rows.tolist()),
            schema.kinds[rows].tolist(),
            schema.dtypes[rows].tolist(),
            schema.flags[rows].tolist(),
            schema.ndims[rows].tolist(),
            schema.shapes[rows].tolist(),
            base.offsets[rows].tolist(),
            base.sizes[rows].tolist(),
            hints.tolist(),
            base.nbytes[rows].tolist(),
            strict=True,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        columns = self.columns()
        return _unpack_write_items, (pack_schema(columns.schema), pack_regions(columns))


def _write_item(
    name: str,
    kind: int,
    dtype: int,
    flags: int,
    dims: int,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    hint: int,
    nbytes: int,
) -> WriteItem:
    index = None if hint < 0 else hint
    if kind == BYTES:
        known = None if nbytes < 0 else BytesIOWriteData(nbytes)
        return WriteItem(MetadataIndex(name, None, index), WriteItemType.BYTE_IO, known)
    offset = torch.Size(offsets[:dims])
    return WriteItem(
        MetadataIndex(name, None if flags & NO_OFFSET else offset, index),
        _TYPE_OF[kind],
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offset, torch.Size(sizes[:dims])),
            properties_from(DTYPES[dtype], flags),
            torch.Size(shape[:dims]),
        ),
    )


def _unpack_write_items(schema: bytes, regions: bytes) -> WriteItems:
    return WriteItems(unpack_regions(regions, unpack_schema(schema)))

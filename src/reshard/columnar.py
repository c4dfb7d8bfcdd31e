"""Items kept as columns: sequences of `WriteItem` and `ReadItem` that cost no objects.

The bridge between the contract, which speaks of items, and `planning`, which speaks of
columns. Both directions are here, and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from reshard.api import PlanError
from reshard.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from reshard.planner import (
    BytesIOWriteData,
    LoadItemType,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from reshard.planning.columns import (
    BYTES,
    DTYPE_CODES,
    DTYPES,
    SHARD,
    TENSOR,
    Ints,
    Schema,
    WriteColumns,
    pad_rows,
)
from reshard.planning.packing import (
    pack_array,
    pack_compressed,
    pack_placement,
    pack_schema,
    unpack_array,
    unpack_compressed,
    unpack_placement,
    unpack_schema,
)
from reshard.sequences import LazyList

__all__ = [
    "ChunkList",
    "ReadColumns",
    "ReadItems",
    "RowBuilder",
    "WriteItems",
    "chunk_columns",
    "flags_of",
    "properties_from",
    "properties_of",
    "stack_chunks",
    "write_columns",
]

_KIND_OF = {
    WriteItemType.TENSOR: TENSOR,
    WriteItemType.SHARD: SHARD,
    WriteItemType.BYTE_IO: BYTES,
}
_TYPE_OF = {code: kind for kind, code in _KIND_OF.items()}

REQUIRES_GRAD, PINNED, NO_OFFSET = 1, 2, 4
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
    torch._mkldnn,  # type: ignore[attr-defined]
    torch.jagged,
)
_LAYOUT_SHIFT = 5


def flags_of(properties: TensorProperties, has_offset: bool = True) -> int:
    """Everything about a tensor's properties but its dtype, in one number."""
    return (
        (REQUIRES_GRAD if properties.requires_grad else 0)
        | (PINNED if properties.pin_memory else 0)
        | (0 if has_offset else NO_OFFSET)
        | _FORMATS.index(properties.memory_format) << _FORMAT_SHIFT
        | _LAYOUTS.index(properties.layout) << _LAYOUT_SHIFT
    )


def properties_of(schema: Schema, row: int) -> TensorProperties:
    """The properties of the tensor that a row of a schema speaks of."""
    return properties_from(DTYPES[schema.dtypes[row]], int(schema.flags[row]))


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
        self._names.append(name)
        self._codes.append((kind, DTYPE_CODES[dtype], flags))
        self._shapes.append(shape)
        self._offsets.append(offsets)
        self._sizes.append(sizes)
        self._hints.append(hint)
        self._nbytes.append(-1)
        self._aliases.append(alias)

    def add_value(self, name: str, nbytes: int = -1, hint: int = -1) -> None:
        self._names.append(name)
        self._codes.append((BYTES, 0, 0))
        self._shapes.append(())
        self._offsets.append(())
        self._sizes.append(())
        self._hints.append(hint)
        self._nbytes.append(nbytes)
        self._aliases.append(-1)

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

    def make(self, position: int) -> WriteItem:
        """One item, to be looked at only: the columns go on to say everything."""
        return self._make_one(position)

    def _make_one(self, position: int) -> WriteItem:
        return self._make(slice(position, position + 1))[0]

    def _make_all(self) -> list[WriteItem]:
        return self._make(slice(None))

    def _make(self, positions: slice) -> list[WriteItem]:
        base, schema = self.base, self.base.schema
        rows = np.arange(len(base)) if self.rows is None else self.rows
        rows = rows[positions]
        hints = base.hints[rows] if self.hints is None else self.hints[positions]
        return [
            _write_item(schema.names[row], *columns)
            for row, *columns in zip(
                rows.tolist(),
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
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        columns = self.columns()
        return _unpack_write_items, (pack_schema(columns.schema), pack_placement(columns))


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


def _unpack_write_items(schema: bytes, placement: bytes) -> WriteItems:
    return WriteItems(unpack_placement(placement, unpack_schema(schema)))


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


def _shared_rows(
    lists: Sequence[Sequence[ChunkStorageMetadata]],
) -> tuple[Ints, Ints, Ints] | None:
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


@dataclass(frozen=True, eq=False)
class ReadColumns:
    """What one rank reads. Row `i` copies one region of one stored chunk.

    `names` holds each FQN once; `dest_names` and `storage_names` refer to it. `regions`
    has for each row five points: the start of the local shard in the tensor, of the
    region in that shard, of the stored chunk in the tensor, of the region in that
    chunk, and the lengths.
    """

    names: tuple[str, ...]
    dest_names: Ints
    storage_names: Ints
    is_value: Ints
    ndims: Ints
    dest_hints: Ints
    storage_hints: Ints
    regions: Ints

    def __len__(self) -> int:
        return len(self.dest_names)


class ReadItems(LazyList[ReadItem]):
    """Read items kept as columns."""

    def __init__(self, base: ReadColumns) -> None:
        super().__init__()
        self.base = base

    def _column_length(self) -> int:
        return len(self.base)

    def make(self, position: int) -> ReadItem:
        """One item, to be looked at only: the columns go on to say everything."""
        return self._make_one(position)

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
        (
            pack_compressed(columns.names),
            rows,
            pack_array(scalars),
            pack_array(flat),
        )
    )


def unpack_read_columns(data: bytes) -> ReadColumns:
    names, rows, scalars, flat = msgspec.msgpack.decode(data)
    regions = unpack_array(flat, rows).reshape(rows, 5, len(flat) // 5)
    return _read_columns_of(tuple(unpack_compressed(names)), unpack_array(scalars, rows), regions)


def _unpack_read_items(data: bytes) -> ReadItems:
    return ReadItems(unpack_read_columns(data))

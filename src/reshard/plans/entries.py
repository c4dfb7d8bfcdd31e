"""Metadata entries as views of a chunk table, and a chunk table of any metadata."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from reshard.planning.columns import DTYPE_CODES, DTYPES, ChunkTable, Ints, pad_rows
from reshard.planning.packing import pack_array, unpack_array
from reshard.plans.lazy_list import LazyList
from reshard.plans.lazy_record import lazy_fields
from reshard.plans.read_items import Casts
from reshard.plans.write_items import flags_of, properties_from


class ChunkList(LazyList[ChunkStorageMetadata]):
    """The chunks of one tensor: a view of a chunk table."""

    def __init__(self, table: ChunkTable, tensor: int) -> None:
        super().__init__()
        self.table = table
        self.tensor = tensor

    @property
    def _dims(self) -> int:
        return int(self.table.ndims[self.tensor])

    def columns(self) -> tuple[Ints, Ints]:
        """Offsets and sizes, if no chunk was handed out."""
        offsets, sizes = self.table.of(self.tensor)
        return offsets[:, : self._dims], sizes[:, : self._dims]

    def _column_length(self) -> int:
        return int(self.table.starts[self.tensor + 1] - self.table.starts[self.tensor])

    def _make_one(self, position: int) -> ChunkStorageMetadata:
        offsets, sizes = self.columns()
        return ChunkStorageMetadata(
            torch.Size(offsets[position].tolist()), torch.Size(sizes[position].tolist())
        )

    def __reduce__(self) -> tuple[Any, ...]:
        offsets, sizes = chunk_columns(self, self._dims)
        return _unpack_chunks, (len(offsets), pack_array(offsets), pack_array(sizes))


def _unpack_chunks(rows: int, offsets: Any, sizes: Any) -> ChunkList:
    one, dims = np.zeros(1, dtype=np.int64), len(offsets)
    return ChunkList(
        ChunkTable(
            names=("",),
            dtypes=one,
            flags=one,
            ndims=one + dims,
            shapes=np.ones((1, dims), dtype=np.int64),
            aliases=one - 1,
            starts=np.array([0, rows]),
            offsets=unpack_array(offsets, rows),
            sizes=unpack_array(sizes, rows),
        ),
        0,
    )


def chunk_columns(chunks: Sequence[ChunkStorageMetadata], dims: int) -> tuple[Ints, Ints]:
    """Offsets and sizes of any sequence of chunks of a tensor with `dims` dimensions."""
    if isinstance(chunks, ChunkList) and chunks.untouched:
        return chunks.columns()
    shape = (len(chunks), dims)
    return (
        np.array([tuple(chunk.offsets) for chunk in chunks], dtype=np.int64).reshape(shape),
        np.array([tuple(chunk.sizes) for chunk in chunks], dtype=np.int64).reshape(shape),
    )


@lazy_fields("properties", "size", "chunks", "alias_of")
class _TensorEntry(TensorStorageMetadata):
    """One tensor of a chunk table, not looked at yet."""

    def __init__(self, table: ChunkTable, tensor: int) -> None:
        self.table = table
        self.tensor = tensor

    def make(self) -> TensorStorageMetadata:
        table, tensor = self.table, self.tensor
        source = int(table.sources[tensor])
        return TensorStorageMetadata(
            properties_from(DTYPES[table.dtypes[tensor]], int(table.flags[tensor])),
            torch.Size(table.shape_of(tensor)),
            ChunkList(table, source),
            None if source == tensor else table.names[source],
        )


def make_entries(
    table: ChunkTable, values: Collection[str], order: Iterable[str] = ()
) -> dict[str, STORAGE_TYPES]:
    """The entries of metadata for tensors and values, in the given order as far as it goes."""
    entries: dict[str, STORAGE_TYPES] = {
        name: _TensorEntry(table, tensor) for tensor, name in enumerate(table.names)
    }
    for name in values:
        entries[name] = BytesStorageMetadata()
    ordered = {name: entries[name] for name in order if name in entries}
    return ordered | entries if ordered else entries


def _tensor_in(table: ChunkTable, name: str, entry: TensorStorageMetadata) -> int:
    """The tensor of `table` whose chunks an entry stands for; -1 if that is not certain.

    The entry may be a renamed copy of one of `table`, as long as its chunks are untouched.
    """
    if type(entry) is _TensorEntry:
        is_its = entry.table is table and table.names[entry.tensor] == name
        return entry.tensor if is_its else -1
    chunks = entry.chunks
    if not isinstance(chunks, ChunkList) or chunks.table is not table or not chunks.untouched:
        return -1
    tensor = chunks.tensor
    same = table.names[tensor] == (entry.alias_of or name) and entry.size == table.shape_of(tensor)
    return tensor if same else -1


class Located(NamedTuple):
    """Stored things and where they are in a chunk table: -1 for values.

    `storage_names` are the names that their data has in the checkpoint.
    """

    names: list[str]
    storage_names: list[str]
    table: ChunkTable
    tensors: Ints

    def casts_into(self, state_dict: Mapping[str, Any]) -> Casts:
        """The tensors that have another dtype in `state_dict`: as stored, and there."""
        is_tensor = self.tensors >= 0
        names = list(itertools.compress(self.names, is_tensor))
        stored = self.table.dtypes[self.tensors[is_tensor]]
        # Without a step of Python per tensor: there may be a million.
        values = map(state_dict.__getitem__, names)
        dtypes = map(getattr, values, itertools.repeat("dtype"), itertools.repeat(None))
        code_of: Callable[[Any, int], int] = DTYPE_CODES.get
        held = np.fromiter(map(code_of, dtypes, itertools.repeat(-1)), np.int64, len(names))
        differ = np.flatnonzero((held != stored) & (held >= 0) & (stored >= 0))
        return {names[i]: (DTYPES[stored[i]], DTYPES[held[i]]) for i in differ.tolist()}

    def shapes(self) -> Iterator[tuple[int, ...] | None]:
        """The shape of each tensor; None for values."""
        table, known = self.table, self.tensors >= 0
        rows = self.tensors[known]
        shapes = zip(table.shapes[rows].tolist(), table.ndims[rows].tolist(), strict=True)
        for is_tensor in known.tolist():
            if is_tensor:
                shape, dims = next(shapes)
                yield tuple(shape[:dims])
            else:
                yield None


def dtype_of(entry: TensorStorageMetadata) -> torch.dtype:
    """The dtype of an entry, without making its other fields."""
    if type(entry) is _TensorEntry:
        return DTYPES[int(entry.table.dtypes[entry.tensor])]
    return entry.properties.dtype


def locate(entries: Mapping[str, STORAGE_TYPES]) -> Located:
    """Find entries in the table that they are views of, or make one that they are in."""
    table: ChunkTable | None = None
    tensors: list[int] = []
    storage_names: list[str] = []
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata):
            tensors.append(-1)
            storage_names.append(entry.alias_of or name)
            continue
        if table is None:
            table = _table_of(entry)
        tensor = -1 if table is None else _tensor_in(table, name, entry)
        if table is None or tensor < 0:
            return _relocate(entries)
        tensors.append(tensor)
        storage_names.append(table.names[int(table.sources[tensor])])
    if table is None:
        return _relocate(entries)
    return Located(list(entries), storage_names, table, np.array(tensors, dtype=np.int64))


def _table_of(entry: TensorStorageMetadata) -> ChunkTable | None:
    if type(entry) is _TensorEntry:
        return entry.table
    return entry.chunks.table if isinstance(entry.chunks, ChunkList) else None


def _relocate(entries: Mapping[str, STORAGE_TYPES]) -> Located:
    """The same in a new table, in which every tensor has its own chunks."""
    tensors = {
        name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
    }
    row_of = {name: row for row, name in enumerate(tensors)}
    dtypes = [DTYPE_CODES.get(entry.properties.dtype, -1) for entry in tensors.values()]
    table = _new_table(tensors, [-1] * len(tensors))
    return Located(
        list(entries),
        [entry.alias_of or name for name, entry in entries.items()],
        dataclasses.replace(table, dtypes=np.array(dtypes, dtype=np.int64)),
        np.array([row_of.get(name, -1) for name in entries], dtype=np.int64),
    )


def values_of(metadata: Metadata) -> list[str]:
    """The names of what is not a tensor."""
    entries = metadata.state_dict_metadata
    return [name for name, entry in entries.items() if isinstance(entry, BytesStorageMetadata)]


def chunk_table(metadata: Metadata) -> ChunkTable:
    """The tensors of a checkpoint as columns: its own table if its entries are untouched."""
    tensors = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    first = next(iter(tensors.values()), None)
    if type(first) is _TensorEntry:
        table = first.table
        if len(table.names) == len(tensors) and all(
            type(entry) is _TensorEntry and _tensor_in(table, name, entry) >= 0
            for name, entry in tensors.items()
        ):
            return table
    row_of = {name: row for row, name in enumerate(tensors)}
    aliases = [
        -1 if entry.alias_of is None else row_of.get(entry.alias_of, -1)
        for entry in tensors.values()
    ]
    table = _new_table(tensors, aliases)
    properties = [entry.properties for entry in tensors.values()]
    dtypes = np.array([DTYPE_CODES[each.dtype] for each in properties], dtype=np.int64)
    flags = np.array([flags_of(each) for each in properties], dtype=np.int64)
    return dataclasses.replace(table, dtypes=dtypes, flags=flags)


def _new_table(tensors: Mapping[str, TensorStorageMetadata], aliases: Sequence[int]) -> ChunkTable:
    """A new table of entries of any kind, without dtypes. Aliases have no chunks of their own."""
    ndims = [len(entry.size) for entry in tensors.values()]
    width = max(1, max(ndims, default=1))
    parts = [
        chunk_columns(entry.chunks if alias < 0 else [], dims)
        for entry, alias, dims in zip(tensors.values(), aliases, ndims, strict=True)
    ]
    starts = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(offsets) for offsets, _ in parts], out=starts[1:])
    table = ChunkTable(
        names=list(tensors),
        dtypes=np.zeros(len(parts), dtype=np.int64),
        flags=np.zeros(len(parts), dtype=np.int64),
        ndims=np.array(ndims, dtype=np.int64),
        shapes=pad_rows([tuple(entry.size) for entry in tensors.values()], width, 1),
        aliases=np.array(aliases, dtype=np.int64),
        starts=starts,
        offsets=np.zeros((int(starts[-1]), width), dtype=np.int64),
        sizes=np.ones((int(starts[-1]), width), dtype=np.int64),
    )
    for row, (offsets, sizes) in enumerate(parts):
        own = table.of(row)
        own[0][:, : ndims[row]], own[1][:, : ndims[row]] = offsets, sizes
    return table

"""Metadata and manifest: what a checkpoint contains, as users see it and as it is stored."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from reshard.api import CheckpointException, CorruptCheckpointError
from reshard.format.manifest import Manifest, decode_manifest
from reshard.format.values import decode_value, encode_value, is_pickled
from reshard.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from reshard.planner import WriteItem
from reshard.planning.columns import DTYPE_CODES, DTYPES, Ints
from reshard.plans.chunk_lists import ChunkList
from reshard.plans.global_plan import ChunkTable, chunk_table
from reshard.plans.results import PlacedResult, Placement, WriteResults, WrittenFile
from reshard.plans.write_items import WriteItems, flags_of, properties_from, write_columns
from reshard.storage import StorageInfo, WriteResult
from reshard.tensors.paths import IntKey, PathMap, check_paths

__all__ = [
    "StorageTable",
    "check_readable",
    "merge_planner_data",
    "to_manifest",
    "to_metadata",
]


logger = logging.getLogger(__name__)


def to_manifest(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], notes: Mapping[str, str]
) -> Manifest:
    """The manifest of a checkpoint whose ranks wrote `results`."""
    table = chunk_table(metadata)
    tensor_ids = {name: row for row, name in enumerate(table.names)}
    values = [
        name
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, BytesStorageMetadata)
    ]
    value_ids = {name: len(tensor_ids) + row for row, name in enumerate(values)}
    # One row for each chunk and then each value; -1 says that nobody wrote it.
    n_chunks = len(table.chunks.offsets)
    first_rows = np.concatenate([table.chunks.starts[:-1], n_chunks + np.arange(len(values))])
    rows = np.full((n_chunks + len(values), 5), -1, dtype=np.int64)
    files: list[WrittenFile] = []
    ids = {**tensor_ids, **value_ids}
    known: dict[int, Ints] = {}
    for result in results:
        if isinstance(result, WriteResults) and result.untouched:
            placement = result.placement
            targets = _rows_of(result.items, ids, first_rows, known)
        else:
            placement = _placement_of(result)
            targets = _rows_of_results(result, metadata, ids, first_rows)
        rows[targets, 0] = placement.file_ids + len(files)
        rows[targets, 1] = placement.begins
        rows[targets, 2] = placement.nbytes
        rows[targets, 3] = placement.checksums
        rows[targets, 4] = placement.pickled
        files.extend(placement.files)
    unwritten = np.flatnonzero(rows[:, 0] < 0)
    if len(unwritten):
        owner = int(np.searchsorted(first_rows, unwritten[0], side="right")) - 1
        name = [*table.names, *values][owner]
        raise CheckpointException(
            f"no rank wrote all of {name!r}, although it was planned: the planner's finish_plan "
            "or the storage left items out"
        )
    return _assemble(metadata, table, rows, files, values, notes)


def _placement_of(results: Sequence[WriteResult]) -> Placement:
    """Where things were written, according to results that somebody has looked at."""
    placed = [result for result in results if isinstance(result, PlacedResult)]
    if len(placed) != len(results):
        raise CheckpointException(
            "finish() got results that this storage did not make. A subclass that overrides "
            "write_data must hand on what the base class returned"
        )
    files = list(dict.fromkeys(result.file for result in placed))
    number = {file: position for position, file in enumerate(files)}
    columns = [
        (number[r.file], r.storage_data.offset, r.storage_data.length, r.checksum, r.pickled)
        for r in placed
    ]
    return Placement(files, *np.array(columns, dtype=np.int64).reshape(len(placed), 5).T)


def _rows_of_results(
    results: Sequence[WriteResult], metadata: Metadata, ids: Mapping[str, int], first_rows: Ints
) -> Ints:
    """The row of each result in the table of chunks and values."""
    chunks: dict[str, dict[tuple[int, ...], int]] = {}
    rows = []
    for result in results:
        name, offset = result.index.fqn, result.index.offset
        entry = metadata.state_dict_metadata[name]
        row = 0
        if isinstance(entry, TensorStorageMetadata):
            if name not in chunks:
                places = enumerate(entry.chunks)
                chunks[name] = {tuple(chunk.offsets): place for place, chunk in places}
            row = chunks[name][tuple(offset or (0,) * len(entry.size))]
        rows.append(first_rows[ids[name]] + row)
    return np.array(rows, dtype=np.int64)


def _rows_of(
    items: Sequence[WriteItem], ids: Mapping[str, int], first_rows: Ints, known: dict[int, Ints]
) -> Ints:
    """The row of each item in the table of chunks and values."""
    if isinstance(items, WriteItems) and items.untouched:
        schema, selected, hints = items.base.schema, items.rows, items.hints
        name_ids = known.get(id(schema))
        if name_ids is None:
            name_ids = np.fromiter(
                (ids.get(name, -1) for name in schema.names), np.int64, len(schema)
            )
            known[id(schema)] = name_ids
        if selected is not None:
            name_ids = name_ids[selected]
        if hints is None:
            hints = items.base.hints if selected is None else items.base.hints[selected]
    else:
        columns = write_columns(items)
        name_ids = np.fromiter((ids[name] for name in columns.schema.names), np.int64, len(columns))
        hints = columns.hints
    return first_rows[name_ids] + np.maximum(hints, 0)


def _assemble(
    metadata: Metadata,
    table: ChunkTable,
    rows: Ints,
    files: Sequence[WrittenFile],
    values: Sequence[str],
    notes: Mapping[str, str],
) -> Manifest:
    n_chunks = len(table.chunks.offsets)
    tensors: dict[str, TensorStorageMetadata] = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    # Names that share the data of another come last: they have no chunks of their own.
    aliases = [name for name, entry in tensors.items() if entry.alias_of is not None]
    names = [*table.names, *aliases]
    position = {name: row for row, name in enumerate(names)}
    width = table.chunks.shapes.shape[1]
    shapes = np.ones((len(names), width), dtype=np.int64)
    shapes[: len(table.names)] = table.chunks.shapes
    for name in aliases:
        shapes[position[name]] = shapes[position[str(tensors[name].alias_of)]]
    return Manifest(
        files=[file.path for file in files],
        file_sizes=np.array([file.nbytes for file in files], dtype=np.int64),
        header_sizes=np.array([file.header_nbytes for file in files], dtype=np.int64),
        header_checksums=np.array([file.header_checksum for file in files], dtype=np.int64),
        tensor_names=names,
        dtypes=np.array([DTYPE_CODES[tensors[n].properties.dtype] for n in names], dtype=np.int64),
        flags=np.array([flags_of(tensors[n].properties) for n in names], dtype=np.int64),
        ndims=np.array([len(tensors[name].size) for name in names], dtype=np.int64),
        shapes=shapes,
        aliases=np.array(
            [-1] * len(table.names) + [position[str(tensors[name].alias_of)] for name in aliases],
            dtype=np.int64,
        ),
        chunk_starts=np.concatenate(
            [table.chunks.starts, np.full(len(aliases), n_chunks, dtype=np.int64)]
        ),
        chunk_offsets=table.chunks.offsets,
        chunk_sizes=table.chunks.sizes,
        chunk_files=rows[:n_chunks, 0],
        chunk_begins=rows[:n_chunks, 1],
        chunk_checksums=rows[:n_chunks, 3],
        value_names=values,
        value_files=rows[n_chunks:, 0],
        value_begins=rows[n_chunks:, 1],
        value_nbytes=rows[n_chunks:, 2],
        value_checksums=rows[n_chunks:, 3],
        value_pickled=rows[n_chunks:, 4],
        planner_data=_pack_planner_data(metadata.planner_data),
        notes=notes,
    )


_PATHS, _VALUE = b"N", b"V"


def _pack_planner_data(data: Any) -> bytes:
    """How names nest, or what a planner of the user's keeps there."""
    if data is None:
        return b""
    if type(data) is PathMap and data.is_regular:
        return _PATHS + data.pack()
    encoded = encode_value(_without_own_types(data))
    if is_pickled(encoded):
        logger.warning(
            "the planner_data of the checkpoint, a %s, can only be stored as a pickle, which a "
            "reader leaves closed unless it allows pickles",
            type(data).__name__,
        )
    return _VALUE + encoded


def _without_own_types(data: Any) -> Any:
    """What users may have put paths of ours into, with plain dicts and texts in their place."""
    if isinstance(data, IntKey):
        return str(data)
    if type(data) in (dict, PathMap):
        return {_without_own_types(k): _without_own_types(v) for k, v in data.items()}
    if type(data) in (list, tuple):
        return type(data)(map(_without_own_types, data))
    return data


def _unpack_planner_data(data: bytes, where: str, allow_pickle: bool) -> Any:
    if not data:
        return None
    if data[:1] == _PATHS:
        try:
            paths = PathMap.unpack(data[1:])
            check_paths(paths)
            return paths
        except (ValueError, msgspec.DecodeError) as error:
            raise CorruptCheckpointError(f"{where} has damaged names: {error}") from error
    if is_pickled(data[1:]) and not allow_pickle:
        # Kept closed rather than refused: a load may not need it.
        return None
    return decode_value(data[1:], "planner_data", allow_pickle)


def merge_planner_data(parts: Sequence[bytes], where: str) -> bytes:
    """How the names of several manifests nest; what planners of users kept is the first's."""
    if not all(part[:1] == _PATHS for part in parts):
        return parts[0]
    merged = PathMap()
    for part in parts:
        merged.add(_unpack_planner_data(part, where, allow_pickle=False))
    return _pack_planner_data(merged)


def check_readable(encoded: bytes, where: str) -> None:
    """Raise what a reader of the encoded manifest would: for a save, before it commits."""
    manifest = decode_manifest(encoded, where)
    _unpack_planner_data(manifest.planner_data, where, allow_pickle=False)


def to_metadata(manifest: Manifest, where: str, allow_pickle: bool = False) -> Metadata:
    """What a stored checkpoint contains. Chunks are made when somebody looks at them."""
    m = manifest
    entries: dict[str, STORAGE_TYPES] = {}
    starts, aliases, ndims = m.chunk_starts.tolist(), m.aliases.tolist(), m.ndims.tolist()
    dtypes, flags, shapes = m.dtypes.tolist(), m.flags.tolist(), m.shapes.tolist()
    for row, name in enumerate(m.tensor_names):
        source = row if aliases[row] < 0 else aliases[row]
        chunks, dims = slice(starts[source], starts[source + 1]), ndims[row]
        entries[name] = TensorStorageMetadata(
            properties_from(DTYPES[dtypes[row]], flags[row]),
            torch.Size(shapes[row][:dims]),
            ChunkList(m.chunk_offsets[chunks], m.chunk_sizes[chunks], dims=dims),
            None if source == row else m.tensor_names[source],
        )
    for name in m.value_names:
        entries[name] = BytesStorageMetadata()
    planner_data = _unpack_planner_data(m.planner_data, where, allow_pickle)
    if isinstance(planner_data, PathMap):
        # Names in the order in which they were saved.
        order = {name: None for name in planner_data if name in entries}
        entries = {name: entries[name] for name in itertools.chain(order, entries)}
    return Metadata(
        entries,
        planner_data=planner_data,
        storage_data=StorageTable(m),
        version=m.notes.get("version"),
    )


class StorageTable(Mapping[MetadataIndex, StorageInfo]):
    """Where each chunk and value lies: a view of the manifest, looked up on demand."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.tensor_rows = {name: row for row, name in enumerate(manifest.tensor_names)}
        self.value_rows = {name: row for row, name in enumerate(manifest.value_names)}
        self._starts: list[int] = manifest.chunk_starts.tolist()
        self._aliases: list[int] = manifest.aliases.tolist()
        self._ndims: list[int] = manifest.ndims.tolist()
        self._dtypes: list[torch.dtype] = [DTYPES[code] for code in manifest.dtypes.tolist()]

    def dtype_of(self, fqn: str) -> torch.dtype:
        return self._dtypes[self.tensor_rows[fqn]]

    def first_chunk(self, fqn: str) -> int:
        """The row of the first chunk of a tensor; far below zero if there is none."""
        tensor = self.tensor_rows.get(fqn)
        if tensor is None:
            return -(1 << 62)
        return self._starts[tensor if self._aliases[tensor] < 0 else self._aliases[tensor]]

    def chunk_row(self, index: MetadataIndex) -> int:
        """The row of a chunk in the manifest; KeyError if there is none."""
        m, tensor = self.manifest, self.tensor_rows[index.fqn]
        if self._aliases[tensor] >= 0:
            tensor = self._aliases[tensor]
        begin, end, dims = self._starts[tensor], self._starts[tensor + 1], self._ndims[tensor]
        wanted = (0,) * dims if index.offset is None else tuple(index.offset)
        if len(wanted) == dims:
            if index.index is not None and 0 <= index.index < end - begin:
                guess = begin + index.index
                if tuple(m.chunk_offsets[guess, :dims].tolist()) == wanted:
                    return guess
            found = np.flatnonzero((m.chunk_offsets[begin:end, :dims] == wanted).all(axis=1))
            if len(found):
                return begin + int(found[0])
        raise KeyError(index)

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        m = self.manifest
        value = self.value_rows.get(index.fqn)
        if value is not None:
            path = m.files[int(m.value_files[value])]
            return StorageInfo(path, int(m.value_begins[value]), int(m.value_nbytes[value]))
        row = self.chunk_row(index)
        tensor = int(np.searchsorted(m.chunk_starts, row, side="right")) - 1
        nbytes = int(m.chunk_sizes[row].prod()) * DTYPES[m.dtypes[tensor]].itemsize
        return StorageInfo(m.files[int(m.chunk_files[row])], int(m.chunk_begins[row]), nbytes)

    def __iter__(self) -> Iterator[MetadataIndex]:
        m = self.manifest
        for tensor, name in enumerate(m.tensor_names):
            begin, end, dims = m.chunk_starts[tensor], m.chunk_starts[tensor + 1], m.ndims[tensor]
            for hint, offsets in enumerate(m.chunk_offsets[begin:end, :dims].tolist()):
                yield MetadataIndex(name, offsets, hint)
        for name in m.value_names:
            yield MetadataIndex(name)

    def __len__(self) -> int:
        return len(self.manifest.chunk_files) + len(self.manifest.value_names)

    def __repr__(self) -> str:
        m = self.manifest
        return (
            f"<StorageTable of {len(m.chunk_files)} chunks and {len(m.value_names)} values in "
            f"{len(m.files)} files>"
        )

"""Checkpoints of `torch.distributed.checkpoint`: a pickle of metadata beside `.distcp` files.

The metadata is read as data, never run. Where the elements of a tensor lie in its record is
found out when it is read: see `reshard.checkpoint.torch_records`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NoReturn, TypeGuard

import torch

from reshard.api import (
    CheckpointException,
    CorruptCheckpointError,
    UnsafeValueError,
    UnsupportedFormatError,
)
from reshard.checkpoint.directory import MANIFEST
from reshard.checkpoint.planner_data import merge_planner_data, pack_planner_data
from reshard.checkpoint.torch_records import RECORD, SAFETENSORS_RECORD
from reshard.engine.collector import paused_collection
from reshard.foreign.tables import ForeignChunk, ForeignTable, ForeignTensor, ForeignValue
from reshard.format.checks import check_dtypes, check_manifest
from reshard.format.merging import merge_manifests
from reshard.format.pickles import Record, Unknown, maker_of, read_pickle
from reshard.format.tables import DCP, Manifest
from reshard.format.torch_zip import TORCH_TABLE
from reshard.plans.write_items import PINNED, REQUIRES_GRAD
from reshard.stores.protocol import Store
from reshard.tensors.paths import PathMap

logger = logging.getLogger(__name__)

_PICKLE = b"\x80"
_PART = re.compile(r"__(\d{1,9})\.metadata")
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")
"""What DCP itself calls its files. Those of our saves have an id in their names."""
_MOST_POSITION = 1 << 62


def read(store: Store, key: str, limit_bytes: int) -> Manifest:
    """What a checkpoint holds, by the metadata in the file `key`."""
    return _read_part(store, key, limit_bytes).to_manifest(store.location, shared_bytes=True)


def part_keys(keys: Sequence[str]) -> list[str]:
    """The metadata of each rank, of a save without collectives; empty if there is none."""
    ranks = {int(match[1]): key for key in keys if (match := _PART.fullmatch(key))}
    return [ranks[rank] for rank in sorted(ranks)] if 0 in ranks else []


def read_parts(store: Store, keys: Sequence[str], limit_bytes: int) -> Manifest:
    """What ranks hold together that saved without collectives."""
    for rank, key in enumerate(keys):
        if key != f"__{rank}.metadata":
            raise CorruptCheckpointError(
                f"the checkpoint at {store.location} lacks '__{rank}.metadata', what rank {rank} "
                "saved. Fetch that file too, with its data files"
            )
    parts = [read(store, key, limit_bytes) for key in keys]
    merged = dataclasses.replace(
        merge_manifests(parts, store.location),
        kind=DCP,
        planner_data=merge_planner_data([part.planner_data for part in parts], store.location),
    )
    check_manifest(merged, store.location, shared_bytes=True)
    return merged


def replaceable_files(store: Store, limit_bytes: int) -> list[str]:
    """The files of a checkpoint that DCP wrote, besides `.metadata`, for whoever replaces it.

    Only those that its metadata refers to and that have the names that DCP gives. None if the
    metadata cannot be read.
    """
    keys = set(store.list())
    if not any(map(_DATA_FILE.fullmatch, keys)):
        return []
    parts = part_keys(sorted(keys))
    try:
        tables = [
            _read_part(store, key, limit_bytes)
            for key in (MANIFEST, *parts)
            if key in keys and is_pickle(store, key)
        ]
    except (CheckpointException, OSError) as error:
        logger.warning("files of an older checkpoint stay at %s: %s", store.location, error)
        return []
    files = {file for table in tables for file in table.files if _DATA_FILE.fullmatch(file)}
    return sorted(files & keys) + parts


def is_pickle(store: Store, key: str) -> bool:
    """Whether a file begins as the metadata of DCP does."""
    with closing(store.open_reader(key)) as reader:
        start = bytearray(min(1, reader.nbytes))
        reader.read_into(0, [memoryview(start)] if start else [])
    return bytes(start) == _PICKLE


def _read_part(store: Store, key: str, limit_bytes: int) -> ForeignTable:
    where = f"{key} of {store.location}"
    with closing(store.open_reader(key)) as reader:
        if reader.nbytes > limit_bytes:
            raise UnsupportedFormatError(
                f"{where} is {reader.nbytes} bytes long, and the limit is {limit_bytes}. If you "
                "trust where it comes from, pass a storage_reader with "
                f"manifest_limit_bytes={reader.nbytes} or more"
            )
        data = bytearray(reader.nbytes)
        reader.read_into(0, [memoryview(data)] if data else [])
    with paused_collection():
        metadata = read_pickle(bytes(data), _TABLE, where, keep_unknown=True)
        return _Reading(where).convert(metadata)


class _Reading:
    """Turns the metadata of one file into a table."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._files: dict[str, int] = {}
        self._codecs: dict[str, int] = {}

    def convert(self, metadata: Any) -> ForeignTable:
        fields = self._fields(metadata, _METADATA)
        entries = self._mapping(fields, "state_dict_metadata")
        places = self._places(self._mapping(fields, "storage_data"))
        # Positions of files in the table, in the order in which they are first seen.
        ends: dict[str, int] = {}
        tensors, values = [], []
        for name, entry in entries.items():
            if type(name) is not str:
                self._malformed(f"the key {name!r}")
            kind = entry.kind if type(entry) is Record else None
            if kind == _BYTES:
                values.append(self._value(name, places, ends))
            elif kind == _TENSOR and self._is_unusual(entry):
                # Not in bytes that could be cut: torch reads it as a whole, and runs no code.
                values.append(self._value(name, places, ends, _only_offsets(entry)))
            elif kind == _TENSOR:
                tensors.append(self._tensor(name, entry, places, ends))
            else:
                self._refuse(f"as the entry of {name!r}", entry)
        return ForeignTable(
            DCP,
            ends,
            self._tie(tensors),
            values,
            list(self._codecs),
            self._planner_data(fields.get("planner_data")),
            self._notes(fields.get("storage_meta")),
        )

    def _places(self, storage_data: Mapping[Any, Any]) -> dict[Any, dict[str, Any]]:
        """Where each chunk lies, by name and offsets, and each value, by name."""
        places: dict[Any, dict[str, Any]] = {}
        for index, info in storage_data.items():
            if type(index) is not Record or index.kind != _INDEX or type(index.state) is not dict:
                self._refuse("as a key of its storage data", index)
            if type(info) is not Record or info.kind != _INFO or type(info.state) is not dict:
                self._refuse("in its storage data", info)
            name, offset = index.state.get("fqn"), index.state.get("offset")
            if type(name) is not str or type(offset) not in (tuple, type(None)):
                self._malformed(f"the index {name!r} at {offset!r}")
            # A scalar is no different from a value: its offset has no numbers.
            places[name, offset or ()] = info.state
        return places

    def _tensor(
        self, name: str, entry: Record, places: Mapping[Any, dict[str, Any]], ends: dict[str, int]
    ) -> ForeignTensor:
        fields = self._fields(entry, _TENSOR)
        dtype, flags = self._properties(name, fields.get("properties"))
        shape, chunks = fields.get("size"), fields.get("chunks")
        if not _are_ints(shape) or type(chunks) is not list:
            self._malformed(f"the size {shape!r} of {name!r}, or its chunks")
        found: dict[tuple[int, ...], ForeignChunk] = {}
        for chunk in chunks:
            state = chunk.state if type(chunk) is Record and chunk.kind == _CHUNK else None
            offsets, sizes = (
                (state.get("offsets"), state.get("sizes")) if type(state) is dict else (None, None)
            )
            if (
                not _are_ints(offsets)
                or not _are_ints(sizes)
                or not len(offsets) == len(sizes) == len(shape)
            ):
                self._malformed(f"a chunk of {name!r}: {offsets!r}, {sizes!r}")
            if offsets in found and 0 not in found[offsets].sizes:
                if 0 not in sizes and found[offsets].sizes != sizes:
                    self._malformed(f"two chunks of {name!r} that begin at {offsets}")
                continue
            place = places.get((name, offsets))
            if place is None and not any(offsets):
                place = places.get((name, ()))
            if place is None:
                raise CorruptCheckpointError(
                    f"{self._where} does not say where the chunk of {name!r} at {offsets} is stored"
                )
            content_nbytes = math.prod(sizes) * dtype.itemsize
            found[offsets] = ForeignChunk(
                offsets, sizes, *self._place(name, place, ends, content_nbytes)
            )
        full = [chunk for chunk in found.values() if 0 not in chunk.sizes]
        return ForeignTensor(name, dtype, shape, full or list(found.values())[:1], flags)

    def _tie(self, tensors: Sequence[ForeignTensor]) -> list[ForeignTensor]:
        """The same, with names of the same records as names of one tensor.

        DCP stores tied weights once for each name; what we write for it stores them once.
        """
        blob = self._codecs.get(SAFETENSORS_RECORD)
        firsts: dict[tuple[int, int], int] = {}
        tied: list[ForeignTensor] = []
        for row, tensor in enumerate(tensors):
            tied.append(tensor)
            # In a blob the name tells which record it is.
            places = [
                (chunk.file, chunk.begin)
                for chunk in tensor.chunks
                if chunk.codec != blob and 0 not in chunk.sizes
            ]
            if places:
                same = firsts.setdefault(min(places), row)
                if same != row and _is_same(tensor, tensors[same]):
                    tied[-1] = tensor._replace(chunks=(), alias_of=same)
        return tied

    def _value(
        self,
        name: str,
        places: Mapping[Any, dict[str, Any]],
        ends: dict[str, int],
        offsets: tuple[int, ...] = (),
    ) -> ForeignValue:
        place = places.get((name, offsets)) or places.get((name, ()))
        if place is None:
            raise CorruptCheckpointError(
                f"{self._where} does not say where the value {name!r} is stored"
            )
        return ForeignValue(name, *self._place(name, place, ends, None))

    def _place(
        self, name: str, place: dict[str, Any], ends: dict[str, int], content_nbytes: int | None
    ) -> tuple[int, int, int, int]:
        """The file, where the record begins, its length and codec."""
        path, begin, length = (
            place.get("relative_path"),
            place.get("offset"),
            place.get("length"),
        )
        if (
            type(path) is not str
            or type(begin) is not int
            or type(length) is not int
            or not 0 <= begin <= begin + length < _MOST_POSITION
        ):
            self._malformed(f"the place of {name!r}: {path!r}, {begin!r}, {length!r}")
        number = self._files.setdefault(path, len(self._files))
        # That a file has all of it is known when it is opened.
        ends[path] = max(ends.get(path, 0), begin + length)
        return number, begin, length, self._codec(name, place, length, content_nbytes)

    def _codec(
        self, name: str, place: dict[str, Any], length: int, content_nbytes: int | None
    ) -> int:
        descriptors = place.get("transform_descriptors") or ()
        if type(descriptors) not in (tuple, list) or not all(
            type(each) is str and each and "," not in each for each in descriptors
        ):
            self._malformed(f"the extensions of {name!r}: {descriptors!r}")
        if content_nbytes is None:
            codec = ",".join(descriptors)
            if not codec:
                return 0
        elif content_nbytes == length:
            # Nothing else is as long as its content: then all tensors of a file are in one blob.
            codec = SAFETENSORS_RECORD
        else:
            if content_nbytes > length and not descriptors:
                raise CorruptCheckpointError(
                    f"{self._where} gives a chunk of {name!r} {length} bytes, but it has "
                    f"{content_nbytes}"
                )
            codec = ",".join((RECORD, *descriptors))
        return self._codecs.setdefault(codec, len(self._codecs) + 1)

    def _is_unusual(self, entry: Record) -> bool:
        """Whether an entry is of a tensor that is sparse or quantised, and stored as one chunk."""
        fields = self._fields(entry, _TENSOR)
        properties, chunks = fields.get("properties"), fields.get("chunks")
        state = properties.state if type(properties) is Record else None
        if type(state) is not tuple or len(state) < 2 or type(chunks) is not list:
            return False
        dtype, layout = state[:2]
        is_sparse = type(layout) is str and layout.startswith("torch.sparse_")
        return len(chunks) == 1 and (is_sparse or dtype in _QUANTISED)

    def _properties(self, name: str, properties: Any) -> tuple[torch.dtype, int]:
        if type(properties) is not Record or properties.kind != _PROPERTIES:
            self._refuse(f"as the properties of {name!r}", properties)
        state = properties.state
        if type(state) is dict:
            state = tuple(state.get(field) for field in _PROPERTY_FIELDS)
        if type(state) is not tuple or not state or type(state[0]) is not torch.dtype:
            self._malformed(f"the properties of {name!r}")
        check_dtypes([str(state[0]).removeprefix("torch.")], f"{name!r} in {self._where}")
        needs_grad, pinned = True in state[2:3], True in state[4:5]
        return state[0], (REQUIRES_GRAD if needs_grad else 0) | (PINNED if pinned else 0)

    def _planner_data(self, data: Any) -> bytes:
        """How names nest. What custom planners keep stays closed."""
        if data is None:
            return b""
        paths = PathMap(_paths(data))
        if not isinstance(data, dict) or len(paths) != len(data):
            logger.info(
                "%s has planner_data of a custom planner, which is left closed", self._where
            )
            return b""
        return pack_planner_data(paths)

    def _notes(self, storage_meta: Any) -> dict[str, str]:
        state = storage_meta.state if type(storage_meta) is Record else None
        save_id = state.get("save_id") if type(state) is dict else None
        return {"save_id": save_id} if type(save_id) is str else {}

    def _fields(self, record: Any, kind: str) -> dict[str, Any]:
        if type(record) is not Record or record.kind != kind:
            self._refuse(f"in place of {kind}", record)
        if type(record.state) is not dict:
            self._malformed(f"a {kind} without fields")
        return record.state

    def _mapping(self, fields: Mapping[str, Any], name: str) -> Mapping[Any, Any]:
        found = fields.get(name)
        if not isinstance(found, dict):
            self._refuse(f"as its {name}", found)
        return found

    def _refuse(self, what: str, found: Any) -> NoReturn:
        """Something else than expected, which may be what only code could make."""
        if type(found) is Unknown:
            raise UnsafeValueError(
                f"{self._where} asks for {found.name} {what}, which is not part of the metadata "
                "of a checkpoint. Nothing was run. If you trust where it comes from, load it with "
                "torch.distributed.checkpoint and save it with reshard"
            )
        self._malformed(f"a {type(found).__name__} {what}")

    def _malformed(self, what: str) -> NoReturn:
        raise CorruptCheckpointError(
            f"{self._where} is not metadata of torch.distributed.checkpoint: it has {what[:200]}. "
            "Load another checkpoint"
        )


def _is_same(one: ForeignTensor, other: ForeignTensor) -> bool:
    return (one.dtype, one.shape, {*one.chunks}) == (other.dtype, other.shape, {*other.chunks})


def _only_offsets(entry: Record) -> tuple[int, ...]:
    (chunk,) = entry.state["chunks"]
    state = chunk.state if type(chunk) is Record else None
    offsets = state.get("offsets") if type(state) is dict else None
    return offsets if _are_ints(offsets) else ()


def _are_ints(numbers: Any) -> TypeGuard[tuple[int, ...]]:
    return type(numbers) is tuple and _INTS.issuperset(map(type, numbers))


_INTS = frozenset({int})
_QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def _paths(data: Any) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    for name, path in data.items() if isinstance(data, dict) else ():
        if (
            type(name) is str
            and type(path) is tuple
            and path
            and all(type(part) in (str, int) for part in path)
        ):
            yield name, path


# What the metadata may hold, under the names that any release of torch pickled

_METADATA, _TENSOR, _BYTES = "Metadata", "TensorStorageMetadata", "BytesStorageMetadata"
_CHUNK, _INDEX, _INFO = "ChunkStorageMetadata", "MetadataIndex", "_StorageInfo"
_PROPERTIES = "TensorProperties"
_PROPERTY_FIELDS = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
_HOMES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.checkpoint.metadata",
    "torch.distributed._shard.sharded_tensor.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.checkpoint.filesystem",
)
_CLASSES = {
    **{
        name: name
        for name in (_METADATA, _TENSOR, _BYTES, _CHUNK, _INDEX, _INFO, _PROPERTIES, "StorageMeta")
    },
    "_MEM_FORMAT_ENCODING": "memory format",
    "MEM_FORMAT_ENCODING": "memory format",
}
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")
_TABLE = {
    **TORCH_TABLE,
    **{(home, name): maker_of(kind) for home in _HOMES for name, kind in _CLASSES.items()},
    **{(home, name): maker_of("path") for home in ("pathlib", "pathlib._local") for name in _PATHS},
}

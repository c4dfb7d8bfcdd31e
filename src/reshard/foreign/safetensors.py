"""Directories of safetensors files: those of Hugging Face, and those that DCP writes for it.

A file may hold tensors whole, or regions of them: then its notes say where each begins.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import msgspec

from reshard.api import CorruptCheckpointError, UnsupportedFormatError
from reshard.foreign.tables import ForeignChunk, ForeignTable, ForeignTensor
from reshard.format.checks import is_plain_path
from reshard.format.container import (
    MOST_PLAIN_HEADER_BYTES,
    parse_header,
    read_header,
)
from reshard.format.plain_dtypes import PLAIN_DTYPES, torch_shape
from reshard.format.tables import SAFETENSORS, Manifest
from reshard.stores.protocol import Store

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
SHARDING_NOTE = "DCP_SHARDING_INFO"
"""The note that says where the regions in a file begin, as JSON."""
OFFSETS_FIELD = "saved_offsets"
VERSION_NOTE = "DCP_VERSION"

_INDEX = re.compile(r".+\.safetensors\.index\.json")
_MOST_INDEX_BYTES = 256 << 20


def file_name(number: int, count: int, shard: int | None = None) -> str:
    """How the file with a number, of `count`, is called; counted from 1, and so are shards."""
    prefix = "" if shard is None else f"shard-{shard:05d}-"
    return f"{prefix}model-{number:05d}-of-{count:05d}{SUFFIX}"


def read_directory(store: Store, keys: Sequence[str]) -> Manifest:
    """What the safetensors files among `keys` hold: those that an index names, if there is one."""
    found = sorted(key for key in keys if key.endswith(SUFFIX) and is_plain_path(key))
    indexes = [key for key in keys if _INDEX.fullmatch(key)]
    index = INDEX if INDEX in indexes else indexes[0] if len(indexes) == 1 else None
    if index is None:
        # Some directories hold the same tensors twice, as `consolidated.safetensors`.
        found.sort(key=lambda path: not path.startswith("model"))
        return _read(store, dict.fromkeys(found), None)
    return _read(store, *_read_index(store, index))


def read_file(store: Store, key: str) -> Manifest:
    """What one safetensors file holds."""
    return _read(store, {key: None}, None)


def read_files(store: Store, keys: Sequence[str]) -> Manifest:
    """What some safetensors files hold, whatever an index says."""
    return _read(store, dict.fromkeys(keys), None)


def _read(
    store: Store, paths: Mapping[str, None], weight_map: Mapping[str, str] | None
) -> Manifest:
    files: dict[str, int] = {}
    ties: dict[str, str] = {}
    tensors: dict[str, ForeignTensor] = {}
    for number, path in enumerate(paths):
        where = f"{path!r} of {store.location}"
        for name, tensor, is_part in _tensors_in(store, path, number, files, ties, where):
            if weight_map is not None and weight_map.get(name) != path:
                continue
            if name not in tensors:
                tensors[name] = tensor
            elif is_part:
                tensors[name] = _join(tensors[name], tensor, where)
            elif path.startswith("model") or not _is_of_model(tensors[name], paths):
                first = [*paths][tensors[name].chunks[0].file]
                raise CorruptCheckpointError(
                    f"{first!r} and {path!r} of {store.location} both hold {name!r}, and no index "
                    "says which of them counts. Remove the one that is not wanted"
                )
    for name, path in (weight_map or {}).items():
        if name not in tensors:
            raise CorruptCheckpointError(
                f"the index of {store.location} places {name!r} in {path!r}, which does not hold "
                "it. Fetch the directory again, all of it from one version"
            )
    table = ForeignTable(SAFETENSORS, files, [*tensors.values(), *_tied(ties, tensors)])
    return table.to_manifest(store.location)


def _tied(ties: Mapping[str, str], tensors: Mapping[str, ForeignTensor]) -> Iterator[ForeignTensor]:
    """Other names of tensors, under which they are not stored."""
    rows = {name: row for row, name in enumerate(tensors)}
    for name, kept in ties.items():
        if name not in tensors and kept in tensors:
            yield tensors[kept]._replace(name=name, chunks=[], alias_of=rows[kept])


def _is_of_model(tensor: ForeignTensor, paths: Mapping[str, None]) -> bool:
    """Whether a tensor lies in a file that other files only repeat."""
    return [*paths][tensor.chunks[0].file].startswith("model")


def _read_index(store: Store, key: str) -> tuple[Mapping[str, None], Mapping[str, str]]:
    """The files that an index names, and in which of them each tensor is."""
    where = f"{key!r} of {store.location}"
    with closing(store.open_reader(key)) as reader:
        if reader.nbytes > _MOST_INDEX_BYTES:
            raise CorruptCheckpointError(
                f"{where} has {reader.nbytes} bytes, too many for an index"
            )
        text = bytearray(reader.nbytes)
        reader.read_into(0, [memoryview(text)] if text else [])
    try:
        weight_map = msgspec.json.decode(bytes(text), type=_Index).weight_map
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{where} is malformed: {error}") from error
    _refuse_duplicates(bytes(text), where)
    for path in {*weight_map.values()}:
        if not is_plain_path(path):
            raise CorruptCheckpointError(
                f"{where} names the file {path!r}, which is not inside the directory"
            )
    return dict.fromkeys(sorted({*weight_map.values()})), weight_map


def _refuse_duplicates(text: bytes, where: str) -> None:
    """Refuse sound JSON in which a name stands twice: readers would disagree about it."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) != len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise CorruptCheckpointError(f"{where} says two things of {twice!r}")

    try:
        json.loads(text, object_pairs_hook=check)
    except CorruptCheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where} is malformed: {error}") from error


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _tensors_in(
    store: Store, path: str, number: int, files: dict[str, int], ties: dict[str, str], where: str
) -> Iterator[tuple[str, ForeignTensor, bool]]:
    """Each tensor of a file, and whether it may be a part of a larger one.

    Adds the size of the file to `files`, and to `ties` the names that its notes give to tensors
    besides their own, as `safetensors.torch.save_model` does.
    """
    try:
        opened = store.open_reader(path)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"the index of {store.location} names {path!r}, which is not there. Fetch that file too"
        ) from error
    with closing(opened) as reader:
        files[path] = reader.nbytes
        head, data_begin = read_header(reader, where, MOST_PLAIN_HEADER_BYTES)
        entries, notes, _ = parse_header(head, reader.nbytes, where)
        _refuse_duplicates(bytes(head[8:]), where)
    ties.update((name, kept) for name, kept in notes.items() if kept in entries)
    regions = _regions(notes, where)
    for name, entry in entries.items():
        dtype = PLAIN_DTYPES.get(entry.dtype)
        if dtype is None:
            raise UnsupportedFormatError(
                f"{name!r} in {where} has the dtype {entry.dtype!r}, which this release does not "
                "read"
            )
        sizes = torch_shape(entry)
        if sizes is None:
            raise UnsupportedFormatError(
                f"{name!r} in {where} has the dtype {entry.dtype} and the shape "
                f"{list(entry.shape)}, but torch holds such numbers in pairs along the last "
                "dimension, which must be even. Store it padded"
            )
        offsets = (0,) * len(sizes)
        if regions is not None:
            offsets = _offsets(name, len(sizes), regions.get(name), where)
        nbytes = entry.end - entry.begin
        # Also of an empty tensor, whose other extents nobody could multiply.
        spanned = math.prod(extent for extent in sizes if extent) * dtype.itemsize
        if math.prod(sizes) * dtype.itemsize != nbytes or spanned >= 1 << 63:
            raise CorruptCheckpointError(
                f"{where} gives {name!r}, of shape {list(entry.shape)} and dtype {entry.dtype}, "
                f"{nbytes} bytes"
            )
        chunk = ForeignChunk(offsets, sizes, number, data_begin + entry.begin, nbytes)
        shape = [begin + size for begin, size in zip(offsets, sizes, strict=True)]
        yield name, ForeignTensor(name, dtype, shape, [chunk]), regions is not None


def _regions(notes: Mapping[str, str], where: str) -> Mapping[str, Any] | None:
    """Where the regions of a file begin, if its notes say so."""
    text = notes.get(SHARDING_NOTE)
    if text is None:
        return None
    try:
        regions = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"the note {SHARDING_NOTE} of {where} is malformed: {error}"
        ) from error
    if not isinstance(regions, dict):
        raise CorruptCheckpointError(f"the note {SHARDING_NOTE} of {where} is not an object")
    return regions


def _offsets(name: str, ndims: int, region: Any, where: str) -> tuple[int, ...]:
    offsets = region.get(OFFSETS_FIELD) if isinstance(region, dict) else None
    if (
        not isinstance(offsets, list)
        or len(offsets) != ndims
        or not all(type(offset) is int and offset >= 0 for offset in offsets)
    ):
        raise CorruptCheckpointError(
            f"the note {SHARDING_NOTE} of {where} does not say where {name!r} begins: {region!r}"
        )
    return tuple(offsets)


def _join(tensor: ForeignTensor, other: ForeignTensor, where: str) -> ForeignTensor:
    """A tensor with the regions that another file has of it."""
    if tensor.dtype is not other.dtype or len(tensor.shape) != len(other.shape):
        raise CorruptCheckpointError(
            f"{where} has a part of {tensor.name!r} that does not fit the others: dtype "
            f"{other.dtype} and {len(other.shape)} dimensions, not {tensor.dtype} and "
            f"{len(tensor.shape)}"
        )
    shape = [max(pair) for pair in zip(tensor.shape, other.shape, strict=True)]
    known = {tuple(chunk.offsets) for chunk in tensor.chunks}
    new = [chunk for chunk in other.chunks if tuple(chunk.offsets) not in known]
    return tensor._replace(shape=shape, chunks=[*tensor.chunks, *new])

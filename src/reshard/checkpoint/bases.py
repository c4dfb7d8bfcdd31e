"""What a save can refer to: the chunks of another checkpoint, or of plain safetensors files.

A base proposes, for a chunk that is to be written, stored bytes that may be the same. Whether they
are is decided by digests; `references` does that.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from reshard.api import BaseError, CheckpointException, CorruptCheckpointError
from reshard.checkpoint.announcements import announcer, deletions_in
from reshard.checkpoint.directory import MANIFEST, is_shard_name, own_files, read_manifest
from reshard.engine.process_wide import ProcessWide
from reshard.engine.runs import is_one_run, ravel
from reshard.engine.writing import Content, Hashed
from reshard.format.checks import is_plain_location, is_plain_path
from reshard.format.checksum import PROBE_BYTES, Digester, checksum, probe, signed
from reshard.format.container import (
    MOST_PLAIN_HEADER_BYTES,
    SAFETENSORS_DTYPES,
    Entry,
    parse_header,
    read_header,
)
from reshard.format.tables import Manifest, Origin
from reshard.planning.columns import DTYPES, ChunkTable
from reshard.plans.results import WrittenFile
from reshard.stores.protocol import Reader, Store
from reshard.stores.urls import path_of, without_secrets

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_PIECE_BYTES = 4 << 20
_FEW_CHUNKS = 16
_WRAPPERS = frozenset({"base_layer", "_orig_mod", "module", "_fsdp_wrapped_module"})
"""Parts of names that wrappers of modules add."""


class Candidate(NamedTuple):
    """Stored bytes that may be those of a chunk. `hashed` is None if that has to be found out."""

    file: WrittenFile
    begin: int
    stored_nbytes: int
    codec: str
    hashed: Hashed | None
    fingerprint: tuple[int, ...] | None = None


class Base(Protocol):
    """What a save may refer to, opened."""

    @property
    def locations(self) -> Sequence[str]:
        """All places that references may lead to, relative to the new checkpoint."""

    @property
    def checkpoints(self) -> Sequence[str]:
        """Those of them that are checkpoints, which somebody may delete."""

    def find(self, content: Content) -> Candidate | None:
        """Stored bytes of the same tensor and region, if there are any."""

    def hash(self, candidate: Candidate, expected_probe: int | None) -> Hashed:
        """The probe and digest of stored bytes; no digest if another probe is expected."""

    def known_hash(self, candidate: Candidate) -> Hashed | None:
        """The same, if it is known without reading the bytes."""

    def check_unchanged(self) -> None:
        """Raise if the base was replaced, or is being deleted."""


def base_location(store: Store, base: str | os.PathLike[str]) -> str:
    """Where the base lies, as seen from the new checkpoint in `store`."""
    base = path_of(base)
    if ("://" in base) != ("://" in store.location):
        raise BaseError(
            f"the base {without_secrets(base)!r} and the new checkpoint {store.location!r} are "
            "not on one file system, so that one cannot refer to the other. Pass a base that is "
            "beside the new checkpoint, or none"
        )
    try:
        location = store.relative(base)
    except ValueError as error:
        raise BaseError(
            f"the new checkpoint cannot refer to the base: {error}. Pass a base that is beside the "
            "new checkpoint, or none"
        ) from error
    if location == ".":
        raise BaseError(
            f"a checkpoint cannot be its own base: {without_secrets(base)!r} is where the save "
            "goes. Pass another checkpoint as the base, or save to another place"
        )
    if not is_plain_location(location):
        raise BaseError(
            f"the base cannot be referred to as {location!r}: a name in it has a backslash, a "
            "control character or is not UTF-8. Rename it"
        )
    return location


def open_base(store: Store, location: str) -> Base:
    """Open the base at `location`, for a save to `store`."""
    there = store.at(location)
    try:
        keys = there.list()
    except NotADirectoryError:
        raise BaseError(
            f"the base cannot be used: {there.location} is a file. Pass the directory of a "
            "checkpoint or of safetensors files"
        ) from None
    plain = [key for key in keys if key.endswith(_SUFFIX) and not is_shard_name(key)]
    try:
        if MANIFEST not in keys and plain:
            return PlainFiles(there, location, [key for key in plain if is_plain_path(key)])
        base = StoredCheckpoint(store, there, location)
        # Before anything is made. It is looked at again when this save can be seen.
        base.check_unchanged()
        base.check_files()
        return base
    except BaseError as error:
        raise BaseError(f"the base cannot be used: {error}") from error
    except CheckpointException as error:
        # The class says what is wrong with it.
        raise type(error)(
            f"the base cannot be used: {error}. Pass another base, or none"
        ) from error


def warn_of_unguarded(store: Store, base: Base) -> None:
    """Log what a save to `store` may refer to where nobody who deletes it will look for that."""
    name = os.path.basename(os.path.realpath(store.location))
    for location in dict.fromkeys(base.checkpoints):
        *folders, last = location.removeprefix("../").split("/")
        if not folders or (folders[0] == ".." and len(folders) == 2 and last == name):
            continue
        logger.warning(
            "%s may refer to %s, which is not beside it: whoever deletes or replaces that is not "
            "told. Keep it, or end the dependence with reshard.materialise",
            store.location,
            store.at(location).location,
        )


class StoredCheckpoint:
    """Another checkpoint. References lead to where the bytes are, which may be a third one."""

    def __init__(self, store: Store, there: Store, location: str) -> None:
        self._there = there
        self._version = there.version(MANIFEST)
        self._manifest = manifest = read_manifest(there)
        own = Origin(location, manifest.notes.get("save_id", ""))
        origins = [_seen_from(store, there, location, origin) for origin in manifest.origins]
        self._files = [
            _written_file(manifest, file, own, origins) for file in range(len(manifest.files))
        ]
        seen = [own, *(origin for origin in origins if origin is not None)]
        self.locations = [each.location for each in seen]
        self.checkpoints = [each.location for each in seen if each.save_id]

    def find(self, content: Content) -> Candidate | None:
        m, table = self._manifest, self._manifest.table
        tensor = table.row_of.get(content.name)
        if tensor is None or content.offsets is None or content.tensor_shape is None:
            return None
        tensor = int(table.sources[tensor])
        is_same = DTYPES[int(table.dtypes[tensor])] is content.dtype and table.shape_of(
            tensor
        ) == tuple(content.tensor_shape)
        if not is_same:
            return None
        row = _find_chunk(table, tensor, content.offsets, content.shape)
        if row is None:
            return None
        file = self._files[int(m.chunk_files[row])]
        codec = 0 if m.chunk_codecs is None else int(m.chunk_codecs[row])
        parts = m.chunk_fingerprints
        return None if file is None else Candidate(
            file,
            int(m.chunk_begins[row]),
            int(m.stored_nbytes[row]) if codec else content.nbytes,
            m.codec_names[codec - 1] if codec else "",
            Hashed(int(m.chunk_probes[row]), m.chunk_digests[row].tobytes()),
            None if parts is None else tuple(parts[row].tolist()),
        )  # fmt: skip

    def hash(self, candidate: Candidate, expected_probe: int | None) -> Hashed:
        if candidate.hashed is None:
            raise ValueError("the candidate is of another base")
        return candidate.hashed

    def known_hash(self, candidate: Candidate) -> Hashed | None:
        return candidate.hashed

    def check_files(self) -> None:
        """Raise if its own files are not all there, before anybody relies on them."""
        unlisted = own_files(self._manifest).keys() - set(self._there.list())
        # Not every store can list all of its files.
        missing = {key for key in unlisted if self._there.version(key) is None}
        if missing:
            raise CorruptCheckpointError(
                f"{self._there.location} lacks its file {min(missing)!r}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            )

    def check_unchanged(self) -> None:
        where = self._there.location
        for deletion in deletions_in(self._there):
            who, if_gone = announcer(self._there, deletion)
            raise BaseError(
                f"{where} is being deleted ({who}). Save without a base, or with another. {if_gone}"
            )
        if self._there.version(MANIFEST) != self._version:
            raise BaseError(f"{where} was replaced or deleted while this save began. Save again")


def _find_chunk(
    table: ChunkTable, tensor: int, offsets: Sequence[int], sizes: Sequence[int]
) -> int | None:
    """The row of the chunk that is a region of a tensor."""
    dims, begin = int(table.ndims[tensor]), int(table.starts[tensor])
    begins, lengths = (column[:, :dims] for column in table.of(tensor))
    if len(begins) <= _FEW_CHUNKS:
        # Of a few chunks, numpy takes longer to begin than to compare.
        for row, (first, extent) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
            if first == [*offsets] and extent == [*sizes]:
                return begin + row
        return None
    same = (begins == tuple(offsets)).all(axis=1) & (lengths == tuple(sizes)).all(axis=1)
    return begin + int(same.argmax()) if same.any() else None


def _seen_from(store: Store, there: Store, location: str, origin: Origin) -> Origin | None:
    """An origin of the base, relative to the new checkpoint; None if that is where it lies."""
    try:
        place = store.relative(there.at(origin.location).location)
    except ValueError:
        return None
    return None if place == "." else Origin(place, origin.save_id)


def _written_file(
    m: Manifest, file: int, own: Origin, origins: Sequence[Origin | None]
) -> WrittenFile | None:
    origin: Origin | None = own
    if m.file_origins is not None and m.file_origins[file] >= 0:
        origin = origins[int(m.file_origins[file])]
    if origin is None:
        # A file in the place of the new checkpoint, which may replace it.
        return None
    return WrittenFile(
        m.files[file],
        int(m.file_sizes[file]),
        int(m.header_sizes[file]),
        int(m.header_checksums[file]),
        *origin,
    )


class PlainFiles:
    """A directory of safetensors files that no save made, such as one of Hugging Face.

    A tensor is found by its name or, since trainers put other prefixes before them, by the longest
    common end of the names. Any region that is contiguous in the file can be referred to.
    """

    def __init__(self, there: Store, location: str, paths: Sequence[str]) -> None:
        self._there = there
        self._tensors: dict[str, tuple[WrittenFile, Entry]] = {}
        self._by_end: dict[tuple[str, ...], list[str]] = {}
        # Some directories hold the same tensors twice, as `consolidated.safetensors`.
        for path in sorted(paths, key=lambda path: (not path.startswith("model"), path)):
            self._add(path, location)
        self.locations, self.checkpoints = [location], ()

    def _add(self, path: str, location: str) -> None:
        where = f"{path!r} of {self._there.location}"
        reader = self._there.open_reader(path)
        try:
            head, length = read_header(reader, where, MOST_PLAIN_HEADER_BYTES)
            entries, _, _ = parse_header(head, reader.nbytes, where)
            file = WrittenFile(
                path, reader.nbytes, length, signed(checksum(memoryview(head))), location
            )
        finally:
            reader.close()
        for name, entry in entries.items():
            if name in self._tensors:
                continue
            self._tensors[name] = (file, entry)
            parts = _core(name)
            for begin in range(len(parts)):
                self._by_end.setdefault(parts[begin:], []).append(name)

    def find(self, content: Content) -> Candidate | None:
        if content.offsets is None or content.tensor_shape is None:
            return None
        shape = tuple(content.tensor_shape)
        found = self._tensor(content.name, shape, SAFETENSORS_DTYPES.get(content.dtype))
        if found is None or not is_one_run(shape, tuple(content.shape)):
            return None
        file, entry = found
        begin = file.header_nbytes + entry.begin
        begin += ravel(shape, content.offsets) * content.dtype.itemsize
        return Candidate(file, begin, content.nbytes, "", None)

    def _tensor(
        self, name: str, shape: tuple[int, ...], dtype: str | None
    ) -> tuple[WrittenFile, Entry] | None:
        parts = _core(name)
        ends = (self._by_end.get(parts[begin:], ()) for begin in range(len(parts)))
        for names in ([name] if name in self._tensors else [], *ends):
            for candidate in names:
                file, entry = self._tensors[candidate]
                nbytes = math.prod(shape) * _ITEMSIZES.get(entry.dtype, -1)
                if (entry.dtype, tuple(entry.shape)) == (dtype, shape) and (
                    nbytes == entry.end - entry.begin
                ):
                    return file, entry
            if names:
                # A shorter end matches more names, and none better.
                return None
        return None

    def hash(self, candidate: Candidate, expected_probe: int | None) -> Hashed:
        place = self._place(candidate)
        found = _hashes().get(place)
        if found is None or (found.digest is None and expected_probe in (None, found.probe)):
            with contextlib.closing(self._there.open_reader(candidate.file.path)) as reader:
                found = _hash_range(
                    reader, candidate.begin, candidate.stored_nbytes, expected_probe
                )
            _hashes()[place] = found
        return found

    def known_hash(self, candidate: Candidate) -> Hashed | None:
        return _hashes().get(self._place(candidate))

    def _place(self, candidate: Candidate) -> tuple[object, ...]:
        """What bytes are known by, as long as nobody writes to the file."""
        file = candidate.file
        return (
            self._there.location,
            file,
            self._there.stamp(file.path),
            candidate.begin,
            candidate.stored_nbytes,
        )

    def check_unchanged(self) -> None:
        """Nothing tells; whoever reads it verifies every chunk."""


_ITEMSIZES = {name: dtype.itemsize for dtype, name in SAFETENSORS_DTYPES.items()}

_hashes: ProcessWide[dict[Any, Hashed]] = ProcessWide(dict, dict.clear)
"""What was found out about plain files, which have no digests of their own."""


def _hash_range(reader: Reader, begin: int, nbytes: int, expected_probe: int | None) -> Hashed:
    first = _read(reader, begin, min(PROBE_BYTES, nbytes))
    found_probe = signed(probe(memoryview(first)))
    if expected_probe not in (None, found_probe):
        return Hashed(found_probe, None)
    digester, end = Digester(), begin + nbytes
    buffer = memoryview(bytearray(min(_PIECE_BYTES, nbytes)))
    for position in range(begin, end, _PIECE_BYTES):
        piece = buffer[: min(_PIECE_BYTES, end - position)]
        reader.read_into(position, [piece])
        digester.update(piece)
    return Hashed(found_probe, digester.digest())


def _read(reader: Reader, begin: int, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    reader.read_into(begin, [memoryview(data)] if nbytes else [])
    return data


def _core(name: str) -> tuple[str, ...]:
    """The parts of a name, without those that wrappers add."""
    return tuple(part for part in name.split(".") if part not in _WRAPPERS)

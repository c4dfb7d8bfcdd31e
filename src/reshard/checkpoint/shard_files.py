"""The shard files of a checkpoint that is read."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from reshard.api import CorruptCheckpointError
from reshard.checkpoint.torch_archives import FlatArchive, encode_from, read_archive, rules_of
from reshard.checkpoint.torch_records import Chunk, TorchRecords, is_record
from reshard.engine.decoding import DecodedChunk, FrameBuffers
from reshard.engine.fetching import Prefetch, plan_fetches
from reshard.engine.open_files import OpenFiles, most_open_files
from reshard.engine.reading import Request, Verify, read_bytes
from reshard.engine.streams import StreamedChunk, StreamExtension, decode_value, find_extensions
from reshard.engine.workers import default_threads, run_all
from reshard.format.checksum import Hasher
from reshard.format.codec import PLANES_ZSTD, check_codec
from reshard.format.container import parse_header
from reshard.format.tables import DCP, Manifest, Origin
from reshard.planning.columns import DTYPES, Ints
from reshard.stores.protocol import Mappable, Reader, Store
from reshard.tensors.dcp_types import default_extension_registry

logger = logging.getLogger(__name__)

_HEADER_PIECE_BYTES = 1 << 20
_RECORDS_AT_ONCE = 64
_MOST_EXPLAINED_BYTES = 64 << 20
"""Longer headers that are damaged are not looked into for the reason."""


class ShardFiles:
    """The shard files of a checkpoint, opened as they are needed, and not too many at once."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        verify: Verify,
        extension_registry: Any = None,
        allow_pickle: bool = False,
    ) -> None:
        self.store = store
        self._extension_registry = extension_registry
        self._frame_buffers = FrameBuffers()
        self.manifest = manifest
        self.verify = verify if manifest.is_ours else Verify.OFF
        self.readers: dict[str, Reader] = {}
        self._ids: dict[str, int] = {}
        self._files = OpenFiles(self._open, most_open_files())
        self._unchecked: set[str] = set()
        self._encoded: dict[str, tuple[str, int, int]] = {}
        """Where encoded chunks lie, by the names that their contents have."""
        self._records = TorchRecords(store.location)
        self._is_own_copy = False
        self._archives: dict[str, FlatArchive] = {}
        self._allow_pickle = allow_pickle

    def open(self, file_id: int) -> str:
        """Make sure, once, that a file is the one that was written; from then on it can be read."""
        key = self.key_of(file_id)
        if key not in self.readers:
            self._ids[key] = file_id
            self.readers[key] = self._files.reader(key)
            if self.manifest.is_ours:
                self._unchecked.add(key)
        if key in self._unchecked and self.store.remote is None:
            self._check(key)
        return key

    def key_of(self, file_id: int) -> str:
        """What a file is called among the readers, once it is opened."""
        path = self.manifest.files[file_id]
        origin = self.manifest.origin_of(file_id)
        return path if origin is None else f"{origin.location}/{path}"

    def check(self, file_id: int) -> None:
        """Compare the header of a file with its checksum, which `open` of a remote one does not."""
        key = self.open(file_id)
        if key in self._unchecked:
            self._check(key)

    def _check(self, key: str) -> None:
        try:
            self._check_header(self._ids[key], self.readers[key])
        except BaseException:
            # So that the next one who asks is told the same.
            del self.readers[key]
            raise
        self._unchecked.discard(key)

    def is_suspect(self, file_id: int) -> bool:
        """Whether only the bytes themselves tell if a file is the one that was referred to."""
        origin = self.manifest.origin_of(file_id)
        return origin is not None and not origin.save_id

    def map(self, file_id: int) -> memoryview | None:
        """The memory of a file that is the one that was written; None if it has to be read."""
        key = self.open(file_id)
        with self._files.lend(key) as reader:
            if not isinstance(reader, Mappable):
                return None
            try:
                return reader.map()
            except OSError as error:
                logger.info("%r cannot be mapped, and is read: %s", key, error)
                return None

    def look_into(self, rows: Ints) -> None:
        """Find out where the elements of chunks lie that are records of `torch.save`.

        From then on, those that lie in order are chunks like any other.
        """
        m = self.manifest
        if m.is_ours or m.chunk_codecs is None:
            return
        is_known = np.array([False, *map(is_record, m.codec_names)])
        rows = np.unique(rows[rows >= 0])
        rows = rows[is_known[m.chunk_codecs[rows]]]
        # File by file, as they lie there.
        rows = rows[np.lexsort((m.chunk_begins[rows], m.chunk_files[rows]))]
        places: list[tuple[int, int]] = []

        def look(batch: list[tuple[int, str, Chunk]]) -> None:
            for row, path, chunk in batch:
                opened = self._records.open(chunk, path, self.readers[path], self._extensions)
                if isinstance(opened, int):
                    places.append((row, opened))
                else:
                    self.readers[_content_path(path, chunk.begin)] = opened

        chunks = [
            (row, path, chunk)
            for row, path, chunk in self._chunks(rows)
            if _content_path(path, chunk.begin) not in self.readers
        ]
        batches = [
            chunks[i : i + _RECORDS_AT_ONCE] for i in range(0, len(chunks), _RECORDS_AT_ONCE)
        ]
        run_all(look, batches, default_threads())
        self._place(places)

    def _place(self, places: Sequence[tuple[int, int]]) -> None:
        """Note where chunks lie that are stored as they are."""
        if not places:
            return
        if not self._is_own_copy:
            self.manifest, self._is_own_copy = _with_own_places(self.manifest), True
        m = self.manifest
        if m.chunk_codecs is not None:
            rows, begins = np.array(places).T
            m.chunk_begins[rows], m.chunk_codecs[rows] = begins, 0

    def _chunks(self, rows: Ints) -> Iterator[tuple[int, str, Chunk]]:
        """What the manifest says of some encoded chunks, whose files are opened."""
        m = self.manifest
        if m.chunk_codecs is None:
            return
        owners = (np.searchsorted(m.chunk_starts, rows, side="right") - 1).tolist()
        columns = zip(
            rows.tolist(),
            owners,
            m.chunk_files[rows].tolist(),
            m.chunk_offsets[rows].tolist(),
            m.chunk_sizes[rows].tolist(),
            m.chunk_begins[rows].tolist(),
            m.stored_nbytes[rows].tolist(),
            m.chunk_codecs[rows].tolist(),
            strict=True,
        )
        for row, tensor, file, offsets, sizes, begin, stored, codec in columns:
            dtype, dims = DTYPES[m.dtypes[tensor]], int(m.ndims[tensor])
            chunk = Chunk(
                m.tensor_names[tensor],
                dtype,
                tuple(offsets[:dims]),
                tuple(sizes[:dims]),
                begin,
                stored,
                math.prod(sizes) * dtype.itemsize,
                m.codec_names[codec - 1],
            )
            yield row, self.open(file), chunk

    def place_of(self, row: int) -> tuple[str, int]:
        """A file to read a chunk from, and where it begins in there; it need not be open.

        An encoded chunk is a file of its own, with the decoded content.
        """
        m = self.manifest
        path, begin = self.key_of(int(m.chunk_files[row])), int(m.chunk_begins[row])
        if m.chunk_codecs is None or not m.chunk_codecs[row]:
            return path, begin
        return _content_path(path, begin), 0

    def open_chunk(self, row: int) -> tuple[str, int]:
        """The same, with the file opened."""
        self.look_into(np.array([row]))
        m = self.manifest
        path, begin = self.open(int(m.chunk_files[row])), int(m.chunk_begins[row])
        if m.chunk_codecs is None or not m.chunk_codecs[row]:
            return path, begin
        virtual_path = _content_path(path, begin)
        if virtual_path not in self.readers:
            stored, content = int(m.stored_nbytes[row]), self._content_nbytes(row)
            where = f"the chunk at byte {begin} of {path!r} in {self.store.location}"
            source, codec = self.readers[path], m.codec_names[int(m.chunk_codecs[row]) - 1]
            self._encoded[virtual_path] = path, begin, begin + stored
            self.readers[virtual_path] = (
                DecodedChunk(source, begin, stored, content, self._frame_buffers, where)
                if self._is_ours(codec)
                else StreamedChunk(source, begin, stored, content, self._extensions(codec), where)
            )
        return virtual_path, 0

    def _content_nbytes(self, row: int) -> int:
        m = self.manifest
        itemsize: int = DTYPES[m.dtypes[m.table.owners[row]]].itemsize
        return int(m.chunk_sizes[row].prod()) * itemsize

    def _is_ours(self, codec: str) -> bool:
        check_codec(codec, self.store.location)
        return codec == PLANES_ZSTD

    def _extensions(self, codec: str) -> list[StreamExtension]:
        if self._extension_registry is None:
            self._extension_registry = default_extension_registry()
        return find_extensions(codec, self._extension_registry, self.store.location)

    def _open(self, key: str) -> Reader:
        file_id = self._ids[key]
        path, origin = self.manifest.files[file_id], self.manifest.origin_of(file_id)
        where, store = self.store.location, self.store
        if origin is not None:
            store = store.at(origin.location)
            self._check_origin(origin, store)
        try:
            size = int(self.manifest.file_sizes[file_id]) if self.manifest.is_ours else None
            reader = store.open_reader(path, nbytes=size)
        except (FileNotFoundError, NotADirectoryError) as error:
            if origin is None:
                raise CorruptCheckpointError(
                    f"the checkpoint at {where} lacks its file {path!r}. If it was overwritten "
                    "meanwhile, load it again"
                ) from error
            raise CorruptCheckpointError(
                f"the checkpoint at {where} refers to {path!r} of {store.location}, which is not "
                "there: it was deleted or moved. Put it back, or load another checkpoint"
            ) from error
        except OSError as error:
            raise CorruptCheckpointError(
                f"the file {self._name(file_id)} cannot be opened: {error}"
            ) from error
        found, expected = reader.nbytes, int(self.manifest.file_sizes[file_id])
        if self.manifest.kind == DCP and found >= expected:
            # The metadata does not say how long a file is, only what has to be in it.
            return reader
        if found != expected:
            reader.close()
            raise CorruptCheckpointError(
                f"{self._name(file_id)} has {found} bytes; {expected} were written"
                + ("" if origin is None and self.manifest.is_ours else ". It was replaced since")
            )
        return reader

    def _check_origin(self, origin: Origin, store: Store) -> None:
        try:
            is_another = self.store.relative(store.location) != "."
        except ValueError:
            is_another = False
        if not is_another:
            raise CorruptCheckpointError(
                f"the checkpoint at {self.store.location} refers to itself as {origin.location!r}"
            )

    def _name(self, file_id: int) -> str:
        """A file, for people."""
        path, origin = self.manifest.files[file_id], self.manifest.origin_of(file_id)
        if origin is None:
            return f"{path!r} of the checkpoint at {self.store.location}"
        there = self.store.at(origin.location).location
        return f"{path!r} of {there}, which the checkpoint at {self.store.location} refers to,"

    def _check_header(self, file_id: int, reader: Reader) -> None:
        """Compare the header with its checksum, whatever is verified of the data.

        It tells the file of this save from one of another save that has the same layout.
        """
        nbytes = int(self.manifest.header_sizes[file_id])
        hasher = Hasher()
        for begin in range(0, nbytes, _HEADER_PIECE_BYTES):
            piece = bytearray(min(_HEADER_PIECE_BYTES, nbytes - begin))
            reader.read_into(begin, [memoryview(piece)])
            hasher.update(piece)
        found = hasher.intdigest()
        expected = int(self.manifest.header_checksums[file_id]) & (1 << 64) - 1
        if found == expected:
            return
        where, origin = self._name(file_id), self.manifest.origin_of(file_id)
        ours = self.manifest.notes.get("save_id") if origin is None else origin.save_id
        theirs = self._save_id_in(reader, nbytes)
        if ours and theirs and ours != theirs:
            raise CorruptCheckpointError(
                f"{where} belongs to another save (id {theirs} instead of {ours}): it was copied "
                "in from another checkpoint. Put the original file back, or load another "
                "checkpoint"
            )
        raise CorruptCheckpointError(
            f"the header of {where} is damaged{' or was replaced' if origin else ''}: its checksum "
            f"is {found:016x}, it should be {expected:016x}. Load another checkpoint"
        )

    def _save_id_in(self, reader: Reader, nbytes: int) -> str | None:
        """Which save a shard file says that it is of, if its header is sound."""
        if nbytes > _MOST_EXPLAINED_BYTES:
            return None
        head = bytearray(nbytes)
        reader.read_into(0, [memoryview(head)] if nbytes else [])
        try:
            _, notes, _ = parse_header(memoryview(head), reader.nbytes, "the file")
        except CorruptCheckpointError:
            return None
        return notes.get("save_id")

    def read_value(self, name: str, row: int) -> bytes:
        """A stored value, whose file was opened."""
        m = self.manifest
        path = self.open(int(m.value_files[row]))
        where = f"{path!r} of {self.store.location}"
        codec = 0 if m.value_codecs is None else int(m.value_codecs[row])
        rules = rules_of(m.codec_names[codec - 1]) if codec and not m.is_ours else None
        if rules is not None:
            if path not in self._archives:
                self._archives[path] = read_archive(self.readers[path], where, rules)
            flat = self._archives[path]
            return encode_from(flat, name, self.readers[path], self._allow_pickle)
        stored = read_bytes(
            self.readers[path],
            name,
            int(m.value_begins[row]),
            int(m.value_nbytes[row]),
            int(m.value_checksums[row]),
            self.verify,
            where,
        )
        if not codec:
            return stored
        extensions = self._extensions(m.codec_names[codec - 1])
        return decode_value(stored, extensions, f"{name!r} in {where}")

    @property
    def bytes_read(self) -> int:
        """How many bytes were taken from the store so far."""
        return self._files.bytes_read

    @contextlib.contextmanager
    def fetching(
        self, requests: Sequence[Request], value_rows: Sequence[int] = ()
    ) -> Iterator[None]:
        """Within this, what will be read is asked for ahead, if the store is remote."""
        remote = self.store.remote
        if remote is None:
            yield
            return
        # What is verified by itself needs no header to tell that it is the right one.
        by_header = {
            self._encoded.get(request.file, (request.file,))[0]
            for request in requests
            if self.verify in (Verify.OFF, Verify.FINGERPRINT) or not request.whole
        }
        run_all(self._check, sorted(by_header & self._unchecked), remote.concurrency)
        wanted = plan_fetches(requests, self.verify, lambda each: self._encoded.get(each.file))
        m, rows = self.manifest, [row for row in value_rows if self.manifest.value_nbytes[row]]
        for row in rows:
            begin = int(m.value_begins[row])
            place = np.array([[begin, begin + int(m.value_nbytes[row])]], dtype=np.int64)
            wanted.append((None, self.open(int(m.value_files[row])), place))
        with Prefetch(self.readers, wanted, remote) as ahead:
            self._files.ahead = ahead
            try:
                yield
            finally:
                self._files.ahead = None

    def close(self) -> None:
        self._files.close()


def _content_path(path: str, begin: int) -> str:
    """The name of the content of an encoded chunk among the readers."""
    return f"{path}@{begin}"


def _with_own_places(m: Manifest) -> Manifest:
    """A copy of a manifest, to be changed: others see where the records are."""
    codecs = None if m.chunk_codecs is None else m.chunk_codecs.copy()
    copied = dataclasses.replace(m, chunk_codecs=codecs, chunk_begins=m.chunk_begins.copy())
    # The same object, by which plans recognise the rows that they were made from.
    vars(copied)["table"] = m.table
    return copied

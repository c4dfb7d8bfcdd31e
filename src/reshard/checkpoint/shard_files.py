"""The shard files of a checkpoint that is read."""

from __future__ import annotations

import logging

from reshard.api import CorruptCheckpointError
from reshard.engine.open_files import OpenFiles, most_open_files
from reshard.engine.reading import Verify, read_bytes
from reshard.format.checksum import Hasher
from reshard.format.container import parse_header
from reshard.format.tables import Manifest, Origin
from reshard.stores.protocol import Mappable, Reader, Store

logger = logging.getLogger(__name__)

_HEADER_PIECE_BYTES = 1 << 20
_MOST_EXPLAINED_BYTES = 64 << 20
"""Longer headers that are damaged are not looked into for the reason."""


class ShardFiles:
    """The shard files of a checkpoint, opened as they are needed, and not too many at once."""

    def __init__(self, store: Store, manifest: Manifest, verify: Verify) -> None:
        self.store = store
        self.manifest = manifest
        self.verify = verify
        self.readers: dict[str, Reader] = {}
        self._ids: dict[str, int] = {}
        self._files = OpenFiles(self._open, most_open_files())

    def open(self, file_id: int) -> str:
        """Make sure, once, that a file is the one that was written; from then on it can be read."""
        path = self.manifest.files[file_id]
        origin = self.manifest.origin_of(file_id)
        key = path if origin is None else f"{origin.location}/{path}"
        if key not in self.readers:
            self._ids[key] = file_id
            reader = self._files.reader(key)
            self._check_header(file_id, reader)
            self.readers[key] = reader
        return key

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

    def _open(self, key: str) -> Reader:
        file_id = self._ids[key]
        path, origin = self.manifest.files[file_id], self.manifest.origin_of(file_id)
        where, store = self.store.location, self.store
        if origin is not None:
            store = store.at(origin.location)
            self._check_origin(origin, store)
        try:
            reader = store.open_reader(path)
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
        if found != expected:
            reader.close()
            raise CorruptCheckpointError(
                f"{self._name(file_id)} has {found} bytes; {expected} were written"
                + (". It was replaced since" if origin else "")
            )
        return reader

    def _check_origin(self, origin: Origin, store: Store) -> None:
        if self.store.relative(store.location) == ".":
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
        return read_bytes(
            self.readers[path],
            name,
            int(m.value_begins[row]),
            int(m.value_nbytes[row]),
            int(m.value_checksums[row]),
            self.verify,
            f"{path!r} of {self.store.location}",
        )

    def close(self) -> None:
        self._files.close()

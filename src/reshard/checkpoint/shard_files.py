"""The shard files of a checkpoint that is read."""

from __future__ import annotations

from reshard.api import CorruptCheckpointError
from reshard.engine.open_files import OpenFiles, most_open_files
from reshard.engine.reading import Verify, read_bytes
from reshard.format.checksum import Hasher
from reshard.format.container import parse_header
from reshard.format.tables import Manifest
from reshard.stores.protocol import Reader, Store

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
        self._sizes: dict[str, int] = {}
        self._files = OpenFiles(self._open, most_open_files())

    def open(self, file_id: int) -> str:
        """Make sure, once, that a file is the one that was written; from then on it can be read."""
        path = self.manifest.files[file_id]
        if path not in self.readers:
            self._sizes[path] = int(self.manifest.file_sizes[file_id])
            reader = self._files.reader(path)
            self._check_header(file_id, path, reader)
            self.readers[path] = reader
        return path

    def _open(self, path: str) -> Reader:
        where = self.store.location
        try:
            reader = self.store.open_reader(path)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                f"the checkpoint at {where} lacks its file {path!r}. If it was overwritten "
                "meanwhile, load it again"
            ) from error
        except OSError as error:
            raise CorruptCheckpointError(
                f"the file {path!r} of the checkpoint at {where} cannot be opened: {error}"
            ) from error
        found, expected = reader.nbytes, self._sizes[path]
        if found != expected:
            reader.close()
            raise CorruptCheckpointError(
                f"{path!r} of the checkpoint at {where} has {found} bytes; {expected} were written"
            )
        return reader

    def _check_header(self, file_id: int, path: str, reader: Reader) -> None:
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
        where = f"{path!r} of the checkpoint at {self.store.location}"
        ours, theirs = self.manifest.notes.get("save_id"), self._save_id_in(reader, nbytes)
        if ours and theirs and ours != theirs:
            raise CorruptCheckpointError(
                f"{where} belongs to another save (id {theirs} instead of {ours}): it was copied "
                "in from another checkpoint. Put the original file back, or load another "
                "checkpoint"
            )
        raise CorruptCheckpointError(
            f"the header of {where} is damaged: its checksum is {found:016x}, it should be "
            f"{expected:016x}. Load another checkpoint"
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
        path = m.files[int(m.value_files[row])]
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

"""Files in memory, for tests and for trying things out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from reshard.stores.protocol import CutShortError, Remote, VersionConflict


class MemoryStore:
    """A dict of files. Everything is durable as soon as it is written."""

    remote: Remote | None = None
    requests = 0

    def __init__(self, name: str = "memory", root: dict[str, MemoryStore] | None = None) -> None:
        self.location = name
        self._root: dict[str, MemoryStore] = {} if root is None else root
        self._root[name] = self
        self.files: dict[str, bytearray] = {}
        self._times: dict[str, float] = {}
        self._lock = threading.Lock()

    def create(self) -> bool:
        """Nothing to make."""
        return False

    def open_writer(self, key: str, nbytes: int | None) -> _MemoryFile:
        with self._lock:
            if key in self.files:
                raise FileExistsError(f"there is a {key!r} in this memory store already")
            self.files[key] = bytearray(nbytes or 0)
            self._times[key] = time.time()
        return _MemoryFile(self.files[key])

    def open_reader(self, key: str, ahead: int = 0, nbytes: int | None = None) -> _MemoryFile:
        if key not in self.files:
            raise FileNotFoundError(f"there is no {key!r} in this memory store")
        return _MemoryFile(self.files[key])

    def sync(self) -> None:
        """Nothing to do."""

    def version(self, key: str) -> str | None:
        content = self.files.get(key)
        return None if content is None else _version(content)

    def commit(self, draft: str, key: str, data: bytes, expected: str | None) -> str:
        with self._lock:
            if draft not in self.files:
                raise FileNotFoundError(f"there is no {draft!r} in this memory store")
            if self.version(key) != expected:
                raise VersionConflict(f"{key!r} is {self.version(key)}, not {expected}")
            del self.files[draft]
            self.files[key] = bytearray(data)
            self._times[key] = time.time()
        return _version(data)

    def rename(self, key: str, new_key: str) -> None:
        with self._lock:
            self.files[new_key] = self.files.pop(key)
            self._times[new_key] = self._times.pop(key)

    def list(self) -> list[str]:
        return sorted(self.files)

    def sizes(self) -> dict[str, int]:
        return {key: len(content) for key, content in self.files.items()}

    def modified(self, key: str) -> float | None:
        return self._times[key] if key in self.files else None

    def stamp(self, key: str) -> str | None:
        return self.version(key)

    def delete(self, key: str) -> bool:
        return self.files.pop(key, None) is not None

    def remove(self) -> None:
        """Nothing to do: a place without files is as good as none."""

    def as_file(self) -> tuple[MemoryStore, str] | None:
        folder, _, name = self.location.rpartition("/")
        store = self._root.get(folder)
        return (store, name) if store is not None and name in store.files else None

    def relative(self, place: str | os.PathLike[str]) -> str:
        name = os.fspath(place)
        return "." if name == self.location else f"../{name}"

    def at(self, location: str) -> MemoryStore:
        beside = location.removeprefix("../")
        name = beside if beside != location else f"{self.location}/{location}"
        return self._root.get(name) or MemoryStore(name, self._root)

    def folders(self) -> Sequence[str]:
        own = f"{self.location}/"
        within = (name.removeprefix(own) for name in self._root if name.startswith(own))
        return sorted(name for name in within if "/" not in name)

    def neighbours(self) -> Sequence[str]:
        return sorted(f"../{name}" for name in self._root)


def _version(content: bytes | bytearray) -> str:
    return f"{len(content)}-{hash(bytes(content)):x}"


class _MemoryFile:
    def __init__(self, content: bytearray) -> None:
        self._content = content
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return len(self._content)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self._lock:
            end = offset + sum(map(len, buffers))
            self._content.extend(bytes(max(0, end - len(self._content))))
        for buffer in buffers:
            self._content[offset : offset + len(buffer)] = buffer
            offset += len(buffer)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            part = self._content[offset : offset + len(buffer)]
            if len(part) != len(buffer):
                error = CutShortError(f"the file ends at {len(self._content)}")
                error.end = len(self._content)
                raise error
            buffer[:] = part
            offset += len(buffer)

    def start_sync(self, offset: int, nbytes: int) -> None:
        """Nothing to do."""

    def sync(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to release."""

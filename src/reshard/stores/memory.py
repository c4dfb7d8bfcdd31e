"""Files in memory, for tests and for trying things out."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MemoryStore"]


class MemoryStore:
    """A dict of files. Everything is durable as soon as it is written."""

    location = "memory"

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}

    def create(self) -> None:
        """Nothing to make."""

    def open_writer(self, key: str, nbytes: int) -> _MemoryFile:
        self.files[key] = bytearray(nbytes)
        return _MemoryFile(self.files[key])

    def open_reader(self, key: str) -> _MemoryFile:
        if key not in self.files:
            raise FileNotFoundError(f"there is no {key!r} in this memory store")
        return _MemoryFile(self.files[key])

    def sync(self) -> None:
        """Nothing to do."""

    def commit(self, key: str, data: bytes) -> None:
        self.files[key] = bytearray(data)

    def list(self) -> list[str]:
        return sorted(self.files)

    def delete(self, key: str) -> None:
        self.files.pop(key, None)


class _MemoryFile:
    def __init__(self, content: bytearray) -> None:
        self._content = content

    @property
    def nbytes(self) -> int:
        return len(self._content)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            self._content[offset : offset + len(buffer)] = buffer
            offset += len(buffer)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            part = self._content[offset : offset + len(buffer)]
            if len(part) != len(buffer):
                raise OSError(f"the file ends at {len(self._content)}, before offset {offset}")
            buffer[:] = part
            offset += len(buffer)

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        return memoryview(self._content)[offset : offset + nbytes]

    def start_sync(self, offset: int, nbytes: int) -> None:
        """Nothing to do."""

    def sync(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to release."""

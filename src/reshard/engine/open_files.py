"""Files that are read, of which only a bounded number is open at once."""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from reshard.stores.protocol import Reader

_MOST_FILES = 128


def most_open_files() -> int:
    """How many files a load may have open: a part of what the process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST_FILES
    return max(1, min(_MOST_FILES, limit // 4))


class Ahead(Protocol):
    """Bytes of files that are in memory, or on their way."""

    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> bool:
        """Fill `buffers`; False if not all of it is there."""


class OpenFiles:
    """Opens files as they are read, and closes those that were not read for longest.

    Safe to use from several threads: a file is never closed under a reader, so that there
    may be as many more open as there are threads.
    """

    def __init__(self, open_file: Callable[[str], Reader], most: int) -> None:
        self._open_file = open_file
        self._most = most
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self.ahead: Ahead | None = None
        """What was read before it was needed, if anything."""
        self.bytes_read = 0
        """What was read of all files so far."""

    def reader(self, path: str) -> Reader:
        """A reader of a file that is opened, perhaps again, when something is read."""
        return _LazyReader(self, path)

    @contextmanager
    def lend(self, path: str) -> Iterator[Reader]:
        """The open file, which stays open within the block."""
        with self._lock:
            file = self._open.get(path)
            if file is None:
                self._make_room()
                file = self._open[path] = _OpenFile(self._open_file(path))
            self._open.move_to_end(path)
            file.users += 1
        try:
            yield file.reader
        finally:
            with self._lock:
                file.users -= 1

    def count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes

    def _make_room(self) -> None:
        idle = [path for path, file in self._open.items() if not file.users]
        for path in idle[: max(0, len(self._open) - self._most + 1)]:
            self._open.pop(path).reader.close()

    def close(self) -> None:
        """Close all files. Nobody may be reading."""
        with self._lock:
            for file in self._open.values():
                file.reader.close()
            self._open.clear()


@dataclass
class _OpenFile:
    reader: Reader
    users: int = 0


class _LazyReader:
    def __init__(self, files: OpenFiles, path: str) -> None:
        self._files = files
        self._path = path

    @property
    def nbytes(self) -> int:
        with self._files.lend(self._path) as reader:
            return reader.nbytes

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        ahead = self._files.ahead
        if ahead is not None and ahead.read_into(self._path, offset, buffers):
            return
        with self._files.lend(self._path) as reader:
            reader.read_into(offset, buffers)
        self._files.count(sum(map(len, buffers)))

    def fetch(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the file, in the memory that they came in if there is such a thing."""
        with self._files.lend(self._path) as reader:
            fetch = getattr(reader, "fetch", None)
            if fetch is None:
                data = memoryview(bytearray(nbytes))
                reader.read_into(offset, [data])
            else:
                data = fetch(offset, nbytes)
        self._files.count(nbytes)
        return data

    def close(self) -> None:
        """Nothing to release: the files belong to `OpenFiles`."""

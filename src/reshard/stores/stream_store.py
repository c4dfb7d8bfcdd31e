"""A store over a `FileSystemBase`, which has streams and names and nothing else.

What that contract does not offer is not here either: no locks, so that of two saves that commit in
the same instant the last one counts; no times of files that others wrote; and without `ls` no
listing. Reads of one file take turns.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import posixpath
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from reshard.stores.file_systems import FileSystemBase, Location
from reshard.stores.protocol import CutShortError, Remote, VersionConflict
from reshard.stores.urls import location_at, relative_location

_VERSION_BYTES = 16
_MOST_PENDING_IN_MEMORY = 32 << 20


class StreamStore:
    """A directory of a file system. `probed` are keys to look for where nothing can be listed."""

    remote: Remote | None = None
    requests = 0

    def __init__(self, fs: FileSystemBase, path: Location, probed: Collection[str] = ()) -> None:
        self.location = os.fspath(path)
        self._fs = fs
        self._root = path
        self._probed = probed
        self._times: dict[str, float] = {}
        self._lock = threading.Lock()

    def _path(self, key: str) -> Location:
        return self._fs.concat_path(self._root, key)

    def create(self) -> bool:
        # Not said to be new: it could not be removed.
        self._fs.mkdir(self._root)
        return False

    def open_writer(self, key: str, nbytes: int | None) -> StreamWriter:
        if self._fs.exists(self._path(key)):
            raise FileExistsError(errno.EEXIST, "there is such a file already", self._name(key))
        self._times[key] = time.time()
        return self._writer(key, nbytes)

    def open_reader(self, key: str, ahead: int = 0, nbytes: int | None = None) -> _StreamReader:
        # Streams of object stores notice only when they are read.
        if not self._fs.exists(self._path(key)):
            raise FileNotFoundError(errno.ENOENT, "there is no such file", self._name(key))
        return _StreamReader(self._fs, self._path(key))

    def _writer(self, key: str, nbytes: int | None) -> StreamWriter:
        stream = self._fs.create_stream(self._path(key), "wb")
        return StreamWriter(stream, self._name(key), nbytes)

    def _name(self, key: str) -> str:
        return os.fspath(self._path(key))

    def sync(self) -> None:
        """Nothing to do: names are the file system's own affair."""

    def version(self, key: str) -> str | None:
        try:
            reader = self.open_reader(key)
        except FileNotFoundError:
            return None
        try:
            # A manifest ends with the checksum of all that is before.
            tail = bytearray(min(_VERSION_BYTES, reader.nbytes))
            reader.read_into(reader.nbytes - len(tail), [memoryview(tail)] if tail else [])
            return version_of(reader.nbytes, tail)
        finally:
            reader.close()

    def commit(self, draft: str, key: str, data: bytes, expected: str | None) -> str:
        with self._lock:
            if not self._fs.exists(self._path(draft)):
                raise FileNotFoundError(errno.ENOENT, "there is no such file", self._name(draft))
            found = self.version(key)
            if found != expected:
                raise VersionConflict(f"{self._name(key)} is {found}, not {expected}")
            writer = self._writer(draft, len(data))
            try:
                writer.write(0, [memoryview(data)])
                writer.sync()
            finally:
                writer.close()
            self._replace(draft, key)
            self._times.pop(draft, None)
            self._times[key] = time.time()
        return version_of(len(data), data[-_VERSION_BYTES:])

    def _replace(self, draft: str, key: str) -> None:
        try:
            self._fs.rename(self._path(draft), self._path(key))
        except FileExistsError:
            # Such a file system has no way to replace a file in one step.
            self._fs.rm_file(self._path(key))
            self._fs.rename(self._path(draft), self._path(key))

    def rename(self, key: str, new_key: str) -> None:
        with self._lock:
            self._replace(key, new_key)
            if key in self._times:
                self._times[new_key] = self._times.pop(key)

    def list(self) -> list[str]:
        if not hasattr(self._fs, "ls"):
            known = {*self._probed, *self._times}
            return sorted(key for key in known if self._fs.exists(self._path(key)))
        return _names_in(self._fs, self._root)

    def sizes(self) -> dict[str, int]:
        found = {}
        for key in self.list():
            with contextlib.closing(self.open_reader(key)) as reader:
                found[key] = reader.nbytes
        return found

    def modified(self, key: str) -> float | None:
        """When this process wrote a file; None for others, whose times are not known."""
        time_of_writing = self._times.get(key)
        is_there = time_of_writing is not None and self._fs.exists(self._path(key))
        return time_of_writing if is_there else None

    def stamp(self, key: str) -> str | None:
        """Another one each time, since nothing tells whether a file was changed."""
        return uuid.uuid4().hex if self._fs.exists(self._path(key)) else None

    def delete(self, key: str) -> bool:
        self._times.pop(key, None)
        if not self._fs.exists(self._path(key)):
            return False
        self._fs.rm_file(self._path(key))
        return True

    def remove(self) -> None:
        """Nothing to do: there is no way to remove a directory."""

    def as_file(self) -> None:
        """Nothing tells a file from a directory, so a place is always one of these."""

    def relative(self, place: str | os.PathLike[str]) -> str:
        return relative_location(self.location, os.fspath(place))

    def at(self, location: str) -> StreamStore:
        return StreamStore(self._fs, location_at(self.location, location), self._probed)

    def folders(self) -> Sequence[str]:
        """All names: nothing tells a file from a directory."""
        return _names_in(self._fs, self._root) if hasattr(self._fs, "ls") else []

    def neighbours(self) -> Sequence[str]:
        if not hasattr(self._fs, "ls"):
            raise OSError(errno.ENOTSUP, "the file system has no ls to list places", self.location)
        return [f"../{name}" for name in _names_in(self._fs, self.at("..").location)]


def _names_in(fs: Any, path: Location) -> list[str]:
    try:
        return sorted(posixpath.basename(os.fspath(each).rstrip("/")) for each in fs.ls(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def version_of(nbytes: int, tail: bytes | bytearray) -> str:
    """Which content a file has, by its size and its last bytes."""
    return f"{nbytes}-{bytes(tail).hex()}"


class StreamWriter:
    """Writes a stream from its beginning to its end, whatever order pieces come in.

    A piece that is early is kept in a temporary file until those before it are written. So no
    thread ever waits for another, which may have failed.
    """

    def __init__(self, stream: AbstractContextManager[Any], name: str, nbytes: int | None) -> None:
        self._path = name
        self._nbytes = nbytes
        self._context = stream
        self._stream = self._context.__enter__()
        self._position = 0
        self._early: dict[int, tuple[int, int]] = {}
        self._kept: Any = None
        self._lock = threading.Lock()
        self._is_open, self._is_broken = True, False

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self._lock:
            for buffer in buffers:
                if not len(buffer):
                    continue
                if offset == self._position:
                    self._pass_on(buffer)
                elif offset > self._position:
                    self._keep(offset, buffer)
                else:
                    raise OSError(errno.ESPIPE, "streams cannot be written to twice", self._path)
                offset += len(buffer)
            while self._position in self._early:
                begin, nbytes = self._early.pop(self._position)
                self._kept.seek(begin)
                self._pass_on(memoryview(self._kept.read(nbytes)))

    def _keep(self, offset: int, buffer: memoryview) -> None:
        if self._kept is None:
            self._kept = tempfile.SpooledTemporaryFile(_MOST_PENDING_IN_MEMORY)  # noqa: SIM115
        begin = self._kept.seek(0, os.SEEK_END)
        self._kept.write(buffer)
        self._early[offset] = begin, len(buffer)

    def _pass_on(self, buffer: memoryview) -> None:
        try:
            while len(buffer):
                count = self._stream.write(buffer)
                # Buffered streams take all, and some say nothing of it.
                taken = len(buffer) if count is None else count
                self._position += taken
                buffer = buffer[taken:]
        except BaseException:
            self._is_broken = True
            raise

    def start_sync(self, offset: int, nbytes: int) -> None:
        """Nothing to do."""

    def sync(self) -> None:
        with self._lock:
            if hasattr(self._stream, "flush"):
                self._stream.flush()
            with contextlib.suppress(AttributeError, io.UnsupportedOperation):
                os.fsync(self._stream.fileno())

    def close(self) -> None:
        """End the stream: the file is there when this returns, if all of it was written."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            if self._kept is not None:
                self._kept.close()
            too_short = self._nbytes is not None and self._position != self._nbytes
            if not (self._early or too_short or self._is_broken):
                self._context.__exit__(None, None, None)
                return
            reason = OSError(errno.EIO, "not all of the file was written", self._path)
            # So that the file system leaves nothing of it.
            with contextlib.suppress(OSError):
                self._context.__exit__(OSError, reason, None)


class _StreamReader:
    def __init__(self, fs: FileSystemBase, path: Location) -> None:
        self._path = os.fspath(path)
        self._context = fs.create_stream(path, "rb")
        self._stream = self._context.__enter__()
        self._lock = threading.Lock()
        self._is_open = True
        try:
            self._stream.seek(0, os.SEEK_END)
            self.nbytes: int = self._stream.tell()
        except ValueError as error:
            self.close()
            raise OSError(
                errno.ESPIPE,
                f"its stream cannot seek to the end ({error}), so that headers cannot be found: "
                "use streams that can (of s3torchconnector: pass "
                "reader_constructor=S3ReaderConstructor.default())",
                self._path,
            ) from error
        except BaseException:
            self.close()
            raise

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self._lock:
            self._stream.seek(offset)
            for buffer in buffers:
                done = 0
                while done < len(buffer):
                    data = self._stream.read(len(buffer) - done)
                    if not data:
                        raise self._cut_short(offset + done)
                    buffer[done : done + len(data)] = data
                    done += len(data)
                offset += len(buffer)

    def _cut_short(self, end: int) -> CutShortError:
        error = CutShortError(
            errno.EIO, f"the file ends at {end}, before the data that it should hold", self._path
        )
        error.end = min(end, self.nbytes)
        return error

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._context.__exit__(None, None, None)

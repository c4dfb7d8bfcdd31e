"""Files in a directory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from reshard.stores.protocol import CutShortError, Remote, VersionConflict

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
"""Locked in place of the directory where directories cannot be."""
_LOCK_PAUSE_SECONDS = 0.002
_VERSION_BYTES = 16

_MOST_BUFFERS = 1024
"""How many buffers one call of preadv and pwritev takes (IOV_MAX on Linux)."""

_SYNC_FILE_RANGE_WRITE = 2
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class LocalStore:
    """A directory. `system` is the os module; tests put a failing one in its place."""

    remote: Remote | None = None
    requests = 0
    lock_seconds = 60.0
    """How long to wait for another process that is just committing."""

    def __init__(self, path: str | os.PathLike[str], system: ModuleType | Any = os) -> None:
        # Strings from here on: joining and opening pathlib paths takes longer than the call.
        self.location = str(Path(path))
        self._system = system

    def _path(self, key: str) -> str:
        return f"{self.location}/{key}"

    def create(self) -> bool:
        missing = []
        path = self.location
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path) or "."
        if missing:
            self._system.makedirs(self.location, exist_ok=True)
        # The name of a new directory is stored in its parent.
        for path in missing:
            self._sync_directory(os.path.dirname(path) or ".")
        return bool(missing)

    def open_writer(self, key: str, nbytes: int | None) -> _LocalWriter:
        return self._open_writer(key, os.O_CREAT | os.O_EXCL)

    def _open_writer(self, key: str, flags: int) -> _LocalWriter:
        path = self._path(key)
        # Links are not followed, and a pipe is not waited for.
        flags |= os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return _LocalWriter(path, self._system.open(path, flags, 0o666), self._system)

    def open_reader(self, key: str, ahead: int = 0, nbytes: int | None = None) -> _LocalReader:
        path = self._path(key)
        # Not blocking: opening a pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        return _LocalReader(path, self._system.open(path, flags), self._system)

    def sync(self) -> None:
        self._sync_directory(self.location)

    def version(self, key: str) -> str | None:
        try:
            reader = self.open_reader(key)
        except FileNotFoundError:
            return None
        try:
            # A manifest ends with the checksum of all that is before.
            tail = bytearray(min(_VERSION_BYTES, reader.nbytes))
            reader.read_into(reader.nbytes - len(tail), [memoryview(tail)] if tail else [])
            return _version(reader.nbytes, tail)
        finally:
            reader.close()

    def commit(self, draft: str, key: str, data: bytes, expected: str | None) -> str:
        writer = self._open_writer(draft, os.O_TRUNC)
        try:
            writer.write(0, [memoryview(data)])
            writer.sync()
        finally:
            writer.close()
        with self._locked():
            found = self.version(key)
            if found != expected:
                raise VersionConflict(f"{self._path(key)} is {found}, not {expected}")
            self._system.rename(self._path(draft), self._path(key))
        self._sync_directory(self.location)
        return _version(len(data), data[-_VERSION_BYTES:])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Only one process at a time looks at a version and replaces it.

        The lock is on the directory, so that it leaves no file behind, and ends with its
        process. Network file systems lock files only, and some not even these: then two
        commits in the same instant may both succeed. The last one counts, and is whole.
        """
        with contextlib.ExitStack() as opened:
            descriptor = self._open_to_lock(opened, self.location, os.O_RDONLY | os.O_DIRECTORY)
            if not self._lock(descriptor):
                descriptor = self._open_to_lock(
                    opened, self._path(LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                )
                if not self._lock(descriptor):
                    logger.info("%s has no locks; commits to it are not serialised", self.location)
            try:
                yield
            finally:
                # Explicitly: a child that was forked meanwhile holds the descriptor as well.
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _open_to_lock(self, opened: contextlib.ExitStack, path: str, flags: int) -> int:
        descriptor: int = self._system.open(path, flags | os.O_CLOEXEC, 0o666)
        opened.callback(self._system.close, descriptor)
        return descriptor

    def _lock(self, descriptor: int) -> bool:
        """Wait for a lock; False if there is no such thing here."""
        give_up = time.monotonic() + self.lock_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    return False
            if time.monotonic() > give_up:
                raise OSError(
                    errno.ETIMEDOUT,
                    f"another process has held the lock on this directory for "
                    f"{self.lock_seconds:.0f} s. Look for a stopped process that saves to it",
                    self.location,
                )
            time.sleep(_LOCK_PAUSE_SECONDS)

    def rename(self, key: str, new_key: str) -> None:
        self._system.rename(self._path(key), self._path(new_key))

    def list(self) -> list[str]:
        try:
            return sorted(self._system.listdir(self.location))
        except FileNotFoundError:
            return []

    def sizes(self) -> dict[str, int]:
        found = {}
        for key in self.list():
            with contextlib.suppress(FileNotFoundError):
                found[key] = int(self._system.stat(self._path(key)).st_size)
        return found

    def modified(self, key: str) -> float | None:
        try:
            return float(self._system.stat(self._path(key)).st_mtime)
        except FileNotFoundError:
            return None

    def stamp(self, key: str) -> str | None:
        try:
            found = self._system.stat(self._path(key))
        except FileNotFoundError:
            return None
        # Tools that copy files set the time of the content, but nobody sets that of the change.
        numbers = (found.st_dev, found.st_ino, found.st_ctime_ns, found.st_mtime_ns, found.st_size)
        return "-".join(map(str, numbers))

    def delete(self, key: str) -> bool:
        try:
            self._system.unlink(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def remove(self) -> None:
        try:
            self._system.rmdir(self.location)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            self._sync_directory(os.path.dirname(os.path.abspath(self.location)))

    def as_file(self) -> tuple[LocalStore, str] | None:
        if not os.path.isfile(self.location):
            return None
        folder, name = os.path.split(self.location)
        return LocalStore(folder or ".", self._system), name

    def relative(self, place: str | os.PathLike[str]) -> str:
        own, other = os.path.realpath(self.location), os.path.realpath(place)
        if own == other:
            return "."
        if os.path.commonpath([own, other]) == own:
            raise ValueError(f"{other} lies within {own}")
        # Named by its parent if this place lies within it, so that a location ends with a name.
        parent, name = os.path.split(other)
        return f"{os.path.relpath(parent, own)}/{name}"

    def at(self, location: str) -> LocalStore:
        return LocalStore(os.path.realpath(f"{self.location}/{location}"), self._system)

    def folders(self) -> Sequence[str]:
        # Not `is_dir` of the entry, which raises for links that lead in a circle.
        return [name for name in self.list() if os.path.isdir(self._path(name))]

    def neighbours(self) -> Sequence[str]:
        parent, name = os.path.split(os.path.realpath(self.location))
        above, own = os.path.split(parent)
        with self._system.scandir(parent) as entries:
            # Not `is_dir` of the entry, which raises for links that lead in a circle.
            beside = [f"../{entry.name}" for entry in entries if os.path.isdir(entry.path)]
        try:
            with self._system.scandir(above) as entries:
                folders = [entry.name for entry in entries if entry.name != own]
        except PermissionError as error:
            logger.info("what lies beside %s is not looked at: %s", parent, error)
            folders = []
        paths = {f"../../{folder}/{name}": f"{above}/{folder}/{name}" for folder in folders}
        return sorted([*beside, *(each for each, path in paths.items() if os.path.isdir(path))])

    def _sync_directory(self, path: str) -> None:
        descriptor = self._system.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._system.fsync(descriptor)
        finally:
            self._system.close(descriptor)


def _version(nbytes: int, tail: bytes | bytearray) -> str:
    return f"{nbytes}-{tail.hex()}"


class _LocalFile:
    def __init__(self, path: str, descriptor: int, system: Any) -> None:
        self._path = path
        self._descriptor = descriptor
        self._system = system

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._system.close(descriptor)

    def _raise_named(self, error: OSError) -> NoReturn:
        """The kernel knows a descriptor only; a person wants to know which file it is."""
        if error.filename is not None:
            raise error
        raise OSError(error.errno, error.strerror, self._path) from None

    def _transfer(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        offset: int,
        buffers: Sequence[memoryview],
        when_stuck: Callable[[int], OSError],
    ) -> None:
        """Repeat a call that may transfer less than it was asked to."""
        for begin in range(0, len(buffers), _MOST_BUFFERS):
            rest = buffers[begin : begin + _MOST_BUFFERS]
            missing = sum(map(len, rest))
            while missing:
                try:
                    count = call(self._descriptor, rest, offset)
                except OSError as error:
                    self._raise_named(error)
                if count <= 0:
                    raise when_stuck(offset)
                offset += count
                missing -= count
                if missing:
                    rest = _without(rest, count)


def _without(buffers: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """What is left of `buffers` after their first `count` bytes."""
    whole = 0
    while count >= len(buffers[whole]):
        count -= len(buffers[whole])
        whole += 1
    return [buffers[whole][count:], *buffers[whole + 1 :]]


class _LocalWriter(_LocalFile):
    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._transfer(self._system.pwritev, offset, buffers, self._stuck)

    def _stuck(self, offset: int) -> OSError:
        return OSError(errno.EIO, f"the disk takes no more bytes at offset {offset}", self._path)

    def start_sync(self, offset: int, nbytes: int) -> None:
        # The disk works while the next piece is copied. Only a hint, so its result does not
        # matter: fsync reports what goes wrong.
        start = _sync_file_range()
        # Whole pages only: a neighbour that shares a page would have to wait for the disk.
        begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start is not None and begin < end and self._system is os:
            start(self._descriptor, begin, end - begin, _SYNC_FILE_RANGE_WRITE)

    def sync(self) -> None:
        try:
            self._system.fsync(self._descriptor)
        except OSError as error:
            self._raise_named(error)


class _LocalReader(_LocalFile):
    def __init__(self, path: str, descriptor: int, system: Any) -> None:
        super().__init__(path, descriptor, system)
        status = system.fstat(descriptor)
        self.nbytes: int = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "not a regular file", path)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._transfer(self._system.preadv, offset, buffers, self._cut_short)

    def map(self) -> memoryview:
        if not self.nbytes:
            return memoryview(b"")
        # Not the mmap module: its maps keep a descriptor each. Nothing is reserved for pages
        # that nobody may ever write to.
        system = _memory_maps()
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = system.mmap(None, self.nbytes, protection, flags, self._descriptor, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), self._path)
        memory = (ctypes.c_ubyte * self.nbytes).from_address(address)
        # When the process ends, tensors may still be in use.
        weakref.finalize(memory, system.munmap, address, self.nbytes).atexit = False
        return memoryview(memory).cast("B")

    def _cut_short(self, offset: int) -> OSError:
        error = CutShortError(
            errno.EIO,
            f"the file ends at {offset}, before the data that it should hold",
            self._path,
        )
        error.end = offset
        return error


@cache
def _sync_file_range() -> Any:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


_MAP_FAILED = ctypes.c_void_p(-1).value


@cache
def _memory_maps() -> Any:
    system = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, ctypes.c_int64]
    system.munmap.argtypes = [ctypes.c_void_p, size]
    return system

"""A store over a file system of fsspec: any URL that fsspec knows.

What such a file system promises is not known, so nothing is taken for granted:

- A file is written in order, by one stream. If that fails, the stream is discarded, and what can be
  seen of the file is deleted.
- A commit writes its draft and moves it over the manifest. Where the file system has a move that
  replaces (SFTP), or copies an object in one step (buckets), readers see one manifest or the other.
  Where it has neither, there is an instant without a manifest; and where nothing can be copied, the
  manifest is written in place, and a reader of that instant finds it damaged.
- There are no locks: of two saves that commit in the same instant the last one counts.
- A file of up to 64 KiB is read when it is opened, so that its reader is not disturbed by a commit.
  Of a longer one, a reader may see old bytes and new ones, which checksums tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import logging
import os
import posixpath
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timezone
from typing import Any

from reshard.stores.local import LocalStore
from reshard.stores.protocol import Remote, Store, VersionConflict
from reshard.stores.remote_files import RemoteFile
from reshard.stores.stream_store import StreamWriter, version_of
from reshard.stores.urls import relative_location, scheme_of, without_secrets

logger = logging.getLogger(__name__)

_VERSION_BYTES = 16
_READ_WHOLE_BYTES = 64 << 10
_REMOTE = Remote(piece_bytes=8 << 20, gap_bytes=1 << 20, concurrency=8)
_FOR_MANY_THREADS = frozenset({"memory", "file", "hf", "sftp", "ssh", "webhdfs", "hdfs"})
"""File systems that are not asynchronous, and that several threads may use all the same."""
_CHANGES_WITH_CONTENT = {
    *("etag", "md5", "md5hash", "crc32c", "sha", "oid", "blob_id", "xet_hash", "checksum"),
    *("generation", "version", "versionid", "version_id", "created"),
}
"""What a file system may say of a file that is another one once the file was replaced."""


# Choosing a file system


def fsspec() -> Any:
    """The package, which is imported when it is needed."""
    try:
        return importlib.import_module("fsspec")
    except ImportError as error:
        raise ImportError(
            "URLs need fsspec, which is not installed: pip install 'reshard[fsspec]'"
        ) from error


def known_protocol(url: str) -> bool:
    """Whether fsspec knows the scheme of a URL. Nothing is connected to, or has to be installed."""
    registry = fsspec().registry
    protocol = _protocol(url)
    return (
        protocol in registry
        or protocol in importlib.import_module("fsspec.registry").known_implementations
    )


def file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of a URL, and the path there. Some file systems connect now."""
    shown = without_secrets(url)
    try:
        fs, path = fsspec().core.url_to_fs(url, **options)
    except ImportError as error:
        raise ImportError(
            f"{shown} needs a package that is not installed: "
            f"{_how_to_install(_protocol(url), error)}"
        ) from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if any(secret in text for secret in _secrets(url, options)):
            raise ConnectionError(f"{shown} cannot be opened: {type(error).__name__}") from None
        raise ConnectionError(
            f"{shown} cannot be opened ({text}). Check the URL and storage_options"
        ) from error
    return fs, path


def _secrets(url: str, options: Mapping[str, Any]) -> list[str]:
    """What no message may hold: passwords in a URL, and options that are called like one."""
    found = re.findall(r"(?<=://)[^/:@]*:([^/]*)@", url)
    return [*found, *(str(each) for name, each in options.items() if _SECRET.search(name))]


_SECRET = re.compile("key|secret|token|pass|credential|signature", re.IGNORECASE)


def _protocol(url: str) -> str:
    """The scheme that is asked first; `file` for a path."""
    first = url.split("::", 1)[0]
    return first.split("://", 1)[0] if "://" in first or "::" in url else "file"


def _how_to_install(protocol: str, error: ImportError) -> str:
    """The command, as far as fsspec says which package it is."""
    known = importlib.import_module("fsspec.registry").known_implementations.get(protocol, {})
    package = str(known.get("class", "")).split(".")[0]
    if package in ("", "fsspec"):
        # A part of fsspec that needs another package; the import that failed names it.
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        package = (cause.name or "").split(".")[0]
    if not package:
        return str(error)
    return f"pip install {package} (fsspec says: {error})"


class Connection:
    """A file system that several stores and readers ask, and how many requests that made.

    It can be sent to another process, where it counts anew.
    """

    def __init__(self, fs: Any) -> None:
        self.fs = fs
        self.requests = 0
        self._count = threading.Lock()
        self.takes_many = fs.async_impl or not _FOR_MANY_THREADS.isdisjoint(_protocols(fs))
        self._turns = contextlib.nullcontext() if self.takes_many else threading.Lock()

    def __reduce__(self) -> Any:
        return Connection, (self.fs,)

    @property
    def is_local(self) -> bool:
        """Whether this is the file system of the machine, and nothing more."""
        local = importlib.import_module("fsspec.implementations.local").LocalFileSystem
        return type(self.fs) is local

    @property
    def is_in_this_process(self) -> bool:
        """Whether what is saved there can only be seen by this process."""
        memory = importlib.import_module("fsspec.implementations.memory").MemoryFileSystem
        fs = self.fs
        while fs is not None and not isinstance(fs, memory):
            # What others are built on, such as caches.
            fs = getattr(fs, "fs", None)
        return fs is not None

    def open(self, path: str, url: str) -> Store:
        """The store for a path, which people know as `url`."""
        if self.is_local:
            # With all that is known of local files: locks, maps, what has to be synced.
            return LocalStore(path)
        return FsspecStore(self, path, url)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the file system that makes a request."""
        with self._count:
            self.requests += 1
        with self._turns:
            return getattr(self.fs, method)(*args, **kwargs)


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


# Files


@contextlib.contextmanager
def stream(fs: Any, path: str, mode: str) -> Iterator[Any]:
    """A stream of a file. If the block raises, nothing is left of a file that was written."""
    opened = fs.open(path, mode)
    try:
        yield opened
        # Most file systems write the last part now, and some of them all of it.
        opened.close()
    except BaseException:
        if "r" in mode:
            opened.close()
        else:
            _discard(fs, path, opened)
        raise


def _discard(fs: Any, path: str, opened: Any) -> None:
    """Leave nothing of a file whose writing failed. Best effort: failures are logged."""
    buffered = importlib.import_module("fsspec.spec").AbstractBufferedFile
    # Not closed if there is another way: that would upload what is there so far.
    if not _tried(getattr(opened, "discard", opened.close), path):
        _tried(opened.close, path)
    if isinstance(opened, buffered):
        # So that the collector does not close it either. An older file stays as it was.
        opened.closed = True
    elif fs.exists(path):
        _tried(lambda: remove_file(fs, path), path)


def _tried(step: Callable[[], Any], path: str) -> bool:
    try:
        step()
    except Exception as error:  # noqa: BLE001 - whatever the file system raises
        logger.info("what was written of %s may still be there: %s", path, error)
        return False
    return True


def replace_file(fs: Any, path: str, new_path: str) -> None:
    """Give a file another name, in place of one that has it; in one step if there is a way."""
    abstract = importlib.import_module("fsspec.spec").AbstractFileSystem
    if type(fs).mv is not abstract.mv:
        try:
            fs.mv(path, new_path)
        except FileExistsError:
            # Such a file system has no way to replace a file in one step.
            remove_file(fs, new_path)
            fs.mv(path, new_path)
        return
    # Not by `copy` and `rm`, which take some characters of a name for patterns.
    try:
        fs.cp_file(path, new_path)
    except NotImplementedError:
        fs.pipe_file(new_path, fs.cat_file(path))
    remove_file(fs, path)


def remove_file(fs: Any, path: str) -> None:
    try:
        fs.rm_file(path)
    except NotImplementedError:
        fs.rm(path)


class FsspecStore:
    """A directory, or what a file system has in its place.

    `url` is how people and other checkpoints name it; passwords in it are not kept.
    """

    def __init__(self, connection: Connection, path: str, url: str) -> None:
        self.location = without_secrets(url).rstrip("/")
        self._connection = connection
        self._fs = connection.fs
        self._root = path.rstrip("/")
        self._times: dict[str, float] = {}
        self._lock = threading.Lock()
        self.remote: Remote | None = None
        if not connection.is_in_this_process:
            many = connection.takes_many
            self.remote = _REMOTE if many else dataclasses.replace(_REMOTE, concurrency=1)

    @property
    def requests(self) -> int:
        return self._connection.requests

    def __repr__(self) -> str:
        return f"FsspecStore({self.location!r})"

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _name(self, key: str) -> str:
        return f"{self.location}/{key}"

    def _info(self, path: str) -> Mapping[str, Any] | None:
        """What the file system knows of a path now; None if nothing is there."""
        self._forget(path)
        try:
            found: Mapping[str, Any] = self._connection.call("info", path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found

    def _forget(self, path: str) -> None:
        """Have the file system ask anew: other processes write here as well."""
        for each in (path, self._fs._parent(path)):
            # Some have no name for what lies above.
            with contextlib.suppress(OSError, ValueError, NotImplementedError):
                self._fs.invalidate_cache(each)

    def _file(self, key: str) -> Mapping[str, Any] | None:
        found = self._info(self._path(key))
        return None if found is None or found.get("type") == "directory" else found

    def create(self) -> bool:
        found = self._info(self._root)
        if found is not None:
            if found.get("type") != "directory":
                raise NotADirectoryError(errno.ENOTDIR, "there is a file", self.location)
            return False
        self._connection.call("makedirs", self._root, exist_ok=True)
        return True

    def open_writer(self, key: str, nbytes: int | None) -> StreamWriter:
        if self._file(key) is not None:
            raise FileExistsError(errno.EEXIST, "there is such a file already", self._name(key))
        self._times[key] = time.time()
        return self._open_writer(key, nbytes)

    def _open_writer(self, key: str, nbytes: int | None) -> StreamWriter:
        return StreamWriter(stream(self._fs, self._path(key), "wb"), self._name(key), nbytes)

    def open_reader(self, key: str, ahead: int = 0, nbytes: int | None = None) -> _FsspecReader:
        found = self._file(key)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", self._name(key))
        size = found.get("size")
        return _FsspecReader(self._connection, self._path(key), self._name(key), size, ahead)

    def sync(self) -> None:
        """Nothing to do: names are the file system's own affair."""

    def version(self, key: str) -> str | None:
        try:
            reader = self.open_reader(key)
        except FileNotFoundError:
            return None
        # A manifest ends with the checksum of all that is before.
        tail = bytearray(min(_VERSION_BYTES, reader.nbytes))
        reader.read_into(reader.nbytes - len(tail), [memoryview(tail)])
        return version_of(reader.nbytes, tail)

    def commit(self, draft: str, key: str, data: bytes, expected: str | None) -> str:
        with self._lock:
            if self._file(draft) is None:
                raise FileNotFoundError(errno.ENOENT, "there is no such file", self._name(draft))
            found = self.version(key)
            if found != expected:
                raise VersionConflict(f"{self._name(key)} is {found}, not {expected}")
            writer = self._open_writer(draft, len(data))
            try:
                writer.write(0, [memoryview(data)])
                writer.sync()
            finally:
                writer.close()
            replace_file(self._fs, self._path(draft), self._path(key))
            self._times.pop(draft, None)
            self._times[key] = time.time()
        return version_of(len(data), data[-_VERSION_BYTES:])

    def rename(self, key: str, new_key: str) -> None:
        with self._lock:
            replace_file(self._fs, self._path(key), self._path(new_key))
            if key in self._times:
                self._times[new_key] = self._times.pop(key)

    def list(self) -> list[str]:
        return sorted(self._entries(self._root))

    def sizes(self) -> dict[str, int]:
        entries = self._entries(self._root).items()
        return {name: int(each["size"]) for name, each in entries if each.get("size") is not None}

    def _entries(self, path: str) -> Mapping[str, Mapping[str, Any]]:
        """What the file system knows of all that lies in a directory, by its name."""
        self._forget(path)
        try:
            found = self._connection.call("ls", path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        entries = {}
        for each in found:
            # A listing may have the directory itself, or the file that is asked for.
            folder, _, name = each["name"].rstrip("/").rpartition("/")
            if name and folder.strip("/") == path.strip("/"):
                entries[name] = each
        return entries

    def _folders(self, path: str) -> Sequence[str]:
        entries = self._entries(path).items()
        return [name for name, each in entries if each.get("type") == "directory"]

    def modified(self, key: str) -> float | None:
        """When a file was written; None for others' files if the file system has no times."""
        if self._file(key) is None:
            return None
        try:
            found = self._connection.call("modified", self._path(key))
        except NotImplementedError:
            return self._times.get(key)
        except FileNotFoundError:
            return None
        return float((found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp())

    def stamp(self, key: str) -> str | None:
        """What the file system says of a file; another text each time if that tells nothing."""
        found = self._file(key)
        if found is None:
            return None
        telling = {name: str(each) for name, each in found.items() if each is not None}
        if any(name.lower() in _CHANGES_WITH_CONTENT for name in telling):
            return repr(sorted(telling.items()))
        return uuid.uuid4().hex

    def delete(self, key: str) -> bool:
        self._times.pop(key, None)
        if self._file(key) is None:
            return False
        try:
            remove_file(self._fs, self._path(key))
        except FileNotFoundError:
            return False
        return True

    def remove(self) -> None:
        # Not the first part of a path, which is a bucket or the like.
        if "/" not in self._root.strip("/") or self.list():
            return
        try:
            self._connection.call("rmdir", self._root)
        except (OSError, NotImplementedError) as error:
            logger.info("%s is not removed, or was not there: %s", self.location, error)

    def as_file(self) -> tuple[Store, str] | None:
        found = self._info(self._root)
        if found is None or found.get("type") != "file":
            return None
        return self.at(".."), posixpath.basename(self._root)

    def relative(self, place: str | os.PathLike[str]) -> str:
        shown = without_secrets(os.fspath(place))
        if self._reaches(shown) != self._reaches(self.location):
            raise ValueError(f"{shown} is on another store than {self.location}")
        return relative_location(self._root, self._fs._strip_protocol(shown))

    def _reaches(self, url: str) -> tuple[str, str]:
        """What all URLs of one file system have in common: the host, and caches before it."""
        chain, _, last = url.rpartition("::")
        if not chain and scheme_of(last) not in _protocols(self._fs):
            return url, ""
        return chain, repr(self._fs._get_kwargs_from_urls(last))

    def at(self, location: str) -> Store:
        scheme, mark, rest = self.location.rpartition("://")
        # Without a host there is a third slash, which stays.
        slash = "/" if rest.startswith("/") else ""
        url = f"{scheme}{mark}{slash}{posixpath.normpath(f'/{rest}/{location}').lstrip('/')}"
        return FsspecStore(self._connection, posixpath.normpath(f"{self._root}/{location}"), url)

    def folders(self) -> Sequence[str]:
        return sorted(self._folders(self._root))

    def neighbours(self) -> Sequence[str]:
        parent, name = posixpath.split(self._root)
        above, own = posixpath.split(parent)
        beside = [f"../{each}" for each in self._folders(parent)]
        others = [each for each in self._folders(above) if each != own]
        paths = {f"../../{each}/{name}": f"{above}/{each}/{name}" for each in others}
        named = [each for each, path in paths.items() if self._connection.call("isdir", path)]
        return sorted([*beside, *named])


class _FsspecReader(RemoteFile):
    """Reads ranges, each with a request of its own; any number of threads at once."""

    def __init__(
        self, connection: Connection, path: str, name: str, size: int | None, ahead: int
    ) -> None:
        super().__init__(name)
        self._connection, self._path = connection, path
        if size is None or size <= max(_READ_WHOLE_BYTES, ahead):
            # One request: what it returns is the content of one instant.
            if size != 0:
                self._start = memoryview(connection.call("cat_file", path))
            size = len(self._start)
        self.nbytes = size
        if len(self._start) < min(ahead, size):
            self._start = self._ask(0, ahead)

    def _ask(self, offset: int, nbytes: int) -> memoryview:
        abstract = importlib.import_module("fsspec.spec").AbstractFileSystem
        is_by_stream = type(self._connection.fs).cat_file is abstract.cat_file
        # Streams read megabytes ahead by default.
        exactly = {"cache_type": "none"} if is_by_stream else {}
        end = offset + nbytes
        data = self._connection.call("cat_file", self._path, offset, end, **exactly)
        if len(data) != nbytes:
            raise self._cut_short(offset + len(data))
        return memoryview(data)

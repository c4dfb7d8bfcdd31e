"""Object stores: S3, Google Cloud, Azure, and servers that speak the same, through obstore.

There are no directories and no renames: an object appears whole when its upload ends, or not at
all. The commit is one conditional request: create if absent, or replace this version only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import posixpath
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.stores.object_clients import (
    BrokenOffError,
    Clients,
    PermanentError,
    open_clients,
)
from reshard.stores.protocol import Remote, VersionConflict
from reshard.stores.remote_files import RemoteFile
from reshard.stores.urls import location_at, relative_location, scheme_of

logger = logging.getLogger(__name__)

SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss"})

_PART_BYTES = 16 << 20
_MOST_PARTS = 9_000
"""S3 takes 10,000 in one upload."""
_PIECE_BYTES = 8 << 20
_GAP_BYTES = 1 << 20
"""About what a connection transfers in the time that a request takes to be answered."""
_LEAST_AHEAD_BYTES = 4 << 10


class ObjectStore:
    """The objects under a URL such as `s3://bucket/run/step-100`.

    `options` are obstore's, and `store` (an obstore store of the bucket), `retry_seconds` and
    `concurrency` of our own. What they do not say comes from the environment.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, clients: Clients | None = None
    ) -> None:
        self._clients = open_clients(url, options) if clients is None else clients
        self.location = self._clients.normal_url(url)
        self._prefix = self._clients.path_in_bucket(self.location)
        self.remote: Remote | None = Remote(_PIECE_BYTES, _GAP_BYTES, self._clients.concurrency)

    @property
    def requests(self) -> int:
        return self._clients.requests

    def __repr__(self) -> str:
        return f"ObjectStore({self.location!r})"

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _name(self, key: str) -> str:
        return f"{self.location}/{key}"

    def create(self) -> bool:
        """Nothing to make; but a store that cannot be reached or used is an error now."""
        self.list()
        return False

    def open_writer(self, key: str, nbytes: int | None) -> _ObjectWriter:
        if self._head(key) is not None:
            raise FileExistsError(errno.EEXIST, "there is such an object already", self._name(key))
        return _ObjectWriter(self._clients, self._path(key), self._name(key), nbytes)

    def open_reader(self, key: str, ahead: int = 0, nbytes: int | None = None) -> _ObjectReader:
        return _ObjectReader(self._clients, self._path(key), self._name(key), ahead, nbytes)

    def sync(self) -> None:
        """Nothing to do: an object that is there stays."""

    def _head(self, key: str) -> Mapping[str, Any] | None:
        with contextlib.suppress(FileNotFoundError):
            found: Mapping[str, Any] = self._clients.call("head", self._path(key), self._name(key))
            return found
        return None

    def version(self, key: str) -> str | None:
        found = self._head(key)
        return None if found is None else _version(found)

    def commit(self, draft: str, key: str, data: bytes, expected: str | None) -> str:
        if self._head(draft) is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", self._name(draft))
        version = self._put_if(key, data, expected)
        try:
            self._clients.call("delete", self._path(draft), self._name(draft))
        except OSError as error:
            # It is committed, whatever becomes of the draft.
            logger.warning("a draft is left at %s: %s", self.location, error)
        return version

    def _put_if(self, key: str, data: bytes, expected: str | None) -> str:
        """Put an object in place of a version, in one request; the new version."""
        path, name = self._path(key), self._name(key)
        mode: Any = "create" if expected is None else _version_fields(expected)
        try:
            return _version(self._clients.call("put", path, name, data, mode=mode))
        except (FileExistsError, VersionConflict):
            # The request may have been repeated, since an answer was lost.
            found = self._head(key)
            if found is not None and found["size"] == len(data) and self._content(key) == data:
                return _version(found)
            raise VersionConflict(f"{name} is not the version {expected}") from None
        except PermanentError as error:
            if not error.is_unsupported:
                raise
        logger.info("%s has no conditional requests: commits to it are not serialised", name)
        found_version = self.version(key)
        if found_version != expected:
            raise VersionConflict(f"{name} is {found_version}, not {expected}")
        return _version(self._clients.call("put", path, name, data))

    def _content(self, key: str) -> bytes:
        reader = self.open_reader(key, ahead=_PART_BYTES)
        content = bytearray(reader.nbytes)
        reader.read_into(0, [memoryview(content)] if content else [])
        return bytes(content)

    def rename(self, key: str, new_key: str) -> None:
        self._clients.call("copy", self._path(key), self._name(key), self._path(new_key))
        self.delete(key)

    def list(self) -> list[str]:
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        objects, _ = self._clients.list(self._prefix, self.location)
        # Some servers have an object for the directory itself.
        return {
            posixpath.basename(each["path"]): int(each["size"])
            for each in objects
            if each["path"] != self._prefix
        }

    def modified(self, key: str) -> float | None:
        found = self._head(key)
        return None if found is None else float(found["last_modified"].timestamp())

    def stamp(self, key: str) -> str | None:
        found = self._head(key)
        if found is None:
            return None
        return f"{_version(found)}-{found['size']}-{found['last_modified'].timestamp()}"

    def delete(self, key: str) -> bool:
        if self._head(key) is None:
            return False
        try:
            self._clients.call("delete", self._path(key), self._name(key))
        except FileNotFoundError:
            return False
        return True

    def remove(self) -> None:
        """Nothing to do: a place without objects is none."""

    def as_file(self) -> tuple[ObjectStore, str] | None:
        folder, _, name = self.location.rpartition("/")
        if not self._prefix:
            return None
        parent = ObjectStore(folder, clients=self._clients)
        return (parent, name) if parent._head(name) is not None else None

    def relative(self, place: str | os.PathLike[str]) -> str:
        other = self._clients.normal_url(os.fspath(place))
        if not self._clients.is_for(other):
            raise ValueError(f"{other} is in another bucket than {self.location}")
        return relative_location(self.location, other)

    def at(self, location: str) -> ObjectStore:
        return ObjectStore(location_at(self.location, location), clients=self._clients)

    def folders(self) -> Sequence[str]:
        return sorted(self._folders(self._prefix))

    def neighbours(self) -> Sequence[str]:
        if not self._prefix:
            # Beside a bucket are other buckets, which nothing refers to.
            return ["."]
        parent, _, name = self._prefix.rpartition("/")
        beside = [f"../{each}" for each in self._folders(parent)]
        if not parent:
            return sorted(beside)
        above, _, own = parent.rpartition("/")
        others = [each for each in self._folders(above) if each != own]
        named = [each for each in others if name in self._folders(f"{above}/{each}".lstrip("/"))]
        return sorted([*beside, *(f"../../{each}/{name}" for each in named)])

    def _folders(self, prefix: str) -> Sequence[str]:
        _, folders = self._clients.list(prefix, self.location)
        return [posixpath.basename(each.rstrip("/")) for each in folders]


class Connection:
    """Opens places on object stores; those of one bucket share their connections.

    It can be sent to another process, which then makes connections of its own.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = options
        self._clients: Clients | None = None
        self._closed_requests = 0

    def __repr__(self) -> str:
        return "Connection()"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_clients": None}

    def open(self, url: str) -> ObjectStore:
        if self._clients is None or not self._clients.is_for(url):
            self._closed_requests = self.requests
            self._clients = open_clients(url, self._options)
        return ObjectStore(url, clients=self._clients)

    @property
    def requests(self) -> int:
        """How many requests were made so far."""
        return self._closed_requests + (self._clients.requests if self._clients else 0)


def is_object_url(place: object) -> bool:
    """Whether a place is a URL of an object store."""
    return scheme_of(place) in SCHEMES


def _version(found: Mapping[str, Any]) -> str:
    return f"{found.get('e_tag') or ''}|{found.get('version') or ''}"


def _version_fields(version: str) -> dict[str, str]:
    e_tag, _, number = version.partition("|")
    return {name: text for name, text in (("e_tag", e_tag), ("version", number)) if text}


class _ObjectWriter:
    """Uploads an object from its beginning to its end, in parts, some at the same time.

    A piece that is early is kept until those before it are there.
    """

    def __init__(self, clients: Clients, path: str, name: str, nbytes: int | None) -> None:
        self._clients, self._path, self._name, self._nbytes = clients, path, name, nbytes
        self._early: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._position = 0
        self._is_open, self._is_broken = True, False
        self._whole: bytearray | None = None
        self._upload: Any = None
        if nbytes is not None and nbytes <= _PART_BYTES:
            self._whole = bytearray()
        else:
            part = max(_PART_BYTES, -(-(nbytes or 0) // _MOST_PARTS))
            self._upload = clients.open_upload(path, name, part)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self._lock:
            for buffer in buffers:
                if offset < self._position or not self._is_open:
                    raise OSError(errno.ESPIPE, "objects cannot be written to twice", self._name)
                if self._nbytes is not None and offset + len(buffer) > self._nbytes:
                    raise OSError(errno.EFBIG, f"more than {self._nbytes} bytes", self._name)
                if offset == self._position:
                    self._pass_on(buffer)
                elif len(buffer):
                    self._early[offset] = bytes(buffer)
                offset += len(buffer)
            while self._position in self._early:
                self._pass_on(memoryview(self._early.pop(self._position)))

    def _pass_on(self, buffer: memoryview) -> None:
        try:
            if self._whole is not None:
                self._whole += buffer
            elif len(buffer):
                self._upload.write(buffer)
        except BaseException:
            self._is_broken = True
            raise
        self._position += len(buffer)

    def start_sync(self, offset: int, nbytes: int) -> None:
        """Nothing to do: parts are sent as they are complete."""

    def sync(self) -> None:
        with self._lock:
            self._finish()

    def _finish(self) -> None:
        """End the upload: the object is there when this returns."""
        if not self._is_open:
            return
        self._is_open = False
        if self._early or (self._nbytes is not None and self._position != self._nbytes):
            self._abort()
            raise OSError(errno.EIO, "not all of the object was written", self._name)
        if self._whole is None:
            self._end_upload()
            return
        data, self._whole = self._whole, None
        try:
            self._clients.call("put", self._path, self._name, data, mode="create")
        except FileExistsError:
            # The request may have been repeated, since an answer was lost.
            reader = _ObjectReader(self._clients, self._path, self._name, _PART_BYTES)
            content = bytearray(reader.nbytes)
            reader.read_into(0, [memoryview(content)] if content else [])
            if content != data:
                raise
        except PermanentError as error:
            if not error.is_unsupported:
                raise
            self._clients.call("put", self._path, self._name, data)

    def _end_upload(self) -> None:
        try:
            self._upload.close()
        except BaseException as error:
            if isinstance(error, BrokenOffError) and self._is_there():
                return
            self._abort()
            raise

    def _is_there(self) -> bool:
        try:
            found = self._clients.call("head", self._path, self._name)
        except OSError:
            return False
        return bool(found["size"] == self._position)

    def _abort(self) -> None:
        if self._upload is not None:
            self._upload.abort()

    def close(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            is_short = self._nbytes is not None and self._position != self._nbytes
            if self._is_broken or self._early or is_short:
                self._is_open = False
                self._abort()
            else:
                self._finish()


class _ObjectReader(RemoteFile):
    def __init__(
        self, clients: Clients, path: str, name: str, ahead: int = 0, nbytes: int | None = None
    ) -> None:
        super().__init__(name)
        self._clients, self._path = clients, path
        self._e_tag: str | None = None
        if nbytes is None or ahead:
            about, self._start = clients.get_range(path, name, 0, max(ahead, _LEAST_AHEAD_BYTES))
            size = int(about["size"])
            nbytes = size if nbytes is None else min(size, nbytes)
            self._e_tag = about.get("e_tag")
        self.nbytes = nbytes

    def _ask(self, offset: int, nbytes: int) -> memoryview:
        about, found = self._clients.get_range(self._path, self._name, offset, nbytes, self._e_tag)
        if len(found) != nbytes:
            raise self._cut_short(int(about["size"]))
        self._e_tag = about.get("e_tag")
        return found

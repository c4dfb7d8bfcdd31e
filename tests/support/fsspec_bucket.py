"""A file system of fsspec that is like a bucket: what is written counts when it is closed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

from fsspec.registry import register_implementation
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class Bucket(AbstractFileSystem):
    """Objects in a dict; no directories, no times, no ranges but what a cached stream reads.

    `failing` names the kind of call that fails; `uploads` are those begun and not ended.
    """

    protocol = "bucketfs"
    objects: ClassVar[dict[str, bytes]] = {}
    uploads: ClassVar[set[int]] = set()
    calls: ClassVar[list[str]] = []
    options: ClassVar[list[dict[str, Any]]] = []
    failing: ClassVar[str] = ""
    lock = threading.Lock()

    def __init__(self, host: str = "", **kwargs: Any) -> None:
        super().__init__(host=host, **kwargs)
        type(self).options.append({"host": host, **kwargs})

    @classmethod
    def clear(cls) -> None:
        cls.clear_instance_cache()
        for each in (cls.objects, cls.uploads, cls.calls, cls.options):
            each.clear()
        cls.failing = ""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("bucketfs://").rpartition("@")[2].strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        user, at, _ = path.removeprefix("bucketfs://").rpartition("@")
        name, _, password = user.partition(":")
        found = {"username": name, "password": password} if at else {}
        return {key: value for key, value in found.items() if value}

    def call(self, kind: str) -> None:
        with self.lock:
            type(self).calls.append(kind)
        if kind == self.failing:
            raise ConnectionResetError(f"{kind} failed, as it was told to")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        self.call("ls")
        path = self._strip_protocol(path)
        found = {}
        for key, data in list(self.objects.items()):
            if key == path:
                found[key] = {"name": key, "size": len(data), "type": "file"}
            elif key.startswith(f"{path}/"):
                name = key[len(path) + 1 :]
                child = f"{path}/{name.partition('/')[0]}"
                kind = "directory" if "/" in name else "file"
                size = 0 if kind == "directory" else len(data)
                found[child] = {"name": child, "size": size, "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return [*found.values()] if detail else [*found]

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Object:
        if mode == "rb" and path not in self.objects:
            raise FileNotFoundError(path)
        return Object(self, path, mode, **kwargs)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.call("copy")
        self.objects[self._strip_protocol(path2)] = self.objects[self._strip_protocol(path1)]

    def _rm(self, path: str) -> None:
        self.call("delete")
        del self.objects[self._strip_protocol(path)]


@contextlib.contextmanager
def installed_bucket() -> Iterator[None]:
    """Within this, fsspec knows the file system, and it is empty."""
    register_implementation("bucketfs", Bucket, clobber=True)
    Bucket.clear()
    yield
    Bucket.clear()


class Object(AbstractBufferedFile):
    """A multipart upload, or a download by ranges."""

    DEFAULT_BLOCK_SIZE = 1 << 14

    def _initiate_upload(self) -> None:
        self.fs.call("begin")
        self.parts: list[bytes] = []
        self.fs.uploads.add(id(self))

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.call("finish" if final else "part")
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = b"".join(self.parts)
            self.fs.uploads.discard(id(self))
        return True

    def discard(self) -> None:
        self.fs.uploads.discard(id(self))

    def _fetch_range(self, start: int, end: int) -> bytes:
        self.fs.call(f"range of {end - start}")
        return self.fs.objects[self.path][start:end]

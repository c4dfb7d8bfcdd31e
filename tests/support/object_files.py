"""A file system of a user's, over something like a bucket: no directories, no seeking writes."""

from __future__ import annotations

import contextlib
import io
import os
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reshard
from reshard.filesystem import FileSystemBase

SCHEME = "bucket://"


class Upload(io.RawIOBase):
    """Takes bytes one after the other, and cannot go back."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)


class Objects(FileSystemBase):
    """Objects in a directory of the machine, each in a file named by its whole key."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.calls: list[str] = []

    def _file(self, path: str | os.PathLike[str]) -> Path:
        text = os.fspath(path)
        assert text.startswith(SCHEME), text
        return self.root / urllib.parse.quote(text.removeprefix(SCHEME), safe="")

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        self.calls.append(f"{mode} {os.fspath(path).rpartition('/')[2]}")
        if mode == "rb":
            with self._file(path).open("rb") as stream:
                yield stream
            return
        assert mode == "wb", mode
        upload = Upload()
        yield upload
        self._put(path, upload.data)

    def _put(self, path: str | os.PathLike[str], data: bytes | bytearray) -> None:
        """Like an upload: nothing is there before all of it is."""
        draft = self.root.parent / f"{self.root.name}-{uuid.uuid4()}"
        draft.write_bytes(data)
        draft.replace(self._file(path))

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._put(new_path, self._file(path).read_bytes())
        self._file(path).unlink()

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return str(checkpoint_id).startswith(SCHEME)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._file(path).exists()

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._file(path).unlink()

    def all_keys(self) -> list[str]:
        return sorted(urllib.parse.unquote(file.name) for file in self.root.iterdir())


class ListedObjects(Objects):
    """The same with a listing, as file systems of fsspec have."""

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        prefix = os.fspath(path).removeprefix(SCHEME).rstrip("/") + "/"
        below = [key.removeprefix(prefix) for key in self.all_keys() if key.startswith(prefix)]
        return sorted({f"{SCHEME}{prefix}{name.partition('/')[0]}" for name in below})


class ObjectWriter(reshard.FileSystemWriter):
    """As connectors to object stores write it."""

    def __init__(self, root: Any, path: str, kind: type[Objects] = Objects, **kwargs: Any) -> None:
        super().__init__(path=path, sync_files=False, **kwargs)
        self.fs = kind(root)
        self.path = self.fs.init_path(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Objects.validate_checkpoint_id(checkpoint_id)


class ObjectReader(reshard.FileSystemReader):
    """The same for reading."""

    def __init__(self, root: Any, path: str, kind: type[Objects] = Objects) -> None:
        super().__init__(path)
        self.fs = kind(root)
        self.path = self.fs.init_path(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Objects.validate_checkpoint_id(checkpoint_id)

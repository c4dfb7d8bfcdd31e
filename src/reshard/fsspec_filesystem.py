"""Checkpoints anywhere that fsspec reaches, under the names that DCP users import."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from reshard.filesystem import (
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
    SerializationFormat,
)
from reshard.metadata import StorageMeta
from reshard.stores import fsspec_store as store
from reshard.stores.protocol import Store
from reshard.stores.urls import path_of, without_secrets

__all__ = ["FsspecReader", "FsspecWriter"]


class FileSystem(FileSystemBase):
    """A file system of fsspec, chosen by the first path that it gets ready for."""

    connection: store.Connection

    def __init__(self) -> None:
        self.fs: Any = None
        self._options: Mapping[str, Any] = {}
        self._path_in_fs = ""

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> AbstractContextManager[Any]:
        return store.stream(self.fs, os.fspath(path), mode)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return os.path.join(path, suffix)

    def init_path(self, path: str | os.PathLike[str], **kwargs: Any) -> str | os.PathLike[str]:
        """Connect to the file system of a path. Options stay what they are until others come."""
        self._options = kwargs or self._options
        self.fs, self._path_in_fs = store.file_system(os.fspath(path), self._options)
        if not hasattr(self, "connection") or self.connection.fs is not self.fs:
            self.connection = store.Connection(self.fs)
        return path

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        store.replace_file(self.fs, os.fspath(path), os.fspath(new_path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self.fs.makedirs(os.fspath(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        if isinstance(checkpoint_id, Path) or not isinstance(checkpoint_id, str | os.PathLike):
            return False
        return store.known_protocol(os.fspath(checkpoint_id))

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return bool(self.fs.exists(os.fspath(path)))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        store.remove_file(self.fs, os.fspath(path))

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """The paths of all that lies in a directory."""
        return list(self.fs.ls(os.fspath(path), detail=False))

    def open_store(self, path: str | os.PathLike[str]) -> Store:
        """What bytes at the path are written to and read from that this is ready for."""
        return self.connection.open(self._path_in_fs, os.fspath(path))


_FileSystem = FileSystem
"""What torch 2.15 calls it."""


class FsspecWriter(FileSystemWriter):
    """Writes a checkpoint to any place that fsspec has a file system for.

    `kwargs` are the options of that file system. A local one is written to as `FileSystemWriter`
    does it. Others get each file in one stream, which counts when it is closed; the manifest comes
    last. How far that is atomic depends on them: `reshard.stores.fsspec_store` says it.

    A `thread_count` of 1 chooses by the number of cores; streams are written by one thread all the
    same. `per_thread_copy_ahead` and `serialization_format` are accepted and have no effect.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        cache_staged_state_dict: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            path,
            single_file_per_rank,
            sync_files,
            0 if thread_count == 1 else thread_count,
            per_thread_copy_ahead,
            cache_staged_state_dict,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
        )
        self.fs: FileSystemBase = _connect(path, kwargs)
        self.path: str | os.PathLike[str] = path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return FileSystem.validate_checkpoint_id(checkpoint_id)

    @property
    def is_on_disk(self) -> bool:
        return type(self.fs) is FileSystem and self.fs.connection.is_local

    @property
    def is_in_this_process(self) -> bool:
        return isinstance(self.fs, FileSystem) and self.fs.connection.is_in_this_process

    def shared_place(self, checkpoint_id: str | os.PathLike[str] | None = None) -> str | None:
        chosen = path_of(self.path if checkpoint_id is None else checkpoint_id)
        if not chosen or type(self.fs) is not FileSystem:
            return None
        return without_secrets(chosen) if "://" in chosen else os.path.realpath(chosen)

    def storage_meta(self) -> StorageMeta:
        shown = without_secrets(os.fspath(self.path))
        return StorageMeta(checkpoint_id=shown, save_id=self.save_id)

    def open_store(self) -> Store:
        return (
            self.fs.open_store(self.path) if type(self.fs) is FileSystem else super().open_store()
        )


class FsspecReader(FileSystemReader):
    """Reads a checkpoint from any place that fsspec has a file system for.

    `kwargs` are the options of that file system. Bytes are read as ranges, several at a time.
    """

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(path)
        self.fs: FileSystemBase = _connect(path, kwargs)
        self.path: str | os.PathLike[str] = path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return FileSystem.validate_checkpoint_id(checkpoint_id)

    @property
    def requests_made(self) -> int:
        return self.fs.connection.requests if type(self.fs) is FileSystem else 0

    def open_store(self) -> Store:
        return (
            self.fs.open_store(self.path) if type(self.fs) is FileSystem else super().open_store()
        )


def _connect(path: str | os.PathLike[str], options: Mapping[str, Any]) -> FileSystem:
    fs = FileSystem()
    fs.init_path(path, **options)
    return fs

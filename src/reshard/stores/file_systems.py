"""File systems as streams and names: the contract that storages of users are built on.

`StreamStore` turns one into a store. The local file system has a store of its own, which is faster.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

Location = str | os.PathLike[str]


class FileSystemBase(abc.ABC):
    """Where a `FileSystemWriter` writes to and a `FileSystemReader` reads from.

    Made to be subclassed, for object stores and the like: set `self.fs` of a writer or reader to
    one. A subclass may also have `ls(path)`, the paths of all that lies in a directory; without
    it, files of failed and replaced saves stay until somebody deletes them.
    """

    @abc.abstractmethod
    def create_stream(self, path: Location, mode: str) -> AbstractContextManager[Any]:
        """A context with a stream of bytes.

        `mode` is "wb" for a new file in place of any that is there, written from the beginning
        to the end, or "rb", in which case the stream can seek. If the block raises, nothing
        should be left of a file that was written.
        """

    @abc.abstractmethod
    def concat_path(self, path: Location, suffix: str) -> Location:
        """The path of a file or directory within a directory."""

    @abc.abstractmethod
    def rename(self, path: Location, new_path: Location) -> None:
        """Give a file another name. Best in one step, also if there is a file of that name."""

    @abc.abstractmethod
    def init_path(self, path: Location) -> Location:
        """Get ready to use a path, and return it in the form that other methods take."""

    @abc.abstractmethod
    def mkdir(self, path: Location) -> None:
        """Make a directory and its parents, if there is such a thing. It may be there already."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: Location) -> bool:
        """Whether this is a path for this file system. Nothing has to be there."""

    @abc.abstractmethod
    def exists(self, path: Location) -> bool:
        """Whether there is a file or a directory at `path`."""

    @abc.abstractmethod
    def rm_file(self, path: Location) -> None:
        """Delete a file."""


class FileSystem(FileSystemBase):
    """The file system of this machine."""

    @contextmanager
    def create_stream(self, path: Location, mode: str) -> Iterator[Any]:
        with Path(path).open(mode) as stream:
            yield stream

    def concat_path(self, path: Location, suffix: str) -> Location:
        return Path(path) / suffix

    def rename(self, path: Location, new_path: Location) -> None:
        Path(path).rename(new_path)

    def init_path(self, path: Location) -> Location:
        return Path(path)

    def mkdir(self, path: Location) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Location) -> bool:
        if not isinstance(checkpoint_id, str | os.PathLike):
            raise TypeError(
                f"a checkpoint_id is a path, as text or a pathlib.Path, not {checkpoint_id!r}"
            )
        return isinstance(checkpoint_id, os.PathLike) or "://" not in checkpoint_id

    def exists(self, path: Location) -> bool:
        return Path(path).exists()

    def rm_file(self, path: Location) -> None:
        Path(path).unlink()

    def ls(self, path: Location) -> list[str]:
        """The paths of all that lies in a directory."""
        return [str(found) for found in Path(path).iterdir()]

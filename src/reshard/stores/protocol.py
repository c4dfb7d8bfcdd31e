"""What a store must do. A few verbs; every store passes the same conformance tests.

A key is a relative name such as `.metadata`. A file is written once, by its creator.
Nothing that is written has to outlive a crash before `sync` (for a file, its writer's)
returned, and `commit` publishes one key atomically: readers see the whole of it or what was
there before, and a commit replaces only the version that it expects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class VersionConflict(Exception):  # noqa: N818 - control flow between a store and its user
    """A commit found another version in its place than the one that it was to replace."""


@dataclass(frozen=True)
class Remote:
    """How to ask a store that takes a while to answer, whatever it is asked for."""

    piece_bytes: int
    """How much to ask for at once."""
    gap_bytes: int
    """How many bytes that nobody wants cost less than another request."""
    concurrency: int
    """How many requests to make at the same time."""


class Writer(Protocol):
    """A file that is being written, from several threads if need be.

    Of a remote store the pieces should come in order: those that are early are kept in memory.
    """

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` one after the other from `offset` on; all or an error.

        `CutShortError` if the file is too short.
        """

    def start_sync(self, offset: int, nbytes: int) -> None:
        """Begin to make a range durable, without waiting; `sync` will be faster then."""

    def sync(self) -> None:
        """Make what was written durable."""

    def close(self) -> None:
        """Release the file. It may be called more than once.

        A file whose size was given, and of which not all was written, need not be there then.
        """


class CutShortError(OSError):
    """A file ends before the bytes that were asked for. `end` is where."""

    end: int = 0


class Reader(Protocol):
    """A file that is being read, from several threads if need be."""

    @property
    def nbytes(self) -> int:
        """The size of the file."""

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` one after the other from `offset` on; all or an error."""

    def close(self) -> None:
        """Release the file. It may be called more than once."""


@runtime_checkable
class Mappable(Protocol):
    """A reader that can map its file. Optional: what cannot be mapped is read."""

    def map(self) -> memoryview:
        """The whole file as private memory, which may be written to; OSError if that fails.

        A page is read when it is touched. Until it is written to, it is shared with all
        processes that map the file; writing changes neither the file nor what they see. The
        map outlives the reader, and ends with the last view of it.
        """


class Store(Protocol):
    """One place that holds the files of one checkpoint."""

    @property
    def remote(self) -> Remote | None:
        """How to ask this store; None if it answers at once."""

    @property
    def requests(self) -> int:
        """How many requests were made to a remote store so far, by this and what it opened."""

    @property
    def location(self) -> str:
        """How to name the place to a person. It holds no secret."""

    def create(self) -> bool:
        """Make the place, if it has to be made; whether that was so."""

    def open_writer(self, key: str, nbytes: int | None) -> Writer:
        """A new file; FileExistsError if there is one of that key.

        Its size, if that is known; otherwise it is as long as what is written to it.
        """

    def open_reader(self, key: str, ahead: int = 0, nbytes: int | None = None) -> Reader:
        """A file that is there; FileNotFoundError if it is not.

        The first `ahead` bytes will be read: a remote store sends them with its first answer. If
        the size is known to be `nbytes`, a remote store is not asked before something is read:
        then it is a FileNotFoundError, or a `CutShortError` if the file is shorter.
        """

    def sync(self) -> None:
        """Make the names of all files written so far durable."""

    def version(self, key: str) -> str | None:
        """Which content a file has; None if there is no such file."""

    def commit(self, draft: str, key: str, data: bytes, expected: str | None) -> str:
        """Publish `data` under `key`, atomically and durably, in place of version `expected`.

        Returns the new version. Raises `VersionConflict` if another version is there. `draft`
        is a file that only the caller writes; a commit uses it up, and
        without it nothing is committed (FileNotFoundError).
        """

    def rename(self, key: str, new_key: str) -> None:
        """Give a file that is written another name, in place of a file that has it."""

    def list(self) -> list[str]:
        """All keys; none if the place does not exist."""

    def sizes(self) -> Mapping[str, int]:
        """All keys, and how long their files are."""

    def modified(self, key: str) -> float | None:
        """When a file was written, in seconds of the store's own clock; None without it."""

    def stamp(self, key: str) -> str | None:
        """A text that is another one once the file was changed or replaced; None without it.

        Found without reading the file.
        """

    def delete(self, key: str) -> bool:
        """Remove a file; whether it was there."""

    def remove(self) -> None:
        """Remove the place itself, if it is empty."""

    def as_file(self) -> tuple[Store, str] | None:
        """If this place is a file itself: the place that it lies in, and its key there."""

    def relative(self, place: str | os.PathLike[str]) -> str:
        """Another place as seen from this one: `../name`, or more parts; `.` for this one.

        Raises `ValueError` for a place within this one.
        """

    def at(self, location: str) -> Store:
        """The place that `relative` gave a location for."""

    def folders(self) -> Sequence[str]:
        """The names of the places right within this one; none if it does not exist."""

    def neighbours(self) -> Sequence[str]:
        """The locations of all places beside this one, this one included.

        Also of those that have its name and lie in a folder beside its own, such as
        `../../step-2/model` for `step-1/model`.
        """

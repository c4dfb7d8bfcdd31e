"""What a store must do. A few verbs; every store passes the same conformance tests.

A key is a relative name such as `__0_0.safetensors`. Nothing that is written has to
outlive a crash before `sync` (for a file, its writer's) returned, and `commit` publishes
one key atomically: readers see the whole of it or what was there before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Reader", "Store", "Writer"]


class Writer(Protocol):
    """A file of known size that is being written, from several threads if need be."""

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` one after the other from `offset` on; all or an error."""

    def start_sync(self, offset: int, nbytes: int) -> None:
        """Begin to make a range durable, without waiting; `sync` will be faster then."""

    def sync(self) -> None:
        """Make what was written durable."""

    def close(self) -> None:
        """Release the file. It may be called more than once."""


class Reader(Protocol):
    """A file that is being read, from several threads if need be."""

    @property
    def nbytes(self) -> int:
        """The size of the file."""

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` one after the other from `offset` on; all or an error."""

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """The bytes themselves, to be read only; None if that would take any I/O."""

    def close(self) -> None:
        """Release the file. It may be called more than once."""


class Store(Protocol):
    """One place that holds the files of one checkpoint."""

    @property
    def location(self) -> str:
        """How to name the place to a person."""

    def create(self) -> None:
        """Make the place, if it has to be made. Harmless if it is there."""

    def open_writer(self, key: str, nbytes: int) -> Writer:
        """A new file; one of the same key that is there is replaced at once."""

    def open_reader(self, key: str) -> Reader:
        """A file that is there; FileNotFoundError if it is not."""

    def sync(self) -> None:
        """Make the names of all files written so far durable."""

    def commit(self, key: str, data: bytes) -> None:
        """Publish `data` under `key`, atomically and durably."""

    def list(self) -> list[str]:
        """All keys; none if the place does not exist."""

    def delete(self, key: str) -> None:
        """Remove a file; harmless if it is not there."""

"""Stand-ins for the os module that die, fail or fall short at a chosen call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import reshard
from reshard.stores.local import LocalStore

CHANGING = ("makedirs", "open", "pwritev", "fsync", "close", "rename", "unlink", "rmdir")


class WatchedSystem:
    """The os module. Calls that matter to a save are counted, and `on_call` sees them first.

    `on_call(number, name, proceed)` makes the call by calling `proceed()`, or does not.
    """

    def __init__(self, on_call: Callable[[int, str, Callable[[], Any]], Any]) -> None:
        self._on_call = on_call
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CHANGING:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            number = len(self.calls)
            self.calls.append((name, args, None))
            result = self._on_call(number, name, lambda: real(*args, **kwargs))
            self.calls[number] = (name, args, result)
            return result

        return call


def watching() -> WatchedSystem:
    """A system on which nothing goes wrong."""
    return WatchedSystem(lambda number, name, proceed: proceed())


def dying(at: int, after: bool) -> WatchedSystem:
    """A system on which the process is killed just before call `at`, or just after it."""

    def on_call(number: int, name: str, proceed: Callable[[], Any]) -> Any:
        if number == at and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return proceed()
        finally:
            if number == at:
                os.kill(os.getpid(), signal.SIGKILL)

    return WatchedSystem(on_call)


def refusing(error: int, at: int | None = None, name: str | None = None) -> WatchedSystem:
    """A system on which call `at`, or every call of that name, fails with an error number.

    Like the kernel, it does not say which file it was.
    """

    def on_call(number: int, called: str, proceed: Callable[[], Any]) -> Any:
        if number == at or called == name:
            if called == "close":
                proceed()
            raise OSError(error, os.strerror(error))
        return proceed()

    return WatchedSystem(on_call)


class ShortSystem:
    """A system on which each call transfers few bytes, and writes none from `stuck_at` on."""

    def __init__(self, most_bytes: int, stuck_at: int | None = None) -> None:
        self._most_bytes = most_bytes
        self._stuck_at = stuck_at
        self.transfers = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._stuck_at is not None and offset >= self._stuck_at:
            return 0
        return self._transfer(os.pwritev, descriptor, buffers, offset)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._transfer(os.preadv, descriptor, buffers, offset)

    def _transfer(
        self, call: Any, descriptor: int, buffers: Sequence[memoryview], offset: int
    ) -> int:
        self.transfers += 1
        left, some = self._most_bytes, []
        for buffer in buffers:
            some.append(buffer[:left])
            left -= len(some[-1])
            if not left:
                break
        return int(call(descriptor, some, offset))


class WriterOn(reshard.FileSystemWriter):
    """Writes through a stand-in, with one thread so that calls come in a fixed order."""

    def __init__(self, path: str | Path, system: Any, **options: Any) -> None:
        super().__init__(path, thread_count=1, **options)
        self.system = system

    def open_store(self) -> LocalStore:
        return LocalStore(self.path, system=self.system)


class ReaderOn(reshard.FileSystemReader):
    """Reads through a stand-in."""

    def __init__(self, path: str | Path, system: Any, **options: Any) -> None:
        super().__init__(path, **options)
        self.system = system

    def open_store(self) -> LocalStore:
        return LocalStore(self.path, system=self.system)

"""What a process has one of: made when it is first asked for, and anew in a forked child.

A child shares memory, files and connections with its parent, but has none of its threads, and
its locks may be held by them. So it begins with nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Generic, TypeVar

T = TypeVar("T")

_all: list[ProcessWide[object]] = []
_of_parents: list[object] = []
"""What a forked child inherited, and leaves alone."""


class ProcessWide(Generic[T]):
    """The one object of its kind in a process. Call it to get the object.

    `release` gives back what the object holds. The object stays, and takes what it needs anew.
    """

    def __init__(self, make: Callable[[], T], release: Callable[[T], object] | None = None) -> None:
        self._make = make
        self._release = release
        self._made: list[T] = []
        self._lock = threading.Lock()
        _all.append(self)  # type: ignore[arg-type]

    def __call__(self) -> T:
        if not self._made:
            with self._lock:
                if not self._made:
                    self._made.append(self._make())
        return self._made[0]

    def release(self) -> None:
        """Give back what the object holds, if there is one."""
        if self._release is not None and self._made:
            self._release(self._made[0])

    def _forget(self) -> None:
        # What is the parent's is not taken apart: that could end its worker or join its threads.
        _of_parents.append(self._made)
        # Another thread of the parent may have held the lock.
        self._made, self._lock = [], threading.Lock()


def release_all() -> None:
    """Give back what this process holds, the last that was defined first.

    What cannot be given back does not keep the rest; its error is raised in the end.
    """
    with ExitStack() as stack:
        for each in _all:
            stack.callback(each.release)


def after_fork(reset: Callable[[], None]) -> None:
    """Have `reset` called in every forked child, before anything else of it runs."""
    os.register_at_fork(after_in_child=reset)


def _forget_all() -> None:
    for each in _all:
        each._forget()


after_fork(_forget_all)

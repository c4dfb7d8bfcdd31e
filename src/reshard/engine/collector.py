"""Keeping Python's cyclic garbage collector out of the way, for moments at a time."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from reshard.engine.process_wide import after_fork

_NEVER = 2_000_000_011
"""A threshold that is never reached, and that no other code would choose."""


@contextmanager
def paused_collection() -> Iterator[None]:
    """No cyclic collection while the block runs, in any thread.

    For short stretches that make many objects and no cycles: the collector would go
    through all objects of the process again and again, which takes half of the time that
    a state dict of many tensors costs.

    The threshold is raised; whether the collector is enabled is left to the user, who may
    change that meanwhile, or set another threshold, which then stays.

    Blocks nest and may overlap in several threads. The threshold is as it was when the
    last one ends, in a forked child at once, and also when an interrupt hits the pause
    itself. There is no lock, which an interrupt could leave locked; whenever two threads
    are in each other's way, the outcome is a collector that runs.
    """
    pause = next(_numbers)
    try:
        try:
            _pauses.add(pause)
            found = gc.get_threshold()
            # The collector never runs by itself at a threshold of 0.
            if found[0] not in (0, _NEVER):
                # Recorded first: an interrupt in between does no harm.
                _before[:] = found
                gc.set_threshold(_NEVER, *found[1:])
            yield
        finally:
            _end(pause)
    finally:
        # Once more, in case that an interrupt hit the first.
        _end(pause)


def paused_in_front() -> AbstractContextManager[None]:
    """The same for all of an operation that the main thread waits for; else nothing.

    Most of what an operation makes is gone when it ends. A pause that ended earlier would
    have the collector go through all of it, several times.
    """
    in_front = threading.current_thread() is threading.main_thread()
    return paused_collection() if in_front else nullcontext()


def _end(pause: int) -> None:
    _pauses.discard(pause)
    if not _pauses:
        _restore()


def _restore() -> None:
    if gc.get_threshold()[0] == _NEVER:
        gc.set_threshold(*_before)


_numbers = itertools.count()
_pauses: set[int] = set()
"""Those that are going on."""
_before = list(gc.get_threshold())
"""The thresholds that the latest pause found."""


def _end_all() -> None:
    """A child has only one of its parent's threads, so the other pauses would never end."""
    _pauses.clear()
    _restore()


after_fork(_end_all)

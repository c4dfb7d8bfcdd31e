"""Keeping Python's cyclic garbage collector out of the way, for moments at a time."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_collection"]


@contextmanager
def paused_collection() -> Iterator[None]:
    """No cyclic collection while the block runs, in any thread.

    For short stretches that make many objects and no cycles: the collector would go
    through all objects of the process again and again, which takes half of the time that
    a state dict of many tensors costs. Never held while waiting for a disk or a rank.

    Blocks nest and may overlap in several threads. The collector is as it was when the
    last one ends, in a forked child at once, and also when an interrupt hits the pause
    itself. There is no lock, which an interrupt could leave locked; whenever two threads
    are in each other's way, the outcome is a collector that runs.
    """
    pause = object()
    try:
        try:
            _pauses.add(id(pause))
            if gc.isenabled():
                # Recorded first: an interrupt in between does no harm.
                _to_enable.add(id(pause))
                gc.disable()
            yield
        finally:
            _end(id(pause))
    finally:
        # Once more, in case that an interrupt hit the first.
        _end(id(pause))


def _end(pause: int) -> None:
    _pauses.discard(pause)
    if not _pauses and _to_enable:
        ended = tuple(_to_enable)
        gc.enable()
        # Another pause may have begun just now; what it recorded stays.
        _to_enable.difference_update(ended)


_pauses: set[int] = set()
"""Those that are going on."""
_to_enable: set[int] = set()
"""Those that found the collector running, of which it does not run again yet."""


def _end_all() -> None:
    """A child has only one of its parent's threads: nobody would end the other pauses."""
    if _to_enable:
        gc.enable()
    _pauses.clear()
    _to_enable.clear()


os.register_at_fork(after_in_child=_end_all)

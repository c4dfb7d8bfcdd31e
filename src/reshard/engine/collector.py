"""Keeping Python's cyclic garbage collector out of the way."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_collection"]

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def paused_collection() -> Iterator[None]:
    """No cyclic collection while the block runs, in any thread.

    For short stretches that make many objects and no cycles: the collector would go
    through all objects of the process again and again, which takes half of the time that
    a state dict of many tensors costs. Never held while waiting for a disk or a rank.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                _count_as_old()
                gc.enable()


def _count_as_old() -> None:
    """Put what was made in the pause among the old objects, at no cost.

    As young ones they would set off a full collection right after the pause.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()

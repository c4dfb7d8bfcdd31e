"""Copies of state dicts in the staging memory of the process."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from reshard.snapshots.pool import LastLease, staging_pool

__all__ = ["StateDictStager"]


class StateDictStager:
    """Copies state dicts to the CPU, into memory that is used again.

    `share_memory` and `pin_memory_min_bytes` have no effect: staging memory is always shared
    with the worker process, and pinned as a whole or not at all. What `stage` returns stays as
    it is as long as it is referenced.
    """

    def __init__(
        self,
        pin_memory: bool = False,
        share_memory: bool = False,
        pin_memory_min_bytes: int = 5,
    ) -> None:
        if pin_memory and not torch.cuda.is_available():
            warnings.warn("pin_memory has no effect without CUDA", stacklevel=2)
            pin_memory = False
        self.pin_memory = pin_memory
        self.share_memory = share_memory
        self.pin_memory_min_bytes = pin_memory_min_bytes
        self._last = LastLease()
        # Memory returns to the pool even if the stager is never closed.
        weakref.finalize(self, self._last.end).atexit = False

    def stage(self, state_dict: dict[str, Any], non_blocking: bool = False) -> dict[str, Any]:
        """A copy of `state_dict`, complete when this returns."""
        self._last.end()
        staged = staging_pool().stage(state_dict, self.pin_memory, non_blocking)
        self._last.lease = staged.lease
        return staged

    def close(self) -> None:
        """Return the memory of the last copy, unless somebody holds it."""
        self._last.end()

"""Late copies of `staging="overlap"` that wait until somebody waits for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from reshard.background import overlap
from reshard.snapshots.survey import Move, copy_moves

SECONDS = 50.0


class HeldCopies:
    """Each batch needs a permit. Whoever begins to wait for a copy grants all that it needs.

    So a copy is never done before it is waited for, and what forgets to wait changes what is
    saved.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.permits = threading.Semaphore(0)
        self.waits: list[torch.optim.Optimizer | None] = []
        self.copied: list[Move] = []
        self.failure: Exception | None = None
        wait = overlap.LateCopy.wait

        def granting_wait(copy: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
            self.waits.append(optimizer)
            self.grant(100)
            wait(copy, optimizer)

        monkeypatch.setattr(overlap.LateCopy, "wait", granting_wait)
        monkeypatch.setattr(overlap, "copy_moves", self._copy)

    def grant(self, batches: int) -> None:
        self.permits.release(batches)

    def _copy(self, moves: list[Move]) -> None:
        if threading.current_thread().name == "reshard-staging":
            assert self.permits.acquire(timeout=SECONDS)
            self.copied += moves
            if self.failure is not None:
                raise self.failure
        copy_moves(moves)

    def again(self) -> None:
        """Hold the copies that follow."""
        while self.permits.acquire(blocking=False):
            pass
        self.waits.clear()
        self.copied.clear()

"""Whether other ranks are still there.

A rank that takes part in an operation says which process it is, and has a pulse
that it renews while the operation lasts. A process on the same machine can be looked up
directly; one elsewhere is given up when its pulse stands still for long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache

from reshard.stores.owners import machine, start_time

SILENCE_SECONDS = 120.0
"""Long enough for a process that does not release the GIL for a while."""


def describe_process(doing: str = "") -> str:
    """Who this process is, and what it is doing."""
    return f"{_own_name(os.getpid())}\n{doing}"


@cache
def _own_name(pid: int) -> str:
    return f"{machine()} {pid} {start_time(pid)}"


def read_doing(process: str) -> str:
    """What a process was doing when it was described."""
    return process.partition("\n")[2]


class Watch:
    """Looks after the ranks that are being waited for."""

    def __init__(self) -> None:
        self._pulses: dict[int, tuple[str, float]] = {}

    def lost(self, rank: int, process: str, read_pulse: Callable[[], str]) -> str | None:
        """Why `rank` will not answer any more; None while it may."""
        if process:
            where, pid, began = process.partition("\n")[0].rsplit(" ", 2)
            if where and where == machine():
                if start_time(int(pid)) != began:
                    return f"its process {pid} died"
                return None
        pulse, now = read_pulse(), time.monotonic()
        before = self._pulses.get(rank)
        if before is None or before[0] != pulse:
            self._pulses[rank] = (pulse, now)
        elif pulse and now - before[1] > SILENCE_SECONDS:
            return f"it has shown no sign of life for {SILENCE_SECONDS:.0f} s"
        return None

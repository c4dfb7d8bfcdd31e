"""Whether other ranks are still there.

A rank that takes part in an operation leaves a card: which process it is, and a pulse
that it renews while the operation lasts. A process on the same machine can be looked up
directly; one elsewhere is given up when its pulse stands still for long.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["PULSE_SECONDS", "Pulse", "SILENCE_SECONDS", "Watch", "make_card"]

PULSE_SECONDS = 5.0
SILENCE_SECONDS = 120.0
"""Long enough for a process that does not release the GIL for a while."""


def _start_time(pid: int) -> str | None:
    """When a process began, in the kernel's words; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    """The same for two processes only if one can look up the other by its id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


def make_card() -> str:
    """Who this process is."""
    return f"{_machine()} {os.getpid()} {_start_time(os.getpid())}"


class Watch:
    """Looks after the ranks that are being waited for."""

    def __init__(self, read_card: Callable[[int], str], read_pulse: Callable[[int], str]) -> None:
        self._read_card = read_card
        self._read_pulse = read_pulse
        self._pulses: dict[int, tuple[str, float]] = {}

    def lost(self, rank: int) -> str | None:
        """Why `rank` will not answer any more; None while it may."""
        card = self._read_card(rank)
        if card:
            machine, pid, began = card.rsplit(" ", 2)
            if machine and machine == _machine():
                if _start_time(int(pid)) != began:
                    return f"its process {pid} died"
                return None
        pulse, now = self._read_pulse(rank), time.monotonic()
        before = self._pulses.get(rank)
        if before is None or before[0] != pulse:
            self._pulses[rank] = (pulse, now)
        elif pulse and now - before[1] > SILENCE_SECONDS:
            return f"it has shown no sign of life for {SILENCE_SECONDS:.0f} s"
        return None


class Pulse:
    """Renews this rank's pulse in the background, for as long as the block lasts."""

    def __init__(self, renew: Callable[[str], None]) -> None:
        self._renew = renew
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reshard-pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        beats = 0
        while not self._stop.wait(PULSE_SECONDS):
            beats += 1
            try:
                self._renew(str(beats))
            except RuntimeError:
                # The store is gone; the operation itself will say so better.
                return

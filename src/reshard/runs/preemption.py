"""Signals that announce the end of a job: SIGTERM of Kubernetes, SIGUSR1 of Slurm."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class PreemptionWatch:
    """Remembers that a signal came, and calls the handler that was there before."""

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "on_preemption=True needs the main thread, where signals are handled: make the "
                "manager there"
            )
        self.signalled = False
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif os.getpid() != self._pid and before is not signal.SIG_IGN:
            # A forked child, such as a worker of a dataloader, is to end. It saves nothing.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Put back the handlers that were there, unless somebody has replaced this one."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                # None is a handler that was not installed from Python.
                signal.signal(number, signal.SIG_DFL if before is None else before)
            else:
                logger.info("the handler of signal %d was replaced, and stays", number)

"""What a coordinator does when its process ends: it lets the others fetch their answers."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
from typing import Any

from reshard.coordination.rendezvous import Rendezvous, RendezvousThread
from reshard.engine.process_wide import ProcessWide

_LAST_ANSWER_SECONDS = 5.0
_PAUSE_SECONDS = 0.002


class LastAnswers:
    """What this process decided last, for its end.

    The store may live in this very process: if it ended at once, ranks that have not
    fetched their answer yet would take a save for failed that was committed.
    """

    def __init__(self) -> None:
        self._last: tuple[RendezvousThread, Any, str, int] | None = None
        pid = os.getpid()
        # The functions of atexit run when no thread can be started any more (Python 3.12), and
        # the store is called in one. This hook comes earlier. Registered before that of the
        # background saves, it runs after it; what is decided later still is left to atexit.
        register = getattr(threading, "_register_atexit", atexit.register)
        with contextlib.suppress(RuntimeError):
            register(self._wait_in, pid)
        atexit.register(self._wait_in, pid)

    def remember(self, thread: RendezvousThread, origin: Any, key: str, expected: int) -> None:
        """Ranks have their answers once the count of `key` is `expected`."""
        self._last = thread, origin, key, expected

    def _wait_in(self, pid: int) -> None:
        # A forked child decided nothing, and shares the connection with its parent.
        if pid == os.getpid():
            self.wait()

    def wait(self) -> None:
        """Give the others a moment to fetch their answers."""
        if self._last is None:
            return
        (thread, _, key, expected), self._last = self._last, None

        def until_all_left(store: Rendezvous) -> None:
            give_up = time.monotonic() + _LAST_ANSWER_SECONDS
            while (store.count(key) or math.inf) < expected and time.monotonic() < give_up:
                store.pause(_PAUSE_SECONDS)

        # Without the store there is nothing left to fetch.
        with contextlib.suppress(RuntimeError):
            thread.run(until_all_left, _LAST_ANSWER_SECONDS)


last_answers = ProcessWide(LastAnswers)

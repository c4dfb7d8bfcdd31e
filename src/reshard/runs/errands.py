"""Work for a run that nobody waits for: metrics, history and retention, one after the other."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Errands:
    """A thread that lives while there is something to do. What fails is logged.

    It does not keep the process: what is cut off is done again by the next run.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[str, Callable[[], object]]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._count = 0

    def add(self, what: str, work: Callable[[], object]) -> None:
        """Have `work` done after what was added before."""
        with self._changed:
            self._waiting.put((what, work))
            self._count += 1
            if self._count == 1:
                threading.Thread(target=self._run, name="reshard-errands", daemon=True).start()

    def drain(self) -> None:
        """Wait until everything is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0)

    def _run(self) -> None:
        while True:
            what, work = self._waiting.get()
            try:
                work()
            except Exception:
                logger.exception("could not %s; it is tried again after the next save", what)
            with self._changed:
                self._count -= 1
                if self._count == 0:
                    self._changed.notify_all()
                    return

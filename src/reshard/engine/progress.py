"""Progress of a save or load, on the terminal or in the log.

One line for a job, not for each rank: only the coordinator shows it, of its own part. Not
in background saves, whose line would run into what training prints.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 1.0
_LOG_SECONDS = 10.0


class Progress:
    """Counts bytes, from several threads if need be; shows itself once it takes a while."""

    def __init__(self, what: str, total_bytes: int, on_terminal: bool) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._on_terminal = on_terminal
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._began = time.monotonic()
        self._next_show = self._began + (_PATIENCE_SECONDS if on_terminal else _LOG_SECONDS)
        self._bar: Any = None

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done_bytes += nbytes
            if time.monotonic() >= self._next_show:
                self._show()

    def _show(self) -> None:
        if not self._on_terminal:
            share = self._done_bytes / max(self._total_bytes, 1)
            logger.info("%s: %.0f %% of %d bytes", self._what, 100 * share, self._total_bytes)
            self._next_show = time.monotonic() + _LOG_SECONDS
            return
        if self._bar is None:
            self._bar = _make_bar()
            self._bar.start()
            self._bar.add_task(self._what, total=self._total_bytes)
        self._bar.update(self._bar.task_ids[0], completed=self._done_bytes)

    def finish(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
        seconds = time.monotonic() - self._began
        logger.debug("%s: %d bytes in %.2f s", self._what, self._done_bytes, seconds)


def _make_bar() -> Any:
    # Imported when needed: most processes never show anything.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


@contextmanager
def watched(what: str, total_bytes: int, is_coordinator: bool) -> Iterator[Progress]:
    """Show the progress of the block, if there is a terminal."""
    on_terminal = (
        is_coordinator
        and threading.current_thread() is threading.main_thread()
        and sys.stderr is not None
        and sys.stderr.isatty()
        and os.environ.get("RESHARD_PROGRESS", "1") != "0"
    )
    progress = Progress(what, total_bytes, on_terminal)
    try:
        yield progress
    finally:
        progress.finish()

"""Threads: for work that runs outside the GIL, and for work that no interrupt may cut short.

Whoever waits for one waits for a plain lock: an interrupt within an event, a condition or a future
may leave it locked for ever, or raise another error.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from reshard.api import _interrupt_behind

T = TypeVar("T")


def default_threads() -> int:
    """As many as there are cores for this rank, up to a few."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, min(4, len(os.sched_getaffinity(0)) // ranks_here))


def run_all(work: Callable[[T], None], tasks: Iterable[T], threads: int) -> None:
    """Do `work` for each task; the first error ends it, once running tasks are done.

    So does an interrupt. A second one does not wait for running tasks.
    """
    todo = deque(tasks)
    if threads <= 1 or len(todo) <= 1:
        for task in todo:
            work(task)
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not errors:
                try:
                    task = todo.popleft()
                except IndexError:
                    return
                work(task)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    _run_threads([run] * min(threads, len(todo)), "reshard-io", todo.clear)
    if errors:
        raise errors[0]


def run_uninterrupted(work: Callable[[], T]) -> T:
    """Do `work` to its end. An interrupt that comes meanwhile is raised afterwards.

    For short work that must not be left half-done. Python runs the handlers of signals in the main
    thread only, so the work is done in another one. A second interrupt does not wait for it.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    _run_threads([run], "reshard-uninterrupted", lambda: None)
    if errors:
        raise errors[0]
    return results[0]


def _run_threads(works: Iterable[Callable[[], None]], name: str, stop: Callable[[], None]) -> None:
    """Do each of `works` in a thread of its own, and wait for all that have begun.

    At an interrupt `stop` is called, and those that have not begun never will.
    """
    handled = sys.exc_info()[1]
    gate, is_open = threading.Lock(), [True]
    begun: list[threading.Lock] = []

    def run(work: Callable[[], None], busy: threading.Lock) -> None:
        with gate:
            if not is_open[0]:
                return
            begun.append(busy)
        try:
            work()
        finally:
            busy.release()

    started: list[threading.Lock] = []
    try:
        for work in works:
            busy = threading.Lock()
            busy.acquire()
            threading.Thread(target=run, args=(work, busy), name=name, daemon=True).start()
            started.append(busy)
        _wait_for(started)
    except BaseException as error:
        stop()
        with gate:
            is_open[0] = False
        _wait_for(begun)
        interrupt = _interrupt_behind(error, handled)
        if interrupt is None:
            raise
        raise interrupt from None


def _wait_for(locks: Iterable[threading.Lock]) -> None:
    for lock in locks:
        with lock:
            pass

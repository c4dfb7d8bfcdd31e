"""Threads: for work that runs outside the GIL, and for work that no interrupt may cut short."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def default_threads() -> int:
    """As many as there are cores for this rank, up to a few."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, min(4, len(os.sched_getaffinity(0)) // ranks_here))


def run_all(work: Callable[[T], None], tasks: Iterable[T], threads: int) -> None:
    """Do `work` for each task; the first error ends it, once running tasks are done."""
    tasks = list(tasks)
    if threads <= 1 or len(tasks) <= 1:
        for task in tasks:
            work(task)
        return
    with ThreadPoolExecutor(min(threads, len(tasks)), thread_name_prefix="reshard-io") as pool:
        try:
            futures = [pool.submit(work, task) for task in tasks]
            done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            # Else an interrupt would come through only when all tasks are done.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        for future in pending:
            future.cancel()
        for future in done:
            future.result()


def run_uninterrupted(work: Callable[[], T]) -> T:
    """Do `work` to its end. An interrupt that comes meanwhile is raised afterwards.

    For short work that must not be left half-done. Python runs the handlers of signals in the main
    thread only, so the work is done in another one. A second interrupt does not wait for it.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    # Locks, since an interrupt may leave those within events and futures locked for ever.
    turn, busy = threading.Lock(), threading.Lock()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        if turn.acquire(blocking=False):
            try:
                results.append(work())
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
            finally:
                busy.release()

    busy.acquire()
    try:
        threading.Thread(target=run, name="reshard-uninterrupted", daemon=True).start()
        busy.acquire()
    except BaseException:
        has_begun = not turn.acquire(blocking=False)
        if has_begun and not results and not errors:
            busy.acquire()
        raise
    if errors:
        raise errors[0]
    return results[0]

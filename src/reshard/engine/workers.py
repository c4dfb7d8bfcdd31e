"""Threads for work that runs outside the GIL."""

from __future__ import annotations

import os
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
        futures = [pool.submit(work, task) for task in tasks]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        for future in done:
            future.result()

"""Threads: tasks that share them, and work that no interrupt cuts short."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import pytest

from reshard.engine import workers
from reshard.engine.workers import run_all, run_uninterrupted


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def handler(called: threading.Event) -> Iterator[None]:
    """An interrupt that tells when it has arrived in the main thread."""

    def handle(*args: object) -> None:
        called.set()
        raise KeyboardInterrupt

    older = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, older)


def test_an_interrupt_cancels_the_tasks_that_have_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 20_000
    begun: list[int] = []
    interrupted = threading.Event()

    def work(task: int) -> None:
        begun.append(task)
        interrupted.wait(10)

    def interrupted_wait(*args: object, **options: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "wait", interrupted_wait)
    with pytest.raises(KeyboardInterrupt):
        run_all(work, range(count), 2)

    assert len(begun) < count


def test_work_is_done_before_an_interrupt_is_raised() -> None:
    interrupted = threading.Event()
    done: list[bool] = []

    def work() -> None:
        interrupt()
        done.append(interrupted.wait(10))

    with handler(interrupted), pytest.raises(KeyboardInterrupt):
        run_uninterrupted(work)

    assert done == [True]


def test_an_interrupt_before_the_work_begins_is_raised_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        interrupt()
        start(self)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_uninterrupted(lambda: done.append("work"))

    assert done == []


def test_results_and_errors_come_back() -> None:
    def fail() -> None:
        raise LookupError("lost")

    assert run_uninterrupted(lambda: 7) == 7
    with pytest.raises(LookupError, match="lost"):
        run_uninterrupted(fail)


def test_another_thread_than_the_main_one_does_the_work_itself() -> None:
    found: list[bool] = []

    def work() -> None:
        me = threading.current_thread()
        found.append(run_uninterrupted(threading.current_thread) is me)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert found == [True]

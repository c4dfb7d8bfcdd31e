"""Threads: tasks that share them, and work that no interrupt cuts short."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import pytest

from reshard.engine.workers import run_all, run_uninterrupted


def interrupt() -> None:
    """What Ctrl-C does, from whichever thread."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


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


def test_an_interrupt_cancels_the_tasks_that_have_not_begun() -> None:
    begun: list[int] = []
    interrupted = threading.Event()

    def work(task: int) -> None:
        begun.append(task)
        if task == 0:
            interrupt()
        interrupted.wait(10)

    with handler(interrupted), pytest.raises(KeyboardInterrupt):
        run_all(work, range(100_000), 2)

    assert len(begun) < 100_000


def test_running_tasks_are_done_before_an_interrupt_is_raised() -> None:
    done: list[bool] = []
    interrupted = threading.Event()

    def work(task: int) -> None:
        if task == 0:
            interrupt()
            done.append(interrupted.wait(10))

    with handler(interrupted), pytest.raises(KeyboardInterrupt):
        run_all(work, range(2), 2)

    assert done == [True]


def test_the_first_error_ends_the_work() -> None:
    begun: list[int] = []

    def work(task: int) -> None:
        begun.append(task)
        raise LookupError(str(task))

    with pytest.raises(LookupError):
        run_all(work, range(1000), 4)

    assert len(begun) <= 4


def test_every_task_is_done_once() -> None:
    done: list[int] = []

    run_all(done.append, range(1000), 4)

    assert sorted(done) == list(range(1000))


def test_an_error_that_an_interrupt_led_to_is_the_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def broken(self: threading.Thread) -> None:
        start(self)
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    monkeypatch.setattr(threading.Thread, "start", broken)
    with pytest.raises(KeyboardInterrupt):
        run_all(lambda task: None, range(3), 2)


def test_an_error_while_an_interrupt_is_being_handled_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", broken)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(RuntimeError, match="can't start"):
            run_all(lambda task: None, range(3), 2)


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

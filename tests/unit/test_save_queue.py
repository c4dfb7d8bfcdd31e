"""reshard.background.queue: saves one after the other, and failures that are not lost."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from reshard.api import BusyError, CheckpointException, _wrap_exception
from reshard.background.queue import MOST_IN_FLIGHT, SaveFuture, SaveQueue, save_queue
from reshard.coordination.last_answers import last_answers
from reshard.engine import process_wide
from reshard.engine.process_wide import ProcessWide
from reshard.metadata import Metadata
from reshard.operations.targets import comparable_place

MOMENT = 0.2
"""Long enough for a thread to get somewhere if nothing holds it up."""
SOON, LONG = 1.0, 30.0


@pytest.fixture
def queue() -> SaveQueue:
    queue = SaveQueue()
    # A test that leaves it stuck must not hold up the end of pytest.
    queue._watching_exit = True
    return queue


class Gate:
    """Work that goes on until it is let go."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.error = error
        self.metadata = Metadata({})

    def __call__(self) -> Metadata:
        self.entered.set()
        assert self.opened.wait(LONG)
        if self.error is not None:
            raise self.error
        return self.metadata


def failing(error: BaseException) -> Callable[[], Metadata]:
    def work() -> Metadata:
        raise error

    return work


def nothing() -> Metadata:
    return Metadata({})


def started(function: Callable[..., Any], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def is_held_up(thread: threading.Thread, seconds: float = MOMENT) -> bool:
    thread.join(seconds)
    return thread.is_alive()


def done(future: SaveFuture) -> SaveFuture:
    """The future, when its save is over. This is not to look at the outcome."""
    over = threading.Event()
    future.add_done_callback(lambda _: over.set())
    assert over.wait(LONG)
    return future


# The order of saves


def test_saves_run_one_after_the_other_in_the_order_they_came(queue: SaveQueue) -> None:
    events: list[str] = []
    gate = Gate()

    def work(number: int) -> Metadata:
        events.append(f"begin {number}")
        metadata = gate() if number == 0 else nothing()
        events.append(f"end {number}")
        return metadata

    futures = [queue.submit(None, functools.partial(work, i)) for i in range(4)]
    assert gate.entered.wait(LONG)
    assert events == ["begin 0"]
    assert not any(future.done() for future in futures)
    gate.opened.set()
    assert futures[0].result(LONG) is gate.metadata
    queue.drain()
    assert events == [f"{what} {i}" for i in range(4) for what in ("begin", "end")]


def test_the_thread_ends_when_there_is_no_more_work_and_another_comes(queue: SaveQueue) -> None:
    threads: list[threading.Thread] = []

    def work() -> Metadata:
        threads.append(threading.current_thread())
        return nothing()

    for _ in range(2):
        queue.submit(None, work).result(LONG)
        threads[-1].join(LONG)
        assert not threads[-1].is_alive()
        assert threads[-1].daemon
    assert threads[0] is not threads[1]


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_saved_is_not_kept_when_the_save_is_done(queue: SaveQueue, fails: bool) -> None:
    def work(state: Gate) -> Metadata:
        if fails:
            raise OSError
        return nothing()

    state = Gate()
    alive = weakref.ref(state)
    # Training often runs without the collector.
    gc.disable()
    try:
        with contextlib.suppress(OSError):
            queue.submit(None, functools.partial(work, state)).result(LONG)
        del state
        queue.submit(None, nothing).result(LONG)
        assert alive() is None
    finally:
        gc.enable()


def test_a_thread_that_cannot_be_started_does_not_stop_later_saves(
    queue: SaveQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            queue.submit("a", nothing)
    assert queue.submit("b", nothing).exception(SOON) is None


# Admission


def test_a_save_is_admitted_while_few_are_in_flight(queue: SaveQueue) -> None:
    gate = Gate()
    for _ in range(MOST_IN_FLIGHT):
        queue.admit("wait")
        queue.admit("refuse")
        queue.submit("a", gate)
    with pytest.raises(BusyError, match="2 saves are in flight, to 'a', 'a'"):
        queue.admit("refuse")
    waiter = started(queue.admit, "wait")
    assert is_held_up(waiter)
    gate.opened.set()
    waiter.join(LONG)
    assert not waiter.is_alive()
    queue.drain()
    queue.admit("refuse")


def test_a_waiting_save_is_admitted_while_the_callback_of_another_runs(queue: SaveQueue) -> None:
    # The callback may wait for a lock that the waiting thread holds.
    gates = Gate(), Gate()
    first, _ = [queue.submit(None, gate) for gate in gates]
    waiter = started(queue.admit, "wait")
    assert is_held_up(waiter)
    admitted: list[bool] = []
    first.add_done_callback(lambda _: admitted.append(not is_held_up(waiter, SOON)))
    gates[0].opened.set()
    assert gates[1].entered.wait(LONG)
    gates[1].opened.set()
    queue.drain()
    assert admitted == [True]


# Failures


def test_a_failure_is_raised_where_the_outcome_is_asked_for(queue: SaveQueue) -> None:
    error = OSError("disk full")
    future = queue.submit("a", failing(error))
    with pytest.raises(OSError, match="disk full") as caught:
        future.result(LONG)
    assert caught.value is error
    assert future.exception() is error
    queue.raise_unseen()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_no_kind_of_failure_stops_the_next_save(queue: SaveQueue, error: BaseException) -> None:
    future = queue.submit("a", failing(error))
    assert queue.submit("b", nothing).exception(LONG) is None
    assert future.exception(LONG) is error


def test_a_failure_that_nobody_saw_is_raised_once(queue: SaveQueue) -> None:
    failures = {3: _wrap_exception(OSError("disk full"))}
    error = CheckpointException("write", failures)
    done(queue.submit("place", failing(error)))
    with pytest.raises(CheckpointException, match="save to 'place' failed earlier") as caught:
        queue.raise_unseen()
    assert caught.value.failures == failures
    assert "".join(traceback.format_exception(caught.value)).count("disk full") == 1
    queue.raise_unseen()


def test_failures_that_nobody_saw_are_raised_one_by_one_and_the_oldest_first(
    queue: SaveQueue,
) -> None:
    for place in "abc":
        future = done(queue.submit(place, failing(OSError(place))))
        if place == "b":
            future.exception()
    for place in "ac":
        with pytest.raises(
            CheckpointException, match=f"to '{place}' failed earlier: OSError: {place}"
        ):
            queue.raise_unseen()
    queue.raise_unseen()


@pytest.mark.parametrize("look", [Future.done, Future.running, repr])
def test_a_glance_at_a_future_does_not_count_as_seeing_its_failure(
    queue: SaveQueue, look: Any
) -> None:
    look(done(queue.submit("a", failing(OSError("disk full")))))
    with pytest.raises(CheckpointException, match="disk full"):
        queue.raise_unseen()


@pytest.mark.parametrize("ask", [SaveFuture.result, SaveFuture.exception])
def test_to_ask_too_early_does_not_count_as_seeing_the_failure(queue: SaveQueue, ask: Any) -> None:
    gate = Gate(OSError("disk full"))
    future = queue.submit("a", gate)
    with pytest.raises(TimeoutError):
        ask(future, 0)
    gate.opened.set()
    done(future)
    with pytest.raises(CheckpointException, match="disk full"):
        queue.raise_unseen()


def test_to_ask_a_moment_too_early_does_not_count_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(future: SaveFuture, timeout: float | None) -> None:
        future.set_exception(OSError("disk full"))
        raise TimeoutError

    monkeypatch.setattr(Future, "result", late)
    future = SaveFuture("a")
    with pytest.raises(TimeoutError):
        future.result(0)
    assert not future.seen


def test_a_callback_that_looks_at_the_failure_has_seen_it(queue: SaveQueue) -> None:
    gate = Gate(OSError("disk full"))
    future = queue.submit("a", gate)
    found: list[Any] = []
    future.add_done_callback(lambda future: found.append(future.exception()))
    gate.opened.set()
    done(future)
    queue.raise_unseen()
    assert found == [gate.error]


# Waiting for saves


def test_to_settle_a_place_waits_for_the_saves_to_it_and_no_other(queue: SaveQueue) -> None:
    here, there = Gate(), Gate()
    queue.submit("here", here)
    queue.submit("there", there)
    queue.settle(None)
    queue.settle("nowhere")
    thread = started(queue.settle, "here")
    assert is_held_up(thread)
    here.opened.set()
    thread.join(LONG)
    assert not thread.is_alive()
    queue.settle("here")
    there.opened.set()
    queue.settle("there")


def test_to_settle_a_place_raises_the_failures_there_and_no_other(queue: SaveQueue) -> None:
    gate = Gate(OSError("disk full"))
    queue.submit("here", gate)
    gate.opened.set()
    done(queue.submit("there", failing(OSError("no such bucket"))))
    with pytest.raises(CheckpointException, match="to 'here' failed earlier: OSError: disk full"):
        queue.settle("here")
    queue.settle("here")
    queue.settle(None)
    with pytest.raises(CheckpointException, match="no such bucket"):
        queue.raise_unseen("there")


def test_to_drain_waits_for_all_saves_and_leaves_their_failures(queue: SaveQueue) -> None:
    queue.drain()
    gate = Gate(OSError("disk full"))
    futures = [queue.submit("a", gate), queue.submit(None, nothing)]
    thread = started(queue.drain)
    assert is_held_up(thread)
    gate.opened.set()
    thread.join(LONG)
    assert not thread.is_alive()
    assert all(future.done() for future in futures)
    with pytest.raises(CheckpointException, match="disk full"):
        queue.raise_unseen()


def test_to_drain_waits_for_callbacks_and_the_saves_that_they_start(queue: SaveQueue) -> None:
    gate, entered, more = Gate(), threading.Event(), threading.Event()
    chained: list[SaveFuture] = []

    def start_another(_: Any) -> None:
        entered.set()
        more.wait(MOMENT)
        chained.append(queue.submit("b", nothing))

    queue.submit("a", gate).add_done_callback(start_another)
    gate.opened.set()
    assert entered.wait(LONG)
    queue.drain()
    assert [future.done() for future in chained] == [True]


# Callbacks


def test_a_callback_may_start_saves_and_ask_about_them(queue: SaveQueue) -> None:
    gate, queued = Gate(OSError("disk full")), Gate()
    raised: list[BaseException] = []
    chained: list[SaveFuture] = []

    def callback(_: Any) -> None:
        # As many are in flight as there may be, but to wait would be for ever.
        queue.submit("a", nothing)
        queue.admit("wait")
        queue.admit("refuse")
        chained.append(queue.submit("b", nothing))
        queue.settle("b")
        try:
            queue.settle("a")
        except CheckpointException as error:
            raised.append(error)

    future = queue.submit("a", gate)
    queue.submit("a", queued)
    future.add_done_callback(callback)
    gate.opened.set()
    assert queued.entered.wait(LONG)
    queued.opened.set()
    queue.drain()
    assert chained[0].exception(LONG) is None
    assert [type(error.__cause__) for error in raised] == [OSError]


def test_a_callback_that_raises_does_not_stop_the_next_save(queue: SaveQueue) -> None:
    gate = Gate()
    future = queue.submit(None, gate)
    future.add_done_callback(lambda _: 1 / 0)
    gate.opened.set()
    assert queue.submit(None, nothing).exception(LONG) is None


def test_a_callback_that_would_exit_does_not_stop_the_next_save(
    queue: SaveQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    gate = Gate()
    future = queue.submit(None, gate)
    future.add_done_callback(lambda _: sys.exit(3))
    after = queue.submit(None, nothing)
    gate.opened.set()
    assert after.exception(SOON) is None


def test_a_callback_that_drains_does_not_stop_the_next_save(queue: SaveQueue) -> None:
    # reshard.close() drains.
    gate = Gate()
    future = queue.submit(None, gate)
    future.add_done_callback(lambda _: queue.drain())
    after = queue.submit(None, nothing)
    gate.opened.set()
    assert after.exception(SOON) is None


# The end of the process


def test_the_end_of_the_process_closes_and_tells_of_failures_that_nobody_saw(
    queue: SaveQueue, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    order: list[str] = []

    def fail_to_close(_: object) -> None:
        raise OSError("cannot close")

    monkeypatch.setattr(process_wide, "_all", [])
    ProcessWide(object, lambda _: order.append("closed"))()
    ProcessWide(object, fail_to_close)()
    ProcessWide(object, lambda _: order.append("was never made"))
    seen = queue.submit("seen", failing(OSError("was seen")))
    queue.submit("unseen", failing(OSError("disk full")))
    queue.submit(None, gate).add_done_callback(lambda _: order.append("saved") or seen.exception())
    thread = started(queue._at_exit, os.getpid())
    assert is_held_up(thread)
    gate.opened.set()
    thread.join(LONG)
    said = capfd.readouterr().err
    assert order == ["saved", "closed"]
    assert "reshard: the save to 'unseen' failed, and nobody looked at its future" in said
    assert "OSError: disk full" in said
    assert "cannot close" in said
    assert "was seen" not in said


def test_answers_are_waited_for_when_the_saves_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[str] = []
    monkeypatch.setattr(threading, "_register_atexit", lambda f, *_: hooks.append(f.__qualname__))
    monkeypatch.setattr(last_answers, "_made", [])
    SaveQueue().watch_exit()
    # They run in reverse.
    assert hooks == ["LastAnswers._wait_in", "SaveQueue._at_exit"]


def exit_code_of_child(function: Callable[[], bool]) -> int:
    """0 if `function` is true in a forked child, before that has come to its end."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ends_after_its_save(queue: SaveQueue) -> bool:
    """Have the process end, as far as its threads can tell, in the middle of a save."""
    ending = threading.Event()

    def work() -> Metadata:
        assert ending.wait(LONG)
        # Whoever does not wait is gone by the time this is over.
        threading.Event().wait(MOMENT)
        return nothing()

    future = queue.submit(None, work)
    threading._register_atexit(ending.set)
    threading._shutdown()
    return future.done()


def test_a_process_does_not_end_before_its_saves() -> None:
    assert exit_code_of_child(lambda: ends_after_its_save(SaveQueue())) == 0


def test_a_forked_child_does_not_end_before_its_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "_threading_atexits", [*threading._threading_atexits])
    save_queue().submit(None, nothing).result(LONG)
    assert exit_code_of_child(lambda: ends_after_its_save(save_queue())) == 0


def test_a_forked_child_does_not_wait_for_the_saves_of_its_parent() -> None:
    gate = Gate()
    save_queue().submit("a", gate)
    assert gate.entered.wait(LONG)
    code = exit_code_of_child(lambda: not is_held_up(started(save_queue().settle, "a"), SOON))
    gate.opened.set()
    save_queue().drain()
    assert code == 0


# Places


@pytest.mark.parametrize(
    ("checkpoint_id", "place"),
    [
        ("/a/b/../c/", "/a/c"),
        (Path("/a/c"), "/a/c"),
        ("c", os.path.abspath("c")),
        ("s3://bucket/c", "s3://bucket/c"),
        (None, None),
        (b"/a/c", None),
    ],
)
def test_a_place_has_one_name(checkpoint_id: Any, place: str | None) -> None:
    assert comparable_place(checkpoint_id) == place
    assert comparable_place(None) is None

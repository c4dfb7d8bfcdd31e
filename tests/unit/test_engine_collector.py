"""The pauses of the garbage collector leave it as it was."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import reshard
from reshard.engine import collector
from reshard.engine.collector import paused_collection

USUAL = (701, 11, 12)


def is_paused() -> bool:
    assert gc.get_threshold()[1:] == USUAL[1:]
    return gc.get_threshold()[0] != USUAL[0]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    (gc.enable if enabled else gc.disable)()


def test_a_pause_ends_with_the_outermost_block() -> None:
    gc.enable()
    with paused_collection():
        with paused_collection():
            assert is_paused()
        assert is_paused()
    assert not is_paused()


def test_a_pause_ends_when_the_last_of_two_threads_leaves_it() -> None:
    gc.enable()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with paused_collection():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with paused_collection():
        thread.start()
        assert inside.wait(30)
    assert is_paused()
    leave.set()
    thread.join()
    assert not is_paused()


def test_a_pause_ends_with_an_error() -> None:
    gc.enable()
    with pytest.raises(KeyError), paused_collection():
        raise KeyError
    assert not is_paused()


def test_no_collection_happens_in_a_pause() -> None:
    gc.enable()
    before = [generation["collections"] for generation in gc.get_stats()]
    with paused_collection():
        before = [generation["collections"] for generation in gc.get_stats()]
        kept = [[] for _ in range(100_000)]  # type: ignore[var-annotated]
        after = [generation["collections"] for generation in gc.get_stats()]
    assert len(kept) == 100_000
    assert before == after


def test_a_collector_that_the_user_turned_off_stays_off() -> None:
    gc.disable()
    with paused_collection():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_a_collector_that_the_user_turns_off_in_a_pause_stays_off() -> None:
    gc.enable()
    with paused_collection():
        assert gc.isenabled()
        gc.disable()
    assert not gc.isenabled()
    assert not is_paused()


def test_a_collector_that_the_user_turns_on_in_a_pause_stays_on() -> None:
    gc.disable()
    with paused_collection():
        gc.enable()
    assert gc.isenabled()
    assert not is_paused()


@pytest.mark.parametrize("theirs", [(500, 5, 6), (0, 5, 6)])
def test_thresholds_that_the_user_sets_in_a_pause_stay(theirs: tuple[int, int, int]) -> None:
    with paused_collection():
        gc.set_threshold(*theirs)
    assert gc.get_threshold() == theirs
    gc.set_threshold(*USUAL)
    with paused_collection():
        gc.set_threshold(*theirs)
        with paused_collection():
            pass
    assert gc.get_threshold() == theirs


def test_a_threshold_that_the_user_took_from_a_pause_and_set_later_is_mended() -> None:
    with paused_collection():
        theirs = gc.get_threshold()
    gc.set_threshold(*theirs)
    with paused_collection():
        pass
    assert not is_paused()


def test_what_the_user_froze_and_what_is_young_stay_as_they_are() -> None:
    gc.enable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    circle: list[object] = []
    circle.append(circle)
    with paused_collection():
        pass
    assert frozen > 0
    assert gc.get_freeze_count() == frozen
    assert any(each is circle for each in gc.get_objects(generation=0))


class Circle:
    """Only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_cyclic_garbage_that_is_made_between_saves_is_collected(tmp_path: Path) -> None:
    gc.enable()
    gc.collect()
    state = {f"w{i}": torch.zeros(2) for i in range(20)}
    alive: weakref.WeakSet[Circle] = weakref.WeakSet()
    for _ in range(40):
        for circle in [Circle() for _ in range(500)]:
            alive.add(circle)
        del circle
        reshard.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
        reshard.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert len(alive) < 10_000, "of 20,000 that were made"


FORKS = """
import gc, os, threading
from reshard.engine.collector import paused_collection

def is_paused():
    return gc.get_threshold() != usual

usual = gc.get_threshold()
inside, leave = threading.Event(), threading.Event()

def other():
    with paused_collection():
        inside.set()
        leave.wait(30)

thread = threading.Thread(target=other)
thread.start()
inside.wait(30)
assert is_paused()
with paused_collection():
    pid = os.fork()
    if pid == 0:
        os._exit(1 if is_paused() else 0)
_, status = os.waitpid(pid, 0)
pid = os.fork()
if pid == 0:
    with paused_collection():
        assert is_paused()
    os._exit(1 if is_paused() else 0)
_, later = os.waitpid(pid, 0)
leave.set()
thread.join()
assert not is_paused()
raise SystemExit(1 if status or later else 0)
"""


def test_a_child_that_is_forked_during_a_pause_has_a_collector() -> None:
    outcome = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], timeout=60, check=False)

    assert outcome.returncode == 0


def test_an_interrupt_at_any_point_of_a_pause_leaves_the_collector_on() -> None:
    gc.enable()
    points = 0
    while True:
        countdown = points

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal countdown
            if frame.f_code.co_filename not in (collector.__file__, contextlib.__file__):
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                countdown -= 1
                if countdown < 0:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with paused_collection(), paused_collection():
                pass
        except KeyboardInterrupt:
            points += 1
        else:
            break
        finally:
            sys.settrace(before)
        assert not is_paused(), f"off after an interrupt at point {points}"
        with paused_collection():
            assert is_paused()
        assert not is_paused()
    assert points > 50


def test_threads_that_pause_again_and_again_leave_the_collector_on() -> None:
    gc.enable()

    def work() -> None:
        for _ in range(2000):
            with paused_collection():
                pass

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not is_paused()
    with paused_collection():
        assert is_paused()

"""The pauses of the garbage collector leave it as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from reshard.engine.collector import paused_collection


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


def test_a_pause_ends_with_the_outermost_block() -> None:
    gc.enable()
    with paused_collection():
        with paused_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


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
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_pause_ends_with_an_error() -> None:
    gc.enable()
    with pytest.raises(KeyError), paused_collection():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_the_user_turned_off_stays_off() -> None:
    gc.disable()
    with paused_collection():
        pass
    assert not gc.isenabled()


def test_objects_that_the_user_froze_stay_frozen() -> None:
    gc.enable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with paused_collection():
        pass
    assert frozen > 0
    assert gc.get_freeze_count() == frozen


def test_what_was_made_in_a_pause_is_old_afterwards_and_can_still_be_collected() -> None:
    gc.enable()
    gc.collect()
    with paused_collection():
        circles = [[i] for i in range(50_000)]
        for circle in circles:
            circle.append(circle)
    assert gc.get_count()[0] < 50_000
    del circles, circle
    assert gc.collect() >= 50_000

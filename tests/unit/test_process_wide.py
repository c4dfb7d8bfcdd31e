"""reshard.engine.process_wide: one of a kind, given back by close, anew in a forked child."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import reshard
from reshard.background.queue import save_queue
from reshard.engine import process_wide
from reshard.engine.process_wide import ProcessWide, release_all


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_wide, "_all", [])


def exit_code_of_child(is_right: object) -> int:
    child = os.fork()
    if child == 0:
        os._exit(0 if is_right() else 1)  # type: ignore[operator]
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_it_is_made_once_when_it_is_first_asked_for() -> None:
    made: list[int] = []
    counter = ProcessWide(lambda: made.append(1) or object())
    assert made == []
    assert counter() is counter()
    assert made == [1]


def test_threads_that_ask_at_once_get_the_same() -> None:
    together = threading.Barrier(8)
    one = ProcessWide(object)
    found: list[object] = []

    def ask() -> None:
        together.wait()
        found.append(one())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1


def test_what_was_defined_last_is_released_first_and_what_was_never_made_is_not() -> None:
    order: list[str] = []
    first = ProcessWide(lambda: "first", order.append)
    ProcessWide(lambda: "never", order.append)
    last = ProcessWide(lambda: "last", order.append)
    first(), last()
    release_all()
    assert order == ["last", "first"]


def test_what_cannot_be_released_does_not_keep_the_rest() -> None:
    released: list[object] = []

    def refuse(_: object) -> None:
        raise OSError("stuck")

    ProcessWide(object, released.append)()
    ProcessWide(object, refuse)()
    with pytest.raises(OSError, match="stuck"):
        release_all()
    assert len(released) == 1


def test_a_forked_child_has_another_and_does_not_release_that_of_its_parent() -> None:
    one = ProcessWide(lambda: [os.getpid()], lambda held: held.clear())
    assert one() == [os.getpid()]
    assert exit_code_of_child(lambda: one() == [os.getpid()]) == 0
    assert exit_code_of_child(lambda: (one.release(), one() != [])[1]) == 0


def test_a_child_that_is_forked_while_a_thread_makes_it_is_not_stuck() -> None:
    making, go_on = threading.Event(), threading.Event()

    def make() -> str:
        making.set()
        assert go_on.wait(30)
        return "made"

    one = ProcessWide(make)
    thread = threading.Thread(target=one)
    thread.start()
    assert making.wait(30)
    go_on_in_child = exit_code_of_child(lambda: (go_on.set(), one() == "made")[1])
    go_on.set()
    thread.join()
    assert go_on_in_child == 0


def test_close_gives_the_staging_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    import torch

    from reshard.staging import staging_pool

    reshard.close()
    reshard.async_save({"w": torch.zeros(1000)}, checkpoint_id=tmp_path).result()
    assert staging_pool().nbytes >= 4000
    reshard.close()
    assert staging_pool().nbytes == 0
    save_queue().drain()

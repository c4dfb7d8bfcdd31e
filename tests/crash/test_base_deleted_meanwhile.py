"""A save that refers to a checkpoint, and a deletion of that checkpoint at the same time.

One of them may fail, but no checkpoint is ever committed that cannot be read.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api import (
    BaseError,
    CheckpointException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from reshard.checkpoint import dependents
from reshard.operations import upkeep
from reshard.stores.local import LocalStore
from support.failing_system import WatchedSystem, WriterOn, watching
from support.ranks import run_ranks


def state(step: int) -> dict[str, Any]:
    return {"frozen": torch.arange(3000, dtype=torch.float32), "trained": torch.tensor([step])}


def is_whole(folder: Path, step: int) -> bool | None:
    """Whether a checkpoint is as it should be; None if there is none. An error if it is damaged."""
    try:
        found = reshard.read_state_dict(folder)
    except CheckpointNotFoundError:
        return None
    return all(torch.equal(found[name], value) for name, value in state(step).items())


def interrupted(at: int, by: Callable[[], Any]) -> WatchedSystem:
    """A system on which something else happens just before call `at`."""
    pending = [by]

    def on_call(number: int, name: str, proceed: Callable[[], Any]) -> Any:
        if number == at and pending:
            pending.pop()()
        return proceed()

    return WatchedSystem(on_call)


def outcome(attempt: Callable[[], Any]) -> str:
    """The class of the exception of ours that an attempt ends with; empty if it succeeds."""
    try:
        attempt()
    except CheckpointException as error:
        return type(error).__name__
    return ""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependents, "_UNDECIDED_SECONDS", 0.02)


def save_on(system: Any, folder: Path, base: Path | None, **options: Any) -> str:
    writer = WriterOn(folder, system)
    return outcome(lambda: reshard.save(state(2), storage_writer=writer, base=base, **options))


def delete_on(system: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "open_place", lambda place, _: LocalStore(place, system))
        return outcome(lambda: reshard.delete(folder))


@pytest.mark.parametrize("use_collectives", [True, False])
@pytest.mark.parametrize("replaces", [True, False])
def test_a_base_deleted_at_any_call_of_a_save_never_leaves_a_broken_checkpoint(
    use_collectives: bool, replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = watching()
    reshard.save(state(1), checkpoint_id=tmp_path / "a")
    save_on(count, tmp_path / "b", tmp_path / "a", use_collectives=use_collectives)
    seen = set()
    for at in range(len(count.calls) + 5):
        root = tmp_path / str(at)
        base, place = root / "a", root / "b"
        reshard.save(state(1), checkpoint_id=base)
        if replaces:
            reshard.save(state(1), checkpoint_id=place)
        deleted: list[str] = []
        system = interrupted(at, lambda: deleted.append(delete_on(os, base, monkeypatch)))  # noqa: B023

        saved = save_on(system, place, base, use_collectives=use_collectives)

        if not saved:
            assert is_whole(place, 2), at
            assert deleted in ([], ["CheckpointInUseError"]), at
        else:
            assert deleted == [""], at
            assert is_whole(place, 1) is (True if replaces else None), at
            assert replaces or not list(place.glob("*")), at
        seen.add(bool(saved))
    assert seen == {True, False}


def test_a_save_at_any_call_of_the_deletion_of_its_base_never_leaves_a_broken_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = watching()
    reshard.save(state(1), checkpoint_id=tmp_path / "a")
    assert delete_on(count, tmp_path / "a", monkeypatch) == ""
    seen = set()
    for at in range(len(count.calls)):
        base, place = tmp_path / str(at) / "a", tmp_path / str(at) / "b"
        reshard.save(state(1), checkpoint_id=base)
        saved: list[str] = []
        system = interrupted(at, lambda: saved.append(save_on(os, place, base)))  # noqa: B023

        deleted = delete_on(system, base, monkeypatch)

        assert is_whole(place, 2) is (True if saved == [""] else None), at
        assert is_whole(base, 1) is (True if deleted else None), at
        assert bool(deleted) != bool(saved[0]), at
        seen.add(bool(deleted))
    assert seen == {True, False}


def test_a_save_over_a_checkpoint_at_any_call_of_its_deletion_is_whole_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = watching()
    reshard.save(state(1), checkpoint_id=tmp_path / "a")
    delete_on(count, tmp_path / "a", monkeypatch)
    for at in range(len(count.calls)):
        place = tmp_path / str(at)
        reshard.save(state(1), checkpoint_id=place)
        saved: list[str] = []
        system = interrupted(at, lambda: saved.append(save_on(os, place, None)))  # noqa: B023

        deleted = delete_on(system, place, monkeypatch)

        found = [is_whole(place, step) for step in (1, 2)]
        if saved == [""]:
            assert found[1] or not deleted, at
        else:
            assert found == ([True, False] if deleted else [None, None]), at


def test_a_deletion_at_any_call_of_a_save_over_the_checkpoint_leaves_it_whole_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = watching()
    reshard.save(state(1), checkpoint_id=tmp_path / "a")
    save_on(count, tmp_path / "a", None)
    for at in range(len(count.calls)):
        place = tmp_path / str(at)
        reshard.save(state(1), checkpoint_id=place)
        deleted: list[str] = []
        system = interrupted(at, lambda: deleted.append(delete_on(os, place, monkeypatch)))  # noqa: B023

        saved = save_on(system, place, None)

        # It may have been deleted when it was committed, while its save cleared up.
        assert is_whole(place, 2) is (None if saved or deleted == [""] else True), at
        assert deleted == [""] or not saved, at


ROUNDS = 60


def race(folder: str) -> dict[str, int]:
    """Rank 0 saves with a base while rank 1 deletes it; how often what happened."""
    import torch.distributed as dist

    counts: dict[str, int] = {}
    for number in range(ROUNDS):
        base, place = Path(folder) / f"{number}-a", Path(folder) / f"{number}-b"
        if dist.get_rank() == 0:
            reshard.save(state(1), checkpoint_id=base, no_dist=True)
        dist.barrier()
        # Spread over the time that a save takes.
        timer = threading.Event()
        if dist.get_rank() == 0:
            timer.wait((number % 10) * 0.0005)
            told = outcome(
                lambda: reshard.save(state(2), checkpoint_id=place, base=base, no_dist=True)  # noqa: B023
            )
        else:
            timer.wait((number % 15) * 0.001)
            told = outcome(lambda: reshard.delete(base))  # noqa: B023
        dist.barrier()
        if dist.get_rank() == 0:
            found = is_whole(place, 2)
            assert found is (None if told else True), (number, told)
        else:
            assert is_whole(base, 1) is (True if told else None), (number, told)
        counts[told] = counts.get(told, 0) + 1
        dist.barrier()
    return counts


def test_in_a_race_of_processes_a_checkpoint_is_readable_or_was_never_committed(
    fast_folder: str,
) -> None:
    saves, deletions = run_ranks(2, race, fast_folder)

    assert sum(saves.values()) == sum(deletions.values()) == ROUNDS
    assert set(saves) <= {"", "BaseError", "CheckpointNotFoundError", "CorruptCheckpointError"}
    assert set(deletions) <= {"", "CheckpointInUseError"}


def test_in_a_race_of_threads_a_checkpoint_is_readable_or_was_never_committed(
    fast_folder: str,
) -> None:
    for number in range(50):
        base, place = Path(fast_folder) / f"{number}-a", Path(fast_folder) / f"{number}-b"
        reshard.save(state(1), checkpoint_id=base)
        barrier = threading.Barrier(2)
        told: list[str] = []

        def delete() -> None:
            barrier.wait()  # noqa: B023
            told.append(outcome(lambda: reshard.delete(base)))  # noqa: B023

        thread = threading.Thread(target=delete)
        thread.start()
        barrier.wait()
        # Which of them depends on how far the deletion is when the base is looked at.
        with contextlib.suppress(BaseError, CheckpointNotFoundError, CorruptCheckpointError):
            reshard.save(state(2), checkpoint_id=place, base=base)
        thread.join()

        assert is_whole(place, 2) in (True, None), number
        assert is_whole(base, 1) is (None if told == [""] else True), (number, told)

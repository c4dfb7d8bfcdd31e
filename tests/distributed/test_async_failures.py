"""Saves in the background that fail."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.api import WorkerLostError
from reshard.background import trainer
from reshard.background.worker import worker_of_this_process
from reshard.staging import BlockingAsyncStager, DefaultStager
from reshard.state_dict_saver import AsyncCheckpointerType
from support.background import (
    PROCESS,
    PROMPTLY,
    SECONDS,
    THREAD,
    FailingWriter,
    Gate,
    GatedWriter,
    LastWords,
    both_kinds,
    wait_until,
)
from support.ranks import DEAD, run_alone, run_ranks


def told(error: BaseException | None) -> tuple[str, dict[int, str]]:
    """The kind of an error, and who failed with what."""
    failures = getattr(error, "failures", {})
    return type(error).__name__, {rank: str(reason) for rank, (reason, _) in failures.items()}


def values(seed: float) -> dict[str, Any]:
    return {f"of_rank_{dist.get_rank()}": torch.full((3,), seed), "common": seed}


# A rank fails


def fail_to_write_on_rank_1(folder: str, kind: AsyncCheckpointerType) -> Any:
    """A save, one that fails, and one after it."""
    reshard.save(values(1.0), checkpoint_id=folder)
    failing = reshard.async_save(
        values(2.0), storage_writer=FailingWriter(folder, 1), async_checkpointer_type=kind
    )
    error = failing.exception(SECONDS)
    dist.barrier()
    kept = reshard.read_state_dict(folder)["common"]
    dist.barrier()
    reshard.async_save(values(3.0), checkpoint_id=folder, async_checkpointer_type=kind).result(
        SECONDS
    )
    return told(error), kept, reshard.read_state_dict(folder)["common"]


@both_kinds
def test_a_storage_that_fails_on_one_rank_is_named_on_all_and_the_next_save_works(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    outcomes = run_ranks(2, fail_to_write_on_rank_1, str(tmp_path), kind)

    assert outcomes == [(("CheckpointException", {1: "rank 1 has no space left"}), 1.0, 3.0)] * 2


class LockedWriter(reshard.FileSystemWriter):
    """A writer that cannot be sent to a worker."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.lock = threading.Lock()


def give_the_worker_of_rank_1_what_cannot_be_sent(folder: str) -> Any:
    writer = (LockedWriter if dist.get_rank() == 1 else reshard.FileSystemWriter)(folder)
    return told(
        reshard.async_save(
            values(1.0), storage_writer=writer, async_checkpointer_type=PROCESS
        ).exception(SECONDS)
    )


def test_what_cannot_be_sent_to_a_worker_is_named_on_all_ranks(tmp_path: Path) -> None:
    there, here = run_ranks(2, give_the_worker_of_rank_1_what_cannot_be_sent, str(tmp_path))

    assert (there[0], here[0]) == ("RankLostError", "CheckpointException")
    for outcome in (there, here):
        assert list(outcome[1]) == [1]
        assert "lock" in outcome[1][1]


def ignore_failures(folder: str, kind: AsyncCheckpointerType) -> dict[str, Any]:
    """What is raised by what comes after a failure that nobody looked at, and again after it."""
    place, elsewhere = f"{folder}/place", f"{folder}/elsewhere"
    reshard.save(values(1.0), checkpoint_id=place)
    reshard.save(values(1.0), checkpoint_id=elsewhere)

    def fail() -> Any:
        future = reshard.async_save(
            values(2.0),
            storage_writer=FailingWriter(place, dist.get_world_size() - 1),
            async_checkpointer_type=kind,
        )
        concurrent.futures.wait([future], SECONDS)
        dist.barrier()
        return future

    def background_save() -> None:
        future = reshard.async_save(
            values(3.0), checkpoint_id=elsewhere, async_checkpointer_type=kind
        )
        future.result(SECONDS)

    after = {
        "async_save": background_save,
        "save": lambda: reshard.save(values(3.0), checkpoint_id=elsewhere),
        "load": lambda: reshard.load(values(0.0), checkpoint_id=place),
        "close": reshard.close,
    }
    raised: dict[str, Any] = {}
    for look in ("result", "exception"):
        future = fail()
        with contextlib.suppress(reshard.CheckpointException):
            getattr(future, look)(SECONDS)
        after["save"]()
        raised[f"save after {look} was looked at"] = None
    for name, call in after.items():
        fail()
        # Whoever loads something else has nothing to do with it.
        reshard.load(values(0.0), checkpoint_id=elsewhere)
        for attempt in (f"first {name}", f"second {name}"):
            try:
                call()
                raised[attempt] = None
            except reshard.CheckpointException as error:
                raised[attempt] = place in str(error), "no space left" in str(error)
            dist.barrier()
    return raised


@pytest.mark.parametrize(("kind", "ranks"), [(THREAD, 2), (PROCESS, 1)], ids=["thread", "process"])
def test_a_failure_that_nobody_looked_at_is_raised_once_by_what_comes_next(
    kind: AsyncCheckpointerType, ranks: int, tmp_path: Path
) -> None:
    for raised in run_ranks(ranks, ignore_failures, str(tmp_path), kind):
        assert raised == {
            **{f"first {name}": (True, True) for name in ("async_save", "save", "load", "close")},
            **{f"second {name}": None for name in ("async_save", "save", "load", "close")},
            "save after result was looked at": None,
            "save after exception was looked at": None,
        }


def fail_to_stage_on_rank_1(folder: str, kind: AsyncCheckpointerType, in_background: bool) -> Any:
    """A value that cannot be copied; how each rank hears of it, and whether saves go on."""
    state_dict = values(1.0)
    if dist.get_rank() == 1:
        state_dict["lock"] = threading.Lock()
    stager = DefaultStager() if in_background else BlockingAsyncStager()
    began = time.monotonic()
    at_once = staging = outcome = None
    try:
        begun = reshard.async_save(
            state_dict,
            checkpoint_id=f"{folder}/bad",
            async_checkpointer_type=kind,
            async_stager=stager,
        )
    except reshard.CheckpointException as error:
        at_once = type(error).__name__
    else:
        if in_background:
            staging = type(begun.staging_completion.exception(SECONDS)).__name__
            begun = begun.upload_completion
        outcome = told(begun.exception(SECONDS))
    seconds = time.monotonic() - began
    reshard.async_save(
        values(2.0),
        checkpoint_id=f"{folder}/good",
        async_checkpointer_type=kind,
    ).result(SECONDS)
    return at_once, staging, outcome, seconds


@both_kinds
def test_a_state_that_cannot_be_copied_is_raised_there_at_once_and_told_to_the_others(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    there, here = run_ranks(2, fail_to_stage_on_rank_1, str(tmp_path), kind, False)

    assert here[:3] == ("UnsupportedLayoutError", None, None)
    at_once, _, (error, failures), seconds = there
    assert at_once is None
    assert error == "UnsupportedLayoutError"
    assert list(failures) == [1]
    assert "'lock' is a lock that cannot be copied" in failures[1]
    assert seconds < PROMPTLY
    assert reshard.read_state_dict(tmp_path / "good")["common"] == 2.0
    assert not (tmp_path / "bad" / ".metadata").exists()


def test_a_copy_that_fails_in_the_background_fails_both_of_its_futures(tmp_path: Path) -> None:
    there, here = run_ranks(2, fail_to_stage_on_rank_1, str(tmp_path), THREAD, True)

    assert here[:2] == (None, "UnsupportedLayoutError")
    assert there[:2] == (None, "NoneType")
    for error, failures in (there[2], here[2]):
        assert error == "UnsupportedLayoutError"
        assert list(failures) == [1]
        assert "'lock' is a lock that cannot be copied" in failures[1]
    assert there[3] < PROMPTLY
    assert reshard.read_state_dict(tmp_path / "good")["common"] == 2.0


def stay_away_on_rank_1(folder: str, kind: AsyncCheckpointerType) -> Any:
    # So that worker processes are there, whose start may take longer than the time limit.
    options: dict[str, Any] = {"checkpoint_id": folder, "async_checkpointer_type": kind}
    reshard.async_save(values(0.0), **options).result(SECONDS)
    if dist.get_rank() == 1:
        return None
    future = reshard.async_save(values(1.0), **options, timeout_seconds=1)
    return told(future.exception(PROMPTLY))


@both_kinds
def test_a_rank_that_does_not_call_is_named_by_all_when_the_time_is_up(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    first, _, last = run_ranks(3, stay_away_on_rank_1, str(tmp_path), kind)

    for error, failures in (first, last):
        assert error == "RankLostError"
        assert list(failures) == [1]
        assert "did not answer within 1 s" in failures[1]


class DyingStager(BlockingAsyncStager):
    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().stage(state_dict, **kwargs)


def die_while_staging_on_rank_1(folder: str, kind: AsyncCheckpointerType) -> Any:
    reshard.save(values(1.0), checkpoint_id=folder)
    future = reshard.async_save(
        values(2.0),
        checkpoint_id=folder,
        async_checkpointer_type=kind,
        async_stager=DyingStager(),
    )
    try:
        return told(future.exception(PROMPTLY))
    except TimeoutError:
        return "no word of it", {}


def die_between_saves(folder: str, kind: AsyncCheckpointerType) -> Any:
    reshard.async_save(values(1.0), checkpoint_id=folder, async_checkpointer_type=kind).result(
        SECONDS
    )
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    future = reshard.async_save(values(2.0), checkpoint_id=folder, async_checkpointer_type=kind)
    try:
        return told(future.exception(10))
    except TimeoutError:
        return "no word of it", {}


@both_kinds
@pytest.mark.parametrize("die", [die_while_staging_on_rank_1, die_between_saves])
def test_a_rank_that_died_is_named_within_seconds(
    die: Any, kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    outcome, dead = run_ranks(2, die, str(tmp_path), kind, dying={1})

    assert dead == DEAD
    assert outcome[0] == "RankLostError"
    assert list(outcome[1]) == [1]
    assert "died" in outcome[1][1]
    assert reshard.read_state_dict(tmp_path)["common"] == 1.0


def fail_once(folder: str) -> list[int]:
    """Ten saves, of which the first fails, which rank 0 knows before it begins the second."""
    rank, futures = dist.get_rank(), []
    for number in range(10):
        dist.barrier()
        if rank == 0 and number == 1:
            concurrent.futures.wait(futures, SECONDS)
        place = f"{folder}/{number}"
        writer = FailingWriter(place, 1) if number == 0 else reshard.FileSystemWriter(place)
        # An earlier failure is raised here, at different times on the two ranks.
        with contextlib.suppress(reshard.CheckpointException):
            futures.append(reshard.async_save(values(1.0), storage_writer=writer))
    concurrent.futures.wait(futures, SECONDS)
    with contextlib.suppress(reshard.CheckpointException):
        reshard.close()
    dist.barrier()
    return [n for n in range(10) if os.path.exists(f"{folder}/{n}/.metadata")]


def test_a_failure_costs_one_checkpoint_whenever_ranks_learn_of_it(tmp_path: Path) -> None:
    assert run_ranks(2, fail_once, str(tmp_path)) == [[*range(1, 10)]] * 2


# The worker dies


def stop_the_worker_of_rank_1(folder: str) -> Any:
    options: dict[str, Any] = {"checkpoint_id": folder, "async_checkpointer_type": PROCESS}
    reshard.async_save(values(1.0), **options).result(SECONDS)
    if dist.get_rank() == 1:
        os.kill(worker_of_this_process().start().pid, signal.SIGSTOP)
    trainer._GRACE_SECONDS = 1.0
    future = reshard.async_save(values(2.0), **options, timeout_seconds=1)
    error = future.exception(PROMPTLY)
    return type(error).__name__, str(error)


def test_a_worker_that_hangs_is_given_up(tmp_path: Path) -> None:
    there, here = run_ranks(2, stop_the_worker_of_rank_1, str(tmp_path))

    assert there[0] == "RankLostError"
    assert here[0] == "WorkerLostError"
    assert "it had not answered for 8.0 s" in here[1]
    assert reshard.read_state_dict(tmp_path)["common"] == 1.0


def kill_the_worker_of_rank_1(folder: str) -> Any:
    """A worker that is killed in the middle of a save, and what comes after it."""
    gate, rank = Gate(folder), dist.get_rank()
    reshard.save(values(1.0), checkpoint_id=f"{folder}/place")
    reshard.prewarm({}, async_checkpointer_type=PROCESS)
    keeper = worker_of_this_process()
    first = keeper.start().pid
    future = reshard.async_save(
        values(2.0),
        storage_writer=GatedWriter(f"{folder}/place", gate),
        async_checkpointer_type=PROCESS,
    )
    wait_until(lambda: gate.is_reached_by(first))
    dist.barrier()
    began = time.monotonic()
    if rank == 1:
        os.kill(first, signal.SIGKILL)
        outcome = future.exception(PROMPTLY)
        dist.barrier()
        gate.open()
    else:
        dist.barrier()
        wait_until(lambda: os.path.exists(gate.path))
        outcome = future.exception(PROMPTLY)
    seconds = time.monotonic() - began
    dist.barrier()
    kept = reshard.read_state_dict(f"{folder}/place")["common"]
    dist.barrier()
    reshard.async_save(
        values(3.0), checkpoint_id=f"{folder}/place", async_checkpointer_type=PROCESS
    ).result(SECONDS)
    second = keeper.start().pid
    left_behind = Path(f"/proc/{first}").exists() and first != second
    return told(outcome), str(outcome), seconds, kept, first == second, left_behind


def test_a_worker_that_is_killed_fails_the_save_on_all_ranks_and_is_replaced(
    tmp_path: Path,
) -> None:
    there, here = run_ranks(2, kill_the_worker_of_rank_1, str(tmp_path), seconds=100)

    assert here[0][0] == WorkerLostError.__name__
    assert "SIGKILL" in here[1]
    assert there[0][0] == "RankLostError"
    assert list(there[0][1]) == [1]
    for _, _, seconds, kept, _, left_behind in (there, here):
        assert seconds < PROMPTLY
        assert kept == 1.0
        assert not left_behind
    assert there[4], "a worker that was well was replaced"
    assert not here[4], "a worker that was dead was used"
    assert reshard.read_state_dict(tmp_path / "place")["common"] == 3.0


def close_on_rank_1_between_saves(folder: str) -> Any:
    for seed in (1.0, 2.0):
        future = reshard.async_save(
            values(seed), checkpoint_id=folder, async_checkpointer_type=PROCESS
        )
        error = future.exception(SECONDS)
        if dist.get_rank() == 1:
            reshard.close()
        dist.barrier()
    return told(error)


def test_a_worker_that_is_new_is_waited_for_by_the_old_ones(tmp_path: Path) -> None:
    outcomes = run_ranks(2, close_on_rank_1_between_saves, str(tmp_path), seconds=100)

    assert outcomes == [("NoneType", {})] * 2


def close_beside_a_child(folder: str) -> float:
    """How long it takes to close while a process that was forked off lives, at most 9 s."""
    reshard.async_save({"a": 1}, checkpoint_id=folder, async_checkpointer_type=PROCESS).result(
        SECONDS
    )
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    closing = threading.Thread(target=reshard.close)
    began = time.monotonic()
    closing.start()
    # After ten, the worker would be killed.
    closing.join(9)
    seconds = time.monotonic() - began
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    closing.join(SECONDS)
    return seconds


def test_close_does_not_wait_for_processes_that_training_has_forked(tmp_path: Path) -> None:
    assert run_alone(close_beside_a_child, str(tmp_path)) < 9


def die_with_last_words(folder: str) -> tuple[str, str]:
    future = reshard.async_save(
        {"w": torch.ones(1)}, storage_writer=LastWords(folder), async_checkpointer_type=PROCESS
    )
    error = future.exception(SECONDS)
    return type(error).__name__, str(error)


def test_a_worker_that_dies_is_quoted(tmp_path: Path) -> None:
    kind, text = run_alone(die_with_last_words, str(tmp_path))

    assert kind == "WorkerLostError"
    assert "ended with exit code 3" in text
    assert "the disk is on fire" in text

"""The manager of a run on several ranks: all do the same, whatever only one of them knows."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import reshard
from reshard import CheckpointManager, EveryMinutes, EverySteps, Latest
from reshard.operations import ranks as ranks_module
from support.object_servers import Place
from support.ranks import run_alone, run_ranks
from support.runs import Clock, damage, holding_process, is_at, set_step, sharded_state

Options = dict[str, Any]


def train(manager: CheckpointManager, steps: range, state: Options | None = None) -> list[int]:
    state = sharded_state() if state is None else state
    done = []
    for step in steps:
        set_step(state, step)
        if manager.save(step, state, {"loss": -float(step)}):
            done.append(step)
    return done


# Decisions


def save_by_skewed_clocks(root: str) -> tuple[list[int], list[int]]:
    rank = dist.get_rank()
    clock = Clock()
    state = sharded_state()
    done = []
    every = EveryMinutes(1) | EverySteps(7)
    with CheckpointManager(root, every, clock=clock) as manager:
        for step in range(1, 16):
            # On rank 1 time flies, and on rank 2 it stands still.
            clock.now += [25, 1000, 0][rank]
            if manager.save(step, state):
                done.append(step)
        return done, manager.steps()


def test_all_ranks_save_at_the_same_steps_whatever_their_clocks_say(tmp_path: Path) -> None:
    expected = [3, 6, 7, 10, 13, 14]

    assert run_ranks(3, save_by_skewed_clocks, str(tmp_path)) == [(expected, expected)] * 3


def count_meetings(root: str) -> tuple[list[int], dict[str, int]]:
    counts: dict[str, int] = {}
    real = ranks_module.open_channel

    def counted(group: Any, use_dist: bool, coordinator: int, seconds: float, intent: Any) -> Any:
        counts[intent.key.split(" to ")[0]] = counts.get(intent.key.split(" to ")[0], 0) + 1
        return real(group, use_dist, coordinator, seconds, intent)

    with CheckpointManager(root, EverySteps(50)) as manager:
        ranks_module.open_channel = counted  # type: ignore[assignment]
        return train(manager, range(1, 101)), counts


def test_ranks_do_not_talk_at_steps_that_are_not_saved(tmp_path: Path) -> None:
    for done, counts in run_ranks(2, count_meetings, str(tmp_path)):
        assert done == [50, 100]
        assert counts == {"manager decide": 2, "save": 2}


def ask_by_a_clock(root: str) -> tuple[list[int], int]:
    """Steps of 10 ms, for 10 s in which nothing is due."""
    asked = 0
    clock = Clock()
    real = CheckpointManager._ask

    def counted(self: Any, step: int, force: bool) -> Any:
        nonlocal asked
        asked += 1
        return real(self, step, force)

    CheckpointManager._ask = counted  # type: ignore[method-assign]
    state, done = sharded_state(), []
    with CheckpointManager(root, EveryMinutes(1 / 10), clock=clock) as manager:
        for step in range(1, 1001):
            clock.now += 0.01
            if manager.save(step, state):
                done.append(step)
    return done, asked


def test_a_policy_with_a_clock_asks_about_once_a_second(tmp_path: Path) -> None:
    (done, asked), others = run_ranks(2, ask_by_a_clock, str(tmp_path))

    assert (done, asked) == others
    assert len(done) == 1
    assert 600 <= done[0] <= 700
    assert asked < 30


def be_out_of_step(root: str) -> str:
    with CheckpointManager(root) as manager:
        try:
            manager.save(3 + dist.get_rank(), sharded_state())
        except reshard.CheckpointException as error:
            return str(error)
    return ""


def test_ranks_at_different_steps_are_told_so(tmp_path: Path) -> None:
    for text in run_ranks(2, be_out_of_step, str(tmp_path)):
        assert "3 on rank 0, 4 on rank 1" in text


# Preemption


def be_preempted(root: str, mode: Any) -> tuple[list[int], bool, list[int]]:
    state = sharded_state()
    done = []
    options: Options = {"mode": mode, "on_preemption": True, "clock": Clock()}
    with CheckpointManager(root, EverySteps(1000), **options) as manager:
        for step in range(1, 50):
            set_step(state, step)
            if step == 5 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.save(step, state):
                done.append(step)
            if manager.preempted:
                break
        return done, manager.preempted, manager.steps()


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_a_signal_to_one_rank_makes_all_save_and_leave(mode: str, tmp_path: Path) -> None:
    assert run_ranks(2, be_preempted, str(tmp_path), mode) == [([5], True, [5])] * 2


def end_a_forked_child(root: str) -> int:
    with CheckpointManager(root, on_preemption=True):
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            # Signals that come while a process is forked are lost.
            os.write(sender, b"ready")
            while True:
                signal.pause()
        os.read(receiver, 5)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)


def test_a_forked_child_such_as_a_worker_of_a_dataloader_can_still_be_ended(
    tmp_path: Path,
) -> None:
    assert run_alone(end_a_forked_child, str(tmp_path)) == -signal.SIGTERM


# Resuming


def run_for(root: str, steps: range, mode: Any, options: Options | None) -> tuple[Any, list[int]]:
    """Resume, train, and leave; what was restored, and what is there."""
    state = sharded_state()
    settings: Options = {"mode": mode, "storage_options": options}
    with CheckpointManager(root, EverySteps(2), Latest(2), **settings) as manager:
        restored = manager.restore(state)
        assert restored is None or is_at(state, restored)
        skipped = [] if restored is None else list(restored.skipped)
        train(manager, steps, state)
        manager.wait()
        # Retention is the work of the coordinator.
        dist.barrier()
        found = manager.steps()
    reshard.close()
    return (restored, skipped), found


@pytest.mark.parametrize(
    "mode", ["sync", "thread", pytest.param("process", marks=pytest.mark.slow)]
)
def test_a_run_goes_on_with_another_number_of_ranks(mode: str, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    assert run_ranks(2, run_for, root, range(1, 8), mode, None) == [((None, []), [4, 6])] * 2
    assert run_ranks(3, run_for, root, range(7, 10), mode, None) == [((6, []), [6, 8])] * 3
    damage(f"{root}/step-8")
    assert run_ranks(2, run_for, root, range(7, 8), mode, None) == [((6, [8]), [6, 8])] * 2


def test_a_run_on_an_object_store_keeps_and_restores_the_same(s3: Place) -> None:
    arguments = (s3.url, range(1, 8), "thread", s3.options)
    assert run_ranks(2, run_for, *arguments) == [((None, []), [4, 6])] * 2
    arguments = (s3.url, range(7, 10), "sync", s3.options)
    assert run_ranks(1, run_for, *arguments) == [((6, []), [6, 8])]
    beside = {name.split("/")[0] for name in s3.names()}
    [receipt] = [name for name in beside if name.startswith("resume-")]
    assert beside == {
        "history.jsonl",
        receipt,
        *("step-6", "step-6.metrics.json", "step-8", "step-8.metrics.json"),
    }


# Failures


def die_in_a_save(root: str) -> None:
    """Save step 2, and end without a word while step 4 is written."""
    state = sharded_state()
    manager = CheckpointManager(root, EverySteps(2), mode="thread")
    train(manager, range(1, 4), state)
    manager.wait()
    dist.barrier()

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        self._open_save().put("__9_9_" + "0" * 16 + ".safetensors", b"half", durable=False)
        os.kill(os.getpid(), signal.SIGKILL)

    reshard.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    train(manager, range(4, 5), state)
    manager.wait()
    # The other rank was dead before this one had written.
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_job_that_was_killed_in_a_save_is_taken_over_and_cleared_up_after(
    tmp_path: Path,
) -> None:
    root = tmp_path / "run"
    run_ranks(2, die_in_a_save, str(root), dying=(0, 1))
    # A rank that outlived the other for a moment may have cleared step 4 away already.
    assert {"holder.json", "step-2"} <= set(os.listdir(root))

    assert run_ranks(2, run_for, str(root), range(3, 4), "sync", None) == [((2, []), [2])] * 2
    found = sorted(os.listdir(root))
    assert found.pop(1).startswith("resume-")
    assert found == ["history.jsonl", "step-2", "step-2.metrics.json"]


def save_on_a_failing_disk(root: str, mode: Any) -> tuple[list[int], str]:
    """Rank 1 cannot write at first."""
    state = sharded_state()
    real = reshard.FileSystemWriter.write_data
    failing = [dist.get_rank() == 1] * 2

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        if failing and failing.pop():
            raise OSError(28, "No space left on device")
        return real(self, plan, planner)

    reshard.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    failure = ""
    options: Options = {"mode": mode, "max_failures": 2, "clock": Clock()}
    with CheckpointManager(root, EverySteps(10), **options) as manager:
        for step in range(10, 14):
            set_step(state, step)
            try:
                manager.save(step, state)
            except reshard.CheckpointException as error:
                failure = f"{step}: {error}"
            manager.wait()
            dist.barrier()
        return manager.steps(), failure


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_a_rank_that_cannot_write_fails_the_save_of_all_until_it_can(
    mode: str, tmp_path: Path
) -> None:
    for steps, failure in run_ranks(2, save_on_a_failing_disk, str(tmp_path), mode):
        assert steps == [13]
        assert failure.startswith("12: ")
        assert "No space left on device" in failure


def open_a_held_root(root: str) -> str:
    try:
        CheckpointManager(root)
    except reshard.api.CheckpointInUseError as error:
        return str(error)
    return ""


def test_all_ranks_of_a_second_job_are_told_who_holds_the_root(tmp_path: Path) -> None:
    job = holding_process(tmp_path)
    try:
        for text in run_ranks(2, open_a_held_root, str(tmp_path)):
            assert f"process {job.pid}" in text
    finally:
        job.kill()
        job.communicate()

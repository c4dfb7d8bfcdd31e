"""The manager of a run in one process: what is saved, kept, restored, refused."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard
from reshard import (
    AtSteps,
    Best,
    CheckpointManager,
    EveryMinutes,
    EverySteps,
    KeepPolicy,
    Latest,
)
from reshard.api import (
    CheckpointException,
    CheckpointExistsError,
    CheckpointInUseError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotRestoredError,
    ShapeMismatchError,
)
from reshard.policies import Saved
from reshard.runs import holding
from reshard.runs.holding import HOLDER, Holder, hold
from reshard.stores.local import LocalStore
from reshard.training import TrainState
from support.runs import (
    Clock,
    damage,
    holding_process,
    is_at,
    plain_state,
    saved_steps,
    set_step,
)

MODES = ["sync", "thread"]


def train(manager: CheckpointManager, steps: Sequence[int], **options: Any) -> list[int]:
    """Save after each of some steps; at which of them it was done."""
    state = plain_state()
    done = []
    for step in steps:
        set_step(state, step)
        if manager.save(step, state, {"loss": -float(step)}, **options):
            done.append(step)
    return done


# What is saved and kept


@pytest.mark.parametrize("mode", MODES)
def test_a_run_saves_what_is_due_keeps_what_is_wanted_and_resumes(
    mode: Any, tmp_path: Path
) -> None:
    options: Any = {"every": EverySteps(2), "keep": Latest(2) | EverySteps(6), "mode": mode}
    with CheckpointManager(tmp_path, **options) as manager:
        assert manager.restore(plain_state()) is None
        assert train(manager, range(1, 12)) == [2, 4, 6, 8, 10]
        manager.wait()
        assert manager.steps() == [6, 8, 10]

    state = plain_state()
    with CheckpointManager(tmp_path, **options) as manager:
        restored = manager.restore(state)
        assert restored == 10
        assert restored is not None
        assert restored.skipped == {}
        assert restored.report.loaded
        assert is_at(state, 10)
        assert train(manager, range(11, 13)) == [12]
    assert CheckpointManager(tmp_path, read_only=True).steps() == [6, 10, 12]


def test_a_save_is_copied_beside_the_next_pass(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"train": TrainState(model, optimizer)}
    with CheckpointManager(tmp_path, mode="thread", staging="overlap") as manager:
        for step in range(1, 4):
            before = model.weight.detach().clone()
            manager.save(step, state)
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    saved = reshard.read_state_dict(tmp_path / "step-3")
    assert torch.equal(saved["train"]["model"]["weight"], before)
    assert not torch.equal(model.weight, before)

    with pytest.raises(ValueError, match="choose another mode"):
        CheckpointManager(tmp_path, mode="sync", staging="overlap")


def test_a_save_in_another_process_is_committed_too(tmp_path: Path) -> None:
    assert saved_steps(str(tmp_path), 2, mode="process", keep=Latest(1)) == [2]
    state = plain_state()
    assert CheckpointManager(tmp_path, read_only=True).restore(state) == 2
    assert is_at(state, 2)
    reshard.close()


def test_a_run_may_live_in_any_file_system_of_fsspec(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    root = f"memory://{tmp_path.name}/{os.getpid()}/run"
    assert saved_steps(root, 5, keep=Latest(2) | Best("loss")) == [1, 4, 5]
    state = plain_state()
    with CheckpointManager(root, keep=Latest(1)) as manager:
        assert manager.restore(state) == 5
        assert is_at(state, 5)
        manager.pin(1)
        with pytest.raises(CheckpointInUseError, match="held by another job"):
            CheckpointManager(root)
        manager.save(6, plain_state(6))
        assert manager.steps() == [1, 6]


def test_a_clock_decides_by_the_time_since_the_last_save(tmp_path: Path) -> None:
    clock = Clock()
    with CheckpointManager(tmp_path, EveryMinutes(1), clock=clock) as manager:
        assert train(manager, [1, 2]) == []
        clock.now = 60
        assert train(manager, [3, 4]) == [3]
        clock.now = 119
        assert train(manager, [5]) == []
        clock.now = 120
        assert train(manager, [6]) == [6]


def test_a_save_can_be_forced_and_a_saved_step_is_not_saved_again(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, EverySteps(100)) as manager:
        assert train(manager, [1], force=True) == [1]
        written = (tmp_path / "step-1" / ".metadata").stat().st_mtime_ns
        assert train(manager, [1], force=True) == []
        assert (tmp_path / "step-1" / ".metadata").stat().st_mtime_ns == written


def test_the_best_stay_with_their_metrics(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: math.nan, 4: 2.0, 5: 9.0}
    with CheckpointManager(tmp_path, keep=Best("loss", 2)) as manager:
        for step, loss in losses.items():
            manager.save(step, plain_state(step), {"loss": torch.tensor(loss), "lr": 0.5})

        assert manager.steps() == [2, 4, 5]
        assert manager.best() == 2
        assert manager.best("loss", largest=True) == 5
        assert manager.metrics(4) == {"loss": 2.0, "lr": 0.5}
        assert manager.metrics(3) == {}
    assert not (tmp_path / "step-1.metrics.json").exists()


def test_a_metric_that_is_not_a_number_is_kept_and_never_the_best(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=Best("loss")) as manager:
        manager.save(1, plain_state(1), {"loss": 1.0})
        manager.save(2, plain_state(2), {"loss": math.nan})
        assert manager.best() == 1
        assert math.isnan(manager.metrics(2)["loss"])
        assert manager.steps() == [1, 2]


def test_what_is_pinned_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=Latest(1)) as manager:
        train(manager, [1])
        manager.pin(1)
        train(manager, [2, 3])
        assert manager.steps() == [1, 3]
        with pytest.raises(CheckpointInUseError, match="is pinned"):
            manager.delete(1)
        assert manager.unpin(1)
        train(manager, [4])
        assert manager.steps() == [4]


def test_what_another_checkpoint_refers_to_stays(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=Latest(1)) as manager:
        train(manager, [1])
        reshard.save(plain_state(1), checkpoint_id=tmp_path / "mine", base=tmp_path / "step-1")
        train(manager, [2, 3])
        assert manager.steps() == [1, 3]
        reshard.delete(tmp_path / "mine")
        train(manager, [4])
        assert manager.steps() == [4]


def test_folders_that_the_manager_did_not_make_are_neither_listed_nor_deleted(
    tmp_path: Path,
) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    (tmp_path / "step-007").mkdir()
    reshard.save(plain_state(), checkpoint_id=tmp_path / "other-1")
    dcp.save(plain_state(), checkpoint_id=tmp_path / "step-2", no_dist=True)
    with CheckpointManager(tmp_path, keep=Latest(1)) as manager:
        train(manager, [3, 4])
        assert manager.latest() == 4
        assert 1 not in manager.steps()
    kept = {"step-1", "step-007", "other-1", "step-2", "step-4"}
    assert kept <= set(os.listdir(tmp_path))
    assert (tmp_path / "step-1" / "notes.txt").exists()
    assert (tmp_path / "step-2" / ".metadata").exists()


def test_what_could_not_be_deleted_is_deleted_after_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, keep=Latest(1)) as manager:
        train(manager, [1])
        follower = CheckpointManager(tmp_path, read_only=True)
        assert follower.wait_for_new() == 1
        with caplog.at_level(logging.WARNING):
            train(manager, [2])
        assert "step-1 is not deleted, although no policy keeps it" in caplog.text
        assert manager.steps() == [1, 2]
        assert follower.wait_for_new(after=1) == 2
        train(manager, [3])
        assert manager.steps() == [2, 3]
        follower.close()
        train(manager, [4])
        assert manager.steps() == [4]


def test_a_policy_of_a_user_that_fails_deletes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(KeepPolicy):
        def kept(self, saved: Sequence[Saved], now: float) -> Collection[int]:
            raise RuntimeError("no idea")

    with CheckpointManager(tmp_path, keep=Broken()) as manager:
        train(manager, [1, 2])
        assert manager.steps() == [1, 2]
    assert "no idea" in caplog.text


def test_the_history_has_a_line_for_each_save_over_all_runs(tmp_path: Path) -> None:
    for steps in ([1], [2]):
        with CheckpointManager(tmp_path) as manager:
            train(manager, steps)
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]

    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["ok"] and line["bytes"] > 0 and line["seconds"] > 0 for line in lines)
    assert all(line["stall_seconds"] > 0 for line in lines)


# Debris


def test_what_a_dead_save_left_is_not_listed_and_cleared_by_the_next_manager(
    tmp_path: Path,
) -> None:
    saved_steps(str(tmp_path), 1)
    dead = tmp_path / "step-2"
    dead.mkdir()
    token = "0123456789abcdef"
    (dead / f"__0_0_{token}.safetensors").write_bytes(b"half")
    (tmp_path / "step-3").mkdir()
    manager = CheckpointManager(tmp_path, read_only=True)
    assert manager.steps() == [1]
    assert dead.exists()

    with CheckpointManager(tmp_path):
        assert sorted(each for each in os.listdir(tmp_path) if "step" in each) == [
            "step-1",
            "step-1.metrics.json",
        ]


def test_what_a_save_that_may_be_alive_writes_is_not_cleared(tmp_path: Path) -> None:
    other = tmp_path / "step-2"
    other.mkdir(parents=True)
    (other / ".metadata.0123456789abcdef.00000000-1-1.draft").write_bytes(b"")
    (other / "__0_0_0123456789abcdef.safetensors").write_bytes(b"half")

    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == []
        assert len(os.listdir(other)) == 2


# Resuming


def test_a_damaged_newest_is_passed_over_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_steps(str(tmp_path), 3)
    damage(tmp_path / "step-3")
    state = plain_state()
    with CheckpointManager(tmp_path, keep=Latest(2)) as manager:
        with caplog.at_level(logging.WARNING):
            restored = manager.restore(state)
        assert restored == 2
        assert restored is not None
        assert list(restored.skipped) == [3]
        assert "checksum" in restored.skipped[3]
        assert "step 3 of" in caplog.text
        assert is_at(state, 2)
        # It goes on from there, over what is damaged.
        assert train(manager, [3, 4]) == [3, 4]
        assert manager.steps() == [3, 4]
        assert manager.restore(state) == 4


def test_a_damaged_checkpoint_takes_no_place_of_a_good_one(tmp_path: Path) -> None:
    saved_steps(str(tmp_path), 9, every=EverySteps(3))
    damage(tmp_path / "step-9")
    with CheckpointManager(tmp_path, keep=Latest(2)) as manager:
        assert manager.restore(plain_state()) == 6
        assert train(manager, [7]) == [7]
        assert manager.steps() == [6, 7, 9]


def test_a_run_without_any_good_checkpoint_raises(tmp_path: Path) -> None:
    saved_steps(str(tmp_path), 2)
    damage(tmp_path / "step-1")
    damage(tmp_path / "step-2")
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CorruptCheckpointError, match="step-2"),
    ):
        manager.restore(plain_state())


def test_a_state_that_does_not_fit_is_an_error_and_no_damage(tmp_path: Path) -> None:
    saved_steps(str(tmp_path), 2)
    with CheckpointManager(tmp_path) as manager, pytest.raises(ShapeMismatchError):
        manager.restore({"w": torch.zeros(5), "step": 0})


def test_a_step_can_be_chosen_but_not_gone_on_from_behind_newer_ones(tmp_path: Path) -> None:
    saved_steps(str(tmp_path), 3)
    state = plain_state()
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(state, step=1) == 1
        assert is_at(state, 1)
        with pytest.raises(ValueError, match="goes back behind step 3"):
            manager.save(2, state)
        manager.delete(3)
        manager.delete(2)
        assert train(manager, [2]) == [2]
        with pytest.raises(CheckpointNotFoundError):
            manager.restore(state, step=7)


def test_a_follower_gets_what_is_new_or_nothing_in_time(tmp_path: Path) -> None:
    follower = CheckpointManager(tmp_path, read_only=True)
    assert follower.wait_for_new(timeout=0) is None
    found: list[int | None] = []
    waiting = threading.Thread(
        target=lambda: found.append(follower.wait_for_new(after=1, timeout=60, poll_seconds=0.01))
    )
    with CheckpointManager(tmp_path) as manager:
        train(manager, [1])
        waiting.start()
        train(manager, [2])
        waiting.join()
    assert found == [2]
    follower.close()
    assert not list(tmp_path.glob("step-*/*.reading"))


# Failures


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Saves fail for as long as there is a number left in the list."""
    failing: list[int] = []
    real = reshard.FileSystemWriter.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        if failing:
            failing.pop()
            raise OSError(28, "No space left on device")
        return real(self, plan, planner)

    monkeypatch.setattr(reshard.FileSystemWriter, "write_data", write_data)
    return failing  # type: ignore[return-value]


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_save_does_not_end_training_and_is_tried_again(
    mode: Any, tmp_path: Path, full_disk: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    full_disk[:] = [0, 0]
    with CheckpointManager(tmp_path, EverySteps(10), mode=mode) as manager:
        for step in range(9, 14):
            manager.save(step, plain_state(step))
            manager.wait()
        assert manager.steps() == [12]
    assert "No space left on device" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [(line["step"], line["ok"]) for line in lines] == [(10, False), (11, False), (12, True)]
    assert "No space left" in lines[0]["reason"]


@pytest.mark.parametrize("mode", MODES)
def test_too_many_failures_in_a_row_are_raised(
    mode: Any, tmp_path: Path, full_disk: list[int]
) -> None:
    full_disk[:] = [0] * 9
    with CheckpointManager(tmp_path, mode=mode, max_failures=2) as manager:
        for step in (1, 2):
            manager.save(step, plain_state(step))
            manager.wait()
        with pytest.raises(CheckpointException, match=r"have failed.*No space left"):
            manager.save(3, plain_state(3))


def test_a_failure_is_raised_at_once_if_that_is_wanted(
    tmp_path: Path, full_disk: list[int]
) -> None:
    full_disk[:] = [0]
    with CheckpointManager(tmp_path, on_failure="raise") as manager:
        with pytest.raises(CheckpointException, match="No space left"):
            manager.save(1, plain_state(1))
        assert manager.save(2, plain_state(2))


def test_a_background_failure_is_raised_by_close_if_that_is_wanted(
    tmp_path: Path, full_disk: list[int]
) -> None:
    full_disk[:] = [0]
    manager = CheckpointManager(tmp_path, on_failure="raise", mode="thread")
    manager.save(1, plain_state(1))
    with pytest.raises(CheckpointException, match="No space left"):
        manager.close()
    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == []


# Who holds the root


def test_a_second_job_is_told_who_holds_the_root_and_takes_over_when_that_is_dead(
    tmp_path: Path,
) -> None:
    job = holding_process(tmp_path)
    try:
        with pytest.raises(CheckpointInUseError, match=rf"another job.*process {job.pid}"):
            CheckpointManager(tmp_path)
        CheckpointManager(tmp_path, read_only=True).close()
    finally:
        job.kill()
        job.communicate()
    with CheckpointManager(tmp_path) as manager:
        train(manager, [1])
    assert not (tmp_path / HOLDER).exists()


def elsewhere(root: Path, beat: float) -> None:
    """A job on another machine, that was last heard of at some time."""
    store = LocalStore(root)
    hold(store)
    found = json.loads((root / HOLDER).read_text())
    (root / HOLDER).write_text(json.dumps({**found, "owner": "00000000-1-1", "host": "far"}))
    now = (root / HOLDER).stat().st_mtime
    os.utime(root / HOLDER, (now + beat, now + beat))


def test_a_job_on_another_machine_is_gone_when_it_was_not_heard_of_for_long(tmp_path: Path) -> None:
    elsewhere(tmp_path, -holding.SILENT_SECONDS / 2)
    with pytest.raises(CheckpointInUseError, match="far, process"):
        CheckpointManager(tmp_path)
    CheckpointManager(tmp_path, take_over=True).close()

    elsewhere(tmp_path, -2 * holding.SILENT_SECONDS)
    CheckpointManager(tmp_path).close()


def test_a_job_whose_root_was_taken_over_saves_nothing_more(tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path)
    second = CheckpointManager(tmp_path, take_over=True)
    assert first._hold is not None
    first._hold.renew()
    with pytest.raises(CheckpointInUseError, match="was taken over by"):
        train(first, [1])
    first.close()
    assert train(second, [1]) == [1]
    assert (tmp_path / HOLDER).exists()
    second.close()


def test_a_holder_says_that_it_is_there(tmp_path: Path) -> None:
    held = hold(LocalStore(tmp_path))
    before = (tmp_path / HOLDER).read_bytes()
    held.renew()
    held.renew()
    after = (tmp_path / HOLDER).read_bytes()
    assert after != before
    assert held.lost_to is None
    held.release()
    assert os.listdir(tmp_path) == []
    assert Holder.__struct_fields__[-1] == "token"


def test_a_damaged_holder_does_not_lock_everybody_out(tmp_path: Path) -> None:
    (tmp_path / HOLDER).write_text("{")
    CheckpointManager(tmp_path).close()


# Preemption


def test_a_signal_makes_the_next_save_save_and_handlers_are_called_and_put_back(
    tmp_path: Path,
) -> None:
    called: list[int] = []

    def mine(number: int, frame: Any) -> None:
        called.append(number)

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
    signal.signal(signal.SIGUSR1, mine)
    try:
        options: Any = {"mode": "thread", "on_preemption": True}
        with CheckpointManager(tmp_path, EverySteps(100), **options) as manager:
            assert train(manager, [1]) == []
            assert not manager.preempted
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert train(manager, [2]) == [2]
            # No wait: it is committed.
            assert manager.preempted
            assert manager.steps() == [2]
            assert train(manager, [3]) == []
        assert called == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGTERM) is before[signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Bad input


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="does not say when to save"):
        CheckpointManager(tmp_path, every=Latest(1))
    with pytest.raises(TypeError, match="does not say what to keep"):
        CheckpointManager(tmp_path, keep=EveryMinutes(1))
    with pytest.raises(ValueError, match="mode is one of"):
        CheckpointManager(tmp_path, mode="later")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_failure is one of"):
        CheckpointManager(tmp_path, on_failure="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_failures"):
        CheckpointManager(tmp_path, max_failures=0)


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_root_that_is_a_file_is_refused(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointExistsError, match="is a file"):
        CheckpointManager(tmp_path / "file" / below)


def test_steps_must_not_go_backwards(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, AtSteps(5)) as manager:
        train(manager, [3])
        with pytest.raises(ValueError, match="must not go backwards"):
            train(manager, [2])
        with pytest.raises(ValueError, match="0 or more"):
            train(manager, [-1])


def test_what_was_restored_is_kept_beside_the_run(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        train(manager, [1])
        state = plain_state() | {"new": 5}
        with pytest.raises(NotRestoredError, match="new"):
            manager.restore(state, strict="receipt")
        assert list(tmp_path.glob("resume-*")) == []
        assert manager.restore(state, strict=False) == 1
    [kept] = tmp_path.glob("resume-*.json")
    receipt = json.loads(kept.read_text())
    assert receipt["step"] == 1
    assert list(receipt["not_restored"]) == ["new"]
    kept.unlink()

    follower = CheckpointManager(tmp_path, read_only=True)
    assert follower.restore(plain_state()) == 1
    assert list(tmp_path.glob("resume-*")) == []


def test_a_run_that_did_not_restore_what_is_there_is_refused(tmp_path: Path) -> None:
    saved_steps(str(tmp_path), 2)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(ValueError, match=r"goes back behind step 2.*restore that first"),
    ):
        train(manager, [1])


def test_a_metric_that_the_policy_needs_must_be_there(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path, keep=Latest(1) | Best("accuracy")) as manager,
        pytest.raises(ValueError, match="lack 'accuracy'"),
    ):
        train(manager, [1])


def test_a_closed_or_read_only_manager_does_not_save(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, read_only=True)
    with pytest.raises(ValueError, match="read_only"):
        train(manager, [1])
    manager.close()
    manager.close()
    with pytest.raises(ValueError, match="is closed"):
        train(manager, [1])


def test_the_best_of_nothing_has_to_be_named(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, read_only=True)
    with pytest.raises(ValueError, match="name a metric"):
        manager.best()
    assert manager.best("loss") is None
    assert manager.latest() is None

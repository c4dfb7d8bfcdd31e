"""One rank fails or dies, and every rank hears of it."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.api import CheckpointNotFoundError
from support.ranks import DEAD, run_ranks

RANKS = 3


class NotPicklable(Exception):
    """An error that holds on to something that cannot be sent."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class NotUnpicklable(Exception):
    """An error that can be sent, but not be received: its arguments do not fit."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def fail(error: str) -> None:
    message = f"rank {dist.get_rank()} has had enough"
    if error == "plain":
        raise ValueError(message)
    if error == "not picklable":
        raise NotPicklable(message)
    if error == "not unpicklable":
        raise NotUnpicklable(message, "")
    if error == "interrupt":
        raise KeyboardInterrupt(message)
    os.kill(os.getpid(), signal.SIGKILL)


def failing(base: type, method: str, rank: int, error: str) -> type:
    """A subclass of `base` whose `method` fails on `rank`."""

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == rank:
            fail(error)
        return getattr(super(kind, self), method)(*args, **kwargs)

    kind = type(f"Failing{base.__name__}", (base,), {method: override})
    return kind


def values(seed: float) -> dict[str, Any]:
    """Something for every rank to write: a shard, a value of its own and a common one."""
    rank = dist.get_rank()
    return {
        f"tensor_of_rank_{rank}": torch.full((4,), seed + rank),
        f"value_of_rank_{rank}": seed + rank,
        "common": seed,
    }


def told(attempt: Any) -> tuple[str, dict[int, tuple[str, str]], float]:
    """The kind of error, who failed with which error, and how long that took."""
    began = time.monotonic()
    try:
        attempt()
    except BaseException as error:  # noqa: BLE001 - handed to the test
        failures = {
            rank: (type(reason).__name__, str(reason))
            for rank, (reason, _) in getattr(error, "failures", {}).items()
        }
        return type(error).__name__, failures, time.monotonic() - began
    return "nothing", {}, time.monotonic() - began


SAVE_STEPS = {
    "set_up_planner": reshard.DefaultSavePlanner,
    "create_local_plan": reshard.DefaultSavePlanner,
    "create_global_plan": reshard.DefaultSavePlanner,
    "finish_plan": reshard.DefaultSavePlanner,
    "resolve_data": reshard.DefaultSavePlanner,
    "set_up_storage_writer": reshard.FileSystemWriter,
    "prepare_local_plan": reshard.FileSystemWriter,
    "prepare_global_plan": reshard.FileSystemWriter,
    "open_store": reshard.FileSystemWriter,
    "write_data": reshard.FileSystemWriter,
    "finish": reshard.FileSystemWriter,
}
LOAD_STEPS = {
    "set_up_planner": reshard.DefaultLoadPlanner,
    "create_local_plan": reshard.DefaultLoadPlanner,
    "create_global_plan": reshard.DefaultLoadPlanner,
    "finish_plan": reshard.DefaultLoadPlanner,
    "resolve_tensor": reshard.DefaultLoadPlanner,
    "commit_tensor": reshard.DefaultLoadPlanner,
    "load_bytes": reshard.DefaultLoadPlanner,
    "read_metadata": reshard.FileSystemReader,
    "set_up_storage_reader": reshard.FileSystemReader,
    "prepare_local_plan": reshard.FileSystemReader,
    "prepare_global_plan": reshard.FileSystemReader,
    "read_data": reshard.FileSystemReader,
}
ON_COORDINATOR_ONLY = {"create_global_plan", "prepare_global_plan", "finish"}


def save_failing(folder: str, step: str, rank: int, error: str, seed: float = 2.0) -> Any:
    base = SAVE_STEPS[step]
    planner, writer = reshard.DefaultSavePlanner(), reshard.FileSystemWriter(folder)
    if base is reshard.DefaultSavePlanner:
        planner = failing(base, step, rank, error)()
    else:
        writer = failing(base, step, rank, error)(folder)
    return told(lambda: reshard.save(values(seed), storage_writer=writer, planner=planner))


def load_failing(folder: str, step: str, rank: int, error: str) -> Any:
    base = LOAD_STEPS[step]
    planner, reader = reshard.DefaultLoadPlanner(), reshard.FileSystemReader(folder)
    # Plans only travel, and methods of the coordinator are only called, for planners
    # that are not the default one, and on all ranks.
    if base is reshard.DefaultLoadPlanner:
        planner = failing(base, step, rank, error)()
    else:
        reader = failing(base, step, rank, error)(folder)
    return told(lambda: reshard.load(values(0.0), storage_reader=reader, planner=planner))


def fail_at_each_step(folder: str, error: str, culprit: int) -> list[str]:
    """Steps at which a failure was not told as it should have been."""
    wrong = []
    reshard.save(values(1.0), checkpoint_id=folder)
    steps = [(save_failing, step) for step in SAVE_STEPS]
    steps += [(load_failing, step) for step in LOAD_STEPS]
    for attempt, step in steps:
        if culprit != 0 and step in ON_COORDINATOR_ONLY:
            continue
        kind, failures, seconds = attempt(folder, step, culprit, error)
        message = f"rank {culprit} has had enough"
        if (
            kind != "CheckpointException"
            or list(failures) != [culprit]
            or message not in failures[culprit][1]
            or seconds > 5
        ):
            wrong.append(f"{attempt.__name__} at {step}: {kind} {failures} after {seconds:.1f} s")
    state_dict = values(0.0)
    reshard.load(state_dict, checkpoint_id=folder)
    if str(state_dict) != str(values(1.0)):
        wrong.append(f"the old checkpoint holds {state_dict}")
    return wrong


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("error", ["plain", "not picklable", "not unpicklable"])
def test_an_error_at_any_step_is_raised_on_every_rank_and_keeps_the_old_checkpoint(
    error: str, culprit: int, tmp_path: Path
) -> None:
    assert run_ranks(RANKS, fail_at_each_step, str(tmp_path), error, culprit) == [[]] * RANKS


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_interrupt_stays_one_on_its_rank_and_is_told_to_the_others(
    culprit: int, tmp_path: Path
) -> None:
    told = run_ranks(RANKS, save_failing, str(tmp_path), "resolve_data", culprit, "interrupt")

    for rank, (kind, failures, _) in enumerate(told):
        if rank == culprit:
            assert kind == "KeyboardInterrupt"
        else:
            assert kind == "CheckpointException"
            assert list(failures) == [culprit]
            assert "has had enough" in failures[culprit][1]
    with pytest.raises(CheckpointNotFoundError):
        reshard.FileSystemReader(tmp_path).read_metadata()


def test_an_interrupt_while_the_coordinator_finishes_stays_one(tmp_path: Path) -> None:
    told = run_ranks(RANKS, save_failing, str(tmp_path), "finish", 0, "interrupt")

    assert [kind for kind, _, _ in told] == ["KeyboardInterrupt"] + ["CheckpointException"] * 2


def save_with_a_victim(folder: str, step: str, victim: int) -> Any:
    reshard.save(values(1.0), checkpoint_id=f"{folder}/old")
    return [
        save_failing(f"{folder}/old", step, victim, "die"),
        threading.active_count(),
    ]


@pytest.mark.parametrize("store", ["file", "tcp"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", ["create_local_plan", "resolve_data"])
def test_a_rank_that_is_killed_is_named_by_the_others_within_seconds(
    step: str, victim: int, store: Any, tmp_path: Path
) -> None:
    outcomes = run_ranks(
        RANKS, save_with_a_victim, str(tmp_path), step, victim, dying={victim}, store=store
    )

    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome == DEAD
            continue
        kind, failures, seconds = outcome[0]
        assert kind == "RankLostError"
        assert list(failures) == [victim]
        assert failures[victim][0] == "RankLostError"
        assert f"rank {victim}" in failures[victim][1]
        assert "died" in failures[victim][1]
        assert seconds < 10
        assert outcome[1] == 1, "threads were left behind"
    state_dict = reshard.read_state_dict(tmp_path / "old")
    assert state_dict["common"] == 1.0
    assert torch.equal(state_dict["tensor_of_rank_2"], torch.full((4,), 3.0))


def first_save_with_a_victim(folder: str, victim: int) -> Any:
    return save_failing(folder, "resolve_data", victim, "die")


def test_a_first_save_that_lost_a_rank_leaves_no_checkpoint_to_be_seen(tmp_path: Path) -> None:
    run_ranks(RANKS, first_save_with_a_victim, str(tmp_path), 1, dying={1})

    with pytest.raises(CheckpointNotFoundError):
        reshard.FileSystemReader(tmp_path).read_metadata()


def survive_the_store(folder: str) -> Any:
    """Rank 0 dies, and with it the store, while the others are in the step of writing."""
    pid_file = Path(folder) / "pid"
    if dist.get_rank() == 0:
        pid_file.write_text(str(os.getpid()))

    class Planner(reshard.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if dist.get_rank() == 0:
                fail("die")
            while _is_running(int(pid_file.read_text())):
                pass
            return super().resolve_data(write_item)

    return told(lambda: reshard.save(values(1.0), checkpoint_id=folder, planner=Planner()))


def _is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def test_a_rank_that_takes_the_store_with_it_is_named_too(tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, survive_the_store, str(tmp_path), dying={0}, store="tcp on rank 0")

    for kind, failures, seconds in outcomes[1:]:
        assert kind == "RankLostError"
        assert list(failures) == [0]
        assert seconds < 10


class Moody:
    """A `Stateful` that fails on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == self.rank:
            fail("plain")
        return {"value": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def save_a_moody_object(folder: str) -> Any:
    return told(lambda: reshard.save({"object": Moody(1)}, checkpoint_id=folder))


def test_a_stateful_object_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    for kind, failures, _ in run_ranks(2, save_a_moody_object, str(tmp_path), seconds=8):
        assert kind == "CheckpointException"
        assert list(failures) == [1]


def load_a_moody_object(folder: str) -> Any:
    return told(lambda: reshard.load({"object": Moody(1)}, checkpoint_id=folder))


def test_a_stateful_object_that_fails_on_one_rank_fails_the_load_on_all(tmp_path: Path) -> None:
    reshard.save({"object": {"value": 1}}, checkpoint_id=tmp_path)

    for kind, failures, _ in run_ranks(2, load_a_moody_object, str(tmp_path), seconds=8):
        assert kind == "CheckpointException"
        assert list(failures) == [1]


def save_what_differs(folder: str) -> Any:
    """Two ranks that disagree about one tensor."""
    state_dict = {"w": torch.zeros(2 + dist.get_rank())}
    return told(lambda: reshard.save(state_dict, checkpoint_id=folder))


def test_replicas_that_disagree_are_an_error_on_every_rank(tmp_path: Path) -> None:
    for kind, failures, _ in run_ranks(2, save_what_differs, str(tmp_path)):
        assert kind == "ReplicaConflictError"
        assert [(rank, reason[0]) for rank, reason in failures.items()] == [
            (0, "ReplicaConflictError")
        ]
        assert "'w'" in failures[0][1]


def load_into_the_wrong_shape(folder: str) -> Any:
    """One rank asks for another shape; the tensors of the other must stay as they are."""
    state_dict = {
        "a": torch.zeros(4),
        "b": torch.zeros(3 if dist.get_rank() == 1 else 4),
        "count": 0,
    }
    outcome = told(lambda: reshard.load(state_dict, checkpoint_id=folder))
    return outcome, state_dict["a"].tolist(), state_dict["count"]


def test_what_is_wrong_on_one_rank_is_found_before_anything_changes_on_any(tmp_path: Path) -> None:
    reshard.save({"a": torch.ones(4), "b": torch.ones(4), "count": 1}, checkpoint_id=tmp_path)

    for (kind, failures, _), a, count in run_ranks(2, load_into_the_wrong_shape, str(tmp_path)):
        assert kind == "ShapeMismatchError"
        assert {rank: reason[0] for rank, reason in failures.items()} == {1: "ShapeMismatchError"}
        assert "'b'" in failures[1][1]
        assert a == [0.0] * 4
        assert count == 0


def save_beside_collectives(folder: str) -> list[float]:
    """Saves in a thread, while this one talks to the same ranks without a pause."""
    state_dict = {"w": torch.full((1000,), float(dist.get_rank())), "step": 1}
    del state_dict["w"]
    state_dict |= values(3.0)
    errors: list[BaseException] = []
    done = torch.zeros(1)

    def save() -> None:
        try:
            for number in range(5):
                reshard.save(state_dict, checkpoint_id=f"{folder}/{number}")
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)
        done.fill_(1)

    thread = threading.Thread(target=save)
    thread.start()
    rounds = 0
    while True:
        dist.barrier()
        total = done.clone()
        dist.all_reduce(total)
        rounds += 1
        if total.item() == dist.get_world_size():
            break
    thread.join()
    if errors:
        raise errors[0]
    return [float(rounds)]


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_a_save_in_the_background_and_collectives_in_front_do_not_meet(
    store: Any, tmp_path: Path
) -> None:
    rounds = run_ranks(RANKS, save_beside_collectives, str(tmp_path), store=store)

    assert all(count > 5 for (count,) in rounds), "the two did not run at the same time"
    for number in range(5):
        assert reshard.read_state_dict(tmp_path / str(number))["common"] == 3.0


def save_after_failures(folder: str) -> Any:
    """A failed save, an interrupted one, and then one that must work."""
    first = save_failing(folder, "resolve_data", 1, "plain")
    second = save_failing(folder, "finish_plan", 2, "interrupt")
    reshard.save(values(5.0), checkpoint_id=folder)
    state_dict = values(0.0)
    reshard.load(state_dict, checkpoint_id=folder)
    return first[0], second[0], str(state_dict) == str(values(5.0)), threading.active_count()


def test_ranks_stay_in_step_after_failures(tmp_path: Path) -> None:
    outcomes = run_ranks(RANKS, save_after_failures, str(tmp_path))

    assert [outcome[2:] for outcome in outcomes] == [(True, 1)] * RANKS
    assert sorted(path.name[:5] for path in tmp_path.glob("*.safetensors")) == [
        f"__{rank}_0" for rank in range(RANKS)
    ]


def die_between_saves(folder: str) -> Any:
    reshard.save(values(1.0), checkpoint_id=f"{folder}/first")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(reshard.CheckpointException) as raised:
        reshard.save(values(2.0), checkpoint_id=f"{folder}/second", timeout_seconds=50)
    return str(raised.value)


def test_a_rank_that_died_since_the_last_save_is_named_without_waiting_for_the_limit(
    tmp_path: Path,
) -> None:
    outcomes = run_ranks(RANKS, die_between_saves, str(tmp_path), dying={1}, seconds=30)
    for rank in (0, 2):
        assert "lost rank 1" in outcomes[rank]
        assert "died" in outcomes[rank]


# Objects that communicate when they are asked for their state, as FSDP's first version does


class Talking:
    """Both directions are collectives."""

    def __init__(self) -> None:
        self.weight = torch.ones(4)

    def state_dict(self) -> dict[str, Any]:
        dist.barrier()
        return {"weight": self.weight}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        dist.barrier()


class UnreadableOnRank1(reshard.FileSystemReader):
    def __init__(self, path: str, step: str) -> None:
        super().__init__(path)
        self.step = step

    def fail(self, step: str) -> None:
        if step == self.step and dist.get_rank() == 1:
            raise OSError(f"rank 1 cannot {step}")

    def reset(self, checkpoint_id: Any = None) -> None:
        self.fail("reset")
        super().reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        self.fail("read_metadata")
        return super().read_metadata(*args, **kwargs)

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.fail("read_data")
        return super().read_data(plan, planner)


def fail_beside_talking(folder: str, step: str) -> tuple[str, list[int], bool]:
    """What a failure of rank 1 raises; whether the next operation then works."""
    state = {"talking": Talking()}
    reshard.save(state, checkpoint_id=folder)
    kind, ranks = "nothing", list[int]()
    try:
        if step == "checkpoint_id":
            reshard.save(state, checkpoint_id=None if dist.get_rank() == 1 else folder)
        elif step == "unseen":
            failing = reshard.FileSystemWriter("/dev/null/nowhere")
            failed = reshard.async_save({"w": torch.ones(1)}, storage_writer=failing)
            concurrent.futures.wait([failed])
            if dist.get_rank() == 0:
                failed.exception()
            reshard.save(state, checkpoint_id=folder)
        else:
            reader = UnreadableOnRank1(folder, step)
            reshard.load(state, checkpoint_id=folder, storage_reader=reader)
    except (reshard.CheckpointException, RuntimeError, OSError) as error:
        kind, ranks = type(error).__name__, list(getattr(error, "failures", {}))
    reshard.save(state, checkpoint_id=folder)
    return kind, ranks, True


@pytest.mark.parametrize(
    ("step", "raised_here", "raised_there"),
    [
        ("read_metadata", "CheckpointException", "CheckpointException"),
        ("read_data", "CheckpointException", "CheckpointException"),
        ("unseen", "CheckpointExistsError", "CheckpointExistsError"),
        # As soon as a rank knows by itself, it says so by itself.
        ("reset", "CheckpointException", "OSError"),
        ("checkpoint_id", "CheckpointException", "RuntimeError"),
    ],
)
def test_a_rank_that_fails_leaves_nobody_waiting_in_a_collective(
    step: str, raised_here: str, raised_there: str, tmp_path: Path
) -> None:
    here, there = run_ranks(2, fail_beside_talking, str(tmp_path), step, seconds=30)

    assert here == (raised_here, [1], True)
    assert (there[0], there[2]) == (raised_there, True)


def fail_with_a_class_of_its_own(folder: str) -> Any:
    """Rank 1 raises what no other rank can import."""
    Path(folder, "elsewhere.py").write_text("class OnlyHere(Exception):\n    pass\n")

    class Planner(reshard.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if dist.get_rank() == 1:
                sys.path.insert(0, folder)
                from elsewhere import OnlyHere  # type: ignore[import-not-found]

                raise OnlyHere("this disk is not like the others")
            return super().resolve_data(write_item)

    return told(lambda: reshard.save(values(1.0), checkpoint_id=f"{folder}/x", planner=Planner()))


def test_an_error_whose_class_only_its_rank_has_reaches_the_others_as_text(tmp_path: Path) -> None:
    for rank, (kind, failures, _) in enumerate(
        run_ranks(2, fail_with_a_class_of_its_own, str(tmp_path))
    ):
        assert kind == "CheckpointException"
        assert list(failures) == [1]
        name, text = failures[1]
        assert name == ("OnlyHere" if rank == 1 else "RemoteError")
        assert "this disk is not like the others" in text
        assert rank == 1 or ("OnlyHere: " in text and "resolve_data" in text)

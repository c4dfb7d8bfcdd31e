"""The code of users: when it is called, and what is said when it fails."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.utils import _DistWrapper
from support.ranks import run_ranks


class Recorder(reshard.DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.threads: set[str] = set()

    def note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.note("resolve")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.note("commit")

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.note("value")


class Resolver(reshard.DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def resolve_data(self, write_item: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        return super().resolve_data(write_item)


def test_planners_are_asked_for_one_tensor_at_a_time_in_the_thread_that_called(
    tmp_path: Path,
) -> None:
    state: dict[str, Any] = {f"w{i}": torch.rand(600, 600) for i in range(6)} | {"step": 3}
    saving, loading = Resolver(), Recorder()
    reshard.save(state, checkpoint_id=tmp_path, planner=saving)
    reshard.load(state, checkpoint_id=tmp_path, planner=loading)
    here = threading.current_thread().name
    assert (saving.threads, loading.threads) == ({here}, {here})
    assert loading.calls.count("value") == 1
    assert [c for c in loading.calls if c != "value"] == ["resolve", "commit"] * 6


def test_a_storage_may_be_passed_by_its_position(tmp_path: Path) -> None:
    state = {"w": torch.rand(3)}
    with pytest.warns(UserWarning, match="pass storage_writer to save by its name"):
        reshard.save(state, reshard.FileSystemWriter(tmp_path))
    found = {"w": torch.zeros(3)}
    with pytest.warns(UserWarning, match="pass storage_reader to load by its name"):
        reshard.load(found, reshard.FileSystemReader(tmp_path))
    assert torch.equal(found["w"], state["w"])
    with pytest.raises(TypeError):
        reshard.save(state, reshard.FileSystemWriter(tmp_path), tmp_path)  # type: ignore[misc]
    with pytest.raises(TypeError, match="checkpoint_id="):
        reshard.load(found, tmp_path)  # type: ignore[misc]


def tell(rank: int, failing: int) -> int:
    if rank == failing:
        raise LookupError(f"rank {rank} has nothing")
    return rank * 10


def stumble(rank: int, failing: int) -> None:
    """Fail with what no other process could be told."""

    class OfThisCall(Exception):
        pass

    if rank == failing:
        raise OfThisCall(threading.Lock())


def failures_of(action: Callable[[], Any]) -> dict[int, str]:
    with pytest.raises(reshard.CheckpointException, match="a step") as caught:
        action()
    return {rank: str(error) for rank, (error, _) in caught.value.failures.items()}


def talk(ranks: list[int] | None) -> dict[str, Any]:
    group = None if ranks is None else dist.new_group(ranks)
    if ranks is not None and dist.get_rank() not in ranks:
        return {}
    there = _DistWrapper(group, True, 1)
    rank, size = there.get_rank(), there.get_world_size()
    told = {
        "roles": (rank, size, there.is_coordinator),
        "objects": (
            there.broadcast_object(f"from {rank}"),
            there.gather_object(rank),
            there.all_gather_object(rank),
            there.scatter_object(list(range(size)) if there.is_coordinator else None),
        ),
        "works": (
            there.reduce_scatter("a step", lambda: rank, lambda all: [10 * x for x in all]),
            there.all_reduce("a step", lambda: rank, sum),
            there.all_gather("a step", lambda: rank),
            there.broadcast("a step", lambda: f"from {rank}"),
        ),
        "fails": [
            failures_of(lambda: there.reduce_scatter("a step", lambda: tell(rank, 0), list)),
            failures_of(lambda: there.all_reduce("a step", lambda: tell(rank, 0), sum)),
            failures_of(lambda: there.all_gather("a step", lambda: tell(rank, 0))),
            failures_of(lambda: there.all_gather("a step", lambda: stumble(rank, 0))),
            failures_of(lambda: there.broadcast("a step", lambda: tell(rank, 1))),
            failures_of(lambda: there.all_reduce("a step", lambda: rank, lambda _: tell(1, 1))),
        ],
    }
    there.barrier()
    return told


@pytest.mark.parametrize("ranks", [None, [1, 2]], ids=["everybody", "a group"])
def test_ranks_talk_through_the_wrapper_that_storages_of_others_use(
    ranks: list[int] | None,
) -> None:
    everybody = run_ranks(3, talk, ranks)
    taking_part = everybody if ranks is None else [everybody[rank] for rank in ranks]
    size = len(taking_part)
    for rank, told in enumerate(taking_part):
        assert told["roles"] == (rank, size, rank == 1)
        gathered = list(range(size)) if rank == 1 else None
        assert told["objects"] == ("from 1", gathered, list(range(size)), rank)
        assert told["works"] == (10 * rank, sum(range(size)), list(range(size)), "from 1")
        assert "OfThisCall: <unlocked" in told["fails"].pop(3)[0]
        assert told["fails"] == [{0: "rank 0 has nothing"}] * 3 + [{1: "rank 1 has nothing"}] * 2


def test_alone_the_wrapper_needs_no_group() -> None:
    alone = _DistWrapper(None, False, 0)
    assert (alone.get_rank(), alone.get_world_size(), alone.is_coordinator) == (0, 1, True)
    assert alone.reduce_scatter("a step", lambda: 2, lambda all: all) == 2
    assert alone.all_gather("a step", lambda: 2) == [2]
    assert alone.broadcast("a step", lambda: 2) == 2
    assert failures_of(lambda: alone.all_reduce("a step", lambda: tell(0, 0), sum)) == {
        0: "rank 0 has nothing"
    }
    alone.barrier()


class Unwilling:
    def __init__(self, method: str) -> None:
        self.method = method

    def state_dict(self) -> dict[str, Any]:
        if self.method == "state_dict":
            raise ValueError("no")
        return {"w": torch.ones(1)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ValueError("no")

    def __reduce__(self) -> Any:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"the": {"key": [Unwilling("")]}}, "saving 'the.key'"),
        ({"object": Unwilling("state_dict")}, "asking 'object' for its state"),
        ({"object": Unwilling("")}, "giving 'object' its state"),
    ],
)
def test_an_error_in_the_code_of_users_says_for_which_key(
    state: dict[str, Any], what: str, tmp_path: Path
) -> None:
    def save_and_load() -> None:
        reshard.save(state, checkpoint_id=tmp_path)
        reshard.load(state, checkpoint_id=tmp_path)

    with pytest.raises(reshard.CheckpointException, match=f"while {re.escape(what)}"):
        save_and_load()

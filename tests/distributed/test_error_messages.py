"""What a new user reads on each rank when something is wrong on some of them."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.state_dict_saver import AsyncCheckpointerType
from support.errors import Told, told
from support.failing_system import refusing
from support.ranks import run_ranks

SECONDS = 50.0


def load_into(folder: str, states: list[dict[str, Any]]) -> Told:
    return told(lambda: reshard.load(states[dist.get_rank()], checkpoint_id=folder))


def test_a_wrong_key_on_all_ranks_is_said_once(tmp_path: Path) -> None:
    reshard.save({"layer.weight": torch.ones(2)}, checkpoint_id=tmp_path)
    states = [{"layer.wieght": torch.ones(2)}] * 3

    for error in run_ranks(3, load_into, str(tmp_path), states):
        assert error.kind == "MissingKeyError"
        assert error.lines == [
            "Missing key in checkpoint state_dict: layer.wieght.",
            "The checkpoint has 'layer.weight'.",
            "Load with strict=False (or a planner with allow_partial_load=True) to leave missing "
            "keys as they are.",
            "On ranks 0-2, while planning.",
        ]
        assert error.failures == dict.fromkeys(range(3), "MissingKeyError")
        assert error.cause == "NoneType"
        assert error.printed.count("Missing key") == 1
        assert error.printed.count("reshard/") == 1, "frames of ours are shown"


def test_a_wrong_shape_on_one_rank_names_that_rank_on_all(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    states = [{"w": torch.ones(4)}, {"w": torch.ones(3)}, {"w": torch.ones(4)}]

    for error in run_ranks(3, load_into, str(tmp_path), states):
        assert error.kind == "ShapeMismatchError"
        assert error.lines[0] == "Size mismatch between saved (4,) and current: (3,) for 'w'."
        assert error.lines[-1] == "On rank 1, while planning."
        assert error.failures == {1: "ShapeMismatchError"}


def test_different_reasons_on_different_ranks_are_told_apart(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    states: list[dict[str, Any]] = [{"scheduler": 1}, {"w": torch.ones(3)}, {"w": torch.ones(3)}]

    for error in run_ranks(3, load_into, str(tmp_path), states):
        assert error.kind == "CheckpointException"
        first, second = error.text.split("\n\n")
        assert first.startswith("Missing key in checkpoint state_dict: scheduler.\n")
        assert first.endswith("\nOn rank 0, while planning.")
        assert second.startswith("Size mismatch between saved (4,) and current: (3,) for 'w'.\n")
        assert second.endswith("\nOn ranks 1-2, while planning.")
        assert error.failures == {0: "MissingKeyError"} | dict.fromkeys(
            (1, 2), "ShapeMismatchError"
        )


def test_a_place_where_nothing_is_is_said_once(tmp_path: Path) -> None:
    for error in run_ranks(2, load_into, str(tmp_path / "none"), [{"w": 0}] * 2):
        assert error.kind == "CheckpointNotFoundError"
        assert error.lines == [
            f"there is no checkpoint at {tmp_path}/none: nothing is there. Check the path",
            "On ranks 0-1, while getting ready.",
        ]


class Broken:
    """A `Stateful` that cannot tell its state on one rank."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise ValueError("no optimizer yet")
        return {"value": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def save_what_is_broken(folder: str) -> Told:
    return told(lambda: reshard.save({"trainer": Broken()}, checkpoint_id=folder))


def test_an_error_of_a_stateful_comes_with_its_stack_and_without_ours(tmp_path: Path) -> None:
    for rank, error in enumerate(run_ranks(3, save_what_is_broken, str(tmp_path))):
        assert error.kind == "CheckpointException"
        assert error.lines[:2] == [
            "ValueError: no optimizer yet (while asking 'trainer' for its state)",
            "On rank 1, while planning.",
        ]
        assert error.failures == {1: "ValueError"}
        assert error.printed.count('raise ValueError("no optimizer yet")') == 1
        if rank == 1:
            assert error.cause == "ValueError"
            assert len(error.lines) == 2, "the stack is in the cause"
        else:
            assert error.lines[2:4] == ["", "Stack of rank 1 (most recent call last):"]
            assert error.text.count("File ") == 1
            assert error.lines[4].endswith("in state_dict")


def save_without_space(folder: str) -> Told:
    class FullDisk(reshard.FileSystemWriter):
        def open_store(self) -> Any:
            store = super().open_store()
            if store is not None and os.path.exists(f"{folder}/full"):
                store._system = refusing(errno.ENOSPC, name="pwritev")
            return store

    state = {f"w{dist.get_rank()}": torch.ones(2)}
    reshard.save(state, storage_writer=FullDisk(folder))
    dist.barrier()
    Path(folder, "full").touch()
    dist.barrier()
    if dist.get_rank() == 0:
        # The coordinator has space, so that the draft of the manifest can be written.
        return told(lambda: reshard.save(state, checkpoint_id=folder))
    return told(lambda: reshard.save(state, storage_writer=FullDisk(folder)))


def test_a_full_disk_is_one_reason_for_all_ranks_that_write_to_it(tmp_path: Path) -> None:
    outcomes = run_ranks(4, save_without_space, str(tmp_path))

    for rank, error in enumerate(outcomes):
        assert error.kind == "CheckpointException"
        assert error.lines[0].startswith(f"No space left on device: '{tmp_path}/__1_0_")
        assert error.lines[0].endswith("'. Free some space, or save somewhere else.")
        assert error.lines[1:] == ["On ranks 1-3, while writing."]
        assert error.failures == dict.fromkeys((1, 2, 3), "OSError")
        assert error.cause == ("NoneType" if rank == 0 else "OSError")
    assert sorted(reshard.read_state_dict(tmp_path)) == ["w0", "w1", "w2", "w3"]


def save_until_rank_1_dies(folder: str) -> Told:
    class Planner(reshard.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().resolve_data(write_item)

    state = {f"w{dist.get_rank()}": torch.ones(2)}
    return told(lambda: reshard.save(state, checkpoint_id=folder, planner=Planner()))


def test_a_rank_that_died_is_named_with_what_it_was_doing(tmp_path: Path) -> None:
    here, _, there = run_ranks(3, save_until_rank_1_dies, str(tmp_path), dying={1})

    for error in (here, there):
        assert error.kind == "RankLostError"
        assert error.text.startswith(
            f"lost rank 1 while writing, in the save to '{tmp_path}': its process "
        )
        assert error.text.endswith(" died. What it printed last may say why")
        assert error.failures == {1: "RankLostError"}
        assert error.cause == "NoneType"


def save_two_shapes(folder: str, kind: AsyncCheckpointerType) -> Told:
    state = {"w": torch.ones(2 + dist.get_rank())}
    future = reshard.async_save(state, checkpoint_id=folder, async_checkpointer_type=kind)
    return told(lambda: future.result(SECONDS))  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", AsyncCheckpointerType)
def test_the_class_and_the_text_are_the_same_in_the_background(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    for error in run_ranks(2, save_two_shapes, str(tmp_path), kind):
        assert error.kind == "ReplicaConflictError"
        assert error.lines[0].startswith("ranks disagree about 'w': ")
        assert error.lines[-1] == "On rank 0, while planning."
        assert error.failures == {0: "ReplicaConflictError"}
        assert error.printed.count("ranks disagree") == 1

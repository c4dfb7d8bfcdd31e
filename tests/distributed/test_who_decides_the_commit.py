"""A rank gives up while the coordinator is in its last step: all or nothing, all the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.coordination import store_channel
from support.background import wait_until
from support.ranks import run_ranks


class Held(reshard.FileSystemWriter):
    """Its coordinator waits in one of its steps until rank 1 has given up."""

    def __init__(self, path: str, at: str) -> None:
        super().__init__(path)
        self.at = at

    def hold(self, step: str) -> None:
        if self.is_coordinator and step == self.at:
            wait_until(lambda: os.path.exists(f"{self.path}-given-up"))

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.hold("write_data")
        return super().write_data(plan, planner)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self.hold("finish")
        super().finish(*args, **kwargs)


def give_up_on_rank_1(folder: str, at: str) -> tuple[str, int, int]:
    """What was raised, and how many shard files there are when rank 1 has given up, and after."""
    rank = dist.get_rank()
    reshard.save({f"of_{rank}": torch.full((3,), 1.0)}, checkpoint_id=folder)
    dist.barrier()
    store_channel._ANSWER_GRACE_SECONDS = 0.0
    told, files = "", 0
    try:
        reshard.save(
            {f"of_{rank}": torch.full((3,), 2.0)},
            storage_writer=Held(folder, at),
            timeout_seconds=60 if rank == 0 else 1,
        )
    except reshard.CheckpointException as error:
        told = str(error)
    if rank == 1:
        files = len(list(Path(folder).glob("*.safetensors")))
        Path(f"{folder}-given-up").touch()
    dist.barrier()
    return told, files, len(list(Path(folder).glob("*.safetensors")))


@pytest.mark.slow
def test_a_rank_that_gives_up_during_the_commit_leaves_its_files_and_they_load(
    tmp_path: Path,
) -> None:
    folder = f"{tmp_path}/x"
    here, there = run_ranks(2, give_up_on_rank_1, folder, "finish")

    assert here[0] == ""
    assert "the outcome is not known" in there[0]
    assert there[1] == 4, "the old files and the new ones"
    found = reshard.read_state_dict(folder)
    assert {name: value.tolist() for name, value in found.items()} == {
        "of_0": [2.0] * 3,
        "of_1": [2.0] * 3,
    }


@pytest.mark.slow
def test_a_rank_that_gives_up_before_the_commit_prevents_it(tmp_path: Path) -> None:
    folder = f"{tmp_path}/x"
    here, there = run_ranks(2, give_up_on_rank_1, folder, "write_data")

    assert "lost rank 1" in here[0]
    assert "lost rank 0" in there[0]
    assert "not known" not in there[0]
    assert here[2] == 2, "what failed for certain is removed"
    found = reshard.read_state_dict(folder)
    assert {name: value.tolist() for name, value in found.items()} == {
        "of_0": [1.0] * 3,
        "of_1": [1.0] * 3,
    }

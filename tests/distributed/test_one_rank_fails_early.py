"""What is wrong on one rank only, before it takes part, reaches the others at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import reshard
from reshard.storage import StorageReader, StorageWriter
from support.ranks import run_ranks

LIMIT = 60.0
"""Far more than it takes; a rank that is not told waits for this long."""


class NoSettings(reshard.FileSystemReader):
    @property
    def verify(self) -> Any:
        return self._verify

    @verify.setter
    def verify(self, value: Any) -> None:
        if hasattr(self, "_verify"):
            raise RuntimeError("verify cannot be set")
        self._verify = value


class OfBoth(reshard.FileSystemWriter, dcp.StorageWriter):
    """Cannot be adapted."""


class NoPlace(reshard.FileSystemWriter):
    def shared_place(self, checkpoint_id: Any = None) -> str | None:
        raise LookupError("no place")


def fail(folder: str, case: str) -> tuple[str, str]:
    rank = dist.get_rank()
    reshard.save({"w": torch.zeros(2)}, checkpoint_id=folder)
    options: dict[str, Any] = {"timeout_seconds": LIMIT}
    call: Any = reshard.load
    if case == "exclude" and rank == 1:
        options["exclude"] = 5
    if case == "settings":
        options["verify"] = "full"
        options["storage_reader"] = (NoSettings if rank else reshard.FileSystemReader)(folder)
    else:
        options["checkpoint_id"] = folder
    if case == "place" and rank == 1:
        options["storage_writer"] = NoPlace(folder)
    if case == "join" and rank == 1:
        options["storage_writer"] = NoJoin(folder)
    if case in ("place", "dcp", "join"):
        call = reshard.save
    if case == "dcp" and rank == 1:
        options["storage_writer"] = OfBoth(folder)
    try:
        call({"w": torch.zeros(2)}, **options)
    except Exception as error:  # noqa: BLE001 - compared in the test
        return type(error).__name__, str(error)
    return "", ""


class NoJoin(reshard.FileSystemWriter):
    def join_save(self, save_id: str, rank: int) -> None:
        raise RuntimeError("cannot join")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("join", "cannot join"),
        ("exclude", "'int' object is not iterable"),
        ("settings", "verify cannot be set"),
        ("dcp", "derives from the StorageWriter of torch.distributed"),
    ],
)
def test_the_others_are_told(case: str, reason: str, tmp_path: Path) -> None:
    for name, text in run_ranks(2, fail, str(tmp_path), case, seconds=LIMIT - 10):
        assert name
        assert reason in text


def test_a_place_that_cannot_be_told_does_not_keep_a_save(tmp_path: Path) -> None:
    assert run_ranks(2, fail, str(tmp_path), "place", seconds=LIMIT - 10) == [("", ""), ("", "")]


class OwnMetadata(StorageReader):
    """A storage that has a checkpoint for each rank."""

    def __init__(self, path: str) -> None:
        self._used = reshard.FileSystemReader(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        self._used.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if "rank" not in kwargs:
            raise RuntimeError("which rank?")
        return self._used.read_metadata()

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *a: Any, **k: Any) -> None:
        self._used.set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        return self._used.read_data(plan, planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def load_own(folder: str) -> Any:
    rank = dist.get_rank()
    state = {f"k{i}": torch.full((2,), float(rank)) for i in range(3 + 30 * rank)}
    reshard.save({**state, f"extra{rank}": 1}, checkpoint_id=f"{folder}/{rank}", no_dist=True)
    loaded = {key: torch.full((2,), 9.0) for key in state}
    report = reshard.load(loaded, storage_reader=OwnMetadata(f"{folder}/{rank}"))
    return {float(value[0]) for value in loaded.values()}, report.unexpected


def test_ranks_with_metadata_of_their_own_load_what_is_theirs(tmp_path: Path) -> None:
    assert run_ranks(2, load_own, str(tmp_path)) == [
        ({0.0}, ["extra0"]),
        ({1.0}, ["extra1"]),
    ]


class Plain(StorageWriter):
    """Only what the contract asks for."""

    def __init__(self, path: str) -> None:
        self._used = reshard.FileSystemWriter(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        self._used.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._used.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        return self._used.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        return self._used.prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        return self._used.write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self._used.finish(metadata, results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def save_plain(folder: str) -> list[str]:
    metadata = reshard.save({"w": torch.ones(2)}, storage_writer=Plain(folder))
    return list(metadata.state_dict_metadata)


def test_a_storage_with_only_the_contract_saves_and_tells_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, save_plain, str(tmp_path)) == [["w"], ["w"]]
    assert reshard.read_tensor(tmp_path, "w").equal(torch.ones(2))

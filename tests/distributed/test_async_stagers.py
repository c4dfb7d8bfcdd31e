"""Stagers of users that use ours: one copy for several saves, closed stagers, many stagers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.snapshots.pool import staging_pool
from reshard.staging import AsyncStager, BlockingAsyncStager
from reshard.state_dict_saver import AsyncCheckpointerType
from support.background import SECONDS, Gate, GatedWriter, both_kinds
from support.ranks import run_alone


class Once(AsyncStager):
    """Copies the state once, for as many saves as there are."""

    _synchronize_after_execute = False

    def __init__(self, as_dict: bool) -> None:
        self._stager = BlockingAsyncStager()
        self._as_dict = as_dict
        self._staged: Any = None

    def stage(self, state_dict: Any) -> Any:
        if self._staged is None:
            staged = self._stager.stage(state_dict)
            self._staged = dict(staged) if self._as_dict else staged
        return self._staged


def save_one_copy_to_two_places(folder: str, kind: AsyncCheckpointerType, as_dict: bool) -> Any:
    gates = [Gate(folder, f"gate-{number}") for number in range(2)]
    stager, weight = Once(as_dict), torch.ones(1000)
    saves = [
        reshard.async_save(
            {"w": weight, "step": 3},
            storage_writer=GatedWriter(f"{folder}/{number}", gate),
            async_stager=stager,
            async_checkpointer_type=kind,
        )
        for number, gate in enumerate(gates)
    ]
    gates[0].open()
    saves[0].result(SECONDS)
    # If it were free now, this would take the memory.
    weight.fill_(7)
    third = reshard.async_save({"w": weight, "step": 4}, checkpoint_id=f"{folder}/third")
    gates[1].open()
    saves[1].result(SECONDS)
    third.result(SECONDS)
    found = [reshard.read_state_dict(f"{folder}/{name}") for name in ("0", "1", "third")]
    return [(state["w"].unique().tolist(), state["step"]) for state in found]


@both_kinds
@pytest.mark.parametrize("as_dict", [False, True], ids=["", "as a dict"])
def test_one_copy_serves_several_saves(
    kind: AsyncCheckpointerType, as_dict: bool, tmp_path: Path
) -> None:
    found = run_alone(save_one_copy_to_two_places, str(tmp_path), kind, as_dict)
    assert found == [([1.0], 3), ([1.0], 3), ([7.0], 4)]


def save_a_copy_again(folder: str, kind: AsyncCheckpointerType) -> str:
    stager = Once(as_dict=False)
    for number in range(2):
        future = reshard.async_save(
            {"w": torch.ones(10)},
            checkpoint_id=f"{folder}/{number}",
            async_stager=stager,
            async_checkpointer_type=kind,
        )
        try:
            future.result(SECONDS)
        except reshard.CheckpointException as error:
            return f"{number}: {error}"
    return "saved"


@both_kinds
def test_a_copy_whose_memory_was_given_back_is_not_saved_empty(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    told = run_alone(save_a_copy_again, str(tmp_path), kind)
    assert told.startswith("1: ")
    assert "stage the state for each save" in told
    assert not (tmp_path / "1" / ".metadata").exists()


class Closing(AsyncStager):
    """Closes the stager that it uses before the save has begun."""

    _synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        stager = BlockingAsyncStager()
        staged = stager.stage(state_dict)
        stager.close()
        return staged


def save_with_many_stagers(folder: str, kind: AsyncCheckpointerType) -> Any:
    found, sizes = [], []
    weight = torch.zeros(1 << 18)
    for number in range(4):
        weight.fill_(number)
        future = reshard.async_save(
            {"w": weight},
            checkpoint_id=f"{folder}/{number}",
            async_stager=Closing(),
            async_checkpointer_type=kind,
        )
        weight.fill_(-1)
        future.result(SECONDS)
        sizes.append(staging_pool().nbytes)
    found = [reshard.read_state_dict(f"{folder}/{number}")["w"] for number in range(4)]
    return [each.unique().tolist() for each in found], max(sizes) <= 2 * weight.nbytes


@both_kinds
def test_a_stager_may_be_closed_and_forgotten(kind: AsyncCheckpointerType, tmp_path: Path) -> None:
    found, is_bounded = run_alone(save_with_many_stagers, str(tmp_path), kind)
    assert found == [[0.0], [1.0], [2.0], [3.0]]
    assert is_bounded

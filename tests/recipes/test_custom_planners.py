"""The five classic custom planners, carried out over several simulated ranks.

The planners are those of `examples/custom_planners.py`. Where people write one in another
way as well, that way is here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from reshard.api import MissingKeyError
from reshard.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from reshard.metadata import Metadata
from reshard.planner import ReadItem, SavePlan
from support.fake_ranks import distributed, mesh_of, on_each_rank
from support.memory_storage import MemoryCheckpoint, load_from_memory, save_in_memory

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_planners.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("custom_planners", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


def sharded(full: torch.Tensor, ranks: int, name: str = "w", **extra: Any) -> list[dict[str, Any]]:
    """`full` sharded over the ranks, and whatever else each of them has."""

    def build(_: int) -> dict[str, Any]:
        return {"model": {name: distributed(full, mesh_of(ranks), [Shard(0)])}, **extra}

    return on_each_rank(ranks, build)


def saved(full: torch.Tensor, ranks: int = 3, **extra: Any) -> MemoryCheckpoint:
    planners = [DefaultSavePlanner() for _ in range(ranks)]
    return save_in_memory(planners, sharded(full, ranks, **extra))


FULL = torch.arange(14.0).reshape(7, 2)


def locals_of(state_dicts: list[dict[str, Any]]) -> torch.Tensor:
    return torch.cat([state_dict["model"]["w"].to_local() for state_dict in state_dicts])


# RenamePlanner


def test_rename_planner_loads_tensors_and_values_under_their_new_names() -> None:
    checkpoint = save_in_memory(
        [DefaultSavePlanner() for _ in range(3)],
        [{"old": state_dict} for state_dict in sharded(FULL, 3, step=5)],
    )
    targets = sharded(torch.zeros(7, 2), 2, step=0)
    planners = [example.RenamePlanner("old.") for _ in targets]
    load_from_memory(checkpoint, planners, targets)
    assert torch.equal(locals_of(targets), FULL)
    assert [target["step"] for target in targets] == [5, 5]
    assert [[*target] for target in targets] == [["model", "step"]] * 2


def test_rename_planner_still_reports_names_that_are_missing() -> None:
    target = {"model": {"w": torch.zeros(7, 2)}}
    checkpoint = save_in_memory([DefaultSavePlanner()], [{"old": {"model": {"w": FULL}}}])
    with pytest.raises(MissingKeyError, match=r"wrong\.model\.w"):
        load_from_memory(checkpoint, [example.RenamePlanner("wrong.")], [target])


def test_rename_planner_never_reads_a_name_that_it_was_not_told_to_read() -> None:
    target = {"model": {"w": torch.zeros(7, 2)}}
    with pytest.raises(MissingKeyError, match=r"wrong\.model\.w"):
        load_from_memory(saved(FULL), [example.RenamePlanner("wrong.")], [target])
    assert target["model"]["w"].sum() == 0


class StripsPrefixByHand(DefaultLoadPlanner):
    """As people write it who do not call the planner that they extend."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False):
        self.original_state_dict = state_dict
        self.state_dict = {f"old.{name}": value for name, value in state_dict.items()}
        self.flatten_state_dict = False
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        super().load_bytes(read_item, value)
        name = read_item.dest_index.fqn
        self.original_state_dict[name.removeprefix("old.")] = self.state_dict[name]


def test_a_rename_planner_that_sets_its_attributes_by_hand_works() -> None:
    checkpoint = save_in_memory([DefaultSavePlanner()], [{"old": {"w": FULL, "step": 5}}])
    targets: list[dict[str, Any]] = [{"w": torch.zeros(7, 2), "step": 0} for _ in range(2)]
    load_from_memory(checkpoint, [StripsPrefixByHand() for _ in targets], targets)
    for target in targets:
        assert torch.equal(target["w"], FULL)
        assert target["step"] == 5


# MetaModelMaterialize


def test_meta_model_materialize_gives_memory_to_what_is_loaded() -> None:
    checkpoint = saved(FULL, step=5)
    targets = [
        {
            "model": {"w": torch.empty(7, 2, device="meta")},
            "unknown": torch.empty(3, device="meta"),
            "step": 0,
        }
        for _ in range(2)
    ]
    planners = [example.MetaModelMaterialize(allow_partial_load=True) for _ in targets]
    load_from_memory(checkpoint, planners, targets)
    for target in targets:
        assert torch.equal(target["model"]["w"], FULL)
        assert target["step"] == 5
        assert target["unknown"].is_meta


def test_meta_model_materialize_fills_a_tensor_that_is_read_in_several_parts() -> None:
    target = {"model": {"w": torch.empty(7, 2, device="meta")}}
    (plan,) = load_from_memory(saved(FULL), [example.MetaModelMaterialize()], [target])
    assert len(plan.items) == 3
    assert torch.equal(target["model"]["w"], FULL)


class AllocatesPerItem(DefaultLoadPlanner):
    """The other way: a fresh tensor for each item, put in its place once it is full."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = tensor


def test_a_planner_may_resolve_a_tensor_of_its_own_and_commit_it_later() -> None:
    checkpoint = save_in_memory([DefaultSavePlanner()], [{"w": FULL}])
    targets = [{"w": torch.empty(7, 2, device="meta")} for _ in range(2)]
    load_from_memory(checkpoint, [AllocatesPerItem() for _ in targets], targets)
    for target in targets:
        assert torch.equal(target["w"], FULL)


# FP16Planner


def test_fp16_planner_writes_halves_that_load_anywhere() -> None:
    counts = torch.arange(3)
    planners = [example.FP16Planner() for _ in range(3)]
    checkpoint = save_in_memory(planners, sharded(FULL + 0.1, 3, step=5, counts=counts))
    assert {
        name: entry.properties.dtype
        for name, entry in checkpoint.metadata.state_dict_metadata.items()
        if hasattr(entry, "properties")
    } == {"model.w": torch.float16, "counts": torch.int64}
    tensors = [chunk for chunk in checkpoint.chunks.values() if isinstance(chunk, torch.Tensor)]
    assert sorted(str(chunk.dtype) for chunk in tensors) == ["torch.float16"] * 3 + ["torch.int64"]
    targets = sharded(torch.zeros(7, 2), 2, step=0, counts=torch.zeros(3, dtype=torch.int64))
    load_from_memory(checkpoint, [DefaultLoadPlanner() for _ in targets], targets)
    assert torch.equal(locals_of(targets), (FULL + 0.1).half().float())
    assert targets[1]["step"] == 5
    assert torch.equal(targets[1]["counts"], counts)


def test_fp16_planner_does_not_change_the_state_dict_that_it_saves() -> None:
    weight = torch.full((2,), 0.1)
    save_in_memory([example.FP16Planner()], [{"w": weight}])
    assert weight.dtype is torch.float32
    assert torch.equal(weight, torch.full((2,), 0.1))


# SaveExtraDataPlanner


def test_save_extra_data_planner_puts_what_each_rank_knows_into_the_metadata() -> None:
    planners = [example.SaveExtraDataPlanner({"seed": rank}) for rank in range(3)]
    checkpoint = save_in_memory(planners, sharded(FULL, 3))
    data = checkpoint.metadata.planner_data
    assert data.pop(example.SaveExtraDataPlanner.KEY) == [{"seed": 0}, {"seed": 1}, {"seed": 2}]
    assert data == {"model.w": ("model", "w")}
    targets = sharded(torch.zeros(7, 2), 2)
    load_from_memory(checkpoint, [DefaultLoadPlanner() for _ in targets], targets)
    assert torch.equal(locals_of(targets), FULL)


class ReplacesPlannerData(DefaultSavePlanner):
    """Leaves no trace of the default planner's own data."""

    def create_local_plan(self) -> SavePlan:
        return dataclasses.replace(super().create_local_plan(), planner_data="of one rank")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        gathered = [plan.planner_data for plan in plans]
        return plans, dataclasses.replace(metadata, planner_data=gathered)


def test_a_planner_may_replace_the_planner_data_altogether() -> None:
    planners = [ReplacesPlannerData() for _ in range(2)]
    checkpoint = save_in_memory(planners, sharded(FULL, 2))
    assert checkpoint.metadata.planner_data == ["of one rank"] * 2
    target = {"model": {"w": torch.zeros(7, 2)}}
    load_from_memory(checkpoint, [DefaultLoadPlanner()], [target])
    assert torch.equal(target["model"]["w"], FULL)


# DDPLoadBalancingPlanner


def replicas(ranks: int, tensors: int) -> list[dict[str, Any]]:
    state_dict = {f"w{n}": torch.full((2,), float(n)) for n in range(tensors)}
    return [{**state_dict, "step": 5} for _ in range(ranks)]


@pytest.mark.parametrize(("ranks", "tensors"), [(2, 7), (4, 9), (4, 2)])
def test_ddp_load_balancing_planner_deals_the_items_of_rank_0_out(ranks: int, tensors: int) -> None:
    planners = [example.DDPLoadBalancingPlanner() for _ in range(ranks)]
    checkpoint = save_in_memory(planners, replicas(ranks, tensors))
    items = tensors + 1
    counts = [[*checkpoint.written_by.values()].count(rank) for rank in range(ranks)]
    assert counts == [len(range(rank, items, ranks)) for rank in range(ranks)]
    target: dict[str, Any] = {f"w{n}": torch.zeros(2) for n in range(tensors)} | {"step": 0}
    load_from_memory(checkpoint, [DefaultLoadPlanner()], [target])
    assert [target[f"w{n}"].tolist() for n in range(tensors)] == [[n, n] for n in range(tensors)]
    assert target["step"] == 5


def test_ddp_load_balancing_planner_deals_replicated_dtensors_out_too() -> None:
    def build(_: int) -> dict[str, Any]:
        return {f"w{n}": distributed(FULL, mesh_of(2), [Replicate()]) for n in range(4)}

    planners = [example.DDPLoadBalancingPlanner() for _ in range(2)]
    checkpoint = save_in_memory(planners, on_each_rank(2, build))
    owners = {index.fqn: rank for index, rank in checkpoint.written_by.items()}
    assert owners == {"w0": 0, "w1": 1, "w2": 0, "w3": 1}


# The example itself


def test_the_example_can_be_run() -> None:
    shown = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True
    ).stdout
    assert "rank 1 writes layers.3.weight as torch.float16" in shown
    assert "rank 1 writes layers.3.weight as torch.float32" in shown

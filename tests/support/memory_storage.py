"""Carrying plans out in memory: the data path of a save and a load, without files.

Plans travel between the simulated ranks in their wire form, as they do in a real job.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.metadata import Metadata, MetadataIndex
from reshard.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from reshard.plans.wire import (
    decode_answer,
    decode_load_plan,
    decode_save_plans,
    encode_answer,
    encode_load_plan,
    encode_save_plan,
)


def plan_save(
    planners: Sequence[SavePlanner], state_dicts: Sequence[dict[str, Any]]
) -> tuple[list[SavePlan], Metadata]:
    """The final plan of each rank, and the metadata. Rank 0 coordinates."""
    local = []
    for rank, (planner, state_dict) in enumerate(zip(planners, state_dicts, strict=True)):
        planner.set_up_planner(state_dict, is_coordinator=rank == 0)
        local.append(planner.create_local_plan())
    received = decode_save_plans([encode_save_plan(plan) for plan in local])
    answers, metadata = planners[0].create_global_plan(received)
    messages = [encode_answer(*pair) for pair in zip(answers, received, strict=True)]
    return [
        planner.finish_plan(decode_answer(message, sent))
        for planner, message, sent in zip(planners, messages, local, strict=True)
    ], metadata


def plan_load(
    planners: Sequence[LoadPlanner], state_dicts: Sequence[dict[str, Any]], metadata: Metadata
) -> list[LoadPlan]:
    """The final plan of each rank. Rank 0 coordinates."""
    local = []
    for rank, (planner, state_dict) in enumerate(zip(planners, state_dicts, strict=True)):
        planner.set_up_planner(state_dict, metadata, rank == 0)
        local.append(planner.create_local_plan())
    received = [decode_load_plan(encode_load_plan(plan)) for plan in local]
    answers = planners[0].create_global_plan(received)
    return [planner.finish_plan(plan) for planner, plan in zip(planners, answers, strict=True)]


@dataclass
class MemoryCheckpoint:
    """What was written: metadata, and each chunk by FQN and offset."""

    metadata: Metadata
    chunks: dict[MetadataIndex, torch.Tensor | bytes] = field(default_factory=dict)
    written_by: dict[MetadataIndex, int] = field(default_factory=dict)

    def write(self, rank: int, plan: SavePlan, planner: SavePlanner) -> None:
        for item in plan.items:
            data = planner.resolve_data(item)
            assert item.index not in self.chunks, f"{item.index} is written twice"
            if item.type is WriteItemType.BYTE_IO:
                assert isinstance(data, io.BytesIO)
                self.chunks[item.index] = data.getvalue()
            else:
                assert isinstance(data, torch.Tensor)
                assert data.shape == item.tensor_data.chunk.sizes
                assert data.dtype is item.tensor_data.properties.dtype
                self.chunks[item.index] = data.detach().clone(memory_format=torch.contiguous_format)
            self.written_by[item.index] = rank

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        for item in plan.items:
            stored = self.chunks[item.storage_index]
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(stored))
                continue
            region = zip(item.storage_offsets, item.lengths, strict=True)
            for dim, (offset, length) in enumerate(region):
                stored = stored.narrow(dim, offset, length)
            target = planner.resolve_tensor(item)
            assert target.shape == stored.shape
            with torch.no_grad():
                target.copy_(stored)
            planner.commit_tensor(item, target)

    @property
    def written_names(self) -> list[str]:
        return sorted({index.fqn for index in self.chunks})


def save_in_memory(
    planners: Sequence[SavePlanner], state_dicts: Sequence[dict[str, Any]]
) -> MemoryCheckpoint:
    plans, metadata = plan_save(planners, state_dicts)
    checkpoint = MemoryCheckpoint(metadata)
    for rank, (plan, planner) in enumerate(zip(plans, planners, strict=True)):
        checkpoint.write(rank, plan, planner)
    return checkpoint


def load_from_memory(
    checkpoint: MemoryCheckpoint,
    planners: Sequence[LoadPlanner],
    state_dicts: Sequence[dict[str, Any]],
) -> list[LoadPlan]:
    plans = plan_load(planners, state_dicts, checkpoint.metadata)
    for plan, planner in zip(plans, planners, strict=True):
        checkpoint.read(plan, planner)
    return plans

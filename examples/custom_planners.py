"""Five planners that people write, each by overriding one or two methods.

`python examples/custom_planners.py` shows what two of them plan.
"""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import torch

from reshard import DefaultLoadPlanner, DefaultSavePlanner, Metadata, SavePlan, WriteItem
from reshard._nested_dict import flatten_state_dict
from reshard._traverse import set_element
from reshard.metadata import MetadataIndex


class RenamePlanner(DefaultLoadPlanner):
    """Loads names that begin with `stored_prefix` in the checkpoint, but not in the program."""

    def __init__(self, stored_prefix: str) -> None:
        super().__init__()
        self.stored_prefix = stored_prefix

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False):
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = {self.stored_prefix + k: v for k, v in self.state_dict.items()}
        # Where a value goes is looked up by the name that is read.
        self.mappings = {self.stored_prefix + k: path for k, path in self.mappings.items()}


class MetaModelMaterialize(DefaultLoadPlanner):
    """Gives each tensor of a meta model memory when its first data arrives, not before."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False):
        # The default would give memory to all tensors at once, also to those not loaded.
        super().set_up_planner({}, metadata, is_coordinator)
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flatten_state_dict(state_dict)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        tensor = self.state_dict[index.fqn]
        if tensor.is_meta:
            self.state_dict[index.fqn] = torch.empty_like(tensor, device="cpu")
            path = self.mappings[index.fqn]
            set_element(self.original_state_dict, path, self.state_dict[index.fqn])
        return super().lookup_tensor(index)


class FP16Planner(DefaultSavePlanner):
    """Writes floating point tensors in half precision."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data and item.tensor_data.properties.dtype.is_floating_point:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor) and data.is_floating_point():
            return data.to(torch.float16)
        return data


class SaveExtraDataPlanner(DefaultSavePlanner):
    """Puts something that each rank knows into the metadata of the checkpoint."""

    KEY = "(extra data by rank)"

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, planner_data=(plan.planner_data, self.extra))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        extras = [plan.planner_data[1] for plan in all_plans]
        plain = [dataclasses.replace(p, planner_data=p.planner_data[0]) for p in all_plans]
        plans, metadata = super().create_global_plan(plain)
        data = {**metadata.planner_data, self.KEY: extras}
        return plans, dataclasses.replace(metadata, planner_data=data)


class DDPLoadBalancingPlanner(DefaultSavePlanner):
    """Deals out what rank 0 has, item by item: for replicas that are the same everywhere."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        items, ranks = all_plans[0].items, len(all_plans)
        dealt = [
            dataclasses.replace(plan, items=items[rank::ranks])
            for rank, plan in enumerate(all_plans)
        ]
        return super().create_global_plan(dealt)


def main() -> None:
    for kind in (FP16Planner, DDPLoadBalancingPlanner):
        ranks = [kind() for _ in range(2)]
        for planner in ranks:
            planner.set_up_planner({f"layers.{n}.weight": torch.ones(4, 4) for n in range(4)})
        plans, _ = ranks[0].create_global_plan([planner.create_local_plan() for planner in ranks])
        print(kind.__doc__)
        for rank, plan in enumerate(plans):
            for item in plan.items:
                dtype = item.tensor_data.properties.dtype
                print(f"  rank {rank} writes {item.index.fqn} as {dtype}")


if __name__ == "__main__":
    main()

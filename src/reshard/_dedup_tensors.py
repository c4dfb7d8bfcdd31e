"""Deduplication without balancing, under the module name that DCP users import from."""

from __future__ import annotations

from reshard.global_save import dedup_save_plans
from reshard.planner import SavePlan

__all__ = ["dedup_tensors"]


def dedup_tensors(all_plans: list[SavePlan]) -> list[SavePlan]:
    """The plans with each chunk left on the first rank that has it."""
    return dedup_save_plans(all_plans, save_to_lowest_rank=True)

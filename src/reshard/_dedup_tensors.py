"""Deduplication without balancing, under the module name that DCP users import from."""

from reshard.plans.global_plan import dedup_tensors

__all__ = ["dedup_tensors"]

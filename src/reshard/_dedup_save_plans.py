"""Deduplication, under the module name that DCP users import from."""

from reshard.plans.global_plan import dedup_save_plans

__all__ = ["dedup_save_plans"]

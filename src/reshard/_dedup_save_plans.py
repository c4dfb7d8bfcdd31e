"""Deduplication, under the module name that DCP users import from."""

from reshard.global_save import dedup_save_plans

__all__ = ["dedup_save_plans"]

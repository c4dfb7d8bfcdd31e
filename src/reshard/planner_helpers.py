"""Building items, under the module name that DCP users import from."""

from typing import Any

from reshard.plans import local_load_plan, local_save_plan, single_items
from reshard.plans.local_load_plan import create_read_items_for_chunk_list

__all__ = ["create_read_items_for_chunk_list"]


def __getattr__(name: str) -> Any:
    for module in (local_save_plan, local_load_plan, single_items):
        if name in vars(module):
            return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

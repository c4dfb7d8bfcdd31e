"""Building items, under the module name that DCP users import from."""

from typing import Any

from reshard.plans import building as _ours
from reshard.plans.building import create_read_items_for_chunk_list

__all__ = ["create_read_items_for_chunk_list"]


def __getattr__(name: str) -> Any:
    return getattr(_ours, name)

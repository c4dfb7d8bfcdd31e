"""Nested sharded tensors, under the module name that DCP users import from."""

from __future__ import annotations

from reshard.metadata import STATE_DICT_TYPE

__all__ = ["_flatten_sharded_tensors"]


def _flatten_sharded_tensors(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    """`state_dict` as it is: planning resolves sharded tensors nested in one another.

    Kept for planners that call it before handing a state dict on.
    """
    return state_dict

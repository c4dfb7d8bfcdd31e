"""Flattening, under the module name that DCP users import from."""

from reshard.tensors.flatten import flatten_state_dict, unflatten_state_dict
from reshard.tensors.paths import PathMap as FLATTEN_MAPPING

__all__ = ["FLATTEN_MAPPING", "flatten_state_dict", "unflatten_state_dict"]

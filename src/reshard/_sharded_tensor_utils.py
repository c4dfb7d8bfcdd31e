"""Nested sharded tensors, under the module name that DCP users import from."""

from reshard.tensors.flatten import flatten_sharded_tensors as _flatten_sharded_tensors

__all__ = ["_flatten_sharded_tensors"]

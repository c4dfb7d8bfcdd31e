"""Choosing a storage by its place, under the module name that DCP users import from."""

from reshard.operations.targets import _storage_setup

__all__ = ["_storage_setup"]

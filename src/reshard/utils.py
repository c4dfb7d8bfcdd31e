"""Looking up the data of an item, under the module name that DCP users import from."""

from reshard.tensors.shards import find_state_dict_object, find_tensor_shard

__all__ = ["find_state_dict_object", "find_tensor_shard"]

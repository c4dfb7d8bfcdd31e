"""The module of that name that DCP users import from. What is not ours is torch's, handed on."""

from typing import Any

from torch.distributed.checkpoint import utils as _of_torch

from reshard.api import CheckpointException, _is_wrapped_exception, _wrap_exception
from reshard.coordination.dist_wrapper import _DistWrapper, _get_failure_dict
from reshard.metadata import MetadataIndex
from reshard.operations.user_calls import _api_bc_check
from reshard.protocol import _get_checkpointable_tensor_shard, _is_checkpointable_tensor
from reshard.tensors.shards import find_state_dict_object, find_tensor_shard

__all__ = ["CheckpointException", "MetadataIndex", "_is_wrapped_exception", "_wrap_exception"]
__all__ += ["_DistWrapper", "_api_bc_check", "_get_failure_dict", "find_state_dict_object"]
__all__ += ["_get_checkpointable_tensor_shard", "_is_checkpointable_tensor", "find_tensor_shard"]


def __getattr__(name: str) -> Any:
    return getattr(_of_torch, name)

"""One line for each value of a state dict, for people who look at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from reshard.tensors.paths import StatePath


def print_tensor(path: StatePath, value: Any, print_fun: Callable[[str], None] = print) -> None:
    """Say what lies at a path. To be passed to `traverse_state_dict`, alone or in a partial."""
    _describe(value, str(path), print_fun)


def keep_visiting_tensors(value: Any) -> bool:
    """Whether a value makes the list that it lies in worth a look: whether it is a tensor."""
    return isinstance(value, torch.Tensor)


def _describe(value: Any, prefix: str, print_fun: Callable[[str], None]) -> None:
    if isinstance(value, ShardedTensor):
        print_fun(f"{prefix} ShardedTensor size: {value.size()}")
        for shard in value.local_shards():
            _describe(shard.tensor, f"{shard.metadata.shard_offsets}", print_fun)
    elif isinstance(value, DTensor):
        print_fun(f"{prefix} DistributedTensor size: {value.size()}")
        _describe(value._local_tensor, "", print_fun)
    elif isinstance(value, torch.Tensor):
        print_fun(f"{prefix} Tensor size: {value.size()}")
    else:
        print_fun(f"{prefix} Type: {type(value)}")

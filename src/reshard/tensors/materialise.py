"""Allocating memory for tensors on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from reshard.api import UnsupportedLayoutError
from reshard.protocol import _copy_checkpointable_tensor_metadata, _is_checkpointable_tensor
from reshard.tensors.groups import default_device
from reshard.tensors.nesting import Walk, put_elements


def materialise(value: Any, leave: Callable[[Any], bool] = lambda tensor: False) -> Any:
    """`value` with memory for every meta tensor in it; dicts and lists change in place.

    Tensors that `leave` chooses stay as they are.
    """
    return _Materialising(leave).run(value)


class _Materialising(Walk):
    def __init__(self, leave: Callable[[Any], bool]) -> None:
        super().__init__()
        self._leave = leave

    def leaf(self, value: Any) -> Any:
        is_meta = isinstance(value, torch.Tensor) and _is_meta(value)
        return _with_memory(value) if is_meta and not self._leave(value) else value

    def leave(self, container: Any, changed: dict[Any, Any]) -> Any:
        return put_elements(container, changed) if changed else container

    def cycle(self, container: Any) -> Any:
        return container


def _is_meta(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, ShardedTensor):
        # is_meta of a ShardedTensor covers only a single local shard.
        return any(shard.tensor.is_meta for shard in tensor.local_shards())
    return tensor.is_meta


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        raise UnsupportedLayoutError(
            "a ShardedTensor on the meta device cannot be given memory; materialise it before "
            "the load"
        )
    device = default_device()
    if isinstance(tensor, DTensor):
        return with_local(tensor, torch.empty_like(tensor._local_tensor, device=device))
    memory = torch.empty_like(tensor, device=device)
    if _is_checkpointable_tensor(tensor):
        _copy_checkpointable_tensor_metadata(tensor, memory)
    return memory


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor like another, with other local memory."""
    return DTensor.from_local(
        local,
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        run_check=False,
        # Given explicitly, since they cannot be inferred from an uneven shard.
        shape=tensor.size(),
        stride=tensor.stride(),
    )

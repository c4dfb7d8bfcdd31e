"""Memory for the state of a parameter, in the layout of the parameter."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard  # type: ignore[attr-defined]
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharding_spec import ShardMetadata  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from reshard.tensors.groups import default_device
from reshard.tensors.shards import Box, local_shards
from reshard.tensors.storages import contiguous_strides


def empty_like_parameter(
    parameter: Any, size: Sequence[int], dtype: torch.dtype
) -> torch.Tensor | None:
    """An empty tensor for a state of `parameter`, in its layout; None if it is not a tensor.

    A state of another size than the parameter is replicated over the mesh of the parameter.
    A state without dimensions is a plain tensor.
    """
    size = torch.Size(size)
    if isinstance(parameter, DTensor):
        return _like_dtensor(parameter, size, dtype)
    if isinstance(parameter, ShardedTensor):
        inner = _nested(parameter)
        if math.prod(size) != 1 and size == parameter.size():
            return _like_sharded(parameter if inner is None else inner, dtype)
        return torch.empty(size, dtype=dtype, device=device_of(parameter))
    if isinstance(parameter, torch.Tensor):
        return torch.empty(size, dtype=dtype, device=device_of(parameter))
    return None


def _like_dtensor(parameter: DTensor, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    local = parameter._local_tensor
    device = device_of(local)
    if not size and parameter.dim():
        return torch.empty(size, dtype=dtype, device=device)
    same = size == parameter.size()
    placements = parameter.placements if same else [Replicate()] * parameter.device_mesh.ndim
    return DTensor.from_local(
        torch.empty(local.shape if same else size, dtype=dtype, device=device),
        device_mesh=parameter.device_mesh,
        placements=placements,
        run_check=False,
        shape=size,
        stride=contiguous_strides(size),
    )


def with_local(parameter: Any, local: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """A tensor of `size` with the local part `local`, sharded like the parameter if that is."""
    if not isinstance(parameter, DTensor) or parameter.size() != torch.Size(size):
        return local
    spec = parameter._spec
    meta = TensorMeta(parameter.size(), parameter.stride(), local.dtype)
    return DTensor(local, DTensorSpec(spec.mesh, spec.placements, meta), requires_grad=False)  # type: ignore[no-untyped-call]


def own_region(parameter: Any, size: Sequence[int]) -> Box:
    """This rank's region of a state of `size`: the parameter's if it has that size, or all."""
    if isinstance(parameter, DTensor) and parameter.size() == torch.Size(size):
        shards = list(local_shards("a parameter", parameter))
        if len(shards) == 1:
            return shards[0].offsets, shards[0].sizes
    return (0,) * len(size), tuple(size)


def _nested(tensor: ShardedTensor) -> ShardedTensor | None:
    """The sharded tensor nested in the only local shard of `tensor`, if there is one."""
    shards = tensor.local_shards()
    if not shards or not isinstance(shards[0].tensor, ShardedTensor):
        return None
    if len(shards) > 1:
        raise ValueError("a sharded tensor of sharded tensors has one shard on each rank")
    return shards[0].tensor


class NestedPart(NamedTuple):
    """Where a nested sharded tensor lies in the whole tensor, and the group that shards it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    group: dist.ProcessGroup | None


def nested_part(tensor: Any) -> NestedPart | None:
    """The part of a tensor that a nested sharded tensor is; None if none is nested."""
    if not isinstance(tensor, ShardedTensor) or (inner := _nested(tensor)) is None:
        return None
    place = tensor.local_shards()[0].metadata
    return NestedPart(tuple(place.shard_offsets), tuple(place.shard_sizes), inner._process_group)


def device_of(tensor: Any) -> torch.device:
    """The device of a tensor, or the default device for a meta tensor."""
    if isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            return device_of(shard.tensor)
        return default_device()
    device: torch.device = tensor.device
    return default_device() if device.type == "meta" else device


def _like_sharded(parameter: ShardedTensor, dtype: torch.dtype) -> ShardedTensor:
    metadata = copy.deepcopy(parameter.metadata())
    metadata.tensor_properties.dtype = dtype
    metadata.tensor_properties.requires_grad = False
    device = device_of(parameter)
    shards = [
        Shard(torch.empty(shard.tensor.shape, dtype=dtype, device=device), shard.metadata)
        for shard in parameter.local_shards()
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=parameter._process_group
    )


def chunk_sharded(
    size: Sequence[int], dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> ShardedTensor:
    """An empty tensor, sharded along its first dimension over the ranks of a group."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    device = default_device()
    rows = -(-size[0] // world_size)
    pieces = []
    for place in range(world_size):
        begin = min(place * rows, size[0])
        count = min(rows, size[0] - begin)
        if count > 0 or place == 0:
            offsets, sizes = [begin, *[0] * (len(size) - 1)], [count, *size[1:]]
            pieces.append(ShardMetadata(offsets, sizes, f"rank:{place}/{device}"))
    metadata = ShardedTensorMetadata(
        pieces, torch.Size(size), TensorProperties(dtype=dtype, layout=torch.strided)
    )
    shards = [
        Shard(torch.empty(piece.shard_sizes, dtype=dtype, device=device), piece)
        for piece in pieces
        if piece.placement is not None and piece.placement.rank() == rank
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=group
    )

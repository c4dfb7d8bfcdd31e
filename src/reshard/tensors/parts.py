"""Taking tensors of any kind apart into plain ones, and putting copies of those together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import Shard  # type: ignore[attr-defined]
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from reshard.api import UnsupportedLayoutError
from reshard.tensors.shards import check_allocated, is_dense
from reshard.tensors.storages import is_allocated
from reshard.tensors.subclasses import join_parts, split_parts


class TensorParts(NamedTuple):
    """What a tensor consists of, and how to put such parts together again."""

    tensors: list[torch.Tensor]
    join: Callable[[list[Any]], Any]


def take_apart(tensor: torch.Tensor, path: Sequence[Any]) -> TensorParts | None:
    """The parts of a tensor; None for one that is nothing but its own memory.

    `path` is for errors: some kinds of tensors cannot be copied.
    """
    kind = type(tensor)
    if (kind is torch.Tensor or kind is torch.nn.Parameter) and is_dense(tensor):
        if tensor.is_meta:
            return TensorParts([], lambda _: _cloned(tensor))
        _check_memory(tensor, path)
        return None
    if isinstance(tensor, DTensor) and kind is DTensor:
        # Not with from_local, which queries the mesh for every tensor.
        return TensorParts(
            [tensor._local_tensor],
            lambda local: DTensor(local[0], tensor._spec, requires_grad=tensor.requires_grad),  # type: ignore[no-untyped-call]
        )
    if isinstance(tensor, AsyncCollectiveTensor):
        return TensorParts([tensor.trigger_wait()], lambda waited: waited[0])  # type: ignore[no-untyped-call]
    if isinstance(tensor, UninitializedTensorMixin):
        raise UnsupportedLayoutError(
            f"{_quote(path)} has no shape yet: run the lazy module once before saving"
        )
    if isinstance(tensor, ShardedTensor):
        return TensorParts(
            [shard.tensor for shard in tensor.local_shards()],
            lambda locals_: _sharded_like(tensor, locals_),
        )
    if hasattr(kind, "__tensor_flatten__"):
        return _take_subclass_apart(tensor)
    if tensor.is_meta or not is_dense(tensor):
        _check_allocated(tensor, path)
        return TensorParts([], lambda _: _cloned(tensor))
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedLayoutError(
            f"{_quote(path)} is a {kind.__name__}, a tensor subclass that does not say what it "
            "consists of: give it __tensor_flatten__ and __tensor_unflatten__, or save it with "
            "save()"
        )
    _check_memory(tensor, path)
    return None


def _check_memory(tensor: torch.Tensor, path: Sequence[Any]) -> None:
    if tensor.is_nested:
        raise UnsupportedLayoutError(
            f"{_quote(path)} is a nested tensor of the strided kind; use layout=torch.jagged"
        )
    _check_allocated(tensor, path)


def _check_allocated(tensor: torch.Tensor, path: Sequence[Any]) -> None:
    # The name is made for errors only: there may be many tensors.
    if not is_allocated(tensor):
        check_allocated(".".join(map(str, path)), tensor)


def _quote(path: Sequence[Any]) -> str:
    return repr(".".join(map(str, path)))


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _sharded_like(tensor: ShardedTensor, local_tensors: Sequence[torch.Tensor]) -> ShardedTensor:
    metadata = copy.deepcopy(tensor.metadata())
    metadata.tensor_properties.pin_memory = any(local.is_pinned() for local in local_tensors)
    metadata.shards_metadata = [_on_cpu(shard) for shard in metadata.shards_metadata]
    shards = [
        Shard(local, _on_cpu(shard.metadata))
        for local, shard in zip(local_tensors, tensor.local_shards(), strict=True)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=tensor._process_group
    )


def _on_cpu(shard: Any) -> Any:
    """The same shard, placed on the CPU of its rank."""
    rank = None if shard.placement is None else shard.placement.rank()
    place = "cpu" if rank is None else f"rank:{rank}/cpu"
    return ShardMetadata(list(shard.shard_offsets), list(shard.shard_sizes), place)


def _take_subclass_apart(tensor: Any) -> TensorParts:
    own, _ = split_parts(tensor)

    def join(parts: list[Any]) -> Any:
        twin = join_parts(tensor, dict(zip(own, parts, strict=True)))
        wanted = tensor.requires_grad and not twin.requires_grad and twin.is_leaf
        return twin.requires_grad_() if wanted else twin

    return TensorParts(list(own.values()), join)

"""Tensor subclasses without memory of their own, which consist of other tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from reshard.tensors.storages import contiguous_strides


def is_composite(value: Any) -> bool:
    """Whether `value` consists of other tensors, and of nothing else."""
    kind = type(value)
    return (
        isinstance(value, torch.Tensor)
        and hasattr(kind, "__tensor_flatten__")
        and not isinstance(value, DTensor | AsyncCollectiveTensor)
        # It implements torch's checkpointable protocol, which says more.
        and not hasattr(kind, "__create_write_items__")
        and not value.is_nested
        and value.data_ptr() == 0
    )


def split_parts(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors that a tensor consists of by name, and the context to rebuild it."""
    names, context = tensor.__tensor_flatten__()
    values = {name: getattr(tensor, name) for name in names}
    return {n: value for n, value in values.items() if isinstance(value, torch.Tensor)}, context


def join_parts(
    like: Any, parts: Mapping[str, torch.Tensor], sizes: Sequence[int] | None = None
) -> Any:
    """A tensor like another with other parts, and optionally other sizes."""
    names, context = like.__tensor_flatten__()
    values = {name: getattr(like, name) for name in names} | dict(parts)
    shape, stride = like.shape, like.stride()
    if sizes is not None and tuple(sizes) != tuple(shape):
        shape, stride = torch.Size(sizes), contiguous_strides(sizes)
    return type(like).__tensor_unflatten__(values, context, shape, stride)

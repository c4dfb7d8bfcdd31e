"""Tensor subclasses without memory of their own, which consist of other tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    if sizes is None or tuple(sizes) == tuple(like.shape):
        return type(like).__tensor_unflatten__(values, context, like.shape, like.stride())
    return build(type(like), values, context, sizes, {tuple(like.shape)})


def build(
    kind: Any,
    parts: Mapping[str, Any],
    context: Any,
    sizes: Sequence[int],
    shapes: Collection[tuple[int, ...]],
) -> Any:
    """A tensor of a class, with the context of another tensor, which has one of `shapes`."""
    shape, stride = torch.Size(sizes), contiguous_strides(sizes)
    made = kind.__tensor_unflatten__(parts, context, shape, stride)
    if made.shape != shape:
        # The class keeps its shape in the context, and goes by that.
        own = _with_shape(context, shapes, shape)
        made = kind.__tensor_unflatten__(parts, own, shape, stride)
    if made.shape != shape:
        raise ValueError(
            f"made from the parts of a shard of shape {tuple(shape)}, it has the shape "
            f"{tuple(made.shape)}"
        )
    return made


def _with_shape(context: Any, shapes: Collection[tuple[int, ...]], shape: torch.Size) -> Any:
    """A context with a shape in the place of each one of `shapes`."""
    if isinstance(context, dict):
        return {key: _with_shape(value, shapes, shape) for key, value in context.items()}
    if type(context) not in (list, tuple, torch.Size):
        return context
    if all(type(value) is int for value in context):
        return type(context)(shape) if tuple(context) in shapes else context
    return type(context)(_with_shape(value, shapes, shape) for value in context)

"""Tensors that say of themselves which regions of a larger tensor they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch

from reshard.api import UnsupportedLayoutError
from reshard.metadata import ChunkStorageMetadata, MetadataIndex

__all__ = ["CheckpointableTensor"]

_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


@runtime_checkable
class CheckpointableTensor(Protocol):
    """A tensor, of any class, with four attributes that make it shards of a larger one.

    Shard i begins at `global_offsets[i]` of a tensor of shape `global_shape`, has the size
    `local_sizes[i]`, and lies at `local_offsets[i]` of this tensor, which may hold padding as
    well. Set the attributes on a `torch.Tensor`; nothing has to be derived from this class.
    """

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]


def _is_checkpointable_tensor(obj: object) -> TypeGuard[CheckpointableTensor]:
    # One after the other: nearly all tensors lack the first, and isinstance would look for all.
    return isinstance(obj, torch.Tensor) and all(hasattr(obj, name) for name in _FIELDS)


def _copy_checkpointable_tensor_metadata(src: CheckpointableTensor, dst: torch.Tensor) -> None:
    """Make `dst` hold the same shards as `src`."""
    for name in _FIELDS:
        setattr(dst, name, getattr(src, name))


def _get_checkpointable_tensor_chunks(tensor: CheckpointableTensor) -> list[ChunkStorageMetadata]:
    """The regions that `tensor` holds."""
    _validate_checkpointable_tensor_metadata(tensor)
    return [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in zip(tensor.global_offsets, tensor.local_sizes, strict=True)
    ]


def _get_checkpointable_tensor_shard(
    tensor: CheckpointableTensor, index: MetadataIndex
) -> torch.Tensor:
    """The memory of the shard that `index` names, as a view."""
    _validate_checkpointable_tensor_metadata(tensor)
    begins = [tuple(offsets) for offsets in tensor.global_offsets]
    if index.offset is not None:
        if tuple(index.offset) not in begins:
            raise ValueError(
                f"Could not find shard of {index.fqn!r} at {tuple(index.offset)}; there are shards "
                f"at {begins}"
            )
        return _checkpointable_shard(tensor, begins.index(tuple(index.offset)))
    if len(begins) != 1:
        raise ValueError(
            f"{index.fqn!r} has {len(begins)} shards here, and no offset was provided to tell which"
        )
    return _checkpointable_shard(tensor, 0)


def _checkpointable_shard(tensor: Any, number: int) -> torch.Tensor:
    place = zip(tensor.local_offsets[number], tensor.local_sizes[number], strict=True)
    shard: torch.Tensor = tensor
    for dim, (begin, size) in enumerate(place):
        shard = shard.narrow(dim, begin, size)
    return shard


def _validate_checkpointable_tensor_metadata(tensor: Any, fqn: str = "a tensor") -> None:
    """Raise `UnsupportedLayoutError` if the attributes of `tensor` contradict each other."""
    about = f"{fqn!r} describes itself as shards of a larger tensor, but"
    counts = {name: len(getattr(tensor, name)) for name in _FIELDS[1:]}
    if len(set(counts.values())) > 1:
        raise UnsupportedLayoutError(f"{about} not all of {counts} have as many shards")
    shards = zip(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True)
    for number, (begin, place, size) in enumerate(shards):
        for what, offsets, shape in (
            ("global_offsets", begin, tensor.global_shape),
            ("local_offsets", place, tuple(tensor.shape)),
        ):
            if not _fits(offsets, size, shape):
                raise UnsupportedLayoutError(
                    f"{about} {what}[{number}] = {tuple(offsets)} with local_sizes[{number}] = "
                    f"{tuple(size)} is no region of a shape of {tuple(shape)}"
                )


def _fits(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    if not len(offsets) == len(sizes) == len(shape):
        return False
    boxes = zip(offsets, sizes, shape, strict=True)
    return all(begin >= 0 and size >= 0 and begin + size <= extent for begin, size, extent in boxes)

"""The shards of a tensor on this rank: regions of the global tensor, and their memory.

Handles DTensor, ShardedTensor (also nested in each other), plain tensors, those that are a
`CheckpointableTensor`, and tensor subclasses that implement torch's checkpointable protocol.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from reshard.api import PlanError, UnsupportedLayoutError
from reshard.metadata import STATE_DICT_TYPE, MetadataIndex
from reshard.protocol import (
    _checkpointable_shard,
    _is_checkpointable_tensor,
    _validate_checkpointable_tensor_metadata,
)
from reshard.tensors.dcp_types import to_chunk
from reshard.tensors.regions import Cut, Region, local_regions
from reshard.tensors.storages import is_allocated
from reshard.tensors.subclasses import is_composite
from reshard.tensors.torch_versions import cuts_strided_shards_at_once

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


class Mesh(Protocol):
    """What is used of torch's DeviceMesh."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def get_coordinate(self) -> Sequence[int] | None: ...


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A region of a tensor, and the memory that holds it here."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class HeldShards:
    """The shards of a tensor on this rank, without a mesh.

    Takes the place of a DTensor or ShardedTensor in a process without a process group.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    shards: tuple[LocalShard, ...]

    def size(self) -> torch.Size:
        return torch.Size(self.shape)


def held_shards(value: Any, fqn: str = "a tensor") -> HeldShards:
    """The shards of a sharded tensor on this rank."""
    return HeldShards(
        value.dtype,
        global_shape(value),
        value.requires_grad,
        tuple(local_shards(fqn, value)) if takes_part(fqn, value) else (),
    )


def with_held_shards(flat: dict[str, Any]) -> dict[str, Any]:
    """A flat state dict with `HeldShards` in place of tensors that are a `CheckpointableTensor`.

    Those look like plain tensors to whoever asks for their class or their shape.
    """
    found = {
        fqn: held_shards(value, fqn)
        for fqn, value in flat.items()
        if hasattr(value, "global_shape") and _is_checkpointable_tensor(value)
    }
    return {**flat, **found} if found else flat


def global_shape(value: Any) -> tuple[int, ...]:
    """The shape of the tensor that `value` is, or holds shards of."""
    return tuple(value.global_shape if _is_checkpointable_tensor(value) else value.size())


class DTensorReader:
    """Computes the regions of DTensors, with a cache of meshes and placements.

    A model has thousands of DTensors but few layouts. Make one reader per planning call,
    since meshes are cached by identity.
    """

    def __init__(self) -> None:
        self._meshes: dict[int, tuple[Mesh, tuple[int, ...], Sequence[int] | None]] = {}
        self._cuts: dict[tuple[int, tuple[Any, ...]], tuple[Cut, ...]] = {}

    def cuts(self, fqn: str, tensor: Any) -> tuple[Cut, ...] | None:
        """How the tensor is cut for this rank; None if it is not part of the mesh."""
        mesh, placements = tensor._spec.mesh, tensor._spec.placements
        known = self._meshes.get(id(mesh))
        if known is None:
            known = (mesh, tuple(mesh.shape), mesh.get_coordinate())
            self._meshes[id(mesh)] = known
        if known[2] is None:
            return None
        key = (id(mesh), placements)
        cuts = self._cuts.get(key)
        if cuts is None:
            cuts = self._cuts[key] = _cuts(fqn, known[1], known[2], placements)
        return cuts

    def regions(self, fqn: str, tensor: Any) -> tuple[Region, ...]:
        """The regions that this rank holds; none if it is not part of the mesh."""
        if type(tensor) is HeldShards:
            return tuple(
                Region(shard.offsets, shard.sizes, (0,) * len(shard.sizes))
                for shard in tensor.shards
            )
        cuts = self.cuts(fqn, tensor)
        if cuts is None:
            return ()
        shape = tuple(tensor._spec.shape)
        local_shape = tuple(tensor._local_tensor.shape)
        if _looks_like_fsdp_over_tp(cuts):
            # FSDP shards what tensor parallelism sharded. With uneven sizes the strided
            # placement describes that wrongly: cut in the order in which it was done.
            regions = local_regions(shape, cuts, right_to_left=True)
            if _extent(regions) == local_shape:
                return regions
        regions = local_regions(shape, cuts)
        if _extent(regions) == local_shape:
            return regions
        raise UnsupportedLayoutError(
            f"{fqn!r}: the local tensor has shape {local_shape}, but placements "
            f"{tensor._spec.placements} on a mesh of shape {tuple(tensor._spec.mesh.shape)} "
            f"give this rank {_extent(regions)} of {shape}. Pass "
            "`shape` and `stride` to DTensor.from_local when shards are uneven"
        )


def _looks_like_fsdp_over_tp(cuts: Sequence[Cut]) -> bool:
    """Whether there is one strided cut, whose stride matches the later cuts of its dimension."""
    strided = [i for i, cut in enumerate(cuts) if cut.split_factor > 1]
    if len(strided) != 1:
        return False
    (i,) = strided
    later = math.prod(cut.parts for cut in cuts[i + 1 :] if cut.dim == cuts[i].dim)
    return cuts[i].split_factor == later


def _extent(regions: Sequence[Region]) -> tuple[int, ...]:
    """The shape of the local tensor that holds `regions`."""
    last = regions[-1]
    return tuple(a + b for a, b in zip(last.local_offsets, last.sizes, strict=True))


def _cuts(
    fqn: str, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[Cut, ...]:
    cuts = []
    for mesh_dim, placement in enumerate(placements):
        parts, index = int(mesh_shape[mesh_dim]), int(coordinate[mesh_dim])
        if isinstance(placement, _StridedShard):
            factor, at_once = int(placement.split_factor), cuts_strided_shards_at_once()
            cuts.append(Cut(placement.dim, parts, index, factor, at_once))
        elif isinstance(placement, Shard):
            cuts.append(Cut(placement.dim, parts, index))
        elif not isinstance(placement, Replicate):
            raise UnsupportedLayoutError(
                f"{fqn!r} has the placement {placement} on mesh dimension {mesh_dim}: its value "
                "is not known until it is reduced. Call redistribute() to Shard or Replicate "
                "before saving or loading it"
            )
    return tuple(cuts)


def is_plain(value: Any) -> bool:
    """Whether `value` is a torch.Tensor or Parameter that stands for nothing but itself."""
    return type(value) in _PLAIN and not hasattr(value, "global_shape")


def is_sharded(value: Any) -> bool:
    """Whether `value` may be distributed over several ranks."""
    known = isinstance(value, DTensor | ShardedTensor | HeldShards)
    return known or _is_checkpointable_tensor(value)


def plain_local_tensor(value: Any) -> torch.Tensor | None:
    """The local tensor of a DTensor over a plain tensor; None for anything else."""
    if type(value) is DTensor and type(value._local_tensor) in _PLAIN:
        return value._local_tensor
    if type(value) is HeldShards and len(value.shards) == 1:
        only = value.shards[0].tensor
        return only if type(only) in _PLAIN else None
    return None


def whole_local_tensor(value: Any, sizes: Sequence[int]) -> torch.Tensor | None:
    """The local memory of a tensor if it is one block of the given sizes, or else None."""
    local = value if type(value) in _PLAIN else plain_local_tensor(value)
    return local if local is not None and local.shape == sizes else None


def shards_of_all_ranks(value: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """Offsets and sizes of the shards of a ShardedTensor on all ranks; None for other values."""
    if not isinstance(value, ShardedTensor):
        return None
    return [
        (tuple(shard.shard_offsets), tuple(shard.shard_sizes))
        for shard in value.metadata().shards_metadata
    ]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is neither sparse nor quantized."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def composite_shards(fqn: str, value: Any) -> list[LocalShard] | None:
    """The shards of a composite tensor on this rank; None for other values."""
    if type(value) in _PLAIN:
        return None
    local = value._local_tensor if isinstance(value, DTensor) else value
    return list(local_shards(fqn, value)) if is_composite(local) else None


def check_memory(fqn: str, tensor: Any) -> None:
    """Refuse a tensor subclass without memory of its own, which would be misread."""
    if type(tensor) in _PLAIN or not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        return
    if tensor.numel() and tensor.data_ptr() == 0:
        raise UnsupportedLayoutError(
            f"{fqn!r} is a {type(tensor).__name__}, a tensor subclass without memory of its own: "
            "save the tensors that it consists of, or give it torch's checkpointable protocol "
            "(__create_write_items__ and so on)"
        )


def check_allocated(fqn: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose storage was freed or shrunk: reading it would crash the process."""
    if not is_allocated(tensor):
        raise UnsupportedLayoutError(
            f"the memory of {fqn!r} was freed or shrunk, as FSDP does with parameters in use: "
            "save and load a state dict that was asked for outside of the forward and backward pass"
        )


def check_local_memory(fqn: str, value: Any) -> None:
    """Refuse a tensor whose local memory was freed."""
    local = value if type(value) in _PLAIN else plain_local_tensor(value)
    if local is not None:
        check_allocated(fqn, local)


def describes_itself(value: Any, method: str) -> bool:
    """Whether `value` implements `method` of torch's checkpointable protocol itself.

    A DTensor has the methods too, but delegates them to its local tensor.
    """
    if is_plain(value):
        return False
    own = getattr(type(value), method, None)
    if isinstance(value, DTensor) and own is getattr(DTensor, method):
        return hasattr(value._local_tensor, method)
    return own is not None


def takes_part(fqn: str, value: Any, reader: DTensorReader | None = None) -> bool:
    """Whether this rank holds a part of `value`; raises if its layout cannot be stored."""
    if not isinstance(value, DTensor):
        return True
    return (reader or DTensorReader()).cuts(fqn, value) is not None


def local_shards(
    fqn: str, value: torch.Tensor | HeldShards, reader: DTensorReader | None = None
) -> Iterator[LocalShard]:
    """The shards of `value` on this rank, with nested sharded tensors resolved."""
    if isinstance(value, DTensor):
        local = value._local_tensor
        regions = (reader or DTensorReader()).regions(fqn, value)
        for region in regions:
            box = region.local_offsets, region.sizes
            view = local if len(regions) == 1 else narrow(local, box)
            yield LocalShard(region.offsets, region.sizes, view)
    elif isinstance(value, HeldShards):
        yield from value.shards
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            outer = tuple(shard.metadata.shard_offsets)
            if isinstance(shard.tensor, ShardedTensor | DTensor):
                for inner in local_shards(fqn, shard.tensor, reader):
                    offsets = tuple(a + b for a, b in zip(outer, inner.offsets, strict=True))
                    yield LocalShard(offsets, inner.sizes, inner.tensor)
            else:
                yield LocalShard(outer, tuple(shard.metadata.shard_sizes), shard.tensor)
    elif _is_checkpointable_tensor(value):
        _validate_checkpointable_tensor_metadata(value, fqn)
        shards = zip(value.global_offsets, value.local_sizes, strict=True)
        for number, (offsets, sizes) in enumerate(shards):
            view = _checkpointable_shard(value, number)
            yield LocalShard(tuple(offsets), tuple(sizes), view)
    else:
        yield LocalShard((0,) * value.dim(), tuple(value.shape), value)


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A region of a tensor, as a view."""
    for dim, (begin, length) in enumerate(zip(*box, strict=True)):
        if length != tensor.size(dim):
            tensor = tensor.narrow(dim, begin, length)
    return tensor


def wanted_regions(fqn: str, value: Any, reader: DTensorReader) -> list[Box]:
    """The regions of `value` that a load fills on this rank."""
    if plain_local_tensor(value) is not None:
        return [(region.offsets, region.sizes) for region in reader.regions(fqn, value)]
    if describes_itself(value, "__create_chunk_list__"):
        if not takes_part(fqn, value, reader):
            return []
        chunks = [to_chunk(chunk) for chunk in value.__create_chunk_list__()]
        return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    if not isinstance(value, torch.Tensor | HeldShards):
        raise PlanError(f"{fqn!r} is a {type(value).__name__}, which has no regions to load")
    return [(shard.offsets, shard.sizes) for shard in local_shards(fqn, value, reader)]


def loaded_shards(fqn: str, value: Any, reader: DTensorReader) -> list[LocalShard]:
    """The regions that a load fills on this rank, and their memory."""
    if not describes_itself(value, "__create_chunk_list__"):
        return list(local_shards(fqn, value, reader))
    return [
        LocalShard(
            offsets,
            sizes,
            find_tensor_shard(value, MetadataIndex(fqn, torch.Size(offsets)), reader),
        )
        for offsets, sizes in wanted_regions(fqn, value, reader)
    ]


def find_tensor_shard(
    tensor: Any, index: MetadataIndex, reader: DTensorReader | None = None
) -> torch.Tensor:
    """The local memory of the shard that `index` names."""
    value = tensor
    if describes_itself(value, "__get_tensor_shard__"):
        own: torch.Tensor = value.__get_tensor_shard__(index)
        return own
    if is_sharded(value):
        shards = list(local_shards(index.fqn, value, reader))
        if index.offset is None:
            if len(shards) == 1 and not isinstance(value, ShardedTensor):
                return shards[0].tensor
            raise ValueError(
                f"{index.fqn!r} is a {type(value).__name__} with {len(shards)} shards here, and no "
                "offset was provided to tell which"
            )
        wanted = tuple(index.offset)
        for shard in shards:
            if shard.offsets == wanted:
                return shard.tensor
        raise ValueError(
            f"Could not find shard of {index.fqn!r} at {wanted} on this rank; there are shards at "
            f"{[shard.offsets for shard in shards]}"
        )
    if index.offset is not None and any(index.offset):
        raise ValueError(
            f"{index.fqn!r} is one whole tensor here, not a ShardedTensor or DTensor; there is no "
            f"shard at {tuple(index.offset)}"
        )
    whole: torch.Tensor = value
    return whole


def find_state_dict_object(
    state_dict: STATE_DICT_TYPE, index: MetadataIndex, reader: DTensorReader | None = None
) -> Any:
    """The value that `index` names: for a sharded tensor, the local memory of the shard."""
    if index.fqn not in state_dict:
        raise ValueError(f"there is no FQN {index.fqn!r} in the state dict")
    value = state_dict[index.fqn]
    if isinstance(value, torch.Tensor | HeldShards):
        return find_tensor_shard(value, index, reader)
    if index.offset is not None:
        raise ValueError(
            f"{index.fqn!r} is a {type(value).__name__}, not a ShardedTensor or DTensor; it has no "
            f"part at {tuple(index.offset)}"
        )
    return value

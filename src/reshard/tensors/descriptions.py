"""What a tensor is, in plain values: enough to make one like it in another process.

No class is named and nothing is pickled, so that what another process says can be read safely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard as LocalShard  # type: ignore[attr-defined]
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharding_spec import ShardMetadata  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from reshard.api import UnsupportedLayoutError
from reshard.tensors.shards import is_dense

_PLAIN, _DTENSOR, _SHARDED = "plain", "dtensor", "sharded"
Description = dict[str, Any]


def describe(name: str, tensor: torch.Tensor) -> tuple[Description, list[torch.Tensor]]:
    """A tensor as plain values, and the plain tensors that hold its data on this rank."""
    if isinstance(tensor, DTensor):
        parts, about = [tensor._local_tensor], _describe_dtensor(tensor)
    elif isinstance(tensor, ShardedTensor):
        parts = [shard.tensor for shard in tensor.local_shards()]
        about = _describe_sharded(tensor)
    else:
        parts, about = [tensor], {"kind": _PLAIN}
    for part in parts:
        kind = type(part)
        if kind not in (torch.Tensor, torch.nn.Parameter) or not is_dense(part) or part.is_meta:
            raise UnsupportedLayoutError(
                f"{name!r} holds a {kind.__name__} ({part.layout}, on {part.device}), which cannot "
                "be sent: send the dense tensors that it consists of"
            )
    about["parts"] = [(part.dtype, tuple(part.shape)) for part in parts]
    return about, parts


def parts_of(about: Description) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """The dtypes and shapes of the plain tensors of a described tensor."""
    return [(dtype, tuple(shape)) for dtype, shape in about["parts"]]


def local_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The memory of a tensor on this rank, in the order of its description."""
    if isinstance(tensor, DTensor):
        return [tensor._local_tensor]
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor]


def restore(about: Description, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor as described, in the given memory.

    A mesh without process groups is made for a DTensor: its local tensor can be used, but it takes
    part in no communication.
    """
    if about["kind"] == _DTENSOR:
        return _restore_dtensor(about, parts[0])
    return _restore_sharded(about, parts) if about["kind"] == _SHARDED else parts[0]


def _describe_dtensor(tensor: DTensor) -> Description:
    spec = tensor._spec
    return {
        "kind": _DTENSOR,
        "placements": [_describe_placement(each) for each in spec.placements],
        "shape": tuple(tensor.shape),
        "stride": tuple(tensor.stride()),
        "device": spec.mesh.device_type,
        "mesh": spec.mesh.mesh.tolist(),
        "names": spec.mesh.mesh_dim_names,
    }


def _describe_placement(placement: Any) -> tuple[Any, ...]:
    if isinstance(placement, _StridedShard):
        return "strided", placement.dim, int(placement.split_factor)
    if isinstance(placement, Shard):
        return "shard", placement.dim
    if isinstance(placement, Partial):
        return "partial", placement.reduce_op
    return ("replicate",)


def _placement(kind: str, *details: Any) -> Any:
    if kind == "strided":
        return _StridedShard(details[0], split_factor=details[1])
    known = {"shard": Shard, "partial": Partial, "replicate": Replicate}
    return known[kind](*details)


def _restore_dtensor(about: Description, local: torch.Tensor) -> DTensor:
    mesh = DeviceMesh(
        about["device"],
        torch.tensor(about["mesh"], dtype=torch.int, device="cpu"),
        mesh_dim_names=about["names"],
        _init_backend=False,
    )
    placements = tuple(_placement(*each) for each in about["placements"])
    meta = TensorMeta(torch.Size(about["shape"]), tuple(about["stride"]), local.dtype)
    return DTensor(local, DTensorSpec(mesh, placements, meta), requires_grad=False)  # type: ignore[no-untyped-call]


def _describe_sharded(tensor: ShardedTensor) -> Description:
    metadata = tensor.metadata()
    mine = {tuple(shard.metadata.shard_offsets) for shard in tensor.local_shards()}
    return {
        "kind": _SHARDED,
        "shape": tuple(metadata.size),
        "shards": [
            (tuple(shard.shard_offsets), tuple(shard.shard_sizes), _place(shard))
            for shard in metadata.shards_metadata
        ],
        "mine": [
            number
            for number, shard in enumerate(metadata.shards_metadata)
            if tuple(shard.shard_offsets) in mine
        ],
        "dtype": metadata.tensor_properties.dtype,
    }


def _place(shard: Any) -> str:
    return "" if shard.placement is None else str(shard.placement)


def _restore_sharded(about: Description, parts: Sequence[torch.Tensor]) -> ShardedTensor:
    rank = torch.distributed.get_rank()
    theirs = {about["shards"][number][2].partition("/")[0] for number in about["mine"]}
    shards = []
    for number, (offsets, sizes, place) in enumerate(about["shards"]):
        if number in about["mine"]:
            # What another rank held is held by this one now, and the other way round.
            place = f"rank:{rank}/{parts[0].device.type}"
        elif place.partition("/")[0] == f"rank:{rank}":
            place = f"{min(theirs, default=f'rank:{rank}')}/{place.partition('/')[2]}"
        shards.append(ShardMetadata(list(offsets), list(sizes), place))
    properties = TensorProperties(dtype=about["dtype"])
    metadata = ShardedTensorMetadata(shards, torch.Size(about["shape"]), properties)
    local = [
        LocalShard(part, shards[number]) for number, part in zip(about["mine"], parts, strict=True)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)

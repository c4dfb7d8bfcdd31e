"""Shards without a mesh, for planners of torch's, which know DTensors and ShardedTensors only."""

from __future__ import annotations

from typing import Any

import torch

from reshard.tensors.dcp_types import torch_types
from reshard.tensors.nesting import Walk
from reshard.tensors.shards import HeldShards


class ShardedForTorch(torch.Tensor):
    """A tensor of which this process has some shards, by torch's checkpointable protocol.

    Nothing can be computed with it.
    """

    held: HeldShards

    @staticmethod
    def __new__(cls, held: HeldShards) -> ShardedForTorch:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            dtype=held.dtype,
            requires_grad=held.requires_grad,
            device=torch.device("cpu"),
        )
        made.held = held
        return made

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        kinds, planner = torch_types().metadata, torch_types().planner
        properties = {"dtype": self.held.dtype, "requires_grad": self.held.requires_grad}
        return [
            planner.WriteItem(
                kinds.MetadataIndex(fqn, shard.offsets),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk, kinds.TensorProperties(**properties), self.held.size()
                ),
            )
            for shard, chunk in zip(self.held.shards, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[Any]:
        kind = torch_types().metadata.ChunkStorageMetadata
        return [
            kind(torch.Size(shard.offsets), torch.Size(shard.sizes)) for shard in self.held.shards
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        offsets = tuple(index.offset or ())
        return next(shard.tensor for shard in self.held.shards if shard.offsets == offsets)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{function} needs the whole tensor; this process has shards")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedForTorch({self.held!r})"


def with_shards_for_torch(state_dict: Any) -> Any:
    """A nested state dict for a planner of torch's."""
    return _Replacing().run(state_dict)


class _Replacing(Walk):
    def leaf(self, value: Any) -> Any:
        return ShardedForTorch(value) if type(value) is HeldShards else value

"""One item or chunk at a time, for planners that put their plans together themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from reshard.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from reshard.planner import (
    LoadItemType,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from reshard.plans.local_save_plan import _create_write_items
from reshard.tensors.dcp_types import to_properties
from reshard.tensors.materialise import materialise
from reshard.tensors.shards import DTensorReader, local_shards, wanted_regions


def _init_state_dict(state_dict: dict[str, Any]) -> Any:
    """Give every tensor of `state_dict` that is on the meta device real memory, in place."""
    materialise(state_dict)


def _create_write_item_for_tensor(fqn: str, tensor: torch.Tensor) -> WriteItem:
    chunk = _create_chunk_from_tensor(tensor)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.size())
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.TENSOR, tensor_data=data)


def _create_write_item_for_shard(fqn: str, sharded_tensor: Any, shard_md: Any) -> WriteItem:
    data = _sharded_tensor_metadata(sharded_tensor, shard_md)
    return WriteItem(MetadataIndex(fqn, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _sharded_tensor_metadata(sharded_tensor: Any, shard_md: Any) -> TensorWriteData:
    about = sharded_tensor.metadata()
    properties = to_properties(about.tensor_properties)
    return TensorWriteData(_chunk_for_shard(shard_md), properties, torch.Size(about.size))


def _chunk_for_shard(shard_md: Any) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        torch.Size(shard_md.shard_offsets), torch.Size(shard_md.shard_sizes)
    )


def _get_checkpointable_tensor_write_items(fqn: str, tensor: Any) -> list[WriteItem]:
    """The items of a tensor that says which shards it holds."""
    return _create_write_items(fqn, tensor)


def _create_write_item_for_bytesio(fqn: str, bytes: Any) -> WriteItem:
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


def _create_read_item_for_tensor(
    dest_index: MetadataIndex,
    dest_offsets: Sequence[int],
    storage_index: MetadataIndex,
    storage_offsets: Sequence[int],
    lengths: Sequence[int],
) -> ReadItem:
    places = torch.Size(dest_offsets), torch.Size(storage_offsets)
    return ReadItem(
        LoadItemType.TENSOR, dest_index, places[0], storage_index, places[1], torch.Size(lengths)
    )


def _create_read_item_for_byteio(
    dest_index: MetadataIndex,
    dest_offset: int,
    storage_index: MetadataIndex,
    storage_offset: int,
    length: int,
) -> ReadItem:
    places = torch.Size((dest_offset,)), torch.Size((storage_offset,))
    return ReadItem(
        LoadItemType.BYTE_IO, dest_index, places[0], storage_index, places[1], torch.Size((length,))
    )


def _create_chunk_from_tensor(tensor: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size((0,) * tensor.dim()), tensor.size())


def _create_chunk_list(tensor: torch.Tensor) -> list[ChunkStorageMetadata]:
    """The regions of `tensor` that this rank holds."""
    return [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in wanted_regions("a tensor", tensor, DTensorReader())
    ]


# Plans that stand for cached ones: `usable` is False if the cached plan is meant.


def _compare_save_plans(plan: SavePlan, other_plan: SavePlan) -> bool:
    """Whether two plans write the same chunks under the same names."""

    def described(item: WriteItem) -> Any:
        data = item.tensor_data
        where = None if data is None else (tuple(data.size), data.chunk)
        return item.type, item.index, item.index.index, where

    return (
        plan.usable == other_plan.usable
        and len(plan.items) == len(other_plan.items)
        and all(
            described(one) == described(other)
            for one, other in zip(plan.items, other_plan.items, strict=True)
        )
    )


def _contains_usable_plan(delta_plans: Sequence[SavePlan]) -> bool:
    return any(plan.usable for plan in delta_plans if plan)


def _merge_delta_local_plans(
    cached_plans: Sequence[SavePlan], delta_plans: Sequence[SavePlan]
) -> list[SavePlan]:
    """For each rank its new plan, or the cached one if it says that nothing changed."""
    return [
        cached if delta and not delta.usable else delta
        for cached, delta in zip(cached_plans, delta_plans, strict=True)
    ]


def _create_write_items_for_dtensor(fqn: str, tensor: Any) -> WriteItem:
    """For DTensor, which asks for it by this name when it describes itself."""
    (item,) = _create_write_items(fqn, tensor)
    return item


def _create_chunk_from_dtensor(tensor: Any) -> ChunkStorageMetadata:
    """For DTensor, which asks for it by this name when it describes itself."""
    (shard,) = local_shards("a tensor", tensor)
    return ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))

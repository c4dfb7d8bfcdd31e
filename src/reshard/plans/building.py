"""Building items: from tensors and values to write, from metadata to read.

The plural builders work on columns and make no item objects; `_create_write_items` and
`_create_read_items` do the same for one value, as a list, for planners of users.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.api import CoverageError
from reshard.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from reshard.planner import (
    BytesIOWriteData,
    LoadItemType,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from reshard.planning.columns import SHARD, TENSOR, pad_rows
from reshard.planning.coverage import describe_problem
from reshard.planning.intersection import intersect_groups
from reshard.plans.chunk_lists import ChunkList, chunk_columns, stack_chunks
from reshard.plans.mismatches import matches, missing_keys, shape_mismatch
from reshard.plans.read_items import ReadColumns, ReadItems
from reshard.plans.write_items import PINNED, REQUIRES_GRAD, RowBuilder, WriteItems
from reshard.tensors.dcp_types import to_chunk, to_index, to_properties
from reshard.tensors.materialise import materialise
from reshard.tensors.shards import (
    Box,
    DTensorReader,
    check_memory,
    describes_itself,
    is_dense,
    is_plain,
    is_sharded,
    local_shards,
    plain_local_tensor,
    shards_of_all_ranks,
    takes_part,
    wanted_regions,
)

__all__ = ["create_read_items_for_chunk_list"]


# Writing


def build_write_items(state_dict: Mapping[str, Any], find_ties: bool = False) -> WriteItems:
    """The items that this rank can write, one per shard of each tensor and one per value.

    With `find_ties`, names that share one memory are marked, so that the global plan can
    have it written once.
    """
    builder = RowBuilder()
    reader = DTensorReader()
    rows_at: dict[int, list[tuple[int, torch.Tensor, object]]] | None = {} if find_ties else None
    for fqn, value in state_dict.items():
        _add_value(builder, fqn, value, reader, rows_at)
    return WriteItems(builder.build())


def _add_value(
    builder: RowBuilder,
    fqn: str,
    value: Any,
    reader: DTensorReader,
    rows_at: dict[int, list[tuple[int, torch.Tensor, object]]] | None,
) -> None:
    if not isinstance(fqn, str):
        raise TypeError(
            f"the state dict has the key {fqn!r} of type {type(fqn).__name__}; names are strings"
        )
    local = plain_local_tensor(value)
    if local is not None:
        shape, regions = value.shape, reader.regions(fqn, value)
        flags = _flags(value, local)
        alias = -1
        if rows_at is not None and len(regions) == 1:
            alias = _find_tie(rows_at, local, (tuple(shape), regions), len(builder))
        for region in regions:
            builder.add_region(
                fqn, SHARD, value.dtype, flags, shape, region.offsets, region.sizes, -1, alias
            )
    elif is_plain(value) and is_dense(value):
        shape = value.shape
        alias = -1
        if rows_at is not None:
            alias = _find_tie(rows_at, value, None, len(builder))
        builder.add_region(
            fqn,
            TENSOR,
            value.dtype,
            _flags(value, value),
            shape,
            (0,) * len(shape),
            shape,
            -1,
            alias,
        )
    else:
        for item in _create_write_items(fqn, value, reader):
            builder.add_item(item)


def _flags(tensor: torch.Tensor, local: torch.Tensor) -> int:
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    # Asking is slow, and without an accelerator nothing is pinned.
    if torch.accelerator.is_available() and local.is_pinned():
        flags |= PINNED
    return flags


def _find_tie(
    rows_at: dict[int, list[tuple[int, torch.Tensor, object]]],
    tensor: torch.Tensor,
    layout: object,
    row: int,
) -> int:
    """The row that holds exactly the memory of `tensor` in the same layout, or -1."""
    address = tensor.data_ptr()
    if not address:
        return -1
    seen = rows_at.get(address)
    if seen is None:
        rows_at[address] = [(row, tensor, layout)]
        return -1
    for other_row, other, other_layout in seen:
        if (
            tensor.dtype is other.dtype
            and tensor.shape == other.shape
            and tensor.stride() == other.stride()
            and tensor.device == other.device
            and tensor.is_conj() == other.is_conj()
            and tensor.is_neg() == other.is_neg()
            and layout == other_layout
        ):
            return other_row
    seen.append((row, tensor, layout))
    return -1


def _create_write_items(
    fqn: str, object: Any, reader: DTensorReader | None = None
) -> list[WriteItem]:
    """The items that write one value: one per local shard, or one for a value."""
    if describes_itself(object, "__create_write_items__"):
        if not takes_part(fqn, object, reader):
            return []
        return [_to_item(item) for item in object.__create_write_items__(fqn, object)]
    if not is_sharded(object) and not (isinstance(object, torch.Tensor) and is_dense(object)):
        return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)]
    builder = RowBuilder()
    kind = SHARD if is_sharded(object) else TENSOR
    for shard in local_shards(fqn, object, reader):
        check_memory(fqn, shard.tensor)
        builder.add_region(
            fqn,
            kind,
            object.dtype,
            _flags(object, shard.tensor),
            tuple(object.size()),
            shard.offsets,
            shard.sizes,
        )
    return WriteItems(builder.build()).copy()


def _to_item(item: Any) -> WriteItem:
    """A write item of torch's classes as one of ours."""
    if isinstance(item, WriteItem):
        return item
    tensor, known = item.tensor_data, item.bytes_io_data
    return WriteItem(
        to_index(item.index),
        WriteItemType[item.type.name],
        None if known is None else BytesIOWriteData(known.nbytes),
        None
        if tensor is None
        else TensorWriteData(
            to_chunk(tensor.chunk), to_properties(tensor.properties), torch.Size(tensor.size)
        ),
    )


def _create_default_metadata_only_plan(state_dict: Mapping[str, Any]) -> SavePlan:
    """A plan as if this rank held every shard that it knows of."""
    builder = RowBuilder()
    reader = DTensorReader()
    for fqn, value in state_dict.items():
        everywhere = shards_of_all_ranks(value)
        if everywhere is None:
            _add_value(builder, fqn, value, reader, None)
            continue
        for offsets, sizes in everywhere:
            builder.add_region(fqn, SHARD, value.dtype, 0, tuple(value.size()), offsets, sizes)
    return SavePlan(WriteItems(builder.build()))


# Reading


def build_read_items(
    state_dict: Mapping[str, Any], metadata: Metadata, strict: bool = True
) -> ReadItems:
    """The regions of stored chunks that together fill every tensor of `state_dict`.

    Everything that is wrong is found here, before anything is touched: keys that are
    not stored (if `strict`), other shapes, values in place of tensors, regions that the
    checkpoint does not hold.
    """
    stored = metadata.state_dict_metadata
    if strict and any(fqn not in stored for fqn in state_dict):
        raise missing_keys(state_dict.keys(), stored.keys())
    wishes: list[_Wish] = []
    reader = DTensorReader()
    for fqn, value in state_dict.items():
        entry = stored.get(fqn)
        if entry is not None:
            if not matches(entry, value):
                raise shape_mismatch(state_dict, stored)
            wishes.append(_wish(fqn, entry, value, reader))
    return _plan_reads(wishes, whole=True)


class _Wish(NamedTuple):
    """What is wanted of one stored value: regions of a tensor, or all of a value."""

    fqn: str
    entry: STORAGE_TYPES
    regions: Sequence[Box]

    @property
    def is_value(self) -> bool:
        return isinstance(self.entry, BytesStorageMetadata)


_WHOLE_VALUE: list[Box] = [((), ())]


def _wish(fqn: str, entry: STORAGE_TYPES, value: Any, reader: DTensorReader) -> _Wish:
    if isinstance(entry, BytesStorageMetadata):
        return _Wish(fqn, entry, _WHOLE_VALUE)
    return _Wish(fqn, entry, wanted_regions(fqn, value, reader))


def check_complete(fqn: str, entry: TensorStorageMetadata) -> None:
    """Refuse a tensor that is stored only in part, before memory is made for all of it."""
    offsets, sizes = chunk_columns(entry.chunks, len(entry.size))
    if int(sizes.prod(axis=1).sum()) != math.prod(entry.size):
        raise CoverageError(
            f"the checkpoint does not hold all of {fqn!r} exactly once: "
            f"{describe_problem(tuple(entry.size), offsets, sizes)}"
        )


def _plan_reads(wishes: Sequence[_Wish], whole: bool) -> ReadItems:
    """The reads that fulfil `wishes`; with `whole`, an error if some cannot be fulfilled."""
    # A value takes part as a box without dimensions, stored in one piece.
    point = _NO_DIMENSIONS
    chunk_lists = [point if wish.is_value else wish.entry.chunks for wish in wishes]  # type: ignore[union-attr]
    dims = [0 if wish.is_value else len(wish.entry.size) for wish in wishes]  # type: ignore[union-attr]
    width = max(1, max(dims, default=1))
    chunk_starts, chunk_offsets, chunk_sizes = stack_chunks(chunk_lists, dims, width)
    shard_counts = [len(wish.regions) for wish in wishes]
    shard_starts = np.zeros(len(wishes) + 1, dtype=np.int64)
    np.cumsum(shard_counts, out=shard_starts[1:])
    boxes = [box for wish in wishes for box in wish.regions]
    shard_offsets = pad_rows([offsets for offsets, _ in boxes], width, 0)
    shard_sizes = pad_rows([sizes for _, sizes in boxes], width, 1)
    found = intersect_groups(
        chunk_starts, (chunk_offsets, chunk_sizes), shard_starts, (shard_offsets, shard_sizes)
    )
    wish_of_shard = np.repeat(np.arange(len(wishes)), shard_counts)
    owners = wish_of_shard[found.right]
    if whole:
        missing = np.zeros(len(wishes), dtype=np.int64)
        np.add.at(missing, wish_of_shard, shard_sizes.prod(axis=1))
        np.subtract.at(missing, owners, found.sizes.prod(axis=1))
        for short in np.flatnonzero(missing).tolist():
            raise _not_covered(wishes[short])
    names: dict[str, int] = {}
    dest_names = [names.setdefault(wish.fqn, len(names)) for wish in wishes]
    sources = [wish.entry.alias_of or wish.fqn for wish in wishes]
    storage_names = [names.setdefault(source, len(names)) for source in sources]
    is_value = np.array([wish.is_value for wish in wishes], dtype=np.int64)[owners]
    shards, chunks = shard_offsets[found.right], chunk_offsets[found.left]
    in_order = (shards, found.starts - shards, chunks, found.starts - chunks, found.sizes)
    return ReadItems(
        ReadColumns(
            names=tuple(names),
            dest_names=np.array(dest_names, dtype=np.int64)[owners],
            storage_names=np.array(storage_names, dtype=np.int64)[owners],
            is_value=is_value,
            ndims=np.array(dims, dtype=np.int64)[owners],
            dest_hints=np.where(is_value, -1, found.right - shard_starts[owners]),
            storage_hints=np.where(is_value, -1, found.left - chunk_starts[owners]),
            regions=np.stack(in_order, axis=1),
        )
    )


_NO_DIMENSIONS = ChunkList(np.empty((1, 0), dtype=np.int64), np.empty((1, 0), dtype=np.int64))


def _not_covered(wish: _Wish) -> CoverageError:
    entry = wish.entry
    if isinstance(entry, BytesStorageMetadata):
        return CoverageError(f"the checkpoint does not hold {wish.fqn!r}")
    offsets, sizes = chunk_columns(entry.chunks, len(entry.size))
    return CoverageError(
        f"the checkpoint does not hold all of {wish.fqn!r} exactly once: "
        f"{describe_problem(tuple(entry.size), offsets, sizes)}. It was saved by fewer ranks "
        "than hold it, or is damaged"
    )


def create_read_items_for_chunk_list(
    fqn: str,
    checkpoint_md: TensorStorageMetadata,
    local_chunks: list[ChunkStorageMetadata],
) -> list[ReadItem]:
    """The reads that fill `local_chunks` from the chunks of a stored tensor.

    What the checkpoint does not hold is left out, without an error.
    """
    wanted = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in local_chunks]
    return _plan_reads([_Wish(fqn, checkpoint_md, wanted)], whole=False).copy()


def _create_read_items(fqn: str, md: STORAGE_TYPES, obj: Any) -> list[ReadItem]:
    """The reads that fill one value, laid out as `obj` is."""
    if not matches(md, obj):
        raise shape_mismatch({fqn: obj}, {fqn: md})
    return _plan_reads([_wish(fqn, md, obj, DTensorReader())], whole=False).copy()


def _init_state_dict(state_dict: dict[str, Any]) -> Any:
    """Give every tensor of `state_dict` that is on the meta device real memory, in place."""
    materialise(state_dict)


# One item or chunk at a time, for planners that put their plans together themselves.


def _create_write_item_for_tensor(fqn: str, tensor: torch.Tensor) -> WriteItem:
    chunk = _create_chunk_from_tensor(tensor)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.size())
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.TENSOR, tensor_data=data)


def _create_write_item_for_shard(fqn: str, sharded_tensor: Any, shard_md: Any) -> WriteItem:
    about = sharded_tensor.metadata()
    chunk = ChunkStorageMetadata(
        torch.Size(shard_md.shard_offsets), torch.Size(shard_md.shard_sizes)
    )
    data = TensorWriteData(chunk, to_properties(about.tensor_properties), torch.Size(about.size))
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


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

    def told(item: WriteItem) -> Any:
        data = item.tensor_data
        where = None if data is None else (tuple(data.size), data.chunk)
        return item.type, item.index, item.index.index, where

    return (
        plan.usable == other_plan.usable
        and len(plan.items) == len(other_plan.items)
        and all(
            told(one) == told(other)
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

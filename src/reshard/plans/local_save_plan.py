"""What this rank can write: from the tensors and values of a state dict to items.

`build_write_items` works on columns and makes no item objects; `_create_write_items` does
the same for one value, as a list, for custom planners.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from reshard.metadata import MetadataIndex
from reshard.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType
from reshard.planning.columns import SHARD, TENSOR
from reshard.plans.write_items import PINNED, REQUIRES_GRAD, RowBuilder, WriteItems
from reshard.tensors.dcp_types import to_chunk, to_index, to_properties
from reshard.tensors.shards import (
    DTensorReader,
    check_memory,
    describes_itself,
    global_shape,
    is_dense,
    is_plain,
    is_sharded,
    local_shards,
    plain_local_tensor,
    shards_of_all_ranks,
    takes_part,
)


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
            global_shape(object),
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

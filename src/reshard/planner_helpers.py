"""Building items: from tensors and values to write, from metadata to read.

The plural builders work on columns and make no item objects; `_create_write_items` and
`_create_read_items` do the same for one value, as a list, for planners of users.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.api import CoverageError, MissingKeyError, ShapeMismatchError
from reshard.columnar import (
    PINNED,
    REQUIRES_GRAD,
    ReadColumns,
    ReadItems,
    RowBuilder,
    WriteItems,
    chunk_columns,
)
from reshard.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from reshard.planner import (
    BytesIOWriteData,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from reshard.planning.columns import SHARD, TENSOR, Ints
from reshard.planning.coverage import describe_problem
from reshard.planning.intersection import intersect
from reshard.tensors.foreign import to_chunk, to_index, to_properties
from reshard.tensors.materialise import materialise
from reshard.tensors.shards import (
    Box,
    DTensorReader,
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
    if not isinstance(object, torch.Tensor) or not (is_sharded(object) or is_dense(object)):
        return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)]
    builder = RowBuilder()
    kind = SHARD if is_sharded(object) else TENSOR
    for shard in local_shards(fqn, object, reader):
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
    missing = [fqn for fqn in state_dict if fqn not in stored]
    if missing and strict:
        raise MissingKeyError(describe_missing(missing, stored))
    segments: list[_Segment] = []
    reader = DTensorReader()
    for fqn, value in state_dict.items():
        entry = stored.get(fqn)
        if entry is not None:
            _check_match(fqn, entry, value)
            segments.append(_plan_one(fqn, entry, value, reader))
    return ReadItems(_join(segments))


def describe_missing(missing: Sequence[str], stored: Iterable[str]) -> str:
    text = f"Missing key in checkpoint state_dict: {missing[0]}."
    close = difflib.get_close_matches(missing[0], [*stored][:10_000], n=3)
    if close:
        text += f" The checkpoint has {', '.join(map(repr, close))}."
    if len(missing) > 1:
        shown = ", ".join(map(repr, missing[1:6]))
        text += f" {len(missing) - 1} more keys are missing, such as {shown}."
    return text + " Load with allow_partial_load=True to leave missing keys as they are."


def _check_match(fqn: str, entry: STORAGE_TYPES, value: Any) -> None:
    if isinstance(entry, BytesStorageMetadata):
        return
    if not isinstance(value, torch.Tensor) and not describes_itself(value, "__create_chunk_list__"):
        raise ShapeMismatchError(
            f"{fqn!r} is stored as a tensor of shape {tuple(entry.size)}, but the state dict has "
            f"a {type(value).__name__} in its place. Put a tensor of that shape there"
        )
    size = getattr(value, "size", None)
    if callable(size) and tuple(size()) != tuple(entry.size):
        raise ShapeMismatchError(
            f"Size mismatch between saved {tuple(entry.size)} and current: {tuple(size())} for "
            f"{fqn!r}. Build the model with the shape that was saved, or leave the key out"
        )


class _Segment(NamedTuple):
    """The rows of one value; `regions` is (rows, 5, dims) as in `ReadColumns`."""

    fqn: str
    source: str
    regions: Ints
    shard_ids: Ints | Sequence[int]
    chunk_ids: Ints | Sequence[int]
    elements: int = 0
    is_value: bool = False


_VALUE_REGION = np.zeros((1, 5, 0), dtype=np.int64)
_FEW_CHUNKS = 16


def _plan_one(fqn: str, entry: STORAGE_TYPES, value: Any, reader: DTensorReader) -> _Segment:
    if isinstance(entry, BytesStorageMetadata):
        source = entry.alias_of or fqn
        return _Segment(fqn, source, _VALUE_REGION, (-1,), (-1,), is_value=True)
    wanted = wanted_regions(fqn, value, reader)
    segment = _plan_tensor(fqn, entry, wanted)
    if segment.elements != sum(math.prod(sizes) for _, sizes in wanted):
        offsets, sizes = chunk_columns(entry.chunks, len(entry.size))
        raise CoverageError(
            f"the checkpoint does not hold all of {fqn!r} exactly once: "
            f"{describe_problem(tuple(entry.size), offsets, sizes)}. It was saved by fewer ranks "
            "than hold it, or is damaged"
        )
    return segment


def check_complete(fqn: str, entry: TensorStorageMetadata) -> None:
    """Refuse a tensor that is stored only in part, before memory is made for all of it."""
    offsets, sizes = chunk_columns(entry.chunks, len(entry.size))
    if int(sizes.prod(axis=1).sum()) != math.prod(entry.size):
        raise CoverageError(
            f"the checkpoint does not hold all of {fqn!r} exactly once: "
            f"{describe_problem(tuple(entry.size), offsets, sizes)}"
        )


def _plan_tensor(fqn: str, entry: TensorStorageMetadata, wanted: Sequence[Box]) -> _Segment:
    source, dims = entry.alias_of or fqn, len(entry.size)
    offsets, sizes = chunk_columns(entry.chunks, dims)
    if len(wanted) == 1 and len(offsets) <= _FEW_CHUNKS:
        # A few chunks are faster to go through than to put into arrays.
        return _plan_region(fqn, source, wanted[0], offsets.tolist(), sizes.tolist())
    shape = (len(wanted), dims)
    wanted_offsets = np.array([o for o, _ in wanted], dtype=np.int64).reshape(shape)
    wanted_sizes = np.array([s for _, s in wanted], dtype=np.int64).reshape(shape)
    found = intersect(offsets, sizes, wanted_offsets, wanted_sizes)
    shards, chunks = wanted_offsets[found.right], offsets[found.left]
    regions = np.stack(
        (shards, found.starts - shards, chunks, found.starts - chunks, found.sizes), axis=1
    )
    elements = int(found.sizes.prod(axis=1).sum())
    return _Segment(fqn, source, regions, found.right, found.left, elements)


def _plan_region(
    fqn: str,
    source: str,
    wanted: Box,
    offsets: Sequence[Sequence[int]],
    sizes: Sequence[Sequence[int]],
) -> _Segment:
    """One wanted region against a few stored chunks."""
    begin, extent = wanted
    rows, ids, elements = [], [], 0
    for number, (low, size) in enumerate(zip(offsets, sizes, strict=True)):
        starts = [max(a, b) for a, b in zip(low, begin, strict=True)]
        lengths = [
            min(a + n, b + m) - c
            for a, n, b, m, c in zip(low, size, begin, extent, starts, strict=True)
        ]
        if all(length > 0 for length in lengths):
            in_shard = [c - b for c, b in zip(starts, begin, strict=True)]
            in_chunk = [c - a for c, a in zip(starts, low, strict=True)]
            rows.append((begin, in_shard, low, in_chunk, lengths))
            ids.append(number)
            elements += math.prod(lengths)
    regions = np.array(rows, dtype=np.int64).reshape(len(rows), 5, len(begin))
    return _Segment(fqn, source, regions, [0] * len(ids), ids, elements)


def _join(segments: Sequence[_Segment]) -> ReadColumns:
    names: dict[str, int] = {}
    counts = [len(segment.regions) for segment in segments]
    rows = sum(counts)
    dims = [segment.regions.shape[2] for segment in segments]
    regions = np.zeros((rows, 5, max(1, max(dims, default=1))), dtype=np.int64)
    shard_ids, chunk_ids = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    position = 0
    for segment, count, width in zip(segments, counts, dims, strict=True):
        end = position + count
        regions[position:end, :, :width] = segment.regions
        shard_ids[position:end] = segment.shard_ids
        chunk_ids[position:end] = segment.chunk_ids
        position = end

    def spread(values: Iterable[int]) -> Ints:
        return np.repeat(np.array([*values], dtype=np.int64), counts)

    dest_names = spread(names.setdefault(segment.fqn, len(names)) for segment in segments)
    storage_names = spread(names.setdefault(segment.source, len(names)) for segment in segments)
    return ReadColumns(
        names=tuple(names),
        dest_names=dest_names,
        storage_names=storage_names,
        is_value=spread(segment.is_value for segment in segments),
        ndims=spread(dims),
        dest_hints=shard_ids,
        storage_hints=chunk_ids,
        regions=regions,
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
    return ReadItems(_join([_plan_tensor(fqn, checkpoint_md, wanted)])).copy()


def _create_read_items(fqn: str, md: STORAGE_TYPES, obj: Any) -> list[ReadItem]:
    """The reads that fill one value, laid out as `obj` is."""
    reader = DTensorReader()
    if isinstance(md, BytesStorageMetadata):
        return ReadItems(_join([_plan_one(fqn, md, obj, reader)])).copy()
    _check_match(fqn, md, obj)
    return ReadItems(_join([_plan_tensor(fqn, md, wanted_regions(fqn, obj, reader))])).copy()


def _init_state_dict(state_dict: dict[str, Any]) -> Any:
    """Give every tensor of `state_dict` that is on the meta device real memory, in place."""
    materialise(state_dict)

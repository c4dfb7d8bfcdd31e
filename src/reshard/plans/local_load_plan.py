"""What this rank reads: which regions of stored chunks fill the tensors of a state dict.

`build_read_items` works on columns; `_create_read_items` does the same for one value, as a
list, for custom planners.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.api import CoverageError
from reshard.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from reshard.planner import ReadItem
from reshard.planning.columns import ChunkTable, Ints, pad_rows
from reshard.planning.coverage import describe_problem
from reshard.planning.intersection import intersect_groups
from reshard.plans.entries import Located, locate
from reshard.plans.mismatches import matches, missing_keys, shape_mismatch
from reshard.plans.read_items import ReadColumns, ReadItems
from reshard.tensors.shards import (
    Box,
    DTensorReader,
    is_dense,
    is_plain,
    plain_local_tensor,
    wanted_regions,
)


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
    wanted = {fqn: stored[fqn] for fqn in state_dict if fqn in stored}
    located = locate(wanted)
    items = _plan_reads(located, _regions(located, state_dict), whole=True)
    items.casts = located.casts_into(state_dict)
    return items


def find_tied(wanted: Mapping[str, Any], stored: Container[str]) -> dict[str, str]:
    """Names that are not stored, but have exactly the memory of one that is: the latter.

    Tied weights are stored under one of their names; to fill that is to fill them all. A tensor
    of which this rank holds nothing stands for itself: if it is missing, those that hold it say so.
    """
    missing = [name for name in wanted if name not in stored]
    if not missing:
        return {}
    reader = DTensorReader()
    names = {
        memory: name
        for name, value in wanted.items()
        if name in stored and (memory := _memory_of(name, value, reader)) is not None
    }
    tied = {}
    for name in missing:
        memory = _memory_of(name, wanted[name], reader)
        if memory in names:
            tied[name] = names[memory]
        elif memory == _NOTHING:
            tied[name] = name
    return tied


_NOTHING = ("nothing",)


def _memory_of(name: str, value: Any, reader: DTensorReader) -> tuple[Any, ...] | None:
    """What two tensors have in common that are filled together; None for what has no memory."""
    local = value if is_plain(value) else plain_local_tensor(value)
    if local is None or not is_dense(local):
        return None
    if local is not value and value.numel() and not local.numel():
        return _NOTHING
    address = id(value) if local.is_meta else local.data_ptr()
    if not address or not local.numel():
        return None
    layout = None if local is value else (tuple(value.shape), reader.regions(name, value))
    form = local.device, local.dtype, local.shape, local.stride(), local.is_conj(), local.is_neg()
    return (address, layout, *form)


def _regions(located: Located, state_dict: Mapping[str, Any]) -> list[Sequence[Box] | None]:
    """What is wanted of each tensor: None for all of it, and for values."""
    reader = DTensorReader()
    regions: list[Sequence[Box] | None] = []
    shapes = list(located.shapes())
    for fqn, shape in zip(located.names, shapes, strict=True):
        value = state_dict[fqn]
        if shape is None or (is_plain(value) and value.shape == shape):
            regions.append(None)
        else:
            if not matches(shape, value):
                raise shape_mismatch(state_dict, dict(zip(located.names, shapes, strict=True)))
            regions.append(wanted_regions(fqn, value, reader))
    return regions


def check_complete(located: Located) -> None:
    """Refuse tensors that are stored only in part, before memory is made for all of them."""
    starts, rows = _chunk_rows(located.table, located.tensors)
    volumes = _take(located.table.sizes, rows, 1).prod(axis=1)
    stored = np.diff(np.concatenate(([0], np.cumsum(volumes)))[starts])
    wanted = _take(located.table.shapes, located.tensors, 1).prod(axis=1)
    for short in np.flatnonzero(stored != wanted).tolist():
        raise _not_covered(located, short)


def _plan_reads(
    located: Located, regions: Sequence[Sequence[Box] | None], whole: bool
) -> ReadItems:
    """The reads that fill `regions`; with `whole`, an error if some cannot be filled."""
    table, tensors = located.table, located.tensors
    chunk_starts, rows = _chunk_rows(table, tensors)
    chunk_offsets, chunk_sizes = _take(table.offsets, rows, 0), _take(table.sizes, rows, 1)
    shard_starts, shard_offsets, shard_sizes = _shards(table, tensors, regions)
    found = intersect_groups(
        chunk_starts, (chunk_offsets, chunk_sizes), shard_starts, (shard_offsets, shard_sizes)
    )
    owner_of_shard = np.repeat(np.arange(len(tensors)), np.diff(shard_starts))
    owners = owner_of_shard[found.right]
    if whole:
        lacking = np.zeros(len(tensors), dtype=np.int64)
        np.add.at(lacking, owner_of_shard, shard_sizes.prod(axis=1))
        np.subtract.at(lacking, owners, found.sizes.prod(axis=1))
        for short in np.flatnonzero(lacking).tolist():
            raise _not_covered(located, short)
    names = dict.fromkeys((*located.names, *located.storage_names))
    name_ids = {name: position for position, name in enumerate(names)}
    storage_names = np.fromiter(map(name_ids.__getitem__, located.storage_names), np.int64)
    is_value = tensors[owners] < 0
    shards, chunks = shard_offsets[found.right], chunk_offsets[found.left]
    in_order = (shards, found.starts - shards, chunks, found.starts - chunks, found.sizes)
    return ReadItems(
        ReadColumns(
            names=tuple(names),
            # Names that are wanted come first.
            dest_names=owners,
            storage_names=storage_names[owners],
            is_value=is_value.astype(np.int64),
            ndims=_take(table.ndims, tensors, 0)[owners],
            dest_hints=np.where(is_value, -1, found.right - shard_starts[owners]),
            storage_hints=np.where(is_value, -1, found.left - chunk_starts[owners]),
            regions=np.stack(in_order, axis=1),
            table=table,
            chunk_rows=rows[found.left],
        )
    )


def _chunk_rows(table: ChunkTable, tensors: Ints) -> tuple[Ints, Ints]:
    """The chunks of each tensor: where they start, and their rows in the table.

    A value takes part as a box without dimensions, stored in one piece; its row is -1.
    """
    sources = _take(table.sources, tensors, -1)
    firsts = _take(table.starts, sources, -1)
    counts = _take(np.diff(table.starts), sources, 1)
    starts = _starts(counts)
    return starts, np.repeat(firsts - starts[:-1], counts) + np.arange(int(starts[-1]))


def _shards(
    table: ChunkTable, tensors: Ints, regions: Sequence[Sequence[Box] | None]
) -> tuple[Ints, Ints, Ints]:
    """The regions of each tensor: where they start, their offsets and sizes."""
    counts = np.array([1 if boxes is None else len(boxes) for boxes in regions], dtype=np.int64)
    starts = _starts(counts)
    is_whole = np.repeat(np.array([boxes is None for boxes in regions], dtype=bool), counts)
    sizes = _take(table.shapes, np.repeat(tensors, counts), 1)
    offsets = np.zeros_like(sizes)
    if not is_whole.all():
        given = [box for boxes in regions if boxes is not None for box in boxes]
        width = sizes.shape[1]
        offsets[~is_whole] = pad_rows([offset for offset, _ in given], width, 0)
        sizes[~is_whole] = pad_rows([size for _, size in given], width, 1)
    return starts, offsets, sizes


def _starts(counts: Ints) -> Ints:
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _take(column: Ints, rows: Ints, fill: int) -> Ints:
    """Some rows of a column, and `fill` for rows below 0."""
    real = rows >= 0
    if real.all():
        return column[rows]
    taken = np.full((len(rows), *column.shape[1:]), fill, dtype=np.int64)
    taken[real] = column[rows[real]]
    return taken


def _not_covered(located: Located, position: int) -> CoverageError:
    table, tensor = located.table, int(located.tensors[position])
    dims = int(table.ndims[tensor])
    offsets, sizes = table.of(int(table.sources[tensor]))
    shape = table.shapes[tensor, :dims].tolist()
    return CoverageError(
        f"the checkpoint does not hold all of {located.names[position]!r} exactly once: "
        f"{describe_problem(shape, offsets[:, :dims], sizes[:, :dims])}. It was saved by fewer "
        "ranks than hold it, or is damaged"
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
    return _plan_reads(locate({fqn: checkpoint_md}), [wanted], whole=False).copy()


def _create_read_items(fqn: str, md: STORAGE_TYPES, obj: Any) -> list[ReadItem]:
    """The reads that fill one value, laid out as `obj` is."""
    located = locate({fqn: md})
    return _plan_reads(located, _regions(located, {fqn: obj}), whole=False).copy()

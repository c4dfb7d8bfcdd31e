"""From the plans of all ranks to one global plan: plans in, plans and metadata out.

Puts the pure pieces of `planning` together for `SavePlan` and `Metadata`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from reshard.api import CoverageError
from reshard.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from reshard.planner import SavePlan
from reshard.planning.columns import Bools, Ints, pad_rows
from reshard.planning.coverage import Chunks
from reshard.planning.global_plan import (
    SortedChunks,
    Table,
    check_coverage,
    check_table,
    dedup,
    list_chunks,
    resolve_aliases,
    stack,
)
from reshard.planning.packing import pack_placement, pack_schema
from reshard.plans.chunk_lists import ChunkList, stack_chunks
from reshard.plans.write_items import WriteItems, properties_of, write_columns
from reshard.tensors.paths import PathMap, StatePath

__all__ = [
    "FINGERPRINT_BYTES",
    "ChunkTable",
    "chunk_table",
    "combine_plans",
    "dedup_save_plans",
    "dedup_tensors",
    "make_global_plan",
    "merge_paths",
    "plan_fingerprint",
    "validate",
]


def make_global_plan(
    all_plans: Sequence[SavePlan], to_lowest_rank: bool = False
) -> tuple[list[SavePlan], Metadata]:
    """Each chunk on one rank, memory under several names once, and proof that all is there."""
    table = stack([write_columns(plan.items) for plan in all_plans])
    aliases = resolve_aliases(table)
    keep = dedup(table, to_lowest_rank, leave_out=list(aliases))
    chunks = list_chunks(table, keep)
    errors = check_table(table, chunks, leave_out=list(aliases))
    if errors:
        raise CoverageError(
            f"Failed to validate global plan: {'; '.join(errors)}. Give the tensor the same shape, "
            "mesh and placements on all ranks, and save from all ranks that hold a part of it"
        )
    return _answer(all_plans, table, keep, chunks, aliases)


def combine_plans(
    all_plans: Sequence[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """The metadata of plans that are deduplicated already."""
    table = stack([write_columns(plan.items) for plan in all_plans])
    keep = np.ones(len(table.name_ids), dtype=bool)
    return _answer(all_plans, table, keep, list_chunks(table, keep), {}, rewrite_index_hints)


def dedup_save_plans(
    all_plans: list[SavePlan], save_to_lowest_rank: bool = False
) -> list[SavePlan]:
    """The plans with each chunk left on one rank: balanced, or the lowest that has it."""
    table = stack([write_columns(plan.items) for plan in all_plans])
    keep = dedup(table, save_to_lowest_rank)
    return [
        _select(plan, rows, None)
        for plan, rows in zip(all_plans, _rows_by_rank(table, keep), strict=True)
    ]


def dedup_tensors(all_plans: list[SavePlan]) -> list[SavePlan]:
    """The plans with each chunk left on the first rank that has it."""
    return dedup_save_plans(all_plans, save_to_lowest_rank=True)


def _answer(
    all_plans: Sequence[SavePlan],
    table: Table,
    keep: Bools,
    chunks: SortedChunks,
    aliases: Mapping[int, int],
    rewrite_index_hints: bool = True,
) -> tuple[list[SavePlan], Metadata]:
    rows, starts = chunks.rows, chunks.starts
    hints = np.full(len(table.name_ids), -1, dtype=np.int64)
    hints[rows] = np.arange(len(rows)) - np.repeat(starts[:-1], np.diff(starts))
    if table.kinds.any():
        hints[table.kinds[table.name_ids] > 0] = -1
    plans = [
        _select(plan, chosen, hints[table.plan_starts[rank] + chosen])
        if rewrite_index_hints
        else _select(plan, chosen, None)
        for rank, (plan, chosen) in enumerate(
            zip(all_plans, _rows_by_rank(table, keep), strict=True)
        )
    ]
    return plans, Metadata(_describe(table, chunks, aliases))


def _rows_by_rank(table: Table, keep: Bools) -> list[Ints]:
    bounds = table.plan_starts.tolist()
    return [np.flatnonzero(keep[begin:end]) for begin, end in itertools.pairwise(bounds)]


def _select(plan: SavePlan, rows: Ints, hints: Ints | None) -> SavePlan:
    """`plan` with only the given items; the items themselves stay if they are objects."""
    items = plan.items
    if isinstance(items, WriteItems) and items.untouched and items.rows is None:
        return dataclasses.replace(plan, items=WriteItems(items.base, rows, hints))
    if isinstance(items, WriteItems) and items.untouched:
        return dataclasses.replace(plan, items=WriteItems(items.columns(), rows, hints))
    chosen = [items[row] for row in rows.tolist()]
    if hints is not None:
        chosen = [
            item
            if hint < 0
            else dataclasses.replace(
                item, index=MetadataIndex(item.index.fqn, item.index.offset, hint)
            )
            for item, hint in zip(chosen, hints.tolist(), strict=True)
        ]
    return dataclasses.replace(plan, items=chosen)


def _describe(
    table: Table, chunks: SortedChunks, aliases: Mapping[int, int]
) -> dict[str, STORAGE_TYPES]:
    starts = chunks.starts.tolist()
    described: dict[str, STORAGE_TYPES] = {}
    for name_id, name in enumerate(table.names):
        if table.kinds[name_id]:
            described[name] = BytesStorageMetadata()
            continue
        plan, row = table.row_in_plan(int(table.first_rows[name_id]))
        dims = int(plan.schema.ndims[row])
        source = aliases.get(name_id, name_id)
        own = slice(starts[source], starts[source + 1])
        described[name] = TensorStorageMetadata(
            properties_of(plan.schema, row),
            torch.Size(table.shapes[name_id, :dims].tolist()),
            ChunkList(table.offsets, table.sizes, chunks.rows[own], dims),
            table.names[source] if source != name_id else None,
        )
    return described


def merge_paths(all_plans: Sequence[SavePlan]) -> dict[str, StatePath]:
    merged = PathMap()
    for paths in {id(plan.planner_data): plan.planner_data for plan in all_plans}.values():
        if isinstance(paths, Mapping):
            merged.add(paths)
    return merged


def validate(metadata: Metadata, whole: bool) -> list[str]:
    """What is wrong with the chunks of each tensor; an empty list if nothing is.

    Without `whole`, a tensor may be there only in part.
    """
    table = chunk_table(metadata)
    return check_coverage(table.names, table.chunks, table.ndims, whole)


class ChunkTable(NamedTuple):
    """The chunks of all tensors of a checkpoint as columns."""

    names: list[str]
    ndims: Ints
    chunks: Chunks


def chunk_table(metadata: Metadata) -> ChunkTable:
    """The columns of a checkpoint's chunks. Tensors stored under another name are left out."""
    tensors = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and entry.alias_of is None
    }
    ndims = [len(entry.size) for entry in tensors.values()]
    width = max(1, max(ndims, default=1))
    lists = [entry.chunks for entry in tensors.values()]
    starts, offsets, sizes = stack_chunks(lists, ndims, width)
    shapes = pad_rows([tuple(entry.size) for entry in tensors.values()], width, 1)
    return ChunkTable(
        list(tensors),
        np.array(ndims, dtype=np.int64),
        Chunks(shapes, starts, offsets, sizes),
    )


FINGERPRINT_BYTES = 16


def plan_fingerprint(plan: SavePlan) -> bytes:
    """16 bytes that are the same for two plans only if their items and names are."""
    columns = write_columns(plan.items)
    digest = xxhash.xxh3_128(pack_schema(columns.schema))
    digest.update(pack_placement(columns))
    if isinstance(plan.planner_data, PathMap):
        paths = plan.planner_data
        told = repr([*paths.items(), paths.empties]).encode()
        digest.update(paths.pack() if paths.is_regular else told)
    return digest.digest()

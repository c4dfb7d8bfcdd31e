"""From the plans of all ranks to one global plan: plans in, plans and metadata out.

Puts the pure pieces of `planning` together for `SavePlan` and `Metadata`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from reshard.api import CoverageError, UnsupportedLayoutError
from reshard.metadata import Metadata, MetadataIndex
from reshard.planner import SavePlan
from reshard.planning.columns import Bools, ChunkTable, Ints
from reshard.planning.global_plan import (
    PlanTable,
    check_coverage,
    check_planned,
    dedup,
    list_chunks,
    resolve_aliases,
    stack,
)
from reshard.planning.packing import pack_regions, pack_schema
from reshard.plans.entries import chunk_table, make_entries
from reshard.plans.write_items import NO_OFFSET, WriteItems, untouched_items, write_columns
from reshard.tensors.composites import KIND
from reshard.tensors.paths import PathMap, StatePath


def make_global_plan(
    all_plans: Sequence[SavePlan], to_lowest_rank: bool = False
) -> tuple[list[SavePlan], Metadata]:
    """Each chunk on one rank, memory under several names once, and proof that all is there."""
    table = stack([write_columns(plan.items) for plan in all_plans])
    aliases = resolve_aliases(table)
    keep = dedup(table, to_lowest_rank, leave_out=list(aliases))
    rows, chunks = list_chunks(table, keep, aliases)
    errors = check_planned(table, rows, chunks)
    if errors:
        held = _without_hollow(all_plans, table)
        if held is not None:
            return make_global_plan(held, to_lowest_rank)
        raise CoverageError(
            f"Failed to validate global plan: {'; '.join(errors)}. Give the tensor the same shape, "
            "mesh and placements on all ranks, and save from all ranks that hold a part of it"
        )
    return _answer(all_plans, table, keep, rows, chunks)


def _without_hollow(all_plans: Sequence[SavePlan], table: PlanTable) -> list[SavePlan] | None:
    """The plans without tensors that consist of others wherever there is something of them.

    None if there are none. A class that quantizes leaves alone what is small, such as the
    shards of ranks that hold nothing.
    """
    known = set(table.names)
    twofold = [n for n, name in enumerate(table.names) if f"{name}.{KIND}" in known]
    if not twofold:
        return None
    holds = np.zeros(len(table.names), dtype=bool)
    holds[table.name_ids[(table.sizes > 0).all(axis=1)]] = True
    for name in twofold:
        if holds[name]:
            raise UnsupportedLayoutError(
                f"{table.names[name]!r} consists of other tensors on some ranks, but not on "
                "others: an optimizer that quantizes does so only where a shard has enough "
                "elements, in whole blocks. Shard its parameter evenly, or leave it unsharded"
            )
    keep = ~np.isin(table.name_ids, twofold)
    return [
        _select(plan, rows, None)
        for plan, rows in zip(all_plans, _rows_by_rank(table, keep), strict=True)
    ]


def combine_plans(
    all_plans: Sequence[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """The metadata of plans that are deduplicated already."""
    table = stack([write_columns(plan.items) for plan in all_plans])
    keep = np.ones(len(table.name_ids), dtype=bool)
    return _answer(all_plans, table, keep, *list_chunks(table, keep), rewrite_index_hints)


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
    table: PlanTable,
    keep: Bools,
    rows: Ints,
    chunks: ChunkTable,
    rewrite_index_hints: bool = True,
) -> tuple[list[SavePlan], Metadata]:
    """The plans with the items to keep, and the metadata of `chunks`, which are `rows`."""
    hints = np.full(len(table.name_ids), -1, dtype=np.int64)
    hints[rows] = np.arange(len(rows)) - np.repeat(chunks.starts[:-1], np.diff(chunks.starts))
    plans = [
        _select(
            plan, chosen, hints[table.plan_starts[rank] + chosen] if rewrite_index_hints else None
        )
        for rank, (plan, chosen) in enumerate(
            zip(all_plans, _rows_by_rank(table, keep), strict=True)
        )
    ]
    if (chunks.flags & NO_OFFSET).any():
        chunks = dataclasses.replace(chunks, flags=chunks.flags & ~NO_OFFSET)
    values = [table.names[name_id] for name_id in np.flatnonzero(table.is_value).tolist()]
    return plans, Metadata(make_entries(chunks, values, table.names if values else ()))


def _rows_by_rank(table: PlanTable, keep: Bools) -> list[Ints]:
    bounds = table.plan_starts.tolist()
    return [np.flatnonzero(keep[begin:end]) for begin, end in itertools.pairwise(bounds)]


def _select(plan: SavePlan, rows: Ints, hints: Ints | None) -> SavePlan:
    """`plan` with only the given items; the items themselves stay if they are objects."""
    items = plan.items
    columns = untouched_items(items)
    if columns is not None:
        base = columns.base if columns.rows is None else columns.columns()
        return dataclasses.replace(plan, items=WriteItems(base, rows, hints))
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
    return check_coverage(chunk_table(metadata), whole)


FINGERPRINT_BYTES = 16


def plan_fingerprint(plan: SavePlan) -> bytes:
    """16 bytes that are the same for two plans only if their items and names are."""
    columns = write_columns(plan.items)
    digest = xxhash.xxh3_128(pack_schema(columns.schema))
    digest.update(pack_regions(columns))
    if isinstance(plan.planner_data, PathMap):
        paths = plan.planner_data
        spelled = repr([*paths.items(), paths.empties]).encode()
        digest.update(paths.pack() if paths.is_regular else spelled)
    return digest.digest()

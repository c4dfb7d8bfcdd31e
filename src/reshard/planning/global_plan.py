"""The plans of all ranks as one table: agreement, one writer per chunk, the chunk list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reshard.api import CoverageError, PlanError, ReplicaConflictError
from reshard.planning.balance import choose_holders
from reshard.planning.columns import (
    BYTES,
    DTYPE_ITEMSIZES,
    DTYPES,
    Bools,
    Ints,
    Schema,
    WriteColumns,
    widen,
)
from reshard.planning.coverage import (
    Chunks,
    describe_problem,
    find_overlapped,
    find_untiled,
    find_untiled_rows,
    out_of_bounds,
    survey,
)
from reshard.planning.keys import rank_points

__all__ = [
    "SortedChunks",
    "Table",
    "check_coverage",
    "check_table",
    "dedup",
    "list_chunks",
    "resolve_aliases",
    "stack",
]

_MOST_REPORTED = 5


@dataclass(frozen=True, eq=False)
class Table:
    """The items of all ranks, rank after rank.

    `names` holds each FQN once, in order of first appearance; `name_ids` refer to it.
    `first_rows` is for each name the row that mentions it first: what that row says
    about the tensor, all rows say. `order` sorts rows by name, position and rank; equal
    `sorted_keys` are the same chunk. `distinct` says that no two are equal.
    """

    names: list[str]
    plans: Sequence[WriteColumns]
    plan_starts: Ints
    first_rows: Ints
    name_ids: Ints
    offsets: Ints
    sizes: Ints
    kinds: Ints
    dtypes: Ints
    shapes: Ints
    order: Ints
    sorted_keys: Ints
    distinct: bool
    cut_dims: Bools

    @property
    def ranks(self) -> Ints:
        return np.repeat(np.arange(len(self.plans)), np.diff(self.plan_starts))

    def rank_of(self, row: int) -> int:
        return int(np.searchsorted(self.plan_starts, row, side="right")) - 1

    def row_in_plan(self, row: int) -> tuple[WriteColumns, int]:
        rank = self.rank_of(row)
        return self.plans[rank], row - int(self.plan_starts[rank])


def stack(plans: Sequence[WriteColumns]) -> Table:
    """One table of all plans, once it is sure that they speak of the same things."""
    names: dict[str, int] = {}
    ids_of: dict[int, Ints] = {}
    for plan in plans:
        schema = plan.schema
        if id(schema) not in ids_of:
            ids_of[id(schema)] = np.fromiter(
                (names.setdefault(name, len(names)) for name in schema.names),
                dtype=np.int64,
                count=len(schema),
            )
    counts = np.fromiter((len(plan) for plan in plans), dtype=np.int64, count=len(plans))
    plan_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    width = max((plan.offsets.shape[1] for plan in plans), default=1)
    name_ids = _concatenate([ids_of[id(plan.schema)] for plan in plans])
    offsets = _concatenate([widen(plan.offsets, width, 0) for plan in plans], width)
    sizes = _concatenate([widen(plan.sizes, width, 1) for plan in plans], width)
    kinds, dtypes, shapes, told_by, told_in = _agree(plans, ids_of, len(names), width)

    bad, cut_dims = survey(shapes, offsets, sizes, name_ids)
    outside = np.flatnonzero(bad)
    if len(outside):
        raise CoverageError(_describe_outside(plans, plan_starts, int(outside[0])))
    keys = rank_points(name_ids, offsets, shapes)
    order = _sorted_rows(name_ids, keys, len(names))
    sorted_keys = keys[order]
    distinct = not (sorted_keys[1:] == sorted_keys[:-1]).any()
    return Table(
        list(names), plans, plan_starts, plan_starts[told_by] + told_in, name_ids, offsets,
        sizes, kinds, dtypes, shapes, order, sorted_keys, distinct, cut_dims,
    )  # fmt: skip


def _sorted_rows(name_ids: Ints, keys: Ints, n_names: int) -> Ints:
    """Rows by key, and by rank among equal keys."""
    if n_names >= 1 << 16:
        return np.argsort(keys, kind="stable")
    # By name first, which is a radix sort for small numbers. Ranks mostly hold ascending
    # parts, so that what is left is nearly sorted.
    by_name = np.argsort(name_ids.astype(np.uint16), kind="stable")
    return np.asarray(by_name[np.argsort(keys[by_name], kind="stable")])


def _concatenate(parts: list[Ints], width: int | None = None) -> Ints:
    if parts:
        return np.concatenate(parts)
    return np.zeros((0,) if width is None else (0, width), dtype=np.int64)


def _agree(
    plans: Sequence[WriteColumns], ids_of: dict[int, Ints], n_names: int, width: int
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Kind, dtype and shape of each name, which must be the same on all ranks.

    Also which rank was the first to say so, and in which row of its plan.
    """
    distinct: dict[int, tuple[Schema, int]] = {}
    for rank, plan in enumerate(plans):
        distinct.setdefault(id(plan.schema), (plan.schema, rank))
    kinds = np.full(n_names, -1, dtype=np.int64)
    dtypes = np.zeros(n_names, dtype=np.int64)
    ndims = np.zeros(n_names, dtype=np.int64)
    shapes = np.ones((n_names, width), dtype=np.int64)
    told_by = np.zeros(n_names, dtype=np.int64)
    told_in = np.zeros(n_names, dtype=np.int64)
    for schema, rank in distinct.values():
        ids = ids_of[id(schema)]
        # A name may occur in several rows of one schema; let the first row speak first.
        backwards = np.flatnonzero(kinds[ids] < 0)[::-1]
        new = ids[backwards]
        kinds[new] = schema.kinds[backwards] == BYTES
        dtypes[new] = schema.dtypes[backwards]
        ndims[new] = schema.ndims[backwards]
        shapes[new] = widen(schema.shapes, width, 1)[backwards]
        told_by[new] = rank
        told_in[new] = backwards
        differs = kinds[ids] != (schema.kinds == BYTES)
        differs |= dtypes[ids] != schema.dtypes
        differs |= ndims[ids] != schema.ndims
        differs |= (shapes[ids] != widen(schema.shapes, width, 1)).any(axis=1)
        if differs.any():
            row = int(np.flatnonzero(differs)[0])
            other = plans[int(told_by[ids[row]])].schema
            other_row = other.names.index(schema.names[row])
            raise ReplicaConflictError(
                f"ranks disagree about {schema.names[row]!r}: "
                f"{_describe_row(other, other_row)} on rank {int(told_by[ids[row]])}, but "
                f"{_describe_row(schema, row)} on rank {rank}. All ranks must offer the same "
                "tensor under one name; give values that differ by rank a name of their own "
                "on each rank"
            )
    return kinds, dtypes, shapes, told_by, told_in


def _describe_row(schema: Schema, row: int) -> str:
    if schema.kinds[row] == BYTES:
        return "a value that is not a tensor"
    shape = tuple(schema.shapes[row, : schema.ndims[row]].tolist())
    return f"a {DTYPES[schema.dtypes[row]]} tensor of shape {shape}"


def _describe_outside(plans: Sequence[WriteColumns], plan_starts: Ints, row: int) -> str:
    rank = int(np.searchsorted(plan_starts, row, side="right")) - 1
    plan, local = plans[rank], row - int(plan_starts[rank])
    dims = int(plan.schema.ndims[local])
    return (
        f"rank {rank} offers a chunk of {plan.schema.names[local]!r} at offsets "
        f"{plan.offsets[local, :dims].tolist()} with sizes {plan.sizes[local, :dims].tolist()}, "
        f"outside of its shape {plan.schema.shapes[local, :dims].tolist()}. Correct the "
        "offsets and sizes in the local plan"
    )


def dedup(table: Table, to_lowest_rank: bool = False, leave_out: Sequence[int] = ()) -> Bools:
    """Which rows stay: of equal chunks on several ranks, one; of names to leave out, none.

    The bytes are balanced over the ranks, or all given to the lowest rank that has them.
    """
    if table.distinct and not leave_out:
        return np.ones(len(table.name_ids), dtype=bool)
    empty = (table.sizes == 0).any(axis=1)
    useful = ~np.isin(table.name_ids, leave_out) if leave_out else np.ones_like(empty)
    order, groups = _groups(table, useful)
    # An empty chunk may start where a real one does; then it says nothing.
    has_real = np.maximum.reduceat(~empty[order], groups[:-1]) if len(order) else empty
    silent = empty[order] & np.repeat(has_real, np.diff(groups))
    if silent.any():
        useful[order[silent]] = False
        order, groups = _groups(table, useful)
    _check_same_region(table, order, groups, empty)

    keep = np.zeros(len(table.name_ids), dtype=bool)
    if len(groups) - 1 == len(order) or to_lowest_rank:
        keep[order[groups[:-1]]] = True
        return keep
    leaders = order[groups[:-1]]
    chosen = choose_holders(table.ranks[order], groups, _weights(table, leaders), len(table.plans))
    keep[order[chosen]] = True
    return keep


def _groups(table: Table, rows: Bools) -> tuple[Ints, Ints]:
    """The given rows with equal chunks side by side, and where each group begins."""
    chosen = rows[table.order]
    order, keys = table.order[chosen], table.sorted_keys[chosen]
    begins = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1)) if len(keys) else keys
    return order, np.append(begins, len(order))


def _check_same_region(table: Table, order: Ints, groups: Ints, empty: Bools) -> None:
    if len(groups) - 1 == len(order):
        return
    leaders = np.repeat(order[groups[:-1]], np.diff(groups))
    differs = (table.sizes[order] != table.sizes[leaders]).any(axis=1) & ~empty[order]
    if differs.any():
        position = int(np.flatnonzero(differs)[0])
        row, other = int(order[position]), int(leaders[position])
        plan, local = table.row_in_plan(row)
        dims = int(plan.schema.ndims[local])
        raise ReplicaConflictError(
            f"two chunks of {plan.schema.names[local]!r} start at "
            f"{table.offsets[row, :dims].tolist()} with different sizes: "
            f"{table.sizes[other, :dims].tolist()} on rank {table.rank_of(other)}, "
            f"{table.sizes[row, :dims].tolist()} on rank {table.rank_of(row)}. Shard the tensor "
            "over one mesh, with the same placements on all ranks"
        )


def _weights(table: Table, rows: Ints) -> Ints:
    """Bytes of each row; at least 1, since a value of unknown size is not free."""
    names = table.name_ids[rows]
    sizes: Ints = table.sizes[rows].prod(axis=1) * DTYPE_ITEMSIZES[table.dtypes[names]]
    values = np.flatnonzero(table.kinds[names])
    if len(values):
        nbytes = np.concatenate([plan.nbytes for plan in table.plans])
        sizes[values] = nbytes[rows[values]]
    return np.asarray(np.maximum(sizes, 1))


def resolve_aliases(table: Table) -> dict[int, int]:
    """Names that are, on every rank, another name for the same memory: id -> id.

    A name is written under the other one only if all ranks that hold a part of it agree
    on which, region by region. Everything else is written under its own name.
    """
    aliases = _concatenate([plan.aliases for plan in table.plans])
    shared = np.flatnonzero(aliases >= 0)
    if not len(shared):
        return {}
    # A rank that holds nothing of a tensor has no memory to compare, and no say.
    says = np.flatnonzero((table.sizes > 0).all(axis=1))
    targets = np.full(len(aliases), -1, dtype=np.int64)
    plan_start = np.repeat(table.plan_starts[:-1], np.diff(table.plan_starts))
    targets[shared] = table.name_ids[plan_start[shared] + aliases[shared]]
    lowest = np.full(len(table.names), len(table.names), dtype=np.int64)
    highest = np.full(len(table.names), -1, dtype=np.int64)
    np.minimum.at(lowest, table.name_ids[says], targets[says])
    np.maximum.at(highest, table.name_ids[says], targets[says])
    agreed = {
        name: int(highest[name])
        for name in np.flatnonzero((lowest == highest) & (highest >= 0)).tolist()
        if table.dtypes[name] == table.dtypes[highest[name]]
        and (table.shapes[name] == table.shapes[highest[name]]).all()
    }
    return {name: to for name, to in agreed.items() if to not in agreed}


class SortedChunks(NamedTuple):
    """Rows of a table, name after name and by position; `starts` is where each name begins."""

    rows: Ints
    starts: Ints


def list_chunks(table: Table, keep: Bools) -> SortedChunks:
    """The rows that stay, sorted."""
    rows, keys = table.order, table.sorted_keys
    if not keep.all():
        chosen = keep[table.order]
        rows, keys = rows[chosen], keys[chosen]
    doubled = np.flatnonzero(keys[1:] == keys[:-1])
    if len(doubled):
        first, second = int(rows[doubled[0]]), int(rows[doubled[0] + 1])
        plan, local = table.row_in_plan(first)
        dims = int(plan.schema.ndims[local])
        raise PlanError(
            f"rank {table.rank_of(first)} and rank {table.rank_of(second)} both plan to write "
            f"{table.names[table.name_ids[first]]!r} at {table.offsets[first, :dims].tolist()}. "
            "Deduplicate the plans first, or leave the item to one rank"
        )
    counts = np.bincount(table.name_ids[rows], minlength=len(table.names))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return SortedChunks(rows, starts)


def check_table(table: Table, chunks: SortedChunks, leave_out: Sequence[int] = ()) -> list[str]:
    """What is wrong with the chunks of a table, in words. Rows are known to be in bounds.

    Several ranks must hold every tensor whole; names to leave out need not be there.
    """
    shapes = table.shapes
    if leave_out:
        # A tensor without elements wants no chunks.
        shapes = shapes.copy()
        shapes[list(leave_out)] = 0
    rows = chunks.rows
    suspects = find_untiled_rows(
        shapes, table.name_ids, table.offsets, table.sizes, table.cut_dims, rows
    )
    if not len(suspects):
        return []
    ndims = np.zeros(len(table.names), dtype=np.int64)
    for name in suspects.tolist():
        plan, row = table.row_in_plan(int(table.first_rows[name]))
        ndims[name] = plan.schema.ndims[row]
    holders = table.ranks[rows]
    listed = Chunks(shapes, chunks.starts, table.offsets[rows], table.sizes[rows])
    return check_coverage(table.names, listed, ndims, len(table.plans) > 1, holders)


def check_coverage(
    names: Sequence[str],
    chunks: Chunks,
    ndims: Ints,
    whole: bool,
    holders: Ints | None = None,
) -> list[str]:
    """What is wrong with the chunks of each tensor, in words; empty if nothing is.

    `holders` are the ranks that write the chunks, where known. Without `whole`, only
    overlaps count: the plan of a single rank that holds a part of a tensor is not wrong.
    """
    outside = out_of_bounds(chunks.shapes, chunks.offsets, chunks.sizes, chunks.owners)
    reaching_out, rows = np.unique(chunks.owners[outside], return_index=True)
    errors = []
    for tensor, row in zip(reaching_out.tolist(), np.flatnonzero(outside)[rows], strict=True):
        dims = int(ndims[tensor])
        errors.append(
            f"{names[tensor]!r} has a chunk at {chunks.offsets[row, :dims].tolist()} of sizes "
            f"{chunks.sizes[row, :dims].tolist()} that reaches outside of its shape "
            f"{chunks.shapes[tensor, :dims].tolist()}"
        )
    if len(reaching_out):
        # Their points would lie outside of the space in which the proof is made.
        shapes = chunks.shapes[chunks.owners]
        offsets = np.clip(chunks.offsets, 0, shapes)
        chunks = chunks._replace(offsets=offsets, sizes=np.clip(chunks.sizes, 0, shapes - offsets))
    suspects = find_untiled(chunks)
    if not whole:
        suspects = np.concatenate(find_overlapped(chunks, suspects))
    for tensor in sorted(suspects.tolist()):
        if tensor in reaching_out:
            continue
        offsets, sizes = chunks.of(tensor)
        shape = chunks.shapes[tensor, : ndims[tensor]].tolist()
        begin, end = int(chunks.starts[tensor]), int(chunks.starts[tensor + 1])
        ranks = None if holders is None else holders[begin:end]
        problem = describe_problem(shape, offsets, sizes, ranks)
        errors.append(f"{names[tensor]!r} of shape {shape}: {problem}")
    if len(errors) > _MOST_REPORTED:
        rest = len(errors) - _MOST_REPORTED
        errors = [*errors[:_MOST_REPORTED], f"and {rest} more tensors like these"]
    return errors

"""The plans of all ranks as one table: agreement, one writer per chunk, the chunk list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from reshard.api import CoverageError, PlanError, ReplicaConflictError
from reshard.planning.balance import choose_holders
from reshard.planning.columns import (
    BYTES,
    DTYPE_ITEMSIZES,
    DTYPES,
    Bools,
    ChunkTable,
    Ints,
    Schema,
    WriteColumns,
    widen,
)
from reshard.planning.coverage import (
    bounds_and_cuts,
    describe_problem,
    find_overlapped,
    find_untiled,
    out_of_bounds,
)
from reshard.planning.keys import rank_points

_MOST_REPORTED = 5


@dataclass(frozen=True, eq=False)
class PlanTable:
    """The items of all ranks, rank after rank.

    `names` holds each FQN once, in order of first appearance; `name_ids` refer to it.
    `is_value` to `shapes` and `cut_dims` have a row for each name, all others one for each
    item. `order` sorts items by name, position and rank; equal `sorted_keys` are the same
    chunk. `distinct` says that no two are equal.
    """

    names: list[str]
    plans: Sequence[WriteColumns]
    plan_starts: Ints
    name_ids: Ints
    offsets: Ints
    sizes: Ints
    is_value: Bools
    dtypes: Ints
    flags: Ints
    ndims: Ints
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

    def offsets_of(self, row: int) -> list[int]:
        offsets: list[int] = self.offsets[row, : self.ndims[self.name_ids[row]]].tolist()
        return offsets

    def sizes_of(self, row: int) -> list[int]:
        sizes: list[int] = self.sizes[row, : self.ndims[self.name_ids[row]]].tolist()
        return sizes


def stack(plans: Sequence[WriteColumns]) -> PlanTable:
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
    is_value, dtypes, flags, ndims, shapes = _agree(plans, ids_of, len(names), width)

    bad, cut_dims = bounds_and_cuts(shapes, offsets, sizes, name_ids)
    outside = np.flatnonzero(bad)
    if len(outside):
        raise CoverageError(_describe_outside(plans, plan_starts, int(outside[0])))
    keys = rank_points(name_ids, offsets, shapes)
    order = _sorted_rows(name_ids, keys, len(names))
    sorted_keys = keys[order]
    distinct = not (sorted_keys[1:] == sorted_keys[:-1]).any()
    return PlanTable(
        list(names), plans, plan_starts, name_ids, offsets, sizes, is_value, dtypes, flags,
        ndims, shapes, order, sorted_keys, distinct, cut_dims,
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
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    return np.zeros((0,) if width is None else (0, width), dtype=np.int64)


def _agree(
    plans: Sequence[WriteColumns], ids_of: dict[int, Ints], n_names: int, width: int
) -> tuple[Bools, Ints, Ints, Ints, Ints]:
    """Kind, dtype, flags, dimensions and shape of each name.

    All but the flags must be the same on all ranks; those of the first rank count.
    """
    distinct: dict[int, tuple[Schema, int]] = {}
    for rank, plan in enumerate(plans):
        distinct.setdefault(id(plan.schema), (plan.schema, rank))
    # A name may occur in several rows of one schema; the first row counts.
    known: Ints = np.full((n_names, 5 + width), -1, dtype=np.int64)
    for schema, rank in distinct.values():
        ids = ids_of[id(schema)]
        own = np.empty((len(schema), 5 + width), dtype=np.int64)
        own[:, 0], own[:, 1], own[:, 2] = schema.kinds == BYTES, schema.dtypes, schema.ndims
        own[:, 3 : 3 + width] = widen(schema.shapes, width, 1)
        own[:, -2], own[:, -1] = schema.flags, rank
        new = np.flatnonzero(known[ids, 0] < 0)[::-1]
        known[ids[new]] = own[new]
        differs = (known[ids, :-2] != own[:, :-2]).any(axis=1)
        if differs.any():
            row = int(np.flatnonzero(differs)[0])
            first = int(known[ids[row], -1])
            other = plans[first].schema
            other_row = other.names.index(schema.names[row])
            raise ReplicaConflictError(
                f"ranks disagree about {schema.names[row]!r}: "
                f"{_describe_row(other, other_row)} on rank {first}, but "
                f"{_describe_row(schema, row)} on rank {rank}. All ranks must offer the same "
                "tensor under one name; give values that differ by rank a name of their own "
                "on each rank"
            )
    return known[:, 0] > 0, known[:, 1], known[:, -2], known[:, 2], known[:, 3 : 3 + width]


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


def dedup(table: PlanTable, to_lowest_rank: bool = False, leave_out: Sequence[int] = ()) -> Bools:
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


def _groups(table: PlanTable, rows: Bools) -> tuple[Ints, Ints]:
    """The given rows with equal chunks side by side, and where each group begins."""
    chosen = rows[table.order]
    order, keys = table.order[chosen], table.sorted_keys[chosen]
    begins = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1)) if len(keys) else keys
    return order, np.append(begins, len(order))


def _check_same_region(table: PlanTable, order: Ints, groups: Ints, empty: Bools) -> None:
    if len(groups) - 1 == len(order):
        return
    leaders = np.repeat(order[groups[:-1]], np.diff(groups))
    differs = (table.sizes[order] != table.sizes[leaders]).any(axis=1) & ~empty[order]
    if differs.any():
        position = int(np.flatnonzero(differs)[0])
        row, other = int(order[position]), int(leaders[position])
        raise ReplicaConflictError(
            f"two chunks of {table.names[table.name_ids[row]]!r} start at "
            f"{table.offsets_of(row)} with different sizes: "
            f"{table.sizes_of(other)} on rank {table.rank_of(other)}, "
            f"{table.sizes_of(row)} on rank {table.rank_of(row)}. Shard the tensor "
            "over one mesh, with the same placements on all ranks"
        )


def _weights(table: PlanTable, rows: Ints) -> Ints:
    """Bytes of each row; at least 1, since a value of unknown size is not free."""
    names = table.name_ids[rows]
    sizes: Ints = table.sizes[rows].prod(axis=1) * DTYPE_ITEMSIZES[table.dtypes[names]]
    values = np.flatnonzero(table.is_value[names])
    if len(values):
        nbytes = np.concatenate([plan.nbytes for plan in table.plans])
        sizes[values] = nbytes[rows[values]]
    return np.asarray(np.maximum(sizes, 1))


def resolve_aliases(table: PlanTable) -> dict[int, int]:
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


def list_chunks(
    table: PlanTable, keep: Bools, aliases: Mapping[int, int] | None = None
) -> tuple[Ints, ChunkTable]:
    """The chunks that stay, tensor after tensor and by position; and which items they are.

    Values that are not tensors are left out. `aliases` are names without chunks of their
    own, and whose chunks they have.
    """
    rows, keys = table.order, table.sorted_keys
    if not keep.all():
        chosen = keep[table.order]
        rows, keys = rows[chosen], keys[chosen]
    doubled = np.flatnonzero(keys[1:] == keys[:-1])
    if len(doubled):
        first, second = int(rows[doubled[0]]), int(rows[doubled[0] + 1])
        raise PlanError(
            f"rank {table.rank_of(first)} and rank {table.rank_of(second)} both plan to write "
            f"{table.names[table.name_ids[first]]!r} at {table.offsets_of(first)}. "
            "Deduplicate the plans first, or leave the item to one rank"
        )
    tensors, names = np.arange(len(table.names)), table.names
    if table.is_value.any():
        rows = rows[~table.is_value[table.name_ids[rows]]]
        tensors = np.flatnonzero(~table.is_value)
        names = [table.names[name_id] for name_id in tensors.tolist()]
    counts = np.bincount(table.name_ids[rows], minlength=len(table.names))[tensors]
    starts = np.zeros(len(tensors) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    targets = np.full(len(tensors), -1, dtype=np.int64)
    if aliases:
        position = {name_id: tensor for tensor, name_id in enumerate(tensors.tolist())}
        for name_id, target in aliases.items():
            targets[position[name_id]] = position[target]
    return rows, ChunkTable(
        names=names,
        dtypes=table.dtypes[tensors],
        flags=table.flags[tensors],
        ndims=table.ndims[tensors],
        shapes=table.shapes[tensors],
        aliases=targets,
        starts=starts,
        offsets=table.offsets[rows],
        sizes=table.sizes[rows],
    )


def check_planned(table: PlanTable, rows: Ints, chunks: ChunkTable) -> list[str]:
    """Describe what is wrong with planned chunks, which are known to be in bounds.

    Several ranks must hold every tensor whole.
    """
    if not len(find_untiled(chunks, table.cut_dims[~table.is_value])):
        return []
    return check_coverage(chunks, len(table.plans) > 1, table.ranks[rows])


def check_coverage(table: ChunkTable, whole: bool, holders: Ints | None = None) -> list[str]:
    """Describe what is wrong with the chunks of each tensor; empty if nothing is.

    `holders` are the ranks that write the chunks, where known. Without `whole`, only
    overlaps count: the plan of a single rank that holds a part of a tensor is not wrong.
    """
    outside = np.flatnonzero(out_of_bounds(table.shapes, table.offsets, table.sizes, table.owners))
    reaching_out = dict(zip(table.owners[outside][::-1].tolist(), outside[::-1], strict=True))
    errors = []
    for tensor, row in sorted(reaching_out.items()):
        dims = int(table.ndims[tensor])
        errors.append(
            f"{table.names[tensor]!r} has a chunk at {table.offsets[row, :dims].tolist()} of sizes "
            f"{table.sizes[row, :dims].tolist()} that reaches outside of its shape "
            f"{table.shapes[tensor, :dims].tolist()}"
        )
    if reaching_out:
        # Their points would lie outside of the space in which the proof is made.
        shapes = table.shapes[table.owners]
        offsets = np.clip(table.offsets, 0, shapes)
        table = replace(table, offsets=offsets, sizes=np.clip(table.sizes, 0, shapes - offsets))
    suspects = find_untiled(table)
    if not whole:
        suspects = np.concatenate(find_overlapped(table, suspects))
    for tensor in sorted(suspects.tolist()):
        if tensor in reaching_out:
            continue
        offsets, sizes = table.of(tensor)
        shape = table.shapes[tensor, : table.ndims[tensor]].tolist()
        begin, end = int(table.starts[tensor]), int(table.starts[tensor + 1])
        ranks = None if holders is None else holders[begin:end]
        problem = describe_problem(shape, offsets, sizes, ranks)
        errors.append(f"{table.names[tensor]!r} of shape {shape}: {problem}")
    if len(errors) > _MOST_REPORTED:
        rest = len(errors) - _MOST_REPORTED
        errors = [*errors[:_MOST_REPORTED], f"and {rest} more tensors like these"]
    return errors

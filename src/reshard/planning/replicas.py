"""Which regions several ranks hold, and where they hold different data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.planning.columns import Bools, Ints
from reshard.planning.global_plan import PlanTable

_MOST_NAMED = 5


def find_replicated(table: PlanTable) -> Bools:
    """The items that are regions of tensors with elements, and that several ranks hold."""
    comparable = ~table.is_value[table.name_ids] & (table.sizes > 0).all(axis=1)
    rows = table.order[comparable[table.order]]
    replicated = np.zeros(len(table.name_ids), dtype=bool)
    groups = _groups(table, rows)
    replicated[rows] = np.bincount(groups)[groups] > 1 if len(rows) else False
    return replicated


def describe_conflicts(table: PlanTable, rows: Ints, fingerprints: Ints) -> list[str]:
    """Which of the replicated `rows`, rank after rank, differ from the others like them.

    What most ranks hold counts as right, and of as many what the lowest rank holds.
    """
    position = np.full(len(table.name_ids), -1, dtype=np.int64)
    position[rows] = np.arange(len(rows))
    in_order = table.order[position[table.order] >= 0]
    groups, prints = _groups(table, in_order), fingerprints[position[in_order]]
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    leaders = starts[groups]
    differing = np.unique(groups[(prints != prints[leaders]).any(axis=1)])
    described = []
    for group in differing[:_MOST_NAMED].tolist():
        members = np.flatnonzero(groups == group)
        described.append(_describe(table, in_order[members], prints[members]))
    if len(differing) > _MOST_NAMED:
        described.append(f"and {len(differing) - _MOST_NAMED} more regions")
    return described


def _groups(table: PlanTable, rows: Ints) -> Ints:
    """A number for each of some rows, in the order of the table; equal for the same region."""
    columns = np.hstack((table.name_ids[rows, None], table.offsets[rows], table.sizes[rows]))
    differs = (columns[1:] != columns[:-1]).any(axis=1)
    return np.concatenate([[0], np.cumsum(differs)])[: len(rows)].astype(np.int64)


def _describe(table: PlanTable, rows: Ints, prints: Ints) -> str:
    holders: dict[tuple[int, ...], list[int]] = {}
    for row, own in zip(rows.tolist(), prints.tolist(), strict=True):
        holders.setdefault(tuple(own), []).append(table.rank_of(row))
    usual, *others = sorted(holders.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    first = int(rows[0])
    where = (
        ""
        if not table.ndims[table.name_ids[first]]
        else (f" at {table.offsets_of(first)} of sizes {table.sizes_of(first)}")
    )
    verb = "differs" if sum(map(len, others)) == 1 else "differ"
    return (
        f"{table.names[table.name_ids[first]]!r}{where}: "
        f"{' and '.join(map(_name_ranks, others))} {verb} from {_name_ranks(usual)}"
    )


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

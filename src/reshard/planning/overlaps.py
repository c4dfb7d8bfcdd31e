"""Pairs of boxes that overlap, in time that follows the number of boxes.

Boxes of real layouts fall apart along one dimension after another: rows, then columns
within a row. What does not fall apart is compared pair by pair, up to a budget, so that
no arrangement of boxes, however contrived, takes quadratic time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from reshard.planning.columns import Bools, Ints

_MOST_PASSES = 16
_PAIRS_PER_BOX, _PAIRS_AT_LEAST = 64, 1 << 20
_PAIRS_AT_A_TIME = 1 << 18


class Pairs(NamedTuple):
    """Pairs of rows that overlap, and the groups that were too much to search through.

    `left` is below `right`; in order of `right`, then `left`.
    """

    left: Ints
    right: Ints
    undecided: Ints


def overlapping_pairs(groups: Ints, offsets: Ints, sizes: Ints) -> Pairs:
    """Which boxes of the same group overlap. Empty boxes overlap nothing."""
    if not offsets.shape[1]:
        # Boxes without dimensions have one element each.
        offsets, sizes = np.zeros((len(groups), 1), np.int64), np.ones((len(groups), 1), np.int64)
    ends = offsets + sizes
    rows = np.flatnonzero((sizes > 0).all(axis=1))
    budget = _PAIRS_PER_BOX * len(rows) + _PAIRS_AT_LEAST
    rows, parts = _fall_apart(rows, groups[rows], offsets, ends)
    order, places, counts = _candidates(rows, parts, offsets, ends)
    stops = np.cumsum(counts)
    affordable = int(np.searchsorted(stops, budget, side="right"))
    found = [np.empty((2, 0), dtype=np.int64)]
    begin = 0
    while begin < affordable:
        done = int(stops[begin - 1]) if begin else 0
        end = int(np.searchsorted(stops, done + _PAIRS_AT_A_TIME, side="right"))
        end = min(max(begin + 1, end), affordable)
        some = counts[begin:end]
        first = np.repeat(places[begin:end], some)
        within = np.arange(len(first)) - np.repeat(stops[begin:end] - some - done, some)
        left, right = order[first], order[first + 1 + within]
        real = _overlap(left, right, offsets, ends)
        found.append(np.stack([left[real], right[real]]))
        begin = end
    left, right = np.sort(np.concatenate(found, axis=1), axis=0)
    by_right = np.lexsort((left, right))
    skipped = groups[order[places[affordable:][counts[affordable:] > 0]]]
    return Pairs(left[by_right], right[by_right], np.setdiff1d(skipped, groups[left]))


def _overlap(left: Ints, right: Ints, offsets: Ints, ends: Ints) -> Ints:
    """The positions of the pairs that overlap in every dimension."""
    alive = np.arange(len(left))
    for dim in range(offsets.shape[1]):
        starts, stops = offsets[:, dim], ends[:, dim]
        one, other = left[alive], right[alive]
        alive = alive[(starts[one] < stops[other]) & (starts[other] < stops[one])]
    return alive


def _fall_apart(rows: Ints, groups: Ints, offsets: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """The rows that share a part with others, and the parts.

    Boxes of different parts lie apart in some dimension. A grid falls apart in one pass
    over its dimensions, cuts within cuts in one pass for each level.
    """
    parts = np.unique(groups, return_inverse=True)[1]
    n_parts = 0
    for _ in range(_MOST_PASSES):
        before = n_parts, len(rows)
        for dim in range(offsets.shape[1]):
            parts = _split_along(parts, offsets[rows, dim], ends[rows, dim])
            shared = (np.bincount(parts) > 1)[parts] if len(parts) else np.empty(0, dtype=bool)
            rows, parts = rows[shared], parts[shared]
        n_parts = len(np.unique(parts))
        if (n_parts, len(rows)) == before or not len(rows):
            break
    return rows, np.unique(parts, return_inverse=True)[1]


class _Sweep(NamedTuple):
    """Intervals of many parts, sorted by part and then by start.

    Starts and ends are numbered so that they compare across parts too.
    """

    order: Ints
    starts: Ints
    ends: Ints


def _sweep(parts: Ints, starts: Ints, ends: Ints) -> _Sweep:
    order = np.lexsort((starts, parts))
    values = np.unique(np.concatenate([starts, ends]))
    bases = parts[order] * (len(values) + 1)
    return _Sweep(
        order,
        bases + np.searchsorted(values, starts[order]),
        bases + np.searchsorted(values, ends[order]),
    )


def _split_along(parts: Ints, starts: Ints, ends: Ints) -> Ints:
    """Smaller parts: cut wherever an interval starts after all before it have ended."""
    if not len(parts) or (starts[0] == starts).all():
        return parts
    sweep = _sweep(parts, starts, ends)
    cut: Bools = np.ones(len(parts), dtype=bool)
    cut[1:] = sweep.starts[1:] >= np.maximum.accumulate(sweep.ends)[:-1]
    smaller = np.empty_like(parts)
    smaller[sweep.order] = np.cumsum(cut) - 1
    return smaller


def _candidates(rows: Ints, parts: Ints, offsets: Ints, ends: Ints) -> tuple[Ints, Ints, Ints]:
    """Rows in an order in which each is to be compared with so many that follow it.

    Each part is sorted along the dimension that leaves the fewest pairs; small parts come
    first. Returns the order, and the places in it with their counts.
    """
    n_parts = int(parts.max()) + 1 if len(parts) else 0
    best, fewest = np.zeros(n_parts, dtype=np.int64), np.full(n_parts, np.inf)
    for dim in range(offsets.shape[1]):
        order, counts = _later_starts(parts, offsets[rows, dim], ends[rows, dim])
        pairs = np.bincount(parts[order], weights=counts, minlength=n_parts)
        better = pairs < fewest
        best[better], fewest[better] = dim, pairs[better]
    orders, all_places, all_counts, costs = ([np.empty(0, dtype=np.int64)] for _ in range(4))
    base = 0
    for dim in np.unique(best).tolist():
        mine = np.flatnonzero(best[parts] == dim)
        order, counts = _later_starts(parts[mine], offsets[rows[mine], dim], ends[rows[mine], dim])
        orders.append(rows[mine[order]])
        all_places.append(base + np.arange(len(order)))
        all_counts.append(counts)
        costs.append(fewest[parts[mine[order]]].astype(np.int64))
        base += len(order)
    cheap_first = np.argsort(np.concatenate(costs), kind="stable")
    return (
        np.concatenate(orders),
        np.concatenate(all_places)[cheap_first],
        np.concatenate(all_counts)[cheap_first],
    )


def _later_starts(parts: Ints, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """An order of the intervals, and how many of the next ones start before each ends."""
    sweep = _sweep(parts, starts, ends)
    stops = np.searchsorted(sweep.starts, sweep.ends, side="left")
    return sweep.order, stops - np.arange(len(parts)) - 1

"""Which boxes of one set meet which boxes of another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from reshard.planning.columns import Ints

_PAIRS_AT_A_TIME = 1 << 21
_FEW_PAIRS = 1 << 12


class Overlaps(NamedTuple):
    """Pairs of boxes that share at least one element, and the box that they share."""

    left: Ints
    right: Ints
    starts: Ints
    sizes: Ints


def intersect_groups(
    left_starts: Ints, left: tuple[Ints, Ints], right_starts: Ints, right: tuple[Ints, Ints]
) -> Overlaps:
    """The overlaps within each group of boxes; group `g` has rows `starts[g]:starts[g + 1]`.

    `left` and `right` are offsets and sizes. In order of the right box, then the left.
    """
    n_left, n_right = np.diff(left_starts), np.diff(right_starts)
    pairs = n_left * n_right
    found: list[Overlaps] = []
    for begin, end in _pair_batches(pairs, n_right, _pairs_at_a_time(left[0])):
        lefts = slice(int(left_starts[begin]), int(left_starts[end]))
        rights = slice(int(right_starts[begin]), int(right_starts[end]))
        boxes = left[0][lefts], left[1][lefts], right[0][rights], right[1][rights]
        if end - begin == 1:
            part = intersect(*boxes)
        else:
            group = np.repeat(np.arange(begin, end), n_right[begin:end])
            counts = n_left[group]
            stops = np.cumsum(counts)
            rows = np.repeat(np.arange(len(group)), counts)
            within = np.arange(len(rows)) - np.repeat(stops - counts, counts)
            part = _overlaps(*boxes, (left_starts[group] - lefts.start)[rows] + within, rows)
        found.append(part._replace(left=part.left + lefts.start, right=part.right + rights.start))
    if len(found) == 1:
        return found[0]
    width = left[0].shape[1]
    nothing = np.empty(0, dtype=np.int64), np.empty((0, width), dtype=np.int64)
    found.append(Overlaps(nothing[0], nothing[0], nothing[1], nothing[1]))
    return Overlaps(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _pairs_at_a_time(boxes: Ints) -> int:
    """Fewer of boxes with many dimensions, so that the memory stays the same."""
    return max(1, _PAIRS_AT_A_TIME * 8 // max(8, int(boxes.shape[1])))


def _pair_batches(pairs: Ints, n_right: Ints, most: int) -> Iterator[tuple[int, int]]:
    """Groups to compare pair by pair at once, and large ones each on their own."""
    begin, total = 0, 0
    for group, (count, rights) in enumerate(zip(pairs.tolist(), n_right.tolist(), strict=True)):
        alone = rights > 1 and count > _FEW_PAIRS
        if begin < group and (alone or total + count > most):
            yield begin, group
            begin, total = group, 0
        total += count
        if alone:
            yield group, group + 1
            begin, total = group + 1, 0
    if begin < len(pairs):
        yield begin, len(pairs)


def _overlaps(
    left_offsets: Ints,
    left_sizes: Ints,
    right_offsets: Ints,
    right_sizes: Ints,
    left: Ints,
    right: Ints,
) -> Overlaps:
    """Which of the given pairs overlap."""
    low, high = left_offsets[left], right_offsets[right]
    starts = np.maximum(low, high)
    low += left_sizes[left]
    high += right_sizes[right]
    sizes = np.minimum(low, high) - starts
    real = np.flatnonzero((sizes > 0).all(axis=1))
    return Overlaps(left[real], right[real], starts[real], sizes[real])


def intersect(
    left_offsets: Ints, left_sizes: Ints, right_offsets: Ints, right_sizes: Ints
) -> Overlaps:
    """All pairs (i, j) where left box i and right box j overlap, in order of (j, i).

    Sweeps along the dimension that leaves the fewest candidates, so the cost follows
    the number of overlaps, not the number of pairs. Empty boxes overlap nothing.
    """
    left_ends, right_ends = left_offsets + left_sizes, right_offsets + right_sizes
    if len(right_offsets) == 1:
        # By far the most frequent question: what does one rank need of one tensor?
        starts = np.maximum(left_offsets, right_offsets)
        sizes = np.minimum(left_ends, right_ends) - starts
        left = np.flatnonzero((sizes > 0).all(axis=1))
        return Overlaps(left, np.zeros_like(left), starts[left], sizes[left])
    found: list[tuple[Ints, Ints, Ints, Ints]] = []
    for left, right in _candidates(left_offsets, left_ends, right_offsets, right_ends):
        starts = np.maximum(left_offsets[left], right_offsets[right])
        sizes = np.minimum(left_ends[left], right_ends[right]) - starts
        real = np.flatnonzero((sizes > 0).all(axis=1))
        found.append((left[real], right[real], starts[real], sizes[real]))
    lefts, rights, starts, sizes = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((lefts, rights))
    return Overlaps(lefts[order], rights[order], starts[order], sizes[order])


def _candidates(
    left_offsets: Ints, left_ends: Ints, right_offsets: Ints, right_ends: Ints
) -> Iterator[tuple[Ints, Ints]]:
    """Pairs that overlap in one well-chosen dimension, a bounded number at a time."""
    n_left, n_right = len(left_offsets), len(right_offsets)
    order = np.arange(n_left)
    first, last = np.zeros(n_right, dtype=np.int64), np.full(n_right, n_left, dtype=np.int64)
    best = n_left * n_right
    for dim in range(left_offsets.shape[1] if best > n_left + n_right else 0):
        by_start = np.argsort(left_offsets[:, dim], kind="stable")
        starts = left_offsets[by_start, dim]
        reach = np.maximum.accumulate(left_ends[by_start, dim])
        low = np.searchsorted(reach, right_offsets[:, dim], side="right")
        high = np.searchsorted(starts, right_ends[:, dim], side="left")
        count = int(np.maximum(high - low, 0).sum())
        if count < best:
            order, first, last, best = by_start, low, high, count
    counts = np.maximum(last - first, 0)
    stops = np.cumsum(counts)
    most = _pairs_at_a_time(left_offsets)
    begin = 0
    while True:
        # At least one row at a time, and no more pairs than fit the budget.
        done = int(stops[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(stops, done + most, side="right")))
        rows = np.repeat(np.arange(begin, min(end, n_right)), counts[begin:end])
        within = np.arange(len(rows)) - np.repeat(
            stops[begin:end] - counts[begin:end] - done, counts[begin:end]
        )
        yield order[first[rows] + within], rows
        begin = end
        if begin >= n_right:
            return

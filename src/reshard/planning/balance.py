"""Choose one writer for each replicated chunk.

Chunks that the same ranks hold form a class. The chunks of a class, in order, are laid
along a line as long as their bytes, and the line is cut among the holders: each gets as
much as brings it to the common water level, given what it writes already. So a holder
ends at most one chunk above the level, and the whole is a few array operations per
class, not a search per chunk. Where the holders of classes overlap, the cut is made again
in the light of the others, as long as that helps.
"""

from __future__ import annotations

import numpy as np

from reshard.planning.columns import Ints

_MOST_PASSES = 8


def choose_holders(ranks: Ints, starts: Ints, weights: Ints, n_ranks: int) -> Ints:
    """For each chunk, the row of the holder that writes it.

    Chunk `c` is held by `ranks[starts[c]:starts[c + 1]]`, ascending, and weighs
    `weights[c]` bytes, at least 1. The answer is deterministic.
    """
    counts = np.diff(starts)
    chosen: Ints = starts[:-1].copy()
    alone = counts == 1
    loads = np.zeros(n_ranks, dtype=np.int64)
    np.add.at(loads, ranks[chosen[alone]], weights[alone])
    classes = _classes(ranks, starts, counts)
    placed = False
    for _ in range(_MOST_PASSES if len(classes) > 1 else 1):
        before = int(loads.max(initial=0))
        previous: Ints = chosen.copy()
        for chunks, holders in classes:
            if placed:
                # Take back what the class was given, now that the others have theirs.
                np.subtract.at(loads, ranks[chosen[chunks]], weights[chunks])
            picked = _cut_the_line(loads[holders], weights[chunks])
            chosen[chunks] = starts[chunks] + picked
            np.add.at(loads, holders[picked], weights[chunks])
        if placed and int(loads.max(initial=0)) >= before:
            return previous
        placed = True
    return chosen


def _classes(ranks: Ints, starts: Ints, counts: Ints) -> list[tuple[Ints, Ints]]:
    """Chunks with several holders, grouped by their holders; few holders first.

    Those with few holders have the least choice, so they choose first.
    """
    classes: list[tuple[Ints, Ints]] = []
    for count in np.unique(counts[counts > 1]).tolist():
        chunks = np.flatnonzero(counts == count)
        holders = ranks[starts[chunks][:, None] + np.arange(count)]
        unique, inverse = np.unique(holders, axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        order = np.argsort(inverse, kind="stable")
        bounds = np.searchsorted(inverse[order], np.arange(len(unique) + 1))
        classes.extend(
            (chunks[order[bounds[i] : bounds[i + 1]]], unique[i]) for i in range(len(unique))
        )
    return classes


def _cut_the_line(loads: Ints, weights: Ints) -> Ints:
    """The position of the holder of each chunk, for holders with the given loads."""
    line_ends = np.cumsum(weights)
    ascending = np.sort(loads)
    # Pour the total on the loads as if they were the floor of a tank: with the k lowest
    # under water, the level is (total + their sum) / k, rounded up so that all fits.
    under_water = np.arange(1, len(loads) + 1)
    levels = -(-(int(line_ends[-1]) + np.cumsum(ascending)) // under_water)
    k = int(np.flatnonzero(levels > ascending)[-1])
    room_ends = np.cumsum(np.maximum(levels[k] - loads, 0))
    return np.asarray(np.searchsorted(room_ends, line_ends - weights, side="right"))

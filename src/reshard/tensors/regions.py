"""Which regions of a tensor a rank holds, given a mesh and placements. Integers only.

Along one dimension, a rank holds a list of runs `(start, length)`: a single run, except for
strided placements, which interleave. Each mesh dimension that shards the tensor dimension
cuts the runs again, left to right as DTensor does. The regions are the products of the runs
of all dimensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

Runs: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh dimension that shards a tensor dimension.

    `parts` ranks share the dimension and this one is number `index` of them. A
    `split_factor` above 1 makes the cut strided: the dimension is first cut into that
    many pieces, and each piece is shared by all. With `at_once` it is cut into all the
    parts of those pieces in one step, which is the same unless the sizes are uneven.
    """

    dim: int
    parts: int
    index: int
    split_factor: int = 1
    at_once: bool = False


class Region(NamedTuple):
    """A box of a tensor, and where it begins in the local tensor that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


@lru_cache(maxsize=1 << 14)
def local_regions(
    shape: tuple[int, ...], cuts: tuple[Cut, ...], right_to_left: bool = False
) -> tuple[Region, ...]:
    """The regions of a tensor of `shape` that are left on this rank after all `cuts`.

    There is always at least one: an empty one at the end of the dimension if nothing is
    left. With `right_to_left`, cuts are made in reverse order and none is strided, which is
    how FSDP shards what tensor parallelism sharded.
    """
    runs: list[Runs] = [((0, size),) for size in shape]
    for cut in reversed(cuts) if right_to_left else cuts:
        strides = 1 if right_to_left else cut.split_factor
        kept = itertools.chain.from_iterable(
            _strided_part(runs[cut.dim], cut, strides, i) for i in range(strides)
        )
        runs[cut.dim] = _joined(kept) or ((shape[cut.dim], 0),)
    return tuple(_products(runs))


def _strided_part(runs: Runs, cut: Cut, strides: int, number: int) -> Runs:
    """What this rank holds of one of the pieces of a strided cut."""
    if cut.at_once:
        return _part(runs, strides * cut.parts, number * cut.parts + cut.index)
    return _part(_part(runs, strides, number), cut.parts, cut.index)


def _part(runs: Runs, parts: int, index: int) -> Runs:
    """Number `index` of `parts` parts, sized as torch.chunk sizes them."""
    total = sum(length for _, length in runs)
    full = -(-total // parts)
    low, high = min(full * index, total), min(full * (index + 1), total)
    kept, position = [], 0
    for start, length in runs:
        begin, end = max(low - position, 0), min(high - position, length)
        if begin < end:
            kept.append((start + begin, end - begin))
        position += length
    return tuple(kept)


def _joined(runs: itertools.chain[tuple[int, int]]) -> Runs:
    """Runs with neighbours joined."""
    joined: list[tuple[int, int]] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return tuple(joined)


def _products(runs: Sequence[Runs]) -> list[Region]:
    placed = []
    for dim_runs in runs:
        positions = itertools.accumulate((length for _, length in dim_runs), initial=0)
        placed.append(
            [(*run, position) for run, position in zip(dim_runs, positions, strict=False)]
        )
    return [
        Region(
            tuple(start for start, _, _ in choice),
            tuple(length for _, length, _ in choice),
            tuple(position for _, _, position in choice),
        )
        for choice in itertools.product(*placed)
    ]

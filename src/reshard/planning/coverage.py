"""Proof that chunks make a whole: no gap, no overlap, nothing outside.

The test is linear in any number of dimensions. Give each coordinate c of each dimension d
an unknown F(d, c), and each box the product over its dimensions of F(d, end) - F(d, begin).
Written out, that is a sum of signed corners, which determines the indicator function of the
box. So chunks tile a tensor if and only if the polynomials of the chunks add up to that of
the tensor itself. Polynomials that differ give different sums at a random point of a large
field, but for a chance that is far below that of a bit flipping in memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.planning.columns import Bools, ChunkTable, Ints
from reshard.planning.overlaps import overlapping_pairs

_MOST_PIECES = 4096
_MOST_CUTS = 1 << 18


def out_of_bounds(shapes: Ints, offsets: Ints, sizes: Ints, owners: Ints) -> Bools:
    """Which rows reach outside of their owner's shape, or have a negative offset or size."""
    bad, _ = bounds_and_cuts(shapes, offsets, sizes, owners)
    return bad


def bounds_and_cuts(shapes: Ints, offsets: Ints, sizes: Ints, owners: Ints) -> tuple[Bools, Bools]:
    """Which rows are out of bounds, and along which dimensions each tensor is cut."""
    bad = np.zeros(len(owners), dtype=bool)
    cut_dims = np.zeros(shapes.shape, dtype=bool)
    for dim in range(shapes.shape[1]):
        offset, size, extent = offsets[:, dim], sizes[:, dim], shapes[owners, dim]
        # Written without a sum, which could wrap around for absurd numbers.
        bad |= (offset < 0) | (size < 0) | (offset > extent) | (size > extent - offset)
        cut_dims[owners[(offset != 0) | (size != extent)], dim] = True
    return bad, cut_dims


def find_untiled(table: ChunkTable, cut_dims: Bools | None = None) -> Ints:
    """The tensors that their chunks do not cover exactly. All chunks are in bounds.

    `cut_dims` is what `bounds_and_cuts` says of the table, where that is known. A tensor that is an
    alias needs no chunks.
    """
    shapes, owners, offsets, sizes = table.shapes, table.owners, table.offsets, table.sizes
    if cut_dims is None:
        _, cut_dims = bounds_and_cuts(shapes, offsets, sizes, owners)
    empty = (sizes == 0).any(axis=1)
    if empty.any():
        owners, offsets, sizes = owners[~empty], offsets[~empty], sizes[~empty]
    counts = np.bincount(owners, minlength=len(shapes))
    wants_chunks = (shapes > 0).all(axis=1) & (table.aliases < 0)
    bad = wants_chunks & (counts == 0)
    # A tensor without elements is whole whatever its empty chunks say.
    n_cut = np.where(wants_chunks, cut_dims.sum(axis=1), 0)
    bad |= (n_cut == 0) & (counts > 1)
    for dim in range(shapes.shape[1]):
        chosen = (n_cut == 1) & cut_dims[:, dim]
        if chosen.any():
            bad |= _untiled_along(chosen, owners, offsets[:, dim], sizes[:, dim], shapes[:, dim])
    several = n_cut > 1
    if several.any():
        dims = np.flatnonzero(cut_dims[several].any(axis=0)).tolist()
        some = np.flatnonzero(several[owners])
        bad |= _untiled_by_sums(several, dims, owners[some], offsets[some], sizes[some], shapes)
    return np.flatnonzero(bad)


def _untiled_along(
    chosen: Bools, owners: Ints, starts: Ints, lengths: Ints, extents: Ints
) -> Bools:
    """Of the `chosen` tensors, all cut along one dimension only, those not covered."""
    if not chosen.all():
        rows = np.flatnonzero(chosen[owners])
        owners, starts, lengths = owners[rows], starts[rows], lengths[rows]
    same = owners[1:] == owners[:-1]
    if (owners[1:] < owners[:-1]).any() or (same & (starts[1:] < starts[:-1])).any():
        order = np.lexsort((starts, owners))
        owners, starts, lengths = owners[order], starts[order], lengths[order]
        same = owners[1:] == owners[:-1]
    ends = starts + lengths
    # Each chunk begins where the one before it ends; the first at 0, the last at the end.
    first, last = np.append(True, ~same), np.append(~same, True)
    wrong = first & (starts != 0) | last & (ends != extents[owners])
    wrong[1:] |= same & (starts[1:] != ends[:-1])
    bad = np.zeros(len(chosen), dtype=bool)
    bad[owners[wrong]] = True
    return bad


_PRIME = np.uint64((1 << 31) - 1)
_POINTS = 4
"""With so many random points, the error is below (dimensions / prime) ^ points < 2^-90."""


def _untiled_by_sums(
    chosen: Bools, dims: Sequence[int], owners: Ints, offsets: Ints, sizes: Ints, shapes: Ints
) -> Bools:
    """Of the `chosen` tensors, those whose chunks do not add up to the tensor."""
    tensors = np.flatnonzero(chosen)
    parts = np.ones((_POINTS, len(owners)), dtype=np.uint64)
    wholes = np.ones((_POINTS, len(tensors)), dtype=np.uint64)
    # New for each call: a file cannot know the points at which it is judged.
    secrets = np.frombuffer(os.urandom(8 * _POINTS * len(dims)), dtype=np.uint64)
    for dim, secret in zip(dims, secrets.reshape(len(dims), _POINTS), strict=True):
        begins, ends = offsets[:, dim], offsets[:, dim] + sizes[:, dim]
        extents = shapes[tensors, dim]
        for point in range(_POINTS):
            parts[point] = _times_length(parts[point], secret[point], begins, ends)
            zeros = np.zeros_like(extents)
            wholes[point] = _times_length(wholes[point], secret[point], zeros, extents)
    bad = np.zeros(len(chosen), dtype=bool)
    for part, whole in zip(parts, wholes, strict=True):
        # In halves, whose sums are exact in the floating point numbers that bincount adds.
        low = np.bincount(owners, weights=part & np.uint64(0xFFFF), minlength=len(chosen))
        high = np.bincount(owners, weights=part >> np.uint64(16), minlength=len(chosen))
        total = low.astype(np.uint64) + _reduced(high.astype(np.uint64)) * np.uint64(1 << 16)
        bad[tensors] |= total[tensors] % _PRIME != whole % _PRIME
    return bad


def _times_length(product: Any, secret: Any, begins: Ints, ends: Ints) -> Any:
    """`product` times F(end) - F(begin), in the field."""
    length = _value(secret, ends) + (_PRIME + _PRIME) - _value(secret, begins)
    return _reduced(_reduced(length) * product)


def _value(secret: Any, coordinates: Ints) -> Any:
    """A pseudo-random number below 2^31 for each coordinate."""
    mixed = coordinates.astype(np.uint64) + secret
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    return mixed >> np.uint64(33)


def _reduced(numbers: Any) -> Any:
    """The same numbers in the field, not above 2^31. The prime is 2^31 - 1."""
    for _ in range(2):
        numbers = (numbers & _PRIME) + (numbers >> np.uint64(31))
    return numbers


def find_overlapping(offsets: Ints, sizes: Ints, most: int = 3) -> list[tuple[int, int]]:
    """Up to `most` pairs of chunks of one tensor that overlap.

    Of very many chunks in a contrived arrangement, only some pairs are looked at.
    """
    found = overlapping_pairs(np.zeros(len(offsets), dtype=np.int64), offsets, sizes)
    return list(zip(found.left[:most].tolist(), found.right[:most].tolist(), strict=True))


def find_overlapped(table: ChunkTable, tensors: Ints) -> tuple[Ints, Ints]:
    """Of `tensors`, those with chunks that overlap, and those too contrived to say."""
    if not len(tensors):
        return tensors, tensors
    some = np.zeros(len(table.shapes), dtype=bool)
    some[tensors] = True
    owners = table.owners
    rows = np.flatnonzero(some[owners])
    found = overlapping_pairs(owners[rows], table.offsets[rows], table.sizes[rows])
    return np.unique(owners[rows[found.left]]), found.undecided


def describe_problem(
    shape: Sequence[int], offsets: Ints, sizes: Ints, ranks: Ints | None = None
) -> str:
    """Describe which chunks of one tensor overlap, on which ranks, and where a gap is.

    Only called when something is known to be wrong, so clarity comes before speed.
    """
    dims = len(shape)

    def chunk(row: int) -> str:
        box = _box(offsets[row], sizes[row], dims)
        return box if ranks is None else f"{box} of rank {ranks[row]}"

    complaints = [
        f"chunks {chunk(a)} and {chunk(b)} overlap" for a, b in find_overlapping(offsets, sizes)
    ]
    gap = _first_gap(shape, offsets, sizes)
    if gap is not None:
        complaints.append(f"nobody holds {_box(gap[0], gap[1], dims)}")
    return "; ".join(complaints) or "its chunks do not tile it"


def _box(offsets: Sequence[int] | Ints, sizes: Sequence[int] | Ints, dims: int) -> str:
    """`[0:4, 8:16]`, as one would slice it."""
    parts = (f"{int(o)}:{int(o) + int(s)}" for o, s in zip(offsets, sizes, strict=True))
    return "[" + ", ".join(list(parts)[:dims]) + "]"


def _first_gap(
    shape: Sequence[int], offsets: Ints, sizes: Ints
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """A box that no chunk covers, by cutting the chunks out of the whole."""
    dims = len(shape)
    remaining = [((0,) * dims, tuple(shape))] if all(shape) else []
    cuts = 0
    for low, size in zip(offsets[:, :dims].tolist(), sizes[:, :dims].tolist(), strict=True):
        if not all(size):
            # It covers nothing, and cutting it out would leave pieces without elements.
            continue
        high = [a + b for a, b in zip(low, size, strict=True)]
        remaining = [piece for box in remaining for piece in _cut_out(box, low, high)]
        cuts += len(remaining)
        if len(remaining) > _MOST_PIECES or cuts > _MOST_CUTS:
            return None
    if not remaining:
        return None
    begin, end = min(remaining)
    return begin, tuple(b - a for a, b in zip(begin, end, strict=True))


def _cut_out(
    box: tuple[tuple[int, ...], tuple[int, ...]], low: Sequence[int], high: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The parts of `box` outside of the chunk from `low` to `high`."""
    begin, end = box
    if (
        any(h <= b or lo >= e for b, e, lo, h in zip(begin, end, low, high, strict=True))
        or not begin
    ):
        return [] if not begin else [box]
    pieces = []
    begin_list, end_list = list(begin), list(end)
    for dim, (lo, h) in enumerate(zip(low, high, strict=True)):
        if begin_list[dim] < lo:
            pieces.append((tuple(begin_list), (*end_list[:dim], lo, *end_list[dim + 1 :])))
            begin_list[dim] = lo
        if h < end_list[dim]:
            pieces.append(((*begin_list[:dim], h, *begin_list[dim + 1 :]), tuple(end_list)))
            end_list[dim] = h
    return pieces

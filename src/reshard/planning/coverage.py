"""Proof that chunks make a whole: no gap, no overlap, nothing outside.

The test is exact and near-linear in any number of dimensions. The indicator function
of a box is determined by its signed corners: corner c has the sign (-1)^(number of
dimensions in which c lies at the upper end), since that is where its mixed derivative
lives. So chunks tile a tensor if and only if their signed corners add up to the signed
corners of the tensor itself. That takes one sort, not a comparison of pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reshard.planning.columns import Bools, Ints
from reshard.planning.intersection import intersect
from reshard.planning.keys import rank_points

__all__ = [
    "Chunks",
    "find_overlapping",
    "find_untiled",
    "find_untiled_rows",
    "out_of_bounds",
    "survey",
    "describe_problem",
]

_MOST_PIECES = 4096


class Chunks(NamedTuple):
    """The chunks of many tensors, tensor after tensor.

    Tensor `t` has the shape `shapes[t]` and the chunks `starts[t]` to `starts[t + 1]`.
    """

    shapes: Ints
    starts: Ints
    offsets: Ints
    sizes: Ints

    @property
    def owners(self) -> Ints:
        """The tensor that each chunk belongs to."""
        return np.repeat(np.arange(len(self.shapes)), np.diff(self.starts))

    def of(self, tensor: int) -> tuple[Ints, Ints]:
        """The offsets and sizes of one tensor's chunks."""
        rows = slice(int(self.starts[tensor]), int(self.starts[tensor + 1]))
        return self.offsets[rows], self.sizes[rows]


def out_of_bounds(shapes: Ints, offsets: Ints, sizes: Ints, owners: Ints) -> Bools:
    """Which rows reach outside of their owner's shape, or have a negative offset or size."""
    bad, _ = survey(shapes, offsets, sizes, owners)
    return bad


def survey(shapes: Ints, offsets: Ints, sizes: Ints, owners: Ints) -> tuple[Bools, Bools]:
    """Which rows are out of bounds, and along which dimensions each tensor is cut."""
    bad = np.zeros(len(owners), dtype=bool)
    cut_dims = np.zeros(shapes.shape, dtype=bool)
    for dim in range(shapes.shape[1]):
        offset, size, extent = offsets[:, dim], sizes[:, dim], shapes[owners, dim]
        # Written without a sum, which could wrap around for absurd numbers.
        bad |= (offset < 0) | (size < 0) | (offset > extent) | (size > extent - offset)
        cut_dims[owners[(offset != 0) | (size != extent)], dim] = True
    return bad, cut_dims


def find_untiled(chunks: Chunks) -> Ints:
    """The tensors that their chunks do not cover exactly. All chunks are in bounds."""
    owners = chunks.owners
    _, cut_dims = survey(chunks.shapes, chunks.offsets, chunks.sizes, owners)
    return find_untiled_rows(chunks.shapes, owners, chunks.offsets, chunks.sizes, cut_dims)


def find_untiled_rows(
    shapes: Ints,
    owners: Ints,
    offsets: Ints,
    sizes: Ints,
    cut_dims: Bools,
    order: Ints | None = None,
) -> Ints:
    """The same for chunks in any order, given where tensors are cut.

    `order`, if given, says which rows count and sorts them by owner and position.
    """
    empty = (sizes == 0).any(axis=1)
    rows = order
    if empty.any():
        rows = np.flatnonzero(~empty) if order is None else order[~empty[order]]
    counted = owners if rows is None else owners[rows]
    counts = np.bincount(counted, minlength=len(shapes))
    wants_chunks = (shapes > 0).all(axis=1)
    bad = wants_chunks & (counts == 0)
    # A tensor without elements is whole whatever its empty chunks say.
    n_cut = np.where(wants_chunks, cut_dims.sum(axis=1), 0)
    bad |= (n_cut == 0) & (counts > 1)
    for dim in range(shapes.shape[1]):
        chosen = (n_cut == 1) & cut_dims[:, dim]
        if chosen.any():
            starts, lengths = offsets[:, dim], sizes[:, dim]
            if rows is not None:
                starts, lengths = starts[rows], lengths[rows]
            bad |= _untiled_along(chosen, counted, starts, lengths, shapes[:, dim])
    several = n_cut > 1
    if several.any():
        dims = np.flatnonzero(cut_dims[several].any(axis=0)).tolist()
        some = np.flatnonzero(several[counted])
        kept = some if rows is None else rows[some]
        bad |= _untiled_by_corners(several, dims, counted[some], offsets[kept], sizes[kept], shapes)
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


def _untiled_by_corners(
    chosen: Bools, dims: Sequence[int], owners: Ints, offsets: Ints, sizes: Ints, shapes: Ints
) -> Bools:
    """Of the `chosen` tensors, those whose chunks' signed corners do not add up."""
    tensors = np.flatnonzero(chosen)
    # The tensor itself takes part as a chunk of opposite sign: all must cancel out.
    owners = np.concatenate([owners, tensors])
    lows = np.concatenate([offsets[:, dims], np.zeros((len(tensors), len(dims)), dtype=np.int64)])
    highs = np.concatenate([(offsets + sizes)[:, dims], shapes[tensors][:, dims]])
    signs = np.ones(len(owners), dtype=np.int64)
    signs[-len(tensors) :] = -1

    corners = [
        (
            np.where(np.array(upper), highs, lows),
            signs if sum(upper) % 2 == 0 else -signs,
        )
        for upper in itertools.product((False, True), repeat=len(dims))
    ]
    points = np.concatenate([point for point, _ in corners])
    weights = np.concatenate([weight for _, weight in corners])
    everyone = np.tile(owners, len(corners))
    keys = rank_points(everyone, points, shapes[:, dims])
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    begins = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1))
    left_over = np.add.reduceat(weights[order], begins) != 0
    bad = np.zeros(len(chosen), dtype=bool)
    bad[everyone[order[begins[left_over]]]] = True
    return bad


def find_overlapping(offsets: Ints, sizes: Ints, most: int = 3) -> list[tuple[int, int]]:
    """Up to `most` pairs of chunks of one tensor that overlap."""
    if len(offsets) < 2:
        return []
    overlaps = intersect(offsets, sizes, offsets, sizes)
    distinct = np.flatnonzero(overlaps.left < overlaps.right)[:most]
    return list(
        zip(overlaps.left[distinct].tolist(), overlaps.right[distinct].tolist(), strict=True)
    )


def describe_problem(
    shape: Sequence[int], offsets: Ints, sizes: Ints, ranks: Ints | None = None
) -> str:
    """In words: which chunks of one tensor overlap, on which ranks, and where a gap is.

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
    for low, size in zip(offsets[:, :dims].tolist(), sizes[:, :dims].tolist(), strict=True):
        high = [a + b for a, b in zip(low, size, strict=True)]
        remaining = [piece for box in remaining for piece in _cut_out(box, low, high)]
        if len(remaining) > _MOST_PIECES:
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

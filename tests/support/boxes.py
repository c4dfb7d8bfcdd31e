"""Random boxes and tilings, and slow, obvious answers about them by counting elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from reshard.planning.columns import ChunkTable

Ints = npt.NDArray[np.int64]


class Box(NamedTuple):
    """From `low`, included, to `high`, excluded."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(h - lo for lo, h in zip(self.low, self.high, strict=True))

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(lo, h) for lo, h in zip(self.low, self.high, strict=True))

    def with_range(self, dim: int, low: int, high: int) -> Box:
        return Box(
            (*self.low[:dim], low, *self.low[dim + 1 :]),
            (*self.high[:dim], high, *self.high[dim + 1 :]),
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{lo}:{h}" for lo, h in zip(*self, strict=True)) + "]"


class Tiled(NamedTuple):
    """The shape of a tensor, and boxes that may or may not tile it."""

    shape: tuple[int, ...]
    boxes: list[Box]


def count_cover(tensor: Tiled) -> Ints:
    """How many boxes hold each element."""
    counts = np.zeros(tensor.shape, dtype=np.int64)
    for box in tensor.boxes:
        counts[box.slices] += 1
    return counts


def is_tiled(tensor: Tiled) -> bool:
    return bool((count_cover(tensor) == 1).all())


def columns_of(boxes: Sequence[Box], dims: int, width: int | None = None) -> tuple[Ints, Ints]:
    """Offsets and sizes of boxes, padded to `width` columns as plans are."""
    offsets = np.zeros((len(boxes), dims if width is None else width), dtype=np.int64)
    sizes = np.ones_like(offsets)
    for row, box in enumerate(boxes):
        offsets[row, :dims] = box.low
        sizes[row, :dims] = box.sizes
    return offsets, sizes


def chunks_of(tensors: Sequence[Tiled]) -> ChunkTable:
    """Several tensors as the columns that validation takes."""
    width = max([1, *(len(tensor.shape) for tensor in tensors)])
    shapes = np.ones((len(tensors), width), dtype=np.int64)
    for row, tensor in enumerate(tensors):
        shapes[row, : len(tensor.shape)] = tensor.shape
    parts = [columns_of(tensor.boxes, len(tensor.shape), width) for tensor in tensors]
    starts = np.cumsum([0, *(len(tensor.boxes) for tensor in tensors)])
    zeros = np.zeros(len(tensors), dtype=np.int64)
    return ChunkTable(
        names=[f"layer.{row}.w" for row in range(len(tensors))],
        dtypes=zeros,
        flags=zeros,
        ndims=np.array([len(tensor.shape) for tensor in tensors], dtype=np.int64),
        shapes=shapes,
        aliases=zeros - 1,
        starts=starts,
        offsets=np.concatenate([offsets for offsets, _ in parts]),
        sizes=np.concatenate([sizes for _, sizes in parts]),
    )


@st.composite
def boxes_within(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """Any box in bounds, empty ones too."""
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in ends), tuple(high for _, high in ends))


def small_shapes(min_dims: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    return (
        st.lists(st.one_of(st.integers(1, 7), st.integers(3, 12)), min_size=min_dims, max_size=5)
        .map(tuple)
        .filter(lambda shape: math.prod(shape) <= 3000)
    )


@st.composite
def tilings(draw: st.DrawFn, min_dims: int = 1) -> Tiled:
    """An exact cover: cut in two or into a pinwheel, again and again, then shuffled."""
    shape = draw(small_shapes(min_dims))
    pending, done = [Box((0,) * len(shape), shape)], []
    for _ in range(draw(st.integers(0, 12))):
        if not pending:
            break
        box = pending.pop(draw(st.integers(0, len(pending) - 1)))
        wide = [dim for dim, size in enumerate(box.sizes) if size >= 3]
        if len(wide) >= 2 and draw(st.booleans()):
            across, along = draw(st.permutations(wide))[:2]
            pending += _pinwheel(draw, box, across, along)
            continue
        splittable = [dim for dim, size in enumerate(box.sizes) if size >= 2]
        if not splittable:
            done.append(box)
            continue
        dim = draw(st.sampled_from(splittable))
        at = draw(st.integers(box.low[dim] + 1, box.high[dim] - 1))
        pending += [
            box.with_range(dim, box.low[dim], at),
            box.with_range(dim, at, box.high[dim]),
        ]
    if draw(st.booleans()):
        # A rank that got nothing offers an empty chunk; it changes nothing.
        done.append(Box(shape, shape))
    return Tiled(shape, draw(st.permutations(done + pending)))


def _pinwheel(draw: st.DrawFn, box: Box, across: int, along: int) -> list[Box]:
    """Four boxes around a fifth: no straight cut goes through."""

    def inner(dim: int) -> list[int]:
        low, high = box.low[dim], box.high[dim]
        first = draw(st.integers(low + 1, high - 2))
        return [low, first, draw(st.integers(first + 1, high - 1)), high]

    x, y = inner(across), inner(along)

    def blade(x0: int, x1: int, y0: int, y1: int) -> Box:
        return box.with_range(across, x[x0], x[x1]).with_range(along, y[y0], y[y1])

    return [
        blade(0, 2, 0, 1),
        blade(2, 3, 0, 2),
        blade(1, 3, 2, 3),
        blade(0, 1, 1, 3),
        blade(1, 2, 1, 2),
    ]


@st.composite
def damaged(draw: st.DrawFn, tensor: Tiled) -> Tiled:
    """`tensor` after one to three accidents. Everything stays in bounds.

    Accidents may cancel out, so ask `is_tiled` what became of it.
    """
    boxes = list(tensor.boxes)
    for _ in range(draw(st.integers(1, 3))):
        if not boxes:
            break
        position = draw(st.integers(0, len(boxes) - 1))
        box = boxes.pop(position)
        match draw(st.sampled_from(["drop", "double", "move", "resize", "trade", "replace"])):
            case "double":
                boxes += [box, box]
            case "move":
                boxes.append(_moved(draw, box, tensor.shape))
            case "resize":
                boxes.append(_resized(draw, box, tensor.shape))
            case "trade" if boxes:
                # One box loses a slice, another doubles one of the same volume if it can.
                other = boxes[draw(st.integers(0, len(boxes) - 1))]
                dim = draw(st.integers(0, len(tensor.shape) - 1))
                low, high = box.low[dim], box.high[dim]
                boxes.append(box.with_range(dim, min(low + 1, high), high))
                boxes.append(
                    other.with_range(dim, other.low[dim], min(other.low[dim] + 1, other.high[dim]))
                )
            case "replace" if boxes:
                # The volume stays the same if there is another box of this volume.
                same = [other for other in boxes if other.volume == box.volume] or boxes
                boxes.append(draw(st.sampled_from(same)))
            case _:
                pass
    return Tiled(tensor.shape, boxes)


def _moved(draw: st.DrawFn, box: Box, shape: Sequence[int]) -> Box:
    dim = draw(st.integers(0, len(shape) - 1))
    size = box.sizes[dim]
    low = draw(st.integers(0, shape[dim] - size))
    return box.with_range(dim, low, low + size)


def _resized(draw: st.DrawFn, box: Box, shape: Sequence[int]) -> Box:
    dim = draw(st.integers(0, len(shape) - 1))
    low, high = sorted(draw(st.tuples(st.integers(0, shape[dim]), st.integers(0, shape[dim]))))
    return box.with_range(dim, low, high)

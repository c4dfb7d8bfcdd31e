"""Regions as runs of bytes: which are contiguous in a stored chunk, and where they begin."""

from __future__ import annotations

from collections.abc import Sequence


def is_one_run(shape: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether a region of `lengths` is contiguous in a chunk of `shape`."""
    if shape == lengths:
        return True
    return all(length == 1 for length in lengths[: _last_partial(shape, lengths)])


def _last_partial(shape: Sequence[int], lengths: Sequence[int]) -> int:
    """The last dimension of which only a part is wanted, or 0 if there is none."""
    for dim in range(len(shape) - 1, 0, -1):
        if lengths[dim] != shape[dim]:
            return dim
    return 0


def ravel(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """The position of an element in row-major order."""
    position = 0
    for extent, offset in zip(shape, offsets, strict=True):
        position = position * extent + offset
    return position

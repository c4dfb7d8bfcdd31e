"""Stored tensors, copied to places in files. Memory is bounded, however large a tensor is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from reshard.checkpoint.stored_tensors import StoredTensors
from reshard.convert.selection import Picked
from reshard.engine.memory import byte_view
from reshard.engine.runs import ravel
from reshard.stores.protocol import Writer

_WHOLE_BYTES = 32 << 20
"""Tensors up to this size are read at once, and so are regions of larger ones."""


class Destination(NamedTuple):
    """Where a tensor goes."""

    tensor: Picked
    writer: Writer
    begin: int


def copy_tasks(
    source: StoredTensors, places: Sequence[Destination], advance: Callable[[int], None]
) -> list[Callable[[], None]]:
    """What is to be done, in any order and in threads, to copy tensors to their places."""
    tasks: list[Callable[[], None]] = []
    for place in places:
        picked = place.tensor
        is_large = picked.nbytes > _WHOLE_BYTES
        slabs = source.slabs(picked.tensor) if is_large else None
        if slabs is not None:
            tasks += [partial(_copy_slab, source, place, slab, advance) for slab in slabs]
            continue
        if is_large:
            # None of its chunks is read whole, so they are verified by themselves.
            rows = source.rows(picked.tensor)
            tasks += [partial(source.check, picked.tensor, row) for row in rows]
        for offsets, sizes in regions_of(picked.shape, picked.dtype.itemsize):
            tasks.append(partial(_copy_region, source, place, offsets, sizes, advance))
    return tasks


def _copy_region(
    source: StoredTensors,
    place: Destination,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    advance: Callable[[int], None],
) -> None:
    picked = place.tensor
    region = torch.empty(sizes, dtype=source.dtype(picked.tensor), device="cpu")
    source.read(picked.tensor, offsets, sizes, region)
    first = ravel(picked.shape, offsets)
    _write(place, first, region, advance)


def _copy_slab(
    source: StoredTensors,
    place: Destination,
    slab: Sequence[int],
    advance: Callable[[int], None],
) -> None:
    row_elements = math.prod(place.tensor.shape[1:])
    source.stream(
        place.tensor.tensor,
        slab,
        lambda row, rows: _write(place, row * row_elements, rows, advance),
    )


def _write(
    place: Destination, first: int, data: torch.Tensor, advance: Callable[[int], None]
) -> None:
    data = data.to(place.tensor.dtype)
    view = byte_view(data)
    position = place.begin + first * data.itemsize
    place.writer.write(position, [view] if view else [])
    place.writer.start_sync(position, len(view))
    advance(len(view))


def regions_of(
    shape: tuple[int, ...], itemsize: int, most_bytes: int = _WHOLE_BYTES
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A tensor as regions that are contiguous in it, and not too large."""
    if math.prod(shape) * itemsize <= most_bytes:
        yield (0,) * len(shape), shape
        return
    row_bytes = math.prod(shape[1:]) * itemsize
    if row_bytes > most_bytes:
        for row in range(shape[0]):
            for offsets, sizes in regions_of(shape[1:], itemsize, most_bytes):
                yield (row, *offsets), (1, *sizes)
        return
    step = most_bytes // row_bytes
    for row in range(0, shape[0], step):
        yield (row, *(0,) * (len(shape) - 1)), (min(step, shape[0] - row), *shape[1:])

"""Stored tensors, copied to places in files. Memory is bounded, however large a tensor is."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from reshard.checkpoint.stored_tensors import StoredTensors
from reshard.convert.selection import Picked
from reshard.engine.memory import BounceBuffer, byte_view
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
    copying = _Copying(source, advance)
    tasks: list[Callable[[], None]] = []
    for place in places:
        picked = place.tensor
        is_large = picked.nbytes > _WHOLE_BYTES
        slabs = source.slabs(picked.tensor) if is_large else None
        if slabs is not None:
            tasks += [partial(copying.copy_slab, place, slab) for slab in slabs]
            continue
        if is_large:
            # None of its chunks is read whole, so they are verified by themselves.
            rows = source.rows(picked.tensor)
            tasks += [partial(source.check, picked.tensor, row) for row in rows]
        for offsets, sizes in regions_of(picked.shape, picked.dtype.itemsize):
            tasks.append(partial(copying.copy_region, place, offsets, sizes))
    return tasks


class _Copying:
    """Copies parts of tensors. Each thread has buffers of its own, since new memory is slow."""

    def __init__(self, source: StoredTensors, advance: Callable[[int], None]) -> None:
        self._source = source
        self._advance = advance
        self._local = threading.local()

    def copy_region(
        self, place: Destination, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> None:
        """Copy a region that is contiguous in its tensor."""
        picked = place.tensor
        region = self._buffer("region", sizes, self._source.dtype(picked.tensor))
        self._source.read(picked.tensor, offsets, sizes, region)
        self._write(place, ravel(picked.shape, offsets), region)

    def copy_slab(self, place: Destination, slab: Sequence[int]) -> None:
        """Copy chunks that are some rows of their tensor."""
        row_elements = math.prod(place.tensor.shape[1:])
        self._source.stream(
            place.tensor.tensor,
            slab,
            lambda row, rows: self._write(place, row * row_elements, rows),
        )

    def _write(self, place: Destination, first: int, data: torch.Tensor) -> None:
        dtype = place.tensor.dtype
        if data.dtype is not dtype:
            data = self._buffer("cast", tuple(data.shape), dtype).copy_(data)
        view = byte_view(data)
        position = place.begin + first * data.itemsize
        place.writer.write(position, [view] if view else [])
        place.writer.start_sync(position, len(view))
        self._advance(len(view))

    def _buffer(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory that is valid until this thread asks for the same purpose again."""
        buffer: BounceBuffer | None = getattr(self._local, purpose, None)
        if buffer is None:
            buffer = BounceBuffer(_WHOLE_BYTES)
            setattr(self._local, purpose, buffer)
        return buffer.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


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

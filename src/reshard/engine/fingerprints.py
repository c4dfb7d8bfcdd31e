"""Fingerprints of what is in memory, in threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from reshard.engine.memory import BounceBuffer, pieces
from reshard.engine.workers import run_all
from reshard.engine.writing import Content
from reshard.format.fingerprint import Fingerprint, RegionFingerprint, fingerprint
from reshard.format.word_sums import expect

_TASK_BYTES = 32 << 20
_PIECE_BYTES = 8 << 20
_SMALL_BYTES = 256 << 10
_MOST_TOGETHER = 256


Fingerprints: TypeAlias = npt.NDArray[np.uint64]
"""Rows of two numbers."""


class RegionInMemory(NamedTuple):
    """A region that begins at `offsets` in a tensor of `shape`, and its elements."""

    tensor: torch.Tensor
    shape: Sequence[int]
    offsets: Sequence[int]


def fingerprint_regions(regions: Sequence[RegionInMemory], threads: int) -> Fingerprints:
    """What each region adds to the fingerprint of its tensor."""
    expect(sum(region.tensor.nbytes for region in regions))
    sums = np.zeros((len(regions), 2), dtype=np.uint64)
    lock = threading.Lock()

    def add(task: Sequence[tuple[int, RegionInMemory]]) -> None:
        for i, region in task:
            part = _fingerprint(region)
            with lock:
                sums[i] += part

    run_all(add, _tasks(regions), threads)
    return sums


def fingerprint_contents(contents: Sequence[Content], threads: int) -> Fingerprints:
    """The same for chunks that are not written, or not yet."""
    expect(sum(content.nbytes for content in contents))
    sums = np.zeros((len(contents), 2), dtype=np.uint64)

    def add(i: int) -> None:
        content, data = contents[i], contents[i].resolve()
        shape, offsets = content.tensor_shape, content.offsets
        if isinstance(data, torch.Tensor) and shape is not None and offsets is not None:
            sums[i] = _fingerprint(RegionInMemory(data.detach(), shape, offsets))

    run_all(add, range(len(contents)), threads)
    return sums


def _tasks(
    regions: Sequence[RegionInMemory],
) -> Iterator[list[tuple[int, RegionInMemory]]]:
    """Large regions in parts, which add up; small ones together."""
    small: list[tuple[int, RegionInMemory]] = []
    for i, region in enumerate(regions):
        if region.tensor.nbytes > _SMALL_BYTES:
            for part in _parts(region):
                yield [(i, part)]
            continue
        small.append((i, region))
        if len(small) >= _MOST_TOGETHER:
            yield small
            small = []
    if small:
        yield small


def _parts(region: RegionInMemory) -> Iterator[RegionInMemory]:
    tensor, shape, offsets = region
    if not tensor.dim():
        yield region
        return
    rows = max(1, _TASK_BYTES * len(tensor) // tensor.nbytes)
    for begin in range(0, len(tensor), rows):
        part = tensor.narrow(0, begin, min(rows, len(tensor) - begin))
        yield RegionInMemory(part, shape, (offsets[0] + begin, *offsets[1:]))


def _fingerprint(region: RegionInMemory) -> Fingerprint:
    tensor, shape, offsets = region
    if tensor.is_cpu:
        return fingerprint(tensor, shape, offsets)
    part = RegionFingerprint(tensor.dtype.itemsize, shape, offsets, tensor.shape)
    for piece in pieces(tensor, _PIECE_BYTES, BounceBuffer(_PIECE_BYTES)):
        part.update(piece)
    return part.sums()

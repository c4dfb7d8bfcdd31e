"""Fingerprints of tensors: 128 bits that do not depend on how a tensor is cut up.

The parts of disjoint regions add up (two sums modulo 2**64) to the fingerprint of the whole
tensor. `docs/design/fingerprints.md` has the definition, and says how strong it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from reshard.format.word_sums import BLOCK_WORDS, WordSummer, choose_summer

Fingerprint: TypeAlias = npt.NDArray[np.uint64]
"""Two numbers."""

_WORD_BYTES = 8
_BLOCK_BYTES = BLOCK_WORDS * _WORD_BYTES
_LEAST_ROW_BYTES = 512
_COPY_BYTES = 512 << 10

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(data: torch.Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Fingerprint:
    """The part of a region that begins at `offsets` in a tensor of `shape`.

    `data` is in CPU memory, with any strides. Only its bits count: not its dtype, but the size
    of its elements.
    """
    part = RegionFingerprint(data.dtype.itemsize, shape, offsets, data.shape)
    part.add_all(data)
    return part.sums()


class RegionFingerprint:
    """The part of one region of a tensor, from its elements, given at once or in pieces."""

    def __init__(
        self, itemsize: int, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
    ) -> None:
        shape, offsets, sizes = tuple(shape), tuple(offsets), tuple(sizes)
        # An element of 16 bytes is two of 8; a tensor without dimensions has one of one element.
        if itemsize > _WORD_BYTES or not shape:
            shape, offsets = (*shape, max(1, itemsize // 8)), (*offsets, 0)
            sizes = (*sizes, shape[-1])
        self._itemsize = min(itemsize, _WORD_BYTES)
        self._shape, self._offsets, self._sizes = shape, offsets, sizes
        self._split = _first_column_dimension(shape, self._itemsize)
        """Dimensions before this one count rows; this one and those after it, columns."""
        self._column_sizes = shape[self._split + 1 :]
        row_bytes = math.prod(shape[self._split :]) * self._itemsize
        self._blocks_per_row = -(-row_bytes // _BLOCK_BYTES)
        self._done = 0
        self._summer: WordSummer = choose_summer(math.prod(sizes) * self._itemsize)

    def add_all(self, data: torch.Tensor) -> None:
        """Add the whole region."""
        if data.numel():
            self._add_box(_as_integers(data).reshape(self._sizes), self._offsets)

    def update(self, data: Any) -> None:
        """Add the next bytes of the region, in row-major order: whole elements."""
        elements = np.frombuffer(data, dtype=f"u{self._itemsize}")
        begin = self._done
        self._done += len(elements)
        for offsets, sizes in _boxes(self._sizes, begin, self._done):
            count = math.prod(sizes)
            box, elements = elements[:count].reshape(sizes), elements[count:]
            self._add_box(box, _plus(self._offsets, offsets))

    def sums(self) -> Fingerprint:
        return self._summer.sums()

    def _add_box(self, box: npt.NDArray[Any], offsets: Sequence[int]) -> None:
        split, sizes = self._split, box.shape
        if sizes[split + 1 :] == self._column_sizes and _is_dense(box, split):
            self._add_rows(box.reshape(-1, math.prod(sizes[split:])), sizes, offsets)
            return
        # Columns with gaps are filled up with zeros, which count nothing; strides are removed.
        row_bytes = sizes[split] * math.prod(self._column_sizes) * self._itemsize
        if math.prod(sizes[:split]) * row_bytes > _COPY_BYTES and max(sizes[: split + 1]) > 1:
            for begin, piece in _halves(box, split):
                self._add_box(piece, _plus(offsets, begin))
            return
        dense = np.zeros((*sizes[: split + 1], *self._column_sizes), dtype=box.dtype)
        place = [slice(None)] * (split + 1)
        for offset, size in zip(offsets[split + 1 :], sizes[split + 1 :], strict=True):
            place.append(slice(offset, offset + size))
        if box.flags.c_contiguous:
            dense[tuple(place)] = box
        else:
            # torch copies transposed memory several times as fast as numpy.
            torch.from_numpy(dense[tuple(place)]).copy_(torch.from_numpy(box))
        self._add_rows(dense.reshape(-1, math.prod(dense.shape[split:])), dense.shape, offsets)

    def _add_rows(
        self, rows: npt.NDArray[Any], sizes: Sequence[int], offsets: Sequence[int]
    ) -> None:
        """Add neighbouring columns of some rows."""
        count, width = rows.shape
        first_byte = offsets[self._split] * math.prod(self._column_sizes) * self._itemsize
        direct = _holds_words(rows, first_byte)
        batch_bytes = self._summer.batch_bytes if direct else _COPY_BYTES
        # All but the first batch of a long row begin with a block.
        in_block = first_byte % _BLOCK_BYTES // self._itemsize
        step = batch_bytes // self._itemsize
        height = max(1, batch_bytes // max(1, min(width, step) * self._itemsize))
        for top in range(0, count, height):
            numbers = self._block_numbers(top, min(top + height, count), sizes, offsets)
            left = 0
            while left < width:
                right = min(width, left + step - (in_block if left == 0 else 0))
                batch = rows[top : top + height, left:right]
                begin = first_byte + left * self._itemsize
                if direct and batch.shape[1] * self._itemsize % _WORD_BYTES == 0:
                    words = batch.view(np.uint64)
                else:
                    words = _padded_words(batch, begin)
                self._summer.add(words, begin // _WORD_BYTES, numbers)
                left = right

    def _block_numbers(
        self, begin: int, end: int, sizes: Sequence[int], offsets: Sequence[int]
    ) -> npt.NDArray[np.uint64]:
        """The number of the first block of some rows of a box."""
        split = self._split
        if not split:
            return np.zeros(end - begin, dtype=np.uint64)
        at = np.arange(begin, end, dtype=np.int64)
        if split == 1:
            return ((at + offsets[0]) * self._blocks_per_row).view(np.uint64)
        row, stride = np.zeros(end - begin, dtype=np.int64), 1
        for size, offset, extent in zip(
            sizes[:split][::-1], offsets[:split][::-1], self._shape[:split][::-1], strict=True
        ):
            at, within = np.divmod(at, size)
            row += (within + offset) * stride
            stride *= extent
        return (row * self._blocks_per_row).view(np.uint64)


def _first_column_dimension(shape: Sequence[int], itemsize: int) -> int:
    nbytes = itemsize
    for dimension in range(len(shape) - 1, -1, -1):
        nbytes *= shape[dimension]
        if nbytes >= _LEAST_ROW_BYTES:
            return dimension
    return 0


def _as_integers(data: torch.Tensor) -> npt.NDArray[Any]:
    data = data.detach().resolve_conj().resolve_neg()
    if data.dtype.itemsize > _WORD_BYTES:
        data = torch.view_as_real(data)
    array: npt.NDArray[Any] = data.view(_INTEGERS[data.dtype.itemsize]).numpy()
    return array


def _is_dense(box: npt.NDArray[Any], split: int) -> bool:
    """Whether a box is a matrix whose rows are contiguous, without a copy."""
    if box.flags.c_contiguous:
        return True
    strides = [
        (stride, size) for stride, size in zip(box.strides, box.shape, strict=True) if size > 1
    ]
    inside = sum(size > 1 for size in box.shape[split:])
    nbytes = box.itemsize
    for i, (stride, size) in enumerate(reversed(strides)):
        if i == inside and inside < len(strides):
            nbytes = stride
        if stride != nbytes:
            return False
        nbytes *= size
    return True


def _holds_words(rows: npt.NDArray[Any], first_byte: int) -> bool:
    """Whether the words of rows can be read where they are."""
    nbytes = rows.shape[1] * rows.itemsize
    aligned = rows.ctypes.data % _WORD_BYTES == 0 and first_byte % _WORD_BYTES == 0
    if len(rows) == 1:
        return aligned
    return aligned and nbytes % _WORD_BYTES == 0 and rows.strides[0] % _WORD_BYTES == 0


def _padded_words(rows: npt.NDArray[Any], first_byte: int) -> npt.NDArray[np.uint64]:
    """A copy of rows as words, with zeros before and after them."""
    before = first_byte % _WORD_BYTES // rows.itemsize
    per_word = _WORD_BYTES // rows.itemsize
    padded = np.zeros((len(rows), -(-(before + rows.shape[1]) // per_word) * per_word), rows.dtype)
    padded[:, before : before + rows.shape[1]] = rows
    return padded.view(np.uint64)


def _boxes(
    sizes: Sequence[int], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of elements of a box, in row-major order, into boxes."""
    if begin >= end:
        return
    inner = math.prod(sizes[1:])
    if inner == 1:
        zeros, ones = (0,) * (len(sizes) - 1), (1,) * (len(sizes) - 1)
        yield (begin, *zeros), (end - begin, *ones)
        return
    first, last = -(-begin // inner), end // inner
    if first > last:
        yield from _within(sizes, last, begin - last * inner, end - last * inner)
        return
    if begin < first * inner:
        yield from _within(sizes, first - 1, begin - (first - 1) * inner, inner)
    if first < last:
        yield (first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])
    if last * inner < end:
        yield from _within(sizes, last, 0, end - last * inner)


def _within(
    sizes: Sequence[int], index: int, begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, inner in _boxes(sizes[1:], begin, end):
        yield (index, *offsets), (1, *inner)


def _halves(
    box: npt.NDArray[Any], split: int
) -> Iterator[tuple[tuple[int, ...], npt.NDArray[Any]]]:
    dimension = next(d for d in range(split + 1) if box.shape[d] > 1)
    middle = box.shape[dimension] // 2
    for begin, end in ((0, middle), (middle, box.shape[dimension])):
        offsets = [0] * box.ndim
        offsets[dimension] = begin
        place = [slice(None)] * dimension + [slice(begin, end)]
        yield tuple(offsets), box[tuple(place)]


def _plus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))

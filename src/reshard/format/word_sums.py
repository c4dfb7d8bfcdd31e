"""The weighted sums under fingerprints, over words of 64 bits; with numpy, or with numba.

Both give the same numbers. numba is never imported before there is much to add up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
Sums: TypeAlias = npt.NDArray[np.uint64]

BLOCK_WORDS = 1024

GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
_MASK = (1 << 64) - 1

# Importing numba takes half a second, and compiling another where it cannot be cached.
_NUMBA_BYTES = 256 << 20
_MOST_BLOCKS = 4096


class WordSummer(Protocol):
    """One way to compute the sums."""

    batch_bytes: int
    """How much to add at once, for the cache."""

    def add(self, words: Words, first: int, numbers: Words) -> None:
        """Add rows of words.

        The first column is word `first` of a row, whose first block has the number that
        `numbers` says.
        """
        ...

    def sums(self) -> Sums:
        """Both sums of all that was added."""
        ...


def expect(nbytes: int) -> None:
    """Load what is fastest for so many bytes, before they are added up one region at a time."""
    if nbytes >= _NUMBA_BYTES:
        _numba_kernel()


def choose_summer(nbytes: int) -> WordSummer:
    """The fastest way to add up so many bytes, of those that are loaded or worth it."""
    expect(nbytes)
    kernel = _numba_kernel() if _numba_kernel.cache_info().currsize else None
    return NumpySummer() if kernel is None else NumbaSummer(kernel)


def mix(number: int) -> int:
    """The finaliser of splitmix64."""
    number = ((number ^ (number >> 30)) * FIRST_FACTOR) & _MASK
    number = ((number ^ (number >> 27)) * SECOND_FACTOR) & _MASK
    return number ^ (number >> 31)


def weights(seeds: Words, numbers: Words) -> Words:
    """Members of streams of weights: splitmix64, for each seed and each number."""
    z: Words = (numbers + np.uint64(1)) * np.uint64(GOLDEN) + seeds[:, None]
    z ^= z >> np.uint64(30)
    z *= np.uint64(FIRST_FACTOR)
    z ^= z >> np.uint64(27)
    z *= np.uint64(SECOND_FACTOR)
    z ^= z >> np.uint64(31)
    return z


class NumpySummer:
    batch_bytes = 512 << 10

    def __init__(self) -> None:
        self._columns, self._seeds = _tables()
        self._swapped = np.empty(0, dtype=np.uint64)
        self._sums = np.zeros(2, dtype=np.uint64)
        self._blocks: list[tuple[Words, Words, Words]] = []
        self._block_count = 0

    def add(self, words: Words, first: int, numbers: Words) -> None:
        count, width = words.shape
        block, column = divmod(first, BLOCK_WORDS)
        if count == 1 and column + width <= BLOCK_WORDS:
            self._add_block(words[0], column, int(numbers[0]) + block)
            return
        if self._swapped.size < words.size:
            self._swapped = np.empty(words.size, dtype=np.uint64)
        swapped = self._swapped[: words.size].reshape(words.shape)
        np.copyto(swapped, words.view(">u8"))
        begin = 0
        while begin < width:
            if column or width - begin < BLOCK_WORDS:
                blocks, end = 1, min(width, begin + BLOCK_WORDS - column)
            else:
                blocks = (width - begin) // BLOCK_WORDS
                end = begin + blocks * BLOCK_WORDS
            shape = (count, blocks, (end - begin) // blocks)
            block_numbers = np.arange(block, block + blocks, dtype=np.uint64)
            forward, backward = self._columns[:, column : column + shape[2]]
            self._blocks.append(
                (
                    np.einsum("rbw,w->rb", words[:, begin:end].reshape(shape), forward).ravel(),
                    np.einsum("rbw,w->rb", swapped[:, begin:end].reshape(shape), backward).ravel(),
                    np.add.outer(numbers, block_numbers).ravel(),
                )
            )
            self._block_count += count * blocks
            begin, block, column = end, block + blocks, 0
        if self._block_count > _MOST_BLOCKS:
            self._mix_blocks()

    def sums(self) -> Sums:
        self._mix_blocks()
        return self._sums

    def _add_block(self, words: Words, column: int, number: int) -> None:
        """The same for words of one block, with numbers of Python: half of numpy's calls."""
        forward, backward = self._columns[:, column : column + len(words)]
        a, b = int(words @ forward), int(words.byteswap() @ backward)
        w = _block_weights(number)
        self._sums += np.array(
            ((a * w[0] + b * w[1]) & _MASK, (a * w[2] + b * w[3]) & _MASK), dtype=np.uint64
        )

    def _mix_blocks(self) -> None:
        """Weigh the sums of blocks, of many at once since a call of numpy costs more than one."""
        if not self._blocks:
            return
        forward, backward, numbers = map(np.concatenate, zip(*self._blocks, strict=True))
        parts = weights(self._seeds, numbers)
        parts[::2] *= forward
        parts[1::2] *= backward
        self._sums += parts.reshape(2, -1).sum(axis=1, dtype=np.uint64)
        self._blocks.clear()
        self._block_count = 0


class NumbaSummer:
    batch_bytes = 8 << 20

    def __init__(self, kernel: Callable[..., None]) -> None:
        self._columns, self._seeds = _tables()
        self._sums = np.zeros(2, dtype=np.uint64)
        self._kernel = kernel

    def add(self, words: Words, first: int, numbers: Words) -> None:
        count, width = words.shape
        stride = words.strides[0] // 8
        # One-dimensional, since numba must know that neighbours are neighbours in memory.
        span = (stride * (count - 1) + width,)
        flat = np.lib.stride_tricks.as_strided(words, span, (8,))
        self._kernel(self._sums, flat, stride, width, first, numbers, *self._columns, self._seeds)

    def sums(self) -> Sums:
        return self._sums


@functools.cache
def _tables() -> tuple[Words, Words]:
    """The weights of columns, and the seeds of the weights of blocks."""
    seeds = np.array([mix(stream) for stream in range(1, 7)], dtype=np.uint64)
    return weights(seeds[:2], np.arange(BLOCK_WORDS, dtype=np.uint64)), seeds[2:]


@functools.lru_cache(maxsize=256)
def _block_weights(number: int) -> tuple[int, ...]:
    """The four weights of a block. That of number 0 is the only one of most small tensors."""
    step = (number + 1) * GOLDEN
    return tuple(mix((mix(stream) + step) & _MASK) for stream in range(3, 7))


@functools.cache
def _numba_kernel() -> Callable[..., None] | None:
    """None if numba is not installed, or not with this numpy."""
    try:
        from reshard.format.word_sums_numba import compile_kernel
    except ImportError:
        return None
    return compile_kernel()

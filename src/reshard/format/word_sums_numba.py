"""The weighted sums under fingerprints, compiled by numba. Imported only if it is installed."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from reshard.format.word_sums import BLOCK_WORDS, FIRST_FACTOR, GOLDEN, SECOND_FACTOR

# numba would turn a sum of a signed and an unsigned number into a float.
_U = np.uint64
_0, _1, _8, _16, _32 = _U(0), _U(1), _U(8), _U(16), _U(32)
_27, _30, _31 = _U(27), _U(30), _U(31)
_GOLDEN, _FIRST_FACTOR, _SECOND_FACTOR = _U(GOLDEN), _U(FIRST_FACTOR), _U(SECOND_FACTOR)
_EVEN_BYTES, _EVEN_PAIRS = _U(0x00FF00FF00FF00FF), _U(0x0000FFFF0000FFFF)
_BLOCK_WORDS = np.int64(BLOCK_WORDS)

_COLUMN = numba.types.Array(numba.uint64, 1, "C")
_WORDS = numba.types.Array(numba.uint64, 1, "C", readonly=True)
_SIGNATURE = numba.void(
    _COLUMN, _WORDS, numba.int64, numba.int64, numba.int64, *(_COLUMN for _ in range(4))
)


def compile_kernel() -> Callable[..., None]:
    """What adds rows of words to the two sums; kept on disk where numba finds a place."""
    try:
        return numba.njit(_SIGNATURE, nogil=True, cache=True)(_add_words)
    except RuntimeError:
        return numba.njit(_SIGNATURE, nogil=True)(_add_words)


@numba.njit(inline="always")
def _swap_bytes(word):
    word = ((word & _EVEN_BYTES) << _8) | ((word >> _8) & _EVEN_BYTES)
    word = ((word & _EVEN_PAIRS) << _16) | ((word >> _16) & _EVEN_PAIRS)
    return (word << _32) | (word >> _32)


@numba.njit(inline="always")
def _weight(seed, number):
    z = (number + _1) * _GOLDEN + seed
    z = (z ^ (z >> _30)) * _FIRST_FACTOR
    z = (z ^ (z >> _27)) * _SECOND_FACTOR
    return z ^ (z >> _31)


def _add_words(sums, words, stride, width, first, numbers, forward, backward, seeds):
    for row in range(len(numbers)):
        begin = np.int64(0)
        column = first % _BLOCK_WORDS
        number = numbers[row] + _U(first // _BLOCK_WORDS)
        while begin < width:
            count = min(width - begin, _BLOCK_WORDS - column)
            # Slices, so that the compiler sees three arrays that are walked in step.
            block = words[row * stride + begin : row * stride + begin + count]
            forward_weights = forward[column : column + count]
            backward_weights = backward[column : column + count]
            a, b = _0, _0
            for i in range(count):
                word = block[i]
                a += word * forward_weights[i]
                b += _swap_bytes(word) * backward_weights[i]
            sums[0] += a * _weight(seeds[0], number) + b * _weight(seeds[1], number)
            sums[1] += a * _weight(seeds[2], number) + b * _weight(seeds[3], number)
            begin += count
            column = np.int64(0)
            number += _1

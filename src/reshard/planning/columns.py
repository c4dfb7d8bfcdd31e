"""The columns that plans are made of.

A region of an n-dimensional tensor takes one row in an `offsets` and a `sizes` array.
Tensors of different ranks share one array: it is as wide as the widest of them, and
the columns that a row does not need are padded so that they never matter (offset 0,
size 1, extent 1). A 0-dimensional tensor is thus a box of volume 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Ints: TypeAlias = npt.NDArray[np.int64]
Codes: TypeAlias = npt.NDArray[np.uint8]
Bools: TypeAlias = npt.NDArray[np.bool_]

TENSOR, SHARD, BYTES = 0, 1, 2
"""Codes in the `kinds` column."""

MOST_DIMS = 255
"""How many dimensions a tensor may have: they are counted in a byte."""

DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
)
"""Every dtype that torch has; the position is its code in a `dtypes` column."""

DTYPE_CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in enumerate(DTYPES)}
DTYPE_ITEMSIZES: Ints = np.array([dtype.itemsize for dtype in DTYPES], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Schema:
    """What the items of a plan are, apart from which region each is.

    Row `i` of a schema belongs to row `i` of the plan. Ranks that hold parts of the
    same tensors have equal schemas, so the coordinator decodes one and shares it.
    """

    names: tuple[str, ...]
    kinds: Codes
    dtypes: Codes
    flags: Codes
    ndims: Codes
    shapes: Ints

    def __len__(self) -> int:
        return len(self.names)

    def select(self, rows: Ints) -> Schema:
        return Schema(
            tuple(self.names[row] for row in rows.tolist()),
            self.kinds[rows],
            self.dtypes[rows],
            self.flags[rows],
            self.ndims[rows],
            self.shapes[rows],
        )


@dataclass(frozen=True, eq=False)
class WriteColumns:
    """The items that one rank offers to write.

    `hints` are the positions of the chunks in their tensors (-1 for none), `nbytes`
    the sizes of values that are not tensors (-1 for unknown), `aliases` the row that
    holds the same memory under another name (-1 for none).
    """

    schema: Schema
    offsets: Ints
    sizes: Ints
    hints: Ints
    nbytes: Ints
    aliases: Ints

    def __len__(self) -> int:
        return len(self.schema)

    def select(self, rows: Ints) -> WriteColumns:
        """The given rows, in the given order. An alias whose target is left out ends."""
        position_of = np.full(len(self) + 1, -1, dtype=np.int64)
        position_of[rows] = np.arange(len(rows))
        return WriteColumns(
            self.schema.select(rows),
            self.offsets[rows],
            self.sizes[rows],
            self.hints[rows],
            self.nbytes[rows],
            position_of[self.aliases[rows]],
        )


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Tensors and the chunks that they are cut into, as planned or as stored.

    The chunks of tensor `t` are rows `starts[t]` to `starts[t + 1]` of `offsets` and
    `sizes`. `aliases[t]` is the tensor that holds the data of tensor `t`, or -1.
    """

    names: Sequence[str]
    dtypes: Ints
    flags: Ints
    ndims: Ints
    shapes: Ints
    aliases: Ints
    starts: Ints
    offsets: Ints
    sizes: Ints

    @property
    def owners(self) -> Ints:
        """The tensor that each chunk belongs to."""
        return np.repeat(np.arange(len(self.shapes)), np.diff(self.starts))

    @cached_property
    def sources(self) -> Ints:
        """The tensor that holds the data of each tensor: itself, unless it is an alias."""
        return np.where(self.aliases < 0, np.arange(len(self.aliases)), self.aliases)

    @cached_property
    def row_of(self) -> dict[str, int]:
        """The tensor of each name."""
        return {name: tensor for tensor, name in enumerate(self.names)}

    def shape_of(self, tensor: int) -> tuple[int, ...]:
        return tuple(self.shapes[tensor, : self.ndims[tensor]].tolist())

    def of(self, tensor: int) -> tuple[Ints, Ints]:
        """The offsets and sizes of one tensor's chunks."""
        rows = slice(int(self.starts[tensor]), int(self.starts[tensor + 1]))
        return self.offsets[rows], self.sizes[rows]


def pad_rows(rows: Sequence[Sequence[int]], width: int, fill: int) -> Ints:
    """Rows of different lengths as one array, `width` wide, padded with `fill`."""
    lengths = list(map(len, rows))
    # One element after the other: numpy takes long to look into many small sequences.
    flat = np.fromiter(itertools.chain.from_iterable(rows), np.int64, sum(lengths))
    if {*lengths} <= {width}:
        return flat.reshape(len(rows), width)
    padded = np.full((len(rows), width), fill, dtype=np.int64)
    counts = np.array(lengths)
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    padded[np.repeat(np.arange(len(rows)), counts), np.arange(len(flat)) - begins] = flat
    return padded


def widen(array: Ints, width: int, fill: int) -> Ints:
    """`array` with columns of `fill` added until it is `width` wide."""
    missing = width - array.shape[1]
    if missing <= 0:
        return array
    return np.pad(array, ((0, 0), (0, missing)), constant_values=fill)

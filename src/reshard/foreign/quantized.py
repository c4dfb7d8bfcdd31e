"""Tensors that are stored in few bits, and scales for blocks of them: what they stand for.

Two ways are known: matrices of 8-bit floats with a scale for each square block (`name.weight` and
`name.weight_scale_inv`), and MXFP4, pairs of 4-bit floats in bytes with an exponent for each group
of bytes (`name_blocks` and `name_scales`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from reshard.checkpoint.stored_tensors import StoredTensors
from reshard.format.tables import Manifest
from reshard.planning.columns import DTYPE_CODES, DTYPES
from reshard.tensors.torch_versions import dtypes_here

_SCALE, _WEIGHT = ".weight_scale_inv", ".weight"
_GROUP_SCALES, _GROUPS = "_scales", "_blocks"
_TILE_ELEMENTS = 1 << 20
"""How many elements are worked on at once: memory does not depend on the size of tensors."""
_FOUR_BIT_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7; those from 8 on are their negatives."""
_EXPONENT_BIAS = 127
_EXPONENT_DTYPES = {torch.uint8, *dtypes_here({"F8_E8M0": "float8_e8m0fnu"}).values()}

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Quantized:
    """A stored tensor, its scales (both by their row in the manifest), and the shape it stands for.

    `problem` says why it cannot be read, if so.
    """

    tensor: int
    scales: int
    shape: tuple[int, ...]
    is_packed: bool
    problem: str = ""


def find_quantized(manifest: Manifest, block_size: int) -> dict[str, Quantized]:
    """The tensors that have scales beside them."""
    rows, found = manifest.table.row_of, {}
    for scales_name, scales in rows.items():
        if scales_name.endswith(_SCALE):
            name = scales_name.removesuffix(_SCALE) + _WEIGHT
            if name in rows:
                found[name] = _describe_matrix(manifest, rows[name], scales, block_size)
        elif scales_name.endswith(_GROUP_SCALES):
            name = scales_name.removesuffix(_GROUP_SCALES) + _GROUPS
            if name in rows:
                found[name] = _describe_packed(manifest, rows[name], scales)
    return found


def _describe_matrix(m: Manifest, tensor: int, scales: int, block_size: int) -> Quantized:
    shape, found = m.table.shape_of(tensor), m.table.shape_of(scales)
    expected = tuple(-(-extent // block_size) for extent in shape)
    problem = ""
    if len(shape) != 2:
        problem = f"has {len(shape)} dimensions, and only matrices with a scale per block are read"
    elif found != expected:
        problem = (
            f"has the shape {shape}, for which blocks of {block_size} take {expected} scales, but "
            f"{found} are stored. Pass the block_size that it was quantised with"
        )
    return Quantized(tensor, scales, shape, is_packed=False, problem=problem)


def _describe_packed(m: Manifest, tensor: int, scales: int) -> Quantized:
    stored, found = m.table.shape_of(tensor), m.table.shape_of(scales)
    dtypes = DTYPES[int(m.dtypes[tensor])], DTYPES[int(m.dtypes[scales])]
    if len(stored) < 2:
        return Quantized(tensor, scales, stored, True, "has no dimension of groups")
    *outer, groups, nbytes = stored
    problem = ""
    if found != stored[:-1]:
        problem = f"has groups of bytes of shape {stored}, but scales of shape {found}"
    elif dtypes[0] is not torch.uint8 or dtypes[1] not in _EXPONENT_DTYPES:
        problem = f"is of dtype {dtypes[0]} with scales of {dtypes[1]}, and not of bytes"
    elif (m.chunk_sizes[_chunks(m, tensor), len(stored) - 1] != nbytes).any():
        problem = "is stored in parts that cut through groups"
    return Quantized(tensor, scales, (*outer, groups * nbytes * 2), True, problem)


def _chunks(m: Manifest, tensor: int) -> slice:
    source = int(m.table.sources[tensor])
    return slice(int(m.chunk_starts[source]), int(m.chunk_starts[source + 1]))


def as_loaded(m: Manifest, found: Mapping[str, Quantized], dtype: torch.dtype) -> Manifest:
    """The manifest as if those tensors were stored in `dtype`: to plan with, not to read."""
    dtypes, ndims, shapes = m.dtypes.copy(), m.ndims.copy(), m.shapes.copy()
    offsets, sizes = m.chunk_offsets.copy(), m.chunk_sizes.copy()
    for each in found.values():
        if each.problem:
            continue
        dtypes[each.tensor] = DTYPE_CODES[dtype]
        if each.is_packed:
            last, chunks = len(each.shape) - 1, _chunks(m, each.tensor)
            values = 2 * int(m.shapes[each.tensor, last + 1])
            ndims[each.tensor] = len(each.shape)
            shapes[each.tensor, last] = each.shape[-1]
            shapes[each.tensor, last + 1] = 1
            for column in (offsets, sizes):
                column[chunks, last] *= values
            offsets[chunks, last + 1], sizes[chunks, last + 1] = 0, 1
    return dataclasses.replace(
        m,
        dtypes=dtypes,
        ndims=ndims,
        shapes=shapes,
        chunk_offsets=offsets,
        chunk_sizes=sizes,
    )


class Dequantizer:
    """Computes regions of quantised tensors, from the bytes and scales that they need."""

    def __init__(self, source: StoredTensors, dtype: torch.dtype, block_size: int) -> None:
        self._source = source
        self._dtype = dtype
        self._block_size = block_size
        # Wide enough for all products, which are then rounded once.
        wide = torch.promote_types(dtype, torch.float32)
        values = torch.tensor(_FOUR_BIT_VALUES, dtype=wide, device="cpu")
        # Twice the values and half the powers, of which the largest would be infinite.
        values = torch.cat([values, -values]) * 2
        codes = torch.arange(256, device="cpu")
        self._pairs = torch.stack([values[codes & 15], values[codes >> 4]], dim=1)
        ones = torch.ones(256, dtype=wide, device="cpu")
        self._powers = torch.ldexp(ones, codes - _EXPONENT_BIAS - 1)

    def tiles(self, lengths: Sequence[int]) -> Iterator[Box]:
        """A region as parts that are small enough to be worked on at once."""
        return _tiles((0,) * len(lengths), tuple(lengths))

    def read(self, each: Quantized, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A region of a tensor."""
        read = self._read_packed if each.is_packed else self._read_matrix
        return read(each, tuple(offsets), tuple(sizes)).to(self._dtype)

    def _read_matrix(
        self, each: Quantized, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        ends = (begin + size for begin, size in zip(offsets, sizes, strict=True))
        first = tuple(begin // self._block_size for begin in offsets)
        count = tuple(-(-e // self._block_size) - b for e, b in zip(ends, first, strict=True))
        scales = self._stored(each.scales, first, count).to(torch.float32)
        for dim, (begin, size) in enumerate(zip(offsets, sizes, strict=True)):
            blocks = torch.arange(begin, begin + size, device="cpu") // self._block_size
            scales = scales.index_select(dim, blocks - first[dim])
        return scales.mul_(self._stored(each.tensor, offsets, sizes).to(torch.float32))

    def _read_packed(
        self, each: Quantized, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        nbytes = self._source.shape(each.tensor)[-1]
        *outer, begin = offsets
        *counts, size = sizes
        first, end = begin // (2 * nbytes), -(-(begin + size) // (2 * nbytes))
        groups = self._stored(each.tensor, (*outer, first, 0), (*counts, end - first, nbytes))
        scales = self._stored(each.scales, (*outer, first), (*counts, end - first))
        powers = self._powers.index_select(0, scales.view(torch.uint8).flatten().int())
        values = self._pairs.index_select(0, groups.flatten().int()).view(len(powers), -1)
        values.mul_(powers[:, None])
        lead = begin - first * 2 * nbytes
        return values.view(*counts, -1)[..., lead : lead + size]

    def _stored(self, tensor: int, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        stored = torch.empty(tuple(sizes), dtype=self._source.dtype(tensor), device="cpu")
        self._source.read(tensor, offsets, sizes, stored)
        return stored


def _tiles(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Iterator[Box]:
    volume = math.prod(lengths)
    if not volume:
        return
    if volume <= _TILE_ELEMENTS:
        yield offsets, lengths
        return
    dim = next(dim for dim, length in enumerate(lengths) if length > 1)
    step = max(1, _TILE_ELEMENTS // (volume // lengths[dim]))
    for begin in range(0, lengths[dim], step):
        yield from _tiles(
            (*offsets[:dim], offsets[dim] + begin, *offsets[dim + 1 :]),
            (*lengths[:dim], min(step, lengths[dim] - begin), *lengths[dim + 1 :]),
        )

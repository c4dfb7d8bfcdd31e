"""Tensors of archives of `torch.save` that are not dense: sparse ones, and those without data."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

from reshard.api import CorruptCheckpointError, UnsupportedFormatError
from reshard.engine.records import read_strided
from reshard.format.torch_zip import (
    Archive,
    BlankTensor,
    SparseTensor,
    StoredTensor,
    check_extents,
    place_tensor,
)
from reshard.stores.protocol import Reader

Unusual: TypeAlias = SparseTensor | BlankTensor

_COMPRESSED = {
    str(layout): layout
    for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}


def make_unusual(archive: Archive, source: Reader, where: str, tensor: Unusual) -> torch.Tensor:
    """The tensor, once what the file says of it is known to fit together."""
    try:
        if isinstance(tensor, BlankTensor):
            check_extents(tensor.shape, tensor.strides, 0, where)
            return torch.empty_strided(
                tensor.shape,
                tensor.strides,
                dtype=tensor.dtype,
                device="meta",
                requires_grad=tensor.requires_grad,
            )
        check_extents(tensor.shape, (0,) * len(tensor.shape), 0, where)
        parts = [_read(archive, source, where, part) for part in tensor.parts]
        if tensor.layout == "torch.sparse_coo":
            indices, values = parts
            return torch.sparse_coo_tensor(
                indices,
                values,
                tensor.shape,
                check_invariants=True,
                is_coalesced=tensor.is_coalesced,
            )
        if tensor.layout in _COMPRESSED:
            rows, columns, values = parts
            return torch.sparse_compressed_tensor(
                rows,
                columns,
                values,
                tensor.shape,
                layout=_COMPRESSED[tensor.layout],
                check_invariants=True,
            )
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise CorruptCheckpointError(
            f"{where} is a malformed {tensor.kind}: {str(error)[:200]}"
        ) from error
    raise UnsupportedFormatError(
        f"{where} is a tensor of the layout {tensor.layout[:100]!r}, which this release does not "
        "read. Load it with torch.load, and save it in another layout"
    )


def _read(archive: Archive, source: Reader, where: str, part: StoredTensor) -> torch.Tensor:
    place = place_tensor(archive, part, where)
    nbytes = math.prod(part.shape) * part.dtype.itemsize
    if place.span < nbytes:
        raise UnsupportedFormatError(
            f"{where} is a sparse tensor of parts whose elements overlap. Load it with torch.load, "
            "and save a clone of it"
        )
    if not nbytes:
        return torch.empty(part.shape, dtype=part.dtype, device="cpu")
    elements = read_strided(
        source,
        place.begin,
        place.span,
        part.dtype,
        part.shape,
        part.strides,
        part.is_conj,
        part.is_neg,
        place.is_big_endian,
    )
    return torch.frombuffer(elements, dtype=part.dtype).reshape(part.shape)

"""Tensors within values of an archive of `torch.save`: dense, sparse, and without data."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

from reshard.api import CheckpointException, CorruptCheckpointError, UnsupportedFormatError
from reshard.checkpoint.torch_records import read_stored
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


_TIMES_FILE = 4
"""How much the tensors of a value may take: so many times the size of the file."""


class ValueTensors:
    """Makes the tensors of one value, once what the file says of them is known to fit together.

    A value is held in memory as a whole. Descriptions are short, and any number of them may be of
    the same bytes, so that what they take together is limited by the size of the file.
    """

    def __init__(self, archive: Archive, source: Reader, where: str) -> None:
        self._archive, self._source, self._where = archive, source, where
        self._left = _TIMES_FILE * source.nbytes

    def make(self, tensor: StoredTensor | Unusual) -> torch.Tensor:
        """The tensor that a file describes."""
        try:
            if isinstance(tensor, StoredTensor):
                return self._dense(tensor)
            if isinstance(tensor, BlankTensor):
                return self._blank(tensor)
            return self._sparse(tensor)
        except CheckpointException:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            kind = "tensor" if isinstance(tensor, StoredTensor) else tensor.kind
            raise CorruptCheckpointError(
                f"{self._where} is a malformed {kind}: {str(error)[:200]}"
            ) from error

    def _blank(self, tensor: BlankTensor) -> torch.Tensor:
        check_extents(tensor.shape, tensor.strides, 0, self._where)
        return torch.empty_strided(
            tensor.shape,
            tensor.strides,
            dtype=tensor.dtype,
            device="meta",
            requires_grad=tensor.requires_grad,
        )

    def _sparse(self, tensor: SparseTensor) -> torch.Tensor:
        check_extents(tensor.shape, (0,) * len(tensor.shape), 0, self._where)
        parts = [self._dense(part) for part in tensor.parts]
        if tensor.layout == "torch.sparse_coo":
            indices, values = parts
            return torch.sparse_coo_tensor(
                indices,
                values,
                tensor.shape,
                check_invariants=True,
                is_coalesced=tensor.is_coalesced,
            )
        if tensor.layout not in _COMPRESSED:
            raise UnsupportedFormatError(
                f"{self._where} is a tensor of the layout {tensor.layout[:100]!r}, which this "
                "release does not read. Load it with torch.load, and save it in another layout"
            )
        rows, columns, values = parts
        return torch.sparse_compressed_tensor(
            rows,
            columns,
            values,
            tensor.shape,
            layout=_COMPRESSED[tensor.layout],
            check_invariants=True,
        )

    def _dense(self, tensor: StoredTensor) -> torch.Tensor:
        place = place_tensor(self._archive, tensor, self._where)
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        self._left -= nbytes
        if self._left < 0:
            raise UnsupportedFormatError(
                f"{self._where} holds tensors that take more than {_TIMES_FILE} times the "
                f"{self._source.nbytes} bytes of the file. Load it with torch.load, and save "
                "clones of them"
            )
        if not nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        elements = read_stored(self._source, tensor, place)
        return torch.frombuffer(elements, dtype=tensor.dtype).reshape(tensor.shape)

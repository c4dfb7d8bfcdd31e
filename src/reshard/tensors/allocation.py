"""Whether the memory that a tensor refers to is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

__all__ = ["elements_spanned", "is_allocated"]


def elements_spanned(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements lie between the first and the last in memory, those included."""
    if 0 in shape:
        return 0
    return sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1


def is_allocated(tensor: torch.Tensor) -> bool:
    """Whether all elements of a tensor lie within its storage, which may have been resized."""
    if tensor.layout is not torch.strided:
        return all(map(is_allocated, _sparse_parts(tensor)))
    if tensor.is_contiguous():
        spanned = tensor.numel()
    elif tensor.is_nested:
        # Of several shapes.
        spanned = tensor.numel()
    else:
        spanned = elements_spanned(tensor.shape, tensor.stride())
    if not spanned:
        return True
    itemsize = tensor.itemsize
    lead = tensor.storage_offset() * itemsize
    if tensor.untyped_storage().nbytes() < lead + spanned * itemsize:
        return tensor.is_meta
    # A wrapper subclass has a storage with a size but without an address.
    return tensor.data_ptr() not in (0, lead) or tensor.is_meta


def _sparse_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors that a sparse one consists of; none for other layouts."""
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())

"""The memory behind tensors: how much of it there is, who uses it, and views of it."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

MKLDNN: torch.layout = torch._mkldnn  # type: ignore[attr-defined]


def elements_spanned(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements lie between the first and the last in memory, inclusive."""
    if 0 in shape:
        return 0
    return sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def bytes_spanned(tensor: torch.Tensor) -> int:
    """How many bytes lie between the first and the last element, inclusive."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return elements_spanned(tensor.shape, tensor.stride()) * tensor.itemsize


def copy_all(
    targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool = False
) -> None:
    """Copy many tensors in one call, which loops outside the GIL."""
    torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def own_storage(memory: torch.Tensor) -> torch.Tensor:
    """The same memory as the whole of a storage."""
    return torch.from_numpy(memory.numpy())


def lazy_view(tensor: torch.Tensor, is_conj: bool, is_neg: bool) -> torch.Tensor:
    """The same memory, read as conjugated or negated."""
    tensor = tensor.conj() if is_conj else tensor
    return torch._neg_view(tensor) if is_neg else tensor


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors, arrays and other objects use the storage of this tensor."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def storages_in_order(value: Any) -> list[torch.UntypedStorage]:
    """The storages of the tensors in `value`, in the order in which torch.save numbers them."""
    search = _StorageSearch(io.BytesIO(), protocol=2)
    search.dump(value)
    return list(search.found.values())


class _StorageSearch(pickle.Pickler):
    """Pickles as torch.save does, and notes what that keeps outside of its pickle."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.found: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, thing: Any) -> str | None:
        if isinstance(thing, torch.storage.TypedStorage):
            thing = thing._untyped_storage
        if not isinstance(thing, torch.UntypedStorage):
            return None
        self.found.setdefault(thing._cdata, thing)
        return "storage"


def is_allocated(tensor: torch.Tensor) -> bool:
    """Whether all elements of a tensor lie within its storage, which may have been resized."""
    if tensor.layout is not torch.strided:
        return all(map(is_allocated, _sparse_parts(tensor)))
    if tensor.is_contiguous():
        spanned = tensor.numel()
    elif tensor.is_nested:
        # It has several shapes.
        spanned = tensor.numel()
    else:
        spanned = elements_spanned(tensor.shape, tensor.stride())
    if not spanned:
        return True
    itemsize = tensor.itemsize
    lead = tensor.storage_offset() * itemsize
    if tensor.untyped_storage().nbytes() < lead + spanned * itemsize:
        return tensor.is_meta
    # The storage of a wrapper subclass has a size but no address.
    return tensor.data_ptr() not in (0, lead) or tensor.is_meta


def check_sparse(tensor: torch.Tensor) -> None:
    """Raise RuntimeError if the indices of a sparse tensor lead out of it.

    torch does not look at them by itself, and reads or writes elsewhere in memory later.
    """
    if tensor.layout is torch.sparse_coo:
        indices, values = _sparse_parts(tensor)
        torch.sparse_coo_tensor(
            indices,
            values,
            tensor.shape,
            check_invariants=True,
            is_coalesced=tensor.is_coalesced(),
        )
    elif tensor.layout is not torch.strided:
        rows, columns, values = _sparse_parts(tensor)
        torch.sparse_compressed_tensor(
            rows, columns, values, tensor.shape, layout=tensor.layout, check_invariants=True
        )


def _sparse_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors inside of a sparse one; none for other layouts."""
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())

"""The bytes of tensors, without a copy where possible."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import torch


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether the memory of `tensor` can be stored as it is."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a direct tensor. It must outlive the view."""
    nbytes = tensor.nbytes
    if not nbytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def tensor_in(
    memory: memoryview, begin: int, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """A tensor whose elements lie in `memory`, from byte `begin` on. It keeps the memory alive.

    It has a storage of its own, so that saving or resizing it concerns no other tensor in the
    same memory.
    """
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)
    # As a tensor that is nobody's view, as if it had been allocated.
    # Extents one by one: torch takes longer to look into a tuple.
    return flat if len(shape) == 1 else (flat.view(*shape) if shape else flat[0]).data


class ReservedAddresses:
    """Addresses that stand for memory and take none, as long as this object lives.

    `view` is to be looked at by nobody, and must not be written to.
    """

    def __init__(self, nbytes: int) -> None:
        self.view = memoryview(b"")
        if nbytes:
            # What can only be read is never counted as memory in use, whatever its size.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._pages = mmap.mmap(-1, nbytes, flags=flags, prot=mmap.PROT_READ)
            address = np.frombuffer(self._pages, dtype=np.uint8).ctypes.data
            self.view = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


class BounceBuffer:
    """A reused buffer for data that cannot be read or written in place.

    Pinned if there is an accelerator, for full-speed copies (tested with stand-ins only).
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffer: torch.Tensor | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes` bytes of the buffer, which grows if it is too small."""
        if self._buffer is None or self._buffer.nbytes < nbytes:
            pinned = torch.cuda.is_available()
            size = max(nbytes, min(self._nbytes, max(nbytes, 1 << 20)))
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._buffer[:nbytes]


def pieces(tensor: torch.Tensor, most_bytes: int, bounce: BounceBuffer) -> Iterator[memoryview]:
    """Iterate over the bytes of any tensor, in pieces of at most `most_bytes` or one element.

    A direct tensor gives views of its own memory. Other tensors are copied into the bounce
    buffer: each piece is valid until the next one is asked for.
    """
    if is_direct(tensor):
        whole = byte_view(tensor)
        for begin in range(0, len(whole), most_bytes):
            yield whole[begin : begin + most_bytes]
        return
    for part in _parts(tensor.detach(), most_bytes):
        if not part.numel():
            continue
        buffer = bounce.take(part.nbytes)
        landing = buffer.view(part.dtype).view(part.shape)
        landing.copy_(part.resolve_conj().resolve_neg())
        yield byte_view(buffer)


def copy_elements(tensor: torch.Tensor, begin: int, end: int, into: torch.Tensor) -> None:
    """Copy elements of any tensor, counted in row-major order, into a flat one of that length."""
    if tensor.dim() <= 1 or tensor.is_contiguous():
        into.copy_(tensor.view(-1)[begin:end].resolve_conj().resolve_neg())
        return
    row = tensor.numel() // tensor.shape[0]
    while begin < end:
        number, within = divmod(begin, row)
        rows = (end - begin) // row
        if within or not rows:
            count = min(row - within, end - begin)
            copy_elements(tensor[number], within, within + count, into[:count])
        else:
            count = rows * row
            some = tensor[number : number + rows].resolve_conj().resolve_neg()
            into[:count].view(some.shape).copy_(some)
        begin, into = begin + count, into[count:]


def _parts(tensor: torch.Tensor, most_bytes: int) -> Iterator[torch.Tensor]:
    """Slices along the leading dimensions, none larger than `most_bytes` if possible."""
    if tensor.nbytes <= most_bytes or tensor.dim() == 0:
        yield tensor
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    if row_bytes > most_bytes:
        for row in tensor.unbind(0):
            yield from _parts(row, most_bytes)
        return
    rows = max(1, most_bytes // row_bytes)
    yield from torch.split(tensor, rows)

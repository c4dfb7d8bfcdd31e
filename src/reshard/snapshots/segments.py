"""Blocks of memory that two processes can share.

A segment is an anonymous file: nothing is left behind, however its processes end.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
from typing import Any

import torch

_numbers = itertools.count()
_MADV_POPULATE_WRITE = 23
_POPULATED_AT_ONCE = 64 * 2**20
_libc = ctypes.CDLL(None, use_errno=True)


class Segment:
    """Shared memory, with all pages populated at once.

    Pinned if asked for and CUDA is available (tested with stand-ins only).
    """

    def __init__(self, nbytes: int, pinned: bool = False) -> None:
        self.nbytes = max(nbytes, 1)
        self.number = next(_numbers)
        self.descriptor = os.memfd_create("reshard-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, self.nbytes)
            self.memory = map_segment(self.descriptor, self.nbytes)
            _populate(self.memory)
        except (OSError, OverflowError, ValueError) as error:
            os.close(self.descriptor)
            raise MemoryError(
                f"cannot get {self.nbytes / 2**30:.2f} GiB of memory to stage a save: {error}"
            ) from error
        self.begin = self.memory.data_ptr()
        self.end = self.begin + self.nbytes
        self._pinned = pinned and _register(self.memory)

    def close(self) -> None:
        """Free the memory. Tensors that still use it keep it alive."""
        if self.descriptor < 0:
            return
        if self._pinned:
            _cuda().cudaHostUnregister(self.memory.data_ptr())
        os.close(self.descriptor)
        self.descriptor = -1
        del self.memory


def map_segment(descriptor: int, nbytes: int) -> torch.Tensor:
    """The memory of a segment as bytes. The descriptor may be closed afterwards."""
    mapping = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _populate(memory: torch.Tensor) -> None:
    """Have the system allocate all pages.

    In calls that release the GIL, unlike a mapping with MAP_POPULATE, and in pieces, between which
    other threads can map memory: this takes seconds, and may run beside training.
    """
    for begin in range(0, memory.nbytes, _POPULATED_AT_ONCE):
        piece = memory[begin : begin + _POPULATED_AT_ONCE]
        address, length = ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(piece.nbytes)
        if _libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0:
            continue
        code = ctypes.get_errno()
        if code == errno.ENOMEM:
            raise OSError(code, os.strerror(code))
        # Kernels before 5.14 do not know this advice.
        piece.zero_()


def _register(memory: torch.Tensor) -> bool:
    if not torch.cuda.is_available():
        return False
    return bool(_cuda().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == 0)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

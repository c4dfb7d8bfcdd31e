"""Records that have to be decoded as a whole, read as if they were files with their content."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from reshard.stores.protocol import CutShortError, Reader
from reshard.tensors.storages import lazy_view


class DecodedRecord:
    """A reader of the content of a record.

    The content is made when it is first asked for, and let go when all of it was read: a load
    reads each record once.
    """

    def __init__(self, decode: Callable[[], memoryview], nbytes: int, where: str) -> None:
        self._decode = decode
        self._nbytes = nbytes
        self._where = where
        self._lock = threading.Lock()
        self._content: memoryview | None = None
        self._left = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        end = offset + sum(map(len, buffers))
        if end > self._nbytes:
            error = CutShortError(f"{self._where} decodes to {self._nbytes} bytes")
            error.end = self._nbytes
            raise error
        with self._lock:
            if self._content is None:
                self._content, self._left = self._decode(), self._nbytes
            content = self._content
            self._left -= end - offset
            if self._left <= 0:
                self._content = None
        for buffer in buffers:
            buffer[:] = content[offset : offset + len(buffer)]
            offset += len(buffer)

    def close(self) -> None:
        self._content = None


def read_strided(
    source: Reader,
    begin: int,
    span: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    is_conj: bool = False,
    is_neg: bool = False,
    is_big_endian: bool = False,
) -> memoryview:
    """The elements of a tensor in row-major order, of one that lies otherwise in its file.

    Its elements do not overlap, so that this takes no more than twice its size.
    """
    stored = bytearray(span)
    source.read_into(begin, [memoryview(stored)] if span else [])
    if is_big_endian:
        _swap_bytes(stored, dtype)
    tensor = torch.frombuffer(stored, dtype=dtype).as_strided(tuple(shape), tuple(strides))
    tensor = lazy_view(tensor, is_conj, is_neg).resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _swap_bytes(data: bytearray, dtype: torch.dtype) -> None:
    """Reverse the bytes of each number; complex ones are two."""
    width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    numbers = np.frombuffer(data, dtype=np.uint8).reshape(-1, width)
    numbers[:] = numbers[:, ::-1].copy()

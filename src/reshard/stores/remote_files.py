"""Files of stores that send what they are asked for in memory of their own."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import numpy as np

from reshard.stores.protocol import CutShortError


class RemoteFile:
    """A file of which some of the first bytes may be there already. `_ask` gets the others."""

    nbytes: int

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = memoryview(b"")

    def _ask(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the file; a `CutShortError` if it ends before."""
        raise NotImplementedError

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        wanted = sum(map(len, buffers))
        if offset + wanted > self.nbytes:
            raise self._cut_short(self.nbytes)
        if not wanted:
            return
        # numpy copies without the GIL.
        source, position = np.frombuffer(self.fetch(offset, wanted), dtype=np.uint8), 0
        for buffer in buffers:
            target = np.frombuffer(buffer, dtype=np.uint8)
            np.copyto(target, source[position : position + len(buffer)])
            position += len(buffer)

    def fetch(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the file, in the memory that the answer came in."""
        if offset + nbytes <= len(self._start):
            return self._start[offset : offset + nbytes]
        return self._ask(offset, nbytes)

    def _cut_short(self, end: int) -> CutShortError:
        error = CutShortError(
            errno.EIO, f"the file ends at {end}, before the data that it should hold", self._name
        )
        error.end = end
        return error

    def close(self) -> None:
        """Nothing to release but memory."""
        self._start = memoryview(b"")

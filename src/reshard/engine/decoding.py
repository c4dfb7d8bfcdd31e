"""Encoded chunks, read as if they were files with the decoded content."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from reshard.format.codec import (
    FRAME_BYTES,
    HEAD_BYTES,
    Index,
    check_head,
    decode_frame,
    decode_index,
)
from reshard.stores.protocol import CutShortError, Reader


class FrameBuffers(threading.local):
    """Memory for one stored and one decoded frame in each thread, shared by many chunks."""

    def __init__(self) -> None:
        self._stored = bytearray()
        self._decoded = bytearray()
        self.decoded_frame: tuple[DecodedChunk, int] | None = None
        """Which frame is in the memory for decoded ones."""

    def stored(self, nbytes: int) -> memoryview:
        if len(self._stored) < nbytes:
            self._stored = bytearray(nbytes)
        return memoryview(self._stored)[:nbytes]

    def decoded(self, nbytes: int) -> memoryview:
        if len(self._decoded) < nbytes:
            self._decoded = bytearray(nbytes)
        return memoryview(self._decoded)[:nbytes]


class DecodedChunk:
    """A reader of the content of an encoded chunk at `begin` of a file.

    Only the frames that are touched are read and decoded: straight into the buffer that takes
    all of a frame, otherwise into one that each thread keeps for the next call.
    """

    frame_bytes = FRAME_BYTES
    """How much is best read at once: most likely a whole frame."""

    def __init__(
        self,
        source: Reader,
        begin: int,
        stored_nbytes: int,
        content_nbytes: int,
        buffers: FrameBuffers,
        where: str,
    ) -> None:
        self._source = source
        self._buffers = buffers
        self._begin = begin
        self._stored_nbytes = stored_nbytes
        self._content_nbytes = content_nbytes
        self._where = where
        self._lock = threading.Lock()
        self._index: Index | None = None

    @property
    def nbytes(self) -> int:
        return self._content_nbytes

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        end = offset + sum(map(len, buffers))
        if end > self._content_nbytes:
            error = CutShortError(f"{self._where} decodes to {self._content_nbytes} bytes")
            error.end = self._content_nbytes
            raise error
        index = self._load_index() if offset < end else None
        for buffer in buffers:
            done = 0
            while index is not None and done < len(buffer):
                position = offset + done
                frame = position // index.frame_nbytes
                begin, end = index.content_range(frame)
                part = buffer[done : done + end - position]
                if len(part) == end - begin:
                    self._decode(index, frame, part)
                else:
                    kept = self._keep(index, frame, end - begin)
                    part[:] = kept[position - begin : position - begin + len(part)]
                done += len(part)
            offset += len(buffer)

    def _keep(self, index: Index, frame: int, nbytes: int) -> memoryview:
        """The content of a frame, which stays until the thread needs another one."""
        buffers = self._buffers
        content = buffers.decoded(nbytes)
        if buffers.decoded_frame != (self, frame):
            buffers.decoded_frame = None
            self._decode(index, frame, content)
            buffers.decoded_frame = (self, frame)
        return content

    def _decode(self, index: Index, frame: int, out: memoryview) -> None:
        begin, end = index.begins[frame : frame + 2].tolist()
        stored = self._buffers.stored(end - begin)
        self._source.read_into(self._begin + begin, [stored])
        decode_frame(stored, index, frame, out, self._where)

    def _load_index(self) -> Index:
        with self._lock:
            if self._index is None:
                sizes = self._content_nbytes, self._stored_nbytes
                head = bytearray(min(HEAD_BYTES, self._stored_nbytes))
                self._source.read_into(self._begin, [memoryview(head)] if head else [])
                index = bytearray(check_head(bytes(head), *sizes, self._where))
                self._source.read_into(self._begin, [memoryview(index)])
                self._index = decode_index(bytes(index), *sizes, self._where)
            return self._index

    def close(self) -> None:
        """Nothing to release: the file belongs to somebody else."""

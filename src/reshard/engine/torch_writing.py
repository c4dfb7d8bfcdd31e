"""Shard files as DCP has them: torch.save files, one after the other."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import IO, Any, cast

import numpy as np
import torch

from reshard.engine.memory import byte_view, is_direct, tensor_in
from reshard.engine.streams import StreamExtension
from reshard.engine.writing import Content, Sums, Written, check_planned
from reshard.stores.protocol import Store, Writer

_BUFFER_BYTES = 1 << 20
_ALIGNMENT = 64
"""Where records begin. torch.save places tensors at multiples of this in a record."""


@cache
def is_savable(dtype: torch.dtype) -> bool:
    """Whether torch.save can write tensors of a dtype, which integers of few bits are not."""
    try:
        torch.save(torch.empty(0, dtype=dtype, device="cpu"), io.BytesIO())
    except (KeyError, RuntimeError):
        return False
    return True


def write_torch_records(
    store: Store,
    key: str,
    contents: Sequence[Content],
    extensions: Sequence[StreamExtension],
    durable: bool,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Written:
    """Write each of `contents` as a torch.save file, through `extensions` if there are any.

    Tensors are saved; contents that are bytes must be such a file already. One after the other,
    in this thread.
    """
    begins = np.zeros(len(contents), dtype=np.int64)
    lengths = np.zeros(len(contents), dtype=np.int64)
    sums = Sums(contents, False)
    writer = store.open_writer(key, None)
    try:
        file = _GrowingFile(writer, durable)
        for i, content in enumerate(contents):
            file.append(memoryview(bytes(-file.nbytes % _ALIGNMENT)))
            begins[i] = file.nbytes
            _write_record(content, file, extensions)
            lengths[i] = file.nbytes - begins[i]
            advance(content.nbytes)
        file.flush()
        if durable:
            writer.sync()
    finally:
        writer.close()
    return Written(
        file.nbytes,
        0,
        0,
        begins,
        sums.checksums,
        sums.digests,
        sums.fingerprints,
        np.ones(len(contents), dtype=np.int64),
        lengths,
    )


def _write_record(
    content: Content, file: _GrowingFile, extensions: Sequence[StreamExtension]
) -> None:
    data = content.resolve()
    streams: list[IO[bytes]] = [cast("IO[bytes]", _Stream(file))]
    for extension in extensions:
        streams.append(extension.transform_to(streams[-1]))
    if isinstance(data, torch.Tensor):
        check_planned(content, data.nbytes)
        data = data.detach()
        if not is_direct(data):
            data = data.cpu().resolve_conj().resolve_neg().contiguous()
        # In a storage of their own, since torch.save writes all of a storage.
        elements = tensor_in(byte_view(data), 0, data.dtype, data.shape)
        _save_tensor(elements, streams[-1])
    else:
        check_planned(content, len(data))
        streams[-1].write(data)
    for stream in reversed(streams):
        # Most close what they write to.
        if not stream.closed:
            stream.close()


def _save_tensor(tensor: torch.Tensor, stream: IO[bytes]) -> None:
    handled = sys.exc_info()[1]
    try:
        torch.save(tensor, stream)
    except RuntimeError as error:
        # If a write fails or is interrupted, torch closes the archive all the same, and complains
        # about what is missing from it. What it was that came before is what counts.
        first: BaseException = error
        while first.__context__ is not None and first.__context__ is not handled:
            first = first.__context__
        if first is error:
            raise
        raise first from None


class _GrowingFile:
    """Collects small pieces, of which torch.save writes many."""

    def __init__(self, writer: Writer, durable: bool) -> None:
        self._writer = writer
        self._durable = durable
        self._written = 0
        self._small = bytearray()

    @property
    def nbytes(self) -> int:
        return self._written + len(self._small)

    def append(self, piece: memoryview) -> None:
        if len(piece) < _BUFFER_BYTES:
            self._small += piece
            if len(self._small) < _BUFFER_BYTES:
                return
            piece = memoryview(b"")
        self.flush()
        self._write(piece)

    def flush(self) -> None:
        small, self._small = self._small, bytearray()
        self._write(memoryview(small))

    def _write(self, piece: memoryview) -> None:
        if not len(piece):
            return
        self._writer.write(self._written, [piece])
        if self._durable:
            self._writer.start_sync(self._written, len(piece))
        self._written += len(piece)


class _Stream(io.RawIOBase):
    """One record. Its end is not that of the file."""

    def __init__(self, file: _GrowingFile) -> None:
        super().__init__()
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.append(view)
        return len(view)

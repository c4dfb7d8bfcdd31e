"""Contents that go through stream extensions, which are code of users.

An extension makes one stream of another, such as a compressed or an encrypted one, and knows
nothing of the content. What it wrote can only be read from the beginning.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import IO, Any, Protocol, cast

import torch

from reshard.api import CorruptCheckpointError, UnsupportedFormatError
from reshard.engine.growing import GrowingFile
from reshard.engine.memory import BounceBuffer, pieces
from reshard.engine.writing import Content, Written, check_planned
from reshard.format.checksum import Hasher
from reshard.stores.protocol import CutShortError, Reader, Store

_PIECE_BYTES = 1 << 20
_MOST_VALUE_BYTES = 1 << 30
"""What a value may decode to; the manifest has its stored size only."""


class StreamExtension(Protocol):
    """What is used of `torch.distributed.checkpoint._extension.StreamTransformExtension`."""

    def get_descriptor(self) -> str: ...

    def transform_to(self, output: IO[bytes]) -> IO[bytes]: ...

    def transform_from(self, input: IO[bytes]) -> IO[bytes]: ...


def stream_codec(extensions: Sequence[StreamExtension]) -> str:
    """The name of the codec that `extensions` make together, the first to be undone first."""
    descriptors = [extension.get_descriptor() for extension in extensions]
    for descriptor in descriptors:
        if not descriptor or "," in descriptor:
            raise ValueError(
                f"the descriptor {descriptor!r} of a stream extension is empty or has a comma"
            )
    return ",".join(descriptors)


def find_extensions(name: str, registry: Any, where: str) -> list[StreamExtension]:
    """The extensions of a codec, by the registry of the reader."""
    try:
        return list(registry.from_descriptor_list(name.split(",")))
    except ValueError as error:
        known = ", ".join(sorted(registry.extensions))
        raise UnsupportedFormatError(
            f"{where} holds data that went through {name!r}, which cannot be undone here: {error}. "
            f"Known are {known}; pass a storage_reader with an _extension_registry that has it"
        ) from error


def write_streamed_file(
    store: Store,
    key: str,
    contents: Sequence[Content],
    extensions: Sequence[StreamExtension],
    durable: bool,
    advance: Callable[[int], None] = lambda nbytes: None,
    save_id: str = "",
    fingerprint: bool = False,
) -> Written:
    """Write `contents` as one safetensors file, each of them through `extensions`.

    One after the other, in this thread: extensions need not be thread-safe.
    """
    bounce = BounceBuffer(_PIECE_BYTES)
    with closing(GrowingFile(store, key, contents, save_id, fingerprint)) as file:
        for i in file.order:
            file.begin_content(i)
            sink = _Sink(file, durable)
            _write_one(file, i, sink, extensions, bounce)
            file.note_encoded(i, file.position - file.begin_of(i))
            advance(contents[i].nbytes)
        return file.finish(durable)


def _write_one(
    file: GrowingFile,
    i: int,
    sink: _Sink,
    extensions: Sequence[StreamExtension],
    bounce: BounceBuffer,
) -> None:
    content = file.contents[i]
    data = content.resolve()
    streams: list[IO[bytes]] = [cast("IO[bytes]", sink)]
    for extension in extensions:
        streams.append(extension.transform_to(streams[-1]))
    if isinstance(data, torch.Tensor):
        check_planned(content, data.nbytes)
        chunk = file.sums.start_chunk(i)
        for part in pieces(data, _PIECE_BYTES, bounce):
            chunk.update(part)
            streams[-1].write(part)
        file.sums.end_chunk(i, chunk)
    else:
        check_planned(content, len(data))
        streams[-1].write(data)
    for stream in reversed(streams):
        # Most close what they write to.
        if not stream.closed:
            stream.close()
    if not isinstance(data, torch.Tensor):
        file.sums.note_checksum(i, sink.hasher.intdigest())


class _Sink(io.RawIOBase):
    """Appends to a file what is written to it."""

    def __init__(self, file: GrowingFile, durable: bool) -> None:
        super().__init__()
        self._file = file
        self._durable = durable
        self.hasher = Hasher()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.hasher.update(view)
        self._file.writer.write(self._file.position, [view])
        if self._durable:
            self._file.writer.start_sync(self._file.position, len(view))
        self._file.position += len(view)
        return len(view)


class StreamedChunk:
    """A reader of the content of a chunk that went through extensions.

    It reads on where it was left, and begins anew for what lies before. Nothing is kept.
    """

    def __init__(
        self,
        source: Reader,
        begin: int,
        stored_nbytes: int,
        content_nbytes: int,
        extensions: Sequence[StreamExtension],
        where: str,
    ) -> None:
        self._source = source
        self._range = begin, begin + stored_nbytes
        self._content_nbytes = content_nbytes
        self._extensions = extensions
        self._where = where
        self._lock = threading.Lock()
        self._stream: IO[bytes] | None = None
        self._position = 0

    @property
    def nbytes(self) -> int:
        return self._content_nbytes

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        end = offset + sum(map(len, buffers))
        if end > self._content_nbytes:
            error = CutShortError(f"{self._where} decodes to {self._content_nbytes} bytes")
            error.end = self._content_nbytes
            raise error
        with self._lock:
            if self._stream is None or offset < self._position:
                self._stream, self._position = self._open(), 0
            while self._position < offset:
                self._take(self._stream, min(_PIECE_BYTES, offset - self._position))
            for buffer in buffers:
                done = 0
                while done < len(buffer):
                    data = self._take(self._stream, min(_PIECE_BYTES, len(buffer) - done))
                    buffer[done : done + len(data)] = data
                    done += len(data)
            if self._position == self._content_nbytes and offset < end:
                self._check_end(self._stream)

    def _open(self) -> IO[bytes]:
        raw = cast("IO[bytes]", io.BufferedReader(_Source(self._source, *self._range)))
        return _undo(raw, self._extensions)

    def _take(self, stream: IO[bytes], nbytes: int) -> bytes:
        data = _read(stream, nbytes, self._where)
        if not 0 < len(data) <= nbytes:
            raise CorruptCheckpointError(
                f"{self._where} decodes to {self._position + len(data)} bytes; the manifest says "
                f"{self._content_nbytes}. Load another checkpoint"
            )
        self._position += len(data)
        return data

    def _check_end(self, stream: IO[bytes]) -> None:
        if _read(stream, 1, self._where):
            raise CorruptCheckpointError(
                f"{self._where} decodes to more than the {self._content_nbytes} bytes that the "
                "manifest says. Load another checkpoint"
            )

    def close(self) -> None:
        self._stream = None


def decode_value(
    stored: bytes,
    extensions: Sequence[StreamExtension],
    where: str,
    most_bytes: int | None = None,
) -> bytes:
    """The bytes of a value that went through `extensions`, or of another record."""
    limit = _MOST_VALUE_BYTES if most_bytes is None else most_bytes
    stream = _undo(io.BytesIO(stored), extensions)
    content = bytearray()
    while data := _read(stream, _PIECE_BYTES, where):
        content += data
        if len(content) > limit:
            what = "a value" if most_bytes is None else "what it should hold"
            raise CorruptCheckpointError(
                f"{where} decodes to more than {limit} bytes, too many for {what}"
            )
    return bytes(content)


def source_stream(source: Reader) -> IO[bytes]:
    """A file as a stream that can be sought in."""
    return cast("IO[bytes]", io.BufferedReader(_Source(source, 0, source.nbytes)))


def _undo(stream: IO[bytes], extensions: Sequence[StreamExtension]) -> IO[bytes]:
    for extension in extensions:
        stream = extension.transform_from(stream)
    return stream


def _read(stream: IO[bytes], nbytes: int, where: str) -> bytes:
    try:
        return stream.read(nbytes) or b""
    except (OSError, CorruptCheckpointError):
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"{where} cannot be decoded: {type(error).__name__}: {error}. Load another checkpoint"
        ) from error


class _Source(io.RawIOBase):
    """A part of a file as a stream."""

    def __init__(self, source: Reader, begin: int, end: int) -> None:
        super().__init__()
        self._source = source
        self._begin = self._position = begin
        self._end = end

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: self._begin, io.SEEK_CUR: self._position, io.SEEK_END: self._end}
        self._position = min(max(self._begin, origin[whence] + offset), self._end)
        return self._position - self._begin

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: min(len(view), self._end - self._position)]
        if len(view):
            self._source.read_into(self._position, [view])
        self._position += len(view)
        return len(view)

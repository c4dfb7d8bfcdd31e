"""Encoded chunks in memory, made and read without a checkpoint."""

from __future__ import annotations

from reshard.engine.decoding import DecodedChunk, FrameBuffers
from reshard.format import codec
from reshard.stores.memory import MemoryStore


def encode(content: bytes, itemsize: int) -> bytes:
    """One encoded chunk: index, frames, padding."""
    width = codec.plane_width(itemsize, len(content))
    index = codec.make_index(width, len(content))
    frames = []
    for number in range(len(index.rows)):
        begin, end = index.content_range(number)
        frame = codec.encode_frame(memoryview(content)[begin:end], width)
        index.rows[number] = frame.row()
        frames.append(b"".join(frame.parts))
    return (index.encode() + b"".join(frames)).ljust(index.stored_nbytes, b"\0")


def reader_of(blob: bytes, content_nbytes: int, before: bytes = b"") -> DecodedChunk:
    """A reader of a chunk in a file that begins with `before`."""
    store = MemoryStore()
    store.create()
    data = before + blob
    store.open_writer("file", len(data)).write(0, [memoryview(data)])
    source = store.open_reader("file")
    return DecodedChunk(source, len(before), len(blob), content_nbytes, FrameBuffers(), "'w'")


def read(reader: DecodedChunk, offset: int, *sizes: int) -> bytes:
    """The bytes from `offset` on, by way of buffers of these sizes."""
    buffers = [bytearray(size) for size in sizes]
    reader.read_into(offset, [memoryview(buffer) for buffer in buffers])
    return b"".join(buffers)


def decode(blob: bytes, content_nbytes: int) -> bytes:
    return read(reader_of(blob, content_nbytes), 0, content_nbytes)

"""Contents that went through stream extensions, read as files."""

from __future__ import annotations

import io

import numpy as np
import pytest
from torch.distributed.checkpoint._extension import ZStandard

from reshard.api import CorruptCheckpointError
from reshard.engine import streams
from reshard.engine.streams import StreamedChunk, decode_value, stream_codec
from reshard.stores.memory import MemoryStore

CONTENT = np.random.default_rng(0).integers(0, 9, 100_000).astype(np.uint8).tobytes()


def compressed(content: bytes) -> bytes:
    output = io.BytesIO()
    output.close = lambda: None  # type: ignore[method-assign]
    with ZStandard().transform_to(output) as stream:
        stream.write(content)
    return output.getvalue()


def reader_of(stored: bytes, content_nbytes: int) -> StreamedChunk:
    store = MemoryStore()
    store.open_writer("file", None).write(0, [memoryview(b"before" + stored + b"after")])
    source = store.open_reader("file")
    return StreamedChunk(source, 6, len(stored), content_nbytes, [ZStandard()], "'w'")


def read(reader: StreamedChunk, begin: int, *sizes: int) -> bytes:
    buffers = [bytearray(size) for size in sizes]
    reader.read_into(begin, [memoryview(buffer) for buffer in buffers])
    return b"".join(buffers)


def test_ranges_are_read_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_PIECE_BYTES", 1000)
    reader = reader_of(compressed(CONTENT), len(CONTENT))
    for begin in (50_000, 60_000, 10, 99_000, 0, 50_000):
        assert read(reader, begin, 700, 0, 300) == CONTENT[begin : begin + 1000]
    assert read(reader, 0, len(CONTENT)) == CONTENT
    assert read(reader, len(CONTENT)) == b""


def test_a_stream_goes_on_where_it_was_left() -> None:
    reader = reader_of(compressed(CONTENT), len(CONTENT))
    opened = []
    reader._open = lambda opens=reader._open: opened.append(1) or opens()  # type: ignore
    for begin in range(0, len(CONTENT), 10_000):
        assert read(reader, begin, 10_000) == CONTENT[begin : begin + 10_000]

    assert len(opened) == 1


@pytest.mark.parametrize("said", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_chunk_that_decodes_to_another_size_is_refused(said: int) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"decodes to .*{said}|decodes to more"):
        read(reader_of(compressed(CONTENT), said), 0, said)


def test_a_chunk_that_cannot_be_decoded_is_refused_by_name() -> None:
    stored = bytearray(compressed(CONTENT))
    stored[0] ^= 1
    with pytest.raises(CorruptCheckpointError, match="'w' cannot be decoded: ZstdError"):
        read(reader_of(bytes(stored), len(CONTENT)), 0, 10)


def test_a_value_comes_back_as_it_was() -> None:
    assert decode_value(compressed(CONTENT), [ZStandard()], "here") == CONTENT
    assert decode_value(compressed(b""), [ZStandard()], "here") == b""


def test_a_descriptor_that_cannot_be_told_from_two_is_refused() -> None:
    class Odd(ZStandard):
        def get_descriptor(self) -> str:
            return "one,two"

    with pytest.raises(ValueError, match="'one,two' of a stream extension"):
        stream_codec([Odd()])

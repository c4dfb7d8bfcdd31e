"""Encoded chunks: planes and frames, which come back as they were and are read by themselves."""

from __future__ import annotations

import builtins
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reshard.format import codec
from support.encoded import decode, encode, read, reader_of
from support.samples import raw


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "FRAME_BYTES", codec.LEAST_FRAME_BYTES)


def weights(count: int, dtype: torch.dtype = torch.bfloat16) -> bytes:
    generator = torch.Generator().manual_seed(count)
    return raw((torch.randn(count, generator=generator) * 0.02).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_come_back_as_they_were_in_fewer_bytes(dtype: torch.dtype) -> None:
    content = weights(200_001, dtype)
    blob = encode(content, dtype.itemsize)

    assert decode(blob, len(content)) == content
    assert len(blob) < 0.95 * len(content)


def test_bfloat16_weights_take_at_most_two_thirds_and_a_bit() -> None:
    content = weights(1 << 20)

    assert len(encode(content, 2)) <= 0.68 * len(content)


@settings(max_examples=150, deadline=None)
@given(
    data=st.binary(max_size=300),
    repeats=st.integers(1, 900),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
)
@example(data=b"", repeats=1, itemsize=4)
@example(data=bytes(8), repeats=8192, itemsize=8)
@example(data=bytes(range(256)), repeats=257, itemsize=2)
def test_any_bytes_come_back_as_they_were(data: bytes, repeats: int, itemsize: int) -> None:
    content = data * repeats
    blob = encode(content, itemsize)

    assert decode(blob, len(content)) == content
    assert len(blob) % codec.ALIGNMENT == 0


def test_a_chunk_of_zeros_takes_next_to_nothing() -> None:
    assert len(encode(bytes(1 << 20), 4)) < 4096


def test_noise_is_kept_as_it_is() -> None:
    noise = np.random.default_rng(0).bytes(1 << 17)
    frame = codec.encode_frame(memoryview(noise)[: 1 << 16], 2)

    assert frame.nbytes == 1 << 16
    assert frame.nbytes > codec.saving_limit(1 << 16)


@pytest.mark.parametrize(
    "nbytes", [8, 1 << 16, (1 << 16) + 8, 1 << 20, (1 << 20) + 24, 123_456_784]
)
def test_samples_lie_within_the_chunk_on_whole_elements(nbytes: int) -> None:
    ranges = codec.sample_ranges(nbytes)

    assert ranges[0][0] == 0
    assert all(0 <= begin < end <= nbytes for begin, end in ranges)
    assert all(begin % 8 == 0 and (end - begin) % 8 == 0 for begin, end in ranges)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_range_is_read_into_any_buffers(data: st.DataObject) -> None:
    content = weights(150_000)
    reader = reader_of(encode(content, 2), len(content), before=b"other")
    for _ in range(3):
        cuts = sorted(
            data.draw(st.lists(st.integers(0, len(content)), min_size=2, max_size=6)), key=int
        )
        sizes = [end - begin for begin, end in itertools.pairwise(cuts)]
        assert read(reader, cuts[0], *sizes) == content[cuts[0] : cuts[-1]]


class Counting:
    """A reader that remembers which bytes were asked for."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.read: list[tuple[int, int]] = []

    nbytes = property(lambda self: self.source.nbytes)

    def read_into(self, offset: int, buffers: list[memoryview]) -> None:
        self.read.append((offset, sum(map(len, buffers))))
        self.source.read_into(offset, buffers)

    def close(self) -> None:
        self.source.close()


def test_only_frames_that_are_touched_are_read_and_neighbours_share_one() -> None:
    content = weights(500_000)
    reader = reader_of(encode(content, 2), len(content))
    counting = reader._source = Counting(reader._source)
    read(reader, 0, 1)
    del counting.read[:]

    read(reader, 7 << 16, 100)
    read(reader, (7 << 16) + 100, 3000, 20)

    assert len(counting.read) == 1
    assert counting.read[0][1] < 1 << 16


def test_two_chunks_that_share_buffers_do_not_mix_their_frames() -> None:
    contents = [weights(20_000), weights(20_001)]
    readers = [reader_of(encode(content, 2), len(content)) for content in contents]
    readers[1]._buffers = readers[0]._buffers
    for begin in (0, 100, 1000):
        for reader, content in zip(readers, contents, strict=True):
            assert read(reader, begin, 50) == content[begin : begin + 50]


def test_several_threads_read_one_chunk() -> None:
    content = weights(500_000)
    reader = reader_of(encode(content, 2), len(content))
    wrong: list[int] = []

    def look(seed: int) -> None:
        for begin in np.random.default_rng(seed).integers(0, len(content) - 70_000, 40).tolist():
            same = read(reader, begin, 60_000, 10_000) == content[begin : begin + 70_000]
            wrong.extend([] if same else [begin])

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_what_compress_may_be_is_listed() -> None:
    codec.check_compress(None)
    codec.check_compress("zstd")
    with pytest.raises(ValueError, match=r"compress='lzma' is not known. Choose one of: 'zstd'"):
        codec.check_compress("lzma")


def test_without_its_package_the_codec_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "zstandard":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    needs = r"needs the package zstandard: pip install 'reshard\[compress\]'"
    with pytest.raises(ImportError, match=f"^compress='zstd' {needs}"):
        codec.check_compress("zstd")
    with pytest.raises(ImportError, match=f"/a/checkpoint .* {needs}"):
        codec.check_codec(codec.PLANES_ZSTD, "/a/checkpoint")

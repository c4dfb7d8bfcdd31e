"""Any region of any chunk into any tensor, by every path through the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.api import CorruptCheckpointError
from reshard.engine import reading
from reshard.engine.reading import Request, Verify, read_bytes, read_regions
from reshard.stores.local import LocalStore
from reshard.stores.memory import MemoryStore
from support.boxes import Box, boxes_within

CONSTANTS = [name for name in vars(reading) if name.endswith(("_BYTES", "_ITEMS", "_ROWS"))]


@contextmanager
def limits(**numbers: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, number in numbers.items():
            patch.setattr(reading, name, number)
        yield


class CountingReader:
    """A file in memory that remembers which bytes were asked for."""

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)
        self.calls: list[tuple[int, int]] = []
        self.filled: list[tuple[int, int]] = []

    @property
    def nbytes(self) -> int:
        return len(self.content)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self.calls.append((offset, sum(map(len, buffers))))
        for buffer in buffers:
            assert offset + len(buffer) <= len(self.content), "a read beyond the file"
            self.filled.append((np.frombuffer(buffer, np.uint8).ctypes.data, len(buffer)))
            buffer[:] = self.content[offset : offset + len(buffer)]
            offset += len(buffer)

    def close(self) -> None:
        pass


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def numbered(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(math.prod(shape)) % 113).reshape(tuple(shape)).to(dtype)


def make_request(
    chunk: torch.Tensor, offsets: Sequence[int], target: torch.Tensor, begin: int = 0, **kw: Any
) -> Request:
    return Request(
        into=kw.pop("into", "the.key"),
        name=kw.pop("name", "the.key"),
        file="file",
        begin=begin,
        chunk_shape=tuple(chunk.shape),
        dtype=chunk.dtype,
        digest=kw.pop("digest", xxhash.xxh3_128_digest(bytes_of(chunk))),
        offsets=tuple(offsets),
        lengths=tuple(target.shape),
        target=target,
        **kw,
    )


@st.composite
def targets(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a shape that lies in memory in one of many ways, or is of another dtype."""
    form = draw(st.sampled_from(["dense", "strided", "transposed", "inner", "other dtype"]))
    if form == "other dtype":
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64]))
    if form == "strided" and shape:
        return torch.zeros((*shape[:-1], shape[-1] * 2), dtype=dtype)[..., ::2]
    if form == "transposed" and shape:
        order = draw(st.permutations(range(len(shape))))
        back = [order.index(dim) for dim in range(len(shape))]
        return torch.zeros([shape[dim] for dim in order], dtype=dtype).permute(back)
    if form == "inner" and shape:
        outer = torch.zeros([extent + 2 for extent in shape], dtype=dtype)
        return outer[tuple(slice(1, extent + 1) for extent in shape)]
    return torch.zeros(shape, dtype=dtype)


shapes = (
    st.lists(st.one_of(st.integers(1, 4), st.integers(0, 9)), max_size=5)
    .map(tuple)
    .filter(lambda shape: math.prod(shape) <= 1500)
)


@settings(max_examples=400, deadline=None)
@given(shapes, st.data())
def test_any_region_of_any_chunk_fills_any_tensor(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int8]))
    chunk = numbered(shape, dtype)
    begin = data.draw(st.integers(0, 40))
    content = b"\xee" * begin + bytes_of(chunk) + b"\xee" * data.draw(st.integers(0, 9))
    requests, expected = [], []
    finished: list[int] = []
    for number in range(data.draw(st.integers(1, 4))):
        box = boxes_within(shape) if data.draw(st.booleans()) else None
        region = data.draw(box) if box is not None else None
        low = region.low if region is not None else (0,) * len(shape)
        wanted = chunk[region.slices] if region is not None else chunk
        target = data.draw(targets(tuple(wanted.shape), dtype))
        requests.append(
            make_request(
                chunk, low, target, begin, done=lambda number=number: finished.append(number)
            )
        )
        expected.append(wanted)
    numbers = {name: data.draw(st.integers(1, 200), label=name) for name in CONSTANTS}
    verify = data.draw(st.sampled_from(Verify))
    threads = data.draw(st.sampled_from([1, 1, 1, 3]))
    reader = CountingReader(content)
    with limits(**numbers):
        count = read_regions({"file": reader}, requests, verify, threads, "here")
    assert count == sum(wanted.numel() * dtype.itemsize for wanted in expected)
    assert sorted(finished) == list(range(len(requests)))
    for request, wanted in zip(requests, expected, strict=True):
        assert torch.equal(request.target, wanted.to(request.target.dtype))


@settings(max_examples=150, deadline=None)
@given(st.lists(shapes, min_size=2, max_size=5), st.data())
def test_neighbours_in_one_file_are_told_apart(
    all_shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    content = b""
    requests, expected = [], []
    for number, shape in enumerate(all_shapes):
        chunk = numbered(shape, torch.int16) + 100 * number
        content += b"\xee" * data.draw(st.integers(0, 9))
        region = data.draw(st.one_of(st.just(Box((0,) * len(shape), shape)), boxes_within(shape)))
        target = data.draw(targets(region.sizes, torch.int16))
        requests.append(make_request(chunk, region.low, target, begin=len(content)))
        expected.append(chunk[region.slices])
        content += bytes_of(chunk)
    verify = data.draw(st.sampled_from(Verify))
    read_regions({"file": CountingReader(content)}, requests, verify, 1, "here")
    for request, wanted in zip(requests, expected, strict=True):
        assert torch.equal(request.target, wanted.to(request.target.dtype))


@settings(max_examples=150, deadline=None)
@given(shapes.filter(lambda shape: math.prod(shape) > 0), st.data())
def test_no_byte_outside_of_the_target_is_touched(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    chunk = numbered(shape, torch.int16)
    region = data.draw(boxes_within(shape))
    outer = torch.full([size + 2 for size in region.sizes], -1, dtype=torch.int16)
    inner = outer[tuple(slice(1, size + 1) for size in region.sizes)]
    request = make_request(chunk, region.low, inner)
    numbers = {name: data.draw(st.integers(1, 60), label=name) for name in CONSTANTS}
    reader = CountingReader(bytes_of(chunk))
    with limits(**numbers):
        read_regions({"file": reader}, [request], Verify.OFF, 1, "here")
    assert torch.equal(inner, chunk[region.slices])
    inner.fill_(-1)
    assert bool((outer == -1).all())


def test_only_the_wanted_rows_of_a_chunk_are_read() -> None:
    chunk = numbered((100, 10), torch.float32)
    reader = CountingReader(bytes_of(chunk))
    request = make_request(chunk, (40, 0), torch.zeros(5, 10))
    read_regions({"file": reader}, [request], Verify.CHUNKS, 1, "here")
    assert reader.calls == [(40 * 40, 5 * 40)]


def test_a_narrow_gap_is_read_and_a_wide_one_is_skipped() -> None:
    chunk = numbered((8, 64), torch.float32)
    for widest, read in ((1 << 10, 8 * 64 * 4), (16, 8 * 4 * 4)):
        reader = CountingReader(bytes_of(chunk))
        request = make_request(chunk, (0, 10), torch.zeros(8, 4))
        with limits(WIDEST_GAP_BYTES=widest):
            read_regions({"file": reader}, [request], Verify.OFF, 1, "here")
        assert torch.equal(request.target, chunk[:, 10:14])
        assert sum(nbytes for _, nbytes in reader.calls) == read


def test_long_parts_of_rows_are_read_to_their_places_by_one_call() -> None:
    chunk = numbered((8, 64), torch.float32)
    reader = CountingReader(bytes_of(chunk))
    request = make_request(chunk, (0, 10), torch.zeros(8, 4))
    with limits(_SCATTERED_BYTES=16):
        read_regions({"file": reader}, [request], Verify.OFF, 1, "here")
    assert torch.equal(request.target, chunk[:, 10:14])
    # From the first wanted byte to the last.
    assert reader.calls == [(40, 7 * 256 + 16)]
    begin = request.target.data_ptr()
    direct = [length for at, length in reader.filled if begin <= at < begin + 128]
    assert direct == [16] * 8


def test_small_neighbours_are_read_by_one_call() -> None:
    chunks = [numbered((4,), torch.float32) + number for number in range(50)]
    reader = CountingReader(b"".join(map(bytes_of, chunks)))
    requests = [
        make_request(chunk, (0,), torch.zeros(4), begin=16 * number)
        for number, chunk in enumerate(chunks)
    ]
    read_regions({"file": reader}, requests[::-1], Verify.CHUNKS, 1, "here")
    assert reader.calls == [(0, 800)]
    assert all(torch.equal(r.target, c) for r, c in zip(requests, chunks, strict=True))


@pytest.mark.parametrize("small", [True, False], ids=["in a batch", "alone"])
@pytest.mark.parametrize(
    ("verify", "part_is_found", "whole_is_found"),
    [(Verify.OFF, False, False), (Verify.CHUNKS, False, True), (Verify.FULL, True, True)],
)
def test_verification_finds_what_it_promises(
    verify: Verify, part_is_found: bool, whole_is_found: bool, small: bool
) -> None:
    chunk, neighbour = numbered((4, 4), torch.float32), numbered((4,), torch.float32) + 1
    content = bytearray(bytes_of(chunk))
    content[-1] ^= 1
    for rows, is_found in ((2, part_is_found), (4, whole_is_found)):
        reader = CountingReader(bytes(content) + bytes_of(neighbour))
        requests = [make_request(chunk, (0, 0), torch.zeros(rows, 4))]
        if small:
            # With a sound neighbour, there is a batch.
            requests.append(make_request(neighbour, (0,), torch.zeros(4), begin=64))
        if is_found:
            with pytest.raises(CorruptCheckpointError, match=r"'the\.key' in 'file' of here"):
                read_regions({"file": reader}, requests, verify, 1, "here")
            continue
        read_regions({"file": reader}, requests, verify, 1, "here")
        assert reader.calls == [(0, 80 if small else 16 * rows)]
        if small:
            assert torch.equal(requests[1].target, neighbour)


@settings(max_examples=200, deadline=None)
@given(shapes.filter(math.prod), st.data())
def test_full_verification_finds_any_changed_byte_whatever_part_is_wanted(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    chunk = numbered(shape, torch.float32)
    content = bytearray(bytes_of(chunk))
    region = data.draw(boxes_within(shape).filter(lambda box: chunk[box.slices].numel() > 0))
    target = data.draw(targets(tuple(chunk[region.slices].shape), chunk.dtype))
    numbers = {name: data.draw(st.integers(1, 200), label=name) for name in CONSTANTS}
    content[data.draw(st.integers(0, len(content) - 1), label="changed")] ^= 1
    request = make_request(chunk, region.low, target)
    reader = CountingReader(bytes(content))
    with limits(**numbers), pytest.raises(CorruptCheckpointError):
        read_regions({"file": reader}, [request], Verify.FULL, 1, "here")


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        ((0, 0), (40, 7)),
        ((0, 3), (40, 2)),
        ((5, 3), (20, 4)),
        ((10, 0), (30, 10)),
        ((39, 9), (1, 1)),
    ],
    ids=str,
)
def test_full_verification_reads_a_chunk_once(
    offsets: tuple[int, int], lengths: tuple[int, int]
) -> None:
    chunk = numbered((40, 10), torch.float32)
    reader = CountingReader(bytes_of(chunk))
    request = make_request(chunk, offsets, torch.zeros(lengths))
    read_regions({"file": reader}, [request], Verify.FULL, 1, "here")
    assert sum(count for _, count in reader.calls) == chunk.nbytes
    # In order, so that it can be hashed on the way.
    assert reader.calls == sorted(reader.calls)
    low, high = offsets, [a + b for a, b in zip(offsets, lengths, strict=True)]
    assert torch.equal(request.target, chunk[low[0] : high[0], low[1] : high[1]])


def test_many_small_parts_are_verified_without_being_read_twice() -> None:
    chunks = [numbered((8, 8), torch.float32) + i for i in range(20)]
    reader = CountingReader(b"".join(map(bytes_of, chunks)))
    requests = [
        make_request(chunk, (0, 0), torch.zeros(4, 8), begin=i * 256, into=f"of {i}")
        for i, chunk in enumerate(chunks)
    ]
    read_regions({"file": reader}, requests, Verify.FULL, 1, "here")
    assert sum(count for _, count in reader.calls) == 20 * 256
    assert all(
        torch.equal(request.target, chunk[:4])
        for request, chunk in zip(requests, chunks, strict=True)
    )


def test_who_asks_for_nothing_hears_of_the_end_even_among_others_that_share_memory() -> None:
    chunk, memory, heard = numbered((4,), torch.float32), torch.zeros(8), []
    requests = [
        make_request(
            chunk,
            (0,),
            memory[begin : begin + size],
            into=name,
            done=lambda n=name: heard.append(n),
        )
        for name, begin, size in (("a", 0, 4), ("b", 2, 4), ("a", 0, 0))
    ]
    for _ in Verify:
        read_regions({"file": CountingReader(bytes_of(chunk))}, requests, Verify.OFF, 1, "here")
    assert sorted(heard) == sorted(["a", "b", "a"] * len(Verify))


def test_a_chunk_that_is_wanted_in_many_parts_is_verified_once() -> None:
    chunk = numbered((40, 10), torch.float32)
    reader = CountingReader(bytes_of(chunk))
    requests = [make_request(chunk, (row, 0), torch.zeros(1, 10)) for row in range(40)]
    with limits(_SMALL_BYTES=0):
        read_regions({"file": reader}, requests, Verify.FULL, 1, "here")
    # All of it with the first part, and the other parts by themselves.
    assert sum(count for _, count in reader.calls) == chunk.nbytes + 39 * 40


@pytest.mark.parametrize("form", ["dense", "strided", "cast"])
def test_a_sound_chunk_passes_in_pieces_of_any_size(form: str) -> None:
    chunk = numbered((6, 5), torch.float32)
    for nbytes in (1, 3, 4, 7, 20, 64, 1000):
        target = {
            "dense": torch.zeros(6, 5),
            "strided": torch.zeros(6, 10)[:, ::2],
            "cast": torch.zeros(6, 5, dtype=torch.float64),
        }[form]
        request = make_request(chunk, (0, 0), target)
        with limits(_PIECE_BYTES=nbytes, _BOUNCE_BYTES=nbytes, _SMALL_BYTES=0):
            reader = CountingReader(bytes_of(chunk))
            read_regions({"file": reader}, [request], Verify.CHUNKS, 1, "here")
        assert torch.equal(target.float(), chunk)
        # Read once: the checksum is made on the way.
        assert sum(count for _, count in reader.calls) == 120


def test_a_chunk_that_fills_a_cast_target_stays_within_the_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk = numbered((1 << 16,), torch.float32)
    taken: list[int] = []
    take = reading.BounceBuffer.take

    def record(self: Any, nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return take(self, nbytes)

    monkeypatch.setattr(reading.BounceBuffer, "take", record)
    request = make_request(chunk, (0,), torch.zeros(1 << 16, dtype=torch.float64))
    with limits(_BOUNCE_BYTES=4096):
        readers = {"file": CountingReader(bytes_of(chunk))}
        read_regions(readers, [request], Verify.CHUNKS, 1, "here")
    assert torch.equal(request.target.float(), chunk)
    assert max(taken) <= 4096


def test_the_checksum_of_a_value_may_be_given_as_a_signed_number() -> None:
    store = MemoryStore()
    for seed in range(20):
        data = b"value %d" % seed
        store.files["file"] = bytearray(data)
        checksum = xxhash.xxh3_64_intdigest(data)
        signed = checksum - (1 << 64) if checksum >= 1 << 63 else checksum
        reader = store.open_reader("file")
        assert read_bytes(reader, "k", 0, len(data), signed, Verify.CHUNKS, "here") == data


def test_stored_bytes_are_verified_unless_that_is_off() -> None:
    store = MemoryStore()
    store.files["file"] = bytearray(b"..value..")
    reader = store.open_reader("file")
    digest = xxhash.xxh3_64_intdigest(b"value")
    assert read_bytes(reader, "k", 2, 5, digest, Verify.CHUNKS, "here") == b"value"
    assert read_bytes(reader, "k", 2, 5, digest + 1, Verify.OFF, "here") == b"value"
    assert read_bytes(reader, "k", 9, 0, xxhash.xxh3_64_intdigest(b""), Verify.FULL, "") == b""
    with pytest.raises(CorruptCheckpointError, match="'k' in here"):
        read_bytes(reader, "k", 2, 5, digest + 1, Verify.CHUNKS, "here")


def test_an_error_in_one_thread_ends_the_read() -> None:
    chunk = numbered((64,), torch.float32)

    class Failing(CountingReader):
        def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
            raise OSError("the disk is on fire")

    requests = [make_request(chunk, (0,), torch.zeros(64)) for _ in range(8)]
    with limits(_SMALL_BYTES=0), pytest.raises(OSError, match="on fire"):
        read_regions({"file": Failing(b"")}, requests, Verify.CHUNKS, 4, "here")


@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 20, 20 << 20])
@pytest.mark.parametrize("verify", Verify)
def test_bytes_are_read_straight_into_the_memory_of_the_target(nbytes: int, verify: Verify) -> None:
    chunk = numbered((nbytes // 4,), torch.float32)
    reader = CountingReader(bytes_of(chunk))
    target = torch.zeros_like(chunk)
    read_regions({"file": reader}, [make_request(chunk, (0,), target)], verify, 1, "here")
    assert torch.equal(target, chunk)
    begin = target.data_ptr()
    assert sum(length for _, length in reader.filled) == nbytes
    for address, length in reader.filled:
        assert begin <= address
        assert address + length <= begin + nbytes


@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
@pytest.mark.parametrize("verify", Verify)
def test_a_file_that_is_cut_short_while_it_is_read_is_damage_that_names_the_key_and_the_file(
    verify: Verify, small_bytes: int, tmp_path: Path
) -> None:
    chunk = numbered((64,), torch.float32)
    (tmp_path / "file").write_bytes(bytes_of(chunk) * 3)
    reader = LocalStore(tmp_path).open_reader("file")
    (tmp_path / "file").write_bytes(bytes_of(chunk)[:-2] * 2)
    requests = [
        make_request(chunk, (0,), torch.zeros(64), begin=256 * i, name=name, into=name)
        for i, name in enumerate(("first", "second", "third"))
    ]
    if verify is not Verify.OFF:
        requests[0].digest = xxhash.xxh3_128_digest((bytes_of(chunk)[:-2] * 2)[:256])

    with (
        limits(_SMALL_BYTES=small_bytes),
        pytest.raises(CorruptCheckpointError, match=r"'second' .*: 'file' of here .* at byte 508"),
    ):
        read_regions({"file": reader}, requests, verify, 1, "here")
    with pytest.raises(CorruptCheckpointError, match=r"'value' .*: the file was cut short"):
        read_bytes(reader, "value", 500, 9, 0, verify, "the file")
    reader.close()

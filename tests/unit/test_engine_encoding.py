"""Shard files with encoded tensors: valid safetensors files, in order, in bounded memory."""

from __future__ import annotations

import errno
import json
import os
import struct
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.engine.encoding import LEAST_ENCODED_BYTES, write_encoded_file
from reshard.engine.memory import copy_elements
from reshard.engine.writing import Content, Written
from reshard.format import codec
from reshard.stores.local import LocalStore
from reshard.stores.memory import MemoryStore
from support.encoded import decode
from support.failing_system import refusing
from support.samples import raw


def weights(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)


def noise(nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(nbytes)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)


def content_of(key: str, tensor: torch.Tensor) -> Content:
    return Content(key, tensor.dtype, tuple(tensor.shape), tensor.nbytes, lambda: tensor)


def write(tensors: dict[str, torch.Tensor], threads: int = 2) -> tuple[Written, bytes]:
    store = MemoryStore()
    contents = [content_of(key, tensor) for key, tensor in tensors.items()]
    written = write_encoded_file(store, "file", contents, threads, durable=True)
    return written, bytes(store.files["file"])


def entries_in(file: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", file[:8])
    assert (8 + length) % 4096 == 0
    entries: dict[str, Any] = json.loads(file[8 : 8 + length])
    entries.pop("__metadata__")
    return entries


def check(tensors: dict[str, torch.Tensor], written: Written, file: bytes) -> None:
    """Every tensor decodes to what it was; entries follow each other, aligned."""
    assert written.encoded is not None
    assert written.stored_nbytes is not None
    assert written.file_bytes == len(file)
    assert written.header_checksum % (1 << 64) == xxhash.xxh3_64_intdigest(
        file[: written.header_bytes]
    )
    entries = entries_in(file)
    ends = [0, *(entry["data_offsets"][1] for entry in entries.values())]
    assert [entry["data_offsets"][0] for entry in entries.values()] == ends[:-1]
    assert written.header_bytes + ends[-1] == len(file)
    for i, (key, tensor) in enumerate(tensors.items()):
        begin, nbytes = int(written.begins[i]), int(written.stored_nbytes[i])
        stored, expected = file[begin : begin + nbytes], raw(tensor)
        assert entries[key]["data_offsets"][0] == begin - written.header_bytes
        if written.encoded[i]:
            assert entries[key]["dtype"] == "U8"
            assert entries[key]["shape"] == [nbytes]
            assert decode(stored, len(expected)) == expected, key
        else:
            assert stored == expected, key
            assert begin % tensor.itemsize == 0
        assert written.digests[i].tobytes() == xxhash.xxh3_128_digest(expected), key
        first_bytes = int(written.checksums[i]) % (1 << 64)
        assert first_bytes == xxhash.xxh3_64_intdigest(expected[:4096]), key


MIXED = {
    "large": weights(1000, 1200),
    "bias": weights(1200),
    "half": weights(700, 1001, dtype=torch.bfloat16),
    "noise": noise(3 << 20),
    "odd": weights(33_333, dtype=torch.float16),
    "short": noise(5),
    "ids": torch.arange(100_000),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "flags": torch.ones(70_001, dtype=torch.bool),
    "wide": weights(40_000, dtype=torch.complex128),
}


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_tensors_of_all_kinds_are_written_in_order_without_gaps(threads: int) -> None:
    written, file = write(MIXED, threads)

    check(MIXED, written, file)
    assert written.encoded is not None
    encoded = {key for key, is_encoded in zip(MIXED, written.encoded, strict=True) if is_encoded}
    assert encoded == {"large", "half", "odd", "ids", "flags", "wide"}


def test_the_number_of_threads_does_not_change_the_file() -> None:
    assert write(MIXED, 1)[1] == write(MIXED, 4)[1]


def test_a_file_with_encoded_tensors_opens_with_safetensors(tmp_path: Path) -> None:
    contents = [content_of(key, tensor) for key, tensor in MIXED.items()]
    written = write_encoded_file(
        LocalStore(tmp_path), "x.safetensors", contents, 2, durable=True, save_id="id"
    )
    loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")

    assert set(loaded) == set(MIXED)
    assert torch.equal(loaded["noise"], MIXED["noise"])
    assert torch.equal(loaded["bias"], MIXED["bias"])
    assert (tmp_path / "x.safetensors").stat().st_size == written.file_bytes


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.uint8]),
            st.sampled_from([0, 1, 7, 8191, 8192, 16384, 65_536, 65_537, 150_001]),
            st.booleans(),
        ),
        max_size=8,
    ),
    st.integers(1, 3),
)
def test_any_mix_of_sizes_and_dtypes_is_written(
    kinds: list[tuple[torch.dtype, int, bool]], threads: int
) -> None:
    tensors = {}
    for number, (dtype, count, structured) in enumerate(kinds):
        zeros = torch.zeros(count, dtype=dtype)
        tensors[f"t{number}"] = zeros if structured else noise(zeros.nbytes).view(dtype)
    written, file = write(tensors, threads)
    check(tensors, written, file)


UNUSUAL = {
    "transposed": weights(800, 900).t(),
    "strided": weights(1_000_000)[::3],
    "columns": weights(900, 1000)[:, 100:901],
    "permuted": weights(30, 40, 50, 20).permute(3, 1, 0, 2),
    "expanded": weights(1000).expand(500, 1000),
    "conjugated": torch.complex(weights(300, 500), weights(300, 500, seed=1)).t().conj(),
    "negated": torch.complex(weights(90_000), weights(90_000, seed=1)).conj().imag,
    "with a gradient": weights(400, 500).requires_grad_(),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_tensors_of_any_strides_are_encoded_by_frames(name: str) -> None:
    tensors = {name: UNUSUAL[name]}
    written, file = write(tensors)
    check({name: UNUSUAL[name].detach().resolve_conj().resolve_neg()}, written, file)
    assert written.encoded is not None
    assert written.encoded.all()


@settings(deadline=None)
@given(st.data())
def test_any_range_of_elements_is_copied_in_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2)))
    found = torch.empty(end - begin, dtype=torch.int64)
    copy_elements(tensor, begin, end, found)

    assert found.tolist() == tensor.flatten().tolist()[begin:end]


def test_a_header_that_is_shorter_than_the_space_for_it_fills_it() -> None:
    tensors = {f"t{i}": torch.full((i % 7,), i) for i in range(500)}
    written, file = write(tensors)

    check(tensors, written, file)
    (length,) = struct.unpack("<Q", file[:8])
    assert len(file[8 : 8 + length].rstrip(b" ")) < length - 4096


def test_values_and_small_tensors_are_not_encoded() -> None:
    value = bytes(2 * LEAST_ENCODED_BYTES)
    contents = [
        Content("value", torch.uint8, (len(value),), len(value), memoryview(value)),
        content_of("small", torch.zeros(LEAST_ENCODED_BYTES - 1, dtype=torch.uint8)),
        content_of("large", torch.zeros(LEAST_ENCODED_BYTES, dtype=torch.uint8)),
    ]
    written = write_encoded_file(MemoryStore(), "file", contents, 2, durable=False)

    assert written.encoded is not None
    assert written.encoded.tolist() == [0, 0, 1]


def test_progress_counts_the_content() -> None:
    counted: list[int] = []
    contents = [content_of(key, tensor) for key, tensor in MIXED.items()]
    write_encoded_file(MemoryStore(), "file", contents, 2, False, counted.append)

    assert sum(counted) == sum(tensor.nbytes for tensor in MIXED.values())


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_one_thread_ends_them_all(threads: int) -> None:
    def fail() -> torch.Tensor:
        raise ZeroDivisionError("of the planner")

    contents = [content_of(f"t{i}", weights(1 << 19)) for i in range(4)]
    # A single frame, so that other threads wait for the turn after it.
    contents[2:2] = [Content("bad", torch.float32, (1 << 18,), 1 << 20, fail)]
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="of the planner"):
        write_encoded_file(MemoryStore(), "file", contents, threads, durable=False)

    assert threading.active_count() == before


def test_an_error_of_the_disk_is_raised_and_the_file_closed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, refusing(errno.ENOSPC, name="pwritev"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        write_encoded_file(store, "x", [content_of("t", weights(1 << 20))], 3, durable=True)

    assert len(os.listdir("/proc/self/fd")) == before


def test_data_of_another_size_than_planned_is_refused_by_name() -> None:
    short = Content("the.key", torch.uint8, (1 << 20,), 1 << 20, lambda: torch.zeros(3))
    with pytest.raises(ValueError, match=r"'the\.key' was planned with"):
        write_encoded_file(MemoryStore(), "file", [short], 1, durable=False)


def test_a_tensor_that_is_made_for_the_save_is_let_go_of_when_it_is_written() -> None:
    alive: list[int] = []
    most = 0

    def make() -> torch.Tensor:
        nonlocal most
        memory = weights(1 << 19).numpy().copy()
        alive.append(1)
        most = max(most, len(alive))
        weakref.finalize(memory, alive.pop)
        return torch.from_numpy(memory)

    contents = [Content(f"t{i}", torch.float32, (1 << 19,), 2 << 20, make) for i in range(6)]
    write_encoded_file(MemoryStore(), "file", contents, 1, durable=False)

    assert most <= 2
    assert alive == []


def test_frames_are_as_large_as_they_are_read() -> None:
    written, file = write({"t": torch.zeros(3 << 20, dtype=torch.uint8)})
    begin = int(written.begins[0])
    assert struct.unpack_from("<I", file, begin + 8)[0] == codec.FRAME_BYTES == 1 << 20

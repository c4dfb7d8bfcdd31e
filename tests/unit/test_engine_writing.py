"""Shard files: every tensor as safetensors reads it, in bounded memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash

import reshard
from reshard.engine import memory, writing
from reshard.engine.writing import Content, Written, write_file
from reshard.format.container import SAFETENSORS_DTYPES
from reshard.planning.columns import DTYPES
from reshard.stores.local import LocalStore
from reshard.stores.memory import MemoryStore

# torch has no tensors of these that one could make.
STORABLE = [dtype for dtype in DTYPES if not str(dtype).startswith(("torch.q", "torch.bits"))]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def content_of(key: str, tensor: torch.Tensor) -> Content:
    return Content(key, tensor.dtype, tuple(tensor.shape), tensor.nbytes, lambda: tensor)


def bytes_of(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach()
    if not dense.is_contiguous() or dense.is_conj() or dense.is_neg() or dense.numel() == 1:
        # Not `contiguous`, which keeps the strides of a single element.
        dense = torch.stack([dense.resolve_conj().resolve_neg()])
    return bytes(dense.reshape(-1).view(torch.uint8).numpy()) if dense.numel() else b""


def write(tensors: dict[str, torch.Tensor], threads: int = 1) -> tuple[Written, bytes]:
    store = MemoryStore()
    contents = [content_of(key, tensor) for key, tensor in tensors.items()]
    written = write_file(store, "file", contents, threads, durable=True)
    return written, bytes(store.files["file"])


def check(tensors: dict[str, torch.Tensor], written: Written, raw: bytes) -> None:
    """Every tensor is where it is said to be, aligned, with the checksum of its bytes."""
    assert written.file_bytes == len(raw)
    for (key, tensor), begin, digest in zip(
        tensors.items(), written.begins.tolist(), written.digests, strict=True
    ):
        expected = bytes_of(tensor)
        assert raw[begin : begin + len(expected)] == expected, key
        assert begin % tensor.dtype.itemsize == 0, key
        assert digest.tobytes() == xxhash.xxh3_128_digest(expected), key


def patterned(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    pattern = (torch.arange(count) * 37 + 11) % (2 if dtype is torch.bool else 120)
    return pattern.to(torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_a_shard_file_of_any_dtype_opens_with_safetensors(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = {"a": patterned(dtype, 2, 3), "scalar": patterned(dtype), "e": patterned(dtype, 0, 2)}
    contents = [content_of(key, tensor) for key, tensor in tensors.items()]
    write_file(LocalStore(tmp_path), "x.safetensors", contents, 1, durable=False)
    loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert set(opened.keys()) == set(tensors)
        for key, tensor in tensors.items():
            for found in (loaded[key], opened.get_tensor(key)):
                if dtype in SAFETENSORS_DTYPES:
                    assert found.dtype is dtype
                    assert found.shape == tensor.shape
                else:
                    assert found.dtype is torch.uint8
                    assert found.shape == (tensor.nbytes,)
                raw = found.reshape(-1).view(torch.uint8)
                assert torch.equal(raw, tensor.reshape(-1).view(torch.uint8))


def test_every_tensor_is_aligned_whatever_the_order() -> None:
    tensors = {
        f"{number}.{dtype}": patterned(dtype, number % 4 + 2)
        for number, dtype in enumerate([*STORABLE, *STORABLE[::-1]])
    }
    written, raw = write(tensors)
    check(tensors, written, raw)
    (length,) = struct.unpack("<Q", raw[:8])
    assert (8 + length) % 4096 == 0
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    ends = [0, *(entry["data_offsets"][1] for entry in header.values())]
    assert [entry["data_offsets"][0] for entry in header.values()] == ends[:-1]
    assert 8 + length + ends[-1] == len(raw)


COMPLEX = torch.arange(6.0).reshape(2, 3) + 1j
UNUSUAL = {
    "strided": torch.arange(12.0)[::3],
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "expanded": torch.tensor([1, 2]).expand(3, 2),
    "flipped": torch.arange(5).flip(0)[::2],
    "conjugated": COMPLEX.conj(),
    "conjugated and transposed": COMPLEX.t().conj(),
    "negated": COMPLEX.conj().imag,
    "negated real": torch._neg_view(torch.arange(3.0)),
    "empty": torch.zeros(3, 0).t(),
    "scalar": torch.tensor(5.5),
    "one element of many": torch.arange(4.0)[::4],
    "with a gradient": torch.ones(3, requires_grad=True).t(),
    "channels last": torch.arange(24.0)
    .reshape(1, 2, 3, 4)
    .contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("nbytes", [1, 5, 8, 16, 100, 1 << 20])
def test_tensors_that_do_not_lie_as_they_are_stored_are_written_in_pieces_of_any_size(
    nbytes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_PIECE_BYTES", nbytes)
    monkeypatch.setattr(writing, "_SMALL_BYTES", nbytes // 2)
    monkeypatch.setattr(writing, "_BATCH_BYTES", 2 * nbytes)
    monkeypatch.setattr(writing, "_BATCH_ITEMS", 3)
    check(UNUSUAL, *write(UNUSUAL, threads))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_tensor_is_written_in_pieces_that_add_up(threads: int) -> None:
    tensors = {
        "direct": torch.arange(3 << 20, dtype=torch.int32),
        "strided": torch.arange(4 << 20, dtype=torch.int32).reshape(2048, -1).t(),
        "small": torch.arange(3),
    }
    check(tensors, *write(tensors, threads))


def test_a_stand_in_for_a_device_is_written_through_one_bounded_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No accelerator is here: CPU tensors that say that they cannot be written as they lie."""
    monkeypatch.setattr(memory, "is_direct", lambda tensor: False)
    monkeypatch.setattr(writing, "is_direct", lambda tensor: False)
    monkeypatch.setattr(writing, "_PIECE_BYTES", 1 << 16)
    taken: list[int] = []
    buffers: set[int] = set()
    take = memory.BounceBuffer.take

    def record(self: Any, nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        buffer = take(self, nbytes)
        buffers.add(buffer.untyped_storage().data_ptr())
        return buffer

    monkeypatch.setattr(memory.BounceBuffer, "take", record)
    tensors = {name: torch.arange(1 << 18, dtype=torch.float32) for name in "abc"}
    check(tensors, *write(tensors))
    assert max(taken) <= 1 << 16
    assert sum(taken) == 3 << 20
    assert len(buffers) == 1


def test_a_direct_tensor_is_handed_to_the_store_without_a_copy() -> None:
    tensor = torch.arange(1 << 18, dtype=torch.float32)
    addresses = []

    class Recording(MemoryStore):
        def open_writer(self, key: str, nbytes: int) -> Any:
            writer = super().open_writer(key, nbytes)
            write_through = writer.write

            def record(offset: int, buffers: Any) -> None:
                for buffer in buffers:
                    if not buffer.readonly:
                        array = memory.ctypes.c_ubyte.from_buffer(buffer)
                        addresses.append(memory.ctypes.addressof(array))
                write_through(offset, buffers)

            writer.write = record
            return writer

    write_file(Recording(), "file", [content_of("t", tensor)], 1, durable=False)
    assert addresses == [tensor.data_ptr()]


def test_data_of_another_size_than_planned_is_refused_by_name() -> None:
    for nbytes in (4, 1 << 20):
        short = Content("the.key", torch.uint8, (nbytes,), nbytes, lambda: torch.zeros(3))
        other = content_of("b", torch.zeros(1, dtype=torch.uint8))
        for contents in ([short], [short, other]):
            with pytest.raises(ValueError, match=r"'the\.key' was planned with"):
                write_file(MemoryStore(), "file", contents, 1, durable=False)


def test_an_unsharded_save_is_loaded_by_safetensors_as_it_is(tmp_path: Path) -> None:
    state = {
        f"layer.{number}.{str(dtype).removeprefix('torch.')}": patterned(dtype, number + 1, 2)
        for number, dtype in enumerate(SAFETENSORS_DTYPES)
    }
    reshard.save(state, checkpoint_id=tmp_path, no_dist=True)
    [file] = tmp_path.glob("*.safetensors")
    loaded = safetensors.torch.load_file(file)
    assert loaded.keys() == state.keys()
    for key, tensor in state.items():
        assert loaded[key].dtype is tensor.dtype
        assert loaded[key].shape == tensor.shape
        assert bytes_of(loaded[key]) == bytes_of(tensor)

"""reshard.read_state_dict(mmap=True): tensors that view the files."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.api import CheckpointException, CorruptCheckpointError
from reshard.checkpoint.shard_files import ShardFiles
from reshard.checkpoint.to_metadata import to_metadata
from reshard.checkpoint.views import view_items
from reshard.engine import writing
from reshard.engine.reading import Verify
from reshard.filesystem import FileSystemReader, FileSystemWriter
from reshard.operations.read import read_all_keys
from reshard.planning.columns import DTYPES
from reshard.plans.local_load_plan import build_read_items
from reshard.stores import local
from reshard.stores.local import LocalStore
from reshard.stores.memory import MemoryStore
from reshard.stores.protocol import Store
from reshard.tensors.shards import HeldShards, LocalShard
from support.maps import is_mapped, mapped_files, memory_of
from support.samples import SHAPES, same_bits, sample

STORABLE = [dtype for dtype in DTYPES if not str(dtype).startswith("torch.q")]
"""All but the quantized ones."""


def save(state_dict: dict[str, Any], folder: Path) -> Path:
    reshard.save(state_dict, checkpoint_id=folder)
    return folder


def in_pieces(whole: torch.Tensor, *bounds: tuple[slice, ...]) -> HeldShards:
    """A tensor that is stored as several chunks, in the given order."""
    shards = []
    for slices in bounds:
        part = whole[slices].contiguous()
        shards.append(LocalShard(tuple(s.start for s in slices), tuple(part.shape), part))
    return HeldShards(whole.dtype, tuple(whole.shape), False, tuple(shards))


def test_tensors_are_views_of_one_map_that_ends_with_the_last_of_them(tmp_path: Path) -> None:
    save({"a": torch.arange(1000), "deep": {"b": torch.randn(30, 40)}, "n": 5}, tmp_path)
    files_before = len(os.listdir("/proc/self/fd"))

    loaded = reshard.read_state_dict(tmp_path, mmap=True)

    assert loaded["n"] == 5
    assert torch.equal(loaded["a"], torch.arange(1000))
    assert is_mapped(loaded["a"], tmp_path)
    assert is_mapped(loaded["deep"]["b"], tmp_path)
    assert len(mapped_files(tmp_path)) == 1
    assert len(os.listdir("/proc/self/fd")) == files_before
    part = loaded["deep"]["b"][3:5, 7:]
    del loaded
    assert len(mapped_files(tmp_path)) == 1
    del part
    assert mapped_files(tmp_path) == []


def test_every_sample_is_read_bit_for_bit_and_all_but_the_empty_one_are_views(
    tmp_path: Path,
) -> None:
    save({name: sample(name) for name in SHAPES}, tmp_path)

    loaded = reshard.read_state_dict(tmp_path, mmap=True)

    assert [name for name in SHAPES if not same_bits(loaded[name], sample(name))] == []
    assert [name for name in SHAPES if not is_mapped(loaded[name], tmp_path)] == ["no_rows"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_tensors_of_every_dtype_are_views(dtype: torch.dtype, tmp_path: Path) -> None:
    bits = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    tensor = (bits % 2 if dtype is torch.bool else bits).view(dtype)
    save({"odd": torch.zeros(3, dtype=torch.int8), "x": tensor}, tmp_path)

    loaded = reshard.read_state_dict(tmp_path, mmap=True)["x"]

    assert same_bits(loaded, tensor)
    assert is_mapped(loaded, tmp_path)


def test_writing_to_a_tensor_changes_neither_the_file_nor_another_reader(tmp_path: Path) -> None:
    save({"x": torch.zeros(2000)}, tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    content = shard.read_bytes()
    mine, other = (reshard.read_state_dict(tmp_path, mmap=True)["x"] for _ in range(2))

    mine += 1

    assert mine.sum() == 2000
    assert not other.any()
    assert shard.read_bytes() == content
    assert not reshard.read_state_dict(tmp_path)["x"].any()


def test_a_view_is_a_tensor_like_any_other(tmp_path: Path) -> None:
    save({"a": torch.ones(8, 4), "b": torch.ones(8, 4)}, tmp_path)
    a, b = reshard.read_state_dict(tmp_path, mmap=True).values()

    # Its storage holds nothing else, or saving a part of a model would save all of it.
    assert a.untyped_storage().nbytes() == a.nbytes
    assert len(pickle.dumps(a)) < 2 * len(pickle.dumps(torch.ones(8, 4)))
    # A change of one is no change of the other, for autograd.
    weight = b.requires_grad_()
    loss = (weight * weight).sum()
    a.add_(1)
    loss.backward()
    assert torch.equal(weight.grad, 2 * torch.ones(8, 4))
    assert not a._is_view()


def test_names_that_shared_memory_share_one_tensor(tmp_path: Path) -> None:
    shared = torch.randn(5, 5)
    save({"embedding": shared, "head": shared, "copy": shared.clone()}, tmp_path)

    loaded = reshard.read_state_dict(tmp_path, mmap=True)

    assert loaded["embedding"] is loaded["head"]
    assert loaded["copy"] is not loaded["head"]


def test_only_the_files_of_the_wanted_keys_are_mapped(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path, single_file_per_rank=False, thread_count=4)
    reshard.save({str(i): torch.full((9,), i) for i in range(4)}, storage_writer=writer)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    loaded = reshard.read_state_dict(tmp_path, "2", mmap=True)

    assert loaded["2"].tolist() == [2] * 9
    assert len(mapped_files(tmp_path)) == 1


def test_chunks_that_follow_each_other_are_one_view(tmp_path: Path) -> None:
    whole = torch.arange(60).view(6, 10)
    rows = [(slice(0, 2), slice(0, 10)), (slice(2, 5), slice(0, 10)), (slice(5, 6), slice(0, 10))]
    save({"x": in_pieces(whole, *rows)}, tmp_path)

    loaded = reshard.read_state_dict(tmp_path, mmap=True)["x"]

    assert torch.equal(loaded, whole)
    assert is_mapped(loaded, tmp_path)


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param([(slice(0, 6), slice(0, 4)), (slice(0, 6), slice(4, 10))], id="columns"),
        pytest.param([(slice(3, 6), slice(0, 10)), (slice(0, 3), slice(0, 10))], id="other order"),
    ],
)
def test_chunks_that_lie_otherwise_than_in_memory_are_read(
    bounds: list[tuple[slice, ...]], tmp_path: Path
) -> None:
    whole = torch.arange(60).view(6, 10)
    save({"x": in_pieces(whole, *bounds), "y": whole}, tmp_path)

    loaded = reshard.read_state_dict(tmp_path, mmap=True)

    assert torch.equal(loaded["x"], whole)
    assert not is_mapped(loaded["x"], tmp_path)
    assert torch.equal(loaded["y"], whole)
    assert is_mapped(loaded["y"], tmp_path)


def test_a_tensor_that_is_not_aligned_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "file_order", lambda contents: list(range(len(contents))))
    state_dict = {"first": torch.zeros(3, dtype=torch.uint8), "x": torch.arange(7.0)}
    save(state_dict, tmp_path)

    loaded = reshard.read_state_dict(tmp_path, mmap=True)

    assert torch.equal(loaded["x"], torch.arange(7.0))
    assert not is_mapped(loaded["x"], tmp_path)
    assert is_mapped(loaded["first"], tmp_path)


def test_a_file_that_cannot_be_mapped_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"x": torch.arange(7.0)}, tmp_path)

    def refuse(self: object) -> memoryview:
        raise OSError("no maps here")

    monkeypatch.setattr(local._LocalReader, "map", refuse)
    loaded = reshard.read_state_dict(tmp_path, mmap=True)

    assert torch.equal(loaded["x"], torch.arange(7.0))
    assert mapped_files(tmp_path) == []


def test_a_store_without_maps_is_read() -> None:
    store = MemoryStore()

    class Writer(FileSystemWriter):
        def open_store(self) -> Store:
            return store

    class Reader(FileSystemReader):
        def open_store(self) -> Store:
            return store

    shared = torch.arange(7.0)
    reshard.save({"x": shared, "tied": shared}, storage_writer=Writer("nowhere"))

    loaded = read_all_keys(None, Reader("nowhere"), mmap=True)

    assert torch.equal(loaded["x"], shared)
    assert loaded["x"] is loaded["tied"]


def test_a_chunk_with_a_codec_is_not_viewed(tmp_path: Path) -> None:
    save({"a": torch.arange(3), "b": torch.arange(3)}, tmp_path)
    reader = FileSystemReader(tmp_path)
    manifest = reader.read_metadata().storage_data.manifest
    encoded = dataclasses.replace(manifest, chunk_codecs=np.array([0, 1]), codec_names=["zstd"])
    blanks = {name: torch.empty(3, dtype=torch.int64, device="meta") for name in "ab"}
    items = build_read_items(blanks, to_metadata(manifest, ""))

    views, left = view_items(
        items.columns(), blanks, ShardFiles(LocalStore(tmp_path), encoded, Verify.OFF), Verify.OFF
    )

    assert list(views) == ["a"]
    assert [left.names[i] for i in left.dest_names] == ["b"]


# What is checked


def damage(folder: Path, at: int) -> None:
    (shard,) = folder.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[at] ^= 1
    shard.write_bytes(content)


def test_chunks_of_views_are_verified_only_on_request(tmp_path: Path) -> None:
    save({"x": torch.zeros(500)}, tmp_path)
    damage(tmp_path, at=-1)

    assert reshard.read_state_dict(tmp_path, mmap=True)["x"][-1] != 0
    assert reshard.read_state_dict(tmp_path, mmap=True, verify="off")["x"][-1] != 0
    for verify in ("chunks", "full"):
        with pytest.raises(CheckpointException, match=r"bytes of 'x' .* are damaged"):
            reshard.read_state_dict(tmp_path, mmap=True, verify=verify)  # type: ignore[arg-type]


def test_a_reader_that_verifies_everything_verifies_views(tmp_path: Path) -> None:
    save({"x": torch.zeros(500)}, tmp_path)
    damage(tmp_path, at=-1)
    state_dict = {"x": torch.ones(500)}

    with pytest.raises(CorruptCheckpointError):
        reshard.load(
            state_dict, storage_reader=FileSystemReader(tmp_path, verify="full"), assign=True
        )
    assert state_dict["x"].all()


def test_what_is_read_beside_views_is_verified(tmp_path: Path) -> None:
    whole = torch.zeros(6, 10)
    columns = [(slice(0, 6), slice(0, 4)), (slice(0, 6), slice(4, 10))]
    save({"x": in_pieces(whole, *columns)}, tmp_path)
    damage(tmp_path, at=-1)

    with pytest.raises(CorruptCheckpointError, match="damaged"):
        reshard.read_state_dict(tmp_path, mmap=True)


def test_headers_and_sizes_of_files_are_always_checked(tmp_path: Path) -> None:
    save({"x": torch.zeros(500)}, tmp_path / "a")
    damage(tmp_path / "a", at=100)
    with pytest.raises(CorruptCheckpointError, match="the header of"):
        reshard.read_state_dict(tmp_path / "a", mmap=True, verify="off")

    save({"x": torch.zeros(500)}, tmp_path / "b")
    (shard,) = (tmp_path / "b").glob("*.safetensors")
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError, match="were written"):
        reshard.read_state_dict(tmp_path / "b", mmap=True, verify="off")


# Files of another checkpoint


def test_chunks_of_a_base_are_views_of_its_files(tmp_path: Path) -> None:
    state_dict = {"frozen": torch.arange(5000.0), "adapter": torch.zeros(4)}
    base = save(state_dict, tmp_path / "base")
    state_dict["adapter"] += 1
    reshard.save(state_dict, checkpoint_id=tmp_path / "next", base=base)

    loaded = reshard.read_state_dict(tmp_path / "next", mmap=True)

    assert torch.equal(loaded["frozen"], torch.arange(5000.0))
    assert is_mapped(loaded["frozen"], base)
    assert loaded["adapter"].tolist() == [1.0] * 4
    assert is_mapped(loaded["adapter"], tmp_path / "next")


def test_a_file_that_only_its_content_identifies_is_checked_before_it_is_viewed(
    tmp_path: Path,
) -> None:
    pretrained = tmp_path / "hf"
    pretrained.mkdir()
    frozen = torch.arange(5000.0)
    save_file({"frozen": frozen}, pretrained / "model.safetensors")
    state_dict = {"frozen": frozen, "adapter": torch.zeros(4)}
    reshard.save(state_dict, checkpoint_id=tmp_path / "tuned", base=pretrained)

    loaded = reshard.read_state_dict(tmp_path / "tuned", mmap=True)
    assert torch.equal(loaded["frozen"], frozen)
    assert is_mapped(loaded["frozen"], pretrained)

    damage(pretrained, at=-1)
    with pytest.raises(CorruptCheckpointError, match="'frozen'"):
        reshard.read_state_dict(tmp_path / "tuned", mmap=True)


# What happens to the files meanwhile


def test_tensors_stay_as_they_are_when_the_checkpoint_is_replaced_and_deleted(
    tmp_path: Path,
) -> None:
    folder = save({"x": torch.full((5000,), 1.0)}, tmp_path / "checkpoint")
    first = reshard.read_state_dict(folder, mmap=True)["x"]

    save({"x": torch.full((5000,), 2.0)}, folder)
    second = reshard.read_state_dict(folder, mmap=True)["x"]
    shutil.rmtree(folder)

    assert first.unique().tolist() == [1.0]
    assert second.unique().tolist() == [2.0]
    second.zero_()
    assert first.unique().tolist() == [1.0]


def test_views_can_be_saved_to_the_place_that_they_view(tmp_path: Path) -> None:
    save({"x": torch.arange(5000), "y": torch.ones(3)}, tmp_path)
    loaded = reshard.read_state_dict(tmp_path, mmap=True)
    loaded["y"] += 1

    save(loaded, tmp_path)
    reshard.async_save(loaded, checkpoint_id=tmp_path).result()

    again = reshard.read_state_dict(tmp_path)
    assert torch.equal(again["x"], torch.arange(5000))
    assert again["y"].tolist() == [2.0] * 3
    assert torch.equal(loaded["x"], torch.arange(5000))


def test_a_view_can_be_moved_to_shared_memory(tmp_path: Path) -> None:
    save({"x": torch.arange(5000)}, tmp_path)
    loaded = reshard.read_state_dict(tmp_path, mmap=True)["x"].share_memory_()

    assert loaded.is_shared()
    assert torch.equal(loaded, torch.arange(5000))
    assert mapped_files(tmp_path) == []


# Memory

MEGABYTES = 64
READER = """
import sys, torch, reshard
from support.maps import memory_of
before = memory_of()["Rss"]
tensors = reshard.read_state_dict(sys.argv[1], mmap=True)
print(memory_of()["Rss"] - before, flush=True)
total = sum(int(tensor.view(torch.int64).sum()) for tensor in tensors.values())
print(memory_of()["Rss"] - before, flush=True)
sys.stdin.readline()
"""


def test_views_take_no_memory_until_they_are_used_and_processes_share_it(tmp_path: Path) -> None:
    part = MEGABYTES << 18
    save({str(i): torch.zeros(part // 4) for i in range(4)}, tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", READER, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as one,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as two,
    ):
        for process in (one, two):
            assert process.stdout is not None
            untouched, touched = (int(process.stdout.readline()) for _ in range(2))
            assert untouched < 4 * part / 4
            assert touched >= 4 * part
        one_alone, two_alone = (
            memory["Private_Clean"] + memory["Private_Dirty"]
            for memory in (memory_of(one.pid), memory_of(two.pid))
        )
        shared = memory_of(one.pid)["Shared_Clean"]
        one.communicate("\n")
        two.communicate("\n")
    assert shared >= 4 * part
    assert max(one_alone, two_alone) < memory_of()["Rss"]

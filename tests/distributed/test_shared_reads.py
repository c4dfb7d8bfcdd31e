"""Ranks that want the same bytes read them once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import reshard
from reshard.api import CheckpointException, CorruptCheckpointError
from reshard.coordination import peers
from reshard.stores.local import LocalStore
from support.ranks import DEAD, run_ranks


class CountingStore(LocalStore):
    """Counts the bytes of shard files that are read, and tells `on_read` before."""

    def __init__(self, path: Any, reader: CountingReader) -> None:
        super().__init__(path)
        self._for = reader

    def open_reader(self, key: str) -> Any:
        opened = super().open_reader(key)
        if key.startswith(".metadata"):
            return opened
        return _Counted(opened, self._for)


class _Counted:
    def __init__(self, used: Any, reader: CountingReader) -> None:
        self._used, self._for = used, reader

    nbytes = property(lambda self: self._used.nbytes)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._for.on_read()
        self._used.read_into(offset, buffers)
        self._for.counted += sum(map(len, buffers))

    def close(self) -> None:
        self._used.close()


class CountingReader(reshard.FileSystemReader):
    counted = 0

    def open_store(self) -> LocalStore:
        return CountingStore(self.path, self)

    def on_read(self) -> None:
        pass


def load_shared(state: dict[str, Any], place: Path, **options: Any) -> tuple[Any, int]:
    reader = CountingReader(place)
    options.setdefault("replicated_reads", "share")
    report = reshard.load(state, storage_reader=reader, **options)
    assert report.bytes_read == reader.counted
    return report, reader.counted


def stored_bytes(place: Path) -> int:
    """How large the shard files are."""
    return sum(f.stat().st_size for f in place.iterdir() if f.name != ".metadata")


def model(factor: float = 1.0) -> dict[str, Any]:
    """Tensors of many kinds and sizes, as they were saved, or of the same layout with zeros."""
    made = torch.Generator().manual_seed(7)
    state: dict[str, Any] = {
        f"layer{i}.weight": torch.randn(257, 130 + i, generator=made) for i in range(6)
    }
    state |= {f"layer{i}.bias": torch.randn(33 + i, generator=made) for i in range(20)}
    state["half"] = torch.randn(64, 65, generator=made).to(torch.bfloat16)
    state["large"] = torch.randn(3, 1 << 20, generator=made)
    state["scalar"] = torch.tensor(2.5, dtype=torch.float64)
    state["empty"] = torch.empty(0, 4)
    state["one"] = torch.randn(1, 1, 77, generator=made)
    return {name: (value * factor).to(value.dtype) for name, value in state.items()}


def differing(state: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [
        name
        for name, value in expected.items()
        if not torch.equal(state[name].to(value.dtype), value)
    ]


def load_replicas(place: Path, verify: str) -> tuple[int, int, int, list[str]]:
    state = model(0.0)
    report, counted = load_shared(state, place, verify=verify)
    return counted, report.bytes_received, report.nbytes, differing(state, model())


@pytest.mark.parametrize("verify", ["chunks", "full", "off", "fingerprint"])
def test_four_replicas_read_each_byte_once(tmp_path: Path, verify: str) -> None:
    reshard.save(model(), checkpoint_id=tmp_path, fingerprint=True)
    results = run_ranks(4, load_replicas, tmp_path, verify)
    wanted = sum(value.nbytes for value in model().values())
    read = sum(counted for counted, *_ in results)
    assert [wrong for *_, wrong in results] == [[]] * 4
    assert wanted <= read <= 1.01 * stored_bytes(tmp_path)
    assert sum(received for _, received, *_ in results) == 3 * wanted
    assert [nbytes for _, _, nbytes, _ in results] == [wanted] * 4
    # By balance: nobody reads much more than the largest tensor.
    assert max(counted for counted, *_ in results) < 1.1 * model()["large"].nbytes


def test_four_replicas_read_each_byte_of_a_compressed_checkpoint_once(tmp_path: Path) -> None:
    reshard.save(model(), checkpoint_id=tmp_path, compress="zstd")
    results = run_ranks(4, load_replicas, tmp_path, "chunks")
    assert [wrong for *_, wrong in results] == [[]] * 4
    assert sum(counted for counted, *_ in results) <= 1.05 * stored_bytes(tmp_path)


def save_and_reshard(
    place: Path, shape: tuple[int, ...], dims: tuple[int, int], compress: str | None, verify: str
) -> tuple[int, int, bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    save_as, load_as = (_placed(whole, mesh, dim) for dim in dims)
    reshard.save({"w": save_as}, checkpoint_id=place, compress=compress)
    expected = load_as.to_local().clone()
    load_as.to_local().zero_()
    report, counted = load_shared({"w": load_as}, place, verify=verify)
    return counted, report.nbytes, torch.equal(load_as.to_local(), expected)


def _placed(whole: torch.Tensor, mesh: Any, dim: int) -> DTensor:
    placement: Placement = Replicate() if dim < 0 else Shard(dim)
    placed = distribute_tensor(whole, mesh, [placement])
    return DTensor.from_local(
        placed.to_local().clone(), mesh, [placement], shape=whole.shape, stride=whole.stride()
    )


@pytest.mark.parametrize(
    ("ranks", "shape", "dims", "compress", "verify"),
    [
        (2, (1000, 1200), (0, 1), None, "chunks"),
        (3, (1000, 1201), (0, 1), None, "chunks"),
        (3, (1000, 1201), (0, 1), None, "full"),
        (3, (100, 120000), (0, 1), None, "off"),
        (3, (900, 1000), (1, 0), None, "chunks"),
        (3, (1000, 700), (0, 1), "zstd", "chunks"),
        (2, (30, 40, 500), (0, 2), None, "chunks"),
        (3, (7, 200000), (-1, 1), None, "off"),
    ],
)
def test_a_load_in_another_layout_reads_each_byte_once(
    tmp_path: Path,
    ranks: int,
    shape: tuple[int, ...],
    dims: tuple[int, int],
    compress: str | None,
    verify: str,
) -> None:
    results = run_ranks(ranks, save_and_reshard, tmp_path, shape, dims, compress, verify)
    assert all(right for *_, right in results)
    wanted = sum(nbytes for _, nbytes, _ in results)
    assert sum(counted for counted, *_ in results) <= 1.1 * wanted

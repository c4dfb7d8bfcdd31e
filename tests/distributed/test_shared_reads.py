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
from reshard.stores.protocol import Remote
from support.ranks import DEAD, run_ranks


class CountingStore(LocalStore):
    """Counts the bytes of shard files that are read, and tells `on_read` before."""

    def __init__(self, path: Any, reader: CountingReader) -> None:
        super().__init__(path)
        self._for = reader

    def open_reader(self, key: str, ahead: int = 0, nbytes: int | None = None) -> Any:
        opened = super().open_reader(key, ahead, nbytes)
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


def load_replicas(place: Path, modes: Sequence[str]) -> list[tuple[int, int, int, list[str]]]:
    results = []
    for verify in modes:
        state = model(0.0)
        report, counted = load_shared(state, place, verify=verify)
        wrong = differing(state, model())
        results.append((counted, report.bytes_received, report.nbytes, wrong))
    return results


def test_four_replicas_read_each_byte_once(tmp_path: Path) -> None:
    reshard.save(model(), checkpoint_id=tmp_path, fingerprint=True)
    modes = ["chunks", "full", "off", "fingerprint"]
    wanted = sum(value.nbytes for value in model().values())
    for results in zip(*run_ranks(4, load_replicas, tmp_path, modes), strict=True):
        read = sum(counted for counted, *_ in results)
        assert [wrong for *_, wrong in results] == [[]] * 4
        # Whoever reads of a file looks at its header.
        assert wanted <= read <= 1.005 * stored_bytes(tmp_path)
        assert sum(received for _, received, *_ in results) == 3 * wanted
        assert [nbytes for _, _, nbytes, _ in results] == [wanted] * 4
        # By balance: nobody reads much more than the largest tensor.
        assert max(counted for counted, *_ in results) < 1.1 * model()["large"].nbytes


def test_four_replicas_read_each_byte_of_a_compressed_checkpoint_once(tmp_path: Path) -> None:
    reshard.save(model(), checkpoint_id=tmp_path, compress="zstd")
    for results in zip(*run_ranks(4, load_replicas, tmp_path, ["chunks", "off"]), strict=True):
        assert [wrong for *_, wrong in results] == [[]] * 4
        assert sum(counted for counted, *_ in results) <= 1.05 * stored_bytes(tmp_path)


LAYOUTS = [
    ((1000, 1200), (0, 1), None, "chunks"),
    ((1000, 1201), (0, 1), None, "full"),
    ((100, 120000), (0, 1), None, "off"),
    ((900, 1000), (1, 0), None, "chunks"),
    ((1000, 700), (0, 1), "zstd", "chunks"),
    ((30, 40, 500), (0, 2), None, "chunks"),
    ((7, 200000), (-1, 1), None, "off"),
    ((700, 1000), (-1, 0), None, "full"),
]


def save_and_reshard(place: Path) -> list[tuple[int, int, bool]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = []
    for number, (shape, dims, compress, verify) in enumerate(LAYOUTS):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        save_as, load_as = (_placed(whole, mesh, dim) for dim in dims)
        reshard.save({"w": save_as}, checkpoint_id=place / str(number), compress=compress)
        expected = load_as.to_local().clone()
        load_as.to_local().zero_()
        report, counted = load_shared({"w": load_as}, place / str(number), verify=verify)
        results.append((counted, report.nbytes, torch.equal(load_as.to_local(), expected)))
    return results


def _placed(whole: torch.Tensor, mesh: Any, dim: int) -> DTensor:
    placement: Placement = Replicate() if dim < 0 else Shard(dim)
    placed = distribute_tensor(whole, mesh, [placement])
    return DTensor.from_local(
        placed.to_local().clone(), mesh, [placement], shape=whole.shape, stride=whole.stride()
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_load_in_another_layout_reads_each_byte_once(tmp_path: Path, ranks: int) -> None:
    results = run_ranks(ranks, save_and_reshard, tmp_path)
    for layout, each in zip(LAYOUTS, zip(*results, strict=True), strict=True):
        assert all(right for *_, right in each), layout
        wanted = sum(nbytes for _, nbytes, _ in each)
        assert sum(counted for counted, *_ in each) <= 1.1 * wanted, layout


def load_into_odd_targets(place: Path) -> list[str]:
    rank = dist.get_rank()
    expected = model()
    backing = torch.zeros(400, 600)
    tied = torch.zeros_like(expected["layer4.weight"])
    state = {
        "layer0.weight": torch.zeros(257, 130, dtype=torch.float64),
        "layer1.weight": torch.zeros(131, 257).t(),
        "layer2.weight": backing[3 : 3 + 257, 5 : 5 + 132],
        "large": torch.zeros(3, 1 << 20, dtype=torch.float16 if rank else torch.float32),
        "layer4.weight": tied,
        "scalar": torch.zeros((), dtype=torch.float32),
        "empty": torch.zeros(0, 4),
        "half": torch.zeros(64, 65, dtype=torch.float32),
        "deep": {"step": 0},
    }
    if rank:
        # Wanted by some ranks only.
        state |= {f"layer{i}.bias": torch.zeros(33 + i) for i in range(10)}
    report, _ = load_shared(state, place, strict=False)
    assert state.pop("deep") == {"step": 3}
    assert report.bytes_received
    assert backing.count_nonzero() == expected["layer2.weight"].count_nonzero()
    return [
        name
        for name, value in state.items()
        if not torch.equal(value, expected[name].to(value.dtype))
    ]


def test_targets_of_other_dtypes_and_strides_are_filled(tmp_path: Path) -> None:
    reshard.save(model() | {"deep": {"step": 3}}, checkpoint_id=tmp_path)
    assert run_ranks(3, load_into_odd_targets, tmp_path) == [[]] * 3


def load_tied(place: Path) -> bool:
    memory = torch.zeros(300, 300)
    load_shared({"a": memory, "b": memory, "c": torch.zeros(300, 300)}, place)
    return torch.equal(memory, torch.ones(300, 300))


def test_two_names_of_one_memory_are_filled_in_order(tmp_path: Path) -> None:
    state = {"a": torch.zeros(300, 300), "b": torch.ones(300, 300), "c": torch.ones(300, 300)}
    reshard.save(state, checkpoint_id=tmp_path)
    assert run_ranks(2, load_tied, tmp_path) == [True] * 2


def load_damaged(place: Path) -> tuple[str, str, float]:
    began = time.monotonic()
    with pytest.raises(CheckpointException) as caught:
        load_shared(model(0.0), place)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - began


def test_a_damaged_chunk_is_named_on_all_ranks(tmp_path: Path) -> None:
    reshard.save(model(), checkpoint_id=tmp_path)
    (file,) = (f for f in tmp_path.iterdir() if f.name != ".metadata")
    data = bytearray(file.read_bytes())
    place = data.find(model()["large"].numpy().tobytes())
    data[place + (9 << 20)] ^= 1
    file.write_bytes(data)
    results = run_ranks(4, load_damaged, tmp_path)
    for kind, text, seconds in results:
        assert kind == CorruptCheckpointError.__name__
        assert "'large'" in text
        assert "lost" not in text
        assert seconds < 20


class DyingReader(CountingReader):
    """Rank 1 is killed when it reads for the second time."""

    reads = 0

    def on_read(self) -> None:
        self.reads += 1
        if dist.get_rank() == 1 and self.reads == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def even(value: float) -> dict[str, Any]:
    """A tensor for each of four ranks to read."""
    return {f"w{i}": torch.full((1 << 18,), value) for i in range(4)}


def load_and_die(place: Path) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(CheckpointException) as caught:
        reshard.load(even(0.0), storage_reader=DyingReader(place), replicated_reads="share")
    return str(caught.value), time.monotonic() - began


def test_a_rank_that_is_killed_ends_the_load_of_the_others(tmp_path: Path) -> None:
    reshard.save(even(1.0), checkpoint_id=tmp_path)
    first, killed, *others = run_ranks(4, load_and_die, tmp_path, dying=[1])
    assert killed == DEAD
    for text, seconds in (first, *others):
        assert "lost rank 1" in text
        assert seconds < 20


def load_without_connections(place: Path) -> tuple[int, list[str]]:
    peers.CONNECT_SECONDS = 0.2
    if dist.get_rank() == 1:
        peers.Listener.connect = _refuse  # type: ignore[method-assign]
    state = model(0.0)
    report, _ = load_shared(state, place)
    return report.bytes_received, differing(state, model())


def _refuse(*arguments: Any) -> Any:
    raise ConnectionRefusedError("no way")


def load_with_other_choices(place: Path) -> tuple[int, list[str]]:
    state = model(0.0)
    choice = "share" if dist.get_rank() else "direct"
    report, _ = load_shared(state, place, replicated_reads=choice)
    return report.bytes_received, differing(state, model())


@pytest.mark.parametrize("load", [load_without_connections, load_with_other_choices])
def test_ranks_that_cannot_share_read_for_themselves(tmp_path: Path, load: Any) -> None:
    reshard.save(model(), checkpoint_id=tmp_path)
    assert run_ranks(3, load, tmp_path) == [(0, [])] * 3


class RemoteReader(CountingReader):
    def open_store(self) -> LocalStore:
        store = super().open_store()
        store.remote = Remote(piece_bytes=1 << 20, gap_bytes=1 << 16, concurrency=3)  # type: ignore[assignment]
        return store


def load_by_default(place: Path, kind: type[CountingReader]) -> tuple[int, int, list[str]]:
    state, reader = model(0.0), kind(place)
    report = reshard.load(state, storage_reader=reader)
    assert report.bytes_read == reader.counted
    return report.bytes_received, report.bytes_read, differing(state, model())


def test_reads_are_shared_by_default_where_they_are_dear(tmp_path: Path) -> None:
    reshard.save(model(), checkpoint_id=tmp_path)
    here = run_ranks(2, load_by_default, tmp_path, CountingReader)
    assert [received for received, *_ in here] == [0, 0]
    remote = run_ranks(2, load_by_default, tmp_path, RemoteReader)
    assert all(received for received, *_ in remote)
    assert [wrong for *_, wrong in remote] == [[], []]
    assert sum(read for _, read, _ in remote) <= 1.005 * stored_bytes(tmp_path)

"""reshard.background.handover: a staged state dict arrives elsewhere without being copied."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

from reshard.api import UnsupportedLayoutError
from reshard.background.handover import pack, unpack
from reshard.rank_values import PerRank, per_rank
from reshard.snapshots.pool import Staged, StagingPool
from reshard.snapshots.segments import map_segment
from reshard.tensors.shards import HeldShards
from support.fake_ranks import as_rank, distributed, mesh_of
from support.subclasses import Scaled, Tagged

quiet_about_sharded_tensor = pytest.mark.filterwarnings("ignore::FutureWarning")
quiet_about_prototypes = pytest.mark.filterwarnings("ignore::UserWarning")
MUCH = torch.zeros(1 << 18)
"""A megabyte that must not travel."""
MESSAGE_BYTES = 20_000
"""More than a message has that carries no data."""


class Sender:
    """Stages state dicts, and hands them to the other side of the same process."""

    def __init__(self) -> None:
        self._pool = StagingPool()
        self.memory: torch.Tensor
        self.staged: Staged

    def pack(self, state_dict: dict[str, Any]) -> bytes:
        self.staged = self._pool.stage(state_dict)
        segment = self.staged.segment
        self.memory = map_segment(segment.descriptor, segment.nbytes)
        return pack(dict(self.staged), segment.memory)

    def send(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        def load_main() -> None:
            raise AssertionError("nothing of the main module was sent")

        received: dict[str, Any] = unpack(self.pack(state_dict), self.memory, load_main)
        return received

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that arrived lies in the memory of the receiver."""
        begin = self.memory.data_ptr()
        return begin <= tensor.data_ptr() < begin + self.memory.nbytes

    def close(self) -> None:
        self.staged.release()
        self._pool.close()


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.close()


# Tensors


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex128,
        torch.bool,
        torch.uint16,
        torch.int64,
    ],
)
def test_a_tensor_arrives_as_a_place_in_memory(sender: Sender, dtype: torch.dtype) -> None:
    original = torch.arange(12).reshape(3, 4).to(dtype)
    received = sender.send({"pad": torch.ones(1), "w": original})["w"]
    assert (received.dtype, received.shape) == (dtype, (3, 4))
    assert torch.equal(received.view(torch.uint8), original.view(torch.uint8))
    assert sender.holds(received)
    sender.staged["w"].view(torch.uint8).fill_(1)
    assert received.view(torch.uint8).unique().tolist() == [1]


@pytest.mark.parametrize("state_dict", [{"w": MUCH}, {"w": MUCH, "tied": MUCH[5:].view(-1, 1)}])
def test_the_data_does_not_travel(sender: Sender, state_dict: dict[str, Any]) -> None:
    assert len(sender.pack(state_dict)) < MESSAGE_BYTES


def test_tensors_that_share_memory_do_so_where_they_arrive(sender: Sender) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    received = sender.send(
        {"w": weight, "tied": weight, "t": weight.t(), "part": weight[1:, ::2], "apart": weight + 0}
    )
    received["w"].fill_(-1)
    for name in ("tied", "t", "part"):
        assert received[name].unique().tolist() == [-1]
        assert received[name].stride() == sender.staged[name].stride()
    assert torch.equal(received["apart"], weight)


def test_views_that_conjugate_or_negate_arrive_as_such(sender: Sender) -> None:
    weight = torch.tensor([1 + 2j, 3 - 4j])
    views = {"w": weight, "conj": weight.conj(), "imag": weight.conj().imag}
    received = sender.send({**views, "neg": torch._neg_view(weight)})
    assert received["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert received["imag"].tolist() == [-2, 4]
    assert received["neg"].tolist() == [-1 - 2j, -3 + 4j]
    assert (received["conj"].is_conj(), received["imag"].is_neg()) == (True, True)
    assert all(sender.holds(tensor) for tensor in received.values())


def test_gradients_are_still_required_where_tensors_arrive(sender: Sender) -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    tied = weight.detach()[:1]
    received = sender.send({"w": weight, "conj": weight.conj(), "tied": tied})
    assert [t.requires_grad for t in received.values()] == [True, True, False]
    assert [t.is_leaf for t in received.values()] == [True, True, True]


def test_a_number_arrives_as_a_tensor_without_dimensions(sender: Sender) -> None:
    received = sender.send({"step": torch.tensor(7)})["step"]
    assert (received.shape, received.item()) == ((), 7)
    assert sender.holds(received)


def test_an_empty_tensor_does_not_bring_the_others_along(sender: Sender) -> None:
    assert len(sender.pack({"empty": torch.ones(0, 3), "w": MUCH})) < MESSAGE_BYTES


def test_an_empty_tensor_arrives_whatever_its_type(sender: Sender) -> None:
    received = sender.send({"empty": torch.ones(0, 3).to(torch.float8_e4m3fn)})["empty"]
    assert (received.shape, received.dtype) == ((0, 3), torch.float8_e4m3fn)


class Pair(NamedTuple):
    inner: Any
    other: Any


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: {"a": inner},
        lambda inner: [inner],
        lambda inner: (inner, 1),
        lambda inner: Pair(inner, 1),
    ],
)
def test_a_state_nested_deeper_than_pickle_can_go_arrives(sender: Sender, wrap: Any) -> None:
    depth = 2 * sys.getrecursionlimit()
    state: Any = torch.arange(3.0)
    for _ in range(depth):
        state = wrap(state)
    received = sender.send({"deep": state, "w": torch.ones(2)})
    inner = received["deep"]
    for _ in range(depth):
        assert type(inner) is type(wrap(1))
        inner = inner["a"] if isinstance(inner, dict) else inner[0]
    assert inner.tolist() == [0, 1, 2]
    assert sender.holds(inner)
    assert received["w"].tolist() == [1, 1]


def test_tensors_arrive_whatever_the_default_device_is(sender: Sender) -> None:
    # A script that the worker has to run, for the sake of a class, may have set one.
    with torch.device("meta"):
        assert sender.send({"w": torch.ones(2, device="cpu")})["w"].tolist() == [1, 1]


@quiet_about_prototypes
def test_tensors_that_are_not_in_the_memory_travel_themselves(sender: Sender) -> None:
    received = sender.send(
        {
            "sparse": torch.eye(3).to_sparse(),
            "quantized": torch.quantize_per_tensor(torch.eye(2), 0.5, 1, torch.qint8),
            "meta": torch.ones(2, 3, device="meta"),
            "inside": (torch.ones(1), {"leaf": [torch.ones(2)]}),
        }
    )
    assert torch.equal(received["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(received["quantized"].dequantize(), torch.eye(2))
    assert (received["meta"].device.type, received["meta"].shape) == ("meta", (2, 3))
    data = pack({"elsewhere": torch.arange(3)}, sender.staged.segment.memory)
    assert unpack(data, sender.memory, lambda: None)["elsewhere"].tolist() == [0, 1, 2]


# Subclasses


def test_a_subclass_arrives_as_what_it_consists_of(sender: Sender) -> None:
    received = sender.send({"w": Scaled(torch.ones(2, 3), torch.full((1,), 4.0), "kg")})["w"]
    assert type(received) is Scaled
    assert (received.shape, received.unit, received.scale.item()) == ((2, 3), "kg", 4)
    assert sender.holds(received.inner)


def test_a_subclass_with_memory_arrives_with_its_attributes(sender: Sender) -> None:
    tagged = torch.arange(3.0).as_subclass(Tagged)
    tagged.labels = ["a"]
    received = sender.send({"w": tagged})["w"]
    assert type(received) is Tagged
    assert (received.tolist(), received.labels) == ([0, 1, 2], ["a"])


def test_a_subclass_with_memory_does_not_bring_the_others_along(sender: Sender) -> None:
    assert len(sender.pack({"w": torch.ones(3).as_subclass(Tagged), "much": MUCH})) < MESSAGE_BYTES


def test_gradients_are_still_required_of_a_subclass_that_arrives_in_parts(sender: Sender) -> None:
    parameter = torch.nn.Parameter(Scaled(torch.ones(2), torch.ones(1)))
    assert sender.send({"w": parameter})["w"].requires_grad


def test_a_subclass_that_requires_gradients_arrives_as_a_leaf(sender: Sender) -> None:
    received = sender.send({"w": torch.ones(3).as_subclass(Tagged).requires_grad_()})["w"]
    assert (received.requires_grad, received.is_leaf) == (True, True)


def test_a_subclass_whose_parts_begin_their_storages_arrives(sender: Sender) -> None:
    received = sender.send({"w": TwoTensor(torch.ones(2, 3), torch.zeros(2, 3))})["w"]
    assert (received.a.sum().item(), received.b.sum().item()) == (6, 0)
    assert sender.holds(received.b)


# Sharded tensors


def boxes(held: HeldShards) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(shard.offsets, shard.sizes) for shard in held.shards]


FULL = torch.arange(40.0).reshape(8, 5)


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(1)),
        (Replicate(), Shard(0)),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (_StridedShard(0, split_factor=4), Replicate()),
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_dtensor_arrives_as_the_regions_that_this_rank_holds(
    sender: Sender, placements: Any, rank: int
) -> None:
    with as_rank(rank, 4):
        tensor = distributed(FULL, mesh_of(2, 2), placements).requires_grad_()
        local = tensor._local_tensor
        received = sender.send({"w": tensor, "tied": local})
    held = received["w"]
    assert type(held) is HeldShards
    assert (held.dtype, held.shape, held.requires_grad) == (torch.float32, (8, 5), True)
    assert sum(shard.tensor.numel() for shard in held.shards) == local.numel()
    for shard in held.shards:
        box = tuple(slice(o, o + s) for o, s in zip(shard.offsets, shard.sizes, strict=True))
        assert torch.equal(shard.tensor, FULL[box])
        assert sender.holds(shard.tensor)
    received["tied"].fill_(-1)
    assert all((shard.tensor == -1).all() for shard in held.shards)


def test_a_dtensor_over_a_subclass_arrives(sender: Sender) -> None:
    with as_rank(0, 1):
        local = Scaled(torch.ones(2), torch.full((1,), 3.0), "kg")
        tensor = DTensor.from_local(local, mesh_of(1), [Shard(0)], run_check=False)
        (shard,) = sender.send({"w": tensor})["w"].shards
    assert (type(shard.tensor), shard.tensor.scale.item()) == (Scaled, 3)
    assert sender.holds(shard.tensor.inner)


def test_a_rank_outside_of_the_mesh_sends_no_shards(sender: Sender) -> None:
    with as_rank(3, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        held = sender.send({"w": tensor})["w"]
    assert (held.shape, held.shards) == ((4,), ())


def test_an_empty_shard_does_not_bring_the_others_along(sender: Sender) -> None:
    with as_rank(3, 4):
        empty = distributed(torch.arange(3.0), mesh_of(4), [Shard(0)])
        payload = sender.pack({"w": empty, "much": MUCH})
    (shard,) = unpack(payload, sender.memory, lambda: None)["w"].shards
    assert (shard.offsets, shard.sizes) == ((3,), (0,))
    assert len(payload) < MESSAGE_BYTES


def test_a_dtensor_whose_value_is_not_known_yet_is_refused(sender: Sender) -> None:
    with as_rank(0, 2):
        tensor = DTensor.from_local(torch.ones(2), mesh_of(2), [Partial()], run_check=False)
        with pytest.raises(UnsupportedLayoutError, match="has the placement"):
            sender.pack({"w": tensor})


@quiet_about_sharded_tensor
def test_a_sharded_tensor_arrives_as_the_shards_of_this_rank(sender: Sender) -> None:
    def shard_at(offset: int, tensor: torch.Tensor) -> LocalShard:
        return LocalShard(tensor, ShardMetadata([offset], [*tensor.size()], "rank:0/cpu"))

    with as_rank(0, 1):
        shards = [shard_at(0, torch.ones(2)), shard_at(2, torch.arange(4.0))]
        held = sender.send({"w": sharded_tensor.init_from_local_shards(shards, 6)})["w"]
    assert type(held) is HeldShards
    assert boxes(held) == [((0,), (2,)), ((2,), (4,))]
    assert [shard.tensor.tolist() for shard in held.shards] == [[1, 1], [0, 1, 2, 3]]
    assert all(sender.holds(shard.tensor) for shard in held.shards)


# Everything else


def test_values_that_are_not_tensors_arrive(sender: Sender) -> None:
    state_dict = {
        "step": 3,
        "none": None,
        "mark": per_rank({"rng": torch.ones(2)}, "first"),
        "nested": [("a", {1: 2.5}), torch.bfloat16],
    }
    received = sender.send(state_dict)
    assert (received["step"], received["none"], received["nested"]) == (
        3,
        None,
        state_dict["nested"],
    )
    assert type(received["mark"]) is PerRank
    assert received["mark"].on_resize == "first"
    assert sender.holds(received["mark"].value["rng"])


def test_what_cannot_be_pickled_is_told_to_the_sender(sender: Sender) -> None:
    sender.send({"w": torch.ones(1)})
    with pytest.raises((TypeError, pickle.PicklingError)):
        pack({"lock": threading.Lock()}, sender.staged.segment.memory)


@pytest.mark.parametrize("name", ["__main__", "__mp_main__"])
def test_the_main_module_is_loaded_when_something_of_it_is_needed(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setitem(sys.modules, name, main)
    Planner = type("Planner", (), {"__module__": name})
    monkeypatch.setattr(main, "Planner", Planner, raising=False)
    payload = sender.pack({"w": torch.ones(2), "planner": Planner()})
    # The other side has not run the script yet.
    monkeypatch.delattr(main, "Planner")
    loads: list[bool] = []

    def load_main() -> None:
        loads.append(True)
        monkeypatch.setattr(main, "Planner", Planner, raising=False)

    received = unpack(payload, sender.memory, load_main)
    assert type(received["planner"]) is Planner
    assert received["w"].tolist() == [1, 1]
    assert loads

"""State dicts from rank to rank: what torchft heals replicas with."""

from __future__ import annotations

from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardMetadata
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from reshard._pg_transport import PGTransport
from reshard.api import CheckpointException, ShapeMismatchError, UnsafeValueError
from reshard.staging import _ReplicationStager
from support.ranks import run_ranks
from support.subclasses import Scaled

SECONDS = 30
WEIRD = [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint8]


class Custom:
    """Something that only pickle can carry."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Custom

    __hash__ = None  # type: ignore[assignment]


def transport(**options: Any) -> PGTransport:
    group = dist.distributed_c10d._get_default_group()
    return PGTransport(group, timedelta(seconds=SECONDS), torch.device("cpu"), **options)


def plain_state(scale: float = 1.0) -> dict[str, Any]:
    return {
        "w": torch.arange(6.0).reshape(2, 3) * scale,
        "turned": (torch.arange(12.0) * scale).reshape(3, 4).T,
        "view": (torch.arange(100.0) * scale)[40:50:3],
        "scalar": torch.tensor(3.0 * scale),
        "none": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2) * scale),
        "dtypes": [torch.ones(3).to(dtype) for dtype in WEIRD],
        "nested": OrderedDict(b=(torch.ones(1) * scale, 2), a=[None, "text", 2.5]),
        "step": 7,
        1: {"betas": (0.9, 0.95)},
    }


def exchanged(state: Any, receive: PGTransport | None = None) -> Any:
    """What rank 1 receives of what rank 0 sends; None on rank 0."""
    if dist.get_rank() == 0:
        return transport().send_checkpoint([1], state)
    return (receive or transport()).recv_checkpoint(0)


def send_plain() -> None:
    received = exchanged(plain_state())
    if received is not None:
        expected = plain_state()
        assert list(received) == list(expected)
        assert type(received["nested"]) is OrderedDict
        for key in ("nested", "step", 1):
            assert received[key] == expected[key]
        for key in ("w", "turned", "view", "scalar", "none", "parameter"):
            assert torch.equal(received[key], expected[key])
            assert not received[key].requires_grad
        assert [each.dtype for each in received["dtypes"]] == WEIRD
        for mine, theirs in zip(received["dtypes"], expected["dtypes"], strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def send_into_memory() -> None:
    own = plain_state(scale=0.0)
    pointers = {key: own[key].data_ptr() for key in ("w", "turned", "view", "parameter")}
    version = own["w"]._version
    received = exchanged(plain_state(), transport(state_dict=lambda: own))
    if received is not None:
        for key, pointer in pointers.items():
            assert received[key] is own[key]
            assert received[key].data_ptr() == pointer
            assert torch.equal(own[key], plain_state()[key])
        assert own["w"]._version > version
        assert own["parameter"].requires_grad
        assert received["step"] == 7


def send_sharded() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    local = torch.full((2, 3), float(rank + 1))
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    received = exchanged({"d": tensor})
    if received is not None:
        assert type(received["d"]) is DTensor
        assert received["d"].shape == (4, 3)
        assert received["d"].placements == (Shard(0),)
        assert received["d"].device_mesh.mesh_dim_names == ("dp",)
        assert torch.equal(received["d"].to_local(), torch.ones(2, 3))
    dist.barrier()
    # Into a DTensor of its own: that has a mesh to communicate over.
    received = exchanged({"d": tensor}, transport(state_dict=lambda: {"d": tensor}))
    assert received is None or received["d"] is tensor
    assert torch.equal(tensor.full_tensor(), torch.ones(4, 3))


def sharded(rank: int, value: float) -> ShardedTensor:
    place = ShardMetadata([2 * rank, 0], [2, 3], f"rank:{rank}/cpu")
    return ShardedTensor._init_from_local_shards(
        [LocalShard(torch.full((2, 3), value), place)], [4, 3]
    )


def send_sharded_tensors() -> None:
    rank = dist.get_rank()
    tensor = sharded(rank, float(rank + 1))
    received = exchanged({"s": tensor})
    if received is not None:
        assert type(received["s"]) is ShardedTensor
        (shard,) = received["s"].local_shards()
        assert shard.metadata.shard_offsets == [0, 0]
        assert torch.equal(shard.tensor, torch.ones(2, 3))
    received = exchanged({"s": tensor}, transport(state_dict=lambda: {"s": tensor}))
    assert received is None or received["s"] is tensor
    assert torch.equal(tensor.local_shards()[0].tensor, torch.ones(2, 3))


def send_what_needs_a_pickle() -> None:
    for allowed in (True, False):
        state = {"w": torch.ones(0), "c": Custom()}
        if allowed or dist.get_rank() == 0:
            received = exchanged(state)
            assert received is None or received["c"] == Custom()
        else:
            with pytest.raises(UnsafeValueError, match="the state of rank 0"):
                transport(allow_pickle=False).recv_checkpoint(0)


def send_what_does_not_fit() -> None:
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointException, match="Scaled"):
            transport().send_checkpoint([1], {"a": Scaled(torch.ones(2), torch.ones(()))})
        # Small enough not to wait for a receiver.
        transport().send_checkpoint([1], {"a": torch.ones(0, 2)})
    else:
        own = {"a": torch.ones(0, 3)}
        with pytest.raises(ShapeMismatchError, match=r"\['a'\]"):
            transport(state_dict=lambda: own).recv_checkpoint(0)


WORKS = [
    *(send_plain, send_into_memory, send_sharded, send_sharded_tensors),
    *(send_what_needs_a_pickle, send_what_does_not_fit),
]


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_a_state_dict_is_sent_to_another_rank(work: Any) -> None:
    run_ranks(2, work)


def send_to_several() -> None:
    if dist.get_rank() == 1:
        transport().send_checkpoint([0, 2], {"w": torch.arange(3)})
    else:
        received: Any = transport().recv_checkpoint(1)
        assert torch.equal(received["w"], torch.arange(3))


def test_one_rank_sends_to_several() -> None:
    run_ranks(3, send_to_several)


def replicate(folder: str) -> None:
    group = dist.distributed_c10d._get_default_group()
    stager = _ReplicationStager(group, timedelta(seconds=SECONDS), storage_dir=folder)
    rank = dist.get_rank()
    partner = 1 - rank
    for step in range(2):
        staged = stager.stage({"w": torch.full((3,), float(rank)), "step": step})
        torch.testing.assert_close(staged, {"w": torch.full((3,), float(partner)), "step": step})
        kept = torch.load(stager._get_persisted_path(rank, partner), weights_only=True)
        torch.testing.assert_close(kept, staged)
    assert not stager.should_synchronize_after_execute
    stager.close()


def test_ranks_keep_the_state_of_their_partners(tmp_path: Path) -> None:
    run_ranks(2, replicate, str(tmp_path))
    assert len([*tmp_path.iterdir()]) == 2


def replicate_alone(folder: str) -> None:
    group = dist.distributed_c10d._get_default_group()
    with pytest.raises(ValueError, match="3 ranks"):
        _ReplicationStager(group, storage_dir=folder).stage({})


def test_an_odd_number_of_ranks_cannot_be_paired(tmp_path: Path) -> None:
    run_ranks(3, replicate_alone, str(tmp_path))

"""What torch itself does with state dicts and DTensors, while `reshard.patch` is in force."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.utils._pytree import tree_leaves

import reshard
from support.ranks import run_ranks
from support.recipes import bits, fingerprint, spoiled, trained
from support.training import LAYOUTS, Run

WHOLE = StateDictOptions(full_state_dict=True)
ROWS = torch.arange(12.0).view(6, 2)

each_fsdp = pytest.mark.parametrize("layout", ["fsdp1 x 4", "fsdp2 x 4"], ids=["fsdp1", "fsdp2"])


def leaves(state: Any) -> list[Any]:
    """All there is in a state dict; of sharded tensors, what is here."""
    return [bits(local(leaf)) for leaf in tree_leaves(state)]


def local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.to_local()
    if hasattr(value, "local_shards"):
        return [bits(shard.tensor) for shard in value.local_shards()]
    return value


def all_state_dicts(run: Run) -> list[list[Any]]:
    """Everything that torch has to say about the state of a run."""
    model, optimizer = run.model, run.optimizer
    said = [
        leaves(get_state_dict(model, optimizer)),
        leaves(get_state_dict(model, optimizer, options=WHOLE)),
        leaves(get_model_state_dict(model)),
        leaves(get_optimizer_state_dict(model, optimizer)),
    ]
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            said.append(leaves(model.state_dict()))
            said.append(leaves(FullyShardedDataParallel.optim_state_dict(model, optimizer)))
    else:
        said.append(leaves(model.state_dict()))
    return said


def says_the_same_under_a_patch(layout: str) -> int:
    run = trained(LAYOUTS[layout][1]())
    outside = all_state_dicts(run)
    with reshard.patch():
        assert all_state_dicts(run) == outside
    return sum(map(len, outside))


@each_fsdp
def test_state_dicts_are_the_same_under_a_patch(layout: str) -> None:
    assert min(run_ranks(2, says_the_same_under_a_patch, layout)) > 100


def handed_over(layout: str, source: Run, module: Any) -> list[dict[str, Any]]:
    """Other runs that got the state of one: sharded and together, whole and apart."""
    runs = [spoiled(LAYOUTS[layout][1]()) for _ in range(2)]
    model, optimizer = module.get_state_dict(source.model, source.optimizer)
    module.set_state_dict(
        runs[0].model, runs[0].optimizer, model_state_dict=model, optim_state_dict=optimizer
    )
    model = module.get_model_state_dict(source.model, options=WHOLE)
    optimizer = module.get_optimizer_state_dict(source.model, source.optimizer, options=WHOLE)
    module.set_model_state_dict(runs[1].model, model, options=WHOLE)
    module.set_optimizer_state_dict(runs[1].model, runs[1].optimizer, optimizer, options=WHOLE)
    return [fingerprint(run) for run in runs]


def hands_over_under_a_patch(layout: str) -> None:
    run = trained(LAYOUTS[layout][1]())
    outside = handed_over(layout, run, state_dict)
    assert outside[0] == fingerprint(run)
    with reshard.patch():
        patched = importlib.import_module("torch.distributed.checkpoint.state_dict")
        assert patched is reshard.state_dict
        assert handed_over(layout, run, patched) == outside


@each_fsdp
def test_state_dicts_can_be_set_under_a_patch(layout: str) -> None:
    run_ranks(2, hands_over_under_a_patch, layout)


def works_with_dtensors_under_a_patch() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with reshard.patch():
        tensor = distribute_tensor(ROWS, mesh, [Shard(0)])
        assert torch.equal(tensor.redistribute(placements=[Replicate()]).to_local(), ROWS)
        assert torch.equal((tensor * 2).full_tensor(), ROWS * 2)
        file = io.BytesIO()
        torch.save({"w": tensor}, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)["w"]
        assert torch.equal(read.full_tensor(), ROWS)


def test_dtensors_work_under_a_patch() -> None:
    run_ranks(2, works_with_dtensors_under_a_patch)


# The protocol by which tensors describe themselves to a checkpoint


def sharded_rows() -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(ROWS, mesh, [Shard(0)])


def wrapped_rows(fill: float | None = None) -> DTensor:
    """A DTensor over a wrapper of shards, as torchrec makes them."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mine = ROWS.chunk(ranks)[rank].clone()
    if fill is not None:
        mine.fill_(fill)
    return DTensor.from_local(
        LocalShardsWrapper([mine], [(rank * len(mine), 0)]),
        init_device_mesh("cpu", (ranks,)),
        [Shard(0)],
        run_check=False,
        shape=ROWS.shape,
        stride=ROWS.stride(),
    )


def describe_themselves(kind: str) -> list[list[Any]]:
    tensor = {"sharded": sharded_rows, "wrapped": wrapped_rows}[kind]()
    chunks = [[*chunk.offsets, *chunk.sizes] for chunk in tensor.__create_chunk_list__()]
    items = tensor.__create_write_items__("w", tensor)
    return chunks + [[item.index.fqn, *item.tensor_data.chunk.offsets] for item in items]


def describe_themselves_under_a_patch(kind: str) -> None:
    outside = describe_themselves(kind)
    assert len(outside) == 2
    with reshard.patch():
        assert describe_themselves(kind) == outside


@pytest.mark.parametrize("kind", ["sharded", "wrapped"])
def test_dtensors_describe_themselves_under_a_patch(kind: str) -> None:
    run_ranks(2, describe_themselves_under_a_patch, kind)


def saves_and_loads_wrapped_shards(box: Path, patched: bool) -> None:
    if patched:
        reshard.patch()
    reshard.save({"w": wrapped_rows()}, checkpoint_id=box)
    state = {"w": wrapped_rows(fill=0.0)}
    reshard.load(state, checkpoint_id=box)
    (mine,) = state["w"].to_local().local_shards()
    assert torch.equal(mine, ROWS.chunk(dist.get_world_size())[dist.get_rank()])


@pytest.mark.parametrize(
    "patched",
    [
        False,
        pytest.param(True),
    ],
    ids=["without", "under a patch"],
)
def test_shards_in_a_wrapper_are_saved_and_loaded(patched: bool, tmp_path: Path) -> None:
    run_ranks(2, saves_and_loads_wrapped_shards, tmp_path / "checkpoint", patched)

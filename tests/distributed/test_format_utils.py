"""Files of torch.save loaded straight into sharded models, by real ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard
from reshard.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from support.ranks import run_ranks
from support.samples import SHAPES, SPREADS, raw, sample


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def load_samples(path: str) -> list[str]:
    """What differs after the load, in words."""
    wrong = []
    for layout, spread in SPREADS[dist.get_world_size()].items():
        found = spread.state_dict(None)
        reshard.load(
            {"samples": found},
            storage_reader=BroadcastingTorchSaveReader(),
            planner=DynamicMetaLoadPlanner(),
            checkpoint_id=path,
        )
        expected = spread.state_dict(1)
        for name, tensor in found.items():
            if raw(tensor.to_local()) != raw(expected[name].to_local()):
                wrong.append(f"{name} in {layout}")
    return wrong


def test_each_rank_reads_its_part_of_a_file_in_any_layout(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"samples": {name: sample(name, 1) for name in SHAPES}, "more": 3}, path)

    assert run_ranks(2, load_samples, str(path)) == [[], []]


def load_into_fsdp(path: str) -> bool:
    model = network(seed=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    reshard.load(
        {"model": model},
        storage_reader=BroadcastingTorchSaveReader(coordinator_rank=1),
        planner=DynamicMetaLoadPlanner(),
        checkpoint_id=path,
    )
    expected = network(seed=0).state_dict()
    loaded = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    return all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_file_is_loaded_into_a_model_of_fsdp(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": network(seed=0).state_dict()}, path)

    assert run_ranks(2, load_into_fsdp, str(path)) == [True, True]


def convert_with_a_group(folder: str) -> None:
    reshard.convert(f"{folder}/saved", f"{folder}/model.pt", "torch")
    reshard.convert(f"{folder}/model.pt", f"{folder}/dcp", "dcp")


def test_ranks_may_convert_together(tmp_path: Path) -> None:
    state = {name: sample(name) for name in SHAPES}
    reshard.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)

    run_ranks(2, convert_with_a_group, str(tmp_path))

    found = torch.load(tmp_path / "model.pt", weights_only=True)
    again = reshard.read_state_dict(tmp_path / "dcp")
    for name in SHAPES:
        assert raw(found[name]) == raw(again[name]) == raw(state[name])

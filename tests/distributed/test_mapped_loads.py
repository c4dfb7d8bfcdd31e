"""Loads that view files, on real ranks: each rank maps what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import reshard
from support.maps import is_mapped
from support.ranks import run_ranks
from support.samples import SHAPES, SPREADS, same_bits, sample


def save_in_every_layout(folder: str) -> None:
    for number, spread in enumerate(SPREADS[dist.get_world_size()].values()):
        reshard.save(spread.state_dict(seed=number), checkpoint_id=f"{folder}/{number}")


def without_memory(state_dict: dict[str, Any]) -> dict[str, Any]:
    return {
        name: DTensor.from_local(
            tensor.to_local().to("meta"),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        for name, tensor in state_dict.items()
    }


def assign_in_every_layout(folder: str, saved_on: int) -> tuple[list[str], int]:
    """What differs after the load, in words; how many local tensors view a file."""
    wrong, views, rank = [], 0, dist.get_rank()
    for number, saved in enumerate(SPREADS[saved_on]):
        for wanted, spread in SPREADS[dist.get_world_size()].items():
            template = spread.state_dict(seed=None)
            state_dict = without_memory(template) if number % 2 else dict(template)
            reshard.load(state_dict, checkpoint_id=f"{folder}/{number}", assign=True)
            for name in SHAPES:
                loaded, own = state_dict[name], spread.local_part(sample(name, number), rank)
                assert loaded is not template[name]
                assert loaded.placements == template[name].placements
                views += is_mapped(loaded.to_local(), Path(folder))
                if not same_bits(loaded.to_local(), own):
                    wrong.append(f"{name} from {saved!r} to {wanted!r} on rank {rank}")
    return wrong, views


@pytest.mark.parametrize("loaded_on", [2, 4])
@pytest.mark.parametrize("saved_on", [2, 4])
def test_what_one_mesh_saved_is_viewed_or_read_on_every_other(
    saved_on: int, loaded_on: int, tmp_path: Path
) -> None:
    run_ranks(saved_on, save_in_every_layout, str(tmp_path))

    found = run_ranks(loaded_on, assign_in_every_layout, str(tmp_path), saved_on)

    assert [wrong for wrong, _ in found] == [[]] * loaded_on
    assert all(views for _, views in found)


def load_into_fsdp(folder: str) -> list[bool]:
    """Whether each local parameter is a view; the model must compute."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4, bias=False))
    fully_shard(model, mesh=mesh)

    reshard.load({"model": model}, checkpoint_id=folder, assign=True)

    views = [is_mapped(p.to_local(), Path(folder)) for p in model.parameters()]
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4, bias=False))
    inputs = torch.ones(2, 8)
    assert torch.allclose(model(inputs), expected(inputs))
    return views


def test_a_model_under_fsdp_on_the_meta_device_views_its_rows_of_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4, bias=False))
    reshard.save({"model": model}, checkpoint_id=tmp_path)

    assert run_ranks(2, load_into_fsdp, str(tmp_path)) == [[True, True, True]] * 2

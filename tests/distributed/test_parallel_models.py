"""Models and optimizers under DDP, FSDP2, HSDP and TP: saved in one form, loaded in another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import reshard
from support.ranks import run_ranks
from support.samples import same_bits


class Model(nn.Module):
    """Five rows over four ranks: the last one has none."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 12)
        self.down = nn.Linear(12, 5)
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


TP_PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}


def in_tensor_parallel(model: Model, mesh: Any) -> Model:
    parallelize_module(model, mesh, {name: style() for name, style in TP_PLAN.items()})
    return model


def fsdp(model: Model) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def fsdp_by_layers(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model.down, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def hsdp(model: Model) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    return model


def tp(model: Model) -> nn.Module:
    return in_tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def fsdp_over_tp(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    in_tensor_parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    weight = model.up.weight
    assert isinstance(weight, DTensor)
    assert any(isinstance(placement, _StridedShard) for placement in weight.placements)
    return model


def ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


FORMS: dict[int, dict[str, Callable[[Model], nn.Module]]] = {
    2: {"fsdp": fsdp, "tp": tp, "ddp": ddp},
    3: {"fsdp": fsdp, "tp": tp},
    4: {
        "fsdp": fsdp,
        "fsdp by layers": fsdp_by_layers,
        "hsdp": hsdp,
        "tp": tp,
        "fsdp over tp": fsdp_over_tp,
        "ddp": ddp,
    },
}


def trained(form: Callable[[Model], nn.Module], seed: int) -> tuple[nn.Module, Any]:
    """A model in that form after a step of Adam, so that there is state to save."""
    torch.manual_seed(seed)
    plain = Model()
    x = torch.randn(6, 7)
    model = form(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def flat(state_dict: Any, prefix: str = "") -> dict[str, Any]:
    """All tensors, whole, and values by name."""
    found = {}
    for key, value in state_dict.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, DTensor):
            found[f"{prefix}{key}"] = value.full_tensor().detach()
        else:
            found[f"{prefix}{key}"] = value
    return found


def save_in_every_form(folder: str) -> None:
    for number, form in enumerate(FORMS[dist.get_world_size()].values()):
        model, optimizer = trained(form, seed=number)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state_dict = {"model": model_state, "optimizer": optimizer_state}
        reshard.save(state_dict, checkpoint_id=f"{folder}/{number}")
        whole = flat(state_dict)
        if dist.get_rank() == 0:
            torch.save(whole, f"{folder}/{number}.pt")


def load_in_every_form(folder: str, saved_on: int) -> list[str]:
    """What differs after the load, in words."""
    wrong = []
    for wanted, form in FORMS[dist.get_world_size()].items():
        model, optimizer = trained(form, seed=99)
        for number, saved in enumerate(FORMS[saved_on]):
            how = f"from {saved} to {wanted}"
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state_dict = {"model": model_state, "optimizer": optimizer_state}
            report = reshard.load(state_dict, checkpoint_id=f"{folder}/{number}", strict="exact")
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state_dict["model"],
                optim_state_dict=state_dict["optimizer"],
            )
            expected = torch.load(f"{folder}/{number}.pt", weights_only=False)
            model_state, optimizer_state = get_state_dict(model, optimizer)
            found = flat({"model": model_state, "optimizer": optimizer_state})
            if found.keys() != expected.keys():
                wrong.append(f"{how}: {found.keys() ^ expected.keys()}")
            if report.missing or report.unexpected or not report.nbytes:
                wrong.append(f"{how}: {report}")
            wrong += [
                f"{how}: {name}"
                for name, value in expected.items()
                if (
                    not same_bits(value, found[name])
                    if isinstance(value, torch.Tensor)
                    else value != found[name]
                )
            ]
    return wrong


PAIRS = [(2, 4), (3, 4), (4, 2), (4, 3), (4, 4)]


@pytest.mark.parametrize(("saved_on", "loaded_on"), PAIRS)
def test_a_model_and_its_optimizer_go_from_every_form_to_every_other(
    saved_on: int, loaded_on: int, tmp_path: Path
) -> None:
    run_ranks(saved_on, save_in_every_form, str(tmp_path))

    assert run_ranks(loaded_on, load_in_every_form, str(tmp_path), saved_on) == [[]] * loaded_on


def test_one_process_loads_what_every_form_saved_into_the_plain_model(tmp_path: Path) -> None:
    run_ranks(4, save_in_every_form, str(tmp_path))

    for number, form in enumerate(FORMS[4]):
        model = Model()
        state_dict = {"model": model.state_dict()}
        reshard.load(state_dict, checkpoint_id=tmp_path / str(number))
        expected = torch.load(tmp_path / f"{number}.pt", weights_only=False)
        for name, value in model.state_dict().items():
            assert same_bits(value, expected[f"model.{name}"]), (form, name)


def save_plain_and_parallel(folder: str) -> list[str]:
    """The weights that a form saves are those that the model had before it took it."""
    wrong = []
    for number, (form, make) in enumerate(FORMS[dist.get_world_size()].items()):
        torch.manual_seed(number)
        plain = Model()
        expected = {name: value.clone() for name, value in plain.state_dict().items()}
        model = make(plain)
        bare = model.module if form == "ddp" else model
        reshard.save({"model": bare.state_dict()}, checkpoint_id=f"{folder}/{number}")
        found = reshard.read_state_dict(f"{folder}/{number}")["model"]
        wrong += [
            f"{form}: {name}" for name in expected if not same_bits(found[name], expected[name])
        ]
    return wrong


@pytest.mark.parametrize("ranks", FORMS)
def test_weights_are_stored_as_they_were_before_the_model_was_made_parallel(
    ranks: int, tmp_path: Path
) -> None:
    assert run_ranks(ranks, save_plain_and_parallel, str(tmp_path)) == [[]] * ranks

"""Optimizers of torchao, whose state is quantized: saved, and loaded on more and fewer ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import reshard
from reshard.state_dict_saver import AsyncCheckpointerType
from support.ranks import run_ranks
from support.recipes import LONG

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LONG)]
pytest.importorskip("torchao.optim", reason="torchao is not installed")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NAMES = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]
WIDTH, ROWS = 128, 256


def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torchao import optim

    # What the optimizer compiles is the arithmetic of a step.
    torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, ROWS)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, getattr(optim, name)(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        data = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_state(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of the weight's state, dequantized and gathered."""
    found = {}
    for name in ("exp_avg", "exp_avg_sq"):
        tensor: DTensor = state[f"state.weight.{name}"]
        local: Any = tensor.to_local()
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, local.dequantize().clone())
        found[name] = torch.cat(parts)
    return found


def saves(names: list[str], box: Path) -> dict[str, Any]:
    saved = {}
    for name in names:
        model, optimizer = made(name)
        train(model, optimizer, 2)
        state = get_optimizer_state_dict(model, optimizer, options=FLAT)
        saved[name] = whole_state(state)
        reshard.save({"optimizer": state}, checkpoint_id=box / name)
        for kind in AsyncCheckpointerType:
            place = box / f"{name} {kind.value}"
            reshard.async_save(
                {"optimizer": state}, checkpoint_id=place, async_checkpointer_type=kind
            ).result()
    return saved


def loads(names: list[str], box: Path) -> dict[str, Any]:
    loaded = {}
    for name in names:
        for place in (name, *(f"{name} {kind.value}" for kind in AsyncCheckpointerType)):
            model, optimizer = made(name)
            train(model, optimizer, 1)
            state = get_optimizer_state_dict(model, optimizer, options=FLAT)
            reshard.load({"optimizer": state}, checkpoint_id=box / place)
            set_optimizer_state_dict(model, optimizer, state, options=FLAT)
            loaded[place] = whole_state(get_optimizer_state_dict(model, optimizer, options=FLAT))
            train(model, optimizer, 1)
    return loaded


def test_quantized_state_moves_between_numbers_of_ranks(tmp_path: Path) -> None:
    saved = run_ranks(2, saves, NAMES, tmp_path, seconds=LONG)[0]
    assert all(state["exp_avg"].any() for state in saved.values())
    for ranks in (1, 3):
        for loaded in run_ranks(ranks, loads, NAMES, tmp_path, seconds=LONG):
            for place, state in loaded.items():
                for name, tensor in state.items():
                    assert torch.equal(tensor, saved[place.split()[0]][name]), (place, name)

"""Optimizers that share parameters, settings or work, and state of odd forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

import reshard
from reshard.training import TrainState
from support.ranks import run_ranks
from support.small_model import adamw, losses, momentum, small_model


def test_a_parameter_of_two_optimizers_is_refused(tmp_path: Path) -> None:
    model = small_model()
    optimizers = [adamw(model.parameters()), adamw(model.up.parameters())]
    with pytest.raises(reshard.CheckpointException, match=r"parameter 'up\.0\.weight'"):
        reshard.save({"train": TrainState(model, optimizers)}, checkpoint_id=tmp_path)


def test_groups_that_were_split_do_not_share_their_settings(tmp_path: Path) -> None:
    model = small_model()
    optimizer = optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    parts = [{"params": [*part.parameters()]} for part in (model.up, model.down)]
    fresh = optim.AdamW(parts, lr=torch.tensor(0.9), foreach=False)
    reshard.load({"train": TrainState(model, fresh)}, checkpoint_id=tmp_path)
    fresh.param_groups[0]["lr"].fill_(0.5)
    assert float(fresh.param_groups[1]["lr"]) == pytest.approx(0.1)


def test_groups_that_were_joined_may_differ_in_tensors(tmp_path: Path) -> None:
    model = small_model()
    parts = [
        {"params": [*part.parameters()], "scales": torch.full((2,), float(i))}
        for i, part in enumerate((model.up, model.down))
    ]
    reshard.save({"train": TrainState(model, adamw(parts))}, checkpoint_id=tmp_path)
    state = TrainState(model, adamw(model.parameters()))
    reshard.load({"train": state}, checkpoint_id=tmp_path)
    (left,) = state.report.optimizer.groups_left
    assert "groups that differ" in left


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_state_takes_the_precision_of_the_parameter_if_it_had_that(
    dtypes: tuple[torch.dtype, torch.dtype], tmp_path: Path
) -> None:
    model, other = (small_model().to(dtype) for dtype in dtypes)
    optimizer, fresh = adamw(model.parameters()), adamw(other.parameters())
    for each, its_optimizer, dtype in [(model, optimizer, dtypes[0]), (other, fresh, dtypes[1])]:
        each(torch.ones(1, 4, dtype=dtype)).sum().backward()
        if its_optimizer is optimizer:
            its_optimizer.step()
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    reshard.load({"train": TrainState(other, fresh)}, checkpoint_id=tmp_path)
    kept = fresh.state[other.down.weight]
    assert (kept["exp_avg"].dtype, kept["step"].dtype) == (dtypes[1], torch.float32)
    fresh.step()


def test_keys_of_nested_state_stay_what_they_are(tmp_path: Path) -> None:
    model = small_model()
    optimizer = momentum(model.parameters())
    own = optimizer.state[model.down.bias]
    own["parts"] = {0: torch.ones(2), 1: {"a": torch.ones(1), "b": torch.ones(1)}}
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    own["parts"] = {0: torch.zeros(2), 1: {"a": torch.zeros(1), "b": torch.zeros(1)}}
    state = {"train": TrainState(model, optimizer)}
    reshard.load(state, checkpoint_id=tmp_path, exclude=["*.parts.1.a"])
    parts = optimizer.state[model.down.bias]["parts"]
    assert parts.keys() == {0, 1}
    assert (parts[0].tolist(), parts[1]["a"].tolist(), parts[1]["b"].tolist()) == ([1, 1], [0], [1])


def test_parameters_without_stored_state_are_reported(tmp_path: Path) -> None:
    model, other = small_model(), small_model(1)
    optimizer = adamw(model.up.parameters())
    losses(model, optimizer)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    state = TrainState(other, adamw(other.parameters()))
    reshard.load({"train": state}, checkpoint_id=tmp_path)
    assert state.report.optimizer.stateless == ["down.bias", "down.weight"]


def with_zero(box: Path, fresh: bool) -> Any:
    """Losses of an optimizer that is spread over ranks, or of one that goes on from it."""
    model = DistributedDataParallel(small_model(int(fresh)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.05)
    state = TrainState(model, optimizer)
    if fresh:
        optimizer.param_groups[0]["lr"] = 0.9
        reshard.load({"train": state}, checkpoint_id=box)
        return losses(model, optimizer)
    losses(model, optimizer)
    reshard.save({"train": state}, checkpoint_id=box)
    return losses(model, optimizer)


def test_an_optimizer_that_is_spread_over_ranks_goes_on(tmp_path: Path) -> None:
    saved = run_ranks(2, with_zero, tmp_path, False)
    assert run_ranks(2, with_zero, tmp_path, True) == saved
    assert run_ranks(3, with_zero, tmp_path, True)[0] == pytest.approx(saved[0])
    model = small_model(1)
    optimizer = adamw(model.parameters())
    reshard.load({"train": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    assert losses(model, optimizer) == pytest.approx(saved[0])


class Gained(nn.Module):
    """A model with a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gain


def scalar_dtensor(box: Path) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    model, other = (distribute_module(Gained(), mesh) for _ in range(2))
    optimizer, fresh = adamw(model.parameters()), adamw(other.parameters())
    for parameter in [*model.parameters(), *other.parameters()]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=box)
    reshard.load({"train": TrainState(other, fresh)}, checkpoint_id=box)
    for each in (optimizer, fresh):
        each.step()
    gains: list[Any] = [model.gain, other.gain]
    return bool(torch.equal(*(gain.full_tensor() for gain in gains)))


def test_state_of_a_dtensor_without_dimensions_is_one_too(tmp_path: Path) -> None:
    assert run_ranks(2, scalar_dtensor, tmp_path) == [True, True]

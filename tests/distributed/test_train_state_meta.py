"""TrainState: models that have no memory before the load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import reshard
from reshard.training import TrainState
from support.ranks import run_ranks
from support.small_model import FORMS, Small, adamw, losses, small_model
from support.whole import differences, stored


class Buffered(Small):
    """Its layers share their weights, and one of its buffers is not for checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.up[0], self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.down.weight = self.up[0].weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("derived", torch.arange(2.0), persistent=False)


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def test_a_model_on_the_meta_device_is_filled_and_its_optimizer_goes_with_it(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, other = Buffered(), on_meta(Buffered)
    model.kept += 1
    optimizer, early = adamw(model.parameters()), adamw(other.parameters())
    losses(model, optimizer)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    before = list(other.parameters())
    other.up[0].bias.requires_grad_(False)
    reshard.load({"train": TrainState(other, early)}, checkpoint_id=tmp_path)

    after = list(other.parameters())
    assert [a is b for a, b in zip(before, after, strict=True)] == [True] * 3
    assert other.down.weight is other.up[0].weight
    assert [parameter.requires_grad for parameter in after] == [True, False, True]
    assert all(type(parameter) is nn.Parameter for parameter in after)
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []
    # What is not in checkpoints is for the program to make: it is not filled with anything.
    assert other.derived.is_meta
    other.up[0].bias.requires_grad_(True)
    assert losses(other, early) == losses(model, optimizer)


def test_an_optimizer_that_made_its_state_on_the_meta_device_is_filled_too(tmp_path: Path) -> None:
    model, other = small_model(), on_meta(Small)
    optimizer, early = (torch.optim.Adagrad(each.parameters(), lr=0.1) for each in (model, other))
    assert all(state["sum"].is_meta for state in early.state.values())
    losses(model, optimizer)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    reshard.load({"train": TrainState(other, early)}, checkpoint_id=tmp_path)
    assert losses(other, early) == losses(model, optimizer)


def save_whole(box: Path) -> list[float]:
    """The losses that follow."""
    model = small_model()
    optimizer = adamw(model.parameters())
    losses(model, optimizer)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=box)
    return losses(model, optimizer)


def load_in_form_on_meta(form: str, box: Path) -> dict[str, Any]:
    model = FORMS[form](on_meta(Small))
    optimizer = adamw(model.parameters())
    before = list(model.parameters())
    assert all(parameter.is_meta for parameter in before)
    reshard.load({"train": TrainState(model, optimizer)}, checkpoint_id=box)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=f"{box} again in {form}")
    held = optimizer.param_groups[0]["params"]
    return {
        "optimizer has them": [a is b for a, b in zip(held, model.parameters(), strict=True)],
        "same objects": [a is b for a, b in zip(before, model.parameters(), strict=True)],
        "on meta": [parameter.is_meta for parameter in model.parameters()],
        "losses": losses(model, optimizer),
    }


@pytest.mark.parametrize("form", ["fsdp2", "tp"])
def test_a_sharded_model_on_the_meta_device_is_filled_and_trains(form: str, tmp_path: Path) -> None:
    expected = save_whole(tmp_path / "box")
    for found in run_ranks(2, load_in_form_on_meta, form, tmp_path / "box"):
        assert found["optimizer has them"] == found["same objects"] == [True] * 4
        assert found["on meta"] == [False] * 4
        assert found["losses"] == pytest.approx(expected, rel=1e-5)
    again = stored(tmp_path / f"box again in {form}")
    assert differences(stored(tmp_path / "box"), again) == []


def test_a_compiled_model_on_the_meta_device_is_filled(tmp_path: Path) -> None:
    expected = save_whole(tmp_path)
    model = on_meta(Small)
    wrapped = torch.compile(model, backend="eager")
    optimizer = adamw(wrapped.parameters())
    reshard.load({"train": TrainState(wrapped, optimizer)}, checkpoint_id=tmp_path)
    assert losses(model, optimizer) == expected


def test_a_model_with_activation_checkpoints_on_the_meta_device_is_filled(tmp_path: Path) -> None:
    expected = save_whole(tmp_path)
    model = on_meta(Small)
    model.up = checkpoint_wrapper(model.up)
    optimizer = adamw(model.parameters())
    reshard.load({"train": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    assert losses(model, optimizer) == expected


@pytest.mark.parametrize("why", ["excluded", "missing"])
def test_parameters_on_the_meta_device_that_are_not_loaded_stay_there(
    why: str, tmp_path: Path
) -> None:
    model, other = small_model(), on_meta(Small)
    saved: Any = model if why == "excluded" else nn.ModuleDict({"up": model.up})
    reshard.save({"train": TrainState(saved)}, checkpoint_id=tmp_path)
    options: dict[str, Any] = {"strict": False} if why == "missing" else {"exclude": ["*.down.*"]}
    reshard.load({"train": TrainState(other)}, checkpoint_id=tmp_path, **options)
    assert [parameter.is_meta for parameter in other.parameters()] == [False, False, True, True]

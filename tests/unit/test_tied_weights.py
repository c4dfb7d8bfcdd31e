"""Names that share one memory, of which a checkpoint has one only, as Hugging Face stores them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reshard
from reshard.api import MissingKeyError
from support.plain_files import write_tensors

WEIGHT = torch.arange(6.0).view(3, 2)


class Tied(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2, device=device)
        self.head = nn.Linear(2, 3, bias=False, device=device)
        self.head.weight = self.embed.weight


@pytest.fixture(params=["safetensors", "reshard"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint with one of the names."""
    if request.param == "safetensors":
        write_tensors(tmp_path / "model.safetensors", {"embed.weight": WEIGHT})
    else:
        reshard.save({"embed.weight": WEIGHT}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_filling_one_name_fills_the_others(stored: Path) -> None:
    model = Tied()
    report = reshard.load(model.state_dict(), checkpoint_id=stored, no_dist=True)
    assert torch.equal(model.head.weight, WEIGHT)
    assert report.loaded == ["embed.weight", "head.weight"]
    assert report.missing == []


def test_the_other_name_may_be_the_one_that_is_stored(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"head.weight": WEIGHT})
    model = Tied()
    reshard.load(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(model.embed.weight, WEIGHT)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_are_replaced_stay_tied(device: str, stored: Path) -> None:
    model = Tied(device)
    report = reshard.load(
        {"m": model}, checkpoint_id=stored, rename={"": "m"}, assign=True, no_dist=True
    )
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, WEIGHT)
    assert report.missing == []


def untied(value: torch.Tensor) -> Any:
    return value.clone()


def a_part(value: torch.Tensor) -> Any:
    return value[:2]


def turned(value: torch.Tensor) -> Any:
    return value.view(2, 3)


def later(value: torch.Tensor) -> Any:
    return torch.zeros(8)[:6].view(3, 2)


@pytest.mark.parametrize("other", [untied, a_part, turned, later])
def test_what_is_not_exactly_the_same_memory_is_missing(other: Any, stored: Path) -> None:
    weight = torch.zeros(3, 2)
    target = {"embed.weight": weight, "head.weight": other(weight)}
    with pytest.raises(MissingKeyError, match=r"head\.weight"):
        reshard.load(target, checkpoint_id=stored, no_dist=True)
    assert not weight.any()
    report = reshard.load(target, checkpoint_id=stored, strict=False, no_dist=True)
    assert report.missing == ["head.weight"]


def test_a_name_tied_to_one_that_is_missing_or_excluded_is_missing(stored: Path) -> None:
    weight = torch.zeros(3, 2)
    with pytest.raises(MissingKeyError):
        reshard.load({"a": weight, "b": weight}, checkpoint_id=stored, no_dist=True)
    target = {"embed.weight": weight, "head.weight": weight}
    with pytest.raises(MissingKeyError):
        reshard.load(target, checkpoint_id=stored, exclude="embed.*", no_dist=True)


def test_empty_tensors_are_not_tied_to_each_other(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"a": torch.empty(0)})
    target = {"a": torch.empty(0), "b": torch.empty(0)}
    with pytest.raises(MissingKeyError, match="b"):
        reshard.load(target, checkpoint_id=tmp_path, no_dist=True)


def test_a_planner_that_fills_tensors_in_its_own_way_misses_the_name(stored: Path) -> None:
    class Own(reshard.DefaultLoadPlanner):
        def lookup_tensor(self, index: Any) -> torch.Tensor:
            return super().lookup_tensor(index)

    with pytest.raises(MissingKeyError):
        reshard.load(Tied().state_dict(), checkpoint_id=stored, planner=Own(), no_dist=True)

"""A load changes tensors in place, and autograd knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import reshard
from support.subclasses import Scaled

CHANGED = "modified by an inplace operation"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    reshard.save({"p": torch.full((4, 6), 3.0)}, checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


class Detaching(reshard.DefaultLoadPlanner):
    """Resolves a tensor itself."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return super().resolve_tensor(read_item).detach()


@pytest.mark.parametrize("planner", [None, Detaching()], ids=["default", "own planner"])
def test_a_graph_that_needs_the_values_before_a_load_is_refused(
    planner: reshard.LoadPlanner | None, place: Path
) -> None:
    p = torch.ones(4, 6, requires_grad=True)
    y = (p * p).sum()
    reshard.load({"p": p}, checkpoint_id=place, planner=planner, no_dist=True)

    assert p.detach().eq(3).all()
    with pytest.raises(RuntimeError, match=CHANGED):
        y.backward()


def test_a_graph_that_is_made_after_a_load_has_the_new_gradient(place: Path) -> None:
    p = torch.ones(4, 6, requires_grad=True)
    reshard.load({"p": p}, checkpoint_id=place, no_dist=True)
    (p * p).sum().backward()

    assert p.grad is not None
    assert p.grad.eq(6).all()


def test_a_tensor_that_is_not_loaded_keeps_its_graph(place: Path) -> None:
    p, q = (torch.ones(4, 6, requires_grad=True) for _ in range(2))
    y = (q * q).sum()
    state = {"p": p, "q": q}
    reshard.load(state, checkpoint_id=place, exclude=["q"], no_dist=True)
    y.backward()

    assert q.grad is not None


def test_a_tensor_made_in_inference_mode_is_loaded(place: Path) -> None:
    with torch.inference_mode():
        p = torch.ones(4, 6)
    reshard.load({"p": p}, checkpoint_id=place, no_dist=True)

    assert p.eq(3).all()


def test_a_wrapper_of_other_tensors_counts_as_changed(tmp_path: Path) -> None:
    def scaled() -> Scaled:
        return Scaled(torch.ones(4), torch.ones(1))

    reshard.save({"p": scaled()}, checkpoint_id=tmp_path / "c", no_dist=True)
    target = scaled()
    before = target._version
    reshard.load({"p": target}, checkpoint_id=tmp_path / "c", no_dist=True)

    assert target._version > before


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_graph_over_a_dtensor_is_refused_too(place: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    p = DTensor.from_local(torch.ones(4, 6), mesh, [Replicate()]).requires_grad_()
    y = (p * p).sum()
    reshard.load({"p": p}, checkpoint_id=place)

    with pytest.raises(RuntimeError, match=CHANGED):
        y.backward()

"""What a program chose as its default device and dtype is its own business."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.state_dict_saver import AsyncCheckpointerType
from support.background import both_kinds

STATE: dict[str, Any] = {
    "dense": torch.arange(600, dtype=torch.float32, device="cpu").reshape(20, 30),
    "strided": torch.arange(600, dtype=torch.float32, device="cpu").reshape(20, 30).t(),
    "empty": torch.empty(0, 3, device="cpu"),
    "scalar": torch.tensor(5, device="cpu"),
    "shared": torch.arange(8, device="cpu"),
    "value": deque([torch.ones(2, device="cpu"), torch.empty(0, device="cpu")]),
}
STATE["part"] = STATE["shared"][2:5]


@pytest.fixture(autouse=True, params=["meta", "cpu"])
def other_defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    # The meta device stands for an accelerator: nothing can be read from its memory.
    torch.set_default_device(request.param)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def check_loaded(place: Path) -> None:
    found: dict[str, Any] = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in STATE.items()
    }
    # Columns of it, in another dtype: through a buffer.
    found["dense"] = torch.zeros(20, 30, dtype=torch.float64, device="cpu")
    reshard.load(found, checkpoint_id=place, no_dist=True)
    for name, value in STATE.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name].to(value.dtype), value), name
    assert [inner.device.type for inner in found["value"]] == ["cpu", "cpu"]
    assert found["value"][0].eq(1).all()


def test_a_state_dict_is_saved_and_loaded(tmp_path: Path) -> None:
    reshard.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    check_loaded(tmp_path)


@both_kinds
def test_a_state_dict_is_saved_in_the_background(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    reshard.async_save(
        STATE, checkpoint_id=tmp_path, no_dist=True, async_checkpointer_type=kind
    ).result()
    check_loaded(tmp_path)


def test_reading_without_a_template_gives_tensors_in_memory(tmp_path: Path) -> None:
    reshard.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    found = reshard.read_state_dict(tmp_path)
    columns = reshard.read_tensor(tmp_path, "dense", (slice(None), slice(3, 7)))

    assert found["dense"].device.type == "cpu"
    assert torch.equal(found["dense"], STATE["dense"])
    assert torch.equal(columns, STATE["dense"][:, 3:7])

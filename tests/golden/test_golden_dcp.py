"""Checkpoints that torch 2.13 wrote: they load."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("make_dcp", HERE / "make_dcp.py")
assert _spec is not None
assert _spec.loader is not None
make_dcp = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_dcp)


def check_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        raw, wanted = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found, expected))
        assert torch.equal(raw, wanted)
    elif isinstance(expected, dict):
        assert {str(key) for key in found} == {str(key) for key in expected}
        for key, value in expected.items():
            check_same(found[key] if key in found else found[str(key)], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            check_same(*pair)
    else:
        assert found == expected
        assert type(found) is type(expected)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_checkpoint_of_dcp_loads(mmap: bool) -> None:
    expected = {"sharded": make_dcp.sharded(), **make_dcp.plain()}
    check_same(reshard.read_state_dict(HERE / "dcp-2.13", mmap=mmap), expected)
    part = reshard.read_tensor(HERE / "dcp-2.13", "sharded.columns", (slice(1, 3), slice(1, 3)))
    check_same(part, make_dcp.sharded()["columns"][1:3, 1:3])


@pytest.mark.parametrize("mmap", [False, True])
def test_a_file_of_torch_save_loads(mmap: bool) -> None:
    tensors = make_dcp.sharded()
    expected = {"tensors": {**tensors, "tied": tensors["rows"]}, **make_dcp.plain()}
    found = reshard.read_state_dict(HERE / "torch-2.13.pt", mmap=mmap)
    check_same(found, expected)
    assert found["tensors"]["tied"] is found["tensors"]["rows"]

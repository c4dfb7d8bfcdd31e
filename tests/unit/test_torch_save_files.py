"""Files of torch.save, read like checkpoints."""

from __future__ import annotations

import collections
import decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reshard
from reshard.api import MissingKeyError, UnsafeValueError, UnsupportedFormatError
from support import dcp_files


def _trained() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    shared = torch.rand(4, 5)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "views": {
            "one": shared,
            "same": shared,
            "turned": shared.t(),
            "part": shared[1:3],
            "wide": torch.rand(1).expand(3),
            "conjugate": torch.rand(3, dtype=torch.complex64).conj(),
        },
        "parameter": nn.Parameter(torch.ones(2)),
        "values": {
            "set": {1, "a"},
            "tuple": (1, "x", None),
            "bytes": b"abc",
            "complex": 1 + 2j,
            "dtype": torch.float16,
            "device": torch.device("cuda", 1),
            "size": torch.Size([2, 3]),
            "ordered": (collections.OrderedDict(b=1, a=2),),
        },
    }


def _check(found: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, path
        assert torch.equal(found, expected), path
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            _check(found[key], value, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for index, value in enumerate(expected):
            _check(found[index], value, f"{path}.{index}")
    else:
        assert found == expected, path
        assert type(found) is type(expected), path


@pytest.mark.parametrize("mmap", [False, True])
def test_everything_comes_back_as_torch_loads_it(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / "model.pt"
    torch.save(_trained(), path)
    found = reshard.read_state_dict(path, mmap=mmap)
    _check(found, torch.load(path, weights_only=True))
    assert found["views"]["one"] is found["views"]["same"]


def test_a_file_loads_into_a_model_and_its_optimizer(tmp_path: Path) -> None:
    path, saved = tmp_path / "model.pt", _trained()
    torch.save(saved, path)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    target: dict[str, Any] = {"model": model, "epoch": 0}
    report = reshard.load(target, checkpoint_id=path)
    _check(model.state_dict(), saved["model"])
    assert target["epoch"] == 3
    assert "views.one" in report.unexpected
    with pytest.raises(MissingKeyError, match="absent"):
        reshard.load({"absent": torch.zeros(1)}, checkpoint_id=path)


def test_a_region_of_a_tensor_is_read_alone(tmp_path: Path) -> None:
    path, saved = tmp_path / "model.pt", _trained()
    torch.save(saved, path)
    for name in ("one", "turned", "part"):
        region = reshard.read_tensor(path, f"views.{name}", (slice(1, 2), slice(1, 3)))
        assert torch.equal(region, saved["views"][name][1:2, 1:3])


def test_only_the_value_that_needs_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.ones(2), "price": decimal.Decimal(3), "list": [1, 2]}, path)
    with pytest.raises(UnsafeValueError, match=r"'price'.*decimal\.Decimal.*allow_pickle=True"):
        reshard.read_state_dict(path)
    assert reshard.read_state_dict(path, keys={"list"}) == {"list": [1, 2]}
    whole = reshard.read_state_dict(path, allow_pickle=True)
    assert whole["price"] == decimal.Decimal(3)
    assert torch.equal(whole["weight"], torch.ones(2))


@pytest.mark.parametrize(
    "thing", [torch.ones(2), [torch.ones(2)], 5, {5: torch.ones(2)}, nn.Linear(2, 2)]
)
def test_what_is_not_a_state_dict_is_refused(tmp_path: Path, thing: Any) -> None:
    path = tmp_path / "model.pt"
    torch.save(thing, path)
    with pytest.raises(UnsupportedFormatError, match=r"model\.pt.*torch\.load"):
        reshard.read_state_dict(path)


def test_sparse_tensors_need_code(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"sparse": torch.eye(3).to_sparse(), "dense": torch.ones(2)}, path)
    with pytest.raises(UnsafeValueError, match="'sparse'"):
        reshard.read_state_dict(path)
    assert torch.equal(reshard.read_tensor(path, "dense"), torch.ones(2))


def test_a_big_endian_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    numbers = torch.arange(5.0)
    record = dcp_files.torch_file({"numbers": numbers, "bytes": torch.arange(3).byte()})
    swapped = bytes(numbers.view(torch.uint8).reshape(5, 4).flip(1).flatten().tolist())
    record = dcp_files.with_member(record, "byteorder", b"big")
    path.write_bytes(dcp_files.with_member(record, "data/0", swapped))
    found = reshard.read_state_dict(path)
    assert torch.equal(found["numbers"], numbers)
    assert torch.equal(found["bytes"], torch.arange(3).byte())

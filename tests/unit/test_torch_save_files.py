"""Files of torch.save, read like checkpoints."""

from __future__ import annotations

import collections
import decimal
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import reshard
from reshard.api import (
    CorruptCheckpointError,
    MissingKeyError,
    UnsafeValueError,
    UnsupportedFormatError,
)
from reshard.format.torch_files import decode_stored
from support import dcp_files

_ONES = torch.ones(2)


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


_LAYOUTS = [
    torch.Tensor.to_sparse_coo,
    torch.Tensor.to_sparse_csr,
    torch.Tensor.to_sparse_csc,
    lambda dense: dense.to_sparse_bsr(2),
    lambda dense: dense.to_sparse_bsc(2),
]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor")
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_sparse_tensors_come_back_in_their_layout(tmp_path: Path, layout: Any) -> None:
    path, sparse = tmp_path / "state.pt", layout(torch.eye(4, dtype=torch.bfloat16) * 3)
    torch.save({"a": sparse, "in": {"tuple": (nn.Parameter(sparse), 1)}, "dense": _ONES}, path)
    reshard.convert(path, tmp_path / "ours", "reshard")
    reshard.convert(tmp_path / "ours", tmp_path / "again.pt", "torch")
    for place in (path, tmp_path / "ours", tmp_path / "again.pt"):
        found = reshard.read_state_dict(place)
        for each in (found["a"], found["in"]["tuple"][0]):
            assert (each.layout, each.dtype) == (sparse.layout, sparse.dtype)
            assert torch.equal(each.to_dense(), sparse.to_dense())
        assert torch.equal(reshard.read_tensor(place, "dense"), _ONES)
    assert torch.load(tmp_path / "again.pt", weights_only=True)["a"].layout is sparse.layout


def test_a_sparse_tensor_that_does_not_add_up_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    indices = torch.tensor([[0, 7]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(2), (8,), check_invariants=True)
    torch.save({"a": sparse, "b": _ONES}, path)
    # The last index, 7, becomes one beyond the end.
    path.write_bytes(path.read_bytes().replace(bytes([7, 0, 0, 0, 0, 0, 0, 0]), b"\x08" + bytes(7)))
    with pytest.raises(CorruptCheckpointError, match=r"'a' is a malformed sparse tensor: size"):
        reshard.read_state_dict(path)
    with pytest.raises(CorruptCheckpointError, match=r"'v' is a malformed sparse tensor: size"):
        decode_stored("v", path.read_bytes(), allow_pickle=False)
    assert torch.equal(reshard.read_tensor(path, "b"), _ONES)


def test_tensors_without_data_come_back_without(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"a": torch.empty(4, 2, dtype=torch.half, device="meta").t(), "b": _ONES}, path)
    found = reshard.read_state_dict(path)
    assert (found["a"].device.type, found["a"].dtype) == ("meta", torch.half)
    assert (found["a"].shape, found["a"].stride()) == ((2, 4), (1, 2))
    assert torch.equal(found["b"], _ONES)


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_only_the_quantised_tensor_of_a_file_needs_code(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    quantised = torch.quantize_per_tensor(torch.eye(2), 0.5, 1, torch.qint8)
    torch.save({"q": quantised, "b": _ONES, "n": 3}, path)
    with pytest.raises(UnsafeValueError, match=r"'q'.*quantised tensor.*allow_pickle=True"):
        reshard.read_state_dict(path)
    assert torch.equal(reshard.read_state_dict(path, keys=["b", "n"])["b"], _ONES)
    assert torch.equal(
        reshard.read_state_dict(path, allow_pickle=True)["q"].int_repr(), quantised.int_repr()
    )


@pytest.mark.filterwarnings("ignore:torch.quantize_per", "ignore:torch.distributed is disabled")
def test_a_quantised_tensor_of_dcp_is_a_value(tmp_path: Path) -> None:
    quantised = torch.quantize_per_tensor(torch.eye(2), 0.5, 1, torch.qint8)
    dcp.save({"q": quantised, "b": _ONES}, checkpoint_id=tmp_path, no_dist=True)
    found = reshard.read_state_dict(tmp_path)
    assert torch.equal(found["q"].int_repr(), quantised.int_repr())
    assert found["q"].q_scale() == 0.5
    assert torch.equal(found["b"], _ONES)


@pytest.mark.filterwarnings("ignore:torch.quantize_per", "ignore:torch.distributed is disabled")
@pytest.mark.parametrize("format", ["reshard", "dcp"])
def test_saved_tensors_that_are_not_dense_need_no_pickle(tmp_path: Path, format: Any) -> None:
    sparse = torch.eye(3).to_sparse()
    quantised = torch.quantize_per_tensor(torch.eye(2), 0.5, 1, torch.qint8)
    state = {"s": sparse, "q": quantised, "b": _ONES}
    reshard.save(state, checkpoint_id=tmp_path, no_dist=True, format=format)
    found = reshard.read_state_dict(tmp_path)
    assert torch.equal(found["s"].to_dense(), torch.eye(3))
    assert torch.equal(found["q"].dequantize(), torch.eye(2))
    if format == "dcp":
        target = {"s": sparse * 0, "q": quantised, "b": torch.zeros(2)}
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(target["s"].to_dense(), torch.eye(3))


def test_a_tensor_in_a_pickle_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        # Not by torch.save: the storage is within the pickle, and loaded by a function.
        archive.writestr("archive/data.pkl", pickle.dumps({"a": _ONES, "n": 3}, protocol=2))
        archive.writestr("archive/version", "3\n")
    (tmp_path / "state.pt").write_bytes(inner.getvalue())
    with pytest.raises(UnsafeValueError, match=r"'a'.*_load_from_bytes.*allow_pickle=True"):
        reshard.read_state_dict(tmp_path / "state.pt")
    assert reshard.read_state_dict(tmp_path / "state.pt", keys=["n"]) == {"n": 3}


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

"""reshard.convert into a file of torch.save, and into a checkpoint of DCP."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api import (
    CheckpointException,
    CheckpointExistsError,
    CorruptCheckpointError,
    UnsafeValueError,
    UnsupportedFormatError,
)
from reshard.checkpoint.stored_tensors import StoredTensors
from reshard.convert import copying
from reshard.convert.drafts import new_token
from reshard.format.values import OpaqueValue
from reshard.planning.columns import DTYPES
from support.dcp import load_with_dcp, read_with_dcp
from support.ranks import run_alone
from support.samples import SHAPES, same_bits, sample
from support.subclasses import Scaled


def save(folder: Path, state: dict[str, Any]) -> Path:
    reshard.save(state, checkpoint_id=folder / "saved", no_dist=True)
    return folder / "saved"


def to_torch(source: Path, target: Path, **options: Any) -> Any:
    """What torch.load finds in the file, which other programs must be able to read as well."""
    reshard.convert(source, target, "torch", no_dist=True, **options)
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
    return torch.load(target, weights_only=True)


@pytest.mark.parametrize("whole_bytes", [32 << 20, 1000], ids=["at once", "in pieces"])
def test_tensors_of_every_shape_have_the_same_bits(
    whole_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_WHOLE_BYTES", whole_bytes)
    state = {name: sample(name) for name in SHAPES}

    found = to_torch(save(tmp_path, state), tmp_path / "model.pt")

    assert list(found) == list(state)
    assert [name for name in state if not same_bits(found[name], state[name])] == []


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_that_torch_can_save_has_the_same_bits(tmp_path: Path) -> None:
    state, refused = {}, 0
    for dtype in DTYPES:
        name = str(dtype)
        if "qint" in name or "quint" in name:
            continue
        noise = torch.arange(1, 1 + 4 * dtype.itemsize, dtype=torch.uint8)
        state[name] = (noise % 2 if dtype is torch.bool else noise).view(dtype)
    place = save(tmp_path, state)
    small = "torch.*int[1-7]"
    found = to_torch(place, tmp_path / "model.pt", exclude=small)

    assert len(found) > 25
    assert [name for name in found if not same_bits(found[name], state[name])] == []
    for name in sorted(state.keys() - found.keys()):
        with pytest.raises(UnsupportedFormatError, match=f"'{name}'"):
            to_torch(place, tmp_path / "other.pt", keys=name)
        refused += 1
    assert refused == 14
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "saved"]


def nested() -> dict[str, Any]:
    weight = torch.randn(4, 3)
    return {
        "step": 5,
        "model": {"head": weight, "bias": torch.randn(3), "embedding": weight},
        "optimizer": {"state": {0: {"moments": [torch.ones(2)]}}, "empty": {}},
        "values": [1, "two", {"three": (4, None)}],
    }


def test_a_nested_state_dict_comes_back_with_its_order_and_its_ties(tmp_path: Path) -> None:
    state = nested()
    place = save(tmp_path, state)

    found = to_torch(place, tmp_path / "model.pt")

    assert list(found) == list(state)
    assert list(found["model"]) == list(state["model"])
    assert found["model"]["head"] is found["model"]["embedding"]
    assert torch.equal(found["model"]["head"], state["model"]["head"])
    assert torch.equal(found["optimizer"]["state"][0]["moments"][0], torch.ones(2))
    assert found["optimizer"]["empty"] == {}
    assert found["values"] == state["values"]
    assert (tmp_path / "model.pt").stat().st_size < 5000


def test_tensors_within_values_are_written_too(tmp_path: Path) -> None:
    value = OpaqueValue({"first": torch.arange(3), "second": torch.arange(4.0), "none": None})
    place = save(tmp_path, {"a": torch.ones(2), "value": value, "z": torch.zeros(3)})

    found = to_torch(place, tmp_path / "model.pt")

    assert found["a"].tolist() == [1.0, 1.0]
    assert found["z"].tolist() == [0.0, 0.0, 0.0]
    (inner,) = found["value"]
    assert inner["first"].tolist() == [0, 1, 2]
    assert inner["second"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_names_are_chosen_and_changed_and_tensors_cast(tmp_path: Path) -> None:
    place = save(tmp_path, nested())

    found = to_torch(
        place, tmp_path / "model.pt", keys="model", rename={"model": ""}, dtype="bfloat16"
    )

    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(
        ["head", "bias", "embedding"], torch.bfloat16
    )


def test_a_pickled_value_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    place = save(tmp_path, {"odd": Path, "w": torch.ones(2)})

    with pytest.raises(UnsafeValueError, match="'odd'"):
        reshard.convert(place, tmp_path / "model.pt", "torch", no_dist=True)
    assert not (tmp_path / "model.pt").exists()
    reshard.convert(place, tmp_path / "model.pt", "torch", no_dist=True, allow_pickle=True)
    assert torch.load(tmp_path / "model.pt", weights_only=False)["odd"] is Path


def test_an_older_file_is_replaced_only_if_that_is_wanted(tmp_path: Path) -> None:
    place = save(tmp_path, {"w": torch.ones(2)})
    target = tmp_path / "model.pt"
    target.write_bytes(b"older")

    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        to_torch(place, target)
    assert target.read_bytes() == b"older"
    assert torch.equal(to_torch(place, target, overwrite=True)["w"], torch.ones(2))


def test_a_place_where_no_file_can_be_is_refused(tmp_path: Path) -> None:
    place = save(tmp_path, {"w": torch.ones(2)})

    with pytest.raises(CheckpointExistsError, match="is a directory"):
        to_torch(place, tmp_path)
    with pytest.raises(CheckpointException, match="no directory"):
        to_torch(place, tmp_path / "none" / "model.pt")


def test_an_interrupt_leaves_nothing_behind_and_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = save(tmp_path, {str(i): torch.full((100,), i) for i in range(4)})
    target = tmp_path / "model.pt"
    target.write_bytes(b"older")
    read, calls = StoredTensors.read, []

    def interrupted(self: StoredTensors, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        read(self, *args)

    monkeypatch.setattr(StoredTensors, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        to_torch(place, target, overwrite=True)

    assert target.read_bytes() == b"older"
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "saved"]


def test_what_a_killed_export_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    place = save(tmp_path, {"w": torch.ones(2)})
    machine = new_token().split(".")[1].split("-")[0]
    dead = tmp_path / f".0123abcd.{machine}-999999999-1.partial"
    elsewhere = tmp_path / ".0123abcd.00000000-1-1.partial"
    for folder in (dead, elsewhere):
        folder.mkdir()
        (folder / "model.pt").touch()

    to_torch(place, tmp_path / "model.pt")

    assert not dead.exists()
    assert elsewhere.exists()


def test_damage_is_found_on_the_way_and_nothing_is_published(tmp_path: Path) -> None:
    place = save(tmp_path, {"w": torch.randn(50, 40)})
    file = next(place.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)

    with pytest.raises(CorruptCheckpointError, match="'w'"):
        to_torch(place, tmp_path / "model.pt")
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_a_tensor_that_consists_of_others_is_refused_by_name(format: Any, tmp_path: Path) -> None:
    scaled = Scaled(torch.ones(3), torch.ones(1))
    place = save(tmp_path, {"m": {"scaled": scaled, "w": torch.ones(2)}})

    with pytest.raises(UnsupportedFormatError, match=r"'m.scaled' .* exclude='m.scaled.\*'"):
        reshard.convert(place, tmp_path / "out", format, no_dist=True)
    assert os.listdir(tmp_path) == ["saved"]
    reshard.convert(place, tmp_path / "out", format, no_dist=True, exclude="m.scaled.*")


@pytest.mark.parametrize("source", ["saved", "model.safetensors"])
def test_any_checkpoint_becomes_one_that_dcp_loads(source: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"model.a": torch.randn(5, 3), "model.b": torch.arange(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    save(tmp_path, {"model": {"a": tensors["model.a"], "b": tensors["model.b"]}, "odd": Path})

    reshard.convert(tmp_path / source, tmp_path / "dcp", "dcp", no_dist=True)

    found = {"model": {"a": torch.zeros(5, 3), "b": torch.zeros(4, dtype=torch.int64)}}
    load_with_dcp(found, tmp_path / "dcp", no_dist=True)
    assert torch.equal(found["model"]["a"], tensors["model.a"])
    assert torch.equal(found["model"]["b"], tensors["model.b"])
    if source == "saved":
        assert read_with_dcp(tmp_path / "dcp")["odd"] is Path


def peak_of_an_export(folder: str) -> int:
    """How many bytes of memory an export took at most, beyond what was there before."""
    # Small, so that few tensors show whether there is a limit.
    copying._WHOLE_BYTES = 1 << 20
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water_mark()
    reshard.convert(f"{folder}/saved", f"{folder}/model.pt", "torch", no_dist=True)
    return _high_water_mark() - before


def _high_water_mark() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    state = {f"layer {n}": torch.full((24 << 20,), n, dtype=torch.uint8) for n in range(10)}
    save(tmp_path, state)

    peak = run_alone(peak_of_an_export, str(tmp_path))

    assert peak < 100 << 20
    found = torch.load(tmp_path / "model.pt", mmap=True, weights_only=True)
    assert found["layer 7"].unique().tolist() == [7]

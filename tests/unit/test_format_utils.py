"""Conversion from and to torch.save, as DCP's users call it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reshard
from reshard.api import CheckpointException, MissingKeyError, UnsafeValueError
from reshard.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    _main,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from support.dcp import read_with_dcp
from support.dcp_files import Bomb
from support.samples import SHAPES, same_bits, sample


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_checkpoint_becomes_a_file_that_torch_loads(tmp_path: Path) -> None:
    state = model().state_dict()
    reshard.save({"model": state, "step": 3}, checkpoint_id=tmp_path / "step", no_dist=True)

    dcp_to_torch_save(tmp_path / "step", tmp_path / "model.pt")
    dcp_to_torch_save(tmp_path / "step", tmp_path / "model.pt")

    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert same_state(found["model"], state)
    assert found["step"] == 3


def test_a_checkpoint_of_dcp_becomes_a_file_that_torch_loads(tmp_path: Path) -> None:
    state = {name: sample(name) for name in SHAPES}
    state["nested"] = {"list": [torch.ones(2), {"text": "é"}], "pair": (1, torch.zeros(2))}  # type: ignore[assignment]
    import torch.distributed.checkpoint as dcp

    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "step", no_dist=True)
    dcp_to_torch_save(tmp_path / "step", tmp_path / "model.pt")

    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert [name for name in SHAPES if not same_bits(found[name], state[name])] == []
    assert found["nested"]["list"][0].tolist() == [1.0, 1.0]
    assert found["nested"]["list"][1] == {"text": "é"}
    assert found["nested"]["pair"][1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("form", ["reshard", "dcp"])
def test_a_file_becomes_a_checkpoint(form: Any, tmp_path: Path) -> None:
    tied = torch.randn(3, 4)
    state = {name: sample(name) for name in SHAPES}
    torch.save(
        {"model": {**state, "tied": tied, "head": tied, "view": tied[1:, ::2]}, "step": [3, None]},
        tmp_path / "model.pt",
    )

    torch_save_to_dcp(tmp_path / "model.pt", tmp_path / "step", format=form)

    read = read_with_dcp if form == "dcp" else reshard.read_state_dict
    found = read(tmp_path / "step")
    assert [name for name in SHAPES if not same_bits(found["model"][name], state[name])] == []
    assert torch.equal(found["model"]["tied"], tied)
    assert torch.equal(found["model"]["head"], tied)
    assert torch.equal(found["model"]["view"], tied[1:, ::2])
    assert found["step"] == [3, None]
    written = sum(path.stat().st_size for path in (tmp_path / "step").iterdir())
    assert written < 2 * (tmp_path / "model.pt").stat().st_size


def test_a_round_trip_through_all_formats_keeps_every_bit(tmp_path: Path) -> None:
    state = {name: sample(name) for name in SHAPES}
    torch.save(state, tmp_path / "first.pt")

    torch_save_to_dcp(tmp_path / "first.pt", tmp_path / "theirs", format="dcp")
    reshard.convert(tmp_path / "theirs", tmp_path / "ours", "reshard", no_dist=True)
    reshard.convert(tmp_path / "ours", tmp_path / "hf", "huggingface", no_dist=True)
    dcp_to_torch_save(tmp_path / "hf", tmp_path / "last.pt")

    found = torch.load(tmp_path / "last.pt", weights_only=True)
    assert found.keys() == state.keys()
    assert [name for name in state if not same_bits(found[name], state[name])] == []


def test_a_hostile_file_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    torch.save({"bomb": Bomb(tmp_path / "made"), "w": torch.ones(2)}, tmp_path / "model.pt")

    with pytest.raises(UnsafeValueError, match="'bomb'"):
        torch_save_to_dcp(tmp_path / "model.pt", tmp_path / "step")
    assert os.listdir(tmp_path) == ["model.pt"]
    torch_save_to_dcp(tmp_path / "model.pt", tmp_path / "step", allow_pickle=True)
    assert (tmp_path / "made").exists()


def test_a_file_is_loaded_straight_into_a_model(tmp_path: Path) -> None:
    saved, loaded = model(), model()
    torch.save({"model": saved.state_dict(), "step": 3}, tmp_path / "model.pt")
    for parameter in loaded.parameters():
        parameter.data.zero_()
    state = {"model": loaded.state_dict(), "step": 0}

    reshard.load(
        state,
        storage_reader=BroadcastingTorchSaveReader(),
        planner=DynamicMetaLoadPlanner(),
        checkpoint_id=tmp_path / "model.pt",
        no_dist=True,
    )

    assert same_state(loaded.state_dict(), saved.state_dict())
    assert state["step"] == 3


def test_what_the_file_lacks_is_an_error_that_names_it(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    reader = BroadcastingTorchSaveReader(tmp_path / "model.pt")

    with pytest.raises(MissingKeyError, match=r"Missing key .*: v"):
        reshard.load(
            {"v": torch.zeros(2)},
            storage_reader=reader,
            planner=DynamicMetaLoadPlanner(),
            no_dist=True,
        )


def test_a_reader_without_a_file_says_so(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2)}
    with pytest.raises(CheckpointException, match="pass checkpoint_id to load"):
        reshard.load(state, storage_reader=BroadcastingTorchSaveReader(), no_dist=True)
    with pytest.raises(CheckpointException, match="not a file that this rank can see"):
        reshard.load(
            state,
            storage_reader=BroadcastingTorchSaveReader(),
            checkpoint_id=tmp_path / "none.pt",
            no_dist=True,
        )
    assert not BroadcastingTorchSaveReader.validate_checkpoint_id(tmp_path / "none.pt")


def test_the_planner_makes_up_metadata_where_the_storage_has_none() -> None:
    planner = DynamicMetaLoadPlanner()
    planner.set_up_planner({"m": {"w": torch.zeros(3, 2)}}, reshard.Metadata({}), True)
    (item,) = planner.create_local_plan().items
    assert item.storage_index.fqn == "m.w"
    assert tuple(item.lengths) == (3, 2)

    with pytest.raises(RuntimeError, match="'step' is a int"):
        planner.set_up_planner({"step": 3}, reshard.Metadata({}), True)


def test_the_program_converts_both_ways(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")

    assert _main(["torch_to_dcp", str(tmp_path / "model.pt"), str(tmp_path / "step")]) == 0
    assert _main(["dcp_to_torch", str(tmp_path / "step"), str(tmp_path / "again.pt")]) == 0

    assert torch.load(tmp_path / "again.pt")["w"].tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_the_module_is_a_program(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    arguments = ["torch_to_dcp", str(tmp_path / "model.pt"), str(tmp_path / "step")]

    subprocess.run([sys.executable, "-m", "reshard.format_utils", *arguments], check=True)

    assert reshard.read_state_dict(tmp_path / "step")["w"].tolist() == [1.0, 1.0]


def test_the_program_says_why_it_did_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(["dcp_to_torch", str(tmp_path / "none"), str(tmp_path / "model.pt")]) == 1

    assert "none was not converted: there is no checkpoint" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []

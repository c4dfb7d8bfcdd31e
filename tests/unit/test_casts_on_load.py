"""Loads into tensors of another dtype: they are reported, and refused where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import reshard
from reshard.api import DtypeMismatchError
from reshard.default_planner import DefaultLoadPlanner
from support.plain_files import write_tensors

NARROW, WIDE = torch.bfloat16, torch.float32


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    state = {
        "model": {"wide": torch.ones(4), "narrow": torch.ones(4, dtype=NARROW)},
        "count": torch.tensor(7),
        "lr": 0.1,
    }
    reshard.save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def zeros(wide: torch.dtype = WIDE, narrow: torch.dtype = NARROW) -> dict[str, Any]:
    model = {"wide": torch.zeros(4, dtype=wide), "narrow": torch.zeros(4, dtype=narrow)}
    return {"model": model, "count": torch.tensor(0), "lr": 0.0}


def test_a_load_into_the_stored_dtypes_reports_no_cast(stored: Path) -> None:
    report = reshard.load(zeros(), checkpoint_id=stored, no_dist=True, dtype="same")
    assert report.casts == {}


def test_casts_up_and_down_are_reported_with_both_dtypes(stored: Path) -> None:
    state = zeros(wide=NARROW, narrow=WIDE)
    report = reshard.load(state, checkpoint_id=stored, no_dist=True)
    assert report.casts == {"model.wide": (WIDE, NARROW), "model.narrow": (NARROW, WIDE)}
    assert state["model"]["wide"].tolist() == state["model"]["narrow"].tolist() == [1.0] * 4


def test_a_cast_that_may_not_be_changes_nothing_and_says_what_to_do(stored: Path) -> None:
    state = zeros(narrow=WIDE)
    with pytest.raises(DtypeMismatchError) as raised:
        reshard.load(state, checkpoint_id=stored, no_dist=True, dtype="same")
    text = str(raised.value)
    assert "'model.narrow' is stored as torch.bfloat16 and would be loaded into" in text
    assert 'load with dtype="cast"' in text
    assert state["model"]["wide"].tolist() == [0.0] * 4
    assert state["lr"] == 0.0


def test_only_the_first_few_of_many_casts_are_named(tmp_path: Path) -> None:
    names = [f"w{i}" for i in range(9)]
    reshard.save({n: torch.ones(1) for n in names}, checkpoint_id=tmp_path, no_dist=True)
    state = {n: torch.ones(1, dtype=NARROW) for n in names}
    with pytest.raises(DtypeMismatchError, match=r"'w4'[^']*\n4 more would be cast\."):
        reshard.load(state, checkpoint_id=tmp_path, no_dist=True, dtype="same")


def test_what_is_excluded_or_renamed_is_judged_by_the_names_of_the_state_dict(
    stored: Path,
) -> None:
    state = {"m": zeros(wide=NARROW, narrow=WIDE)["model"]}
    report = reshard.load(
        state, checkpoint_id=stored, no_dist=True, rename={"model": "m"}, exclude=["m.wide"]
    )
    assert report.casts == {"m.narrow": (NARROW, WIDE)}


def test_names_that_are_tied_to_a_stored_one_are_cast_with_it(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"embed.weight": torch.ones(3, 2)})
    embed = nn.Embedding(3, 2, dtype=NARROW)
    state = {"embed.weight": embed.weight, "head.weight": embed.weight}
    report = reshard.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert report.casts == dict.fromkeys(["embed.weight", "head.weight"], (WIDE, NARROW))


def test_tensors_without_memory_are_judged_by_their_dtype_too(stored: Path) -> None:
    state = {"model": {"wide": torch.empty(4, dtype=NARROW, device="meta")}}
    report = reshard.load(state, checkpoint_id=stored, no_dist=True, assign=True)
    assert report.casts == {"model.wide": (WIDE, NARROW)}
    assert state["model"]["wide"].tolist() == [1.0] * 4


def test_casts_of_the_load_before_are_forgotten_by_a_planner_that_is_used_again(
    stored: Path,
) -> None:
    planner = DefaultLoadPlanner()
    state = zeros(wide=NARROW)
    assert reshard.load(state, checkpoint_id=stored, no_dist=True, planner=planner).casts
    assert not reshard.load(zeros(), checkpoint_id=stored, no_dist=True, planner=planner).casts


class Scaling(DefaultLoadPlanner):
    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


def test_a_planner_that_fills_tensors_itself_cannot_be_held_to_dtypes(stored: Path) -> None:
    def load(**options: Any) -> reshard.LoadReport:
        return reshard.load(
            zeros(NARROW), checkpoint_id=stored, no_dist=True, planner=Scaling(), **options
        )

    assert load().casts == {}
    with pytest.raises(ValueError, match="unlike Scaling: load with dtype='cast'"):
        load(dtype="same")


def test_another_word_for_dtype_is_refused(stored: Path) -> None:
    with pytest.raises(ValueError, match="dtype is 'cast' or 'same', not 'keep'"):
        reshard.load(zeros(), checkpoint_id=stored, no_dist=True, dtype="keep")  # type: ignore[arg-type]


def test_quantised_weights_are_no_casts_of_the_dtype_that_their_reader_makes(
    tmp_path: Path,
) -> None:
    tensors = {
        "a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.full((1, 1), 2.0),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    reader = reshard.QuantizedHuggingFaceStorageReader(tmp_path, target_dtype=NARROW)
    state = {"a.weight": torch.zeros(4, 4, dtype=NARROW)}
    report = reshard.load(state, storage_reader=reader, no_dist=True, dtype="same")
    assert report.casts == {}
    state = {"a.weight": torch.zeros(4, 4)}
    report = reshard.load(state, storage_reader=reader, no_dist=True)
    assert report.casts == {"a.weight": (NARROW, WIDE)}

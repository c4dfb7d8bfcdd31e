"""Receipts: what a load made of every value, in one process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import reshard
from reshard.api import MissingKeyError, NotRestoredError
from reshard.default_planner import DefaultLoadPlanner
from reshard.operations.receipts import (
    LoadReceipt,
    ReceiptLine,
    make_receipt,
    merge_receipts,
)
from reshard.training import TrainState
from support.plain_files import write_tensors


def save(state: dict[str, Any], place: Path) -> None:
    reshard.save(state, checkpoint_id=place, no_dist=True)


def receipt_of(state: dict[str, Any], place: Path, **options: Any) -> LoadReceipt:
    return reshard.load(state, checkpoint_id=place, no_dist=True, **options).receipt()


def fates(receipt: LoadReceipt) -> dict[str, str]:
    return {name: line.fate for name, line in receipt.others.items()}


# What is told of a load


def test_a_load_of_everything_takes_one_line(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(2), "b": torch.ones(2)}, "step": 3}
    save(state, tmp_path)
    receipt = receipt_of(state, tmp_path, strict="receipt")
    assert receipt.all_restored
    assert str(receipt) == "all 3 values restored"
    assert receipt.totals_by_group == {"model": {"restored": 2}, "step": {"restored": 1}}


def test_what_is_not_restored_is_told_worst_first(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(2), "b": torch.ones(2), "c": 1}, "lr": 0.1}, tmp_path)
    state = {
        "model": {"a": torch.ones(2, dtype=torch.float64), "b": torch.zeros(2), "new": 0},
        "step": 5,
    }
    receipt = receipt_of(state, tmp_path, strict=False, exclude=["model.b"])
    assert state["step"] == 5
    assert str(receipt).splitlines() == [
        "0 of 4 values restored: 2 missing, 1 unused, 1 cast, 1 excluded; 1 more in the checkpoint",
        "group   missing    unused      cast  excluded  restored",
        "model         1         1         1         1         0",
        "step          1         0         0         0         0",
        "missing   model.new  not in the checkpoint, left as it was",
        "missing   step       not in the checkpoint, left as it was",
        "unused    model.c    in the checkpoint, but nothing here takes it",
        "cast      model.a    float32 -> float64",
        "excluded  model.b    left as it was, as asked for",
    ]


def test_the_moments_that_a_new_optimizer_of_torch_does_not_take_are_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save({"model": model, "optim": optimizer}, tmp_path)
    receipt = receipt_of({"model": model, "optim": optim.AdamW(model.parameters())}, tmp_path)
    assert receipt.others["optim.state.0.exp_avg"].fate == "unused"
    assert receipt.totals_by_group["model"] == {"restored": 2}


def test_names_that_are_filled_with_a_tied_one_are_restored(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"embed.weight": torch.ones(3, 2)})
    weight = torch.zeros(3, 2)
    receipt = receipt_of({"embed.weight": weight, "head.weight": weight}, tmp_path)
    assert receipt.restored == ("embed.weight", "head.weight")
    assert receipt.all_restored


def test_a_value_that_was_saved_by_more_ranks_is_dropped_and_one_that_was_not_saved_is_missing(
    tmp_path: Path,
) -> None:
    stored = {"rng": {f"rank-{rank}-of-2": rank for rank in range(2)}}
    save(stored, tmp_path)
    state = {"rng": reshard.per_rank(7, "drop"), "loader": reshard.per_rank(8, "drop")}
    report = reshard.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert (report.dropped, report.missing) == (["rng"], ["loader"])
    assert fates(report.receipt()) == {"loader": "missing", "rng": "dropped"}
    assert state == {"rng": 7, "loader": 8}


# The whole of a training run


def train(*, groups: int = 1, dtype: torch.dtype = torch.float32) -> TrainState:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype)
    parts = [{"params": list(layer.parameters())} for layer in model][:groups]
    optimizer = optim.AdamW(parts, lr=0.1)
    model(torch.ones(2, dtype=dtype)).sum().backward()
    optimizer.step()
    return TrainState(model, optimizer, lr_scheduler.StepLR(optimizer, 1))


def test_every_part_of_a_training_run_is_in_the_receipt(tmp_path: Path) -> None:
    save({"train": train()}, tmp_path)
    at_save = torch.get_rng_state()
    random.random(), np.random.random(), torch.rand(1)
    receipt = receipt_of({"train": train()}, tmp_path, strict="receipt")
    assert receipt.all_restored
    assert torch.equal(torch.get_rng_state(), at_save)
    names = {
        "train.model.0.weight",
        "train.optimizer.state.0.weight.exp_avg",
        "train.scheduler.0",
        "train.rng.torch",
        "train.rng.numpy",
        "train.rng.python",
    }
    assert names <= {*receipt.restored}
    parts = {"train.model", "train.optimizer", "train.scheduler", "train.rng"}
    assert receipt.totals_by_group.keys() == parts


def test_a_group_that_the_checkpoint_does_not_have_is_missing_with_its_moments(
    tmp_path: Path,
) -> None:
    save({"train": train(groups=1)}, tmp_path)
    report = reshard.load({"train": train(groups=2)}, checkpoint_id=tmp_path, no_dist=True)
    moments = ("exp_avg", "exp_avg_sq", "step")
    lost = {f"train.optimizer.state.1.{p}.{m}" for p in ("weight", "bias") for m in moments}
    found = fates(report.receipt())
    assert lost <= found.keys()
    assert "train.optimizer.groups.1.weight and 1 others" in found
    assert {*found.values()} == {"missing"}
    assert report.missing
    with pytest.raises(NotRestoredError, match="Nothing was loaded"):
        reshard.load(
            {"train": train(groups=2)}, checkpoint_id=tmp_path, no_dist=True, strict="receipt"
        )


def test_a_group_of_an_optimizer_without_state_is_found_missing_when_all_else_is_loaded(
    tmp_path: Path,
) -> None:
    save({"train": train(groups=1)}, tmp_path)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fresh = optim.AdamW([{"params": list(layer.parameters())} for layer in model])
    state = {"train": TrainState(model, fresh)}
    with pytest.raises(NotRestoredError, match="All else was loaded") as raised:
        reshard.load(state, checkpoint_id=tmp_path, no_dist=True, strict="receipt")
    assert "train.optimizer.state.1.weight" in str(raised.value)


def test_a_parameter_that_never_had_state_is_restored_without_any(tmp_path: Path) -> None:
    def unused_layer() -> TrainState:
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        optimizer = optim.AdamW(model.parameters())
        model[0](torch.ones(2)).sum().backward()
        optimizer.step()
        return TrainState(model, optimizer)

    save({"train": unused_layer()}, tmp_path)
    assert receipt_of({"train": unused_layer()}, tmp_path).all_restored


def test_an_optimizer_that_is_excluded_is_not_missing(tmp_path: Path) -> None:
    save({"train": train()}, tmp_path)
    receipt = receipt_of({"train": train()}, tmp_path, exclude=["train.optimizer.*"])
    assert receipt.totals_by_group["train.optimizer"].keys() == {"excluded"}
    assert {*fates(receipt).values()} == {"excluded"}
    group = next(name.split(".")[3] for name in receipt.others if ".groups." in name)
    receipt = receipt_of(
        {"train": train()}, tmp_path, exclude=[f"train.optimizer.groups.{group}.*"]
    )
    assert {*fates(receipt).values()} == {"excluded"}


def test_a_part_that_is_excluded_is_not_missing_where_nobody_saved_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save({"train": TrainState(model, rng=False)}, tmp_path)
    receipt = receipt_of({"train": TrainState(model)}, tmp_path, exclude=["train.rng*"])
    assert fates(receipt) == {"train.rng": "excluded"}


def test_parts_that_nobody_saved_are_missing_and_the_run_goes_on(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save({"train": TrainState(model, rng=False)}, tmp_path)
    state = TrainState(model, optim.AdamW(model.parameters()), extra={"ema": 1})
    receipt = receipt_of({"train": state}, tmp_path)
    assert fates(receipt) == dict.fromkeys(
        ["train.extra", "train.optimizer", "train.rng"], "missing"
    )
    assert "train.rng" in receipt.totals_by_group


def test_a_run_in_another_precision_is_told_to_be_cast_moments_included(tmp_path: Path) -> None:
    save({"train": train()}, tmp_path)
    receipt = receipt_of({"train": train(dtype=torch.bfloat16)}, tmp_path)
    line = ReceiptLine("cast", "float32", "bfloat16")
    assert receipt.others["train.model.0.weight"] == line
    assert receipt.others["train.optimizer.state.0.weight.exp_avg"] == line


# strict="receipt"


@pytest.mark.parametrize(
    ("state", "options", "line"),
    [
        ({"a": torch.zeros(2, dtype=torch.float64)}, {}, "cast      a  float32 -> float64"),
        ({"a": torch.zeros(2), "b": 0}, {}, "missing   b  not in the checkpoint, left as it was"),
        ({"a": torch.zeros(2)}, {"exclude": "a"}, "excluded  a  left as it was, as asked for"),
    ],
    ids=["cast", "missing", "excluded"],
)
def test_anything_but_restored_is_refused_before_anything_changes(
    state: dict[str, Any], options: dict[str, Any], line: str, tmp_path: Path
) -> None:
    save({"a": torch.ones(2)}, tmp_path)
    with pytest.raises(NotRestoredError) as raised:
        receipt_of(state, tmp_path, strict="receipt", **options)
    assert line in str(raised.value)
    assert "Nothing was loaded. Make the state dict fit" in str(raised.value)
    assert state["a"].tolist() == [0.0, 0.0]


def test_names_of_which_none_match_are_told_how_they_differ(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(2), "b": torch.ones(2)}}, tmp_path)
    with pytest.raises(MissingKeyError, match="Pass rename="):
        receipt_of({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, strict="receipt")


class Scaling(DefaultLoadPlanner):
    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


def test_a_planner_that_fills_tensors_itself_gives_no_strict_receipt(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path)
    with pytest.raises(ValueError, match="strict='receipt' needs a planner"):
        receipt_of({"a": torch.ones(2)}, tmp_path, strict="receipt", planner=Scaling())


# Receipts of several ranks, and as text


def test_a_value_is_restored_if_it_is_on_all_ranks_that_hold_it() -> None:
    first = make_receipt(["m.a", "m.b"], {}, groups=["m"])
    second = make_receipt(["m.c"], {"m.b": ReceiptLine("missing")}, groups=["m"])
    merged = merge_receipts([first, second, first])
    assert merged.restored == ("m.a", "m.c")
    assert merged.others == {"m.b": ReceiptLine("missing", ranks=(1,))}
    assert merged.ranks == 3
    assert str(merged).endswith("m.b  not in the checkpoint, left as it was (rank 1)")


def test_of_several_fates_the_worst_is_told_and_who_agrees_needs_no_ranks() -> None:
    cast = ReceiptLine("cast", "float32", "bfloat16")
    one = make_receipt([], {"a": cast, "b": cast})
    other = make_receipt([], {"a": cast, "b": ReceiptLine("missing")})
    merged = merge_receipts([one, other])
    assert merged.others == {"b": ReceiptLine("missing", ranks=(1,)), "a": cast}


def test_a_receipt_comes_back_from_its_json() -> None:
    lines = {"m.b": ReceiptLine("cast", "float32", "bfloat16", (1,)), "x": ReceiptLine("missing")}
    receipt = make_receipt(["m.a", "step"], lines, ["m.old", "other"], ["m"])
    text = receipt.to_json(indent=2)
    again = LoadReceipt.from_json(text)
    assert again.to_json(indent=2) == text
    assert (again.restored, dict(again.others)) == (receipt.restored, dict(receipt.others))
    read = json.loads(text)
    assert read["totals"] == {"missing": 1, "unused": 1, "cast": 1, "restored": 2}
    assert read["not_restored"]["m.b"] == {
        "fate": "cast",
        "from": "float32",
        "to": "bfloat16",
        "ranks": [1],
    }
    assert read["all_restored"] is False
    assert read["unexpected"] == 1


def test_a_long_receipt_is_cut() -> None:
    receipt = make_receipt([], {f"w{i:02}": ReceiptLine("missing") for i in range(30)})
    assert receipt.to_text(most_lines=3).endswith("left as it was\n... and 27 more")


def test_values_without_a_group_are_grouped_by_the_first_part_of_their_names() -> None:
    receipt = make_receipt(["a.b.w", "a.c.w", "step"], {}, groups=["a.b"])
    assert receipt.totals_by_group.keys() == {"a.b", "a", "step"}

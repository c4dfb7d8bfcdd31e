"""Receipts and casts of loads by several ranks: one receipt for all, one refusal for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from reshard.training import TrainState
from support.ranks import run_ranks

NARROW, WIDE = torch.bfloat16, torch.float32


def sharded(fill: float, dtype: torch.dtype) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.full((3, 4), fill, dtype=dtype), mesh, [Shard(0)])


def attempt(state: dict[str, Any], folder: str, **options: Any) -> tuple[str, str]:
    """The kind and text of the error of a load."""
    try:
        reshard.load(state, checkpoint_id=folder, **options)
    except reshard.CheckpointException as error:
        return type(error).__name__, str(error)
    return "", ""


# Casts


def refuse_casts(folder: str) -> Any:
    rank = dist.get_rank()
    state = {"up": sharded(1.0, NARROW), "down": sharded(1.0, WIDE), "own": torch.ones(2)}
    reshard.save(state, checkpoint_id=folder)
    # One rank alone casts this one.
    own = torch.zeros(2, dtype=NARROW if rank == 1 else WIDE)
    targets = {"up": sharded(0.0, WIDE), "down": sharded(0.0, NARROW), "own": own}
    only_own = {"own": torch.zeros_like(own)}
    errors = [
        attempt(targets, folder, dtype="same"),
        attempt(only_own, folder, dtype="same"),
        attempt({"own": torch.zeros_like(own)}, folder, strict="receipt"),
    ]
    untouched = [targets["up"].to_local().sum().item(), only_own["own"].sum().item()]
    report = reshard.load(targets, checkpoint_id=folder, receipt=True)
    sums = [targets[name].to_local().sum().item() for name in ("up", "down")]
    rows = targets["up"].to_local().numel()
    return errors, untouched, sums == [rows, rows], report.casts, report.receipt()


def test_casts_of_shards_are_reported_and_refused_by_all_ranks_together(tmp_path: Path) -> None:
    results = run_ranks(2, refuse_casts, str(tmp_path))
    for rank, (errors, untouched, filled, casts, receipt) in enumerate(results):
        assert [kind for kind, _ in errors] == [
            "DtypeMismatchError",
            "DtypeMismatchError",
            "NotRestoredError",
        ]
        assert (
            "'up' is stored as torch.bfloat16 and would be loaded into torch.float32"
            in (errors[0][1])
        )
        assert "'own'" in errors[1][1]
        assert "own  float32 -> bfloat16 (rank 1)" in errors[2][1]
        assert untouched == [0.0, 0.0]
        assert filled
        expected = {"up": (NARROW, WIDE), "down": (WIDE, NARROW)}
        assert casts == expected | ({"own": (WIDE, NARROW)} if rank == 1 else {})
        assert receipt == results[0][4]
        assert receipt.ranks == 2
        assert {name: line.ranks for name, line in receipt.others.items()} == {
            "down": (),
            "own": (1,),
            "up": (),
        }


# Values that ranks hold apart, and values of each


def load_stages(folder: str) -> Any:
    rank = dist.get_rank()
    stage = {f"layer{rank}": torch.ones(2), "common": torch.ones(2)}
    saved = {"model": stage, "rng": reshard.per_rank({"seed": rank}), "step": 3}
    reshard.save(saved, checkpoint_id=folder)

    def template() -> dict[str, Any]:
        own = {f"layer{rank}": torch.zeros(2), "common": torch.zeros(2)}
        return {"model": own, "rng": reshard.per_rank({"seed": -1}), "step": 0}

    whole = reshard.load(template(), checkpoint_id=folder, strict="receipt").receipt()
    own = reshard.load(template(), checkpoint_id=folder).receipt()

    def longer_template() -> dict[str, Any]:
        more = template()
        more["model"] |= {"new": torch.zeros(2)} if rank == 1 else {}
        return more

    lacking = reshard.load(
        longer_template(), checkpoint_id=folder, strict=False, receipt=True
    ).receipt()
    refusal = attempt(longer_template(), folder, strict="receipt")
    return whole, own.restored, lacking, refusal


def test_a_receipt_merges_what_ranks_hold_apart(tmp_path: Path) -> None:
    for rank, (whole, own, lacking, refusal) in enumerate(run_ranks(2, load_stages, str(tmp_path))):
        assert str(whole) == "all 5 values restored"
        assert whole.restored == (
            "model.common",
            "model.layer0",
            "model.layer1",
            "rng.seed",
            "step",
        )
        assert own == ("model.common", f"model.layer{rank}", "rng.seed", "step")
        assert {name: line.fate for name, line in lacking.others.items()} == {
            "model.new": "missing"
        }
        assert refusal[0] == "NotRestoredError"
        assert "missing   model.new  not in the checkpoint" in refusal[1]
        assert refusal[1].endswith("On ranks 0-1, in the step 'receipt'.")


def ask_for_different_things(folder: str) -> Any:
    reshard.save({"a": torch.ones(2)}, checkpoint_id=folder)
    strict: Any = "receipt" if dist.get_rank() else True
    return attempt({"a": torch.ones(2)}, folder, strict=strict)


def test_ranks_that_do_not_agree_on_a_receipt_are_told(tmp_path: Path) -> None:
    for _, text in run_ranks(2, ask_for_different_things, str(tmp_path)):
        assert "strict" in text
        assert "'receipt'" in text


# A training run


def resume(folder: str, groups: int) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = optim.AdamW([{"params": list(each.parameters())} for each in model][:groups])
    before = torch.get_rng_state()
    report = reshard.load(
        {"train": TrainState(model, optimizer)}, checkpoint_id=folder, receipt=True
    )
    return report.receipt(), torch.equal(torch.get_rng_state(), before)


def save_and_resume(folder: str) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = optim.AdamW(model[0].parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=folder)
    return resume(folder, 1)


def test_a_run_that_resumes_says_what_it_did_not_get(tmp_path: Path) -> None:
    for receipt, kept_rng in run_ranks(2, save_and_resume, str(tmp_path)):
        assert receipt.all_restored
        assert not kept_rng
        assert "train.rng.torch" in receipt.restored
    # Then on one rank, with a group more.
    receipt, kept_rng = resume(str(tmp_path), 2)
    assert kept_rng
    assert {name: line.fate for name, line in receipt.others.items()} == {
        "train.optimizer.groups.1.weight and 1 others": "missing",
        "train.optimizer.state.1.bias": "missing",
        "train.optimizer.state.1.weight": "missing",
        "train.rng": "dropped",
    }

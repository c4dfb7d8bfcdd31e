"""async_save(staging="overlap") on real ranks: what is saved is the state at the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import optim

import reshard
from reshard.state_dict_saver import AsyncSaveResponse
from reshard.training import TrainState
from support.background import both_kinds
from support.held_copies import SECONDS, HeldCopies
from support.ranks import run_ranks
from support.small_model import FORMS, adamw, losses, momentum, small_model
from support.whole import differences


def train_beside_a_copy(forms: list[str], box: str, options: dict[str, Any]) -> dict[str, Any]:
    """Where what was saved is not the state at the call; and how much was copied late."""
    found: dict[str, Any] = {}
    for form in forms:
        for make in (adamw, momentum):
            with pytest.MonkeyPatch.context() as patch:
                held = HeldCopies(patch)
                name = f"{form} with {make.__name__}"
                wrong, late = _train(form, make, Path(box) / name, held, options)
                found[name] = (wrong, late)
                held.grant(100)
                reshard.close()
    return found


def _train(
    form: str, make: Any, place: Path, held: HeldCopies, options: dict[str, Any]
) -> tuple[list[str], bool]:
    model = FORMS[form](small_model())
    optimizer: optim.Optimizer = make(model.parameters())
    losses(model, optimizer)
    state = {"train": TrainState(model, optimizer)}
    reshard.save(state, checkpoint_id=place / "expected")
    saving = reshard.async_save(state, checkpoint_id=place / "found", staging="overlap", **options)
    assert isinstance(saving, AsyncSaveResponse)
    # One backward pass more than steps, and steps that wait.
    losses(model, [])
    losses(model, optimizer)
    saving.upload_completion.result(SECONDS)
    assert optimizer in held.waits or form == "fsdp1"
    read = [reshard.read_state_dict(place / name) for name in ("found", "expected")]
    return differences(*read), bool(held.copied)


def test_training_that_goes_on_changes_nothing_of_what_ranks_save(tmp_path: Path) -> None:
    forms = ["ddp", "fsdp2", "fsdp1", "tp"]
    for found in run_ranks(2, train_beside_a_copy, forms, str(tmp_path), {}):
        assert not {name: wrong for name, (wrong, _) in found.items() if wrong}
        # FSDP1 makes new tensors for its state dict, which belong to nobody.
        late = {name for name, (_, late) in found.items() if late}
        assert late >= {name for name in found if not name.startswith("fsdp1")}


@pytest.mark.slow
@both_kinds
def test_sharded_state_is_copied_late_for_either_kind_of_save(tmp_path: Path, kind: Any) -> None:
    options = {"async_checkpointer_type": kind}
    for found in run_ranks(2, train_beside_a_copy, ["fsdp2"], str(tmp_path), options):
        assert all(late and not wrong for wrong, late in found.values())

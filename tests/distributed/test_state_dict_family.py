"""reshard.state_dict: the functions that DCP users know, end to end with save and load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor

import reshard
from reshard.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from support.ranks import run_ranks
from support.small_model import FORMS, adamw, losses, small_model
from support.whole import differences

Options = dict[str, bool]

CASES: dict[str, Options] = {
    "sharded": {},
    "offloaded": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "full on rank 0": {
        "full_state_dict": True,
        "cpu_offload": True,
        "broadcast_from_rank0": True,
    },
    "flattened": {"flatten_optimizer_state_dict": True},
}


def together(model: nn.Module, optimizer: optim.Optimizer, options: Options) -> dict[str, Any]:
    chosen = StateDictOptions(**options)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=chosen)
    return {"model": of_model, "optim": of_optimizer}


def apart(model: nn.Module, optimizer: optim.Optimizer, options: Options) -> dict[str, Any]:
    chosen = StateDictOptions(**options)
    return {
        "model": get_model_state_dict(model, options=chosen),
        "optim": get_optimizer_state_dict(model, optimizer, options=chosen),
    }


def set_together(model: Any, optimizer: Any, state: dict[str, Any], options: Options) -> None:
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=StateDictOptions(**options),
    )


def set_apart(model: Any, optimizer: Any, state: dict[str, Any], options: Options) -> None:
    chosen = StateDictOptions(**options)
    set_model_state_dict(model, state["model"], options=chosen)
    set_optimizer_state_dict(model, optimizer, state["optim"], options=chosen)


WAYS: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "together": (together, set_together),
    "apart": (apart, set_apart),
}


def trained(form: str, seed: int = 0, steps: int = 2) -> tuple[nn.Module, optim.Optimizer]:
    model = FORMS[form](small_model(seed))
    optimizer = adamw(model.parameters())
    losses(model, optimizer, steps)
    return model, optimizer


def kinds(state: dict[str, Any]) -> set[type]:
    """Of the tensors that this rank has of the model."""
    return {type(value) for value in state["model"].values()}


def save_every_case(form: str, box: Path) -> dict[str, Any]:
    found = {}
    model, optimizer = trained(form)
    for name, options in CASES.items():
        for way, (get, _) in WAYS.items():
            state = get(model, optimizer, options)
            reshard.save(state, checkpoint_id=box / f"{form}, {name}, {way}")
            found[name] = kinds(state)
    return found


def load_every_case(form: str, box: Path, source: str) -> dict[str, list[float]]:
    """What was saved in one way is loaded in the other; losses that follow."""
    found = {}
    for name, chosen in CASES.items():
        # Without a group there is nobody to hear what rank 0 says.
        options = {k: v for k, v in chosen.items() if dist.is_initialized() or "broad" not in k}
        for way, other in (("together", "apart"), ("apart", "together")):
            # With state of its own, so that nothing is right by chance.
            model, optimizer = trained(form, seed=1, steps=1)
            get, put = WAYS[other]
            if "broadcast_from_rank0" in options:
                # torch takes an empty dict, which is what the other ranks have, to mean that
                # only the optimizer is to be set, and waits for ever.
                put = set_apart
            state = get(model, optimizer, options)
            reshard.load(state, checkpoint_id=box / f"{source}, {name}, {way}", strict="exact")
            put(model, optimizer, state, options)
            found[f"{name}, {way}"] = losses(model, optimizer)
    return found


def test_every_option_goes_through_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained("plain")
    expected = losses(model, optimizer)
    plain, sharded = {torch.Tensor}, {DTensor}
    saved = [save_every_case("plain", tmp_path), *run_ranks(2, save_every_case, "ddp", tmp_path)]
    for found in saved:
        assert found["sharded"] == found["full"] == plain
    for rank, found in enumerate(run_ranks(2, save_every_case, "fsdp2", tmp_path)):
        assert (found["sharded"], found["offloaded"], found["full"]) == (sharded, sharded, plain)
        assert found["full on rank 0"] == (plain if rank == 0 else set())
    for form, source in [("fsdp2", "ddp"), ("ddp", "fsdp2"), ("fsdp2", "plain")]:
        for found in run_ranks(2, load_every_case, form, tmp_path, source):
            assert len(found) == 2 * len(CASES)
            for case, following in found.items():
                assert following == pytest.approx(expected, rel=1e-4), (form, source, case)
    for case, following in load_every_case("plain", tmp_path, "fsdp2").items():
        assert following == pytest.approx(expected, rel=1e-4), case


# Keys that are left out


def frozen(form: str, seed: int) -> tuple[nn.Module, optim.Optimizer]:
    model = small_model(seed)
    model.up.requires_grad_(False)
    wrapped = FORMS[form](model)
    optimizer = adamw([p for p in wrapped.parameters() if p.requires_grad])
    losses(wrapped, optimizer)
    return wrapped, optimizer


def values_of(model: nn.Module, part: str) -> dict[str, torch.Tensor]:
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value.clone() for name, value in found.items() if name.startswith(part)}


def leave_frozen_out(form: str, box: Path) -> dict[str, Any]:
    options = {"ignore_frozen_params": True, "strict": False}
    model, optimizer = frozen(form, seed=0)
    other, fresh = frozen(form, seed=1)
    before = values_of(other, "up")
    reshard.save(together(model, optimizer, options), checkpoint_id=box / form)
    state = together(other, fresh, options)
    reshard.load(state, checkpoint_id=box / form, strict="exact")
    set_together(other, fresh, state, options)
    return {
        "stored": sorted(reshard.read_state_dict(box / form)["model"]),
        "frozen": differences(before, values_of(other, "up")),
        "trained": differences(values_of(model, "down"), values_of(other, "down")),
        "state": differences(
            together(model, optimizer, options)["optim"], together(other, fresh, options)["optim"]
        ),
    }


EXPECTED = {"stored": ["down.bias", "down.weight"], "frozen": [], "trained": [], "state": []}


def test_frozen_parameters_may_be_left_out(tmp_path: Path) -> None:
    assert leave_frozen_out("plain", tmp_path) == EXPECTED
    for form in ("ddp", "fsdp2"):
        assert run_ranks(2, leave_frozen_out, form, tmp_path) == [EXPECTED] * 2


def load_a_part(form: str, box: Path) -> dict[str, Any]:
    """A checkpoint of one layer, into a model of two."""
    model, _ = trained(form)
    other, _ = trained(form, seed=1)
    part = {k: v for k, v in get_model_state_dict(model).items() if k.startswith("up")}
    reshard.save({"model": part}, checkpoint_id=box / form)
    before = values_of(other, "down")
    state = {"model": get_model_state_dict(other)}
    report = reshard.load(state, checkpoint_id=box / form, strict=False)
    loaded = {k: v for k, v in state["model"].items() if k.startswith("up")}
    try:
        refused = ""
        set_model_state_dict(other, loaded)
    except RuntimeError as error:
        refused = str(error)
    missing = set_model_state_dict(other, loaded, options=StateDictOptions(strict=False))
    return {
        "refused": "down.weight" in refused,
        "report": sorted(report.missing),
        "missing": sorted(missing.missing_keys),
        "untouched": differences(before, values_of(other, "down")),
        "loaded": differences(values_of(model, "up"), values_of(other, "up")),
        "rank": dist.get_rank() if dist.is_initialized() else 0,
    }


def test_a_part_of_the_model_is_set_only_when_that_is_asked_for(tmp_path: Path) -> None:
    found = [load_a_part("plain", tmp_path)]
    for form in ("ddp", "fsdp2"):
        found += run_ranks(2, load_a_part, form, tmp_path)
    assert [each.pop("rank") for each in found] == [0, 0, 1, 0, 1]
    for each in found:
        prefix = "module." if each["missing"][0].startswith("module.") else ""
        assert each == {
            "refused": True,
            "report": ["model.down.bias", "model.down.weight"],
            "missing": [f"{prefix}down.bias", f"{prefix}down.weight"],
            "untouched": [],
            "loaded": [],
        }

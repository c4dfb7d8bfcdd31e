"""TrainState: optimizer state of any kind, by the names of parameters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import reshard
from reshard.tensors.torch_versions import cuts_strided_shards_at_once
from reshard.training import TrainState
from reshard.training.optimizers import OptimizerReport
from support.optimizers import Coded, Factored
from support.ranks import run_alone, run_ranks
from support.small_model import FORMS, Make, adamw, fsdp1, losses, momentum, small_model
from support.subclasses import Scaled
from support.whole import differences, stored, stored_state

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.05),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam with amsgrad": lambda p: optim.Adam(p, lr=0.05, amsgrad=True),
    "Adam with a tensor as lr": lambda p: optim.Adam(p, lr=torch.tensor(0.05)),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.05),
    # Its state is there before the first step.
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "ASGD": lambda p: optim.ASGD(p, lr=0.05, t0=1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.05),
    "Rprop": lambda p: optim.Rprop(p, lr=0.05),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.05, centered=True, momentum=0.9),
    # Its state is lists of tensors, all of it at the first parameter.
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.05, max_iter=3),
    "factored": Factored,
    "coded": Coded,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_optimizer_goes_on_where_the_saved_one_would_have(
    name: str, tmp_path: Path
) -> None:
    model, other = small_model(), small_model(1)
    optimizer, fresh = (OPTIMIZERS[name](each.parameters()) for each in (model, other))
    losses(model, optimizer)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    state = TrainState(other, fresh)
    reshard.load({"train": state}, checkpoint_id=tmp_path, strict="exact")

    optimizer_report = state.report.optimizer
    assert (optimizer_report.missing, optimizer_report.unexpected) == ([], [])
    assert losses(model, optimizer) == losses(other, fresh)
    assert differences(dict(model.state_dict()), dict(other.state_dict())) == []
    assert differences(optimizer.state_dict(), fresh.state_dict()) == []


# On meshes


KINDS: dict[str, Make] = {"momentum": momentum, "factored": Factored, "coded": Coded}


def train_and_save(form: str, box: Path) -> None:
    for kind, make in KINDS.items():
        model = FORMS[form](small_model())
        optimizer = make(model.parameters())
        losses(model, optimizer)
        state = {"train": TrainState(model, optimizer)}
        reshard.save(state, checkpoint_id=box / f"{kind} on {form}")


def load_and_go_on(form: str, box: Path, sources: list[str]) -> dict[str, Any]:
    """By checkpoint: what is different when it is saved again, and the losses that follow."""
    found = {}
    for kind, make in KINDS.items():
        for source in sources:
            model = FORMS[form](small_model(1))
            optimizer = make(model.parameters())
            state = {"train": TrainState(model, optimizer)}
            reshard.load(state, checkpoint_id=box / f"{kind} on {source}")
            again = box / f"{kind} on {source}, again on {form}"
            reshard.save(state, checkpoint_id=again)
            wrong = differences(stored(box / f"{kind} on {source}"), stored(again))
            found[kind, source] = wrong, losses(model, optimizer)
    return found


def test_state_of_other_shapes_than_the_parameter_moves_between_meshes(tmp_path: Path) -> None:
    uninterrupted = {}
    for kind, make in KINDS.items():
        model = small_model()
        optimizer = make(model.parameters())
        losses(model, optimizer)
        uninterrupted[kind] = losses(model, optimizer)
    sources = ["fsdp2", "tp"]
    for form in sources:
        run_ranks(2, train_and_save, form, tmp_path)
    factors = stored_state(tmp_path / "factored on tp")["down.weight"]
    assert (factors["rows"].shape, factors["columns"].shape) == ((3,), (6,))
    forms = [(1, "plain"), (4, "fsdp2"), (4, "fsdp2 over tp")]
    if cuts_strided_shards_at_once():
        # Such torch cannot compute with uneven shards of FSDP over tensor parallelism.
        forms.pop()
    for ranks, form in forms:
        for found in run_ranks(ranks, load_and_go_on, form, tmp_path, sources):
            for (kind, source), (wrong, following) in found.items():
                assert wrong == [], (kind, source, form)
                assert following == pytest.approx(uninterrupted[kind], rel=1e-3), (kind, source)


def save_in_subclass(box: Path) -> str:
    """What became of state in tensors that have no memory of their own."""
    model = small_model()
    optimizer = Coded(model.parameters(), wrapped=True)
    losses(model, optimizer)
    try:
        reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=box)
    except reshard.CheckpointException as error:
        return f"refused: {error}"
    # The same optimizer, further on: what it had is put back into what it has.
    expected = losses(model, optimizer)
    reshard.load({"train": TrainState(model, optimizer)}, checkpoint_id=box)
    assert type(optimizer.state[model.down.weight]["momentum"]) is Scaled
    assert losses(model, optimizer) == expected
    return "restored"


def test_state_in_a_tensor_subclass_that_wraps_others_is_restored_or_refused_by_its_name(
    tmp_path: Path,
) -> None:
    assert run_alone(save_in_subclass, tmp_path / "box") == "restored"


# Parameter groups


def saved_with_two_groups(box: Path) -> None:
    model = small_model()
    matrices, vectors = [model.up[0].weight, model.down.weight], [model.up[0].bias, model.down.bias]
    groups = [
        {"params": matrices, "lr": 0.1, "weight_decay": 0.5},
        {"params": vectors, "lr": 0.2, "weight_decay": 0.0},
    ]
    optimizer = optim.AdamW(groups)
    losses(model, optimizer)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=box)


def settings_after_load(box: Path, *names: list[str]) -> tuple[list[tuple[float, float]], Any]:
    """Rate and decay of each group of a fresh optimizer, and what the load says of groups."""
    model = small_model(1)
    groups = [{"params": [model.get_parameter(name) for name in group]} for group in names]
    optimizer = optim.AdamW(groups, lr=0.9)
    state = TrainState(model, optimizer)
    reshard.load({"train": state}, checkpoint_id=box)
    # Whatever group a parameter is in, it has its own state.
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            assert differences(optimizer.state[parameter], stored_state(box)[name]) == []
    found = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    return found, state.report.optimizer.groups_left


def test_settings_of_groups_follow_their_parameters(tmp_path: Path) -> None:
    saved_with_two_groups(tmp_path)
    matrices, vectors = ["up.0.weight", "down.weight"], ["up.0.bias", "down.bias"]
    of_matrices, of_vectors = (0.1, 0.5), (0.2, 0.0)

    def loaded(*names: list[str]) -> tuple[list[tuple[float, float]], Any]:
        return settings_after_load(tmp_path, *names)

    assert loaded(matrices, vectors) == ([of_matrices, of_vectors], [])
    assert loaded(vectors, matrices) == ([of_vectors, of_matrices], [])
    assert loaded(matrices[::-1], vectors[::-1]) == ([of_matrices, of_vectors], [])
    assert loaded(matrices[1:], vectors, matrices[:1]) == (
        [of_matrices, of_vectors, of_matrices],
        [],
    )
    assert loaded(vectors[:1]) == ([of_vectors], [])


def test_of_groups_that_were_joined_the_first_parameter_decides_and_the_report_says_so(
    tmp_path: Path,
) -> None:
    saved_with_two_groups(tmp_path)
    joined = ["down.bias", "up.0.weight", "up.0.bias", "down.weight"]
    settings, left = settings_after_load(tmp_path, joined)
    assert settings == [(0.2, 0.0)]
    assert left == ["down.bias and 3 others (were in groups that differ)"]


def test_a_group_of_parameters_that_were_not_saved_keeps_its_settings(tmp_path: Path) -> None:
    model = small_model()
    some = optim.AdamW(model.up.parameters(), lr=0.1)
    losses(model, some)
    reshard.save({"train": TrainState(model, some)}, checkpoint_id=tmp_path)
    settings, left = settings_after_load(tmp_path, ["down.weight", "down.bias"], ["up.0.weight"])
    assert settings == [(0.9, 0.01), (0.1, 0.01)]
    assert left == ["down.weight and 1 others"]


# Several optimizers, and state that only one side has


def two_optimizers(model: Any) -> list[optim.Optimizer]:
    return [
        optim.SGD(model.up.parameters(), lr=0.1, momentum=0.9),
        optim.AdamW(model.down.parameters(), lr=0.2),
    ]


def test_several_optimizers_over_one_model_each_get_their_own_state(tmp_path: Path) -> None:
    model, other = small_model(), small_model(1)
    optimizers, fresh = two_optimizers(model), two_optimizers(other)
    losses(model, optimizers)
    reshard.save({"train": TrainState(model, optimizers)}, checkpoint_id=tmp_path)
    # In another order too: it is the parameters that tell which is which.
    reshard.load({"train": TrainState(other, fresh[::-1])}, checkpoint_id=tmp_path)
    assert [each.param_groups[0]["lr"] for each in fresh] == [0.1, 0.2]
    assert losses(model, optimizers) == losses(other, fresh)


def test_one_optimizer_takes_over_from_several_and_several_from_one(tmp_path: Path) -> None:
    model, other, third = small_model(), small_model(1), small_model(2)
    several = [adamw(part.parameters()) for part in (model.up, model.down)]
    losses(model, several)
    reshard.save({"train": TrainState(model, several)}, checkpoint_id=tmp_path / "several")
    one = adamw(other.parameters())
    reshard.load({"train": TrainState(other, one)}, checkpoint_id=tmp_path / "several")
    reshard.save({"train": TrainState(other, one)}, checkpoint_id=tmp_path / "one")
    again = [adamw(part.parameters()) for part in (third.down, third.up)]
    reshard.load({"train": TrainState(third, again)}, checkpoint_id=tmp_path / "one")
    assert losses(model, several) == losses(other, one) == losses(third, again)


def frozen(model: Any) -> Any:
    model.up.requires_grad_(False)
    return model


def test_frozen_layers_have_no_state_and_need_none(tmp_path: Path) -> None:
    model, other = frozen(small_model()), frozen(small_model(1))
    optimizer, fresh = adamw(model.parameters()), adamw(other.parameters())
    losses(model, optimizer)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    assert stored_state(tmp_path).keys() == {"down.weight", "down.bias"}
    state = TrainState(other, fresh)
    reshard.load({"train": state}, checkpoint_id=tmp_path)
    assert state.report.optimizer.missing == []
    assert fresh.state.keys() == set(other.down.parameters())
    assert losses(model, optimizer) == losses(other, fresh)
    assert not any(parameter.requires_grad for parameter in other.up.parameters())


def test_state_is_restored_as_far_as_it_exists_and_the_report_says_the_rest(
    tmp_path: Path,
) -> None:
    model, other = frozen(small_model()), small_model(1)
    trained = adamw(model.parameters())
    losses(model, trained)
    reshard.save({"train": TrainState(model, trained)}, checkpoint_id=tmp_path)
    # This one has state of `up`, which was frozen, and does not train the bias of `down`.
    optimizer = adamw([*other.up.parameters(), other.down.weight])
    losses(other, optimizer, steps=1)
    before = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    state = TrainState(other, optimizer)
    reshard.load({"train": state}, checkpoint_id=tmp_path)

    kinds = ("exp_avg", "exp_avg_sq", "step")
    report = state.report.optimizer
    assert report.missing == [
        f"up.0.{name}.{kind}" for name in ("bias", "weight") for kind in kinds
    ]
    assert sorted(report.unexpected) == [f"down.bias.{kind}" for kind in kinds]
    assert sorted(report.restored) == [f"down.weight.{kind}" for kind in kinds]
    for parameter in other.up.parameters():
        assert differences(optimizer.state[parameter], before[parameter]) == []
    weight = optimizer.state[other.down.weight]
    assert differences(weight, trained.state[model.down.weight]) == []
    assert other.down.bias not in optimizer.state


def test_of_the_state_of_one_parameter_what_is_not_stored_stays_too(tmp_path: Path) -> None:
    model, other = small_model(), small_model(1)
    plain, running = optim.Adam(model.parameters()), optim.Adam(other.parameters(), amsgrad=True)
    losses(model, plain)
    losses(other, running, steps=1)
    highest = running.state[other.down.weight]["max_exp_avg_sq"].clone()
    reshard.save({"train": TrainState(model, plain)}, checkpoint_id=tmp_path)
    state = TrainState(other, running)
    reshard.load({"train": state}, checkpoint_id=tmp_path)
    found = running.state[other.down.weight]
    wanted = plain.state[model.down.weight] | {"max_exp_avg_sq": highest}
    assert differences(found, wanted) == []
    assert "down.weight.max_exp_avg_sq" in state.report.optimizer.missing


def test_an_optimizer_that_never_stepped_is_saved_without_state(tmp_path: Path) -> None:
    model, other, stepped = small_model(), small_model(1), small_model(2)
    never, fresh = optim.AdamW(model.parameters(), lr=0.3), adamw(other.parameters())
    reshard.save({"train": TrainState(model, never)}, checkpoint_id=tmp_path)
    assert stored_state(tmp_path) == {}
    reshard.load({"train": TrainState(other, fresh)}, checkpoint_id=tmp_path)
    assert (len(fresh.state), fresh.param_groups[0]["lr"]) == (0, 0.3)
    assert losses(model, never) == losses(other, fresh)
    optimizer = adamw(stepped.parameters())
    losses(stepped, optimizer)
    state = TrainState(stepped, optimizer)
    reshard.load({"train": state}, checkpoint_id=tmp_path)
    assert (len(optimizer.state), len(state.report.optimizer.missing)) == (4, 12)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    state = TrainState(small_model(), adamw(small_model().parameters()))
    with pytest.raises(reshard.CheckpointException, match="4 parameters that the model does not"):
        reshard.save({"train": state}, checkpoint_id=tmp_path / "box")
    assert not (tmp_path / "box").exists()


def test_state_that_is_there_already_is_filled_in_place(tmp_path: Path) -> None:
    model, other = small_model(), small_model(1)
    optimizer, running = adamw(model.parameters()), adamw(other.parameters())
    losses(model, optimizer)
    losses(other, running, steps=1)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    held = [*other.parameters(), *(t for s in running.state.values() for t in s.values())]
    addresses = [tensor.data_ptr() for tensor in held]
    reshard.load({"train": TrainState(other, running)}, checkpoint_id=tmp_path)
    after = [*other.parameters(), *(t for s in running.state.values() for t in s.values())]
    assert [a is b for a, b in zip(held, after, strict=True)] == [True] * len(held)
    assert [tensor.data_ptr() for tensor in after] == addresses
    assert losses(model, optimizer) == losses(other, running)


def test_state_that_belongs_to_the_whole_optimizer_is_restored(tmp_path: Path) -> None:
    model, other = small_model(), small_model(1)
    ours, theirs = ([adamw(m.up.parameters()), adamw(m.down.parameters())] for m in (model, other))
    for number, optimizer in enumerate(ours):
        optimizer.state["scale"] = {"current": torch.tensor(8.0 + number)}
    reshard.save({"train": TrainState(model, ours)}, checkpoint_id=tmp_path)
    reshard.load({"train": TrainState(other, theirs)}, checkpoint_id=tmp_path)
    for number, fresh in enumerate(theirs):
        assert differences(fresh.state["scale"], {"current": torch.tensor(8.0 + number)}) == []


def test_settings_of_groups_are_found_under_another_name(tmp_path: Path) -> None:
    model, other = small_model(), small_model(1)
    optimizer, fresh = optim.AdamW(model.parameters(), lr=0.3), adamw(other.parameters())
    losses(model, optimizer)
    reshard.save({"old": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    state = TrainState(other, fresh)
    reshard.load({"train": state}, checkpoint_id=tmp_path, rename={"old": "train"})
    assert len(state.report.optimizer.restored) == 12
    assert (fresh.param_groups[0]["lr"], state.report.optimizer.groups_left) == (0.3, [])


@pytest.mark.parametrize("make", [adamw, lambda p: Coded(p, wrapped=True)], ids=["AdamW", "coded"])
def test_state_of_parameters_is_found_under_their_other_names(make: Make, tmp_path: Path) -> None:
    model, other = small_model(), nn.ModuleDict({"first": small_model(1).up})
    optimizer, fresh = make(model.up.parameters()), make(other.parameters())
    optimizer.param_groups[0]["lr"] = 0.3
    losses(model, optimizer)
    reshard.save({"old": TrainState(model.up, optimizer)}, checkpoint_id=tmp_path)
    state = TrainState(other, fresh)

    def rename(name: str) -> str:
        return re.sub(r"^old\b", "train", name).replace(".0.", ".first.0.", 1)

    reshard.load({"train": state}, checkpoint_id=tmp_path, rename=rename)
    before = [optimizer.state[p] for p in model.up.parameters()]
    after = [fresh.state[p] for p in other.parameters()]
    assert [sorted(each) for each in after] == [sorted(each) for each in before]
    for mine, theirs in zip(after, before, strict=True):
        for key in mine:
            parts = ("inner", "scale") if isinstance(mine[key], Scaled) else ("data",)
            for part in parts:
                assert torch.equal(getattr(mine[key], part), getattr(theirs[key], part))
    assert (fresh.param_groups[0]["lr"], state.report.optimizer.groups_left) == (0.3, [])


# FSDP's first version, which keeps the state of flattened parameters


def fresh_fsdp1(box: Path, own: bool) -> dict[str, Any]:
    """Save and load an optimizer that never stepped."""
    model, other = (fsdp1(small_model(seed), use_orig_params=own) for seed in (0, 1))
    optimizer, fresh = optim.AdamW(model.parameters(), lr=0.3), adamw(other.parameters())
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=box)
    state = TrainState(other, fresh)
    reshard.load({"train": state}, checkpoint_id=box)
    return {
        "states": (len(optimizer.state), len(fresh.state)),
        "lr": fresh.param_groups[0]["lr"],
        "report": state.report.optimizer,
        "goes on": losses(model, optimizer) == losses(other, fresh),
    }


@pytest.mark.parametrize("own", [True, False], ids=["own parameters", "flat parameters"])
def test_an_fsdp1_optimizer_that_never_stepped_stays_without_state(
    own: bool, tmp_path: Path
) -> None:
    for found in run_ranks(2, fresh_fsdp1, tmp_path, own):
        assert found["states"] == (0, 0)
        assert found["lr"] == 0.3
        assert found["report"] == OptimizerReport()
        assert found["goes on"]
    assert stored_state(tmp_path) == {}


def fsdp1_with_less_in_the_checkpoint(box: Path) -> dict[str, Any]:
    """Load state of one layer alone into an optimizer that has state of both."""
    model, other = fsdp1(small_model()), fsdp1(small_model(1))
    optimizer, running = adamw(model.parameters()), adamw(other.parameters())
    losses(model, optimizer)
    losses(other, running, steps=1)
    partial = TrainState(model, optimizer).state_dict()
    for name in ("down.weight", "down.bias"):
        del partial["optimizer"]["state"][name]
    reshard.save({"train": partial}, checkpoint_id=box / "less")
    reshard.save({"train": TrainState(other, running)}, checkpoint_id=box / "before")
    state = TrainState(other, running)
    reshard.load({"train": state}, checkpoint_id=box / "less")
    reshard.save({"train": state}, checkpoint_id=box / "after")
    return {"restored": state.report.optimizer.restored, "missing": state.report.optimizer.missing}


def test_state_of_fsdp1_that_the_checkpoint_does_not_have_stays_as_it_is(tmp_path: Path) -> None:
    for found in run_ranks(2, fsdp1_with_less_in_the_checkpoint, tmp_path):
        assert {label.split(".")[0] for label in found["restored"]} == {"up"}
        assert {label.split(".")[0] for label in found["missing"]} == {"down"}
    less, before, after = (stored_state(tmp_path / n) for n in ("less", "before", "after"))
    assert before.keys() == {"up.0.weight", "up.0.bias", "down.weight", "down.bias"}
    assert differences(after, before | less) == []


def fsdp1_with_precise_state(box: Path) -> set[torch.dtype]:
    """Types of state that was restored, for parameters of lower precision."""
    model, other = (fsdp1(small_model(seed).bfloat16()) for seed in (0, 1))
    optimizer, fresh = momentum(model.parameters()), momentum(other.parameters())
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].float() + 1e-4
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=box / "saved")
    reshard.load({"train": TrainState(other, fresh)}, checkpoint_id=box / "saved")
    reshard.save({"train": TrainState(other, fresh)}, checkpoint_id=box / "again")
    return {state["momentum_buffer"].dtype for state in fresh.state.values()}


def test_state_of_fsdp1_keeps_its_precision(tmp_path: Path) -> None:
    assert run_ranks(2, fsdp1_with_precise_state, tmp_path) == [{torch.float32}] * 2
    saved, again = (stored_state(tmp_path / name) for name in ("saved", "again"))
    assert differences(saved, again) == []


def fsdp1_in_groups(box: Path) -> dict[str, Any]:
    """Two groups that are three after the load, in another order."""

    def split(model: Any) -> tuple[list[Any], list[Any]]:
        found: tuple[list[Any], list[Any]] = ([], [])
        for name, parameter in model.named_parameters():
            found["bias" in name].append(parameter)
        return found

    model, other = fsdp1(small_model()), fsdp1(small_model(1))
    matrices, vectors = split(model)
    optimizer = optim.AdamW([{"params": matrices, "lr": 0.1}, {"params": vectors, "lr": 0.2}])
    losses(model, optimizer)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=box)
    matrices, vectors = split(other)
    groups = [{"params": part} for part in (vectors, matrices[:1], matrices[1:])]
    fresh = optim.AdamW(groups, lr=0.9)
    reshard.load({"train": TrainState(other, fresh)}, checkpoint_id=box)
    return {
        "rates": [group["lr"] for group in fresh.param_groups],
        "goes on": losses(model, optimizer) == losses(other, fresh),
    }


def test_settings_of_groups_follow_the_parameters_of_fsdp1(tmp_path: Path) -> None:
    for found in run_ranks(2, fsdp1_in_groups, tmp_path):
        assert found == {"rates": [0.2, 0.1, 0.1], "goes on": True}

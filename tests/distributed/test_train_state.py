"""TrainState: what a run goes on from besides its model; and that saving leaves no trace."""

from __future__ import annotations

import argparse
import collections
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_map_only

import reshard
from reshard.state_dict_saver import AsyncCheckpointerType
from reshard.training import TrainState
from support.background import Gate, GatedWriter
from support.ranks import run_ranks
from support.small_model import FORMS, adamw, losses, small_model
from support.torch_version import TORCH
from support.whole import differences

SECONDS = 30.0


# Saving changes nothing, loading takes no step


def forbidden(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("neither a save nor a load has any business here")


def forbid_training(model: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.step = optimizer.zero_grad = forbidden  # type: ignore[assignment]
    model.forward = model.zero_grad = forbidden  # type: ignore[assignment]


def look_at(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """A copy of all that a save could disturb."""
    parameters = list(model.parameters())
    found = {
        "parameters": parameters,
        "addresses": [getattr(p, "_local_tensor", p).data_ptr() for p in parameters],
        "gradients": [parameter.grad for parameter in parameters],
        "needs": [parameter.requires_grad for parameter in parameters],
        "buffers": list(model.buffers()),
        "state": [dict(optimizer.state.get(parameter, {})) for parameter in parameters],
        "states": len(optimizer.state),
        "settings": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "mode": [module.training for module in model.modules()],
        "random": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
    }
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), found)


def save_and_load_under_watch(form: str, box: Path) -> dict[str, list[str]]:
    """What a save of a running and of a new optimizer changed, and a load of other things."""
    model = FORMS[form](small_model())
    optimizer = adamw(model.parameters())
    losses(model, optimizer)
    model.eval()
    # Gradients are there when the save comes.
    model(torch.ones(2, 4)).sum().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    forbid_training(model, optimizer)
    running = look_at(model, optimizer)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=box / f"{form} running")
    found = {"running": differences(running, look_at(model, optimizer))}

    new = FORMS[form](small_model(1))
    fresh = adamw(new.parameters())
    forbid_training(new, fresh)
    before = look_at(new, fresh)
    assert before["states"] == 0
    reshard.save({"train": TrainState(new, fresh)}, checkpoint_id=box / f"{form} new")
    found["new"] = differences(before, look_at(new, fresh))

    # What is loaded into itself is as it was, gradients, random numbers and all.
    reshard.load({"train": TrainState(model, optimizer)}, checkpoint_id=box / f"{form} running")
    found["loaded"] = differences(running, look_at(model, optimizer))
    if form == "fsdp2" and TORCH < (2, 10):
        # There, FSDP2 moves uneven parameters in every load_state_dict.
        found["loaded"] = [each for each in found["loaded"] if not each.startswith(".addresses")]
    reshard.load({"train": TrainState(new, fresh)}, checkpoint_id=box / f"{form} running")
    after = look_at(new, fresh)
    same = ("parameters", "state", "states", "settings", "random")
    found["taken over"] = [p for part in same for p in differences(running[part], after[part])]
    return found


NOTHING: dict[str, list[str]] = {"running": [], "new": [], "loaded": [], "taken over": []}


@pytest.mark.parametrize("form", ["plain", "ddp", "fsdp1", "fsdp2", "tp"])
def test_saving_changes_nothing_and_neither_saving_nor_loading_takes_a_step(
    form: str, tmp_path: Path
) -> None:
    assert run_ranks(2, save_and_load_under_watch, form, tmp_path) == [NOTHING] * 2


# Values of each rank


class Loader:
    """A dataloader that knows how far it is."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.loads = 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        self.loads += 1


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    draw()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def save_what_differs(box: Path) -> list[float]:
    """The numbers that were drawn next."""
    seed(10 + rank())
    loader = Loader({"position": rank() + 5, "shards": [rank(), {"epoch": (1, rank())}]})
    state = {"train": TrainState(small_model(), dataloader=loader)}
    seed(10 + rank())
    reshard.save(state, checkpoint_id=box)
    return draw()


def load_what_differs(box: Path, **options: Any) -> tuple[list[float], Any, list[str]]:
    """Numbers drawn after the load, the state of the loader, and what was dropped."""
    loader = Loader({"position": 0, "shards": []})
    state = TrainState(small_model(), dataloader=loader, **options)
    seed(20 + rank())
    reshard.load({"train": state}, checkpoint_id=box)
    # What is dropped is not handed to the loader, not even as it was.
    assert loader.loads == (0 if "dataloader" in state.report.dropped else 1)
    return draw(), loader.state, state.report.dropped


def position(of_rank: int) -> dict[str, Any]:
    return {"position": of_rank + 5, "shards": [of_rank, {"epoch": (1, of_rank)}]}


def load_in_every_way(box: Path) -> dict[str, Any]:
    found = {
        policy: load_what_differs(box, on_resize=policy) for policy in ("drop", "first", "error")
    }
    return found | {"no rng": load_what_differs(box, rng=False)}


def test_each_rank_goes_on_with_its_own_random_numbers_and_data(tmp_path: Path) -> None:
    drawn = run_ranks(2, save_what_differs, tmp_path)
    assert drawn[0] != drawn[1]
    for number, found in enumerate(run_ranks(2, load_in_every_way, tmp_path)):
        for policy in ("drop", "first", "error"):
            assert found[policy] == (drawn[number], position(number), []), policy
        own = next_numbers(20 + number)
        assert found["no rng"] == (own, position(number), [])


def next_numbers(number: int) -> list[float]:
    """What is drawn after `seed`, without a trace in this process."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed(number)
    drawn = draw()
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    return drawn


def load_on_other_ranks(box: Path) -> dict[str, Any]:
    found = {policy: load_what_differs(box, on_resize=policy) for policy in ("drop", "first")}
    model, loader = small_model(1), Loader("untouched")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        state = TrainState(model, dataloader=loader, on_resize="error")
        reshard.load({"train": state}, checkpoint_id=box)
    except reshard.CheckpointException as error:
        found["error"] = str(error), loader.state
        found["changed"] = differences(before, [p.detach() for p in model.parameters()])
    return found


def test_on_another_number_of_ranks_on_resize_says_what_becomes_of_them(tmp_path: Path) -> None:
    drawn = run_ranks(2, save_what_differs, tmp_path)
    for number, found in enumerate(run_ranks(3, load_on_other_ranks, tmp_path)):
        own = next_numbers(20 + number)
        nothing = {"position": 0, "shards": []}
        assert found["drop"] == (own, nothing, ["dataloader", "rng"])
        assert found["first"] == (drawn[0], position(0), [])
        message, loader = found["error"]
        assert "'train.dataloader' differs by rank" in message
        assert "differs by rank: saved by 2 ranks, loaded by 3" in message
        assert loader == "untouched"
        assert found["changed"] == []


def test_values_that_on_resize_drops_do_not_make_an_exact_load_fail(tmp_path: Path) -> None:
    run_ranks(2, save_what_differs, tmp_path)
    state = TrainState(small_model(), dataloader=Loader({}), on_resize="drop")
    reshard.load({"train": state}, checkpoint_id=tmp_path, strict="exact")
    assert state.report.dropped == ["dataloader", "rng"]


def test_a_loader_may_have_tensors_in_its_state(tmp_path: Path) -> None:
    saved = {"generator": torch.Generator().manual_seed(4).get_state(), "order": [3, 1, 2]}
    reshard.save(
        {"train": TrainState(small_model(), dataloader=Loader(saved))}, checkpoint_id=tmp_path
    )
    loader = Loader({"generator": torch.Generator().get_state(), "order": []})
    reshard.load({"train": TrainState(small_model(), dataloader=loader)}, checkpoint_id=tmp_path)
    assert differences(loader.state, saved) == []


def test_the_state_of_a_loader_is_replaced_as_a_whole(tmp_path: Path) -> None:
    saved = {"position": 3, "buffer": [torch.ones(2), torch.zeros(3)]}
    reshard.save(
        {"train": TrainState(small_model(), dataloader=Loader(saved))}, checkpoint_id=tmp_path
    )
    loader = Loader({"position": 0, "buffer": []})
    reshard.load({"train": TrainState(small_model(), dataloader=loader)}, checkpoint_id=tmp_path)
    assert differences(loader.state, saved) == []


# Schedulers


def warm_up_then_decay(optimizer: optim.Optimizer) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        lr_scheduler.CosineAnnealingLR(optimizer, 4),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3, 6])


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "SequentialLR": warm_up_then_decay,
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 6]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=20),
    "a list": lambda o: [
        lr_scheduler.ExponentialLR(o, 0.9),
        lr_scheduler.StepLR(o, 2),
    ],
}


def rates(optimizer: optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        for each in scheduler if isinstance(scheduler, list) else [scheduler]:
            each.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    model, other = small_model(), small_model(1)
    optimizer, fresh = adamw(model.parameters()), adamw(other.parameters())
    scheduler, anew = SCHEDULERS[name](optimizer), SCHEDULERS[name](fresh)
    rates(optimizer, scheduler, 4)
    state = TrainState(model, optimizer, scheduler)
    reshard.save({"train": state}, checkpoint_id=tmp_path)
    reshard.load({"train": TrainState(other, fresh, anew)}, checkpoint_id=tmp_path)
    following = rates(optimizer, scheduler, 5)
    assert len(set(following)) > 1
    assert rates(fresh, anew, 5) == following


def test_another_number_of_schedulers_is_found_before_anything_changes(tmp_path: Path) -> None:
    model, other = small_model(), small_model(1)
    optimizer, fresh = adamw(model.parameters()), adamw(other.parameters())
    one, two = lr_scheduler.StepLR(optimizer, 1), [lr_scheduler.StepLR(fresh, 1) for _ in range(2)]
    reshard.save({"train": TrainState(model, optimizer, one)}, checkpoint_id=tmp_path)
    before = look_at(other, fresh)
    with pytest.raises(reshard.CheckpointException):
        reshard.load({"train": TrainState(other, fresh, two)}, checkpoint_id=tmp_path)
    assert differences(before, look_at(other, fresh)) == []


# More values, and parts that only one side has


def test_extra_values_come_back_in_the_dict_that_was_passed(tmp_path: Path) -> None:
    average = nn.Linear(2, 2)
    saved = {"epoch": 3, "best": {"loss": 0.5}, "ema": average, "sums": torch.ones(3)}
    reshard.save({"train": TrainState(small_model(), extra=saved)}, checkpoint_id=tmp_path)
    other = nn.Linear(2, 2)
    extra: dict[str, Any] = {
        "epoch": 0,
        "best": {"loss": 9.9},
        "ema": other,
        "sums": torch.zeros(3),
    }
    sums = extra["sums"]
    reshard.load({"train": TrainState(small_model(), extra=extra)}, checkpoint_id=tmp_path)
    assert (extra["epoch"], extra["best"], extra["ema"]) == (3, {"loss": 0.5}, other)
    assert extra["sums"] is sums
    assert sums.tolist() == [1, 1, 1]
    assert differences(dict(other.state_dict()), dict(average.state_dict())) == []


def test_parts_that_the_checkpoint_does_not_have_stay_and_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reshard.save({"train": TrainState(small_model(), rng=False)}, checkpoint_id=tmp_path)
    model, loader, extra = small_model(1), Loader("here"), {"epoch": 7}
    optimizer = adamw(model.parameters())
    losses(model, optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    state = TrainState(model, optimizer, scheduler, loader, extra=extra)
    before = look_at(model, optimizer)
    drawn = torch.get_rng_state()
    reshard.load({"train": state}, checkpoint_id=tmp_path)
    assert sorted(state.report.missing) == ["dataloader", "extra", "optimizer", "rng", "scheduler"]
    assert len(state.report.optimizer.missing) == 12
    assert "dataloader" in caplog.text
    assert (loader.state, extra) == ("here", {"epoch": 7})
    assert torch.equal(torch.get_rng_state(), drawn)
    assert differences(before["state"], look_at(model, optimizer)["state"]) == []
    assert differences(dict(model.state_dict()), dict(small_model().state_dict())) == []


# In the background


def save_while_training(box: Path, kind: AsyncCheckpointerType, form: str) -> dict[str, Any]:
    model = FORMS[form](small_model())
    optimizer = adamw(model.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    loader, extra = Loader({"position": rank()}), {"epoch": 1}
    seed(rank())
    losses(model, optimizer)
    state = {"train": TrainState(model, optimizer, scheduler, loader, extra=extra)}
    reshard.save(state, checkpoint_id=box / "wanted")
    gate = Gate(box, f"gate-{rank()}")
    future = reshard.async_save(
        state,
        checkpoint_id=box / "found",
        storage_writer=GatedWriter(box / "found", gate, at="reset"),
        async_checkpointer_type=kind,
    )
    # Nothing is written before the gate opens, and by then all of this has changed.
    following = losses(model, optimizer)
    scheduler.step()
    loader.state["position"] = extra["epoch"] = 99
    draw()
    gate.open()
    future.result(SECONDS)
    wanted, found = (reshard.read_state_dict(box / name) for name in ("wanted", "found"))
    wrong = differences(wanted, found)

    other = FORMS[form](small_model(1))
    fresh = adamw(other.parameters())
    anew = TrainState(other, fresh, lr_scheduler.StepLR(fresh, 1), loader, extra=extra)
    reshard.load({"train": anew}, checkpoint_id=box / "found", strict="exact")
    reshard.close()
    return {
        "wrong": wrong,
        "parts": sorted(found["train"]),
        "goes on": losses(other, fresh) == following,
        "loader": loader.state,
        "extra": extra,
    }


@pytest.mark.parametrize(
    ("kind", "ranks", "form"),
    [
        (AsyncCheckpointerType.THREAD, 2, "fsdp2"),
        (AsyncCheckpointerType.THREAD, 2, "fsdp1"),
        # A worker takes seconds to start, so it saves for one rank.
        (AsyncCheckpointerType.PROCESS, 1, "fsdp2"),
    ],
    ids=["thread, fsdp2", "thread, fsdp1", "process"],
)
def test_a_background_save_has_what_was_there_when_it_was_called(
    kind: AsyncCheckpointerType, ranks: int, form: str, tmp_path: Path
) -> None:
    for number, found in enumerate(run_ranks(ranks, save_while_training, tmp_path, kind, form)):
        assert found == {
            "wrong": [],
            "parts": ["dataloader", "extra", "model", "optimizer", "rng", "scheduler"],
            "goes on": True,
            "loader": {"position": number},
            "extra": {"epoch": 1},
        }


def test_extra_values_that_are_left_out_or_missing_stay_as_they_are(tmp_path: Path) -> None:
    saved = {"stats": {"a": 1, "b": 2}, "ema": nn.Linear(1, 1)}
    reshard.save({"train": TrainState(small_model(), extra=saved)}, checkpoint_id=tmp_path)
    average = nn.Linear(1, 1)
    before = average.weight.detach().clone()
    extra: dict[str, Any] = {"stats": {"a": 10, "b": 20, "new": 30}, "ema": average}
    state = {"train": TrainState(small_model(), extra=extra)}
    unwanted = ["train.extra.stats.a", "train.extra.ema.*"]
    reshard.load(state, checkpoint_id=tmp_path, exclude=unwanted, strict=False)
    assert extra["stats"] == {"a": 10, "b": 2, "new": 30}
    assert torch.equal(average.weight, before)


class Noted(nn.Linear):
    """A module with state that is not tensors."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.notes = {"a": 1, "b": 2}

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.notes)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.notes = {key: state[key] for key in ("a", "b")}


def test_extra_state_of_a_module_may_be_left_out_in_part(tmp_path: Path) -> None:
    reshard.save({"train": TrainState(Noted())}, checkpoint_id=tmp_path)
    other = Noted()
    other.notes = {"a": 5, "b": 6}
    reshard.load({"train": TrainState(other)}, checkpoint_id=tmp_path, exclude=["*.a"])
    assert other.notes == {"a": 5, "b": 2}


@pytest.mark.parametrize("name", ["a list of milestones", "a deque", "defaults", "a namespace"])
def test_state_that_schedulers_and_loaders_have_needs_no_pickle(name: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "a list of milestones": collections.Counter([2, 4, 4]),
        "a deque": collections.deque([1, 2], maxlen=5),
        "defaults": collections.defaultdict(list, {"a": [1]}),
        "a namespace": argparse.Namespace(lr=0.1, path=Path("/data/x")),
    }
    # In a tuple, since dicts of all kinds are stored by their elements.
    reshard.save({"v": (values[name],)}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"v": None}
    reshard.load(state, checkpoint_id=tmp_path)
    (found,) = state["v"]
    assert found == values[name]
    assert type(found) is type(values[name])
    assert getattr(found, "maxlen", None) == getattr(values[name], "maxlen", None)
    assert getattr(found, "default_factory", None) is getattr(values[name], "default_factory", None)

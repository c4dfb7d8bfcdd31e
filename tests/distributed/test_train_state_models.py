"""TrainState: models in wrappers, with ties or experts of their own, and parts of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import reshard
from reshard.training import TrainState
from support.ranks import run_ranks
from support.small_model import FORMS, adamw, fsdp1, losses, small_model
from support.whole import differences, stored

# Wrappers


def checkpointed(model: Any) -> Any:
    model.up = checkpoint_wrapper(model.up)
    return model


def compiled_inside(model: Any) -> Any:
    model.up = torch.compile(model.up, backend="eager")
    return model


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: model,
    "compile": compiled,
    "compile of a layer": compiled_inside,
    "activation checkpoints": checkpointed,
    "ddp": DistributedDataParallel,
    "all of them": lambda model: compiled(DistributedDataParallel(checkpointed(model))),
}


def save_in_wrappers(box: Path) -> dict[str, Any]:
    """Names in each checkpoint; the losses that follow are the same for all of them."""
    found = {}
    for name, wrap in WRAPPERS.items():
        plain = small_model()
        wrapped = wrap(plain)
        optimizer = adamw(wrapped.parameters())
        losses(plain, optimizer)
        state = {"train": TrainState(wrapped, optimizer)}
        reshard.save(state, checkpoint_id=box / name)
        found[name] = sorted(stored(box / name)["model"])
    return found


def load_in_wrappers(box: Path) -> dict[tuple[str, str], bool]:
    model = small_model()
    optimizer = adamw(model.parameters())
    losses(model, optimizer)
    expected = losses(model, optimizer)
    found = {}
    for source in WRAPPERS:
        for name, wrap in WRAPPERS.items():
            plain = small_model(1)
            wrapped = wrap(plain)
            fresh = adamw(wrapped.parameters())
            state = TrainState(wrapped, fresh)
            reshard.load({"train": state}, checkpoint_id=box / source, strict="exact")
            assert len(state.report.optimizer.restored) == 12
            found[source, name] = losses(plain, fresh) == expected
    return found


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    names = ["down.bias", "down.weight", "up.0.bias", "up.0.weight"]
    for found in run_ranks(1, save_in_wrappers, tmp_path):
        assert found == dict.fromkeys(WRAPPERS, names)
    for right in run_ranks(1, load_in_wrappers, tmp_path):
        assert [pair for pair, same in right.items() if not same] == []
        assert len(right) == len(WRAPPERS) ** 2


def test_data_parallel_leaves_no_trace_in_names(tmp_path: Path) -> None:
    model = nn.DataParallel(small_model())
    reshard.save({"train": TrainState(model)}, checkpoint_id=tmp_path)
    assert "up.0.weight" in stored(tmp_path)["model"]


# Ties


def tied(model: Any) -> Any:
    """Both layers are square, and share their weights."""
    model.up[0], model.down = nn.Linear(4, 4), nn.Linear(4, 4)
    model.down.weight = model.up[0].weight
    return model


def in_one_unit(model: nn.Module) -> nn.Module:
    """FSDP wants weights that are tied to be in one of its units."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


TIED_FORMS = {
    "plain": FORMS["plain"],
    "ddp": FORMS["ddp"],
    "fsdp1": lambda model: FSDP1(model, device_id=torch.device("cpu"), use_orig_params=True),
    "fsdp2": in_one_unit,
}


def save_and_load_tied(form: str, box: Path) -> dict[str, Any]:
    model, other = (TIED_FORMS[form](tied(small_model(seed))) for seed in (0, 1))
    optimizer, fresh = adamw(model.parameters()), adamw(other.parameters())
    losses(model, optimizer)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=box / form)
    reshard.load({"train": TrainState(other, fresh)}, checkpoint_id=box / form)
    # A tied parameter is counted once.
    return {
        "state": sorted(stored(box / form)["optimizer"]["state"]),
        "parameters": len(list(other.parameters())),
        "goes on": losses(model, optimizer) == losses(other, fresh),
    }


@pytest.mark.parametrize("form", TIED_FORMS)
def test_tied_weights_stay_tied_and_have_their_state_once(form: str, tmp_path: Path) -> None:
    names = ["down.bias", "up.0.bias", "up.0.weight"]
    for found in run_ranks(2, save_and_load_tied, form, tmp_path):
        assert found == {"state": names, "parameters": 3, "goes on": True}


def test_weights_that_were_tied_fill_a_model_without_the_tie(tmp_path: Path) -> None:
    model, other = tied(small_model()), tied(small_model(1))
    other.down.weight = nn.Parameter(torch.zeros(4, 4))
    reshard.save({"train": TrainState(model, adamw(model.parameters()))}, checkpoint_id=tmp_path)
    reshard.load({"train": TrainState(other, adamw(other.parameters()))}, checkpoint_id=tmp_path)
    assert other.down.weight is not other.up[0].weight
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []


# What modules keep besides tensors


class Counting(nn.Linear):
    """Has state of its own, as layers for low precision do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.history: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.history

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.history = state


def test_extra_state_of_modules_is_restored(tmp_path: Path) -> None:
    model, other = nn.ModuleDict({"layer": Counting()}), nn.ModuleDict({"layer": Counting()})
    model["layer"].history = {"calls": 3, "scales": [torch.ones(2), 0.5]}
    other["layer"].history = {"calls": 0, "scales": [torch.zeros(2), 0.0]}
    reshard.save({"train": TrainState(model)}, checkpoint_id=tmp_path)
    reshard.load({"train": TrainState(other)}, checkpoint_id=tmp_path)
    assert differences(other["layer"].history, model["layer"].history) == []
    assert torch.equal(other["layer"].weight, model["layer"].weight)


# Several models


def test_models_in_a_dict_get_its_keys_as_prefixes(tmp_path: Path) -> None:
    def pair(seed: int) -> tuple[dict[str, nn.Module], list[torch.optim.Optimizer]]:
        models: dict[str, nn.Module] = {"a": small_model(seed), "b": small_model(seed + 1)}
        return models, [adamw(model.parameters()) for model in models.values()]

    models, optimizers = pair(0)
    for model, optimizer in zip(models.values(), optimizers, strict=True):
        losses(model, optimizer)
    reshard.save({"train": TrainState(models, optimizers)}, checkpoint_id=tmp_path)
    others, fresh = pair(5)
    reshard.load({"train": TrainState(others, fresh)}, checkpoint_id=tmp_path)
    for name, optimizer, new in zip(models, optimizers, fresh, strict=True):
        assert losses(models[name], optimizer) == losses(others[name], new)
    # One of them alone is found under its prefix.
    alone = small_model(9)
    reshard.load(
        {"train": TrainState({"b": alone})}, checkpoint_id=tmp_path, exclude=["train.rng*"]
    )
    assert "a.down.bias" in stored(tmp_path)["model"]
    with pytest.raises(reshard.CheckpointException, match="pass a dict of models"):
        reshard.save({"t": TrainState([*models.values()])}, checkpoint_id=tmp_path / "clash")


def save_and_load_stages_in_fsdp1(box: Path) -> bool:
    def stages(seed: int) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        whole = small_model(seed)
        parts = [nn.ModuleDict({name: part}) for name, part in whole.named_children()]
        models = [fsdp1(part) for part in parts]
        return models, [adamw(model.parameters()) for model in models]

    models, optimizers = stages(0)
    reshard.save({"train": TrainState(models, optimizers)}, checkpoint_id=box)
    others, fresh = stages(1)
    reshard.load({"train": TrainState(others, fresh)}, checkpoint_id=box)
    pairs = zip(models, others, strict=True)
    return all(
        torch.equal(a, b)
        for one, other in pairs
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def test_a_list_of_models_may_be_in_fsdp1(tmp_path: Path) -> None:
    assert run_ranks(2, save_and_load_stages_in_fsdp1, tmp_path) == [True] * 2


# Experts

EXPERTS = 6


class NamedExperts(nn.Module):
    """A layer of experts, of which this rank has some, under their own names."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, EXPERTS)
        share = EXPERTS // ranks()
        mine = range(rank() * share, (rank() + 1) * share)
        self.experts = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in mine})


class StackedExperts(nn.Module):
    """Experts in one tensor, cut over the ranks that share them; four ranks hold it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, EXPERTS)
        self.experts = nn.Parameter(torch.rand(EXPERTS, 4, 4))
        if dist.is_initialized():
            sizes = (2, 2) if ranks() == 4 else (1, ranks())
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "experts"))["experts"]
            self.experts = nn.Parameter(distribute_tensor(self.experts.detach(), mesh, [Shard(0)]))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def train_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps in which the gradient of a parameter depends on its name alone."""
    for _ in range(2):
        for name, parameter in model.named_parameters():
            made = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            gradient = torch.rand(parameter.shape, generator=made)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def constant(kind: Callable[[], nn.Module], value: float) -> tuple[nn.Module, Any]:
    model = kind()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, adamw(model.parameters())


KINDS: dict[str, Callable[[], nn.Module]] = {"named": NamedExperts, "stacked": StackedExperts}


def train_experts(kind: str, box: Path) -> None:
    model, optimizer = constant(KINDS[kind], 1.0)
    train_by_name(model, optimizer)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=box)


def move_experts(kind: str, box: Path, again: Path) -> list[str]:
    model, optimizer = constant(KINDS[kind], 0.0)
    state = TrainState(model, optimizer)
    reshard.load({"train": state}, checkpoint_id=box)
    reshard.save({"train": state}, checkpoint_id=again)
    return state.report.optimizer.missing + state.report.optimizer.groups_left


@pytest.mark.parametrize("kind", KINDS)
def test_experts_move_to_another_number_of_ranks(kind: str, tmp_path: Path) -> None:
    def parts(box: Path) -> tuple[Any, Any]:
        found = stored(box)
        return found["model"], found["optimizer"]["state"]

    train_experts(kind, tmp_path / "alone")
    expected = parts(tmp_path / "alone")
    assert len(expected[0]) == (2 + 2 * EXPERTS if kind == "named" else 3)
    first = 2 if kind == "named" else 4
    run_ranks(first, train_experts, kind, tmp_path / "begun")
    assert differences(parts(tmp_path / "begun"), expected) == []
    for before, number, after in [("begun", 3, "three"), ("three", 1, "one"), ("one", 2, "two")]:
        found = run_ranks(number, move_experts, kind, tmp_path / before, tmp_path / after)
        assert found == [[]] * number
        assert differences(parts(tmp_path / after), expected) == []


# Parts of a checkpoint


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A checkpoint of a run."""
    model = small_model()
    optimizer = adamw(model.parameters())
    losses(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = TrainState(model, optimizer, scheduler, extra={"epoch": 1})
    reshard.save({"train": state}, checkpoint_id=tmp_path / "full")
    return tmp_path / "full"


def test_the_model_of_a_full_checkpoint_is_loaded_alone(full: Path) -> None:
    model = small_model(1)
    state = TrainState(model, rng=False)
    report = reshard.load({"train": state}, checkpoint_id=full)
    assert differences(dict(model.state_dict()), stored(full)["model"]) == []
    assert sorted(report.loaded) == [f"train.model.{name}" for name in sorted(model.state_dict())]
    assert "train.optimizer.state.down.bias.exp_avg" in report.unexpected
    assert any(name.startswith("train.scheduler") for name in report.unexpected)


def test_excluded_parameters_stay_as_they_are(full: Path) -> None:
    model = small_model(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    optimizer = adamw(model.parameters())
    exclude = ["train.model.down.*", "train.rng*"]
    report = reshard.load(
        {"train": TrainState(model, optimizer)}, checkpoint_id=full, exclude=exclude
    )
    wanted = {k: v for k, v in stored(full)["model"].items() if k.startswith("up")}
    wanted |= {k: v for k, v in before.items() if k.startswith("down")}
    assert differences(dict(model.state_dict()), wanted) == []
    assert torch.equal(torch.get_rng_state(), drawn)
    assert sorted(report.excluded)[:2] == ["train.model.down.bias", "train.model.down.weight"]
    assert len(optimizer.state) == 4


def load_fsdp1_in_part(box: Path) -> None:
    model = fsdp1(small_model(1))
    state = TrainState(model, adamw(model.parameters()), rng=False)
    reshard.load({"train": state}, checkpoint_id=box, exclude=["train.model.down.*"])
    reshard.save({"train": state}, checkpoint_id=f"{box}-again")


def test_excluded_parameters_of_fsdp1_stay_as_they_are(full: Path) -> None:
    run_ranks(2, load_fsdp1_in_part, full)
    up = {k: v for k, v in stored(full)["model"].items() if k.startswith("up")}
    wanted = dict(small_model(1).state_dict().items()) | up
    again = stored(full.with_name("full-again"))
    assert differences(again["model"], wanted) == []
    assert len(again["optimizer"]["state"]) == 4


def test_optimizer_state_that_is_excluded_stays_as_it_is(full: Path) -> None:
    model = small_model(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
    state = TrainState(model, optimizer)
    reshard.load({"train": state}, checkpoint_id=full, exclude=["train.optimizer.*"])
    assert (len(optimizer.state), optimizer.param_groups[0]["lr"]) == (0, 0.7)


def test_excluded_state_that_an_optimizer_does_not_have_is_not_made_up(full: Path) -> None:
    model = small_model(1)
    optimizer = adamw(model.parameters())
    state = TrainState(model, optimizer)
    reshard.load({"train": state}, checkpoint_id=full, exclude=["*.exp_avg"])
    assert optimizer.state[model.down.weight].keys() == {"exp_avg_sq", "step"}
    assert "down.weight.exp_avg" not in state.report.optimizer.restored

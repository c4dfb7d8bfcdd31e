"""load_sharded_optimizer_state_dict: state in the layout of the model, without an optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor

import reshard
from reshard.api import MissingKeyError
from reshard.optimizer import load_sharded_optimizer_state_dict
from reshard.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from support.optimizers import Factored
from support.ranks import run_ranks
from support.small_model import FORMS, adamw, fsdp1, losses, small_model
from support.whole import differences


def loaded(model_state: dict[str, Any], box: Path, key: str = "optimizer", **options: Any) -> Any:
    return load_sharded_optimizer_state_dict(
        model_state, key, reshard.FileSystemReader(box), **options
    )


def expected_losses() -> list[float]:
    """Of the third and fourth step, in one process."""
    model = small_model()
    optimizer = adamw(model.parameters())
    losses(model, optimizer)
    return losses(model, optimizer)


# FSDP, first version

STRATEGIES: dict[str, tuple[ShardingStrategy, str]] = {
    "full": (ShardingStrategy.FULL_SHARD, ""),
    "gradients only": (ShardingStrategy.SHARD_GRAD_OP, ""),
    "nothing": (ShardingStrategy.NO_SHARD, ""),
    "hybrid on groups": (ShardingStrategy.HYBRID_SHARD, "groups"),
    "hybrid on a mesh": (ShardingStrategy.HYBRID_SHARD, "mesh"),
}
CASES = {
    f"{name}, {'own' if own else 'flat'} parameters": (strategy, place, own)
    for name, (strategy, place) in STRATEGIES.items()
    for own in (True, False)
}


def in_fsdp1(case: str, seed: int) -> nn.Module:
    strategy, place, own = CASES[case]
    places: dict[str, Any] = {}
    if place:
        # Shards over two ranks. Over one, which is what FSDP takes for a machine here,
        # gradients are divided without being summed.
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
        over, copies = mesh.get_group(1), mesh.get_group(0)
        places = {"device_mesh": mesh} if place == "mesh" else {"process_group": (over, copies)}
    return fsdp1(small_model(seed), strategy, own, **places)


def state_of(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    with FSDP1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {
            "model": model.state_dict(),
            "optimizer": FSDP1.optim_state_dict(model, optimizer),
        }


def load_as_documented(model: nn.Module, optimizer: optim.Optimizer, box: Path) -> None:
    """As the documentation of DCP says, with another name."""
    with FSDP1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        reshard.load(state, checkpoint_id=box)
        model.load_state_dict(state["model"])
        found = loaded(state["model"], box)
        assert found.keys() == {"optimizer"}
        flat = FSDP1.optim_state_dict_to_load(model, optimizer, found["optimizer"])
        optimizer.load_state_dict(flat)


def save_every_case(box: Path) -> None:
    for case in CASES:
        model = in_fsdp1(case, seed=0)
        optimizer = adamw(model.parameters())
        losses(model, optimizer)
        reshard.save(state_of(model, optimizer), checkpoint_id=box / case)


def load_every_case(box: Path) -> dict[str, list[float]]:
    """Each case from the checkpoint of the next one."""
    found = {}
    cases = list(CASES)
    for case, source in zip(cases, [*cases[3:], *cases[:3]], strict=True):
        model = in_fsdp1(case, seed=1)
        optimizer = adamw(model.parameters())
        load_as_documented(model, optimizer, box / source)
        found[f"{case} from {source}"] = losses(model, optimizer)
    return found


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_fsdp1_goes_on_with_another_strategy_on_another_number_of_ranks(
    before: int, after: int, tmp_path: Path
) -> None:
    expected = expected_losses()
    run_ranks(before, save_every_case, tmp_path)
    for found in run_ranks(after, load_every_case, tmp_path):
        assert len(found) == len(CASES)
        for case, following in found.items():
            assert following == pytest.approx(expected, rel=1e-4), case


def save_and_load_fresh(box: Path) -> dict[str, Any]:
    model, other = fsdp1(small_model()), fsdp1(small_model(1))
    optimizer, fresh = optim.AdamW(model.parameters(), lr=0.3), adamw(other.parameters())
    reshard.save(state_of(model, optimizer), checkpoint_id=box)
    untouched = len(optimizer.state)
    with FSDP1.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        found = loaded(other.state_dict(), box)["optimizer"]
    rates = [group["lr"] for group in found["param_groups"]]
    load_as_documented(other, fresh, box)
    return {
        "untouched": untouched,
        "state": found.get("state"),
        "rates": rates,
        "goes on": losses(model, optimizer) == losses(other, fresh),
    }


def test_an_fsdp1_optimizer_that_never_stepped_is_loaded_as_documented(tmp_path: Path) -> None:
    for found in run_ranks(2, save_and_load_fresh, tmp_path):
        assert found == {"untouched": 0, "state": {}, "rates": [0.3], "goes on": True}


# DTensors, and plain tensors


def save_by_names(form: str, box: Path, **options: Any) -> None:
    model = FORMS[form](small_model())
    optimizer = adamw(model.parameters())
    losses(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    reshard.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=box)


def load_by_names(form: str, box: Path, **options: Any) -> list[float]:
    """Losses that follow; each state is laid out as its parameter is."""
    model = FORMS[form](small_model(1))
    optimizer = adamw(model.parameters())
    state = {"model": model.state_dict()}
    reshard.load(state, checkpoint_id=box)
    found = loaded(model.state_dict(), box)
    for name, parameter in model.state_dict().items():
        if options:
            kinds = {k: found["optimizer"][f"state.{name}.{k}"] for k in ("exp_avg", "step")}
        else:
            kinds = found["optimizer"]["state"][name]
        assert type(kinds["step"]) is torch.Tensor
        assert kinds["step"].shape == ()
        if isinstance(parameter, DTensor):
            assert kinds["exp_avg"].placements == parameter.placements
            assert kinds["exp_avg"].device_mesh == parameter.device_mesh
            assert kinds["exp_avg"].to_local().shape == parameter.to_local().shape
        else:
            assert type(kinds["exp_avg"]) is torch.Tensor
    set_optimizer_state_dict(
        model, optimizer, found["optimizer"], options=StateDictOptions(**options)
    )
    return losses(model, optimizer)


def save_all(box: Path) -> None:
    for form in ("fsdp2", "tp"):
        save_by_names(form, box / form)
        save_by_names(form, box / f"{form} flat", flatten_optimizer_state_dict=True)


def load_all(box: Path, forms: list[str]) -> dict[str, list[float]]:
    found = {}
    for form in forms:
        for source in ("fsdp2", "tp"):
            found[f"{form} from {source}"] = load_by_names(form, box / source)
            found[f"{form} from {source}, flat"] = load_by_names(
                form, box / f"{source} flat", flatten_optimizer_state_dict=True
            )
    return found


def test_state_is_laid_out_as_the_dtensors_of_the_model_are(tmp_path: Path) -> None:
    expected = expected_losses()
    run_ranks(2, save_all, tmp_path)
    for ranks, forms in [(4, ["fsdp2", "fsdp2 over tp"]), (2, ["tp"])]:
        for found in run_ranks(ranks, load_all, tmp_path, forms):
            for case, following in found.items():
                assert following == pytest.approx(expected, rel=1e-4), case
    # Without a process group.
    for case, following in load_all(tmp_path, ["plain"]).items():
        assert following == pytest.approx(expected, rel=1e-4), case


def test_without_a_group_state_is_whole_and_values_are_as_they_were(tmp_path: Path) -> None:
    model = small_model()
    optimizer = Factored(model.parameters())
    losses(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    reshard.save({"model": model.state_dict(), "optim": state, "epoch": 3}, checkpoint_id=tmp_path)
    # Of parameters that the model does not have, too.
    for names in (model.state_dict(), {}):
        found = loaded(names, tmp_path, "optim")
        assert differences(found, {"optim": state}) == []
        assert type(found["optim"]["state"]["down.weight"]["step"]) is int


@pytest.mark.parametrize("key", ["optimiser", "optimizer.state", "model.optimizer"])
def test_a_wrong_key_is_named_with_those_that_there_are(key: str, tmp_path: Path) -> None:
    save_by_names("plain", tmp_path)
    with pytest.raises(MissingKeyError, match=f"has no '{key}'; .*'optimizer'"):
        loaded(small_model().state_dict(), tmp_path, key)


def test_a_checkpoint_that_was_saved_without_flattening_is_refused(tmp_path: Path) -> None:
    planner = reshard.DefaultSavePlanner(flatten_state_dict=False)
    reshard.save({"optimizer": torch.ones(2)}, checkpoint_id=tmp_path, planner=planner)
    with pytest.raises(reshard.CheckpointException, match="without flattening"):
        loaded({}, tmp_path)


# Sharded tensors of sharded tensors, and parameters that the model does not have


def sharded(
    size: tuple[int, ...], pieces: list[tuple[list[int], list[int], int]], mine: Any, group: Any
) -> ShardedTensor:
    """A sharded tensor by hand: offsets, sizes and rank of all pieces, and what is held here."""
    shards = [ShardMetadata(offsets, sizes, f"rank:{rank}/cpu") for offsets, sizes, rank in pieces]
    properties = TensorProperties(dtype=torch.float32, layout=torch.strided)
    metadata = ShardedTensorMetadata(shards, torch.Size(size), properties)
    (own,) = [shard for shard in shards if shard.placement.rank() == dist.get_rank()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [LocalShard(mine, own)], metadata, process_group=group
    )


def fsdp_over_tp(whole: torch.Tensor, dim: int) -> tuple[ShardedTensor, torch.Tensor]:
    """As FSDP made it of tensor parallelism along `dim`, and the values that this rank holds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate()
    parts = whole.chunk(2, dim)
    rows = parts[tp].chunk(2)
    inner_sizes = [list(part.shape) for part in rows]
    inner = [
        ([0, 0], inner_sizes[0], tp),
        ([inner_sizes[0][0], 0], inner_sizes[1], 2 + tp),
    ]
    begin = [0, 0]
    begin[dim] = parts[0].shape[dim]
    outer = [
        ([0, 0], list(parts[0].shape), 2 * dp),
        (begin, list(parts[1].shape), 2 * dp + 1),
    ]
    held = sharded(tuple(parts[tp].shape), inner, torch.zeros(rows[dp].shape), mesh.get_group("dp"))
    return sharded(tuple(whole.shape), outer, held, mesh.get_group("tp")), rows[dp]


SIZES = {"rows": (8, 3), "columns": (6, 4), "uneven": (5, 7)}


def whole_state() -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)
    state: dict[str, Any] = {
        name: {
            "exp_avg": torch.rand(size, generator=made),
            "mean": torch.rand(size[0], generator=made),
            "step": torch.tensor(3.0),
            "kind": "adam",
        }
        for name, size in SIZES.items()
    }
    state["gone"] = {"exp_avg": torch.arange(10.0).view(5, 2), "step": torch.tensor(4.0)}
    return {"state": state, "param_groups": [{"lr": 0.5, "params": [*state]}]}


def load_nested(box: Path, with_planner: bool) -> list[str]:
    """What is not as it should be."""
    state = whole_state()["state"]
    dims = {"rows": 0, "columns": 1, "uneven": 0}
    layouts = {n: fsdp_over_tp(state[n]["exp_avg"], dim) for n, dim in dims.items()}
    options = {"planner": reshard.DefaultLoadPlanner()} if with_planner else {}
    found = loaded({name: layout[0] for name, layout in layouts.items()}, box, "optim", **options)
    wrong = differences(found["optim"]["param_groups"], whole_state()["param_groups"])
    for name, (parameter, mine) in layouts.items():
        got = found["optim"]["state"][name]
        (shard,) = got["exp_avg"].local_shards()
        inner = parameter.local_shards()[0].tensor
        wrong += differences(shard.tensor, mine)
        wrong += differences(got["exp_avg"].metadata(), inner.metadata())
        # State of another size than the parameter's is whole on all ranks.
        del got["exp_avg"], state[name]["exp_avg"]
        wrong += differences(got, state[name])
    gone = found["optim"]["state"]["gone"]
    held = [shard.tensor for shard in gone["exp_avg"].local_shards()]
    rows = list(state["gone"]["exp_avg"].split(2))[dist.get_rank() :][:1]
    wrong += differences(held, rows) + differences(gone["step"], state["gone"]["step"])
    if tuple(gone["exp_avg"].size()) != (5, 2):
        wrong.append(f"gone has the size {gone['exp_avg'].size()}")
    return wrong


@pytest.mark.parametrize(
    "with_planner",
    [
        False,
        # DCP takes such a planner, and does without it where offsets are needed.
        True,
    ],
    ids=["no planner", "a planner is given"],
)
def test_each_parameter_of_fsdp_over_tp_gets_the_part_at_its_own_offset(
    with_planner: bool, tmp_path: Path
) -> None:
    reshard.save({"optim": whole_state()}, checkpoint_id=tmp_path)
    assert run_ranks(4, load_nested, tmp_path, with_planner) == [[]] * 4

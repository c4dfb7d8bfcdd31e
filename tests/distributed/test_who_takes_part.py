"""Which ranks save and load together: groups, single ranks, ranks without each other."""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import reshard
from reshard.api import (
    CheckpointException,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from reshard.default_planner import PlanCache
from support.background import wait_until
from support.ranks import run_ranks
from support.samples import SHAPES, SPREADS, same_bits, sample

WHOLE = torch.arange(22.0).view(11, 2)


def sharded(full: torch.Tensor, placement: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(full, mesh, [placement], src_data_rank=None)


# A group that is smaller than the world


def save_in_groups(folder: str) -> Any:
    """Two ranks of four save; the others do other things, and then save on their own."""
    first, second = dist.new_group([0, 2]), dist.new_group([1, 3])
    rank = dist.get_rank()
    mine = first if rank in (0, 2) else second
    place = f"{folder}/{rank % 2}"
    if rank in (1, 3):
        # Were they needed, the first group would wait for them now.
        token = torch.zeros(1)
        dist.recv(token, src=rank - 1)
        assert reshard.read_state_dict(f"{folder}/0")["common"] == 0
    state_dict = {f"of_rank_{rank}": torch.full((3,), float(rank)), "common": rank % 2}
    metadata = reshard.save(state_dict, checkpoint_id=place, process_group=mine)
    loaded = {f"of_rank_{rank}": torch.zeros(3), "common": -1}
    report = reshard.load(loaded, checkpoint_id=place, process_group=mine)
    if rank in (0, 2):
        dist.send(torch.zeros(1), dst=rank + 1)
    assert loaded["common"] == rank % 2
    assert loaded[f"of_rank_{rank}"].tolist() == [float(rank)] * 3
    return sorted(metadata.state_dict_metadata), report.unexpected


def test_a_group_saves_and_loads_while_other_ranks_do_other_things(tmp_path: Path) -> None:
    names, others = zip(*run_ranks(4, save_in_groups, str(tmp_path)), strict=True)

    assert (
        list(names)
        == [
            ["common", "of_rank_0", "of_rank_2"],
            ["common", "of_rank_1", "of_rank_3"],
        ]
        * 2
    )
    assert list(others) == [[]] * 4
    assert sorted(path.name[:5] for path in (tmp_path / "1").glob("*.safetensors")) == [
        "__0_0",
        "__1_0",
    ]


def fail_in_a_group(folder: str) -> Any:
    """Failures name the rank within the group, whose save it was."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None

    class Planner(reshard.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if dist.get_rank() == 2:
                raise ValueError("the third rank has had enough")
            return super().resolve_data(write_item)

    state_dict = {f"of_rank_{dist.get_rank()}": 1}
    try:
        reshard.save(state_dict, checkpoint_id=folder, process_group=group, planner=Planner())
    except reshard.CheckpointException as error:
        return {rank: str(reason) for rank, (reason, _) in error.failures.items()}
    return None


def test_a_failure_in_a_group_is_told_to_its_ranks(tmp_path: Path) -> None:
    told = {1: "the third rank has had enough"}

    assert run_ranks(3, fail_in_a_group, str(tmp_path)) == [None, told, told]


def save_alternately(folder: str) -> list[int]:
    """Saves on the world and on groups, by turns, each as often as its ranks like."""
    pair = dist.new_group([0, 1])
    seen = []
    for step in range(3):
        if dist.get_rank() < 2:
            reshard.save({"a": step}, checkpoint_id=f"{folder}/pair", process_group=pair)
            reshard.save({"a": step + 10}, checkpoint_id=f"{folder}/pair", process_group=pair)
        reshard.save({"a": step + 20}, checkpoint_id=f"{folder}/all")
        state_dict = {"a": -1}
        reshard.load(state_dict, checkpoint_id=f"{folder}/all")
        seen.append(state_dict["a"])
    return seen


def test_operations_of_different_groups_do_not_mix(tmp_path: Path) -> None:
    assert run_ranks(3, save_alternately, str(tmp_path)) == [[20, 21, 22]] * 3
    assert reshard.read_state_dict(tmp_path / "pair") == {"a": 12}


# One rank alone


def save_each_alone(folder: str) -> Any:
    rank = dist.get_rank()
    place = f"{folder}/{rank}"
    if rank == 1:
        return None
    reshard.save({"w": WHOLE + rank, "rank": rank}, checkpoint_id=place, no_dist=True)
    state_dict = {"w": torch.zeros(11, 2), "rank": -1}
    reshard.load(state_dict, checkpoint_id=place, no_dist=True)
    return torch.equal(state_dict["w"], WHOLE + rank), state_dict["rank"]


def test_with_no_dist_a_rank_saves_and_loads_on_its_own(tmp_path: Path) -> None:
    outcomes = run_ranks(3, save_each_alone, str(tmp_path))

    assert outcomes == [(True, 0), None, (True, 2)]


# Ranks that do not plan together


def save_without_collectives(folder: str, seed: float = 0.0) -> None:
    reshard.save(
        {
            "rows": sharded(WHOLE + seed, Shard(0)),
            "replicated": sharded(WHOLE + seed, Replicate()),
            "plain": WHOLE + seed,
            "step": seed,
            f"only_on_{dist.get_rank()}": torch.full((2,), dist.get_rank() + seed),
        },
        checkpoint_id=folder,
        use_collectives=False,
    )


def load_in_columns(folder: str) -> tuple[list[str], float]:
    state_dict = {
        "rows": sharded(torch.zeros(11, 2), Shard(1)),
        "replicated": sharded(torch.zeros(11, 2), Shard(0)),
        "plain": torch.zeros(11, 2),
        "step": -1.0,
        "only_on_2": torch.zeros(2),
    }
    reshard.load(state_dict, checkpoint_id=folder)
    step = state_dict["step"]
    full = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in state_dict.items()
        if name != "step"
    }
    wrong = [n for n in ("rows", "replicated", "plain") if not same_bits(full[n], WHOLE + step)]
    if full["only_on_2"].tolist() != [2.0 + step] * 2:
        wrong.append("only_on_2")
    return wrong, step


def test_what_ranks_saved_without_each_other_loads_in_another_layout(tmp_path: Path) -> None:
    run_ranks(3, save_without_collectives, str(tmp_path))

    assert run_ranks(2, load_in_columns, str(tmp_path)) == [([], 0.0)] * 2
    assert sorted(path.name[:16] for path in tmp_path.glob(".metadata*")) == [
        ".metadata",
        *(f".metadata.{rank}-of-3" for rank in range(3)),
    ]


def save_all_spreads_without_collectives(folder: str) -> None:
    for number, spread in enumerate(SPREADS[dist.get_world_size()].values()):
        reshard.save(
            spread.state_dict(seed=number),
            checkpoint_id=f"{folder}/{number}",
            use_collectives=False,
        )


def load_all_spreads(folder: str, saved_on: int) -> list[str]:
    wrong = []
    for number, saved in enumerate(SPREADS[saved_on]):
        for wanted, spread in SPREADS[dist.get_world_size()].items():
            state_dict = spread.state_dict(seed=None)
            reshard.load(state_dict, checkpoint_id=f"{folder}/{number}")
            for name in SHAPES:
                expected = spread.local_part(sample(name, number), dist.get_rank())
                if not same_bits(state_dict[name].to_local(), expected):
                    wrong.append(f"{name} from {saved!r} to {wanted!r}")
    return wrong


def test_every_layout_that_ranks_saved_without_each_other_loads_in_every_other(
    tmp_path: Path,
) -> None:
    run_ranks(4, save_all_spreads_without_collectives, str(tmp_path))

    assert run_ranks(3, load_all_spreads, str(tmp_path), 4) == [[]] * 3


def test_a_part_that_was_removed_is_named(tmp_path: Path) -> None:
    run_ranks(3, save_without_collectives, str(tmp_path))
    [part] = tmp_path.glob(".metadata.1-of-3.*")
    part.unlink()

    with pytest.raises(CorruptCheckpointError, match=r"what rank 1 of 3 saved"):
        reshard.FileSystemReader(tmp_path).read_metadata()


def test_a_part_of_another_save_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        run_ranks(3, save_without_collectives, str(tmp_path / str(number)))
    [part] = (tmp_path / "1").glob(".metadata.1-of-3.*")
    [other] = (tmp_path / "2").glob(".metadata.1-of-3.*")
    part.write_bytes(other.read_bytes())

    with pytest.raises(CorruptCheckpointError, match="belongs to another save"):
        reshard.FileSystemReader(tmp_path / "1").read_metadata()


def overwrite_together(folder: str) -> None:
    reshard.save({"step": 5.0}, checkpoint_id=folder)


def test_a_save_with_collectives_replaces_the_parts(tmp_path: Path) -> None:
    run_ranks(3, save_without_collectives, str(tmp_path))
    run_ranks(2, overwrite_together, str(tmp_path))

    assert reshard.read_state_dict(tmp_path) == {"step": 5.0}
    assert not list(tmp_path.glob(".metadata.*"))


def test_parts_replace_a_checkpoint_that_was_saved_with_collectives(tmp_path: Path) -> None:
    run_ranks(2, overwrite_together, str(tmp_path))
    run_ranks(3, save_without_collectives, str(tmp_path), 7.0)

    assert run_ranks(2, load_in_columns, str(tmp_path)) == [([], 7.0)] * 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_parts_replace_those_of_the_same_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(3, save_without_collectives, str(tmp_path), 1.0)
    run_ranks(3, save_without_collectives, str(tmp_path), 7.0)

    assert run_ranks(2, load_in_columns, str(tmp_path)) == [([], 7.0)] * 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_parts_replace_those_of_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(4, save_without_collectives, str(tmp_path), 1.0)
    run_ranks(3, save_without_collectives, str(tmp_path), 7.0)

    assert run_ranks(2, load_in_columns, str(tmp_path)) == [([], 7.0)] * 2


def fail_without_collectives(folder: str) -> list[int]:
    """The last rank fails before its part is written; the others have written theirs."""

    class Planner(reshard.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if dist.get_rank() == 2:
                raise ValueError("the third rank has had enough")
            return super().resolve_data(write_item)

    try:
        reshard.save(
            {"rows": sharded(WHOLE + 7, Shard(0)), "step": 7.0},
            checkpoint_id=folder,
            use_collectives=False,
            planner=Planner(),
        )
    except reshard.CheckpointException as error:
        return list(error.failures)
    return []


def test_a_failure_without_collectives_is_told_to_every_rank(tmp_path: Path) -> None:
    assert run_ranks(3, fail_without_collectives, str(tmp_path)) == [[2]] * 3
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint"):
        reshard.FileSystemReader(tmp_path).read_metadata()


def contradict(folder: str, kind: str) -> str:
    """Save without collectives what no reader could put together."""
    odd = {
        "shape": torch.zeros(3),
        "dtype": torch.zeros(2, dtype=torch.int64),
        "value": "not a tensor",
    }
    value = odd[kind] if dist.get_rank() == 1 else torch.zeros(2)
    try:
        reshard.save({"w": value}, checkpoint_id=folder, use_collectives=False)
    except reshard.CheckpointException as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("kind", ["shape", "dtype", "value"])
def test_ranks_that_contradict_each_other_without_collectives_replace_nothing(
    kind: str, tmp_path: Path
) -> None:
    reshard.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)

    for told in run_ranks(2, contradict, str(tmp_path), kind):
        assert "disagree about" in told
    assert reshard.read_tensor(tmp_path, "w").tolist() == [1.0, 1.0]
    assert len(list(tmp_path.iterdir())) == 2


class Late(reshard.DefaultSavePlanner):
    """Goes on when there is another file of that pattern."""

    def __init__(self, pattern: str, older: set[str]) -> None:
        super().__init__()
        self.pattern = pattern
        self.older = older

    def finish_plan(self, new_plan: reshard.SavePlan) -> reshard.SavePlan:
        wait_until(lambda: set(glob.glob(self.pattern)) - self.older)
        return super().finish_plan(new_plan)


class Failing(reshard.DefaultSavePlanner):
    def finish_plan(self, new_plan: reshard.SavePlan) -> reshard.SavePlan:
        raise OSError("no space left")


def fail_and_try_again(folder: str) -> list[str]:
    """Without collectives: a save, one that fails on rank 1, and one where rank 0 is late."""
    rank = dist.get_rank()

    def save(seed: float, planner: Any = None) -> None:
        state = {f"of_{rank}": torch.full((2,), seed)}
        reshard.save(state, checkpoint_id=folder, planner=planner, use_collectives=False)

    save(1.0)
    with pytest.raises(reshard.CheckpointException):
        save(2.0, Failing() if rank == 1 else None)
    dist.barrier()
    left = sorted(os.listdir(folder))
    dist.barrier()
    older = set(glob.glob(f"{folder}/.metadata.1-of-2.*"))
    save(3.0, Late(f"{folder}/.metadata.1-of-2.*", older) if rank == 0 else None)
    return left


def test_a_save_after_a_failure_without_collectives_is_not_mixed_with_it(tmp_path: Path) -> None:
    for left in run_ranks(2, fail_and_try_again, str(tmp_path)):
        assert [name.rpartition(".")[0] for name in left[1:3]] == [
            ".metadata.0-of-2",
            ".metadata.1-of-2",
        ]
        assert [name[:5] for name in left[3:]] == ["__0_0", "__1_0"]
        # All of the save that did not fail.
        assert len({name.removesuffix(".safetensors")[-16:] for name in left[1:]}) == 1
    found = reshard.read_state_dict(tmp_path)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "of_0": [3.0, 3.0],
        "of_1": [3.0, 3.0],
    }


def test_overwrite_false_respects_a_checkpoint_in_parts(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, use_collectives=False)
    writer = reshard.FileSystemWriter(tmp_path, overwrite=False)
    for use_collectives in (True, False):
        with pytest.raises(
            reshard.CheckpointException, match=r"already exists at .*, and overwrite=False"
        ) as caught:
            reshard.save(
                {"w": torch.zeros(2)}, storage_writer=writer, use_collectives=use_collectives
            )
        assert isinstance(caught.value.failures[0][0], CheckpointExistsError)
    assert reshard.read_tensor(tmp_path, "w").tolist() == [1.0, 1.0]


def test_a_planner_that_remembers_may_be_used_with_and_without_collectives(tmp_path: Path) -> None:
    planner = reshard.DefaultSavePlanner(enable_plan_caching=True)
    for number, use_collectives in enumerate([True, False, False, True, True]):
        state = {"w": torch.full((2,), float(number))}
        place = tmp_path / str(use_collectives)
        reshard.save(state, checkpoint_id=place, planner=planner, use_collectives=use_collectives)
        assert reshard.read_tensor(place, "w").tolist() == [number] * 2


def test_a_failure_without_collectives_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    run_ranks(3, save_without_collectives, str(tmp_path), 1.0)
    assert run_ranks(3, fail_without_collectives, str(tmp_path)) == [[2]] * 3

    found = reshard.read_state_dict(tmp_path)
    assert found["step"] == 1.0
    assert same_bits(found["rows"], WHOLE + 1)


# Plan caching


def save_with_a_cache(folder: str) -> list[str]:
    """One planner for saves whose layout stays, changes on one rank, and changes back."""
    planner = reshard.DefaultSavePlanner(enable_plan_caching=True)
    rank = dist.get_rank()
    wrong = []
    extras = [0, 0, 3, 3, 5, 0, 0]
    for step, extra in enumerate(extras):
        state_dict: dict[str, Any] = {
            "w": sharded(WHOLE + step, Shard(0)),
            "plain": WHOLE * step,
            "step": step,
        }
        if rank == 1 and extra:
            state_dict["extra"] = torch.full((extra,), float(step))
        place = f"{folder}/{step % 2}"
        reshard.save(state_dict, checkpoint_id=place, planner=planner)
        found = reshard.read_state_dict(place)
        if not (
            same_bits(found["w"], WHOLE + step)
            and same_bits(found["plain"], WHOLE * step)
            and found["step"] == step
            and ("extra" in found) == bool(extra)
            and (not extra or found["extra"].tolist() == [float(step)] * extra)
        ):
            wrong.append(f"step {step}")
        # Nobody may begin the next save while others still look at this one.
        dist.barrier()
    return wrong


def test_cached_plans_follow_a_layout_that_changes_on_one_rank(tmp_path: Path) -> None:
    assert run_ranks(3, save_with_a_cache, str(tmp_path)) == [[]] * 3


def forget_on_one_rank(folder: str, who: int) -> list[float]:
    """A rank whose planner is new while those of the others remember."""
    planner = reshard.DefaultSavePlanner(enable_plan_caching=True)
    seen = []
    for step in range(4):
        if step == 2 and dist.get_rank() == who:
            planner = reshard.DefaultSavePlanner(enable_plan_caching=True)
        state_dict = {"w": sharded(WHOLE + step, Shard(0)), "step": step}
        reshard.save(state_dict, checkpoint_id=folder, planner=planner)
        found = reshard.read_state_dict(folder)
        seen.append(found["step"] if same_bits(found["w"], WHOLE + step) else -1)
        dist.barrier()
    return seen


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_forgot_its_plans_does_not_fail_the_save(who: int, tmp_path: Path) -> None:
    assert run_ranks(3, forget_on_one_rank, str(tmp_path), who) == [[0, 1, 2, 3]] * 3


def two_models_with_one_cache(folder: str) -> list[str]:
    cache = PlanCache()
    wrong = []
    for step in range(4):
        rows = 11 if step % 2 else 7
        whole = torch.full((rows, 2), float(step))
        planner = reshard.DefaultSavePlanner(plan_cache=cache)
        reshard.save({"w": sharded(whole, Shard(0))}, checkpoint_id=folder, planner=planner)
        if not same_bits(reshard.read_tensor(folder, "w"), whole):
            wrong.append(f"step {step}")
        dist.barrier()
    return wrong


def test_two_models_that_share_a_cache_are_not_confused(tmp_path: Path) -> None:
    assert run_ranks(2, two_models_with_one_cache, str(tmp_path)) == [[]] * 2


def fail_between_cached_saves(folder: str) -> list[Any]:
    """A save that fails on one rank must not leave plans that the next save relies on."""

    class Planner(reshard.DefaultSavePlanner):
        broken = False

        def finish_plan(self, new_plan: Any) -> Any:
            if self.broken and dist.get_rank() == 1:
                raise ValueError("not now")
            return super().finish_plan(new_plan)

    planner = Planner(enable_plan_caching=True)
    seen: list[Any] = []
    for step, rows in enumerate([7, 9, 9, 7]):
        planner.broken = step == 1
        whole = torch.full((rows, 2), float(step))
        try:
            reshard.save({"w": sharded(whole, Shard(0))}, checkpoint_id=folder, planner=planner)
        except reshard.CheckpointException as error:
            seen.append(list(error.failures))
            continue
        seen.append(same_bits(reshard.read_tensor(folder, "w"), whole))
        dist.barrier()
    return seen


def test_a_failed_save_does_not_spoil_cached_plans(tmp_path: Path) -> None:
    outcomes = run_ranks(3, fail_between_cached_saves, str(tmp_path))

    assert outcomes == [[True, [1], True, True]] * 3


# Many ranks


def save_and_load_once(folder: str) -> bool:
    whole = torch.arange(1000.0).view(100, 10)
    reshard.save({"w": sharded(whole, Shard(0)), "step": 1}, checkpoint_id=folder)
    state_dict = {"w": sharded(torch.zeros(100, 10), Shard(1)), "step": 0}
    reshard.load(state_dict, checkpoint_id=folder)
    return same_bits(state_dict["w"].full_tensor(), whole) and state_dict["step"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("store", ["file", "tcp", "tcp on rank 0"])
def test_sixteen_ranks_save_and_load(store: Any, tmp_path: Path) -> None:
    assert run_ranks(16, save_and_load_once, str(tmp_path), store=store) == [True] * 16


@pytest.mark.parametrize("store", ["tcp", "tcp on rank 0"])
def test_ranks_that_met_at_a_server_save_and_load(store: Any, tmp_path: Path) -> None:
    assert run_ranks(3, save_and_load_once, str(tmp_path), store=store) == [True] * 3


# Ranks that mean different checkpoints


def load_from(places: list[str]) -> Any:
    rank = dist.get_rank()
    state_dict = {"w": torch.zeros(2)}
    try:
        reshard.load(state_dict, checkpoint_id=places[rank])
    except CheckpointException as error:
        return state_dict["w"].tolist(), str(error)
    return state_dict["w"].tolist(), ""


def test_ranks_that_open_different_checkpoints_load_nothing(tmp_path: Path) -> None:
    for step in (1, 2):
        state_dict = {"w": torch.full((2,), float(step))}
        reshard.save(state_dict, checkpoint_id=tmp_path / str(step), no_dist=True)
    places = [str(tmp_path / step) for step in "112"]
    for values, message in run_ranks(3, load_from, places):
        assert values == [0.0, 0.0]
        assert "ranks opened different checkpoints" in message
        for rank in (0, 2):
            save_id = reshard.FileSystemReader(places[rank]).read_metadata().storage_meta.save_id
            assert f"rank {rank} the save {save_id} at '{places[rank]}'" in message


def test_ranks_may_load_copies_of_one_checkpoint(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for values, message in run_ranks(2, load_from, [str(tmp_path / "a"), str(tmp_path / "b")]):
        assert values == [1.0, 1.0], message

"""Planners and storages of users that change what passes through their hands."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from support.ranks import run_ranks


class InAnotherOrder(reshard.FileSystemWriter):
    """Writes what is planned last first."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        items = sorted(plan.items, key=lambda item: item.index.fqn, reverse=True)
        return super().write_data(dataclasses.replace(plan, items=items), planner)


class Reversing(reshard.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        plan.items.reverse()
        return super().write_data(plan, planner)


class SortingPlanner(reshard.DefaultSavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        final = super().finish_plan(new_plan)
        final.items.sort(key=lambda item: item.index.fqn, reverse=True)
        return final


class Looking(reshard.FileSystemWriter):
    """Looks at results without changing them."""

    total = 0

    def write_data(self, plan: Any, planner: Any) -> Any:
        return super().write_data(plan, planner).then(lambda done: [*done.value()])

    def finish(self, metadata: Any, results: Any) -> None:
        self.total = sum(result.size_in_bytes for some in results for result in some)
        super().finish(metadata, results)


class InTwoGoes(reshard.FileSystemWriter):
    """Calls the base class twice; it numbers its files from what the plan says."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        prefix, _, first = plan.storage_data.rpartition("_")
        done = []
        for number, items in enumerate((plan.items[:1], plan.items[1:])):
            name = f"{prefix}_{int(first) + number}"
            part = dataclasses.replace(plan, items=items, storage_data=name)
            done.append(super().write_data(part, planner))
        return done[0].then(lambda first: [*first.value(), *done[1].value()])


def state(factor: float, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    found: dict[str, Any] = {name: torch.full((4, 2), factor * i) for i, name in enumerate("abcd")}
    if mesh is not None:
        found = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in found.items()}
    return found | {"step": int(factor), "note": "text"}


WAYS: dict[str, tuple[Any, Any]] = {
    "in another order": (InAnotherOrder, reshard.DefaultSavePlanner),
    "reversed in place": (Reversing, reshard.DefaultSavePlanner),
    "sorted by the planner": (reshard.FileSystemWriter, SortingPlanner),
    "looked at": (Looking, reshard.DefaultSavePlanner),
    "in two goes": (InTwoGoes, reshard.DefaultSavePlanner),
}


def save_and_load(folder: str, way: str, caching: bool) -> list[Any]:
    writer_type, planner_type = WAYS[way]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    writer, planner = writer_type(folder), planner_type(enable_plan_caching=caching)
    found = []
    for factor in (1.0, 2.0, 3.0):
        reshard.save(state(factor, ranks), storage_writer=writer, planner=planner)
        target = state(0.0, ranks)
        reshard.load(target, checkpoint_id=folder)
        wanted = state(factor, ranks)
        found += [
            name
            for name, value in wanted.items()
            if not (
                torch.equal(value.to_local(), target[name].to_local())
                if hasattr(value, "to_local")
                else torch.equal(value, target[name])
                if isinstance(value, torch.Tensor)
                else value == target[name]
            )
        ]
    return found


@pytest.mark.parametrize("caching", [False, True], ids=["", "cached"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_storage_or_planner_writes_in_its_own_way_is_found(
    way: str, caching: bool, tmp_path: Path
) -> None:
    assert save_and_load(str(tmp_path / "alone"), way, caching) == []
    assert run_ranks(2, save_and_load, str(tmp_path / "two"), way, caching) == [[], []]


class Forgetful(reshard.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        return super().write_data(dataclasses.replace(plan, items=plan.items[1:]), planner)


@pytest.mark.parametrize("names", ["ab", "abcde"])
def test_a_storage_that_leaves_something_out_does_not_commit(names: str, tmp_path: Path) -> None:
    state = {name: torch.ones(2) for name in names}
    with pytest.raises(reshard.CheckpointException, match="no rank wrote all of 'a'"):
        reshard.save(state, storage_writer=Forgetful(tmp_path))
    assert not (tmp_path / ".metadata").exists()


# Names and paths


class Prefixing(reshard.DefaultSavePlanner):
    """Renames what it saves, but not the paths."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {f"ema.{name}": value for name, value in self.state_dict.items()}
        self.mappings = {f"ema.{name}": path for name, path in self.mappings.items()}


def save_and_load_renamed(folder: str) -> list[Any]:
    reshard.save(
        {"w": torch.ones(2), "o": [torch.zeros(1)], "n": {7: 5}},
        checkpoint_id=folder,
        planner=Prefixing(),
    )
    target = {"ema": {"w": torch.zeros(2), "o": [torch.ones(1)]}}
    reshard.load(target, checkpoint_id=folder)
    kept = reshard.FileSystemReader(folder).read_metadata().planner_data
    return [target["ema"]["w"].tolist(), target["ema"]["o"][0].tolist(), kept["ema.o.0"]]


def test_paths_that_are_not_the_pieces_of_their_names_are_kept(tmp_path: Path) -> None:
    expected = [[1.0, 1.0], [0.0], ("o", 0)]
    assert save_and_load_renamed(str(tmp_path / "alone")) == expected
    assert run_ranks(2, save_and_load_renamed, str(tmp_path / "two")) == [expected] * 2


class Noting(reshard.DefaultSavePlanner):
    """Keeps something of its own in planner_data."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        kept = self.keep(metadata.planner_data)
        return plans, dataclasses.replace(metadata, planner_data=kept)

    def keep(self, paths: Any) -> Any:
        return {"paths": paths, "extra": 1}


class NotingInPlace(Noting):
    def keep(self, paths: Any) -> Any:
        paths["world"] = (4,)
        paths["epoch"] = 3
        return paths


@pytest.mark.parametrize("planner", [Noting, NotingInPlace])
def test_what_planners_keep_of_their_own_comes_back(planner: Any, tmp_path: Path) -> None:
    reshard.save({"a": {"w": torch.ones(2)}, "n": 3}, checkpoint_id=tmp_path, planner=planner())
    kept = reshard.FileSystemReader(tmp_path).read_metadata().planner_data
    paths = {"a.w": ("a", "w"), "n": ("n",)}
    expected = (
        {"paths": paths, "extra": 1} if planner is Noting else paths | {"world": (4,), "epoch": 3}
    )
    assert kept == expected
    target = {"a": {"w": torch.zeros(2)}, "n": 0}
    reshard.load(target, checkpoint_id=tmp_path)
    assert (target["a"]["w"].tolist(), target["n"]) == ([1.0, 1.0], 3)


@pytest.mark.parametrize("other", ["x", "y"])
def test_a_tensor_without_a_name_hides_no_other(other: str, tmp_path: Path) -> None:
    tied = torch.zeros(3)
    state = {"": torch.ones(2), other: tied, "tied": tied}
    reshard.save(state, checkpoint_id=tmp_path)
    target = {"": torch.zeros(2), other: torch.ones(3), "tied": torch.ones(3)}
    reshard.load(target, checkpoint_id=tmp_path)
    assert [t.tolist() for t in target.values()] == [[1.0, 1.0], [0.0] * 3, [0.0] * 3]


# Readers


class Copying(reshard.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().read_metadata(*args, **kwargs)
        metadata.storage_data = dict(metadata.storage_data)
        return metadata


class Renaming(reshard.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().read_metadata(*args, **kwargs)
        metadata.storage_data = {
            dataclasses.replace(index, fqn=f"x.{index.fqn}"): info
            for index, info in metadata.storage_data.items()
        }
        return metadata


def test_a_reader_may_copy_where_things_lie_but_not_change_it(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(2), "n": 3}, checkpoint_id=tmp_path)
    target = {"w": torch.zeros(2), "n": 0}
    reshard.load(target, storage_reader=Copying(tmp_path))
    assert (target["w"].tolist(), target["n"]) == ([1.0, 1.0], 3)
    with pytest.raises(reshard.CheckpointException, match="storage_data that it did not make"):
        reshard.load(target, storage_reader=Renaming(tmp_path))


def test_a_reader_that_allows_pickles_is_enough(tmp_path: Path) -> None:
    reshard.save({"odd": range(3)}, checkpoint_id=tmp_path)
    reader = reshard.FileSystemReader(tmp_path, allow_pickle=True)
    planner = reshard.DefaultLoadPlanner()
    target: dict[str, Any] = {"odd": None}
    reshard.load(target, storage_reader=reader, planner=planner)
    assert target["odd"] == range(3)
    # For this reader only.
    assert not planner.allow_pickle

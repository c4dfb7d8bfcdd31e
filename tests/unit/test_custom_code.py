"""What planners, storages and stateful objects of users see, and what is made of what they do."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard
from reshard.api import CorruptCheckpointError, PlanError
from reshard.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from reshard.metadata import TensorStorageMetadata

T = torch.arange(4.0)


class Doubling(DefaultSavePlanner):
    @functools.wraps(DefaultSavePlanner.transform_object)
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object) * 2


class Committing(DefaultLoadPlanner):
    committed = 0

    @functools.wraps(DefaultLoadPlanner.commit_tensor)
    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.committed += 1


def test_an_override_that_is_wrapped_like_the_default_is_called(tmp_path: Path) -> None:
    reshard.save({"w": T}, checkpoint_id=tmp_path, planner=Doubling())
    loading = Committing()
    state = {"w": torch.zeros(4)}
    reshard.load(state, checkpoint_id=tmp_path, planner=loading)

    assert state["w"].equal(2 * T)
    assert loading.committed == 1


class Truncating(reshard.FileSystemWriter):
    """A file system that loses the end of a file."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        done = super().write_data(plan, planner)
        for file in Path(self.path).glob("*.safetensors"):
            os.truncate(file, 4000)
        return done


def test_a_shard_file_that_lost_its_end_is_not_committed(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="has 4000 bytes, although"):
        reshard.save({"w": torch.ones(9999)}, storage_writer=Truncating(tmp_path))
    assert not (tmp_path / ".metadata").exists()


class Removing(reshard.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        done = super().write_data(plan, planner)
        for file in Path(self.path).glob("*.safetensors"):
            file.unlink()
        return done


def test_a_shard_file_of_its_own_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(reshard.CheckpointException, match="files of this save were removed"):
        reshard.save({"w": T}, storage_writer=Removing(tmp_path))


class OfBoth(reshard.FileSystemWriter, dcp.StorageWriter):
    pass


@pytest.mark.parametrize("save", [reshard.save, reshard.async_save])
def test_a_storage_of_both_libraries_is_refused_by_name(save: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="OfBoth derives from the StorageWriter of torch"):
        save({"w": T}, storage_writer=OfBoth(tmp_path))


class Counting:
    asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"w": T}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def test_planning_again_does_not_ask_for_states_again(tmp_path: Path) -> None:
    planner, counting = DefaultSavePlanner(enable_plan_caching=True), Counting()
    reshard.save({"s": counting}, checkpoint_id=tmp_path, planner=planner)
    # As if the coordinator had lost what it remembered.
    planner._cache.all_plans = []
    reshard.save({"s": counting}, checkpoint_id=tmp_path, planner=planner)

    assert counting.asked == 2
    assert reshard.read_tensor(tmp_path, "s.w").equal(T)


class Borrowed:
    """Has the methods of a contract without deriving from it."""

    def __init__(self, used: Any, methods: tuple[str, ...]) -> None:
        self._used = used
        for name in methods:
            setattr(self, name, getattr(used, name))


SAVE = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data")
LOAD = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "load_bytes")
LOAD += ("resolve_tensor", "commit_tensor")
WRITE = ("reset", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan")
WRITE += ("write_data", "finish", "storage_meta")
READ = ("reset", "read_metadata", "set_up_storage_reader", "prepare_local_plan")
READ += ("prepare_global_plan", "read_data")


def test_planners_and_storages_need_not_derive_from_ours(tmp_path: Path) -> None:
    writer = Borrowed(reshard.FileSystemWriter(tmp_path), WRITE)
    reader = Borrowed(reshard.FileSystemReader(tmp_path), READ)
    reshard.save(
        {"w": T, "n": 3},
        storage_writer=writer,  # type: ignore[arg-type]
        planner=Borrowed(DefaultSavePlanner(), SAVE),  # type: ignore[arg-type]
    )
    state: dict[str, Any] = {"w": torch.zeros(4), "n": 0}
    planner = Borrowed(DefaultLoadPlanner(), LOAD)
    reshard.load(state, storage_reader=reader, planner=planner)  # type: ignore[arg-type]

    assert state["w"].equal(T)
    assert state["n"] == 3


class Strict(reshard.FileSystemReader):
    """Has attributes of its own under names that `load` has arguments for."""

    call_settings = ()

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.exclude = "mine"


def test_a_call_sets_only_what_a_storage_offers(tmp_path: Path) -> None:
    reshard.save({"w": T}, checkpoint_id=tmp_path)
    reader = Strict(tmp_path)
    seen: list[Any] = []
    reader.prepare_local_plan = lambda plan: seen.append(reader.verify) or plan  # type: ignore
    reshard.load({"w": torch.zeros(4)}, storage_reader=reader, verify="full")
    assert [each.value for each in seen] == ["chunks"]


class Refusing(DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        raise PlanError("not today")


def test_an_error_of_ours_that_code_of_users_raises_shows_where(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="not today") as raised:
        reshard.save({"w": T}, checkpoint_id=tmp_path, planner=Refusing())
    printed = "".join(traceback.format_exception(raised.value))
    assert 'raise PlanError("not today")' in printed
    assert printed.count("reshard/") == 1


def test_hooks_that_are_set_on_one_planner_are_called(tmp_path: Path) -> None:
    saving, loading = DefaultSavePlanner(), DefaultLoadPlanner()
    saving.transform_object = lambda item, value: value * 3  # type: ignore[method-assign]
    committed: list[str] = []
    loading.commit_tensor = lambda item, _: committed.append(item.dest_index.fqn)  # type: ignore
    reshard.save({"w": T}, checkpoint_id=tmp_path, planner=saving)
    state = {"w": torch.zeros(4)}
    reshard.load(state, checkpoint_id=tmp_path, planner=loading)

    assert state["w"].equal(3 * T)
    assert committed == ["w"]


@pytest.mark.parametrize("begin", [1, 5, -1])
def test_a_read_item_that_reaches_out_of_its_chunk_is_refused(begin: int, tmp_path: Path) -> None:
    class Shifting(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            plan.items[0] = dataclasses.replace(
                plan.items[0], storage_offsets=torch.Size((begin, 0))
            )
            return plan

    reshard.save({"a": torch.ones(3, 4), "b": torch.zeros(3, 4)}, checkpoint_id=tmp_path)
    state = {"a": torch.full((3, 4), 7.0)}
    with pytest.raises(PlanError, match="the read item of 'a' reaches out of its chunk"):
        reshard.load(state, checkpoint_id=tmp_path, planner=Shifting())
    assert state["a"].eq(7).all()


@pytest.mark.parametrize("answer", [([], reshard.Metadata({})), ([reshard.SavePlan([])], None)])
def test_a_global_plan_that_is_not_whole_is_refused(answer: Any, tmp_path: Path) -> None:
    class Forgetting(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            return answer

    with pytest.raises(PlanError, match=r"of Forgetting returned \d plans for 1 ranks"):
        reshard.save({"w": T}, checkpoint_id=tmp_path, planner=Forgetting())
    assert list(tmp_path.iterdir()) == []


class Unreferable(reshard.FileSystemWriter):
    def reference_to(self, metadata: Any) -> str:
        raise RuntimeError("no references today")


def test_metadata_that_cannot_be_referred_to_does_not_fail_a_committed_save(
    tmp_path: Path,
) -> None:
    metadata = reshard.save({"w": T}, storage_writer=Unreferable(tmp_path))
    assert list(metadata.state_dict_metadata) == ["w"]


# Metadata that is made on demand


def entries(tmp_path: Path, count: int) -> dict[str, Any]:
    reshard.save({f"w{i}": T for i in range(count)}, checkpoint_id=tmp_path)
    return reshard.FileSystemReader(tmp_path).read_metadata().state_dict_metadata


def test_entries_may_be_looked_at_by_several_threads_at_once(tmp_path: Path) -> None:
    found = list(entries(tmp_path, 3000).values())
    together = threading.Barrier(4)
    errors: list[Exception] = []

    def look() -> None:
        together.wait()
        try:
            for entry in found:
                assert entry.size == (4,)
                assert len(entry.chunks) == 1
        except Exception as error:  # noqa: BLE001 - compared below
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert all(type(entry) is TensorStorageMetadata for entry in found)


def test_all_fields_of_an_entry_can_be_replaced(tmp_path: Path) -> None:
    (entry,) = entries(tmp_path, 1).values()
    plain = TensorStorageMetadata(entry.properties, torch.Size((2,)), [], None)
    (entry,) = entries(tmp_path, 1).values()
    replaced = dataclasses.replace(
        entry, properties=plain.properties, size=plain.size, chunks=[], alias_of=None
    )
    assert replaced == plain

"""Planners, storages and stagers that derive from torch's classes, together with ours."""

from __future__ import annotations

import dataclasses
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import reshard
from reshard.api import PlanError, UnsafeValueError
from reshard.operations.adapters import adapt_for_save
from reshard.operations.user_calls import stages_by_itself
from support.ranks import run_ranks
from support.torch_version import needs_hugging_face_shards, needs_manifests_of_ranks

WEIGHTS = torch.arange(15.0).reshape(5, 3)


@pytest.fixture(autouse=True)
def _torch_may_warn(recwarn: Any) -> None:
    warnings.filterwarnings("ignore", module="torch")
    # Some of torch's are attributed to whoever calls it.
    warnings.filterwarnings("ignore", "torch.distributed is")


class SavePlanner(dcp.DefaultSavePlanner):
    """Counts what the storage asks it for."""

    asked = 0

    def resolve_data(self, write_item: Any) -> Any:
        assert type(write_item) is dcp.planner.WriteItem
        self.asked += 1
        return super().resolve_data(write_item)


class LoadPlanner(dcp.DefaultLoadPlanner):
    asked = 0

    def create_local_plan(self) -> Any:
        assert type(self.metadata) is dcp.metadata.Metadata
        return super().create_local_plan()

    def resolve_tensor(self, read_item: Any) -> Any:
        assert type(read_item) is dcp.planner.ReadItem
        self.asked += 1
        return super().resolve_tensor(read_item)


class Shared(dcp.StorageWriter):
    """Writes one file for each item, and its metadata with torch.save."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        self.path = Path(checkpoint_id or self.path)

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: Any) -> Any:
        assert type(plan) is dcp.SavePlan
        self.path.mkdir(exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        assert self.is_coordinator
        return [dataclasses.replace(plan, storage_data={"of": i}) for i, plan in enumerate(plans)]

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert isinstance(planner, dcp.SavePlanner)
        done = []
        for number, item in enumerate(plan.items):
            file = self.path / f"{plan.storage_data['of']}-{number}.pt"
            data = planner.resolve_data(item)
            if item.type == dcp.planner.WriteItemType.BYTE_IO:
                file.write_bytes(data.getvalue())
            else:
                torch.save(data.detach().clone(), file)
            done.append(dcp.storage.WriteResult(item.index, file.stat().st_size, file.name))
        future: Any = torch.futures.Future()
        future.set_result(done)
        return future

    def finish(self, metadata: Any, results: Any) -> None:
        assert type(metadata) is dcp.metadata.Metadata
        metadata.storage_data = {r.index: r.storage_data for each in results for r in each}
        torch.save(metadata, self.path / "all.pt")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class SharedReader(dcp.StorageReader):
    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        self.path = Path(checkpoint_id or self.path)

    def read_metadata(self) -> Any:
        return torch.load(self.path / "all.pt", weights_only=False)

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:
        assert type(metadata) is dcp.metadata.Metadata
        self.files = metadata.storage_data

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        assert all(type(plan) is dcp.LoadPlan for plan in plans)
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        assert isinstance(planner, dcp.LoadPlanner)
        for item in plan.items:
            file = self.path / self.files[item.storage_index]
            if item.type == dcp.planner.LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(file.read_bytes()))
                continue
            stored = torch.load(file)
            for dim, (begin, size) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                stored = stored.narrow(dim, begin, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def state(factor: float = 1.0, shard: int | None = None) -> dict[str, Any]:
    """A state of all kinds of values, sharded along a dimension if there are ranks."""

    def tensor(whole: torch.Tensor) -> torch.Tensor:
        if shard is None or not dist.is_initialized():
            return whole
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return distribute_tensor(whole, mesh, [Shard(shard)])

    tied = tensor(WEIGHTS * factor)
    return {
        "model": {"w": tied, "tied": tied, "half": tensor((WEIGHTS * factor).bfloat16())},
        "list": [torch.full((2,), factor), {"deep": torch.full((3,), 2 * factor)}],
        "pair": (torch.full((2,), factor), int(factor)),
        "by number": {7: torch.full((1,), factor)},
        "step": int(factor),
        "note": {"text": str(int(factor)), "none": None},
    }


def differing(found: Any, wanted: Any, path: str = "") -> list[str]:
    """The paths at which two states differ in any bit."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        return [d for k in wanted for d in differing(found[k], wanted[k], f"{path}.{k}")]
    if isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        pairs = zip(found, wanted, strict=True)
        return [d for i, (f, w) in enumerate(pairs) for d in differing(f, w, f"{path}.{i}")]
    if isinstance(wanted, DTensor):
        found, wanted = found.to_local(), wanted.to_local()
    if isinstance(wanted, torch.Tensor):
        same = found.dtype == wanted.dtype and torch.equal(found, wanted)
        return [] if same else [path]
    return [] if found == wanted else [path]


WRITERS = {"torch": dcp.FileSystemWriter, "own": Shared, "ours": reshard.FileSystemWriter}
READERS = {"torch": dcp.FileSystemReader, "own": SharedReader, "ours": reshard.FileSystemReader}
SAVE_PLANNERS = {"torch": SavePlanner, "ours": reshard.DefaultSavePlanner}
LOAD_PLANNERS = {"torch": LoadPlanner, "ours": reshard.DefaultLoadPlanner}


def save_and_load_in_every_way(folder: str) -> list[str]:
    wrong = []
    for storage, writer_type in WRITERS.items():
        for saver, planner_type in SAVE_PLANNERS.items():
            place = f"{folder}/{storage}-{saver}"
            planner = planner_type()
            metadata = reshard.save(
                state(shard=0), storage_writer=writer_type(place), planner=planner
            )
            assert isinstance(metadata, reshard.Metadata)
            assert type(metadata.state_dict_metadata["model.w"].chunks[0]).__module__.startswith(
                "reshard"
            )
            for loader, load_planner_type in LOAD_PLANNERS.items():
                if (storage, saver, loader) == ("ours", "ours", "torch"):
                    # Tuples that hold tensors are one value to torch's planner.
                    continue
                target = state(0.0, shard=1)
                report = reshard.load(
                    target, storage_reader=READERS[storage](place), planner=load_planner_type()
                )
                assert "model.w" in report.loaded
                found = differing(target, state(shard=1))
                wrong += [f"{storage} {saver} {loader}: {each}" for each in found]
    return wrong


def test_every_combination_of_theirs_and_ours_saves_and_loads_on_any_mesh(tmp_path: Path) -> None:
    assert save_and_load_in_every_way(str(tmp_path / "alone")) == []
    assert run_ranks(2, save_and_load_in_every_way, str(tmp_path / "two")) == [[], []]
    # What torch's own storage has written is torch's, whoever planned it.
    for saver in SAVE_PLANNERS:
        for place in (tmp_path / "alone" / f"torch-{saver}", tmp_path / "two" / f"torch-{saver}"):
            target = state(0.0)
            dcp.load(target, checkpoint_id=place, no_dist=True)
            assert differing(target, state()) == []
            flat = dcp.state_dict_loader._load_state_dict_from_keys(checkpoint_id=place)
            assert flat["list"][1]["deep"].equal(torch.full((3,), 2.0))
            assert flat["note"] == {"text": "1", "none": None}


def save_in_turns(folder: str) -> list[str]:
    """With plan caches, and with one storage and planner for all saves."""
    wrong = []
    for storage in ("torch", "ours"):
        for saver, planner_type in SAVE_PLANNERS.items():
            place = f"{folder}/{storage}-{saver}"
            writer = WRITERS[storage](place)
            planner = planner_type(enable_plan_caching=True)
            for factor in (1.0, 2.0, 3.0):
                reshard.save(state(factor, shard=0), storage_writer=writer, planner=planner)
                target = state(0.0, shard=0)
                reshard.load(target, storage_reader=READERS[storage](place))
                found = differing(target, state(factor, shard=0))
                wrong += [f"{storage} {saver} {factor}: {each}" for each in found]
    return wrong


def test_plans_that_torch_caches_are_carried_out_for_each_save(tmp_path: Path) -> None:
    assert run_ranks(2, save_in_turns, str(tmp_path)) == [[], []]


def test_a_plan_that_torch_has_cached_is_written_where_this_save_goes() -> None:
    planner = SavePlanner(enable_plan_caching=True)
    used = adapt_for_save(reshard.FileSystemWriter("nowhere"), planner).planner
    used.forget_cached_plans()
    for place in ("first", "second"):
        used.set_up_planner({"w": WEIGHTS}, None, True)
        [answer], _ = used.create_global_plan([used.create_local_plan()])
        assert answer.usable is (place == "first")
        final = used.finish_plan(dataclasses.replace(answer, storage_data=place))
        assert [item.index.fqn for item in final.items] == ["w"]
        assert final.storage_data == place


def save_alone(folder: str) -> list[str]:
    reshard.save(state(shard=0), storage_writer=dcp.FileSystemWriter(folder), use_collectives=False)
    target, theirs = state(0.0, shard=0), state(0.0, shard=0)
    reshard.load(target, storage_reader=dcp.FileSystemReader(folder))
    dcp.load(theirs, checkpoint_id=folder)
    return differing(target, state(shard=0)) + differing(theirs, state(shard=0))


@needs_manifests_of_ranks
def test_without_collectives_each_rank_has_metadata_of_its_own(tmp_path: Path) -> None:
    assert run_ranks(2, save_alone, str(tmp_path)) == [[], []]
    assert sorted(file.name for file in tmp_path.glob("*.metadata")) == [
        "__0.metadata",
        "__1.metadata",
    ]


class OneManifest(dcp.FileSystemWriter):
    """Is told as little as that of torch 2.8."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        pass

    set_up_storage_writer.__module__ = dcp.filesystem.__name__


def save_over_each_other(folder: str) -> str:
    with pytest.raises(PlanError) as raised:
        reshard.save(state(shard=0), storage_writer=OneManifest(folder), use_collectives=False)
    return str(raised.value)


def test_a_storage_with_one_manifest_for_all_ranks_is_refused_without_collectives(
    tmp_path: Path,
) -> None:
    for told in run_ranks(2, save_over_each_other, str(tmp_path)):
        assert told.startswith("OneManifest of torch 2.")
        assert "leave use_collectives out" in told
    reshard.save({"w": WEIGHTS}, storage_writer=OneManifest(tmp_path), use_collectives=False)
    target = {"w": torch.zeros(5, 3)}
    dcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["w"], WEIGHTS)


# Failures


class FailingWriter(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("the disk of rank 1 is full")
        return super().write_data(plan, planner)


class FailingPlanner(dcp.DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        if dist.get_rank() == 1:
            raise LookupError("rank 1 has no plan")
        return super().create_local_plan()


class FailingReader(dcp.FileSystemReader):
    def read_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("rank 1 cannot read")
        return super().read_data(plan, planner)


def fail_in_turns(folder: str) -> list[str]:
    found = []
    for arguments in (
        {"storage_writer": FailingWriter(folder)},
        {"storage_writer": dcp.FileSystemWriter(folder), "planner": FailingPlanner()},
        {"storage_writer": dcp.FileSystemWriter(folder), "planner": dcp.DefaultLoadPlanner()},
    ):
        with pytest.raises(reshard.CheckpointException) as caught:
            reshard.save(state(shard=0), **arguments)
        found.append(str(caught.value).splitlines()[0])
    # Nothing was committed by then.
    with pytest.raises(reshard.CheckpointException) as caught:
        reshard.load(state(shard=0), storage_reader=dcp.FileSystemReader(folder))
    found.append(str(caught.value).splitlines()[0])
    reshard.save(state(shard=0), storage_writer=dcp.FileSystemWriter(folder))
    with pytest.raises(reshard.CheckpointException) as caught:
        reshard.load(state(shard=0), storage_reader=FailingReader(folder))
    found.append(str(caught.value).splitlines()[0])
    return found


def test_a_failure_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    for found in run_ranks(2, fail_in_turns, str(tmp_path)):
        expected = (
            "the disk of rank 1 is full",
            "rank 1 has no plan",
            "DefaultLoadPlanner derives from torch.distributed.checkpoint.default_planner",
            "/.metadata'",
            "rank 1 cannot read",
        )
        for text, part in zip(found, expected, strict=True):
            assert part in text


class OfBoth(reshard.FileSystemWriter, dcp.StorageWriter):
    pass


class WithATag(dcp.DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        @dataclasses.dataclass(frozen=True)
        class Tagged(dcp.planner.WriteItem):
            tag: int = 0

        plan = super().create_local_plan()
        items = [Tagged(i.index, i.type, i.bytes_io_data, i.tensor_data, 5) for i in plan.items]
        return dataclasses.replace(plan, items=items)


def test_what_cannot_be_adapted_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="OfBoth derives from the StorageWriter of torch"):
        reshard.save({"w": WEIGHTS}, storage_writer=OfBoth(tmp_path))
    with pytest.raises(PlanError, match=r"Tagged stands for the WriteItem .*\(tag\)"):
        reshard.save({"w": WEIGHTS}, checkpoint_id=tmp_path, planner=WithATag())
    writer = dcp.FileSystemWriter(tmp_path)
    with pytest.raises(ValueError, match="FileSystemWriter takes no compress"):
        reshard.save({"w": WEIGHTS}, storage_writer=writer, compress="zstd")
    reshard.save({"w": WEIGHTS}, storage_writer=writer)
    for options, text in (
        ({"exclude": "w"}, "exclude needs a planner that derives .*, not LoadPlanner"),
        ({"assign": True}, "assign needs a planner .*, unlike LoadPlanner"),
    ):
        with pytest.raises(ValueError, match=text):
            reshard.load({"w": WEIGHTS}, checkpoint_id=tmp_path, planner=LoadPlanner(), **options)


def test_a_checkpoint_that_a_reader_of_torch_cannot_read_is_told_from_one_that_it_can(
    tmp_path: Path,
) -> None:
    reshard.save({"w": WEIGHTS}, checkpoint_id=tmp_path)
    reader = dcp.FileSystemReader(tmp_path)
    with pytest.raises(reshard.CheckpointException, match=r"is no pickle, .* leave storage_reader"):
        reshard.load({"w": WEIGHTS}, storage_reader=reader)


def test_a_reader_of_torch_does_not_pretend_to_verify(tmp_path: Path) -> None:
    reshard.save({"w": WEIGHTS}, storage_writer=dcp.FileSystemWriter(tmp_path))
    target = {"w": torch.zeros(5, 3)}
    reader = dcp.FileSystemReader(tmp_path)
    with pytest.raises(reshard.CheckpointException, match="verify='full' has nothing to compare"):
        reshard.load(target, storage_reader=reader, verify="full")
    reshard.load(target, storage_reader=reader, verify="off")
    assert target["w"].equal(WEIGHTS)


def test_a_planner_of_torch_that_makes_the_state_dict_fills_it(tmp_path: Path) -> None:
    reshard.save({"m": {"w": WEIGHTS, 3: [torch.ones(1)]}, "n": 5}, checkpoint_id=tmp_path)
    found: dict[str, Any] = {}
    planner = dcp.default_planner._EmptyStateDictLoadPlanner(keys={"m.w", "n"})
    reshard.load(found, checkpoint_id=tmp_path, planner=planner)
    assert differing(found, {"m": {"w": WEIGHTS}, "n": 5}) == []


class OwnResults(Shared):
    """Has its own idea of what results are."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        def ours(result: Any) -> Any:
            return dataclasses.replace(result, index=reshard.metadata.MetadataIndex("w"))

        return super().write_data(plan, planner).then(lambda done: [*map(ours, done.value())])


def mix_storages(folder: str) -> str:
    writer = (Shared, OwnResults)[dist.get_rank()](folder)
    with pytest.raises(reshard.CheckpointException) as caught:
        reshard.save(state(shard=0), storage_writer=writer)
    return str(caught.value)


def test_results_of_another_kind_of_storage_are_not_committed(tmp_path: Path) -> None:
    for text in run_ranks(2, mix_storages, str(tmp_path)):
        assert "rank 1 wrote with another kind of storage than Shared" in text
    assert not (tmp_path / "all.pt").exists()


class OwnNotes(Shared):
    """Returns notes of its own instead of torch's results."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        return super().write_data(plan, planner).then(lambda done: [{"items": len(done.value())}])

    def finish(self, metadata: Any, results: Any) -> None:
        self.notes = results


def test_a_storage_gets_back_what_it_returned_also_if_that_is_no_result(tmp_path: Path) -> None:
    writer = OwnNotes(str(tmp_path))
    reshard.save({"w": WEIGHTS, "n": 5}, storage_writer=writer)
    assert writer.notes == [[{"items": 2}]]


# Values


class Odd:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = object.__hash__


class OwnLoadBytes(reshard.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original_state_dict["odd"] = torch.load(value, weights_only=False)


@pytest.mark.parametrize("planner", [reshard.DefaultLoadPlanner, OwnLoadBytes])
def test_pickled_values_of_a_reader_of_torch_need_a_word(planner: Any, tmp_path: Path) -> None:
    reshard.save({"odd": Odd(), "n": 3}, storage_writer=dcp.FileSystemWriter(tmp_path))
    target: dict[str, Any] = {"odd": None}
    reader = dcp.FileSystemReader(tmp_path)
    with pytest.raises(UnsafeValueError, match="'odd' is stored as a pickled object"):
        reshard.load(target, storage_reader=reader, planner=planner())
    assert target == {"odd": None}
    reshard.load(target, storage_reader=reader, planner=planner(), allow_pickle=True)
    assert target == {"odd": Odd()}


def test_names_of_the_checkpoint_are_found_by_a_planner_of_torch(tmp_path: Path) -> None:
    tied = torch.ones(3)
    reshard.save({"a": tied, "b": tied, "n": 5}, checkpoint_id=tmp_path)
    target = {"x": {"a": torch.zeros(3), "b": torch.zeros(3), "n": 0}}
    reshard.load(target, checkpoint_id=tmp_path, planner=LoadPlanner(), rename={"": "x"})
    assert differing(target, {"x": {"a": tied, "b": tied, "n": 5}}) == []


def test_strict_false_reaches_a_planner_of_torch_for_one_call(tmp_path: Path) -> None:
    reshard.save({"a": WEIGHTS}, storage_writer=dcp.FileSystemWriter(tmp_path))
    planner = LoadPlanner()
    target = {"a": torch.zeros(5, 3), "new": torch.ones(1)}
    reader = dcp.FileSystemReader(tmp_path)
    report = reshard.load(target, storage_reader=reader, planner=planner, strict=False)
    assert (report.loaded, report.missing) == (["a"], ["new"])
    assert target["a"].equal(WEIGHTS)
    assert not planner.allow_partial_load
    with pytest.raises(reshard.CheckpointException, match="Missing key"):
        reshard.load(target, storage_reader=reader, planner=planner)


class Half(dcp.DefaultSavePlanner):
    """The classic: rewrites items in place, and casts what they stand for."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.half() if isinstance(data, torch.Tensor) else data


class Noting(dcp.DefaultSavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        kept = {"paths": metadata.planner_data, "extra": 1}
        return plans, dataclasses.replace(metadata, planner_data=kept)


class Spreading(dcp.DefaultSavePlanner):
    """Has each rank write some of what all have."""

    def create_global_plan(self, all_plans: Any) -> Any:
        items = all_plans[0].items
        plans = [
            dataclasses.replace(plan, items=items[rank :: len(all_plans)])
            for rank, plan in enumerate(all_plans)
        ]
        return super().create_global_plan(plans)


class Older(dcp.DefaultSavePlanner):
    """Written before planners were told about the storage."""

    def set_up_planner(self, state_dict: Any, is_coordinator: bool) -> None:
        super().set_up_planner({f"x.{k}": v for k, v in state_dict.items()}, None, is_coordinator)


class Replacing(dcp.DefaultLoadPlanner):
    """Makes new tensors, as for a model on the meta device."""

    def resolve_tensor(self, read_item: Any) -> Any:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = tensor


@pytest.mark.parametrize("storage", ["ours", "torch"])
def test_the_classic_planners_of_torch_work(storage: str, tmp_path: Path) -> None:
    def save(planner: Any) -> Any:
        place = tmp_path / type(planner).__name__
        reshard.save(
            {"w": WEIGHTS, "n": 3}, storage_writer=WRITERS[storage](place), planner=planner
        )
        return READERS[storage](place)

    half = {"w": torch.zeros(5, 3, dtype=torch.float16)}
    reader = save(Half())
    reshard.load(half, storage_reader=reader)
    assert half["w"].equal(WEIGHTS.half())
    assert reader.read_metadata().state_dict_metadata["w"].properties.dtype is torch.float16
    kept = save(Noting()).read_metadata().planner_data
    assert kept == {"paths": {"w": ("w",), "n": ("n",)}, "extra": 1}
    older = {"x.w": torch.zeros(5, 3), "x.n": 0}
    reshard.load(older, storage_reader=save(Older()))
    assert older["x.w"].equal(WEIGHTS)
    assert older["x.n"] == 3
    before = torch.zeros(5, 3)
    target = {"w": before}
    reshard.load(target, storage_reader=save(SavePlanner()), planner=Replacing())
    assert target["w"].equal(WEIGHTS)
    assert before.equal(torch.zeros(5, 3))


def spread(folder: str) -> list[str]:
    wanted = {name: torch.full((4,), float(i)) for i, name in enumerate("abcd")}
    reshard.save(wanted, checkpoint_id=folder, planner=Spreading())
    target = {name: torch.zeros(4) for name in wanted}
    reshard.load(target, checkpoint_id=folder)
    return differing(target, wanted)


def test_a_planner_of_torch_spreads_writes_over_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, spread, str(tmp_path)) == [[], []]
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


# Asynchronous saves


class Stager(dcp.staging.BlockingAsyncStager):
    staged = 0

    def stage(self, state_dict: Any) -> Any:
        self.staged += 1
        return super().stage(state_dict)


class Bare(dcp.staging.AsyncStager):
    """Only what torch's protocol asks for; waiting for it is deprecated there."""

    def stage(self, state_dict: Any) -> Any:
        return {"w": state_dict["w"].clone()}


class StagingWriter(dcp.FileSystemWriter):
    staged = 0

    def stage(self, state_dict: Any) -> Any:
        self.staged += 1
        return super().stage(state_dict)


def save_later(folder: str) -> list[str]:
    wrong = []
    stagers: list[Any] = [Stager(), Bare(), None]
    if hasattr(dcp.staging, "DefaultStager"):
        options = dcp.staging.StagingOptions(False, False, True, False)
        stagers.append(dcp.staging.DefaultStager(options))
    for number, stager in enumerate(stagers):
        weights = WEIGHTS.clone()
        place = f"{folder}/{number}"
        writer = dcp.FileSystemWriter(place)
        saved: Any = reshard.async_save({"w": weights}, storage_writer=writer, async_stager=stager)
        if hasattr(saved, "staging_completion"):
            saved.staging_completion.result()
            saved = saved.upload_completion
        weights.zero_()
        assert list(saved.result().state_dict_metadata) == ["w"]
        target = {"w": torch.zeros(5, 3)}
        dcp.load(target, checkpoint_id=place, no_dist=True)
        wrong += differing(target, {"w": WEIGHTS}, place)
    assert stagers[0].staged == 1
    return wrong


def test_stagers_of_torch_stage_for_storages_of_torch(tmp_path: Path) -> None:
    assert run_ranks(2, save_later, str(tmp_path)) == [[], []]


def test_a_stager_without_a_way_to_wait_is_not_waited_for(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reshard.async_save({"w": WEIGHTS}, checkpoint_id=tmp_path, async_stager=Bare()).result()


def test_a_storage_of_torch_that_stages_in_its_own_way_is_asked_to(tmp_path: Path) -> None:
    writer = StagingWriter(tmp_path / "own")
    reshard.async_save({"w": WEIGHTS}, storage_writer=writer).result()
    assert writer.staged == 1
    # The way that torch gave it is slower than ours.
    plain = dcp.FileSystemWriter(tmp_path / "plain")
    before = vars(plain).copy()
    reshard.async_save({"w": WEIGHTS}, storage_writer=plain).result()
    assert plain.per_thread_copy_ahead == before["per_thread_copy_ahead"] > 0


def test_a_storage_needs_no_way_to_be_closed_to_be_a_stager() -> None:
    class AsOfTorch28:
        _synchronize_after_execute = should_synchronize_after_execute = True

        def stage(self, state_dict: Any) -> Any: ...

        def synchronize_staging(self) -> None: ...

    assert stages_by_itself(AsOfTorch28())
    assert not stages_by_itself(dcp.FileSystemWriter("nowhere"))


def save_in_a_process(folder: str) -> list[str]:
    reshard.async_save(
        state(shard=0),
        storage_writer=dcp.FileSystemWriter(folder),
        planner=dcp.DefaultSavePlanner(),
        async_checkpointer_type=reshard.state_dict_saver.AsyncCheckpointerType.PROCESS,
    ).result()
    reshard.close()
    target = state(0.0, shard=1)
    dcp.load(target, checkpoint_id=folder)
    return differing(target, state(shard=1))


@pytest.mark.slow
def test_a_process_saves_with_a_storage_of_torch(tmp_path: Path) -> None:
    assert run_ranks(2, save_in_a_process, str(tmp_path)) == [[], []]


# Under a patch


class Before(dcp.FileSystemWriter):
    """Derived before the patch."""


class BeforeReader(dcp.FileSystemReader):
    pass


def save_under_a_patch(folder: str) -> list[str]:
    theirs = dcp.load, dcp.DefaultSavePlanner
    with reshard.patch():
        for number, planner in enumerate((None, theirs[1]())):
            place = f"{folder}/{number}"
            saved = dcp.save(state(shard=0), storage_writer=Before(place), planner=planner)
            target = state(0.0, shard=1)
            dcp.load(target, storage_reader=BeforeReader(place))
            wrong = differing(target, state(shard=1))
            assert type(saved) is reshard.Metadata
    for number in range(2):
        target = state(0.0, shard=1)
        theirs[0](target, checkpoint_id=f"{folder}/{number}")
        wrong += differing(target, state(shard=1))
    return wrong


def test_classes_from_before_a_patch_save_and_load_under_it(tmp_path: Path) -> None:
    assert run_ranks(2, save_under_a_patch, str(tmp_path)) == [[], []]


# Hugging Face, as torch has it


def save_for_hugging_face(folder: str) -> list[str]:
    hf = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    pytest.importorskip("safetensors")
    wanted = {name: value for name, value in state(shard=0)["model"].items() if name != "tied"}
    writer = hf.HuggingFaceStorageWriter(folder, save_distributed=True)
    reshard.save(wanted, storage_writer=writer)
    target = {name: value for name, value in state(0.0, shard=1)["model"].items() if name != "tied"}
    reshard.load(target, storage_reader=hf.HuggingFaceStorageReader(folder))
    return differing(target, {n: v for n, v in state(shard=1)["model"].items() if n != "tied"})


@needs_hugging_face_shards
def test_the_hugging_face_storages_of_torch_save_and_load(tmp_path: Path) -> None:
    assert run_ranks(2, save_for_hugging_face, str(tmp_path)) == [[], []]

"""What the two libraries are asked, where they differ on purpose."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from reshard import api
from support.dcp_files import Bomb
from support.fsspec_bucket import Bucket, installed_bucket
from support.plain_files import write_shard
from support.quantized import write_model
from support.subclasses import Scaled


@dataclasses.dataclass
class Library:
    root: Any

    def __getattr__(self, module: str) -> Any:
        return importlib.import_module(f"{self.root.__name__}.{module}")

    def plan(self, *state_dicts: dict[str, Any], **options: Any) -> tuple[Any, Any]:
        planners = [self.root.DefaultSavePlanner(**options) for _ in state_dicts]
        for planner, state_dict in zip(planners, state_dicts, strict=True):
            planner.set_up_planner(state_dict, is_coordinator=planner is planners[0])
        plans = [planner.create_local_plan() for planner in planners]
        return planners[0].create_global_plan(plans)

    def shard(self, fqn: str, start: int, length: int, total: int) -> Any:
        chunk = self.root.ChunkStorageMetadata(torch.Size([start]), torch.Size([length]))
        properties = self.metadata.TensorProperties(torch.float32)
        return self.root.WriteItem(
            self.metadata.MetadataIndex(fqn, [start]),
            self.planner.WriteItemType.SHARD,
            tensor_data=self.planner.TensorWriteData(chunk, properties, torch.Size([total])),
        )


def raised_by(action: Callable[[], Any]) -> type[BaseException] | None:
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - DCP's own exception is one
        return type(error)
    return None


def items_are_a_list(library: Library) -> bool:
    plans, _ = library.plan({"w": torch.ones(2)})
    return isinstance(plans[0].items, list)


def load_items_are_a_list(library: Library) -> bool:
    _, metadata = library.plan({"w": torch.ones(2)})
    planner = library.root.DefaultLoadPlanner()
    planner.set_up_planner({"w": torch.ones(2)}, metadata)
    return isinstance(planner.create_local_plan().items, list)


def chunk_order(library: Library) -> list[int]:
    later, earlier = library.shard("w", 2, 2, 4), library.shard("w", 0, 2, 4)
    plans = [library.root.SavePlan([later]), library.root.SavePlan([earlier])]
    _, metadata = library.default_planner.create_default_global_save_plan(plans)
    return [chunk.offsets[0] for chunk in metadata.state_dict_metadata["w"].chunks]


def names_written_for_tied_weights(library: Library) -> list[str]:
    weight = torch.ones(2)
    plans, _ = library.plan({"a": weight, "b": weight})
    return [item.index.fqn for item in plans[0].items]


def another_planner_uses_the_cache(library: Library) -> bool:
    """Whether a new planner finds the plan that another one left behind."""
    plans = []
    for _ in range(2):
        planner = library.root.DefaultSavePlanner(enable_plan_caching=True)
        planner.set_up_planner({"w": torch.ones(2)})
        plans.append(planner.create_local_plan())
        planner.finish_plan(planner.create_global_plan(plans[-1:])[0][0])
    for attribute in vars(dcp.SavePlanner).values():
        if isinstance(attribute, dict):
            attribute.clear()
    return not plans[1].usable


def error_of_a_gap(library: Library) -> type[BaseException] | None:
    halves = [[library.shard("w", 0, 1, 4)], [library.shard("w", 2, 2, 4)]]
    plans = [library.root.SavePlan(items, planner_data={}) for items in halves]
    return raised_by(lambda: library.root.DefaultSavePlanner().create_global_plan(plans))


def error_of_an_unsafe_value(library: Library) -> type[BaseException] | None:
    planner = library.root.DefaultLoadPlanner()
    _, metadata = library.plan({"v": 1})
    planner.set_up_planner({"v": 1}, metadata)
    (item,) = planner.create_local_plan().items
    stored = io.BytesIO()
    torch.save(Path("a"), stored)
    stored.seek(0)
    return raised_by(lambda: planner.load_bytes(item, stored))


def errors_of_a_load(library: Library) -> list[type[BaseException] | None]:
    _, metadata = library.plan({"w": torch.ones(2)})
    short = library.plan({"w": torch.ones(2)})[1]
    short.state_dict_metadata["w"].chunks.clear()
    make = library.default_planner.create_default_local_load_plan
    return [
        raised_by(lambda: make({"other": torch.ones(2)}, metadata)),
        raised_by(lambda: make({"w": torch.ones(3)}, metadata)),
        raised_by(lambda: make({"w": torch.ones(2)}, short)),
    ]


def error_of_two_writers(library: Library) -> type[BaseException] | None:
    plan = library.default_planner.create_default_local_save_plan({"w": torch.ones(2)}, True)
    combine = library.default_planner.create_default_global_save_plan
    return raised_by(lambda: combine([plan, plan]))


def value_is_a_torch_save_file(library: Library) -> bool:
    planner = library.root.DefaultSavePlanner()
    planner.set_up_planner({"v": 1})
    (item,) = planner.create_local_plan().items
    stored = planner.resolve_data(item)
    stored.seek(0)
    return raised_by(lambda: torch.load(stored, weights_only=True)) is None


def names_of_a_tensor_of_tensors(library: Library) -> list[str]:
    planner = library.root.DefaultSavePlanner()
    planner.set_up_planner({"w": Scaled(torch.ones(2), torch.ones(()))})
    return [*planner.state_dict]


def names_of_a_tuple(library: Library) -> list[str]:
    return [*library._nested_dict.flatten_state_dict({"t": (torch.ones(1), 2)})[0]]


def error_of_a_number_as_key(library: Library) -> type[BaseException] | None:
    return raised_by(lambda: library._traverse.traverse_state_dict({1: 2}, lambda *_: None))


@contextlib.contextmanager
def alone_in_a_group(backend: str) -> Iterator[None]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def error_of_an_optimizer_that_is_not_there(library: Library) -> type[BaseException] | None:
    def load() -> Any:
        library.optimizer.load_sharded_optimizer_state_dict({}, "optim", reader)

    with alone_in_a_group("gloo"), tempfile.TemporaryDirectory() as folder:
        library.root.save({"model": {"w": torch.ones(2)}}, checkpoint_id=folder, no_dist=True)
        reader = library.root.FileSystemReader(folder)
        return raised_by(load)


def staged_memory_is_shared_by_torch(library: Library) -> bool:
    stager = library.staging.DefaultStager(
        library.staging.StagingOptions(False, True, False, False)
    )
    staged = stager.stage({"w": torch.ones(2)})["w"].is_shared()
    stager.close()
    return bool(staged)


def error_of_an_async_save_without_a_cpu_backend(library: Library) -> type[BaseException] | None:
    with alone_in_a_group("cuda:gloo"), tempfile.TemporaryDirectory() as folder:
        return raised_by(
            lambda: library.root.async_save({"step": 1}, checkpoint_id=folder).result()
        )


def what_load_returns(library: Library) -> str:
    with tempfile.TemporaryDirectory() as folder:
        library.root.save({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
        return type(library.root.load({"w": torch.ones(2)}, checkpoint_id=folder)).__name__


class Failing:
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("nothing here")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("nothing here")


def error_of_an_object_that_fails(library: Library) -> type[BaseException] | None:
    with tempfile.TemporaryDirectory() as folder:
        return raised_by(
            lambda: library.root.save({"x": Failing()}, checkpoint_id=folder, no_dist=True)
        )


def error_of_items_with_fields_of_their_own(library: Library) -> type[BaseException] | None:
    @dataclasses.dataclass(frozen=True)
    class Tagged(dcp.planner.WriteItem):
        tag: int = 0

    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            items = [Tagged(i.index, i.type, i.bytes_io_data, i.tensor_data) for i in plan.items]
            return dataclasses.replace(plan, items=items)

    with tempfile.TemporaryDirectory() as folder:
        return raised_by(
            lambda: library.root.save(
                {"w": torch.ones(2)}, checkpoint_id=folder, planner=Planner(), no_dist=True
            )
        )


def error_of_a_save_that_was_overtaken(library: Library) -> type[BaseException] | None:
    with tempfile.TemporaryDirectory() as folder:

        class Overtaken(library.root.FileSystemWriter):
            def finish(self, *args: Any, **kwargs: Any) -> None:
                library.root.save({"w": torch.zeros(2)}, checkpoint_id=folder, no_dist=True)
                super().finish(*args, **kwargs)

        return raised_by(
            lambda: library.root.save(
                {"w": torch.ones(2)}, storage_writer=Overtaken(folder), no_dist=True
            )
        )


def key_that_was_a_number(library: Library) -> list[Any]:
    flat, paths = library._nested_dict.flatten_state_dict({"deep": {1: torch.ones(1)}})
    return list(library._nested_dict.unflatten_state_dict(flat, paths)["deep"])


def validated_where_nothing_can_be_written(library: Library) -> bool:
    with mock.patch("os.access", return_value=False):
        return library.filesystem.FileSystem.validate_checkpoint_id("/read/only/place")


def error_of_a_checkpointer(library: Library) -> type[BaseException] | None:
    with tempfile.TemporaryDirectory() as place:
        writer = library.root.FileSystemWriter(place)
        reader = library.root.FileSystemReader(place)
        checkpointer = library._checkpointer._Checkpointer(writer, reader, no_dist=True)
        return raised_by(lambda: checkpointer.save({"w": torch.ones(1)}))


def a_cached_plan_can_be_set(library: Library) -> bool:
    plans = library.root.SavePlanner._cached_save_plan
    error = raised_by(lambda: plans.update(mine=library.root.SavePlan([])))
    plans.pop("mine", None)
    return error is None


def error_of_sending_a_parameter(library: Library) -> type[BaseException] | None:
    device = torch.device("cpu")
    transport = library._pg_transport.PGTransport(None, timedelta(seconds=1), device)
    state = {"w": torch.nn.Parameter(torch.ones(1))}
    return raised_by(lambda: transport.send_checkpoint([], state))


def what_is_left_of_an_earlier_copy(library: Library) -> float:
    stager = library._state_dict_stager.StateDictStager()
    state = {"w": torch.zeros(1)}
    first = stager.stage(state)
    state["w"].fill_(1)
    stager.stage(state)
    return float(first["w"].item())


def error_of_a_second_save(library: Library) -> type[BaseException] | None:
    executor = library._async_thread_executor._ThreadBasedAsyncCheckpointExecutor()
    with tempfile.TemporaryDirectory() as place:
        save = functools.partial(
            executor.execute_save, {"w": torch.ones(1)}, checkpoint_id=place, no_dist=True
        )
        save().result()
        # The executor is shut down by a callback, which may come after the result.
        with contextlib.suppress(AttributeError):
            executor._executor.shutdown(wait=True)
        return raised_by(lambda: save().result())


def files_have_the_prefix_of_the_plan(library: Library) -> bool:
    class Prefixed(library.root.FileSystemWriter):  # type: ignore[misc,name-defined]
        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            prefix = library.filesystem._StoragePrefix("mine_")
            return [dataclasses.replace(plan, storage_data=prefix) for plan in plans]

    with tempfile.TemporaryDirectory() as place:
        library.root.save({"w": torch.ones(1)}, storage_writer=Prefixed(place), no_dist=True)
        return any(file.name.startswith("mine_") for file in Path(place).iterdir())


def metadata_runs_code(library: Library) -> bool:
    """Whether reading metadata runs what its pickle asks for."""
    with tempfile.TemporaryDirectory() as box:
        folder = Path(box) / "checkpoint"
        folder.mkdir()
        (folder / ".metadata").write_bytes(pickle.dumps(Bomb(Path(box) / "made")))
        with contextlib.suppress(Exception):
            library.root.FileSystemReader(folder).read_metadata()
        return (Path(box) / "made").exists()


@contextlib.contextmanager
def place() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        # That there is no process group.
        warnings.simplefilter("ignore")
        yield directory


def error_of_a_value_among_safetensors(library: Library) -> type[BaseException] | None:
    with place() as directory:
        writer = library.root.HuggingFaceStorageWriter(directory)
        state = {"w": torch.ones(2), "step": 3}
        return raised_by(lambda: library.root.save(state, storage_writer=writer, no_dist=True))


def names_of_tied_weights_in_safetensors(library: Library) -> list[str]:
    with place() as directory:
        weight = torch.ones(2)
        writer = library.root.HuggingFaceStorageWriter(directory)
        try:
            library.root.save({"a": weight, "b": weight}, storage_writer=writer, no_dist=True)
        except BaseException:  # noqa: BLE001 - DCP's own exception is one
            return []
        return [*load_file(f"{directory}/model-00001-of-00001.safetensors")]


def error_of_a_tied_weight_that_is_stored_once(library: Library) -> type[BaseException] | None:
    weight = torch.ones(2)
    _, metadata = library.plan({"a": weight})
    planner = library.root.DefaultLoadPlanner()
    planner.set_up_planner({"a": weight, "b": weight}, metadata)
    return raised_by(planner.create_local_plan)


def all_of_a_packed_tensor_is_filled(library: Library) -> bool:
    with place() as directory:
        model = write_model(Path(directory))
        reader = library.root.QuantizedHuggingFaceStorageReader(str(model))
        target = {"experts_blocks": torch.full((3, 5, 128), torch.pi)}
        library.root.load(target, storage_reader=reader, no_dist=True)
        return not (target["experts_blocks"] == torch.pi).any().item()


def error_of_integers_in_shards(library: Library) -> type[BaseException] | None:
    with place() as directory:
        write_shard(Path(directory) / "in" / "a.safetensors", {"n": ([0], torch.arange(3))})
        (Path(directory) / "out").mkdir()
        return raised_by(
            lambda: library._consolidate_hf_safetensors.consolidate_safetensors_files(
                f"{directory}/in", f"{directory}/out", {"n": 1}
            )
        )


@contextlib.contextmanager
def file_of_torch_save(**state: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(state, path)
        yield path


def value_from_a_file_of_torch_save(library: Library) -> Any:
    """What a process on its own loads, or that it cannot."""
    found = {"w": torch.zeros(2), "step": 0}
    tools = library.format_utils
    with file_of_torch_save(w=torch.ones(2), step=3) as path, contextlib.suppress(BaseException):
        library.root.load(
            found,
            storage_reader=tools.BroadcastingTorchSaveReader(path),
            planner=tools.DynamicMetaLoadPlanner(),
            no_dist=True,
        )
    return found["step"]


def error_of_a_missing_key_in_a_file(library: Library) -> Any:
    """Which error the planner raises for a key that only the metadata could tell about."""
    planner = library.format_utils.DynamicMetaLoadPlanner()
    stored = library.plan({"other": torch.ones(2)})[1]
    planner.set_up_planner({"w": torch.zeros(2)}, stored, True)
    return raised_by(planner.create_local_plan)


def key_of_a_converted_file(library: Library) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        library.root.save(
            {"state": {0: torch.ones(2)}}, checkpoint_id=f"{folder}/step", no_dist=True
        )
        library.format_utils.dcp_to_torch_save(f"{folder}/step", f"{folder}/model.pt")
        return list(torch.load(f"{folder}/model.pt")["state"])


def converting_a_file_runs_its_pickle(library: Library) -> bool:
    with file_of_torch_save() as path:
        made = path.parent / "made"
        torch.save({"bomb": Bomb(made)}, path)
        with contextlib.suppress(Exception):
            library.format_utils.torch_save_to_dcp(path, path.parent / "step")
        return made.exists()


def what_is_left_of_a_stream_that_failed(library: Library) -> list[bytes]:
    with installed_bucket():
        fs = library._fsspec_filesystem.FileSystem()
        path = fs.init_path("bucketfs://b/x")
        with contextlib.suppress(KeyError), fs.create_stream(path, "wb") as stream:
            stream.write(b"half")
            raise KeyError
        return list(Bucket.objects.values())


def options_after_another_place(library: Library) -> Any:
    with installed_bucket():
        writer = library._fsspec_filesystem.FsspecWriter("bucketfs://b/x", region="here")
        writer.reset("bucketfs://b/y")
        return writer.fs.fs.storage_options


def error_of_a_url_whose_package_is_missing(library: Library) -> type[BaseException] | None:
    file_system = library._fsspec_filesystem.FileSystem
    return raised_by(lambda: file_system.validate_checkpoint_id("dropbox://x"))


# Row of the table -> (what is asked, DCP's answer, our answer). Rows that the comparison of
# names and signatures finds by itself need no entry, but may have one.
DEMONSTRATIONS: dict[str, tuple[Callable[[Library], Any], Any, Any]] = {
    "format_utils.BroadcastingTorchSaveReader": (value_from_a_file_of_torch_save, 0, 3),
    "format_utils.DynamicMetaLoadPlanner": (
        error_of_a_missing_key_in_a_file,
        None,
        api.MissingKeyError,
    ),
    "format_utils.dcp_to_torch_save": (key_of_a_converted_file, ["0"], [0]),
    "format_utils.torch_save_to_dcp": (converting_a_file_runs_its_pickle, True, False),
    "api.CheckpointException": (
        lambda library: issubclass(library.root.CheckpointException, Exception),
        False,
        True,
    ),
    "filesystem.FileSystemReader.read_metadata": (metadata_runs_code, True, False),
    "planner.SavePlan.items": (items_are_a_list, True, False),
    "planner.LoadPlan.items": (load_items_are_a_list, True, False),
    "metadata.TensorStorageMetadata.chunks": (chunk_order, [2, 0], [0, 2]),
    "metadata.TensorStorageMetadata.alias_of": (
        names_written_for_tied_weights,
        ["a", "b"],
        ["a"],
    ),
    "default_planner.DefaultSavePlanner.transform_object": (
        value_is_a_torch_save_file,
        True,
        False,
    ),
    "default_planner.DefaultSavePlanner.set_up_planner": (
        names_of_a_tensor_of_tensors,
        ["w"],
        ["w.0:2.inner", "w.0:2.scale", "w.__tensor__"],
    ),
    "default_planner.DefaultSavePlanner.enable_plan_caching": (
        another_planner_uses_the_cache,
        True,
        False,
    ),
    "default_planner.DefaultSavePlanner.create_global_plan": (
        error_of_a_gap,
        ValueError,
        api.CoverageError,
    ),
    "default_planner.DefaultLoadPlanner.load_bytes": (
        error_of_an_unsafe_value,
        None,
        api.UnsafeValueError,
    ),
    "default_planner.create_default_local_load_plan": (
        errors_of_a_load,
        [RuntimeError, ValueError, None],
        [api.MissingKeyError, api.ShapeMismatchError, api.CoverageError],
    ),
    "default_planner.create_default_global_save_plan": (
        error_of_two_writers,
        AssertionError,
        api.PlanError,
    ),
    "planner.SavePlanner": (error_of_items_with_fields_of_their_own, None, api.PlanError),
    "filesystem.FileSystemWriter.overwrite": (
        error_of_a_save_that_was_overtaken,
        None,
        api.CommitConflictError,
    ),
    "optimizer.load_sharded_optimizer_state_dict": (
        error_of_an_optimizer_that_is_not_there,
        None,
        api.MissingKeyError,
    ),
    "staging.DefaultStager": (staged_memory_is_shared_by_torch, True, False),
    "state_dict_saver.async_save": (
        error_of_an_async_save_without_a_cpu_backend,
        AssertionError,
        None,
    ),
    "state_dict_loader.load": (what_load_returns, "NoneType", "LoadReport"),
    "stateful.Stateful": (error_of_an_object_that_fails, KeyError, api.CheckpointException),
    "_nested_dict.unflatten_state_dict": (key_that_was_a_number, ["1"], [1]),
    "_nested_dict.flatten_state_dict": (names_of_a_tuple, ["t"], ["t.0", "t.1"]),
    "_traverse.traverse_state_dict": (error_of_a_number_as_key, None, TypeError),
    "default_planner.DefaultLoadPlanner.create_local_plan": (
        error_of_a_tied_weight_that_is_stored_once,
        RuntimeError,
        None,
    ),
    "hf_storage.HuggingFaceStorageWriter": (
        error_of_a_value_among_safetensors,
        None,
        api.StateDictError,
    ),
    "hf_storage.HuggingFaceStorageWriter.finish": (
        names_of_tied_weights_in_safetensors,
        [],
        ["a"],
    ),
    "quantized_hf_storage.QuantizedHuggingFaceStorageReader": (
        all_of_a_packed_tensor_is_filled,
        False,
        True,
    ),
    "_consolidate_hf_safetensors.consolidate_safetensors_files": (
        error_of_integers_in_shards,
        TypeError,
        None,
    ),
    "filesystem.FileSystem.validate_checkpoint_id": (
        validated_where_nothing_can_be_written,
        False,
        True,
    ),
    "_checkpointer._Checkpointer.save": (error_of_a_checkpointer, TypeError, None),
    "planner.SavePlanner._cached_save_plan": (a_cached_plan_can_be_set, True, False),
    "_pg_transport.PGTransport": (error_of_sending_a_parameter, AssertionError, None),
    "_state_dict_stager.StateDictStager": (what_is_left_of_an_earlier_copy, 1.0, 0.0),
    "_async_thread_executor._ThreadBasedAsyncCheckpointExecutor": (
        error_of_a_second_save,
        RuntimeError,
        None,
    ),
    "filesystem._StoragePrefix": (files_have_the_prefix_of_the_plan, True, False),
    "_fsspec_filesystem.FileSystem.create_stream": (
        what_is_left_of_a_stream_that_failed,
        [b"half"],
        [],
    ),
    "_fsspec_filesystem.FileSystem.init_path": (
        options_after_another_place,
        {},
        {"region": "here"},
    ),
    "_fsspec_filesystem.FileSystem.validate_checkpoint_id": (
        error_of_a_url_whose_package_is_missing,
        ImportError,
        None,
    ),
}

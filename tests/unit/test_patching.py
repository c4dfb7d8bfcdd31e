"""`reshard.patch`: what it exchanges, that it puts everything back, and whom it leaves alone."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard
from reshard.api import CheckpointNotFoundError
from reshard.patching import Patch
from support.ranks import run_alone

DCP = "torch.distributed.checkpoint"
COUNTERPARTS = [
    "_async_executor",
    "_async_process_executor",
    "_async_thread_executor",
    "_checkpointer",
    "_consolidate_hf_safetensors",
    "_dedup_save_plans",
    "_dedup_tensors",
    "_extension",
    "_fsspec_filesystem",
    "_hf_utils",
    "_nested_dict",
    "_pg_transport",
    "_sharded_tensor_utils",
    "_state_dict_stager",
    "_storage_utils",
    "_traverse",
    "_version",
    "api",
    "default_planner",
    "filesystem",
    "format_utils",
    "fsspec_filesystem",
    "hf_storage",
    "logger",
    "logging_handlers",
    "metadata",
    "optimizer",
    "planner",
    "planner_helpers",
    "protocol",
    "quantized_hf_storage",
    "resharding",
    "staging",
    "state_dict",
    "state_dict_loader",
    "state_dict_saver",
    "stateful",
    "storage",
    "utils",
]
# Older torch does not have all of them.
COUNTERPARTS = [name for name in COUNTERPARTS if importlib.util.find_spec(f"{DCP}.{name}")]
# In dicts, since names of modules are exchanged in this one as well.
THEIRS = {"": dcp} | {name: importlib.import_module(f"{DCP}.{name}") for name in COUNTERPARTS}


@pytest.fixture(autouse=True)
def _all_is_as_before() -> Iterator[None]:
    """Every test leaves each module of the process as it was."""
    reshard.patch().undo()
    before = names_of_all_modules()
    yield
    for patch in list(reshard.patching._active):
        patch.undo()
    assert differences(before) == {}


def names_of_all_modules() -> dict[str, dict[str, Any]]:
    """By module, what it has of DCP's and Reshard's."""
    return {
        name: {n: value for n, value in list(vars(module).items()) if is_of_a_library(value)}
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType)
    }


def is_of_a_library(value: Any) -> bool:
    # By type(): there are objects that mind being asked for their class.
    if issubclass(type(value), types.ModuleType):
        return value.__name__.startswith((DCP, "reshard"))
    if issubclass(type(value), types.FunctionType | type):
        return str(value.__module__).startswith((DCP, "reshard"))
    return False


def differences(before: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """By module, the names that mean something else than before."""
    now = names_of_all_modules()
    found = {}
    for name in before.keys() | {name for name in now if name.startswith(DCP)}:
        old, new = before.get(name, {}), now.get(name, {})
        changed = [n for n in new.keys() | old.keys() if new.get(n) is not old.get(n)]
        if changed:
            found[name] = sorted(changed)
    return found


def imported(source: str) -> dict[str, Any]:
    """The names that a piece of code has imported."""
    names: dict[str, Any] = {}
    exec(source, names)
    del names["__builtins__"]
    return names


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a package of somebody else, of which only the source is known."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def install(source: str) -> Any:
        made.append(f"package_of_somebody_{len(made)}")
        (tmp_path / f"{made[-1]}.py").write_text(source)
        return importlib.import_module(made[-1])

    yield install
    for name in made:
        del sys.modules[name]


SOMEBODY = """
import torch.distributed.checkpoint
import torch.distributed.checkpoint as dcp
from torch.distributed import checkpoint as other_name
from torch.distributed.checkpoint import FileSystemWriter, save as store, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

kept = [store]
own = len


def names():
    import torch.distributed.checkpoint as dist_cp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    return dist_cp, DefaultSavePlanner, torch.distributed.checkpoint
"""


# What a patch exchanges


def test_imports_under_a_patch_get_the_modules_of_reshard() -> None:
    with reshard.patch():
        for name in THEIRS:
            ours = importlib.import_module(f"reshard.{name}".rstrip("."))
            assert importlib.import_module(f"{DCP}.{name}".rstrip(".")) is ours
            assert imported(f"import {DCP}.{name} as found".replace(". ", " "))["found"] is ours
    for name, theirs in THEIRS.items():
        assert importlib.import_module(f"{DCP}.{name}".rstrip(".")) is theirs
        assert imported(f"import {DCP}.{name} as found".replace(". ", " "))["found"] is theirs


def test_every_module_that_both_libraries_have_is_exchanged() -> None:
    both = [
        found.name
        for found in pkgutil.iter_modules(dcp.__path__)
        if importlib.util.find_spec(f"reshard.{found.name}") is not None
    ]
    assert sorted(both) == COUNTERPARTS


def test_the_attribute_of_torch_distributed_is_exchanged_and_put_back() -> None:
    with reshard.patch():
        assert torch.distributed.checkpoint is reshard
        assert imported("from torch.distributed import checkpoint")["checkpoint"] is reshard
    assert torch.distributed.checkpoint is THEIRS[""]


def test_names_that_a_package_imported_earlier_are_exchanged_and_put_back(
    package: Callable[[str], Any],
) -> None:
    somebody = package(SOMEBODY)
    before = dict(vars(somebody))
    with reshard.patch():
        assert somebody.dcp is somebody.other_name is reshard
        assert somebody.store is reshard.save
        assert somebody.FileSystemWriter is reshard.FileSystemWriter
        assert somebody.state_dict_saver is reshard.state_dict_saver
        assert somebody.CheckpointException is reshard.CheckpointException
        assert somebody.AsyncCheckpointerType is reshard.state_dict_saver.AsyncCheckpointerType
        assert somebody.names() == (reshard, reshard.DefaultSavePlanner, reshard)
    assert vars(somebody) == before
    assert somebody.names() == (THEIRS[""], THEIRS["default_planner"].DefaultSavePlanner, dcp)


def test_what_is_no_name_of_dcp_in_a_module_is_left_alone(package: Callable[[str], Any]) -> None:
    somebody = package(SOMEBODY)
    with reshard.patch():
        assert somebody.own is len
        assert somebody.kept == [THEIRS[""].save]
        assert somebody.get_model_state_dict is THEIRS["state_dict"].get_model_state_dict


def test_the_modules_of_torch_keep_their_names() -> None:
    # One that has names of DCP, though it is not part of it.
    wrapper = importlib.import_module("torch.distributed.tensor._shards_wrapper")
    before = {n: m for n, m in names_of_all_modules().items() if n.split(".")[0] == "torch"}
    with reshard.patch():
        changed = {n: c for n, c in differences(before).items() if not n.startswith(DCP)}
        assert changed == {"torch.distributed": ["checkpoint"]}
        assert wrapper.WriteItem.__module__ == f"{DCP}.planner"


@pytest.mark.parametrize("form", ["with block", "function"])
def test_a_save_goes_to_reshard_under_a_patch_and_to_dcp_after_it(
    form: str, package: Callable[[str], Any], tmp_path: Path
) -> None:
    somebody = package(SOMEBODY)

    def save(name: str) -> list[str]:
        state = {"w": torch.ones(2)}
        somebody.store(state, storage_writer=somebody.FileSystemWriter(tmp_path / name))
        return sorted(path.suffix for path in (tmp_path / name).iterdir())

    if form == "with block":
        with reshard.patch() as made:
            assert isinstance(made, Patch)
            assert save("patched") == ["", ".safetensors"]
    else:
        made = reshard.patch()
        assert save("patched") == ["", ".safetensors"]
        made.undo()
    assert save("undone") == ["", ".distcp"]
    assert torch.equal(reshard.read_tensor(tmp_path / "patched", "w"), torch.ones(2))


def test_members_of_enums_that_were_taken_before_the_patch_are_understood(tmp_path: Path) -> None:
    kinds = [*THEIRS["state_dict_saver"].AsyncCheckpointerType]
    with reshard.patch():
        found = [reshard.state_dict_saver.AsyncCheckpointerType(kind) for kind in kinds]
    assert found == [*reshard.state_dict_saver.AsyncCheckpointerType]


def test_handlers_for_the_exception_of_dcp_catch_that_of_reshard_under_a_patch(
    package: Callable[[str], Any], tmp_path: Path
) -> None:
    careful = package("""
from torch.distributed.checkpoint import CheckpointException, load

def attempt(path):
    try:
        load({"w": 1}, checkpoint_id=path)
    except CheckpointException as error:
        return type(error)
""")
    with reshard.patch():
        assert careful.attempt(tmp_path / "nothing") is CheckpointNotFoundError


# What Reshard does not have


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            f"import {DCP}._experimental",
            marks=pytest.mark.skipif(
                importlib.util.find_spec(f"{DCP}._experimental") is None,
                reason=f"torch {torch.__version__} has no _experimental",
            ),
        ),
    ],
)
def test_what_reshard_does_not_have_is_not_found_under_a_patch_and_found_again_after(
    source: str,
) -> None:
    with reshard.patch(), pytest.raises(ImportError):
        imported(source)
    assert run_alone(import_after_a_patch, source)


def import_after_a_patch(source: str) -> bool:
    with reshard.patch(), contextlib.suppress(ImportError):
        imported(source)
    return bool(imported(source))


def test_a_module_that_only_reshard_has_is_not_loaded_twice() -> None:
    run_alone(import_a_module_that_dcp_does_not_have)


def import_a_module_that_dcp_does_not_have() -> None:
    first = importlib.import_module("reshard.training")
    with reshard.patch(), contextlib.suppress(ImportError):
        importlib.import_module(f"{DCP}.training")
    assert f"{DCP}.training" not in sys.modules
    assert reshard.training is first


# Modules that are imported for the first time under a patch


def test_a_package_that_is_first_imported_under_a_patch_gets_reshard(
    package: Callable[[str], Any],
) -> None:
    with reshard.patch():
        somebody = package(SOMEBODY)
        assert somebody.dcp is reshard
        assert somebody.store is reshard.save
        assert somebody.names() == (reshard, reshard.DefaultSavePlanner, reshard)
    assert somebody.names() == (THEIRS[""], THEIRS["default_planner"].DefaultSavePlanner, dcp)
    # It could have imported Reshard by its own name; nobody can tell.
    assert somebody.store is reshard.save


def test_a_module_of_torch_that_is_first_imported_under_a_patch_has_its_own_names_after_it() -> (
    None
):
    assert run_alone(import_a_module_of_torch) == [f"{DCP}.metadata", f"{DCP}.planner"]


def import_a_module_of_torch() -> list[str]:
    name = "torch.distributed.tensor._shards_wrapper"
    assert name not in sys.modules
    with reshard.patch():
        wrapper = importlib.import_module(name)
    return [wrapper.ChunkStorageMetadata.__module__, wrapper.WriteItem.__module__]


BEFORE = """
import functools
import pickle
import torch.distributed.checkpoint as dist_cp
from torch.distributed.checkpoint import (
    DefaultSavePlanner, FileSystemReader, FileSystemWriter, load, save
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType

class DerivedPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item):
        assert (write_item.type == WriteItemType.BYTE_IO) == (write_item.index.fqn == "step")
        assert (write_item.type == dist_cp.planner.WriteItemType.BYTE_IO) == (
            write_item.index.fqn == "step"
        )
        return super().resolve_data(write_item)

class DerivedWriter(FileSystemWriter):
    def __init__(self, path):
        FileSystemWriter.__init__(self, path)

class DerivedReader(FileSystemReader):
    pass

class Keeper:
    kept = save

    def __init__(self):
        self.writer = FileSystemWriter

def store(state, using=save):
    using(state)

def closing():
    using = load
    return lambda: using

partial, keeper, closed = functools.partial(save, no_dist=True), Keeper(), closing()
registry = {"dcp": FileSystemWriter}
"""


def test_classes_that_were_derived_from_dcp_before_the_patch_work(
    package: Callable[[str], Any], tmp_path: Path
) -> None:
    somebody = package(BEFORE)
    wanted = {"w": torch.ones(2), "step": 1}
    with reshard.patch():
        somebody.save(wanted, checkpoint_id=tmp_path / "ours", planner=somebody.DerivedPlanner())
        writer = somebody.DerivedWriter(tmp_path / "theirs")
        somebody.save(wanted, storage_writer=writer, planner=somebody.DerivedPlanner())
        for place in (tmp_path / "ours", tmp_path / "theirs"):
            target = {"w": torch.zeros(2), "step": 0}
            reader = None if place.name == "ours" else somebody.DerivedReader(place)
            somebody.load(target, checkpoint_id=place, storage_reader=reader)
            assert target["w"].equal(torch.ones(2))
            assert target["step"] == 1
    target = {"w": torch.zeros(2), "step": 0}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "theirs"), no_dist=True)
    assert target["w"].equal(torch.ones(2))


def test_a_patch_says_once_and_by_name_what_it_cannot_reach(
    package: Callable[[str], Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Other modules of tests may be loaded.
    monkeypatch.setattr("reshard.patching._MOST_NAMED", 1000)
    somebody = package(BEFORE)
    caplog.clear()
    with reshard.patch(), reshard.patch():
        pass
    derived, missed = (record.getMessage() for record in caplog.records)
    name = somebody.__name__
    for each in ("DerivedPlanner", "DerivedWriter", "DerivedReader"):
        assert f"{name}.{each}" in derived
    for each in (
        "Keeper.kept",
        "keeper.writer",
        "store (a default argument)",
        "closed (a closure)",
        "partial (a partial)",
        "registry (a dict)",
    ):
        assert f"{name}.{each}" in missed
    assert f"{name}.Keeper," not in derived


def test_of_many_names_that_a_patch_cannot_reach_some_are_said(
    package: Callable[[str], Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reshard.patching._MOST_NAMED", 1)
    package(BEFORE)
    caplog.clear()
    with reshard.patch():
        pass
    assert all(" more. " in record.getMessage() for record in caplog.records)


def test_a_patch_that_reaches_all_says_nothing() -> None:
    assert run_alone(messages_of_a_patch) == []


def messages_of_a_patch() -> list[str]:
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reshard.patching").addHandler(handler)
    own = sys.modules[messages_of_a_patch.__module__]
    # This module itself keeps what a patch exchanges.
    vars(own).pop("THEIRS")
    vars(own).pop("dcp")
    with reshard.patch():
        pass
    return said


# Undoing


def is_patched() -> bool:
    found = imported(f"import {DCP} as here")["here"]
    assert (found is reshard) is (torch.distributed.checkpoint is reshard)
    return found is reshard


def test_undoing_twice_is_harmless() -> None:
    first = reshard.patch()
    first.undo()
    with reshard.patch():
        first.undo()
        assert is_patched()
    assert not is_patched()


def test_an_exception_inside_the_block_passes_and_everything_is_put_back(
    package: Callable[[str], Any],
) -> None:
    somebody = package(SOMEBODY)
    before = names_of_all_modules()

    def interrupted() -> None:
        with reshard.patch():
            assert somebody.store is reshard.save
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert differences(before) == {}
    assert somebody.store is THEIRS[""].save


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]])
def test_of_nested_patches_the_last_one_to_go_puts_things_back(
    order: list[int], package: Callable[[str], Any]
) -> None:
    somebody = package(SOMEBODY)
    before = names_of_all_modules()
    patches = [reshard.patch() for _ in order]
    for number in order:
        assert is_patched()
        assert somebody.store is reshard.save
        patches[number].undo()
    assert differences(before) == {}


def test_an_exception_in_an_inner_block_leaves_the_outer_one_in_force() -> None:
    with reshard.patch():
        with pytest.raises(ZeroDivisionError), reshard.patch():
            _ = 1 / 0
        assert is_patched()
    assert not is_patched()


def test_a_package_that_is_imported_between_two_patches_is_exchanged_by_the_second(
    package: Callable[[str], Any],
) -> None:
    reshard.patch().undo()
    somebody = package(SOMEBODY)
    with reshard.patch():
        assert somebody.store is reshard.save
    assert somebody.store is THEIRS[""].save


class ReadOnly(types.ModuleType):
    """A module whose names cannot be set, as lazy and configuration modules have it."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError(f"{name} is read-only")


def test_a_patch_that_cannot_be_made_changes_nothing() -> None:
    run_alone(fail_to_patch)


def fail_to_patch() -> None:
    reshard.patch().undo()
    stubborn = ReadOnly("stubborn")
    vars(stubborn)["save"] = dcp.save
    sys.modules["stubborn"] = stubborn
    before = names_of_all_modules()
    with pytest.raises(TypeError, match="save is read-only"):
        reshard.patch()
    assert differences(before) == {}


# Threads


def test_a_patch_is_in_force_in_all_threads_until_the_last_of_them_undoes_its_own() -> None:
    before = names_of_all_modules()
    steps = [threading.Barrier(2, timeout=30) for _ in range(4)]
    seen: list[bool] = []

    def second() -> None:
        steps[0].wait()
        seen.append(is_patched())
        with reshard.patch():
            steps[1].wait()
            steps[2].wait()
            seen.append(is_patched())
        steps[3].wait()

    other = threading.Thread(target=second)
    other.start()
    with reshard.patch():
        steps[0].wait()
        steps[1].wait()
    steps[2].wait()
    steps[3].wait()
    other.join()
    assert seen == [True, True]
    assert differences(before) == {}


def test_threads_that_patch_and_undo_at_will_leave_everything_as_it_was() -> None:
    before = names_of_all_modules()
    seen: list[bool] = []

    def work() -> None:
        for _ in range(10):
            with reshard.patch():
                seen.append(is_patched())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 40
    assert differences(before) == {}

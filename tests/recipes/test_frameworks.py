"""How other frameworks call DCP, with nothing changed but the import.

Each recipe is what the framework does, in our words. It runs with either library.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from support import bucket
from support.ranks import run_alone, run_ranks
from support.recipes import bits, fingerprint, part, spoiled, trained, with_either_library
from support.training import Run, fsdp1, fsdp2, seeded_model

Fingerprint = dict[str, Any]


def model_part(print_of_run: Fingerprint) -> Fingerprint:
    names = seeded_model().state_dict().keys()
    return {name: value for name, value in print_of_run.items() if name in names}


def without(names: Collection[str], mapping: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name not in names}


# accelerate: one checkpoint each for the model and the optimizer, planners by name


def accelerate_saves(library: str, box: Path) -> Fingerprint:
    dist_cp, planners = part(library), part(library, "default_planner")
    run = trained(fsdp2())
    states = {
        "model": get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
    }
    for key, state in states.items():
        os.makedirs(box / key, exist_ok=True)
        dist_cp.save(
            state_dict={key: state},
            storage_writer=dist_cp.FileSystemWriter(os.path.join(box, key)),
            planner=planners.DefaultSavePlanner(),
        )
    return fingerprint(run)


def accelerate_loads(library: str, box: Path) -> Fingerprint:
    dist_cp, planners = part(library), part(library, "default_planner")
    run = spoiled(fsdp2())
    states = {
        "model": get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
    }
    for key, state in states.items():
        wrapped = {key: state}
        dist_cp.load(
            state_dict=wrapped,
            storage_reader=dist_cp.FileSystemReader(box / key),
            planner=planners.DefaultLoadPlanner(),
        )
        states[key] = wrapped[key]
    set_model_state_dict(run.model, states["model"])
    set_optimizer_state_dict(run.model, run.optimizer, states["optimizer"])
    return fingerprint(run)


def accelerate_merges(library: str, box: Path) -> None:
    dist_cp, format_utils = part(library), part(library, "format_utils")
    state: dict[str, Any] = {}
    format_utils._load_state_dict(
        state,
        storage_reader=dist_cp.FileSystemReader(box / "model"),
        planner=format_utils._EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert len(state) == 1
    save_file(state["model"], box / "model.safetensors")


@with_either_library
def test_accelerate_saves_loads_and_merges(library: str, tmp_path: Path) -> None:
    saved = run_ranks(2, accelerate_saves, library, tmp_path)[0]
    assert run_ranks(3, accelerate_loads, library, tmp_path) == [saved] * 3
    run_alone(accelerate_merges, library, tmp_path)
    merged = load_file(tmp_path / "model.safetensors")
    assert {name: bits(tensor) for name, tensor in merged.items()} == model_part(saved)


# transformers: the optimizer alone, flat; the inner dict is used again after the load

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def transformers_saves(library: str, folder: str) -> Fingerprint:
    dcp = part(library)
    run = trained(fsdp2())
    state = get_optimizer_state_dict(run.model, run.optimizer, options=FLAT)
    dcp.save({"optimizer": state}, checkpoint_id=folder)
    return fingerprint(run)


def transformers_loads(library: str, folder: str) -> Fingerprint:
    dcp = part(library)
    run = spoiled(fsdp2())
    state = get_optimizer_state_dict(run.model, run.optimizer, options=FLAT)
    dcp.load({"optimizer": state}, checkpoint_id=folder)
    set_optimizer_state_dict(run.model, run.optimizer, state)
    return fingerprint(run)


@with_either_library
def test_transformers_saves_and_loads_the_optimizer(library: str, tmp_path: Path) -> None:
    saved = run_ranks(2, transformers_saves, library, str(tmp_path))[0]
    weights = model_part(saved).keys()
    for loaded in run_ranks(3, transformers_loads, library, str(tmp_path)):
        assert without(weights, loaded) == without(weights, saved)


# Lightning: FSDP1, the optimizer through its own function, other values in a file beside


def lightning_states(model: Any) -> Any:
    return FullyShardedDataParallel.state_dict_type(
        module=model,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        state_dict_config=ShardedStateDictConfig(offload_to_cpu=True),
        optim_state_dict_config=ShardedOptimStateDictConfig(offload_to_cpu=True),
    )


def lightning_saves(library: str, path: Path, times: int) -> Fingerprint:
    dcp = part(library)
    run = fsdp1()
    for number in range(times):
        run.step(number)
        path.mkdir(parents=True, exist_ok=True)
        with lightning_states(run.model):
            state = {
                "model": run.model.state_dict(),
                "optimizer": FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer),
            }
        dcp.save(state, checkpoint_id=path)
        if dist.get_rank() == 0 and number == 0:
            torch.save({"global_step": number}, path / "meta.pt")
    return fingerprint(run)


def lightning_loads(library: str, path: Path) -> Fingerprint:
    dcp, optimizers = part(library), part(library, "optimizer")
    assert (path / "meta.pt").is_file()
    run = spoiled(fsdp1())
    with lightning_states(run.model):
        module_state = {"model": run.model.state_dict()}
        dcp.load(module_state, checkpoint_id=path)
        run.model.load_state_dict(module_state["model"], strict=True)
        reader = dcp.FileSystemReader(path=path)
        optim_state = optimizers.load_sharded_optimizer_state_dict(
            model_state_dict=module_state["model"],
            optimizer_key="optimizer",
            storage_reader=reader,
        )
        flat = FullyShardedDataParallel.optim_state_dict_to_load(
            optim_state_dict=optim_state["optimizer"], model=run.model, optim=run.optimizer
        )
        run.optimizer.load_state_dict(flat)
    return fingerprint(run)


def lightning_consolidates(library: str, path: Path) -> Fingerprint:
    dcp = part(library)
    checkpoint: dict[str, Any] = {}
    part(library, "state_dict_loader")._load_state_dict(
        checkpoint,
        storage_reader=dcp.FileSystemReader(path),
        planner=part(library, "format_utils")._EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    checkpoint.update(torch.load(path / "meta.pt"))
    assert sorted(checkpoint) == ["global_step", "model", "optimizer"]
    return {name: bits(tensor) for name, tensor in checkpoint["model"].items()}


@with_either_library
def test_lightning_saves_over_an_older_checkpoint_loads_and_consolidates(
    library: str, tmp_path: Path
) -> None:
    saved = run_ranks(3, lightning_saves, library, tmp_path / "epoch", 2)[0]
    assert run_ranks(2, lightning_loads, library, tmp_path / "epoch") == [saved] * 2
    assert run_alone(lightning_consolidates, library, tmp_path / "epoch") == model_part(saved)


# torchtune: a writer with all settings, a group of its own, a callback, a partial load


def torchtune_state(run: Run, epochs: int) -> dict[str, Any]:
    return {
        "model": run.model.state_dict(),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
        "seed": 7,
        "epochs_run": epochs,
        "total_epochs": 3,
        "dataloader": {"position": 10 * epochs, "shards": ["a", "b"][:epochs]},
    }


def torchtune_saves(library: str, box: Path) -> tuple[Fingerprint, list[str]]:
    dcp = part(library)
    group = dist.new_group(backend="gloo")
    run = trained(fsdp2())
    saved = fingerprint(run)
    said: list[str] = []

    def callback(future: Future[Any]) -> None:
        said.append("saved" if future.exception() is None else f"failed: {future.exception()}")

    settings = {"thread_count": 16, "single_file_per_rank": False, "sync_files": False}
    dcp.save(
        state_dict={"adapter": {"lora": torch.full((2, 2), 3.0)}},
        storage_writer=dcp.FileSystemWriter(
            os.path.join(box, "epoch_1", "adapter_model"), **settings, cache_staged_state_dict=True
        ),
        process_group=group,
    )
    future = dcp.async_save(
        state_dict=torchtune_state(run, 1),
        storage_writer=dcp.FileSystemWriter(os.path.join(box, "epoch_1"), **settings),
        process_group=group,
    )
    future.add_done_callback(callback)
    run.step(2)
    # What the next save does: it waits if the one before is still under way.
    if not future.done():
        future.result()
    return saved, said


def torchtune_loads(library: str, box: Path) -> tuple[Fingerprint, dict[str, Any]]:
    dcp = part(library)
    run = spoiled(fsdp2())
    state = torchtune_state(run, 0)
    # Schedulers add it; not every recipe has one.
    state["optimizer"]["param_groups"][0]["initial_lr"] = 0.25
    dcp.load(
        state_dict=state,
        storage_reader=dcp.FileSystemReader(os.path.join(box, "epoch_1")),
        process_group=dist.new_group(backend="gloo"),
        planner=dcp.DefaultLoadPlanner(allow_partial_load=True),
    )
    run.model.load_state_dict(state["model"])
    assert state["optimizer"]["param_groups"][0].pop("initial_lr", 0.25) == 0.25
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])
    adapter = {"adapter": {"lora": torch.zeros(2, 2)}}
    dcp.load(
        state_dict=adapter,
        storage_reader=dcp.FileSystemReader(os.path.join(box, "epoch_1", "adapter_model")),
    )
    rest = without(["model", "optimizer"], state)
    return fingerprint(run), rest | {"lora": adapter["adapter"]["lora"].tolist()}


@with_either_library
def test_torchtune_saves_in_the_background_and_loads_what_there_is(
    library: str, tmp_path: Path
) -> None:
    outcomes = run_ranks(2, torchtune_saves, library, tmp_path)
    assert [said for _, said in outcomes] == [["saved"]] * 2
    for loaded, rest in run_ranks(2, torchtune_loads, library, tmp_path):
        assert loaded == outcomes[0][0]
        assert rest == {
            "seed": 7,
            "epochs_run": 1,
            "total_epochs": 3,
            "dataloader": {"position": 10, "shards": ["a"]},
            "lora": [[3.0, 3.0]] * 2,
        }


# OLMo-core: storage of its own, behind an URL

OFFLOADED = StateDictOptions(full_state_dict=False, cpu_offload=True)
BEFORE_WRITING = ["set_up_storage_writer", "prepare_local_plan"]
BEFORE_READING = ["reset", "read_metadata", "set_up_storage_reader", "prepare_local_plan"]


def olmo_state(run: Run) -> dict[str, Any]:
    tied = torch.full((3,), 2.0)
    return {
        "model": get_model_state_dict(run.model, options=OFFLOADED),
        "optim": get_optimizer_state_dict(run.model, run.optimizer, options=OFFLOADED),
        "extra": {"epoch": 3, "tied": tied, "again": tied},
    }


def olmo_saves(library: str, url: str, in_background: bool) -> tuple[Fingerprint, list[str]]:
    dist_cp = part(library)
    group = dist.new_group(backend="gloo")
    run = trained(fsdp2())
    saved = fingerprint(run)
    writer = bucket.writer_class(library)(url, process_group=group)
    call = dist_cp.state_dict_saver.async_save if in_background else dist_cp.state_dict_saver.save
    result = call(
        olmo_state(run),
        storage_writer=writer,
        process_group=group,
        planner=part(library, "default_planner").DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    )
    run.step(2)
    if in_background:
        result.result()
    return saved, writer.calls


def olmo_loads(library: str, url: str) -> tuple[Fingerprint, list[str]]:
    dist_cp = part(library)
    run = spoiled(fsdp2())
    state = olmo_state(run)
    state["extra"]["epoch"] = 0
    state["extra"] |= {"tied": torch.zeros(3), "again": torch.zeros(3)}
    # It looks for names that have changed before it loads.
    reader = bucket.reader_class(library)(url)
    assert "model.head.weight" in reader.read_metadata().state_dict_metadata
    reader.calls.clear()
    dist_cp.load(
        state,
        checkpoint_id=url,
        storage_reader=reader,
        process_group=dist.new_group(backend="gloo"),
    )
    set_model_state_dict(run.model, state["model"], options=StateDictOptions(strict=True))
    set_optimizer_state_dict(
        run.model, run.optimizer, state["optim"], options=StateDictOptions(strict=True)
    )
    assert state["extra"].pop("epoch") == 3
    assert [tensor.tolist() for tensor in state["extra"].values()] == [[2.0] * 3] * 2
    return fingerprint(run), reader.calls


def olmo_loads_keys(library: str, url: str, keys: list[str]) -> dict[str, Any]:
    """Some keys, without a template; the metadata says how large they are."""
    metadata = bucket.reader_class(library)(url).read_metadata()
    state: dict[str, Any] = {}
    part(library, "state_dict_loader")._load_state_dict(
        state,
        storage_reader=bucket.reader_class(library)(url),
        planner=part(library, "default_planner")._EmptyStateDictLoadPlanner(keys=keys),
        no_dist=True,
    )
    sizes = {key: metadata.state_dict_metadata[key].size.numel() for key in keys}
    return {"sizes": sizes, "model": {name: bits(t) for name, t in state["model"].items()}}


@with_either_library
@pytest.mark.parametrize("in_background", [False, True], ids=["save", "async_save"])
def test_olmo_core_saves_and_loads_through_its_own_storage(
    library: str, in_background: bool, tmp_path: Path
) -> None:
    url = f"{bucket.SCHEME}{tmp_path}/run/step10"
    (saved, on_first), (_, on_second) = run_ranks(2, olmo_saves, library, url, in_background)
    assert on_first == [*BEFORE_WRITING, "prepare_global_plan", "write_data", "finish"]
    assert on_second == [*BEFORE_WRITING, "write_data"]
    assert bucket.names(url) == [".metadata", *(f"__{r}_{n}.pt" for r in (0, 1) for n in range(3))]

    outcomes = run_ranks(3, olmo_loads, library, url)
    assert [loaded for loaded, _ in outcomes] == [saved] * 3
    (_, on_first), (_, on_second), *_ = outcomes
    assert on_first == [*BEFORE_READING, "prepare_global_plan", "read_data"]
    assert on_second[-1] == "read_data"
    assert "prepare_global_plan" not in on_second

    keys = ["model.head.weight", "model.norm.bias"]
    some = run_alone(olmo_loads_keys, library, url, keys)
    assert some["sizes"] == {"model.head.weight": 88, "model.norm.bias": 8}
    names = ["head.weight", "norm.bias"]
    assert some["model"] == {name: saved[name] for name in names}

"""Ranks that share safetensors files, whole or in shards, with each other and with other tools."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
from reshard.api import CheckpointException, PlanError
from support.quantized import SHAPES, TORCH_READS_THEM, same_bits, torch_reads, write_model
from support.ranks import run_ranks

INDEX = "model.safetensors.index.json"


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(7, 4),
        "rows": torch.randn(5, 6).to(torch.bfloat16),
        "columns": torch.randn(6, 5),
        "one": torch.randn(1, 3),
        "count": torch.arange(4),
        "scale": torch.tensor(2.5),
    }


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Over two ranks: uneven rows, uneven columns, a rank without any, replicas."""
    mesh = init_device_mesh("cpu", (2,))
    cuts: dict[str, Any] = {"embed.weight": Shard(0), "rows": Shard(0), "columns": Shard(1)}
    cuts |= {"one": Shard(0), "count": Replicate()}
    return {
        name: distribute_tensor(tensor, mesh, [cuts[name]]) if name in cuts else tensor
        for name, tensor in tensors.items()
    }


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def differences(state: dict[str, Any]) -> list[str]:
    """The names of tensors that are not what they should be."""
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
    return [name for name, tensor in full.items() if not torch.equal(tensor, whole()[name])]


def save_shards(directory: str) -> dict[str, list[str]]:
    state = sharded(whole())
    # Two names, as the two halves of a tied model have them.
    state["head.weight"] = state["embed.weight"].detach()
    numbers = {name: 1 + len(name) % 2 for name in state}
    writer = reshard.HuggingFaceStorageWriter(
        directory, numbers, save_distributed=True, enable_consolidation=True
    )
    reshard.save(state, storage_writer=writer)
    del state["head.weight"]
    found = {}
    for library in (reshard, dcp):
        for place in (f"{directory}/sharded", directory):
            target = blank(state)
            library.load(target, storage_reader=library.HuggingFaceStorageReader(place))
            found[f"{library.__name__} {place}"] = differences(target)
    consolidate_safetensors_files_on_every_rank(
        f"{directory}/sharded", f"{directory}/again", numbers, num_threads=2
    )
    return found


def test_shards_are_read_by_dcp_and_put_together_for_other_tools(tmp_path: Path) -> None:
    for found in run_ranks(2, save_shards, str(tmp_path / "model")):
        assert {place: names for place, names in found.items() if names} == {}
    for place in (tmp_path / "model", tmp_path / "model" / "again"):
        weight_map = json.loads((place / INDEX).read_text())["weight_map"]
        assert weight_map.keys() == whole().keys()
        for name, tensor in whole().items():
            assert torch.equal(load_file(place / weight_map[name])[name], tensor)
    assert {*os.listdir(tmp_path / "model" / "sharded")} == {
        f"shard-0000{rank}-model-0000{number}-of-00002.safetensors"
        for rank in (1, 2)
        for number in (1, 2)
    }


def load_plain(directory: str, quantized: str) -> tuple[Any, ...]:
    state = sharded(whole())
    # The second name of a tied weight, which is not stored.
    state["head.weight"] = state["embed.weight"].detach()
    target = blank(state)
    target["head.weight"] = target["embed.weight"].detach()
    report = reshard.load(target, checkpoint_id=directory)
    assert torch.equal(target["head.weight"].full_tensor(), whole()["embed.weight"])
    del target["head.weight"]

    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    for dim in (0, 1):
        layout = {
            name: distribute_tensor(torch.zeros(shape), mesh, [Shard(dim)])
            for name, shape in SHAPES.items()
        }
        reshard.load(layout, storage_reader=reshard.QuantizedHuggingFaceStorageReader(quantized))
        for name, tensor in layout.items() if TORCH_READS_THEM else ():
            shape = list(SHAPES[name])
            expected = torch_reads(Path(quantized), name, [0] * len(shape), shape, torch.float32)
            if not same_bits(tensor.full_tensor(), expected):
                wrong.append((name, dim))
    return differences(target), report.missing, report.nbytes, wrong


def test_plain_models_load_into_shards_each_rank_its_bytes(tmp_path: Path) -> None:
    save_file(whole(), tmp_path / "model.safetensors")
    quantized = write_model(tmp_path / "quantized")
    results = run_ranks(2, load_plain, str(tmp_path), str(quantized))
    for wrong, missing, _, wrong_quantized in results:
        assert (wrong, missing, wrong_quantized) == ([], [], [])
    sizes = [nbytes for *_, nbytes, _ in results]
    common = sum(whole()[name].nbytes for name in ("count", "scale"))
    assert sum(sizes) == sum(tensor.nbytes for tensor in whole().values()) + common


def load_what_an_empty_shard_misses(directory: str) -> str:
    """The second rank holds nothing of the tensor; the first knows that it is missing."""
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": torch.zeros(2), "gone": distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)])}
    try:
        reshard.load(state, checkpoint_id=directory)
    except reshard.api.MissingKeyError as error:
        return f"{sorted(error.failures)} {error}"
    return "no error"


def test_a_tensor_that_is_missing_is_missed_by_those_who_hold_it(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    for told in run_ranks(2, load_what_an_empty_shard_misses, str(tmp_path)):
        assert told.startswith("[0] ")
        assert "gone" in told


def save_as_replicas(directory: str) -> list[str]:
    """Replicated state, and a writer for one rank."""
    state = whole()
    errors = []
    writer = reshard.HuggingFaceStorageWriter(directory)
    for given in (state, sharded(state)):
        try:
            reshard.save(given, storage_writer=writer)
        except PlanError as error:
            errors.append(str(error))
    planner = reshard.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dist.barrier()
    errors.append(str(os.path.exists(directory)))
    dist.barrier()
    reshard.save(state, storage_writer=writer, planner=planner)
    return errors


def test_ranks_do_not_write_parts_of_one_file(tmp_path: Path) -> None:
    for several, parts, left in run_ranks(2, save_as_replicas, str(tmp_path / "model")):
        assert "ranks 0 and 1 would both write" in several
        assert "is sharded" in parts
        assert "save_distributed=True" in several
        assert "save_distributed=True" in parts
        assert left == "False"
    found = load_file(tmp_path / "model" / "model-00001-of-00001.safetensors")
    assert found.keys() == whole().keys()


class Failing(reshard.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("the data is gone")
        return super().resolve_data(write_item)


def fail_to_save(directory: str) -> list[str]:
    writer = reshard.HuggingFaceStorageWriter(
        directory, save_distributed=True, enable_consolidation=True
    )
    told = []
    try:
        reshard.save(sharded(whole()), storage_writer=writer, planner=Failing())
    except CheckpointException as error:
        told.append(str(error))
    try:
        consolidate_safetensors_files_on_every_rank(directory, f"{directory}/out", {"a": 1})
    except CheckpointException as error:
        told.append(str(error))
    return told


def test_if_a_rank_fails_all_do_and_nothing_is_left(tmp_path: Path) -> None:
    for told in run_ranks(2, fail_to_save, str(tmp_path / "model")):
        assert ["the data is gone" in told[0], "no safetensors files" in told[1]] == [True, True]
    assert os.listdir(tmp_path) == []


def save_several_regions(directory: str) -> list[str]:
    """Regions of one tensor on one rank, of which a file can hold one only."""
    torch.manual_seed(0)
    full = torch.randn(8, 3)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    pieces = [full[2 * i : 2 * i + 2] for i in range(4)]
    shards = [
        LocalShard.from_tensor_and_offsets(pieces[i].clone(), [2 * i, 0], rank)
        for i in (rank, rank + 2)
    ]
    state = {"w": init_from_local_shards(shards, 8, 3)}
    writer = reshard.HuggingFaceStorageWriter(directory, save_distributed=True)
    reshard.save(state, storage_writer=writer)
    target = {"w": distribute_tensor(torch.zeros(8, 3), mesh, [Shard(1)])}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(directory))
    assert torch.equal(target["w"].full_tensor(), full)
    return sorted(os.listdir(directory))


def test_several_regions_of_a_tensor_on_one_rank_are_kept(tmp_path: Path) -> None:
    (files, _) = run_ranks(2, save_several_regions, str(tmp_path))
    assert files == [f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2, 3, 4)]

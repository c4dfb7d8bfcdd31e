"""Checkpoints that torch.distributed.checkpoint wrote, read by Reshard into any layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import reshard
from support.maps import is_mapped
from support.ranks import run_ranks
from support.torch_version import HAS_MANIFESTS_OF_RANKS, needs_manifests_of_ranks

SHAPES = {"even": (8, 6), "uneven": (7, 5), "short": (1, 9), "cube": (3, 4, 5), "line": (11,)}
LAYOUTS: dict[str, list[Placement]] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "whole": [Replicate()],
}
DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
        and not str(dtype).removeprefix("torch.").startswith(("q", "bits", "float4"))
        and str(dtype).rstrip("1234567").endswith(("int", "uint")) is False
    }
    | {torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32}
    | {torch.int64, torch.uint64},
    key=str,
)


def sample(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=generator)


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(4, 6)


def spread(tensor: torch.Tensor, mesh: Any, placements: list[Placement]) -> DTensor:
    fitting = [
        Shard(0) if isinstance(p, Shard) and p.dim >= tensor.dim() else p for p in placements
    ]
    return distribute_tensor(tensor, mesh, fitting)


def state(mesh: Any, placements: list[Placement]) -> dict[str, Any]:
    return {
        "model": {name: spread(sample(name), mesh, placements) for name in SHAPES},
        "plain": sample("even"),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "turned": torch.arange(20.0).reshape(4, 5).t(),
        "dtypes": {str(dtype): of_dtype(dtype) for dtype in DTYPES},
        "list": [sample("line"), {"lr": 0.1, "betas": (0.9, 0.99)}, "text"],
        "numbers": {"step": 7, "none": None, "flag": True, "names": ["a", "b"]},
    }


def save(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, placements in LAYOUTS.items():
        dcp.save(state(mesh, placements), checkpoint_id=f"{folder}/{name}")
    mixed = state(mesh, [Shard(0)])
    dcp.save(mixed, storage_writer=FileSystemWriter(f"{folder}/zstd", _extensions=[ZStandard()]))
    dcp.save(
        {"model": mixed["model"], "numbers": mixed["numbers"]},
        storage_writer=FileSystemWriter(
            f"{folder}/safetensors", serialization_format=SerializationFormat.SAFETENSORS
        ),
    )
    if HAS_MANIFESTS_OF_RANKS:
        dcp.save(mixed, checkpoint_id=f"{folder}/alone", use_collectives=False)
    if dist.get_rank() == 0:
        whole = {"model": {name: sample(name) for name in SHAPES}}
        torch.save({key: whole.get(key, value) for key, value in mixed.items()}, f"{folder}/file")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dcp")
    run_ranks(2, save, str(folder))
    return str(folder)


def bits(value: Any) -> Any:
    """Something to compare that has no NaN in it."""
    if isinstance(value, DTensor):
        return bits(value.to_local())
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), raw.tolist()
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(bits, value))
    return value


def zeroed(value: Any) -> Any:
    if isinstance(value, DTensor):
        value.to_local().zero_()
        return value
    if isinstance(value, torch.Tensor):
        raw = torch.zeros(value.nbytes, dtype=torch.uint8)
        return raw.view(value.dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: zeroed(each) for key, each in value.items()}
    return [*map(zeroed, value)] if isinstance(value, list) else None


def load_into_every_layout(folder: str, kinds: list[str]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in kinds:
        for placements in LAYOUTS.values():
            wanted = state(mesh, placements)
            if kind == "safetensors":
                wanted = {key: wanted[key] for key in ("model", "numbers")}
            expected = bits(wanted)
            loaded = zeroed(wanted)
            assert bits(loaded) != expected
            reshard.load(loaded, checkpoint_id=f"{folder}/{kind}")
            assert bits(loaded) == expected, kind


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_layout_of_dcp_loads_into_any_layout(saved: str, ranks: int) -> None:
    kinds = [*LAYOUTS, "zstd", "safetensors", "file", *["alone"] * HAS_MANIFESTS_OF_RANKS]
    run_ranks(ranks, load_into_every_layout, saved, kinds)


def test_reading_gives_bit_for_bit_what_dcp_gives(saved: str) -> None:
    expected = state_from_dcp(f"{saved}/rows")
    for mmap in (False, True):
        assert bits(reshard.read_state_dict(f"{saved}/rows", mmap=mmap)) == expected
    uneven = reshard.read_tensor(f"{saved}/columns", "model.uneven", (slice(2, 6), slice(1, 4)))
    assert torch.equal(uneven, sample("uneven")[2:6, 1:4])


def state_from_dcp(path: str) -> Any:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    reader = dcp.FileSystemReader(path)
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    return bits(found)


def test_tensors_that_lie_in_order_are_mapped(saved: str) -> None:
    folder = Path(saved) / "whole"
    views = reshard.read_state_dict(folder, mmap=True, keys={"dtypes", "turned"})
    # Others are, if they happen to begin at a multiple of their element size.
    assert is_mapped(views["dtypes"]["torch.uint8"], folder)
    assert not is_mapped(views["turned"], folder)
    assert bits(views) == bits(reshard.read_state_dict(folder, keys={"dtypes", "turned"}))


@needs_manifests_of_ranks
def test_a_rank_whose_part_is_missing_is_named(saved: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(f"{saved}/alone", tmp_path / "copy"))
    (copy / "__0.metadata").rename(copy / "__2.metadata")
    with pytest.raises(reshard.api.CheckpointException, match="there is no checkpoint"):
        reshard.read_state_dict(copy)
    (copy / "__1.metadata").rename(copy / "__0.metadata")
    with pytest.raises(reshard.api.CorruptCheckpointError, match=r"lacks '__1\.metadata'"):
        reshard.read_state_dict(copy)

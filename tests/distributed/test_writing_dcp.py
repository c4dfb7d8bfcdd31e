"""Saves in the format of DCP by real ranks, loaded by unpatched DCP on other meshes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import reshard
from support.dcp import load_with_dcp, metadata_of, read_with_dcp
from support.failing_system import WriterOn, dying
from support.ranks import DEAD, run_ranks
from support.samples import SHAPES, SPREADS, raw, same_bits, sample

VALUES = {"step": 3, "text": "é", "list": [1, None], "pair": (1, 2.5)}


@functools.cache
def whole_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def state(spread: str, seed: int | None) -> dict[str, Any]:
    """Samples as this rank holds them, a tensor that is not distributed, tied ones and values."""
    tied = torch.arange(12.0).view(3, 4) if seed is not None else torch.zeros(3, 4)
    mesh = whole_mesh()
    head = distribute_tensor(tied, mesh, [Shard(0)])
    return {
        "samples": SPREADS[dist.get_world_size()][spread].state_dict(seed),
        "plain": torch.full((3,), 5.0) if seed is not None else torch.zeros(3),
        "tied": {"embedding": head, "head": head},
        "values": dict(VALUES) if seed is not None else dict.fromkeys(VALUES),
    }


def save_in_every_layout(folder: str) -> list[str]:
    versions = []
    for spread in SPREADS[2]:
        metadata = reshard.save(state(spread, 1), checkpoint_id=f"{folder}/{spread}", format="dcp")
        versions.append(metadata.version)
        assert metadata.storage_data
    return versions


def load_in_layouts(folder: str, layouts: list[str]) -> list[str]:
    """What differs after the load, in words."""
    wrong, spreads = [], SPREADS[dist.get_world_size()]
    for saved in SPREADS[2]:
        for wanted in layouts:
            found = state(wanted, None)
            load_with_dcp(found, f"{folder}/{saved}")
            for name, tensor in spreads[wanted].state_dict(1).items():
                if raw(found["samples"][name].to_local()) != raw(tensor.to_local()):
                    wrong.append(f"{name} from {saved} to {wanted}")
            if found["values"] != VALUES or found["plain"].tolist() != [5.0] * 3:
                wrong.append(f"values from {saved}")
            for name in ("embedding", "head"):
                whole = found["tied"][name].full_tensor()
                if not torch.equal(whole, torch.arange(12.0).view(3, 4)):
                    wrong.append(f"{name} from {saved} to {wanted}")
    return wrong


def test_dcp_loads_what_two_ranks_saved_in_any_layout_on_any_mesh(tmp_path: Path) -> None:
    assert run_ranks(2, save_in_every_layout, str(tmp_path)) == [["1.0.0"] * 3] * 2

    assert run_ranks(2, load_in_layouts, str(tmp_path), ["rows", "replicated"]) == [[], []]
    assert run_ranks(3, load_in_layouts, str(tmp_path), ["columns"]) == [[], [], []]
    for spread in SPREADS[2]:
        found = read_with_dcp(tmp_path / spread)
        for name in SHAPES:
            assert same_bits(found["samples"][name], sample(name, 1))
        assert found["values"] == VALUES
        places = metadata_of(tmp_path / spread).storage_data.values()
        assert len({place.relative_path for place in places}) == 2


def save_and_die(folder: str, victim: int, at: int) -> str:
    system = dying(at, after=False) if dist.get_rank() == victim else None
    mesh = whole_mesh()
    new = {"weight": distribute_tensor(torch.ones(7, 3), mesh, [Shard(0)])}
    writer = WriterOn(folder, system) if system else reshard.FileSystemWriter(folder)
    try:
        reshard.save(new, storage_writer=writer, format="dcp")
    except reshard.CheckpointException as error:
        return type(error).__name__
    return "saved"


def test_a_rank_that_dies_leaves_the_older_checkpoint_and_the_next_save_clears_up(
    tmp_path: Path,
) -> None:
    reshard.save({"weight": torch.zeros(7, 3)}, checkpoint_id=tmp_path, no_dist=True)
    older = sorted(path.name for path in tmp_path.iterdir())

    outcomes = run_ranks(2, save_and_die, str(tmp_path), 1, 3, dying=[1])

    assert outcomes == ["RankLostError", DEAD]
    assert reshard.read_state_dict(tmp_path)["weight"].sum() == 0
    assert set(older) <= {path.name for path in tmp_path.iterdir()}
    assert run_ranks(2, save_and_die, str(tmp_path), -1, 0) == ["saved", "saved"]
    assert torch.equal(read_with_dcp(tmp_path)["weight"], torch.ones(7, 3))
    assert len(list(tmp_path.iterdir())) == 3


def save_in_two_formats(folder: str, of_rank_0: str, of_rank_1: str) -> str:
    mesh = whole_mesh()
    state = {"weight": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
    try:
        form = of_rank_1 if dist.get_rank() else of_rank_0
        reshard.save(state, checkpoint_id=folder, format=form)  # type: ignore[arg-type]
    except reshard.CheckpointException as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("forms", [("dcp", "reshard"), ("reshard", "dcp")])
def test_ranks_that_ask_for_different_formats_are_told_so(
    forms: tuple[str, str], tmp_path: Path
) -> None:
    told = run_ranks(2, save_in_two_formats, str(tmp_path / "step"), *forms)

    assert all("pass the same format to save on all of them" in text for text in told)
    assert not (tmp_path / "step" / ".metadata").exists()


def save_values_by_rank(folder: str) -> None:
    mesh = whole_mesh()
    reshard.save(
        {
            "rng": reshard.per_rank(torch.full((2,), dist.get_rank())),
            "whole": distribute_tensor(torch.ones(4), mesh, [Replicate()]),
        },
        checkpoint_id=folder,
        format="dcp",
    )


def test_values_of_ranks_are_values_with_names_of_their_own(tmp_path: Path) -> None:
    run_ranks(2, save_values_by_rank, str(tmp_path))

    found = read_with_dcp(tmp_path)
    leaves = {str(value.tolist()) for value in found["rng"].values() if torch.is_tensor(value)}
    assert {"[0, 0]", "[1, 1]"} <= leaves
    assert found["whole"].tolist() == [1.0] * 4

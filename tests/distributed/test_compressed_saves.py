"""Compressed saves on one mesh, loaded on another, with and without collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard.checkpoint.directory import read_manifest
from reshard.stores.local import LocalStore
from support.ranks import run_ranks

LAYOUTS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "even": torch.randn(600, 800, generator=generator) * 0.02,
        "odd": (torch.randn(701, 333, generator=generator) * 0.02).bfloat16(),
        "small": torch.randn(5, 7, generator=generator),
    }


def spread(layout: str, blank: bool = False) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {name: t.clone().zero_() if blank else t for name, t in whole().items()}
    return {name: distribute_tensor(t, mesh, [LAYOUTS[layout]]) for name, t in tensors.items()}


def save_compressed(folder: str, use_collectives: bool) -> None:
    for layout in LAYOUTS:
        reshard.save(
            spread(layout),
            checkpoint_id=f"{folder}/{layout}",
            compress="zstd",
            use_collectives=use_collectives,
        )


def load_in_every_layout(folder: str) -> list[str]:
    """What differs after the load, in words."""
    wrong = []
    for saved in LAYOUTS:
        for wanted in LAYOUTS:
            for verify in ("chunks", "full"):
                loaded = spread(wanted, blank=True)
                reshard.load(loaded, checkpoint_id=f"{folder}/{saved}", verify=verify)
                wrong += [
                    f"{name} from {saved} to {wanted}"
                    for name, tensor in whole().items()
                    if not torch.equal(loaded[name].full_tensor(), tensor)
                ]
    return wrong


@pytest.mark.parametrize("use_collectives", [True, False])
def test_what_was_compressed_on_one_mesh_loads_on_every_other(
    use_collectives: bool, tmp_path: Path
) -> None:
    run_ranks(2, save_compressed, str(tmp_path), use_collectives)

    assert run_ranks(2, load_in_every_layout, str(tmp_path)) == [[], []]
    assert run_ranks(3, load_in_every_layout, str(tmp_path)) == [[], [], []]
    for layout in LAYOUTS:
        manifest = read_manifest(LocalStore(tmp_path / layout))
        assert manifest.codec_names == ["planes-zstd"]
        found = reshard.read_state_dict(tmp_path / layout)
        assert all(torch.equal(found[name], tensor) for name, tensor in whole().items())

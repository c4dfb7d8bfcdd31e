"""Writes the golden checkpoints of others: `python tests/golden/make_dcp.py`.

They were written once, by torch 2.13, and stay as they are. Run this into another directory
(`make_dcp.py PATH`) to compare. No code of ours takes part.

- `dcp-2.13`: two ranks, saved with `torch.distributed.checkpoint`.
- `torch-2.13.pt`: one file of `torch.save`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "complex64"),
    *("int64", "int8", "uint16", "bool"),
)


def of_dtype(name: str) -> torch.Tensor:
    """Six elements of a dtype."""
    dtype = getattr(torch, name)
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype is torch.bool else 120)
    return raw.view(dtype).reshape(2, 3)


def sharded() -> dict[str, torch.Tensor]:
    """Whole tensors of which ranks hold parts."""
    return {
        "rows": torch.arange(12.0).reshape(4, 3),
        "uneven": torch.arange(15.0).reshape(5, 3) + 0.5,
        "columns": torch.arange(12.0).reshape(3, 4) - 7,
        "whole": torch.arange(3.0),
    }


def plain() -> dict[str, Any]:
    """What all ranks have the same."""
    return {
        "dtypes": {name: of_dtype(name) for name in DTYPES},
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "scalar": torch.tensor(2.5),
        "list": [torch.arange(2), {"lr": 0.5, "betas": (0.9, 0.99)}],
        "values": {"step": 7, "none": None, "name": "golden", "flags": [True, False], 3: b"bytes"},
    }


def main_of_rank(rank: int, meeting: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    placements = {"columns": Shard(1), "whole": Replicate()}
    parts = {
        name: distribute_tensor(tensor, mesh, [placements.get(name, Shard(0))])
        for name, tensor in sharded().items()
    }
    # A relative path, since the metadata has it.
    os.chdir(folder)
    dcp.save({"sharded": parts, **plain()}, checkpoint_id="dcp-2.13")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as box:
        mp.spawn(main_of_rank, (f"{box}/meeting", str(folder)), nprocs=2)
    tensors = sharded()
    tensors["tied"] = tensors["rows"]
    torch.save({"tensors": tensors, **plain()}, folder / "torch-2.13.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)

"""A tiny training run for tests of the manager."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from reshard.runs.holding import HOLDER, Holder
from reshard.stores import owners

ROWS = 12


def plain_state(step: int = 0) -> dict[str, Any]:
    return {"w": torch.full((ROWS, 2), float(step)), "step": step}


def sharded_state(step: int = 0) -> dict[str, Any]:
    """The same, with rows spread over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full((ROWS, 2), float(step))
    return {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None), "step": step}


def set_step(state: dict[str, Any], step: int) -> None:
    """What training does to the state."""
    value = state["w"]
    (value.to_local() if hasattr(value, "to_local") else value).fill_(step)
    state["step"] = step


def is_at(state: dict[str, Any], step: int) -> bool:
    value = state["w"]
    local = value.to_local() if hasattr(value, "to_local") else value
    return bool((local == step).all()) and state["step"] == step


class Clock:
    """A clock that stands still until it is told otherwise."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def damage(place: str | os.PathLike[str]) -> None:
    """Change a byte of the data of a checkpoint."""
    (name,) = [each for each in os.listdir(place) if each.startswith("__0_")]
    path = os.path.join(place, name)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 0xFF]))


def holding_process(root: str | os.PathLike[str]) -> subprocess.Popen[bytes]:
    """Another job on this machine that holds a root, until it is ended."""
    job = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    now = time.time()
    holder = Holder("here", job.pid, owners._tag_of(job.pid), now, now, "token")
    Path(root, HOLDER).write_bytes(msgspec.json.encode(holder))
    return job


def saved_steps(root: str, steps: int, **options: Any) -> list[int]:
    """Train for some steps, all of them saved; what is there then."""
    state = plain_state()
    with reshard.CheckpointManager(root, **options) as manager:
        for step in range(1, steps + 1):
            set_step(state, step)
            manager.save(step, state, {"loss": float(step)})
        manager.wait()
        return manager.steps()

"""The default process group of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def default_group() -> dist.ProcessGroup:
    """The group of all ranks. Raises ValueError if there is none."""
    return dist.distributed_c10d._get_default_group()


def default_store() -> Any:
    """The store that the ranks of the default group met through."""
    return dist.distributed_c10d._get_default_store()


def default_device() -> torch.device:
    """The device that this rank computes on: that of the default group, or else the CPU."""
    if not (dist.is_available() and dist.is_initialized()):
        return torch.device("cpu")
    kind = dist.distributed_c10d._get_pg_default_device().type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())

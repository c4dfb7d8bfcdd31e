"""Several ranks in one process: torch's fake process group, one rank at a time.

DTensors and ShardedTensors are laid out as on a real rank; nothing is communicated. Do
not compute with DTensors of several ranks: torch caches the mesh of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

T = TypeVar("T")


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be `rank` of `world_size` for as long as the context lasts."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_each_rank(world_size: int, build: Callable[[int], T]) -> list[T]:
    """What `build(rank)` gives on each rank, in order."""
    built = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            built.append(build(rank))
    return built


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh of the given shape over the first ranks of the current group."""
    return init_device_mesh("cpu", shape)


def distributed(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """`full` as a DTensor; this rank's part is cut out of it without communication."""
    return distribute_tensor(full, mesh, list(placements), src_data_rank=None)

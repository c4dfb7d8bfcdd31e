"""A model of four tensors in the forms that people train in; uneven on most meshes.

Every rank sees the same batch, so that all forms compute the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from support.training import averaging

Make = Callable[[Any], optim.Optimizer]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.down = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def small_model(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small()


def momentum(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.05)


def losses(
    model: nn.Module, optimizers: optim.Optimizer | Sequence[optim.Optimizer], steps: int = 2
) -> list[float]:
    """Train for some steps, on the same batches in each call."""
    made = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        batch = torch.randn(5, 4, generator=made)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            model.zero_grad()
            loss = (model(batch) - 1).square().sum()
            loss.backward()
            return loss

        found.append(float(closure().detach()))
        for optimizer in [optimizers] if isinstance(optimizers, optim.Optimizer) else optimizers:
            optimizer.step(closure if isinstance(optimizer, optim.LBFGS) else None)
    model.zero_grad()
    return found


def plain(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    averaging(fully_shard(model.up, mesh=mesh))
    return averaging(fully_shard(model, mesh=mesh))


def tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up.0": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def fsdp2_over_tp(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up.0": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return averaging(fully_shard(model, mesh=mesh["dp"]))


def fsdp1(
    model: nn.Module,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    use_orig_params: bool = True,
    **groups: Any,
) -> nn.Module:
    """Two units of FSDP, one within the other."""
    return FSDP1(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        sharding_strategy=strategy,
        **groups,
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )


FORMS: dict[str, Callable[[Any], nn.Module]] = {
    "plain": plain,
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "tp": tp,
    "fsdp2 over tp": fsdp2_over_tp,
}

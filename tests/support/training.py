"""A small transformer in every layout that people train with.

Every rank sees the same batch, so that all layouts compute the same thing: exactly, where
the arithmetic is the same, and to a few units in the last place, where sums are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WIDTH, WORDS, LAYERS = 8, 11, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        scores = self.query(h) @ self.key(h).transpose(-1, -2) / WIDTH**0.5
        x = x + scores.softmax(-1) @ self.value(h)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


def seeded_model() -> Transformer:
    torch.manual_seed(7)
    return Transformer()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1000 + step)
    words = torch.randint(WORDS, (4, 6), generator=made)
    return words[:, :-1], words[:, 1:]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass
class Run:
    """A model and its optimizer in one layout; `step` trains on one batch."""

    model: Any
    optimizer: torch.optim.Optimizer
    step: Callable[[int], float]


OptimizerOf = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def plain_run(model: nn.Module, make: OptimizerOf) -> Run:
    optimizer = make(model.parameters())

    def step(number: int) -> float:
        words, target = batch(number)
        loss = loss_of(model(words), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return Run(model, optimizer, step)


def mesh_of(*sizes: int) -> DeviceMesh:
    names = {1: ("dp",), 2: ("outer", "inner")}[len(sizes)]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def single(make: OptimizerOf = adamw) -> Run:
    return plain_run(seeded_model(), make)


def ddp(make: OptimizerOf = adamw) -> Run:
    return plain_run(DistributedDataParallel(seeded_model()), make)


def fsdp1(make: OptimizerOf = adamw) -> Run:
    return plain_run(_fsdp1(ShardingStrategy.FULL_SHARD, None), make)


def fsdp1_hybrid(make: OptimizerOf = adamw) -> Run:
    return plain_run(_fsdp1(ShardingStrategy.HYBRID_SHARD, mesh_of(2, 2)), make)


def _fsdp1(strategy: ShardingStrategy, mesh: DeviceMesh | None) -> nn.Module:
    return FSDP1(
        seeded_model(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=strategy,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def fsdp2(make: OptimizerOf = adamw) -> Run:
    return plain_run(_fsdp2(seeded_model(), mesh_of(dist.get_world_size())), make)


def hsdp(make: OptimizerOf = adamw) -> Run:
    return plain_run(_fsdp2(seeded_model(), mesh_of(2, 2)), make)


def _fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():  # type: ignore[union-attr,operator]
        averaging(fully_shard(layer, mesh=mesh))
    return averaging(fully_shard(model, mesh=mesh))


def averaging(module: Any) -> nn.Module:
    """Have FSDP2 divide the sums of gradients itself: gloo does not average in torch 2.8."""
    module.set_force_sum_reduction_for_comms(True)
    return module


def tensor_parallel(make: OptimizerOf = adamw) -> Run:
    return plain_run(_tensor_parallel(seeded_model(), mesh_of(2)), make)


def fsdp2_over_tp(make: OptimizerOf = adamw) -> Run:
    mesh = mesh_of(2, 2)
    return plain_run(_fsdp2(_tensor_parallel(seeded_model(), mesh["inner"]), mesh["outer"]), make)


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():  # type: ignore[union-attr,operator]
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


class FirstStage(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.embed = model.embed
        self.layers = nn.ModuleDict({"0": model.layers["0"]})

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layers["0"](self.embed(words))


class LastStage(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"1": model.layers["1"]})
        self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers["1"](x)))


def pipeline(make: OptimizerOf = adamw) -> Run:
    """Two stages on two ranks, one batch at a time."""
    first = dist.get_rank() == 0
    whole = seeded_model()
    model = FirstStage(whole) if first else LastStage(whole)
    optimizer = make(model.parameters())

    def step(number: int) -> float:
        words, target = batch(number)
        loss = torch.zeros(())
        if first:
            passed = model(words)
            dist.send(passed.detach(), 1)
            gradient = torch.empty_like(passed)
            dist.recv(gradient, 1)
            passed.backward(gradient)
        else:
            arrived = torch.empty(*words.shape, WIDTH)
            dist.recv(arrived, 0)
            arrived.requires_grad_()
            loss = loss_of(model(arrived), target)
            loss.backward()
            dist.send(arrived.grad, 0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().clone()
        dist.broadcast(loss, 1)
        return float(loss)

    return Run([model], optimizer, step)


LAYOUTS: dict[str, tuple[int, Callable[..., Run]]] = {
    "single": (1, single),
    "ddp x 4": (4, ddp),
    "fsdp1 x 4": (4, fsdp1),
    "fsdp1 hybrid 2 x 2": (4, fsdp1_hybrid),
    "fsdp2 x 4": (4, fsdp2),
    "fsdp2 x 2": (2, fsdp2),
    "tp x 2": (2, tensor_parallel),
    "fsdp2 2 x tp 2": (4, fsdp2_over_tp),
    "hsdp 2 x 2": (4, hsdp),
    "pipeline of 2": (2, pipeline),
}

"""Train on 4 ranks, save, and load on 2 ranks in another layout: bit by bit the same.

Real processes, real files, gloo on this machine. Then a training loop with asynchronous
saves beside one without, and the speed beside DCP's.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import reshard as dcp
from reshard.state_dict_saver import AsyncCheckpointerType
from reshard.training import TrainState

WIDTH, LAYERS, STEPS = 64, 2, 5
SPEED_TENSORS, SPEED_ROWS = 24, 4096


class Layer(nn.Module):
    """A small transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


def train_and_save(rank: int, box: Path) -> None:
    """What a training script does, on each of 4 ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    for _ in range(STEPS):
        loss = model(torch.randn(8, 16, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "step": STEPS}
    dcp.save(state, checkpoint_id=box / "step-5")
    expected = {name: tensor.full_tensor() for name, tensor in flat(state).items()}
    if rank == 0:
        torch.save(expected, box / "expected.pt")
        print(f"rank 0: trained {STEPS} steps on 4 ranks, loss {loss.item():.4f}, saved")


def load_elsewhere(rank: int, box: Path) -> None:
    """Load the same checkpoint on 2 ranks, cut along columns instead of rows."""
    mesh = init_device_mesh("cpu", (2,))
    expected = torch.load(box / "expected.pt")
    state: dict[str, Any] = {
        name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(value.dim() - 1)])
        if value.dim()
        else torch.zeros_like(value)
        for name, value in expected.items()
    }
    report = dcp.load(state, checkpoint_id=box / "step-5")
    same = all(torch.equal(whole(state[name]), value) for name, value in expected.items())
    if rank == 0:
        print(
            f"rank 0: loaded {len(report.loaded)} tensors on 2 ranks, columns instead of rows: "
            f"{'bit-identical' if same else 'DIFFERENT'}"
        )
    if not same:
        raise SystemExit(1)


def measure(rank: int, box: Path) -> None:
    """Seconds to save and load the same state with DCP and with Reshard, best of 3 each."""
    mesh = init_device_mesh("cpu", (2,))
    state = {
        f"layer.{i}": DTensor.from_local(torch.rand(SPEED_ROWS // 2, 1024), mesh, [Shard(0)])
        for i in range(SPEED_TENSORS)
    }
    systems: dict[str, Any] = {"DCP": torch_dcp, "Reshard": dcp}
    best: dict[tuple[str, str], float] = {}
    for _ in range(3):
        for name, system in systems.items():
            path = box / name
            for what, work in (
                ("save", lambda s=system, p=path: s.save(state, checkpoint_id=p)),
                ("load", lambda s=system, p=path: s.load(state, checkpoint_id=p)),
            ):
                took = timed(work)
                best[what, name] = min(best.get((what, name), took), took)
    if rank == 0:
        nbytes = sum(tensor.numel() * 4 for tensor in state.values())
        table = Table(title=f"2 ranks, {nbytes / 1e6:.0f} MB, durable, checksums on")
        for column in ("", "DCP", "Reshard", "ratio"):
            table.add_column(column, justify="right")
        for what in ("save", "load"):
            theirs, ours = best[what, "DCP"], best[what, "Reshard"]
            table.add_row(
                what,
                f"{nbytes / theirs / 1e9:.2f} GB/s",
                f"{nbytes / ours / 1e9:.2f} GB/s",
                f"{theirs / ours:.1f}x",
            )
        Console().print(table)


def train_with_saves(rank: int, box: Path) -> None:
    """What asynchronous saves cost a training loop: the stall, and the steps meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train = TrainState(model, optimizer)
    step = partial(train_step, model, optimizer)
    for _ in range(3):
        step()
    table = Table(title=f"a training loop on 2 ranks, {state_bytes(model) / 1e6:.0f} MB of state")
    for column in ("saves", "stall", "step", "step while saving"):
        table.add_column(column, justify="right")
    alone = min(timed(step) for _ in range(10))
    table.add_row("none", "", f"{alone * 1e3:.0f} ms", "")
    stall = timed(lambda: dcp.save({"train": train}, checkpoint_id=box / "sync"))
    table.add_row("save", f"{stall * 1e3:.0f} ms", f"{alone * 1e3:.0f} ms", "")
    for kind in AsyncCheckpointerType:
        dcp.prewarm({"train": train}, async_checkpointer_type=kind)
        stalls, steps = [], []
        for number in range(3):
            futures: list[Any] = []
            path = box / f"{kind.value}-{number}"
            stalls.append(
                timed(
                    lambda path=path, kind=kind, futures=futures: futures.append(  # type: ignore[misc]
                        dcp.async_save(
                            {"train": train}, checkpoint_id=path, async_checkpointer_type=kind
                        )
                    )
                )
            )
            while not all_done(futures[0]):
                steps.append(timed(step))
            futures[0].result()
        table.add_row(
            f"async_save, {kind.value}",
            f"{min(stalls) * 1e3:.0f} ms",
            f"{min(timed(step) for _ in range(5)) * 1e3:.0f} ms",
            f"{sum(steps) / len(steps) * 1e3:.0f} ms" if steps else "",
        )
    dcp.close()
    if rank == 0:
        Console().print(table)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(64, 2048)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_bytes(model: nn.Module) -> int:
    return 3 * sum(parameter.nbytes for parameter in model.parameters())


def all_done(future: Any) -> bool:
    """Whether the save is done on all ranks: a collective, in the middle of a save."""
    done = torch.tensor(int(future.done()))
    dist.all_reduce(done, dist.ReduceOp.MIN)
    return bool(done)


def timed(work: Callable[[], Any]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The DTensors of a nested dict by their dotted names."""
    found = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= flat(value, f"{name}.")
        elif isinstance(value, DTensor):
            found[name] = value
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run_rank(rank: int, world_size: int, port: int, job: Any, box: Path) -> None:
    warnings.filterwarnings("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        job(rank, box)
    finally:
        dist.destroy_process_group()


def run(job: Callable[[int, Path], None], world_size: int, box: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, (world_size, port, job, box), nprocs=world_size)


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        box = Path(place)
        run(train_and_save, 4, box)
        for path in sorted((box / "step-5").iterdir()):
            print(f"  {path.name:24} {path.stat().st_size:>9,} bytes")
        run(load_elsewhere, 2, box)
        run(train_with_saves, 2, box)
        run(measure, 2, box)


if __name__ == "__main__":
    main()

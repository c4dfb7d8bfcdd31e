"""Four simulated ranks plan a save of a small transformer; a 2 x 2 mesh plans its load.

No process group is needed: torch's fake group lets one process play each rank in turn.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from reshard import DefaultLoadPlanner, DefaultSavePlanner, Metadata, SavePlan  # noqa: E402

COLOURS = ("cyan", "magenta", "yellow", "green")
ROWS, COLUMNS = 4, 16


class Block(nn.Module):
    """A small transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)


@contextmanager
def simulated_rank(rank: int, world_size: int = 4) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def placements_for(name: str, mesh_dims: int) -> Sequence[Placement]:
    """Rows over all ranks; on a 2 x 2 mesh rows over one side and columns over the other."""
    if "norm" in name:
        return [Shard(0)] if mesh_dims == 1 else [Shard(0), Replicate()]
    return [Shard(0)] if mesh_dims == 1 else [Shard(0), Shard(1)]


def state_dict(model: nn.Module, mesh_shape: tuple[int, ...]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", mesh_shape)
    parts = {
        name: distribute_tensor(
            value.detach(), mesh, placements_for(name, len(mesh_shape)), src_data_rank=None
        )
        for name, value in model.state_dict().items()
    }
    return {"model": parts, "step": 1200}


def plan_save(model: nn.Module) -> tuple[list[SavePlan], Metadata]:
    plans, planners = [], []
    for rank in range(4):
        with simulated_rank(rank):
            planner = DefaultSavePlanner()
            planner.set_up_planner(state_dict(model, (4,)), is_coordinator=rank == 0)
            plans.append(planner.create_local_plan())
            planners.append(planner)
    return planners[0].create_global_plan(plans)


def picture(
    shape: Sequence[int], regions: Sequence[tuple[Any, Any, int]], columns: int = COLUMNS
) -> Text:
    """A tensor as a box of letters: each place shows the rank that holds it."""
    height, width = (shape[0], shape[1]) if len(shape) > 1 else (shape[0], 1)
    rows = ROWS if len(shape) > 1 else 1
    text = Text()
    for row in range(rows):
        for column in range(columns):
            # A vector is drawn lying down.
            y = row * height // rows if len(shape) > 1 else column * height // columns
            x = column * width // columns if len(shape) > 1 else 0
            rank = next(
                (
                    rank
                    for offsets, sizes, rank in regions
                    if offsets[0] <= y < offsets[0] + sizes[0]
                    and (len(shape) == 1 or offsets[1] <= x < offsets[1] + sizes[1])
                ),
                None,
            )
            if rank is None:
                text.append(".", style="dim")
            else:
                text.append(str(rank), style=f"bold black on {COLOURS[rank]}")
        if row + 1 < rows:
            text.append("\n")
    return text


def show_save(console: Console, plans: list[SavePlan], metadata: Metadata) -> None:
    held: dict[str, list[tuple[Any, Any, int]]] = {}
    written = Counter[int]()
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is None:
                held.setdefault(item.index.fqn, []).append((None, None, rank))
                continue
            chunk = item.tensor_data.chunk
            held.setdefault(item.index.fqn, []).append((chunk.offsets, chunk.sizes, rank))
            written[rank] += chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
    table = Table(title="Save on 4 ranks, rows sharded: who writes what", show_lines=True)
    for column in ("tensor", "shape", "chunks", "which rank writes which part"):
        table.add_column(column, vertical="middle")
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "size"):
            table.add_row(name, "value", "", f"rank {held[name][0][2]}")
            continue
        shape = tuple(entry.size)
        table.add_row(name, str(shape), str(len(entry.chunks)), picture(shape, held[name]))
    console.print(table)
    shares = ", ".join(f"rank {rank}: {size:,}" for rank, size in sorted(written.items()))
    console.print(f"bytes written by {shares}\n")


def show_load(console: Console, model: nn.Module, metadata: Metadata) -> None:
    table = Table(title="Load on a 2 x 2 mesh: where each rank reads from", show_lines=True)
    names = ["model.norm.weight", "model.up.weight", "model.down.weight"]
    table.add_column("tensor", vertical="middle")
    for rank in range(4):
        table.add_column(f"rank {rank}\n({rank // 2}, {rank % 2})", no_wrap=True)
    cells: dict[str, list[Any]] = {name: [] for name in names}
    regions = 0
    for rank in range(4):
        with simulated_rank(rank):
            planner = DefaultLoadPlanner()
            planner.set_up_planner(state_dict(model, (2, 2)), metadata)
            plan = planner.create_local_plan()
        regions += len(plan.items)
        for name in names:
            shape = tuple(metadata.state_dict_metadata[name].size)
            chunks = list(metadata.state_dict_metadata[name].chunks)
            parts = []
            for item in plan.items:
                if item.dest_index.fqn == name:
                    start = [
                        a + b
                        for a, b in zip(
                            item.storage_index.offset, item.storage_offsets, strict=True
                        )
                    ]
                    writer = [tuple(c.offsets) for c in chunks].index(
                        tuple(item.storage_index.offset)
                    )
                    parts.append((start, item.lengths, writer))
            cells[name].append(picture(shape, parts, columns=8))
    for name in names:
        table.add_row(name, *cells[name])
    console.print(table)
    console.print(
        f"{regions} regions to read in all. Digits and colours: the rank that wrote the part. "
        "Dots: not wanted, not read."
    )


def main() -> None:
    """Plan the save and the load, and draw both."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    console = Console()
    torch.manual_seed(0)
    model = Block(16)
    plans, metadata = plan_save(model)
    show_save(console, plans, metadata)
    show_load(console, model, metadata)


if __name__ == "__main__":
    main()

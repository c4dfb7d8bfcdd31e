"""Checkpoints of torch.distributed.checkpoint on two ranks: read by it, and by Reshard.

`make bench-dcp` prints a table and writes docs/benchmarks/reading_dcp.json. Both take turns in
the same processes, on the same files in the page cache, into the same memory. The bar is that
reading with Reshard is three times as fast, into the layout that was saved and into another.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import JOBS, options, record, run_ranks, timed
from rich.console import Console
from rich.table import Table
from save_load import leaves, make_state
from torch.distributed.tensor import Placement, Shard

import reshard

ROUNDS = 5
BAR = 3.0
LAYOUTS: dict[str, list[Placement]] = {
    "same layout": [Shard(0)],
    "Shard(0) to Shard(1)": [Shard(1)],
}


def measure(mesh: Any, box: Path, megabytes: int) -> dict[str, Any]:
    source = make_state(mesh, [Shard(0)], megabytes)
    nbytes = sum(tensor.nbytes for tensor in leaves(source)) * dist.get_world_size()
    path = box / "dcp"
    dcp.save(source, checkpoint_id=path)
    del source
    results: dict[str, Any] = {"bytes": nbytes, "seconds": {}}
    for layout, placements in LAYOUTS.items():
        target = make_state(mesh, placements, megabytes)
        ways = {
            "torch.distributed.checkpoint": lambda target=target: dcp.load(
                target, checkpoint_id=path
            ),
            "reshard": lambda target=target: reshard.load(target, checkpoint_id=path),
        }
        rounds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, work in ways.items():
                rounds[name].append(timed(work))
        results["seconds"][layout] = {name: min(each) for name, each in rounds.items()}
    return results


JOBS["reading-dcp"] = measure


def show(found: dict[str, Any]) -> None:
    table = Table(title=f"reading {found['bytes'] / 1e9:.1f} GB that DCP wrote, 2 ranks")
    for column in ("into", "torch", "reshard", "times as fast", f"bar {BAR:g}x"):
        table.add_column(column, justify="left" if column == "into" else "right")
    for layout, seconds in found["seconds"].items():
        theirs, ours = seconds["torch.distributed.checkpoint"], seconds["reshard"]
        verdict = "holds" if theirs >= BAR * ours else "MISSED"
        table.add_row(layout, f"{theirs:.2f} s", f"{ours:.2f} s", f"{theirs / ours:.1f}", verdict)
    Console().print(table)


def main() -> None:
    arguments = options(__doc__, ["reading-dcp"])
    megabytes = min(arguments.megabytes, 1500)
    box = Path(tempfile.mkdtemp(prefix="reshard-dcp-"))
    try:
        found = run_ranks("reading-dcp", 2, box, megabytes)
    finally:
        shutil.rmtree(box)
    show(found)
    record("reading_dcp", found)


if __name__ == "__main__":
    main()

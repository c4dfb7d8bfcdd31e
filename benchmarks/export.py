"""Exporting a checkpoint of four ranks to safetensors files, beside copying its files.

One process, files in the page cache, each way made durable, best of several, in turns. Memory is
the peak of a fresh process that does nothing else, less what it takes to import.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import JOBS, options, record, run_ranks
from torch.distributed.tensor import Shard, distribute_tensor

import reshard

ROUNDS = 4
RANKS = 4
BAR_OF_COPY = 0.7
BAR_MEMORY_BYTES = 1 << 30
LAYOUTS = {"rows": 0, "columns": 1}

PEAK = """
import sys
import reshard, torch
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here on
before = peak()
reshard.convert(sys.argv[1], sys.argv[2], "huggingface", keys="model", rename={"model": ""})
print(peak() - before)
"""


def save_sharded(mesh: Any, box: Path, megabytes: int) -> dict[str, Any]:
    """bf16 weights: many matrices, and one that is as large as all others together."""
    matrices = 20
    columns = 4096
    rows = megabytes * 500_000 // (2 * matrices * columns) // RANKS * RANKS
    for layout, dim in LAYOUTS.items():
        state = {
            f"layers.{i}.weight": distribute_tensor(
                torch.randn(rows, columns).bfloat16(), mesh, [Shard(dim)]
            )
            for i in range(matrices)
        }
        large = torch.randn(rows * matrices, columns, dtype=torch.bfloat16)
        state["embedding.weight"] = distribute_tensor(large, mesh, [Shard(dim)])
        reshard.save({"model": state}, checkpoint_id=box / layout)
        del state, large
    dist.barrier()
    return {}


def copy_files(source: Path, target: Path) -> None:
    """What `cp -r` does, and the sync that makes it comparable."""
    shutil.copytree(source, target)
    for path in [*target.iterdir(), target]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def export(source: Path, target: Path, **settings: Any) -> None:
    reshard.convert(source, target, "huggingface", keys="model", rename={"model": ""}, **settings)


def measure(box: Path, layout: str) -> dict[str, Any]:
    source = box / layout
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    ways: dict[str, Callable[[Path], None]] = {
        "copy of the files": lambda target: copy_files(source, target),
        "export": lambda target: export(source, target),
        "export in files of 500 MB": lambda target: export(source, target, max_shard_size="500MB"),
        "export as float32": lambda target: export(source, target, dtype="float32"),
        "convert to reshard": lambda target: reshard.convert(source, target, "reshard"),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, work in ways.items():
            target = box / "out"
            begin = time.perf_counter()
            work(target)
            best[name] = min(best[name], time.perf_counter() - begin)
            shutil.rmtree(target)
    command = [sys.executable, "-W", "ignore", "-c", PEAK, str(source), str(box / "out")]
    peak = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    shutil.rmtree(box / "out")
    return {"bytes": nbytes, "seconds": best, "peak_bytes": peak}


def show(layout: str, found: dict[str, Any]) -> None:
    print(f"\n{found['bytes'] / 1e9:.1f} GB saved by {RANKS} ranks, cut by {layout}")
    copy = found["seconds"]["copy of the files"]
    for name, seconds in found["seconds"].items():
        speed = found["bytes"] / seconds / 1e9
        print(f"  {name:28} {seconds:6.2f} s {speed:6.2f} GB/s  {copy / seconds:5.2f} of copying")
    holds = "holds" if copy / found["seconds"]["export"] >= BAR_OF_COPY else "MISSED"
    print(f"  at least {BAR_OF_COPY} of the speed of copying: {holds}")
    verdict = "holds" if found["peak_bytes"] <= BAR_MEMORY_BYTES else "MISSED"
    print(f"  peak memory {found['peak_bytes'] / 1e6:.0f} MB, at most 1 GiB: {verdict}")


JOBS["save"] = save_sharded


def main() -> None:
    arguments = options(__doc__, LAYOUTS)
    box = Path(tempfile.mkdtemp(prefix="reshard-export-"))
    try:
        run_ranks("save", RANKS, box, min(arguments.megabytes, 2000))
        results = {layout: measure(box, layout) for layout in arguments.jobs}
    finally:
        shutil.rmtree(box)
    for layout, found in results.items():
        show(layout, found)
    record("export", results)


if __name__ == "__main__":
    main()

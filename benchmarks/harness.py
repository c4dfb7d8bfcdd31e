"""What the benchmarks on real ranks have in common."""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

DOCS = Path(__file__).parent.parent / "docs" / "benchmarks"

JOBS: dict[str, Callable[[Any, Path, int], dict[str, Any]]] = {}
"""What ranks can be asked to do: given a mesh, a folder and a size, to measure something."""


def options(about: str | None, jobs: Iterable[str]) -> argparse.Namespace:
    """The command line: `--megabytes` of state, and which `--jobs`."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--megabytes", type=int, default=3000)
    parser.add_argument("--jobs", nargs="*", default=list(jobs))
    return parser.parse_args()


def record(name: str, results: dict[str, Any]) -> None:
    """Keep results in the documentation."""
    DOCS.mkdir(parents=True, exist_ok=True)
    about = {"python": platform.python_version(), "torch": torch.__version__}
    (DOCS / f"{name}.json").write_text(json.dumps(about | results, indent=2) + "\n")


def timed(work: Callable[[], Any]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def run_ranks(job: str, world_size: int, box: Path, size: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = box / "result.json"
    mp.spawn(ranks_main, (world_size, port, job, box, size, out), nprocs=world_size)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def ranks_main(
    rank: int, world_size: int, port: int, job: str, box: Path, size: int, out: Path
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    results = JOBS[job](mesh, box, size)
    if rank == 0:
        out.write_text(json.dumps(results))
    dist.destroy_process_group()

"""Fingerprints: how fast they are beside checksums, and what they cost saves and loads.

`make bench-fingerprints` prints two tables and writes docs/benchmarks/fingerprints.json. All ways
take turns in the same processes, and the best of several rounds counts: the machine may be
shared, so only ratios within one run mean anything.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from harness import JOBS, options, record, run_ranks, timed
from rich.console import Console
from rich.table import Table
from save_load import make_state
from torch.distributed.tensor import Shard

import reshard
from reshard.format import word_sums
from reshard.format.fingerprint import fingerprint

ROUNDS = 8
BACKENDS = ("numpy", "numba")
_NUMBA = word_sums._numba_kernel


def use(backend: str) -> None:
    """From now on, add up with numpy alone, or with numba."""
    word_sums._numba_kernel = _NUMBA if backend == "numba" else functools.cache(lambda: None)
    word_sums.expect(1 << 40)


def regions() -> dict[str, tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]]:
    """Elements, the shape of the whole tensor, and where they begin in it."""
    half = torch.randn(16384, 8192).bfloat16()
    odd = torch.randn(16384, 4095).bfloat16()
    narrow = torch.randn(200_000, 256).bfloat16()
    triples = torch.randn(20_000_000, 3).bfloat16()
    return {
        "float32 [8192, 8192]": (torch.randn(8192, 8192), (8192, 8192), (0, 0)),
        "bfloat16 [16384, 8192]": (half, (16384, 8192), (0, 0)),
        "bfloat16, Shard(1) of it": (half[:, :4096].contiguous(), (16384, 8192), (0, 4096)),
        "bfloat16, a view of its columns": (half[:, 4096:], (16384, 8192), (0, 4096)),
        "bfloat16, transposed": (half[:8192].t(), (8192, 8192), (0, 0)),
        "bfloat16 [16384, 4095]": (odd, (16384, 4095), (0, 0)),
        "bfloat16 [200000, 256]": (narrow, (200_000, 256), (0, 0)),
        "bfloat16 [20000000, 3]": (triples, (20_000_000, 3), (0, 0)),
    }


def best(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def speed(work: Callable[..., object], data: Any, *args: object) -> float:
    """GB/s of something that is done with data."""
    return float(data.nbytes) / best(lambda: work(data, *args)) / 1e9


def measure_speed() -> dict[str, dict[str, float]]:
    """GB/s of one core."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for name, (data, shape, offsets) in regions().items():
        speeds = {}
        for backend in BACKENDS:
            use(backend)
            speeds[backend] = speed(fingerprint, data, shape, offsets)
        if data.is_contiguous():
            view = data.view(torch.uint8).numpy()
            speeds["XXH3, 128 bits"] = speed(xxhash.xxh3_128, view)
        found[name] = speeds
    return found


def measure_ranks(mesh: Any, box: Path, megabytes: int) -> dict[str, Any]:
    """Seconds of saves, and of loads from Shard(0) into Shard(1)."""
    rows = make_state(mesh, [Shard(0)], megabytes)
    columns = make_state(mesh, [Shard(1)], megabytes)

    def save(place: str, fingerprint: bool) -> None:
        reshard.save(rows, checkpoint_id=box / place, fingerprint=fingerprint)

    def load(verify: Any) -> None:
        reshard.load(columns, checkpoint_id=box / "fingerprints", verify=verify)

    saves: dict[str, Callable[[], None]] = {"save": lambda: save("plain", False)}
    loads: dict[str, Callable[[], None]] = {
        "load, unverified": lambda: load("off"),
        "load, verify='full'": lambda: load("full"),
    }
    for backend in BACKENDS:
        saves[f"save, fingerprints with {backend}"] = lambda: save("fingerprints", True)
        loads[f"load, verify='fingerprint' with {backend}"] = lambda: load("fingerprint")
    return take_turns(saves) | take_turns(loads)


def take_turns(works: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds of each, in another order each time: the disk may remember who wrote before."""
    seconds: dict[str, float] = {}
    for turn in range(-1, ROUNDS):
        names = list(works)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            use("numpy" if name.endswith("numpy") else "numba")
            took = timed(works[name])
            if turn >= 0:
                seconds[name] = min(seconds.get(name, took), took)
    return {name: seconds[name] for name in works}


JOBS["fingerprints"] = measure_ranks


def main() -> None:
    chosen = options(__doc__, ["speed", "ranks"])
    console = Console()
    results: dict[str, Any] = {}
    if "speed" in chosen.jobs:
        results["gigabytes_per_second"] = measure_speed()
        table = Table("one core, GB/s", *BACKENDS, "XXH3, 128 bits")
        for name, speeds in results["gigabytes_per_second"].items():
            cells = (speeds.get(way) for way in (*BACKENDS, "XXH3, 128 bits"))
            table.add_row(name, *("" if cell is None else f"{cell:.1f}" for cell in cells))
        console.print(table)
    if "ranks" in chosen.jobs:
        box = Path(tempfile.mkdtemp(prefix="reshard-bench-", dir="."))
        try:
            seconds = run_ranks("fingerprints", 2, box, min(chosen.megabytes, 1500))
        finally:
            shutil.rmtree(box)
        results["seconds"] = seconds
        table = Table("two ranks, Shard(0) to Shard(1)", "seconds", "speed of that without")
        for name, value in seconds.items():
            plain = seconds["save" if name.startswith("save") else "load, unverified"]
            table.add_row(name, f"{value:.2f}", f"{plain / value:.2f}")
        console.print(table)
    record("fingerprints", results)


if __name__ == "__main__":
    main()

"""Saves and loads on two ranks, beside DCP, safetensors and the raw system calls.

`make bench` prints a table and writes docs/benchmarks/save_load.json and .png. All systems
take turns in the same processes, on the same bytes, and the best of several rounds counts:
the machine may be shared, so only ratios within one run mean anything.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import DOCS, JOBS, options, record, run_ranks, timed
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import reshard

BLOCK = 8 << 20


def make_state(mesh: Any, placements: list[Placement], megabytes: int) -> dict[str, Any]:
    """A model and its Adam state, `megabytes` in all, in shapes of a transformer."""
    width = 1024
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,)]
    layer_bytes = 3 * 4 * sum(torch.Size(shape).numel() for shape in shapes)
    layers = max(1, round(megabytes * 1e6 / layer_bytes))
    state: dict[str, Any] = {"model": {}, "optim": {}}
    for layer in range(layers):
        for number, shape in enumerate(shapes):
            name = f"layers.{layer}.{number}.weight"
            chosen = [
                p if not isinstance(p, Shard) or p.dim < len(shape) else Shard(0)
                for p in placements
            ]
            state["model"][name] = make_tensor(mesh, chosen, shape)
            state["optim"][name] = {
                "exp_avg": make_tensor(mesh, chosen, shape),
                "exp_avg_sq": make_tensor(mesh, chosen, shape),
            }
    return state


def make_tensor(mesh: Any, placements: list[Placement], shape: tuple[int, ...]) -> DTensor:
    local = list(shape)
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local[placement.dim] //= mesh.size(dim)
    # Written to once, so that the pages are there.
    part = torch.rand(1).expand(local).contiguous()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides(shape)
    )


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def leaves(state: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for value in state.values():
        found += leaves(value) if isinstance(value, dict) else [value.to_local()]
    return found


def byte_views(state: dict[str, Any]) -> list[memoryview]:
    return [memoryview(t.view(-1).view(torch.uint8).numpy()) for t in leaves(state)]


# The floor: the same bytes through the system calls alone.


def raw_save(state: dict[str, Any], path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    file = os.open(path / str(dist.get_rank()), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    position = 0
    for view in byte_views(state):
        for begin in range(0, len(view), BLOCK):
            position += os.pwrite(file, view[begin : begin + BLOCK], position)
    os.fsync(file)
    os.close(file)


def raw_load(state: dict[str, Any], path: Path) -> None:
    file = os.open(path / str(dist.get_rank()), os.O_RDONLY)
    position = 0
    for view in byte_views(state):
        for begin in range(0, len(view), BLOCK):
            position += os.preadv(file, [view[begin : begin + BLOCK]], position)
    os.close(file)


def safetensors_save(state: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    target = path / f"{dist.get_rank()}.safetensors"
    save_file({str(i): t for i, t in enumerate(leaves(state))}, target)
    file = os.open(target, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def safetensors_load(state: dict[str, Any], path: Path) -> None:
    from safetensors import safe_open

    with safe_open(path / f"{dist.get_rank()}.safetensors", framework="pt") as file:
        for i, tensor in enumerate(leaves(state)):
            tensor.copy_(file.get_tensor(str(i)))


def dcp_save(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))


def dcp_load(state: dict[str, Any], path: Path) -> None:
    dcp.load(state, checkpoint_id=path)


def reshard_save(state: dict[str, Any], path: Path) -> None:
    reshard.save(state, checkpoint_id=path)


def reshard_load(state: dict[str, Any], path: Path) -> None:
    reshard.load(state, checkpoint_id=path)


def reshard_load_unverified(state: dict[str, Any], path: Path) -> None:
    reshard.load(state, checkpoint_id=path, verify="off")


def reshard_load_verified(state: dict[str, Any], path: Path) -> None:
    reshard.load(state, checkpoint_id=path, verify="full")


SAVERS = {
    "raw": raw_save,
    "safetensors": safetensors_save,
    "DCP": dcp_save,
    "Reshard": reshard_save,
}
LOADERS = {
    "raw": raw_load,
    "safetensors": safetensors_load,
    "DCP": dcp_load,
    "Reshard": reshard_load,
    "Reshard, verify off": reshard_load_unverified,
}


def take_turns(
    works: dict[str, Callable[[dict[str, Any], Path], None]],
    state: dict[str, Any],
    box: Path,
    rounds: int,
    fresh: bool,
) -> dict[str, float]:
    best: dict[str, float] = {}
    for turn in range(rounds):
        # Another order each time: the disk may remember who wrote before.
        first = turn % len(works)
        for name in [*list(works)[first:], *list(works)[:first]]:
            work = works[name]
            path = box / name.split(",")[0]
            if fresh and dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
                os.sync()
            took = timed(lambda work=work, path=path: work(state, path))  # type: ignore[misc]
            best[name] = min(best.get(name, took), took)
    return best


def same_layout(mesh: Any, box: Path, size: int) -> dict[str, Any]:
    state = make_state(mesh, [Shard(0)], size)
    nbytes = sum(t.nbytes for t in leaves(state)) * mesh.size()
    saves = take_turns(SAVERS, state, box, 8, fresh=True)
    loads = take_turns(LOADERS, state, box, 10, fresh=False)
    return {"bytes": nbytes, "save": saves, "load, same layout": loads}


def reshard_to(placement: Placement, title: str) -> Callable[[Any, Path, int], dict[str, Any]]:
    def job(mesh: Any, box: Path, size: int) -> dict[str, Any]:
        state = make_state(mesh, [placement], size)
        loaders = {name: LOADERS[name] for name in ("DCP", "Reshard")}
        # By default, chunks that are read in part are not verified.
        loaders["Reshard, verify full"] = reshard_load_verified
        return {title: take_turns(loaders, state, box, 6, fresh=False)}

    return job


def peak_memory(mesh: Any, box: Path, size: int) -> dict[str, Any]:
    """Memory above the state, of this process: in a save, and then in a load."""
    state = make_state(mesh, [Shard(0)], size)
    reshard.save({"warm": torch.zeros(8)}, checkpoint_id=box / "warm")
    reshard.load({"warm": torch.zeros(8)}, checkpoint_id=box / "warm")
    before = reset_peak()
    reshard.save(state, checkpoint_id=box / "peak")
    save = peak() - before
    before = reset_peak()
    reshard.load(state, checkpoint_id=box / "peak")
    return {"memory": {"save": save, "load": peak() - before}}


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def tiny_tensors(mesh: Any, box: Path, size: int) -> dict[str, Any]:
    state = {
        "model": {
            f"layers.{i}.scale": DTensor.from_local(
                torch.rand(128), mesh, [Shard(0)], run_check=False
            )
            for i in range(20_000)
        }
    }
    both = {"DCP": dcp_save, "Reshard": reshard_save}
    saves = take_turns(both, state, box / "tiny", 2, fresh=True)
    loaders = {name: LOADERS[name] for name in both}
    loads = take_turns(loaders, state, box / "tiny", 2, fresh=False)
    return {"save, 20,000 tiny tensors": saves, "load, 20,000 tiny tensors": loads}


OWN_JOBS: dict[str, Callable[[Any, Path, int], dict[str, Any]]] = {
    "same layout": same_layout,
    "columns": reshard_to(Shard(1), "load, Shard(0) -> Shard(1)"),
    "replicate": reshard_to(Replicate(), "load, Shard(0) -> Replicate"),
    "four ranks": reshard_to(Shard(0), "load, 2 ranks -> 4 ranks"),
    "memory": peak_memory,
    "tiny": tiny_tensors,
}
JOBS.update(OWN_JOBS)


def show(console: Console, results: dict[str, Any]) -> None:
    gigabytes = results.get("bytes", 0) / 1e9
    table = Table(title=f"Two ranks, model and Adam state, {gigabytes:.1f} GB")
    for column in ("what", "system", "seconds", "GB/s", "of raw", "x DCP"):
        table.add_column(column, justify="left" if column in ("what", "system") else "right")
    for what, systems in results.items():
        if not isinstance(systems, dict) or "DCP" not in systems:
            continue
        for system, seconds in systems.items():
            of_raw = f"{systems['raw'] / seconds:.2f}" if "raw" in systems else ""
            speed = "" if "tiny" in what else f"{gigabytes / seconds:.2f}"
            table.add_row(
                what, system, f"{seconds:.2f}", speed, of_raw, f"{systems['DCP'] / seconds:.1f}"
            )
            what_shown = ""
            what = what_shown
    console.print(table)
    memory = results.get("memory", {"save": 0, "load": 0})
    console.print(
        f"memory above the state: save {memory['save'] / 2**20:.0f} MiB, "
        f"load {memory['load'] / 2**20:.0f} MiB"
    )


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [(w, s) for w, s in results.items() if isinstance(s, dict) and "DCP" in s]
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.75 * len(rows)), layout="constrained")
    for position, (_, systems) in enumerate(rows):
        ratios = {name: systems["DCP"] / seconds for name, seconds in systems.items()}
        height = 0.8 / len(ratios)
        for place, (name, ratio) in enumerate(ratios.items()):
            colour = {"DCP": "#999999", "Reshard": "#1f77b4", "raw": "#dddddd"}.get(name, "#9ec9e8")
            axes.barh(position + place * height, ratio, height * 0.9, color=colour)
            axes.text(
                ratio, position + place * height, f" {name} {ratio:.1f}x", va="center", size=7
            )
    axes.set_yticks([i + 0.3 for i in range(len(rows))], [what for what, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as DCP, best of several rounds in one run")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15)
    figure.savefig(path, dpi=120)


def main(size: int, jobs: list[str]) -> None:
    console = Console()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("RESHARD_BENCH_DIR")) as place:
        box = Path(place)
        for job in jobs:
            console.print(f"measuring: {job} ...")
            results |= run_ranks(job, 4 if job == "four ranks" else 2, box, size)
    show(console, results)
    if jobs == list(OWN_JOBS):
        record("save_load", results)
        plot(results, DOCS / "save_load.png")


if __name__ == "__main__":
    chosen = options(__doc__, OWN_JOBS)
    main(chosen.megabytes, chosen.jobs)

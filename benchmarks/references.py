"""Saves that refer to a base, beside saves that write everything.

`make bench-references` prints a table and writes docs/benchmarks/references.json. Two ranks, all
kinds of saves in turns, the best of several rounds.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import JOBS, options, record, run_ranks, timed
from rich.console import Console
from rich.table import Table
from save_load import Shard, leaves, make_tensor

import reshard
from reshard.state_dict_saver import AsyncCheckpointerType

KINDS = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}
ROUNDS = 6
BARS = {
    "LoRA: bytes written, of those that changed": 1.05,
    "LoRA: time, of a full save": 0.15,
    "LoRA: stall, of a full one, thread": 0.25,
    "LoRA: stall, of a full one, process": 0.25,
    "LoRA: stall, of a full one, thread, without naming what is frozen": None,
    "LoRA: stall, of a full one, process, without naming what is frozen": None,
    "full training: time with a base, of that without": 1.05,
}


def make_model(mesh: Any, megabytes: int) -> dict[str, Any]:
    """Frozen weights, `megabytes` in all, and adapters of 16 dimensions with their Adam state."""
    width, rank = 1024, 16
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    layers = max(1, round(megabytes * 1e6 / (4 * sum(a * b for a, b in shapes))))
    state: dict[str, Any] = {"frozen": {}, "adapters": {}, "optim": {}}
    for layer in range(layers):
        for number, (rows, columns) in enumerate(shapes):
            name = f"layers.{layer}.{number}"
            state["frozen"][name] = make_tensor(mesh, [Shard(0)], (rows, columns))
            for part, shape in (("a", (rank, columns)), ("b", (rows, rank))):
                state["adapters"][f"{name}.{part}"] = make_tensor(mesh, [Shard(0)], shape)
                state["optim"][f"{name}.{part}"] = {
                    "exp_avg": make_tensor(mesh, [Shard(0)], shape),
                    "exp_avg_sq": make_tensor(mesh, [Shard(0)], shape),
                }
    for number, tensor in enumerate(leaves(state)):
        tensor += number
    return state


def train(state: dict[str, Any], everything: bool = False) -> int:
    """Change the adapters, or all; the bytes that changed on this rank."""
    parts = [state["adapters"], state["optim"], *([state["frozen"]] if everything else [])]
    tensors = leaves({str(number): part for number, part in enumerate(parts)})
    for tensor in tensors:
        tensor += 1
    return sum(tensor.nbytes for tensor in tensors)


def lora(mesh: Any, box: Path, size: int) -> dict[str, Any]:
    state = make_model(mesh, size)
    reshard.save(state, checkpoint_id=box / "step-0")
    seconds: dict[str, list[float]] = {"full": [], "with a base": []}
    share = 0.0
    for step in range(1, ROUNDS + 1):
        changed = train(state) * mesh.size()
        full, own = box / "full", box / f"step-{step}"
        seconds["full"].append(timed(partial(reshard.save, state, checkpoint_id=full)))
        base = box / f"step-{step - 1}"
        seconds["with a base"].append(
            timed(partial(reshard.save, state, checkpoint_id=own, base=base))
        )
        written = sum(path.stat().st_size for path in own.iterdir())
        share = max(share, written / changed)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(full)
        dist.barrier()
    best = {name: min(took) for name, took in seconds.items()}
    return {
        "LoRA: bytes written, of those that changed": share,
        "LoRA: time, of a full save": best["with a base"] / best["full"],
        "seconds, LoRA": best,
    }


def lora_async(kind: str) -> Callable[[Any, Path, int], dict[str, Any]]:
    def job(mesh: Any, box: Path, size: int) -> dict[str, Any]:
        state = make_model(mesh, size)
        reshard.save(state, checkpoint_id=box / "step-0")
        best: dict[str, float] = {}
        for step in range(1, ROUNDS + 1):
            base = box / f"step-{step - 1}"
            ways: dict[str, dict[str, Any]] = {
                "full": {},
                "compared": {"base": base},
                "frozen": {"base": base, "frozen": ["frozen.*"]},
            }
            for name, more in ways.items():
                train(state)
                path = box / (f"step-{step}" if name == "frozen" else name)
                dist.barrier()
                begin = time.perf_counter()
                future: Any = reshard.async_save(
                    state, checkpoint_id=path, async_checkpointer_type=KINDS[kind], **more
                )
                dist.barrier()
                stall = time.perf_counter() - begin
                future.result()
                dist.barrier()
                # The first two of each take memory.
                if step > 2:
                    best[name] = min(best.get(name, stall), stall)
        reshard.close()
        return {
            f"LoRA: stall, of a full one, {kind}": best["frozen"] / best["full"],
            f"LoRA: stall, of a full one, {kind}, without naming what is frozen": best["compared"]
            / best["full"],
            f"seconds of stall, {kind}": best,
        }

    return job


def full_training(mesh: Any, box: Path, size: int) -> dict[str, Any]:
    state = make_model(mesh, size)
    reshard.save(state, checkpoint_id=box / "step-0")
    seconds: dict[str, list[float]] = {"without": [], "with a base": []}
    for step in range(1, 2 * ROUNDS + 1):
        turns = [("without", None), ("with a base", box / "step-0")]
        for name, base in turns if step % 2 else turns[::-1]:
            train(state, everything=True)
            path = box / "step"
            seconds[name].append(timed(partial(reshard.save, state, checkpoint_id=path, base=base)))
            if dist.get_rank() == 0:
                shutil.rmtree(path)
            dist.barrier()
    best = {name: min(took) for name, took in seconds.items()}
    ratio = best["with a base"] / best["without"]
    return {
        "full training: time with a base, of that without": ratio,
        "seconds, full training": best,
    }


OWN_JOBS = {
    "lora": lora,
    "lora-thread": lora_async("thread"),
    "lora-process": lora_async("process"),
    "full-training": full_training,
}
JOBS.update(OWN_JOBS)


def main() -> None:
    given = options(__doc__, OWN_JOBS)
    size = min(given.megabytes, 1500)
    results: dict[str, Any] = {"megabytes": size}
    for job in given.jobs:
        box = Path(tempfile.mkdtemp(prefix="reshard-bench-"))
        try:
            results |= run_ranks(job, 2, box, size)
        finally:
            shutil.rmtree(box)
    table = Table(title=f"Saves that refer to a base, {size} MB frozen, 2 ranks")
    for column in ("", "measured", "bar"):
        table.add_column(column)
    for name, bar in BARS.items():
        if name in results:
            table.add_row(name, f"{results[name]:.3f}", "" if bar is None else f"at most {bar}")
    Console().print(table)
    record("references", results | {"bars": BARS})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

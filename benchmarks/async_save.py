"""What an asynchronous save costs the training, beside a plain copy of the same bytes and DCP.

`make bench-async` prints a table and writes docs/benchmarks/async_save.json and .png. All
take turns in the same processes, and the best of several rounds counts.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import DOCS, JOBS, options, record, run_ranks, timed
from rich.console import Console
from rich.table import Table
from save_load import Shard, leaves, make_state

import reshard
from reshard.background.overlap import LateCopy
from reshard.background.worker import worker_of_this_process
from reshard.state_dict_saver import AsyncCheckpointerType
from reshard.training import TrainState

KINDS = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}
BARS = {
    "stall, thread": 1.3,
    "stall, process": 1.3,
    "first stall after prewarm, thread": 1.5,
    "first stall after prewarm, process": 1.5,
    "stall, overlap": 0.15,
    "first stall, overlap, over later ones": 1.2,
    "first stall after prewarm in the background, over later ones": 1.2,
    "step while saving, thread": 1.5,
    "step while saving, process": 1.25,
    "memory after 20 saves, thread": 1.02,
    "memory after 20 saves, process": 1.02,
    "time to commit, thread": 1.3,
    "time to commit, process": 1.3,
}


class Turns:
    """The best time of each of several things that take turns."""

    def __init__(self) -> None:
        self.best: dict[str, float] = {}

    def note(self, name: str, seconds: float) -> None:
        self.best[name] = min(self.best.get(name, seconds), seconds)


def stalls(mesh: Any, box: Path, size: int) -> dict[str, Any]:
    """From the second save on; and how long until the checkpoint is there."""
    state = make_state(mesh, [Shard(0)], size)
    twin = [torch.empty_like(tensor).fill_(1) for tensor in leaves(state)]
    nbytes = sum(tensor.nbytes for tensor in twin) * mesh.size()
    stall, commit = Turns(), Turns()
    for turn in range(7):
        stall.note("copy", timed(lambda: copy_all(twin, leaves(state))))
        commit.note("save", timed(lambda: reshard.save(state, checkpoint_id=fresh(box / "sync"))))
        for name, kind in KINDS.items():
            path = fresh(box / name)
            dist.barrier()
            begin = time.perf_counter()
            future = reshard.async_save(state, checkpoint_id=path, async_checkpointer_type=kind)
            dist.barrier()
            stalled = time.perf_counter() - begin
            future.result()
            dist.barrier()
            if turn:
                stall.note(name, stalled)
                commit.note(name, time.perf_counter() - begin)
    return {"bytes": nbytes, "stall": stall.best, "commit": commit.best}


def first_stall(kind: str) -> Callable[[Any, Path, int], dict[str, Any]]:
    def job(mesh: Any, box: Path, size: int) -> dict[str, Any]:
        state = make_state(mesh, [Shard(0)], size)
        reshard.prewarm(state, async_checkpointer_type=KINDS[kind])
        twin = [torch.empty_like(tensor).fill_(1) for tensor in leaves(state)]
        copies = [timed(lambda: copy_all(twin, leaves(state))) for _ in range(3)]
        futures: list[Any] = []
        path = fresh(box / "first")
        took = timed(
            lambda: futures.append(
                reshard.async_save(state, checkpoint_id=path, async_checkpointer_type=KINDS[kind])
            )
        )
        futures[0].result()
        return {f"first stall, {kind}": {"copy": min(copies), kind: took}}

    return job


class Model(torch.nn.Module):
    """Layers of megabytes, trained by AdamW: `size` megabytes with the state of that."""

    def __init__(self, size: int) -> None:
        super().__init__()
        width = 1024
        count = max(1, size * 10**6 // (3 * 4 * width * width))
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(torch.rand(width, width) / width) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x @ layer
        return x.sum()


class Loop:
    """A training loop that accumulates gradients."""

    def __init__(self, size: int) -> None:
        self.model = Model(size)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        # Each rank has layers of its own, as in a pipeline.
        self.state = {f"stage-{dist.get_rank()}": TrainState(self.model, self.optimizer)}
        self.rows, self.passes = 64, 1
        self.pass_once()
        self.optimizer.step()

    def pass_once(self) -> None:
        self.model(torch.rand(self.rows, 1024)).backward()

    def tensors(self) -> list[torch.Tensor]:
        states = [each for state in self.optimizer.state.values() for each in state.values()]
        return [each.detach() for each in self.model.parameters()] + states

    def lengthen(self, seconds: float) -> None:
        """Accumulate gradients until a step takes at least `seconds`."""
        took = timed(self.pass_once)
        self.passes = max(1, math.ceil(seconds / took))

    def step(self) -> dict[str, float]:
        """How long the passes took, and the step, which may wait for a copy."""
        begin = time.perf_counter()
        for _ in range(self.passes):
            self.pass_once()
        passed = time.perf_counter()
        self.optimizer.step()
        stepped = time.perf_counter()
        self.optimizer.zero_grad()
        return {"passes": passed - begin, "step": stepped - passed}


def overlap(mesh: Any, box: Path, size: int) -> dict[str, Any]:
    """What a save takes from a training loop whose steps are longer than a copy.

    That is the call and what the step then waits for. How much longer the passes beside it take
    is recorded on its own: the copy, and the save that follows, need cores and memory bandwidth.
    """
    waited: list[float] = []

    def note_wait(copy: Any, optimizer: Any = None) -> None:
        begin = time.perf_counter()
        plain_wait(copy, optimizer)
        waited.append(time.perf_counter() - begin)

    plain_wait, LateCopy.wait = LateCopy.wait, note_wait  # type: ignore[method-assign]
    loop = Loop(size // mesh.size())
    warming = reshard.prewarm(loop.state, background=True)
    beside_prewarm = loop.step()
    warming.result()
    tensors = loop.tensors()
    copies = copy_seconds(tensors)
    loop.lengthen(2 * min(copies))
    alone = [loop.step() for _ in range(3)]
    stalls, passes, calls = [], [], []
    for number in range(5):
        path = fresh(box / "overlap")
        waited.clear()
        begin = time.perf_counter()
        saving = reshard.async_save(loop.state, checkpoint_id=path, staging="overlap")
        calls.append(time.perf_counter() - begin)
        passes.append(loop.step()["passes"])
        stalls.append(slowest(calls[-1] + sum(waited)))
        saving.upload_completion.result()  # type: ignore[union-attr]
        for _ in range(number == 0):
            loop.step()
    return {
        "overlap": {
            "copy": min(copies),
            "first": stalls[0],
            "later": min(stalls[1:]),
            "worst later": max(stalls[1:]),
            "call": min(calls[1:]),
            "passes alone": min(each["passes"] for each in alone),
            "passes beside a save": min(passes[1:]),
            "passes beside prewarm": beside_prewarm["passes"],
        }
    }


def copy_seconds(tensors: list[torch.Tensor]) -> list[float]:
    twin = [torch.empty_like(each).fill_(1) for each in tensors]
    return [timed(lambda: copy_all(twin, tensors)) for _ in range(3)]


def slowest(seconds: float) -> float:
    """The time of the rank that took longest."""
    found = torch.tensor(seconds)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def prewarmed(mesh: Any, box: Path, size: int) -> dict[str, Any]:
    """The first save after memory was taken in the background, and later ones."""
    state = make_state(mesh, [Shard(0)], size)
    reshard.prewarm(state, background=True).result()
    took = []
    for _ in range(5):
        path = fresh(box / "prewarmed")
        futures: list[Any] = []
        took.append(
            timed(lambda: futures.append(reshard.async_save(state, checkpoint_id=path)))  # noqa: B023
        )
        futures[0].result()
    return {"prewarmed": {"copy": min(took[1:]), "first": took[0]}}


def dcp_stall(mesh: Any, box: Path, size: int) -> dict[str, Any]:
    state = make_state(mesh, [Shard(0)], size)
    took = []
    for _ in range(4):
        path = fresh(box / "DCP")
        dist.barrier()
        begin = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=path)
        took.append(time.perf_counter() - begin)
        future.result()  # type: ignore[union-attr]
    return {"DCP stall": {"first": took[0], "later": min(took[1:])}}


def memory(mesh: Any, box: Path, size: int) -> dict[str, Any]:
    """Resident memory of the trainer and its worker, after 2 saves and after 20."""
    state = make_state(mesh, [Shard(0)], size)
    found = {}
    for name, kind in KINDS.items():
        sizes = []
        for number in range(1, 21):
            # None is waited for but the 2nd and the last: two are in flight most of the time.
            future = reshard.async_save(
                state, checkpoint_id=box / name, async_checkpointer_type=kind
            )
            if number in (2, 20):
                future.result()
                sizes.append(resident())
        found[name] = {"after 2": sizes[0], "after 20": sizes[1]}
        reshard.close()
    return {"memory": found}


def resident() -> int:
    worker = worker_of_this_process()._worker
    pids = [os.getpid(), *([worker.pid] if worker is not None else [])]
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def steps(mesh: Any, box: Path, size: int) -> dict[str, Any]:
    """A matmul loop on one thread: alone, and while a save runs in the background."""
    torch.set_num_threads(1)
    state = make_state(mesh, [Shard(0)], size)
    a, b = torch.rand(512, 512), torch.rand(512, 512)
    turns = Turns()
    for _ in range(5):
        turns.note("alone", step_seconds(a, b, stop_after(1.0)))
        for name, kind in KINDS.items():
            future = reshard.async_save(
                state, checkpoint_id=fresh(box / name), async_checkpointer_type=kind
            )
            turns.note(name, step_seconds(a, b, future.done))
            future.result()
    return {"step": turns.best}


def step_seconds(a: torch.Tensor, b: torch.Tensor, done: Callable[[], bool]) -> float:
    count, begin = 0, time.perf_counter()
    while not done() or not count:
        torch.mm(a, b)
        count += 1
    return (time.perf_counter() - begin) / count


def stop_after(seconds: float) -> Callable[[], bool]:
    over = threading.Event()
    timer = threading.Timer(seconds, over.set)
    timer.start()
    return over.is_set


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def fresh(path: Path) -> Path:
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    dist.barrier()
    return path


def first_ratio(times: dict[str, float]) -> float:
    return next(seconds for name, seconds in times.items() if name != "copy") / times["copy"]


def ratios(results: dict[str, Any]) -> dict[str, float]:
    found = {}
    for kind in KINDS:
        if "stall" in results:
            found[f"stall, {kind}"] = results["stall"][kind] / results["stall"]["copy"]
            found[f"time to commit, {kind}"] = results["commit"][kind] / results["commit"]["save"]
        first = results.get(f"first stall, {kind}")
        if first:
            found[f"first stall after prewarm, {kind}"] = first[kind] / first["copy"]
        if "overlap" in results:
            times = results["overlap"]
            found["stall, overlap"] = times["later"] / times["copy"]
            found["first stall, overlap, over later ones"] = times["first"] / times["later"]
        if "prewarmed" in results:
            found["first stall after prewarm in the background, over later ones"] = first_ratio(
                results["prewarmed"]
            )
        if "step" in results:
            found[f"step while saving, {kind}"] = results["step"][kind] / results["step"]["alone"]
        if "memory" in results:
            sizes = results["memory"][kind]
            found[f"memory after 20 saves, {kind}"] = sizes["after 20"] / sizes["after 2"]
    return {name: found[name] for name in BARS if name in found}


def show(console: Console, results: dict[str, Any]) -> None:
    table = Table(title=f"async_save, two ranks, {results.get('bytes', 0) / 1e9:.1f} GB")
    for column in ("what", "ratio", "at most"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, ratio in ratios(results).items():
        table.add_row(name, f"{ratio:.2f}", f"{BARS[name]:.2f}")
    console.print(table)
    if "overlap" in results:
        times = results["overlap"]
        slower = times["passes beside a save"] / times["passes alone"] - 1
        console.print(
            f"staging='overlap': the call takes {times['call'] * 1e3:.0f} ms; forward and backward "
            f"passes of {times['passes alone']:.2f} s take {slower:.0%} longer beside a save"
        )
    if "DCP stall" in results and "stall" in results:
        copy = results["stall"]["copy"]
        theirs = results["DCP stall"]
        console.print(
            f"a plain copy takes {copy:.2f} s; DCP (thread) stalls for "
            f"{theirs['first'] / copy:.1f} copies at first, {theirs['later'] / copy:.1f} later"
        )


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = ratios(results)
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.4 * len(found)), layout="constrained")
    for position, (name, ratio) in enumerate(found.items()):
        axes.barh(position, ratio, 0.6, color="#1f77b4")
        axes.text(ratio, position, f"{ratio:.2f} ", va="center", ha="right", color="white", size=8)
        axes.plot([BARS[name]] * 2, [position - 0.4, position + 0.4], color="#d62728")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("times a plain copy, the step alone, memory after 2 saves, a synchronous save")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


OWN_JOBS: dict[str, Callable[[Any, Path, int], dict[str, Any]]] = {
    "stalls": stalls,
    "first, thread": first_stall("thread"),
    "first, process": first_stall("process"),
    "overlap": overlap,
    "first, in the background": prewarmed,
    "memory": memory,
    "steps": steps,
    "DCP": dcp_stall,
}
JOBS.update({f"async {name}": job for name, job in OWN_JOBS.items()})


def main(size: int, jobs: list[str]) -> None:
    console = Console()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("RESHARD_BENCH_DIR")) as place:
        for job in jobs:
            console.print(f"measuring: {job} ...")
            ranks = 1 if job == "steps" else 2
            amount = size // 3 if job in ("steps", "memory") else size
            # The first stall of a process can be taken once only; the best of three counts.
            for _ in range(3 if job.startswith("first") else 1):
                found = run_ranks(f"async {job}", ranks, Path(place), amount)
                results |= {
                    what: found[what]
                    for what in found
                    if what not in results or first_ratio(found[what]) < first_ratio(results[what])
                }
    show(console, results)
    if jobs == list(OWN_JOBS):
        record("async_save", results | {"ratios": ratios(results)})
        plot(results, DOCS / "async_save.png")


if __name__ == "__main__":
    chosen = options(__doc__, OWN_JOBS)
    main(chosen.megabytes, chosen.jobs)

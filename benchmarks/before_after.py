"""This tree beside an earlier commit, in turns: what a change did to speed.

`make bench-before-after BASE=<commit>` prints a table. Both sources run the same script, which
uses public names only, in fresh processes, one after the other, several times; the best of each
counts. The machine may be shared, so only the ratios mean anything.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TENSORS, MEGABYTES, TINY = 20, 1000, 20_000


def best(work: Callable[[], Any], rounds: int, around: Callable[[], Any] = lambda: None) -> float:
    seconds = []
    for _ in range(rounds):
        around()
        begin = time.perf_counter()
        work()
        around()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measure_alone(box: Path) -> dict[str, float]:
    """One process without a group."""
    import torch
    import torch.distributed.tensor

    begin = time.perf_counter()
    import reshard

    results = {"import reshard, after torch": time.perf_counter() - begin}
    state = {f"layer{i}.weight": torch.randn(64, 64) for i in range(TENSORS)}
    places = iter(range(1 << 30))
    few = lambda: reshard.save(state, checkpoint_id=box / f"few-{next(places)}")  # noqa: E731
    best(few, 5)
    results[f"save {TENSORS} tensors, one process"] = best(few, 100)
    again = lambda: reshard.load(state, checkpoint_id=box / "few-0")  # noqa: E731
    results[f"load {TENSORS} tensors, one process"] = best(again, 100)
    tiny = {f"t{i}": torch.rand(64) for i in range(TINY)}
    write = lambda: reshard.save(tiny, checkpoint_id=box / "tiny")  # noqa: E731
    results[f"save {TINY} tiny tensors, one process"] = best(write, 5)
    read = lambda: reshard.load(tiny, checkpoint_id=box / "tiny")  # noqa: E731
    results[f"load {TINY} tiny tensors, one process"] = best(read, 5)
    return results


def measure_together(box: Path, rank: int, port: int) -> dict[str, float]:
    """Two ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import reshard
    from reshard.state_dict_saver import AsyncCheckpointerType

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def state(count: int, shape: tuple[int, ...], dim: int) -> dict[str, Any]:
        return {
            f"t{i}": DTensor.from_local(torch.rand(shape), mesh, [Shard(dim)], run_check=False)
            for i in range(count)
        }

    def measure(work: Callable[[], Any], rounds: int) -> float:
        return best(work, rounds, dist.barrier)

    count = MEGABYTES // 32
    big, columns = state(count, (1024, 4096), 0), state(count, (2048, 2048), 1)
    tiny = state(TINY, (64,), 0)
    place = str(box / "big")
    reshard.save({"w": torch.zeros(4)}, checkpoint_id=box / "first")
    results = {
        f"save {MEGABYTES} MB": measure(lambda: reshard.save(big, checkpoint_id=place), 5),
        "load it": measure(lambda: reshard.load(big, checkpoint_id=place), 6),
        "load it, verify='off'": measure(
            lambda: reshard.load(big, checkpoint_id=place, verify="off"), 6
        ),
        "load it by columns": measure(lambda: reshard.load(columns, checkpoint_id=place), 6),
        f"save {TINY} tiny tensors": measure(
            lambda: reshard.save(tiny, checkpoint_id=box / "tiny"), 4
        ),
        f"load {TINY} tiny tensors": measure(
            lambda: reshard.load(tiny, checkpoint_id=box / "tiny"), 4
        ),
    }
    for kind in AsyncCheckpointerType:
        options: Any = {"async_checkpointer_type": kind}
        reshard.prewarm(big, **options)
        stall, whole = [], []
        for _ in range(5):
            dist.barrier()
            begin = time.perf_counter()
            future: Any = reshard.async_save(big, checkpoint_id=box / kind.value, **options)
            stall.append(time.perf_counter() - begin)
            future.result()
            whole.append(time.perf_counter() - begin)
        results[f"async_save by {kind.value}: stall"] = min(stall[1:])
        results[f"async_save by {kind.value}: until saved"] = min(whole[1:])
        reshard.close()
    dist.barrier()
    return results


def run(source: Path) -> dict[str, float]:
    """Measure one source tree, in processes of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(source)}
    results: dict[str, float] = {}
    # Not in /tmp, which may be memory.
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as box:
        for ranks in (1, 2):
            script = [sys.executable, "-W", "ignore", __file__, "--measure", box, str(ranks)]
            commands = [[*script, str(rank), str(port)] for rank in range(ranks)]
            running = [
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
                for command in commands
            ]
            said = [process.communicate()[0] for process in running]
            if any(process.returncode for process in running):
                raise SystemExit(f"the measurement of {source} failed")
            results |= json.loads(said[0].splitlines()[-1])
    return results


def unpack(commit: str, to: Path) -> Path:
    """The sources of a commit."""
    packed = subprocess.check_output(["git", "archive", commit, "src"], cwd=ROOT)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(to, filter="data")
    return to / "src"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="HEAD~1", help="the commit to compare with")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        box, ranks, rank, port = arguments.measure
        alone = ranks == "1"
        path = Path(box)
        results = measure_alone(path) if alone else measure_together(path, int(rank), int(port))
        print(json.dumps(results), flush=True)
        os._exit(0)

    from rich.console import Console
    from rich.table import Table

    with tempfile.TemporaryDirectory() as folder:
        sources = {"before": unpack(arguments.base, Path(folder)), "after": ROOT / "src"}
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
        for _ in range(arguments.turns):
            for name, source in sources.items():
                runs[name].append(run(source))
    table = Table("", "before, ms", "after, ms", "after / before")
    for case in runs["after"][0]:
        before, after = (min(each[case] for each in runs[name]) for name in ("before", "after"))
        table.add_row(case, f"{1000 * before:.2f}", f"{1000 * after:.2f}", f"{after / before:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()

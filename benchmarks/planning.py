"""Planning at scale, beside DCP in the same run.

`make bench-planning` prints a table and writes docs/benchmarks/planning.json. Each system
plans in a process of its own, fed with the plans of all ranks as a coordinator would
receive them, so that time and memory are those of planning alone. What takes seconds is done
several times, and the best run counts: memory that the machine has just got back from another
process is slow at first. How ranks exchange messages is measured in `channel.py`, last.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import channel
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as DCPSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult as DCPWriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from reshard import FileSystemReader, FileSystemWriter
from reshard.default_planner import DefaultSavePlanner
from reshard.planner import SavePlan
from reshard.planning.columns import WriteColumns
from reshard.planning.packing import pack_array, pack_compressed
from reshard.plans.entries import chunk_table
from reshard.plans.results import WriteResults, WrittenColumns, WrittenFile
from reshard.plans.wire import (
    decode_results,
    decode_save_plans,
    encode_answer,
    encode_results,
    encode_save_plan,
)
from reshard.plans.write_items import WriteItems, write_columns

ROWS_PER_RANK, COLUMNS = 8, 512
PLANNING = ("decode plans", "global plan", "encode answers", "encode manifest")
MOST_RUNS, RUN_AGAIN_SECONDS = 5, 20.0
HERE = Path(__file__)
RESULT = HERE.parent.parent / "docs" / "benchmarks" / "planning.json"


@contextmanager
def simulated_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of many, with a group that does not communicate."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_state_dict(n_tensors: int, world_size: int) -> dict[str, Any]:
    """The part of a model, sharded along its rows, that the current rank holds."""
    mesh = init_device_mesh("cpu", (world_size,))
    local = torch.empty(ROWS_PER_RANK, COLUMNS, device="meta")
    parts = ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.up.weight", "norm.weight")
    return {
        "model": {
            f"layers.{i // 4}.{parts[i % 4]}": DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False
            )
            for i in range(n_tensors)
        }
    }


def local_plan(planner: Any, rank: int, world_size: int, n_tensors: int) -> Any:
    with simulated_rank(rank, world_size):
        planner.set_up_planner(make_state_dict(n_tensors, world_size), None, rank == 0)
        return planner.create_local_plan()


# The plans of all ranks differ in their offsets alone. Those of rank 0 come from the real
# planner; the others are derived from them, and one is checked against the real planner.


def dcp_plan_of(rank: int, plan: Any) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

    offsets = torch.Size((rank * ROWS_PER_RANK, 0))
    items = [
        WriteItem(
            MetadataIndex(item.index.fqn, offsets),
            item.type,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(offsets, item.tensor_data.chunk.sizes),
                item.tensor_data.properties,
                item.tensor_data.size,
            ),
        )
        for item in plan.items
    ]
    return dcp.SavePlan(items, planner_data=plan.planner_data)


def reshard_plan_of(rank: int, plan: SavePlan) -> SavePlan:
    columns = write_columns(plan.items)
    offsets = columns.offsets.copy()
    offsets[:, 0] = rank * ROWS_PER_RANK
    moved = WriteColumns(
        columns.schema, offsets, columns.sizes, columns.hints, columns.nbytes, columns.aliases
    )
    return SavePlan(WriteItems(moved), planner_data=plan.planner_data)


def gather(system: str, ranks: int, n_tensors: int, to: Path) -> None:
    """Write down what the coordinator would receive."""
    planner, derive, encode = (
        (DCPSavePlanner(), dcp_plan_of, pickle.dumps)
        if system == "dcp"
        else (DefaultSavePlanner(), reshard_plan_of, encode_save_plan)
    )
    first = local_plan(planner, 0, ranks, n_tensors)
    messages = [encode(derive(rank, first)) for rank in range(ranks)]
    real = local_plan(planner, ranks - 1, ranks, n_tensors)
    if len(encode(real)) != len(messages[-1]) and system == "reshard":
        raise SystemExit("the derived plans are not those that the planner makes")
    derived = derive(ranks - 1, first)
    if [item.index for item in derived.items] != [item.index for item in real.items]:
        raise SystemExit("the derived plans are not those that the planner makes")
    results = [results_of(system, rank, derive(rank, first)) for rank in range(ranks)]
    to.write_bytes(pickle.dumps((messages, results)))


def results_of(system: str, rank: int, plan: Any) -> bytes:
    """What a rank reports after it has written its chunks into one file."""
    nbytes = ROWS_PER_RANK * COLUMNS * 4
    if system == "dcp":
        path = f"__{rank}_0.distcp"
        return pickle.dumps(
            [
                DCPWriteResult(item.index, nbytes, _StorageInfo(path, i * nbytes, nbytes))
                for i, item in enumerate(plan.items)
            ]
        )
    count = len(plan.items)
    written = WrittenColumns.of([nbytes] * count, [False] * count)
    written.files = [WrittenFile(f"__{rank}_0.safetensors", 4096 + count * nbytes, 4096, rank)]
    written.begins[:] = 4096 + np.arange(count) * nbytes
    written.checksums[:] = np.arange(count) * 0x9E3779B97F4A7C1 + rank
    written.digests[:] = np.random.default_rng(rank).integers(0, 256, (count, 16), dtype=np.uint8)
    return encode_results(WriteResults(plan.items, written), as_answered=True)


def coordinate(system: str, source: Path) -> dict[str, float]:
    """Do what the coordinator does, and say how long each part took."""
    messages, results = pickle.loads(source.read_bytes())
    box = Path(tempfile.mkdtemp(dir=source.parent))
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - begin
        return result

    if system == "dcp":
        planner: Any = DCPSavePlanner()
        plans = timed("decode plans", lambda: [pickle.loads(message) for message in messages])
        answers, metadata = timed("global plan", lambda: planner.create_global_plan(plans))
        timed("encode answers", lambda: [pickle.dumps(answer) for answer in answers])
        timed("encode manifest", lambda: pickle.dumps(metadata))
        peak_mb = peak()
        found = timed("decode results", lambda: [pickle.loads(result) for result in results])
        writer: Any = dcp.FileSystemWriter(box)
        timed("write manifest", lambda: writer.finish(metadata, found))
        del found, metadata, answers, plans
        reader: Any = dcp.FileSystemReader(box)
        timed("open and look up", lambda: look_up(reader.read_metadata()))
    else:
        planner = DefaultSavePlanner()
        plans = timed("decode plans", lambda: decode_save_plans(messages))
        answers, metadata = timed("global plan", lambda: planner.create_global_plan(plans))
        timed(
            "encode answers",
            lambda: [encode_answer(a, sent) for a, sent in zip(answers, plans, strict=True)],
        )
        timed("encode manifest", lambda: encode_manifest_columns(metadata))
        peak_mb = peak()
        found = timed(
            "decode results",
            lambda: [decode_results(r, a.items) for r, a in zip(results, answers, strict=True)],
        )
        for result in found:
            for written in result.written.files:
                # The writer makes sure that the files are there; their content is not read.
                with (box / written.path).open("wb") as file:
                    file.truncate(written.nbytes)
        writer = FileSystemWriter(box)
        timed("write manifest", lambda: writer.finish(metadata, found))
        del found, metadata, answers, plans
        reader = FileSystemReader(box)
        timed("open and look up", lambda: look_up(reader.read_metadata()))
    shutil.rmtree(box)
    four = sum(seconds[part] for part in PLANNING)
    return {
        **seconds,
        "seconds": four,
        "whole save": four
        - seconds["encode manifest"]
        + seconds["decode results"]
        + seconds["write manifest"],
        "gathered_bytes": sum(map(len, messages)),
        "peak_rss_mb": peak_mb,
    }


def look_up(metadata: Any) -> Any:
    """Where the first chunk of one tensor lies."""
    name, entry = list(metadata.state_dict_metadata.items())[len(metadata.state_dict_metadata) // 2]
    index = type(next(iter(metadata.storage_data)))(name, entry.chunks[0].offsets, 0)
    return metadata.storage_data[index]


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def encode_manifest_columns(metadata: Any) -> list[Any]:
    table = chunk_table(metadata)
    return [
        pack_compressed(table.names),
        pack_array(table.shapes),
        pack_array(table.starts),
        pack_array(table.offsets),
        pack_array(table.sizes),
    ]


def plan_locally(n_tensors: int) -> dict[str, float]:
    """Seconds to plan one rank of many DTensors: best of several, taken in turn."""
    best: dict[str, float] = {}
    with simulated_rank(1, 8):
        state_dict = make_state_dict(n_tensors, 8)
        for _ in range(5):
            for name, planner in (("dcp", DCPSavePlanner()), ("reshard", DefaultSavePlanner())):
                planner.set_up_planner(state_dict, None, False)
                begin = time.perf_counter()
                planner.create_local_plan()
                took = time.perf_counter() - begin
                best[name] = min(best.get(name, took), took)
    return best


def cached_gather(ranks: int, n_tensors: int) -> int:
    """The largest message of a second save with the same layout, over some ranks."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    with simulated_rank(0, ranks):
        state_dict = make_state_dict(n_tensors, ranks)
        planner.set_up_planner(state_dict, None, True)
        planner.finish_plan(planner.create_local_plan())
        planner.set_up_planner(state_dict, None, True)
        return len(encode_save_plan(planner.create_local_plan()))


def run_apart(*arguments: str) -> dict[str, float]:
    """This script in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE), *arguments],
        check=True,
        stdout=subprocess.PIPE,
    )
    answer: dict[str, float] = json.loads(done.stdout or b"{}")
    return answer


def compare(ranks: int, n_tensors: int, box: Path) -> dict[str, dict[str, float]]:
    results = {}
    for system in ("dcp", "reshard"):
        messages = box / f"{system}.messages"
        run_apart("gather", system, str(ranks), str(n_tensors), str(messages))
        results[system] = coordinate_again(system, messages)
        messages.unlink()
    return results


def coordinate_again(system: str, messages: Path) -> dict[str, float]:
    """The best of several runs, as far as they fit into a few seconds; one in any case."""
    began = time.perf_counter()
    runs = [run_apart("coordinate", system, str(messages))]
    while len(runs) < MOST_RUNS and time.perf_counter() - began < RUN_AGAIN_SECONDS:
        runs.append(run_apart("coordinate", system, str(messages)))
    return min(runs, key=lambda run: run["whole save"])


def main(n_ranks: int, n_tensors: int) -> None:
    console = Console()
    fewer = n_ranks // 4
    with tempfile.TemporaryDirectory() as box:
        console.print(f"planning {fewer} x {n_tensors} ...")
        small = compare(fewer, n_tensors, Path(box))
        console.print(f"planning {n_ranks} x {n_tensors} ...")
        large = compare(n_ranks, n_tensors, Path(box))
    local = run_apart("local", "5000")
    cached = run_apart("cached", str(n_ranks), str(n_tensors))["bytes"]

    table = Table(title=f"Coordinator, {n_ranks} ranks x {n_tensors} sharded tensors")
    for column in ("what", "DCP", "Reshard", "ratio"):
        table.add_column(column, justify="left" if column == "what" else "right")
    ours, theirs = large["reshard"], large["dcp"]
    parts = (*PLANNING, "seconds", "decode results", "write manifest", "whole save")
    for part in (*parts, "open and look up"):
        name = {"seconds": "all four", "whole save": "plans, results, manifest written"}.get(
            part, part
        )
        table.add_row(
            name,
            f"{theirs[part]:.2f} s",
            f"{ours[part]:.3f} s",
            f"{theirs[part] / ours[part]:.0f}x",
        )
    growth = {system: large[system]["seconds"] / small[system]["seconds"] for system in large}
    gathered = theirs["gathered_bytes"] / ours["gathered_bytes"]
    table.add_row(
        "gathered",
        f"{theirs['gathered_bytes'] / 1e6:.1f} MB",
        f"{ours['gathered_bytes'] / 1e6:.1f} MB",
        f"{gathered:.1f}x",
    )
    table.add_row(
        "peak memory",
        f"{theirs['peak_rss_mb']:.0f} MB",
        f"{ours['peak_rss_mb']:.0f} MB",
        f"{ours['peak_rss_mb'] / theirs['peak_rss_mb']:.2f} of DCP's",
    )
    table.add_row(
        f"growth from {fewer} ranks", f"{growth['dcp']:.1f}x", f"{growth['reshard']:.1f}x", ""
    )
    table.add_row("second save, cached: per rank", "", f"{cached:.0f} bytes", "")
    table.add_row(
        "create_local_plan, 5000 DTensors",
        f"{local['dcp'] * 1e3:.0f} ms",
        f"{local['reshard'] * 1e3:.0f} ms",
        f"{local['dcp'] / local['reshard']:.1f}x",
    )
    console.print(table)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(
        json.dumps(
            {
                "ranks": n_ranks,
                "tensors": n_tensors,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "coordinator": {str(fewer): small, str(n_ranks): large},
                "growth": growth,
                "cached_bytes_per_rank": cached,
                "create_local_plan_seconds": local,
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["gather", system, ranks, n_tensors, to]:
            gather(system, int(ranks), int(n_tensors), Path(to))
        case ["coordinate", system, source]:
            print(json.dumps(coordinate(system, Path(source))))
        case ["local", n_tensors]:
            print(json.dumps(plan_locally(int(n_tensors))))
        case ["cached", ranks, n_tensors]:
            print(json.dumps({"bytes": cached_gather(int(ranks), int(n_tensors))}))
        case _:
            parser = argparse.ArgumentParser(description=__doc__)
            parser.add_argument("--ranks", type=int, default=1024)
            parser.add_argument("--tensors", type=int, default=1000)
            options = parser.parse_args()
            main(options.ranks, options.tensors)
            channel.main(Console())

"""How long ranks take to exchange messages: simulated ones, up to 1,024, and real ones.

Simulated ranks are threads, each with a connection of its own to a TCPStore; the server is
a process by itself. The threads are spread over a few processes: a thousand in one of them
would mostly wait for its lock. They exchange one message after the other, so that none can
be ahead. `server_seconds` is what the same calls take if one client makes them.

Part of `make bench-planning`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import reshard
from reshard.coordination.pairing import Intent
from reshard.coordination.rendezvous import RendezvousThread
from reshard.coordination.store_channel import StoreChannel

HERE = Path(__file__)
RESULT = HERE.parent.parent / "docs" / "benchmarks" / "channel.json"
RANKS = (16, 64, 256, 1024)
RANKS_PER_PROCESS = 128
EXCHANGES, LARGE_EXCHANGES = 15, 3
SMALL_BYTES, LARGE_BYTES, LARGE_RANKS = 100, 5 << 20, 256
REAL_RANKS, SAVES = 64, 4
# Torch looks up the name of whoever connects. Where that fails, it takes seconds, which is
# not what is measured here.
QUICK_LOOKUPS = {"RES_OPTIONS": "timeout:1 attempts:1"}


def main(console: Console) -> None:
    """Measure, print a table and write docs/benchmarks/channel.json."""
    console.print("exchanging messages ...")
    found = measure()
    table = Table(title="The channel between ranks")
    for column in ("what", "seconds", "slowest", "server alone"):
        table.add_column(column, justify="left" if column == "what" else "right")
    large = found["large_answer"][str(LARGE_RANKS)]
    rows = {f"exchange, {ranks} ranks": row for ranks, row in found["exchange"].items()}
    rows[f"answer of {LARGE_BYTES >> 20} MiB, {LARGE_RANKS} ranks"] = large
    for name, row in rows.items():
        parts = (row["seconds"], row["slowest"], row["server_seconds"])
        table.add_row(name, *(f"{part:.3f}" for part in parts))
    for number, seconds in enumerate(found["saves_of_real_ranks"]["seconds"], 1):
        table.add_row(f"save {number} of {REAL_RANKS} gloo ranks", f"{seconds:.2f}", "", "")
    console.print(table)
    RESULT.write_text(json.dumps(found, indent=2) + "\n")


def measure() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "exchange": {str(ranks): exchange(ranks) for ranks in RANKS},
        "large_answer": {
            "bytes": LARGE_BYTES,
            str(LARGE_RANKS): exchange(LARGE_RANKS, LARGE_BYTES),
        },
        "saves_of_real_ranks": {"ranks": REAL_RANKS, "seconds": save_with_real_ranks(REAL_RANKS)},
    }


# Simulated ranks


class Connection:
    """One connection for each simulated rank."""

    def __init__(self, port: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    def connect(self, in_front: bool) -> Any:
        return self.store

    def forget(self) -> None:
        raise SystemExit("the server does not answer")


@contextmanager
def serving() -> Iterator[int]:
    """The port of a server in a process of its own."""
    process = start("serve")
    try:
        yield int(process.stdout.readline())  # type: ignore[union-attr]
    finally:
        process.communicate()


def start(*arguments: str) -> subprocess.Popen[str]:
    """This script in a process of its own, which ends when its input does."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(HERE), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | QUICK_LOOKUPS,
    )


def exchange(ranks: int, answer_bytes: int = SMALL_BYTES) -> dict[str, float]:
    """Seconds of one exchange of small messages."""
    with serving() as port:
        firsts = range(0, ranks, RANKS_PER_PROCESS)
        processes = [
            start("ranks", *map(str, (port, first, ranks, answer_bytes))) for first in firsts
        ]
        outcomes = [process.communicate()[0] for process in processes]
        took: list[float] = json.loads(outcomes[0])
        alone = server_alone(port, ranks, answer_bytes)
    return {"seconds": statistics.median(took), "slowest": max(took), "server_seconds": alone}


def be_ranks(port: int, first: int, world_size: int, answer_bytes: int) -> list[float]:
    """Ranks from `first` on, as threads; how long the coordinator took for each exchange."""
    # A thread that waits for the lock would wake up this often to ask for it.
    sys.setswitchinterval(1.0)
    took: list[float] = []

    def be_rank(rank: int) -> None:
        connection = Connection(port)
        channel = StoreChannel(
            thread=RendezvousThread(connection, 600.0),
            origin=connection.store,
            group="bench",
            rank=rank,
            world_size=world_size,
            number=1,
            intent=Intent("exchange", "exchange"),
        )
        answer = bytes(answer_bytes)
        with channel:
            for number in range((EXCHANGES if answer_bytes < LARGE_BYTES else LARGE_EXCHANGES) + 1):
                began = time.perf_counter()
                channel.gather_scatter(
                    "exchange",
                    lambda: bytes(SMALL_BYTES),
                    lambda messages: [answer] * len(messages),
                )
                # The first one waits until all have connected.
                if rank == 0 and number:
                    took.append(time.perf_counter() - began)

    last = min(first + RANKS_PER_PROCESS, world_size)
    threads = [threading.Thread(target=be_rank, args=(rank,)) for rank in range(first, last)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def server_alone(port: int, ranks: int, answer_bytes: int) -> float:
    """Seconds for the calls of one exchange, made by one client without a pause."""
    store = Connection(port).store
    keys = [f"alone/{rank}" for rank in range(ranks)]
    begin = time.perf_counter()
    for key in keys:
        store.set(key, bytes(SMALL_BYTES))
    store.multi_get(keys)
    store.set("alone", bytes(answer_bytes))
    for key in keys:
        store.compare_set("alone", "absent", "absent")
        store.delete_key(key)
    return time.perf_counter() - begin


# Real ranks


def save_with_real_ranks(ranks: int) -> list[float]:
    """Seconds of the first saves of a gloo group, on the slowest rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "reshard"])
    with serving() as port, tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        processes = [
            context.Process(target=be_real_rank, args=(port, rank, ranks, folder, results))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        took = [results.get() for _ in processes]
        for process in processes:
            process.join()
    return [max(seconds) for seconds in zip(*took, strict=True)]


def be_real_rank(port: int, rank: int, world_size: int, folder: str, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    took = []
    for step in range(SAVES):
        dist.barrier()
        begin = time.perf_counter()
        reshard.save({f"of_rank_{rank}": torch.ones(100), "step": step}, checkpoint_id=folder)
        took.append(time.perf_counter() - begin)
    dist.barrier()
    results.put(took)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve"]:
            server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            print(server.port, flush=True)
            sys.stdin.read()
        case ["ranks", port, first, ranks, answer_bytes]:
            print(json.dumps(be_ranks(int(port), int(first), int(ranks), int(answer_bytes))))
        case _:
            main(Console())

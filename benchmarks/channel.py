"""How long ranks take to exchange messages, with simulated ranks and with real ones.

Simulated ranks are threads of a few processes, each with a connection of its own to a
TCPStore whose server is a process by itself. What the server alone costs is measured
with one client that makes the same calls, one after the other.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reshard
from reshard.coordination.pairing import Intent
from reshard.coordination.rendezvous import RendezvousThread
from reshard.coordination.store_channel import StoreChannel

HERE = Path(__file__)
EXCHANGES = 9
SMALL_BYTES, LARGE_BYTES = 100, 5 << 20
SERVE = (
    "import sys, torch.distributed as dist; "
    "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
    "print(store.port, flush=True); sys.stdin.read()"
)


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
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield int(process.stdout.readline())  # type: ignore[union-attr]
    finally:
        process.communicate()


def exchange(
    ranks: int, answer_bytes: int = SMALL_BYTES, exchanges: int = EXCHANGES
) -> dict[str, float]:
    """Seconds from the last message that is begun to the last answer that is taken."""
    with serving() as port:
        connections = [Connection(port) for _ in range(ranks)]
        began, ended = [0.0] * ranks, [0.0] * ranks
        together = threading.Barrier(ranks)
        took: list[float] = []

        def be_rank(rank: int) -> None:
            channel = StoreChannel(
                thread=RendezvousThread(connections[rank], 600.0),
                group="bench",
                rank=rank,
                world_size=ranks,
                number=1,
                intent=Intent("exchange", "exchange"),
            )
            with channel:
                for number in range(exchanges + 1):
                    together.wait()
                    began[rank] = time.perf_counter()
                    channel.gather_scatter(
                        "exchange",
                        lambda: bytes(SMALL_BYTES),
                        lambda messages: [bytes(answer_bytes)] * len(messages),
                    )
                    ended[rank] = time.perf_counter()
                    together.wait()
                    if rank == 0 and number:
                        took.append(max(ended) - min(began))

        threads = [threading.Thread(target=be_rank, args=(rank,)) for rank in range(ranks)]
        threading.stack_size(256 << 10)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {
            "seconds": statistics.median(took),
            "server_seconds": server_alone(port, ranks, answer_bytes),
        }


def server_alone(port: int, ranks: int, answer_bytes: int) -> float:
    """Seconds for the calls of one exchange, made by one client without a pause."""
    store = Connection(port).store
    keys = [f"alone/{rank}" for rank in range(ranks)]
    begin = time.perf_counter()
    for key in keys:
        store.set(key, bytes(SMALL_BYTES))
    store.multi_get(keys)
    store.set("alone", bytes(min(answer_bytes, 4 << 20)))
    for key in keys:
        store.compare_set("alone", "absent", "absent")
        store.delete_key(key)
    return time.perf_counter() - begin

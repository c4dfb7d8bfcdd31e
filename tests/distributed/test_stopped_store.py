"""The process that serves the rendezvous store is stopped, and goes on later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard
from reshard.coordination.last_answers import last_answers
from support.background import PROCESS, SECONDS, THREAD, wait_until
from support.ranks import run_ranks

LIMIT_SECONDS = 2.0
LEAD = """
import atexit, os, signal, sys, threading, time, types
import torch.distributed as dist
from reshard.coordination import last_answers, rendezvous, store_channel

rendezvous.sys = types.SimpleNamespace(version_info=(3, 12))
last_answers._LAST_ANSWER_SECONDS = 2.0
port, server = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
thread = rendezvous.RendezvousThread(rendezvous.GroupStore(store), 30.0)
with store_channel.StoreChannel(thread, "x", 0, world_size=2, origin=store):
    pass

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

# Runs before what was registered earlier.
atexit.register(setattr, threading.Thread, "start", refuse)
os.kill(server, signal.SIGSTOP)
print(time.monotonic(), flush=True)
"""
SERVE = (
    "import sys, torch.distributed as dist; "
    "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
    "print(store.port, flush=True); sys.stdin.read()"
)


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """The port and the process of a store, which is in no rank."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield int(process.stdout.readline()), process.pid
    process.kill()
    process.communicate()


def join(port: int, world_size: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    rank = store.add("ranks", 1) - 1
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def values(seed: float) -> dict[str, Any]:
    return {f"of_rank_{dist.get_rank()}": torch.full((3,), seed)}


def attempt(call: Any) -> tuple[str, float]:
    began = time.monotonic()
    text = ""
    try:
        call()
    except reshard.CheckpointException as error:
        text = str(error)
    return text, time.monotonic() - began


class Stopping(reshard.DefaultSavePlanner):
    """Stops the server when rank 1 plans."""

    def __init__(self, server: int) -> None:
        super().__init__()
        self.server = server

    def create_local_plan(self) -> Any:
        if dist.get_rank() == 1:
            os.kill(self.server, signal.SIGSTOP)
        return super().create_local_plan()


def go_on(folder: str, server: int) -> None:
    """Let the server go on when all ranks have raised."""
    Path(f"{folder}/raised-{dist.get_rank()}").touch()
    wait_until(
        lambda: all(
            os.path.exists(f"{folder}/raised-{rank}") for rank in range(dist.get_world_size())
        )
    )
    os.kill(server, signal.SIGCONT)


def save_while_it_stops(folder: str, port: int, server: int) -> Any:
    join(port, 3)
    reshard.save(values(1.0), checkpoint_id=f"{folder}/old")
    stopped = attempt(
        lambda: reshard.save(
            values(2.0),
            checkpoint_id=f"{folder}/new",
            planner=Stopping(server),
            timeout_seconds=LIMIT_SECONDS,
        )
    )
    # Nor can it be opened, while that lasts.
    again = attempt(
        lambda: reshard.load(
            values(0.0), checkpoint_id=f"{folder}/old", timeout_seconds=LIMIT_SECONDS
        )
    )
    go_on(folder, server)
    reshard.save(values(3.0), checkpoint_id=f"{folder}/new")
    wait_until(lambda: threading.active_count() == 1)
    return stopped, again


@pytest.mark.slow
def test_ranks_raise_within_their_limit_and_save_again_when_the_store_is_back(
    server: tuple[int, int], tmp_path: Path
) -> None:
    for outcomes in run_ranks(3, save_while_it_stops, str(tmp_path), *server, store="none"):
        for text, seconds in outcomes:
            assert "lost the rendezvous store" in text
            assert "has not answered for 2 s" in text
            assert LIMIT_SECONDS <= seconds < LIMIT_SECONDS + 4
    found = reshard.read_state_dict(tmp_path / "new")
    assert [found[f"of_rank_{rank}"].tolist() for rank in range(3)] == [[3.0] * 3] * 3


def save_in_the_background_while_it_stops(folder: str, port: int, server: int, kind: Any) -> Any:
    join(port, 2)
    options: dict[str, Any] = {
        "async_checkpointer_type": kind,
        "timeout_seconds": LIMIT_SECONDS,
    }
    reshard.async_save(values(1.0), checkpoint_id=f"{folder}/a", **options).result(SECONDS)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(server, signal.SIGSTOP)
    dist.barrier()
    stopped = attempt(
        lambda: reshard.async_save(values(2.0), checkpoint_id=f"{folder}/b", **options).result(
            SECONDS
        )
    )
    go_on(folder, server)
    future = reshard.async_save(
        values(3.0), checkpoint_id=f"{folder}/c", async_checkpointer_type=kind
    )
    future.result(SECONDS)
    reshard.close()
    return stopped


@pytest.mark.slow
@pytest.mark.parametrize("kind", [THREAD, PROCESS], ids=["thread", "process"])
def test_background_saves_raise_within_their_limit_and_work_when_the_store_is_back(
    kind: Any, server: tuple[int, int], tmp_path: Path
) -> None:
    work = save_in_the_background_while_it_stops
    for text, seconds in run_ranks(2, work, str(tmp_path), *server, kind, store="none"):
        assert "lost the rendezvous store" in text
        assert seconds < LIMIT_SECONDS + 4
    assert reshard.read_state_dict(tmp_path / "c")["of_rank_1"].tolist() == [3.0] * 3


def end_while_it_is_stopped(folder: str, port: int, server: int) -> None:
    join(port, 2)
    reshard.save(values(1.0), checkpoint_id=f"{folder}/old")
    dist.barrier()
    os.kill(server, signal.SIGSTOP)
    dist.barrier()
    began = time.monotonic()
    # What runs at the end of the interpreter.
    last_answers().wait()
    seconds = time.monotonic() - began
    dist.barrier()
    os.kill(server, signal.SIGCONT)
    assert seconds < 15


def test_a_process_ends_while_the_store_is_stopped(server: tuple[int, int], tmp_path: Path) -> None:
    run_ranks(2, end_while_it_is_stopped, str(tmp_path), *server, store="none")


def test_a_process_of_later_pythons_ends_within_a_limit_too(server: tuple[int, int]) -> None:
    """From 3.12 on, no thread can be started any more when functions of atexit run."""
    lead = [sys.executable, "-c", LEAD, *map(str, server)]
    ended = subprocess.run(lead, stdout=subprocess.PIPE, text=True, timeout=30, check=True)

    assert 1.5 < time.monotonic() - float(ended.stdout) < 20


FORK = """
import multiprocessing, time
import torch.distributed as dist
from reshard.coordination import rendezvous, store_channel

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
thread = rendezvous.RendezvousThread(rendezvous.GroupStore(store), 30.0)
with store_channel.StoreChannel(thread, "x", 0, world_size=2, origin=store):
    pass
child = multiprocessing.get_context("fork").Process(target=int)
began = time.monotonic()
child.start()
child.join()
print(time.monotonic() - began)
# As if the other rank had fetched its answer.
store.add("x/left", 1)
"""


def test_a_forked_child_does_not_wait_for_the_ranks_of_its_parent() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORK], stdout=subprocess.PIPE, text=True, timeout=30, check=True
    )

    assert float(ended.stdout) < 3

"""Real ranks: processes that talk over gloo on 127.0.0.1.

Each rank is a process of its own, forked from a server that has imported torch once and
does nothing else, so that a world of four is up in a fraction of a second.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Literal

import torch.distributed as dist

_PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "reshard",
    "torch._dynamo",
    "hypothesis",
    "support.ranks",
]
Rendezvous = Literal["file", "tcp", "tcp on rank 0", "none"]
DEAD = "dead"
"""The result of a rank that was expected to die, and did."""


class RanksFailed(AssertionError):
    """What went wrong on which rank."""


def run_ranks(
    world_size: int,
    work: Callable[..., Any],
    *args: Any,
    seconds: float = 60.0,
    dying: Collection[int] = (),
    store: Rendezvous = "file",
) -> list[Any]:
    """What `work(*args)` returns on each rank of a world with a gloo group.

    `work` is a module-level function. A rank that raises, or is not done after `seconds`,
    fails the test with its traceback; the ranks in `dying` must end without a result.

    The rendezvous store is a file; a server in this process (`"tcp"`), as under torchrun; or
    a server that lives and dies with rank 0. A file is the default, since torch looks up
    the name of its peer for each connection to a server, which takes seconds where DNS is slow.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    server = _serve() if store.startswith("tcp") else None
    meeting = tempfile.NamedTemporaryFile(prefix="reshard-ranks-")  # noqa: SIM115
    place = meeting.name if server is None else server.port
    task = pickle.dumps((inspect.getsourcefile(work), work.__name__, args))
    pipes: list[Connection] = []
    processes = []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_be_rank,
                args=(sender, rank, world_size, place, store, task),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        outcomes = _collect(pipes, seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
        meeting.close()
    problems = [
        f"rank {rank}: {outcome[1]}"
        for rank, outcome in enumerate(outcomes)
        if outcome[0] != (DEAD if rank in dying else "value")
    ]
    if problems:
        raise RanksFailed("\n".join(problems))
    return [value for _, value in outcomes]


def run_alone(work: Callable[..., Any], *args: Any, seconds: float = 60.0) -> Any:
    """What `work(*args)` returns in a fresh process that belongs to no group.

    It has torch imported and no threads of torch's, so it may fork.
    """
    return run_ranks(1, work, *args, seconds=seconds, store="none")[0]


def _collect(pipes: list[Connection], seconds: float) -> list[tuple[str, Any]]:
    outcomes: list[tuple[str, Any]] = [("late", f"not done after {seconds} s")] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    give_up = time.monotonic() + seconds
    while waiting and time.monotonic() < give_up:
        for pipe in wait(list(waiting), max(0.0, give_up - time.monotonic())):
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcomes[rank] = (DEAD, DEAD)
    return outcomes


def _be_rank(
    sender: Connection,
    rank: int,
    world_size: int,
    place: str | int,
    kind: Rendezvous,
    task: bytes,
) -> None:
    # Ranks that fail print nothing: what they have to say is sent.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    try:
        if kind != "none":
            store = _meet(place, rank, world_size, kind)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        path, name, args = pickle.loads(task)
        value = getattr(_import(path), name)(*args)
        outcome = pickle.dumps(("value", value))
    except BaseException:  # noqa: BLE001 - told to the test, which raises it
        outcome = pickle.dumps(("error", traceback.format_exc()))
    sender.send_bytes(outcome)
    sender.close()
    # Wait to be killed: a rank that leaves early could take the store or a peer with it.
    multiprocessing.parent_process().join()


def _meet(place: str | int, rank: int, world_size: int, kind: Rendezvous) -> Any:
    if isinstance(place, str):
        return dist.FileStore(place, world_size)
    store = dist.TCPStore("127.0.0.1", place, is_master=False)
    if kind == "tcp":
        return store
    if rank == 0:
        own = _serve()
        store.set("port", str(own.port))
        return own
    return dist.TCPStore("127.0.0.1", int(store.get("port")), is_master=False)


def _serve() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _import(path: str) -> ModuleType:
    """The test module, which may have no name that another process could import it by."""
    name = f"_of_ranks_{os.path.basename(path)[:-3]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

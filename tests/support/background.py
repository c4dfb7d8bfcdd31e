"""Storages and planners for background saves, which a worker can import by their names."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.state_dict_saver import AsyncCheckpointerType

PATIENCE_SECONDS = 50.0

THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
SECONDS = 50.0
"""For what takes as long as it takes."""
PROMPTLY = 30.0
"""For what must not wait for any time limit."""

both_kinds = pytest.mark.parametrize("kind", [THREAD, PROCESS], ids=["thread", "process"])
# A worker takes seconds to start, so a process saves for one rank where one will do.
thread_of_two_process_of_one = pytest.mark.parametrize(
    ("kind", "ranks"), [(THREAD, 2), (PROCESS, 1)], ids=["thread", "process"]
)


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Block until something is the case; raise if it does not come about."""
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            raise AssertionError(f"not so after {seconds} s")
        time.sleep(0.002)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not just the shell of a dead one."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


class Gate:
    """Holds up whoever comes to it until it is opened, in whatever process that may be."""

    def __init__(self, folder: str | os.PathLike[str], name: str = "gate") -> None:
        self.path = os.path.join(folder, name)

    def open(self) -> None:
        Path(self.path).touch()

    def pass_through(self) -> None:
        Path(f"{self.path}-reached-by-{os.getpid()}").touch()
        wait_until(lambda: os.path.exists(self.path))

    def is_reached_by(self, pid: int) -> bool:
        return os.path.exists(f"{self.path}-reached-by-{pid}")


class GatedWriter(reshard.FileSystemWriter):
    """Waits at a gate: when a save begins (if it has a `checkpoint_id`), or before it writes."""

    def __init__(self, path: str | os.PathLike[str], gate: Gate, at: str = "write_data") -> None:
        super().__init__(path, sync_files=False)
        self.gate = gate
        self.at = at

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if self.at == "reset":
            self.gate.pass_through()

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.at == "write_data":
            self.gate.pass_through()
        return super().write_data(plan, planner)


class FailingWriter(reshard.FileSystemWriter):
    """Cannot write on one rank."""

    def __init__(self, path: str | os.PathLike[str], failing_rank: int) -> None:
        super().__init__(path, sync_files=False)
        self.failing_rank = failing_rank

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.rank == self.failing_rank:
            raise OSError(f"rank {self.rank} has no space left")
        return super().write_data(plan, planner)


class LastWords(reshard.FileSystemWriter):
    """Takes its process with it, and says why."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        print("the disk is on fire", file=sys.stderr, flush=True)
        os._exit(3)


class ScalingPlanner(reshard.DefaultSavePlanner):
    """Saves every tensor times a number that it was made with."""

    def __init__(self, factor: float, **options: Any) -> None:
        super().__init__(**options)
        self.factor = factor

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data * self.factor if hasattr(data, "dtype") else data


def files_in_memory() -> set[str]:
    """Folders are not of saves: other tests put theirs there."""
    return {entry.name for entry in os.scandir("/dev/shm") if not entry.is_dir()}

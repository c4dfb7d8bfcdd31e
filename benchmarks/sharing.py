"""Four replicas that load from a slow store: each for itself, and each byte once.

The store gives 200 MB/s to all ranks together, as a bucket or a file server does. Bars: sharing
is at least 3 times faster, and the store is asked for each byte once.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import JOBS, options, record, run_ranks, timed

import reshard
from reshard.stores.local import LocalStore

RANKS = 4
STORE_BYTES_PER_SECOND = 200e6
LEAST_SPEEDUP = 3.0
MOST_READ = 1.01
"""Times the size of the checkpoint: whoever reads of a file looks at its header."""
TURNS = 3


class Throttle:
    """A rate that processes have in common, kept in a file that all of them map."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._file, mmap.PAGESIZE)
        self._memory = mmap.mmap(self._file, mmap.PAGESIZE)

    def wait_for(self, nbytes: int) -> None:
        """Return when the store would have delivered so much to this caller."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        (free_at,) = struct.unpack_from("d", self._memory)
        done_at = max(time.monotonic(), free_at) + nbytes / STORE_BYTES_PER_SECOND
        struct.pack_into("d", self._memory, 0, done_at)
        fcntl.flock(self._file, fcntl.LOCK_UN)
        time.sleep(max(0.0, done_at - time.monotonic()))


class _SlowFile:
    def __init__(self, used: Any, throttle: Throttle) -> None:
        self._used, self._throttle = used, throttle

    @property
    def nbytes(self) -> int:
        return int(self._used.nbytes)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._used.read_into(offset, buffers)
        self._throttle.wait_for(sum(map(len, buffers)))

    def close(self) -> None:
        self._used.close()


class SlowStore(LocalStore):
    throttle: Throttle

    def open_reader(self, key: str, ahead: int = 0, nbytes: int | None = None) -> Any:
        return _SlowFile(super().open_reader(key, ahead, nbytes), self.throttle)


class SlowReader(reshard.FileSystemReader):
    def __init__(self, path: Path, throttle: Throttle) -> None:
        super().__init__(path)
        self._throttle = throttle

    def open_store(self) -> SlowStore:
        store = SlowStore(self.path)
        store.throttle = self._throttle
        return store


def make_state(megabytes: int, value: float) -> dict[str, torch.Tensor]:
    """Layers of a model, with a matrix, a smaller one and biases each."""
    layers = max(1, megabytes // 16)
    state = {}
    for layer in range(layers):
        state[f"{layer}.up"] = torch.full((1536, 2048), value)
        state[f"{layer}.down"] = torch.full((512, 2048), value)
        state[f"{layer}.bias"] = torch.full((2048,), value)
    return state


def replicas(mesh: Any, box: Path, megabytes: int) -> dict[str, Any]:
    if dist.get_rank() == 0:
        reshard.save(make_state(megabytes, 1.0), checkpoint_id=box / "saved", no_dist=True)
    dist.barrier()
    throttle = Throttle(box / "throttle")
    state = make_state(megabytes, 0.0)
    nbytes = sum(value.nbytes for value in state.values())
    results: dict[str, Any] = {"bytes": nbytes}
    for mode in ("direct", "share"):
        seconds, read = [], 0
        for _ in range(TURNS):
            for value in state.values():
                value.zero_()
            reader = SlowReader(box / "saved", throttle)
            report = None

            def load(reader: SlowReader = reader, mode: str = mode) -> None:
                nonlocal report
                report = reshard.load(state, storage_reader=reader, replicated_reads=mode)

            seconds.append(timed(load))
            assert report is not None
            assert all(bool((value == 1).all()) for value in state.values())
            taken = torch.tensor(report.bytes_read)
            dist.all_reduce(taken)
            read = int(taken)
        results[mode] = {"seconds": sorted(seconds)[TURNS // 2], "bytes_from_store": read}
    return results


JOBS["replicas"] = replicas


def main() -> None:
    given = options(__doc__, JOBS)
    megabytes = min(given.megabytes, 320)
    with tempfile.TemporaryDirectory(prefix="reshard-sharing-") as box:
        results = run_ranks("replicas", RANKS, Path(box), megabytes)
    speedup = results["direct"]["seconds"] / results["share"]["seconds"]
    times_read = results["share"]["bytes_from_store"] / results["bytes"]
    print(f"{RANKS} replicas of {results['bytes'] / 1e6:.0f} MB, a store of 200 MB/s:")
    for mode in ("direct", "share"):
        each = results[mode]
        read = each["bytes_from_store"] / results["bytes"]
        print(f"  {mode:6}  {each['seconds']:6.2f} s  {read:.3f} of the checkpoint read")
    for what, found, bar, holds in (
        ("faster", speedup, LEAST_SPEEDUP, speedup >= LEAST_SPEEDUP),
        ("read", times_read, MOST_READ, times_read <= MOST_READ),
    ):
        print(f"  {what}: {found:.3f} (bar {bar}) {'holds' if holds else 'MISSED'}")
    record("sharing", results | {"speedup": speedup, "times_read": times_read})


if __name__ == "__main__":
    main()

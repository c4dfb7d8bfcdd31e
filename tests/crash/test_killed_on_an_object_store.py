"""A save to an object store that is killed before or after any of its requests.

Afterwards the old checkpoint is there, whole, or the new one is. A proxy sees the requests,
and kills the process that makes them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api import CheckpointNotFoundError
from support.faulty_proxy import FaultyProxy, Killing, Request
from support.object_servers import Place
from support.ranks import DEAD, run_ranks
from support.samples import same_bits

Options = dict[str, Any]
SEEDS = {"old": 1, "new": 2, "newest": 3}


def state(seed: int, nbytes: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(nbytes // 4, generator=generator),
        "small": torch.randn(7, generator=generator),
        "empty": torch.zeros(0, 3),
        "step": seed,
    }


def save(url: str, options: Options, seed: int, nbytes: int, pid_file: str = "") -> None:
    if pid_file:
        Path(pid_file).write_text(str(os.getpid()))
    # One thread and one request at a time, so that they come in a fixed order.
    writer = reshard.ObjectStoreWriter(
        url, thread_count=1, storage_options={**options, "concurrency": 1}
    )
    reshard.save(state(seed, nbytes), storage_writer=writer, no_dist=True)


def which(place: Place, nbytes: int) -> str:
    """The one state that the place holds, as a loader sees it."""
    try:
        found = reshard.read_state_dict(place.url, storage_options=place.options)
    except CheckpointNotFoundError:
        return "none"
    for name, seed in SEEDS.items():
        wanted = state(seed, nbytes)
        if found["step"] == seed and all(
            same_bits(found[key], wanted[key]) for key in ("large", "small", "empty")
        ):
            return name
    return f"a mixture: {found['step']}"


def leftovers(place: Place) -> set[str]:
    """What lies there and belongs to no checkpoint."""
    reader = reshard.ObjectStoreReader(place.url, storage_options=place.options)
    used = reader.read_metadata().storage_data.values()
    return set(place.names()) - {".metadata", *(info.relative_path for info in used)}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("nbytes", "before"),
    [(300_000, "none"), (300_000, "old"), (18 << 20, "old")],
    ids=["first", "over-another", "in-parts-over-another"],
)
def test_a_save_killed_at_any_request_leaves_the_old_checkpoint_or_the_new_one(
    nbytes: int, before: str, s3: Place, s3_proxy: FaultyProxy, tmp_path: Path
) -> None:
    through = s3.through(s3_proxy.endpoint).options
    pid_file = str(tmp_path / "pid")

    def prepared(name: str) -> Place:
        place = s3.beside(f"{name}/quite/alone")
        if before == "old":
            save(place.url, place.options, 1, nbytes)
        return place

    place = prepared("count")
    s3_proxy.reset_counts()
    run_ranks(1, save, place.url, through, 2, nbytes, store="none")
    requests: list[Request] = list(s3_proxy.counts.requests)
    assert len(requests) > 5
    assert which(place, nbytes) == "new"

    wrong, found = [], []
    for at in range(len(requests)):
        for after in (False, True):
            place = prepared(f"{at}-{after}")
            s3_proxy.reset_counts()
            s3_proxy.killing = Killing(at, after, lambda: int(Path(pid_file).read_text()))
            arguments = (place.url, through, 2, nbytes, pid_file)
            [outcome] = run_ranks(1, save, *arguments, dying={0}, store="none")
            assert outcome == DEAD
            s3_proxy.killing = None
            when = f"{'after' if after else 'before'} {requests[at]}"
            found.append(which(place, nbytes))
            save(place.url, place.options, 3, nbytes)
            if which(place, nbytes) != "newest":
                wrong.append(f"killed {when}, the next save left {which(place, nbytes)}")
            if leftovers(place):
                wrong.append(f"killed {when}, the next save left {sorted(leftovers(place))}")

    assert wrong == []
    # Both are seen, and never the old one again after the new one.
    assert set(found) == {before, "new"}
    assert found == sorted(found, key=[before, "new"].index)

"""A save that is killed before or after any call that changes the disk.

Afterwards the old checkpoint is there, whole, or the new one is. Each save dies in a
child of its own, forked from a process that has done nothing but import torch.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from reshard.api import CheckpointNotFoundError
from support.dcp import is_for_dcp, metadata_of, read_with_dcp
from support.failing_system import WriterOn, dying, watching
from support.ranks import run_alone, run_ranks
from support.samples import same_bits


def state(seed: int) -> dict[str, Any]:
    """Some small tensors, one that is written by itself, an empty one, and values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "large": torch.randn(300, 300, generator=generator),
            "small": torch.randn(7, generator=generator),
            "tiny": torch.randn(1, dtype=torch.float64, generator=generator),
            "empty": torch.zeros(0, 3),
        },
        "step": seed,
        "notes": [seed, "text", None],
    }


def which(folder: Path) -> str:
    """The one state that the folder holds, as a loader sees it."""
    if (folder / ".metadata").exists() and is_for_dcp(folder):
        found = read_with_dcp(folder)
    else:
        try:
            found = reshard.read_state_dict(folder)
        except CheckpointNotFoundError:
            return "none"
    for name, seed in (("old", 1), ("new", 2), ("newest", 3)):
        wanted = state(seed)
        if (
            found["step"] == seed
            and found["notes"] == wanted["notes"]
            and found.keys() == wanted.keys()
            and found["model"].keys() == wanted["model"].keys()
            and all(same_bits(found["model"][k], v) for k, v in wanted["model"].items())
        ):
            return name
    return f"a mixture: {found['step']} {found['notes']}"


def save(seed: int, folder: Path, system: Any, options: dict[str, Any]) -> None:
    options = dict(options)
    asked = {name: options.pop(name) for name in ("use_collectives", "format") if name in options}
    writer = WriterOn(folder, system, **options)
    reshard.save(state(seed), storage_writer=writer, **asked)


def is_killed(folder: Path, at: int, after: bool, options: dict[str, Any]) -> bool:
    """Save in a child that dies at call `at`; False if the save ended before that."""
    child = os.fork()
    if not child:
        try:
            save(2, folder, dying(at, after), options)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def files_in_use(folder: Path) -> set[str]:
    manifests = {path.name for path in folder.iterdir() if path.name.startswith(".metadata")}
    if is_for_dcp(folder):
        metadata: Any = metadata_of(folder)
    else:
        metadata = reshard.FileSystemReader(folder).read_metadata()
    return manifests | {info.relative_path for info in metadata.storage_data.values()}


def kill_at_every_call(
    folder: str, before: dict[str, Any] | None, options: dict[str, Any]
) -> tuple[list[str], list[str], int]:
    """What was wrong, what was found after each kill, and the number of calls of a save."""
    root = Path(folder)
    system = watching()
    prepare(root / "count", before)
    save(2, root / "count", system, options)
    wrong, found = [], []
    for at in range(len(system.calls)):
        for after in (False, True):
            place = root / f"{at}-{after}"
            prepare(place, before)
            when = f"{'after' if after else 'before'} call {at} ({system.calls[at][0]})"
            if not is_killed(place, at, after, options):
                wrong.append(f"not killed {when}")
            try:
                found.append(which(place))
                save(3, place, os, options)
                if which(place) != "newest":
                    wrong.append(f"killed {when}, the next save left {which(place)}")
                debris = {path.name for path in place.iterdir()} - files_in_use(place)
                if debris:
                    wrong.append(f"killed {when}, the next save left {sorted(debris)}")
            except Exception as error:  # noqa: BLE001 - collected for the test
                wrong.append(f"killed {when}: {type(error).__name__}: {error}")
            shutil.rmtree(place, ignore_errors=True)
    return wrong, found, len(system.calls)


def prepare(place: Path, before: dict[str, Any] | None) -> None:
    if before is not None:
        save(1, place, os, before)


@pytest.mark.parametrize(
    ("before", "options"),
    [
        pytest.param(None, {}, id="first"),
        pytest.param({}, {}, id="over-another"),
        pytest.param(
            {},
            {"single_file_per_rank": False},
            id="over-another-in-many-files",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {}, {"sync_files": False}, id="over-another-without-sync", marks=pytest.mark.slow
        ),
        pytest.param(
            None,
            {"use_collectives": False},
            id="first-without-collectives",
            marks=pytest.mark.slow,
        ),
        pytest.param({}, {"use_collectives": False}, id="over-another-without-collectives"),
        pytest.param(
            {"use_collectives": False},
            {},
            id="over-another-that-was-saved-without-collectives",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"use_collectives": False},
            {"use_collectives": False},
            id="over-another-both-without-collectives",
            marks=pytest.mark.slow,
        ),
        pytest.param({}, {"format": "dcp"}, id="over-another-for-dcp", marks=pytest.mark.slow),
        pytest.param(
            {"format": "dcp"}, {}, id="over-another-that-is-for-dcp", marks=pytest.mark.slow
        ),
        pytest.param(
            {"format": "dcp"},
            {"format": "dcp"},
            id="over-another-both-for-dcp",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_save_killed_anywhere_leaves_the_old_checkpoint_or_the_new_one(
    before: dict[str, Any] | None, options: dict[str, Any], fast_folder: str
) -> None:
    wrong, found, calls = run_alone(kill_at_every_call, fast_folder, before, options)

    assert wrong == []
    assert calls > 10
    old = "none" if before is None else "old"
    # Both are seen, and never the old one again after the new one.
    assert set(found) == {old, "new"}
    assert found == sorted(found, key=[old, "new"].index)


def shared_state(seed: int) -> dict[str, Any]:
    """The same, with one tensor of which each rank has a part."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = state(seed)
    parts["model"]["large"] = distribute_tensor(parts["model"]["large"], mesh, [Shard(0)])
    return parts


def save_on_a_rank(
    seed: int, folder: str, victim: int, at: int, after: bool, use_collectives: bool
) -> tuple[int, str]:
    """How many calls the rank made, and how the save ended on it."""
    system = dying(at, after) if dist.get_rank() == victim else watching()
    writer = WriterOn(folder, system)
    try:
        reshard.save(shared_state(seed), storage_writer=writer, use_collectives=use_collectives)
    except reshard.CheckpointException as error:
        return len(system.calls), str(error)
    return len(system.calls), "saved"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("use_collectives", [True, False], ids=["together", "without-collectives"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_anywhere_in_a_save_leaves_the_old_checkpoint_or_the_new_one(
    victim: int, use_collectives: bool, fast_folder: str
) -> None:
    root = Path(fast_folder)
    for seed in (1, 2):
        place = str(root / "count")
        counts = run_ranks(2, save_on_a_rank, seed, place, -1, 0, False, use_collectives)
    calls, told = counts[victim]
    assert told == "saved"
    assert calls >= 5
    seen = set()
    for at in range(calls):
        for after in (False, True):
            place = root / f"{at}-{after}"
            run_ranks(2, save_on_a_rank, 1, str(place), -1, 0, False, use_collectives)
            outcomes = run_ranks(
                2,
                save_on_a_rank,
                2,
                str(place),
                victim,
                at,
                after,
                use_collectives,
                dying={victim},
            )
            found = which(place)
            seen.add(found)
            _, told = outcomes[1 - victim]
            assert found in ("old", "new"), (at, after)
            if told == "saved":
                assert found == "new", (at, after)
            else:
                assert f"rank {victim}" in told, (at, after, told)
            run_ranks(2, save_on_a_rank, 3, str(place), -1, 0, False, use_collectives)
            assert which(place) == "newest", (at, after)
            assert {path.name for path in place.iterdir()} == files_in_use(place), (at, after)
            shutil.rmtree(place)
    assert "old" in seen
    # The coordinator commits, and has something left to do after that.
    assert victim or "new" in seen


def order_of_calls(folder: str) -> list[tuple[str, str]]:
    """Each call with the name of its file."""
    system = watching()
    save(1, Path(folder) / "new" / "place", system, {})
    names: dict[int, str] = {}
    told = []
    for name, args, result in system.calls:
        if name == "open":
            names[result] = Path(args[0]).name
        subject = names.get(args[0], "") if isinstance(args[0], int) else Path(args[0]).name
        told.append((name, subject))
    return told


def test_everything_is_synced_before_the_manifest_appears_and_the_name_after(
    tmp_path: Path,
) -> None:
    calls = run_alone(order_of_calls, str(tmp_path))

    [commit] = [at for at, (name, _) in enumerate(calls) if name == "rename"]
    written = {subject for name, subject in calls[:commit] if name == "pwritev"}
    assert {subject.rpartition(".")[2] for subject in written} == {"safetensors", "draft"}
    for subject in written:
        last_write = max(at for at, call in enumerate(calls) if call == ("pwritev", subject))
        assert ("fsync", subject) in calls[last_write:commit]
    data_synced = max(
        at
        for at, (name, subject) in enumerate(calls[:commit])
        if name == "fsync" and subject.endswith(".safetensors")
    )
    assert ("fsync", "place") in calls[data_synced:commit]
    assert ("fsync", "place") in calls[commit:]
    # The directories that were made are names in their parents.
    assert ("fsync", "new") in calls[:commit]
    assert ("fsync", tmp_path.name) in calls[:commit]

"""`delete` and `materialise` killed before or after any call that changes the disk.

Afterwards every checkpoint that is there can be read, and the same call, made again, finishes.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api import CheckpointNotFoundError
from reshard.operations import upkeep
from reshard.stores.local import LocalStore
from support.failing_system import dying, watching
from support.ranks import run_alone
from support.samples import same_bits


def state(step: int) -> dict[str, Any]:
    frozen = torch.arange(70_000, dtype=torch.float32).reshape(700, 100)
    return {"frozen": frozen, "tied": frozen, "trained": torch.full((9,), float(step)), "n": step}


PLACES = {"a": 0, "b": 1, "c": 2, "d": 2}


def prepare(root: Path, use_collectives: bool) -> None:
    """`b` and `c` refer to `a`; `c` also to `b`. Nobody refers to `c`, and `d` is a copy of it."""
    reshard.save(state(0), checkpoint_id=root / "a", use_collectives=use_collectives)
    second = {**state(1), "kept": torch.ones(1000)}
    options = {"use_collectives": use_collectives}
    reshard.save(second, checkpoint_id=root / "b", base=root / "a", **options)
    third = {**state(2), "kept": torch.ones(1000)}
    reshard.save(third, checkpoint_id=root / "c", base=root / "b", **options)


def look(root: Path) -> dict[str, str]:
    """What each place holds, as a loader sees it."""
    found = {}
    for name, step in PLACES.items():
        try:
            loaded = reshard.read_state_dict(root / name)
        except CheckpointNotFoundError:
            found[name] = "nothing"
            continue
        wanted = state(step)
        is_whole = loaded["n"] == step and all(
            same_bits(loaded[key], wanted[key]) for key in ("frozen", "tied", "trained")
        )
        found[name] = "whole" if is_whole else "a mixture"
    return found


JOBS: dict[str, Callable[[Path], Any]] = {
    "delete": lambda root: reshard.delete(root / "c"),
    "delete-and-materialise": lambda root: reshard.delete(root / "a", materialise=True),
    "materialise": lambda root: reshard.materialise(root / "c"),
    "materialise-elsewhere": lambda root: reshard.materialise(root / "c", root / "d"),
}
AFTERWARDS = {
    "delete": {"a": "whole", "b": "whole", "c": "nothing", "d": "nothing"},
    "delete-and-materialise": {"a": "nothing", "b": "whole", "c": "whole", "d": "nothing"},
    "materialise": {"a": "whole", "b": "whole", "c": "whole", "d": "nothing"},
    "materialise-elsewhere": {"a": "whole", "b": "whole", "c": "whole", "d": "whole"},
}


def do(job: str, root: Path, system: Any) -> None:
    upkeep.open_place = lambda place, _: LocalStore(place, system)  # type: ignore[assignment]
    JOBS[job](root)


def is_killed(job: str, root: Path, at: int, after: bool) -> bool:
    child = os.fork()
    if not child:
        try:
            do(job, root, dying(at, after))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def leftovers(root: Path) -> list[str]:
    """What is left where there is no checkpoint. Whoever saves there again clears up elsewhere."""
    gone = [root / name for name, outcome in look(root).items() if outcome == "nothing"]
    return [f"{place.name}/{path.name}" for place in gone for path in place.glob("*")]


def kill_at_every_call(
    folder: str, job: str, use_collectives: bool
) -> tuple[list[str], int, list[dict[str, str]]]:
    """What was wrong, how many calls the job makes, and what was found after each kill."""
    system = watching()
    root = Path(folder) / "count"
    prepare(root, use_collectives)
    do(job, root, system)
    wrong, seen = [], []
    if look(root) != AFTERWARDS[job]:
        wrong.append(f"without a kill: {look(root)}")
    for at in range(len(system.calls)):
        for after in (False, True):
            when = f"{'after' if after else 'before'} call {at} ({system.calls[at][0]})"
            root = Path(folder) / f"{at}-{after}"
            prepare(root, use_collectives)
            before = look(root)
            is_last = after and at + 1 == len(system.calls)
            if not is_killed(job, root, at, after) and not is_last:
                wrong.append(f"not killed {when}")
            try:
                found = look(root)
                seen.append(found)
                for name, outcome in found.items():
                    if outcome not in (before[name], AFTERWARDS[job][name]):
                        wrong.append(f"killed {when}: {name} holds {outcome}")
                again(job, root, found)
                if look(root) != AFTERWARDS[job]:
                    wrong.append(f"killed {when}, made again: {look(root)}")
                if leftovers(root):
                    wrong.append(f"killed {when}, made again: {leftovers(root)} stayed")
            except Exception as error:  # noqa: BLE001 - collected for the test
                wrong.append(f"killed {when}: {type(error).__name__}: {error}")
            shutil.rmtree(root)
    return wrong, len(system.calls), seen


def again(job: str, root: Path, found: dict[str, str]) -> None:
    """Make the call again; it may say that all is done."""
    try:
        do(job, root, os)
    except CheckpointNotFoundError:
        if job.startswith("delete") and found == AFTERWARDS[job]:
            return
        raise
    except reshard.api.CheckpointExistsError:
        if job == "materialise-elsewhere" and found == AFTERWARDS[job]:
            return
        raise


@pytest.mark.parametrize(
    ("job", "use_collectives"),
    [
        pytest.param("delete", True, id="delete"),
        pytest.param("delete", False, id="delete-parts"),
        *(
            pytest.param(job, together, id=f"{job}{suffix}", marks=pytest.mark.slow)
            for job, together, suffix in [
                ("materialise", True, ""),
                ("materialise", False, "-parts"),
                ("materialise-elsewhere", True, ""),
                ("delete-and-materialise", True, ""),
                ("delete-and-materialise", False, "-parts"),
            ]
        ),
    ],
)
def test_a_job_that_is_killed_anywhere_leaves_checkpoints_whole_and_can_be_made_again(
    job: str, use_collectives: bool, fast_folder: str
) -> None:
    wrong, calls, seen = run_alone(kill_at_every_call, fast_folder, job, use_collectives)

    assert wrong == []
    assert calls > 10
    assert len(seen) == 2 * calls

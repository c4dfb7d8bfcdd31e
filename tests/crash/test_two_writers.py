"""Two saves to one place, of which neither knows of the other.

One is held at every call that changes the disk while the other saves, and then goes on or is
killed. Whatever happens, the place holds one whole checkpoint of one of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api import CheckpointNotFoundError, CommitConflictError, CorruptCheckpointError
from reshard.checkpoint.directory import claim_name
from reshard.stores.local import LocalStore
from reshard.stores.owners import owner_tag
from reshard.tensors.paths import PathMap
from support.failing_system import WatchedSystem, WriterOn, watching
from support.ranks import run_alone

OPTIONS = [
    pytest.param({}, id="together"),
    pytest.param({"use_collectives": False}, id="without-collectives"),
]


def state(seed: int) -> dict[str, Any]:
    """All of it says which save it is of."""
    return {
        "large": torch.full((300, 300), float(seed)),
        "small": torch.full((3,), seed),
        "n": seed,
    }


def save(seed: int, folder: Path, system: Any = os, use_collectives: bool = True) -> None:
    reshard.save(
        state(seed), storage_writer=WriterOn(folder, system), use_collectives=use_collectives
    )


def which(folder: Path) -> int:
    """The save that the place holds, read whole and in part; 0 if there is none."""
    try:
        found = reshard.read_state_dict(folder)
    except CheckpointNotFoundError:
        return 0
    seeds = {found["n"], *found["large"].unique().tolist(), *found["small"].tolist()}
    assert len(seeds) == 1, f"a mixture of {seeds}"
    # By the time that this is read, another save may have been committed.
    part = reshard.read_tensor(folder, "large", (slice(7, 9),))
    assert len(part.unique()) == 1, f"a mixture of {part.unique()}"
    return int(found["n"])


def in_use(folder: Path) -> set[str]:
    metadata = reshard.FileSystemReader(folder).read_metadata()
    files = {info.relative_path for info in metadata.storage_data.values()}
    return {".metadata", *files} | {path.name for path in folder.glob(".metadata.*-of-*")}


def interrupted(at: int, after: bool, other: Callable[[], None]) -> WatchedSystem:
    """A system on which `other` happens just before call `at`, or just after it."""

    def on_call(number: int, name: str, proceed: Callable[[], Any]) -> Any:
        if number == at and not after:
            other()
        try:
            return proceed()
        finally:
            if number == at and after:
                other()

    return WatchedSystem(on_call)


def second_save(folder: Path, told: list[Any], options: dict[str, Any]) -> None:
    """Save 2, while save 1 is being held; what comes of it."""
    try:
        save(2, folder, os, **options)
        told.append("saved")
    except (reshard.CheckpointException, OSError) as error:
        told.append(str(error))
    told.append(which(folder))


def hold_at_every_call(
    folder: str, before: bool, options: dict[str, Any], kill: bool
) -> tuple[list[str], int]:
    LocalStore.lock_seconds = 0.05
    root, system = Path(folder), watching()
    if before:
        save(9, root / "count")
    save(1, root / "count", system, **options)
    wrong = []
    for at in range(len(system.calls)):
        for after in (False, True):
            place = root / f"{at}-{after}"
            if before:
                save(9, place)
            when = f"{'after' if after else 'before'} call {at} ({system.calls[at][0]})"
            try:
                run = die_beside_another if kill else go_on_beside_another
                run(place, at, after, options)
                save(3, place, os, **options)
                assert which(place) == 3, f"the next save left {which(place)}"
                debris = {path.name for path in place.iterdir()} - in_use(place)
                assert not debris, f"the next save left {sorted(debris)}"
            except Exception as error:  # noqa: BLE001 - collected for the test
                wrong.append(f"held {when}: {type(error).__name__}: {error}")
            shutil.rmtree(place, ignore_errors=True)
    return wrong, len(system.calls)


def go_on_beside_another(place: Path, at: int, after: bool, options: dict[str, Any]) -> None:
    told: list[Any] = []
    first = interrupted(at, after, lambda: second_save(place, told, options))
    try:
        save(1, place, first, **options)
        outcome = "saved"
    except CommitConflictError:
        outcome = "refused"
    second, seen = told
    if second == "saved":
        assert seen == 2, f"{seen} is there, not what was just saved"
    else:
        # The first one was just committing.
        assert "has held the lock" in second, second
    # One of the two is there; if the first was refused, it is not that one.
    assert which(place) in ((1, 2) if outcome == "saved" else (2,))


def die_beside_another(place: Path, at: int, after: bool, options: dict[str, Any]) -> None:
    outcome = place.with_name(f"{place.name}-outcome")
    child = os.fork()
    if not child:
        told: list[Any] = []

        def other_and_die() -> None:
            second_save(place, told, options)
            outcome.write_text(str(told[0]))
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            save(1, place, interrupted(at, after, other_and_die), **options)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    if outcome.read_text() == "saved":
        assert which(place) == 2
    else:
        # The first one was just committing, and had done so or not.
        assert "has held the lock" in outcome.read_text()
        assert which(place) in (0, 1, 9)


@pytest.mark.parametrize("kill", [False, True], ids=["goes-on", "is-killed"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "before",
    [
        pytest.param(False, id="first", marks=pytest.mark.slow),
        pytest.param(True, id="over-another"),
    ],
)
def test_a_save_held_at_any_call_while_another_saves_destroys_nothing(
    before: bool, options: dict[str, Any], kill: bool, fast_folder: str
) -> None:
    wrong, calls = run_alone(hold_at_every_call, fast_folder, before, options, kill, seconds=110)

    assert wrong == []
    assert calls > 12


def test_a_save_that_another_one_overtook_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    save(9, tmp_path)

    class Overtaken(reshard.FileSystemWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            save(2, tmp_path)
            super().finish(*args, **kwargs)

    with pytest.raises(reshard.CheckpointException) as caught:
        reshard.save(state(1), storage_writer=Overtaken(tmp_path))

    [(reason, _)] = caught.value.failures.values()
    assert isinstance(reason, CommitConflictError)
    assert f"another save was committed at {tmp_path}" in str(reason)
    assert which(tmp_path) == 2
    assert {path.name for path in tmp_path.iterdir()} == in_use(tmp_path)


def test_a_first_save_does_not_replace_another_first_one(tmp_path: Path) -> None:
    class Overtaken(reshard.FileSystemWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            save(2, tmp_path)
            super().finish(*args, **kwargs)

    for overwrite in (True, False):
        shutil.rmtree(tmp_path)
        with pytest.raises(reshard.CheckpointException, match="another save was committed"):
            reshard.save(state(1), storage_writer=Overtaken(tmp_path, overwrite=overwrite))
        assert which(tmp_path) == 2


def test_files_of_a_save_that_may_be_alive_are_not_cleared_away(tmp_path: Path) -> None:
    save(1, tmp_path)
    machine, pid, began = owner_tag().split("-")
    elsewhere = "0" * 8 if machine != "0" * 8 else "1" * 8
    owners = {
        "a" * 16: owner_tag(),
        "b" * 16: f"{elsewhere}-{pid}-{began}",
        "c" * 16: f"{machine}-{pid}-{int(began) + 1}",
        "d" * 16: f"{elsewhere}-{pid}-{began}",
    }
    for token, owner in owners.items():
        (tmp_path / f".metadata.{token}.{owner}.draft").touch()
        (tmp_path / f"__0_0_{token}.safetensors").touch()
        (tmp_path / f".metadata.0-of-2.{token}").touch()
    old = time.time() - 25 * 3600
    os.utime(tmp_path / f".metadata.{'d' * 16}.{owners['d' * 16]}.draft", (old, old))
    (tmp_path / f"__0_0_{'e' * 16}.safetensors").touch()

    save(2, tmp_path)

    left = {path.name for path in tmp_path.iterdir()} - in_use(tmp_path)
    tokens = {name.removesuffix(".safetensors").removesuffix(".draft") for name in left}
    # Of this process, and of one elsewhere; not of one that is dead, forgotten, or gave up.
    assert {t for t in "abcde" if any(t * 16 in name for name in tokens)} == {"a", "b"}
    assert len([name for name in left if "a" * 16 in name]) == 2


def test_a_save_whose_claim_was_cleared_away_commits_nothing(tmp_path: Path) -> None:
    save(1, tmp_path)

    class Forgotten(reshard.FileSystemWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            (tmp_path / claim_name(self.save_id)).unlink()
            super().finish(*args, **kwargs)

    with pytest.raises(reshard.CheckpointException, match="files of this save were removed from"):
        reshard.save(state(2), storage_writer=Forgotten(tmp_path))

    assert which(tmp_path) == 1


@pytest.mark.parametrize("step", ["write_data", "finish"])
def test_a_directory_that_is_removed_during_a_save_is_said_to_be_at_once(
    step: str, tmp_path: Path
) -> None:
    place = tmp_path / "place"

    def remove_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        shutil.rmtree(place)
        return getattr(reshard.FileSystemWriter, step)(self, *args, **kwargs)

    homeless = type("Homeless", (reshard.FileSystemWriter,), {step: remove_first})
    began = time.monotonic()
    with pytest.raises(reshard.CheckpointException, match=r"were removed from .* or the whole"):
        reshard.save(state(2), storage_writer=homeless(place))
    assert time.monotonic() - began < 5


class StaleStore(LocalStore):
    """A network file system whose listings lag behind: here they show nothing."""

    def list(self) -> list[str]:
        return []


def test_a_stale_listing_overwrites_nothing(tmp_path: Path) -> None:
    class Writer(reshard.FileSystemWriter):
        def open_store(self) -> LocalStore:
            return StaleStore(self.path)

    seen: set[str] = set()
    for seed in (1, 2):
        reshard.save(state(seed), storage_writer=Writer(tmp_path))
        assert which(tmp_path) == seed
        names = in_use(tmp_path) - {".metadata"}
        assert not names & seen
        seen |= names


class Unreadable(reshard.DefaultSavePlanner):
    """Describes its state dict in a way that no reader accepts."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        paths = PathMap({f"n.{10**9}": ("n", 10**9)})
        return plans, dataclasses.replace(metadata, planner_data=paths)


@pytest.mark.parametrize("options", OPTIONS)
def test_what_no_reader_would_accept_is_not_committed(
    options: dict[str, Any], tmp_path: Path
) -> None:
    save(1, tmp_path)

    with pytest.raises(reshard.CheckpointException, match="has damaged names"):
        reshard.save(state(2), checkpoint_id=tmp_path, planner=Unreadable(), **options)

    assert which(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == in_use(tmp_path)


class Careless(reshard.FileSystemWriter):
    """Has its own idea of what to put into plans."""

    def prepare_global_plan(self, plans: Any) -> Any:
        return [dataclasses.replace(plan, storage_data="mine") for plan in plans]


def test_a_storage_that_decides_itself_what_is_in_plans_is_protected_all_the_same(
    tmp_path: Path,
) -> None:
    class Overtaken(Careless):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            save(2, tmp_path)
            assert list(tmp_path.glob(f"*{self.save_id.replace('-', '')[:16]}.safetensors"))
            super().finish(*args, **kwargs)

    reshard.save(state(1), storage_writer=Careless(tmp_path))
    assert which(tmp_path) == 1
    with pytest.raises(reshard.CheckpointException, match="another save was committed"):
        reshard.save(state(3), storage_writer=Overtaken(tmp_path))
    assert which(tmp_path) == 2


def test_a_failed_save_over_a_damaged_manifest_leaves_nothing(tmp_path: Path) -> None:
    save(1, tmp_path)
    (tmp_path / ".metadata").write_bytes(b"damaged")
    before = {path.name for path in tmp_path.iterdir()}

    class Failing(reshard.FileSystemWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no space left")

    with pytest.raises(reshard.CheckpointException, match="no space left"):
        reshard.save(state(2), storage_writer=Failing(tmp_path))

    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_writer_that_is_used_again_without_a_reset_gives_its_files_new_names(
    tmp_path: Path,
) -> None:
    writer = reshard.FileSystemWriter(tmp_path)
    for seed in (1, 2):
        reshard.save(state(seed), storage_writer=writer)
        assert which(tmp_path) == seed


# A race


def race_in_threads(folder: str, rounds: int) -> tuple[int, int]:
    """Two writers in threads: how often each of them committed."""
    place, wins = Path(folder), [0, 0]
    problems: list[str] = []

    looked_enough = threading.Event()

    def write(writer: int) -> None:
        for number in itertools.count():
            if number >= rounds and looked_enough.is_set():
                return
            try:
                save(1 + writer + 2 * number, place, use_collectives=random.random() < 0.8)
                wins[writer] += 1
            except reshard.CheckpointException as error:
                if not isinstance(error, CommitConflictError):
                    problems.append(str(error))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(2)]
    for thread in threads:
        thread.start()
    looks = 0
    try:
        while any(thread.is_alive() for thread in threads):
            looks += watch(place)
            if looks > 10:
                looked_enough.set()
    finally:
        looked_enough.set()
    assert not problems, problems[0]
    return wins[0], wins[1]


def watch(place: Path) -> int:
    """Look at what is there; it must be whole, unless it was replaced while it was read."""
    before = LocalStore(place).version(".metadata")
    try:
        which(place)
    except (CorruptCheckpointError, FileNotFoundError):
        if LocalStore(place).version(".metadata") == before:
            raise
        return 0
    return 1


def race_of_processes(folder: str, rounds: int) -> tuple[int, int]:
    """Two writers in processes, killed at random instants: kills, and looks that found it whole."""
    place = Path(folder)
    save(1, place)
    kills = looks = seed = 0
    children: dict[int, float] = {}
    give_up = time.monotonic() + 1000
    done = 0
    # However fast saves are: until there was something to see.
    while (done < rounds or kills <= 5 or looks <= 20) and time.monotonic() < give_up:
        while len(children) < 2:
            seed += 1
            child = os.fork()
            if not child:
                try:
                    save(seed + 1, place, use_collectives=seed % 5 > 0)
                except reshard.CheckpointException as error:
                    os._exit(0 if isinstance(error, CommitConflictError) else 1)
                except BaseException:  # noqa: BLE001 - the parent sees the code
                    os._exit(2)
                os._exit(0)
            children[child] = time.monotonic() + random.expovariate(1 / 0.02)
        looks += watch(place)
        for child, end in list(children.items()):
            if seed % 2 and time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                kills += 1
                os.waitpid(child, 0)
                del children[child]
                done += 1
                continue
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                assert status == 0, status
                del children[child]
                done += 1
    for child in children:
        os.waitpid(child, 0)
    watch(place)
    save(10**6, place)
    assert which(place) == 10**6
    assert {path.name for path in place.iterdir()} == in_use(place)
    assert done >= rounds
    return kills, looks


def test_two_threads_that_race_leave_one_whole_checkpoint_at_every_moment(fast_folder: str) -> None:
    wins = run_alone(race_in_threads, fast_folder, 40, seconds=110)

    assert all(wins)


def test_two_processes_that_race_and_are_killed_leave_one_whole_checkpoint_at_every_moment(
    fast_folder: str,
) -> None:
    kills, looks = run_alone(race_of_processes, fast_folder, 60, seconds=110)

    assert kills > 5
    assert looks > 20


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_rounds_of_two_writers_leave_one_whole_checkpoint_at_every_moment(
    fast_folder: str,
) -> None:
    wins = run_alone(race_in_threads, f"{fast_folder}/threads", 500, seconds=550)
    kills, looks = run_alone(race_of_processes, f"{fast_folder}/processes", 1000, seconds=550)

    assert all(wins)
    assert kills > 100
    assert looks > 300

"""A disk that is full, broken, slow to take bytes, read-only or forbidden."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from support.failing_system import ReaderOn, ShortSystem, WriterOn, refusing, watching
from support.ranks import run_alone
from support.samples import same_bits


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(300, 300, generator=generator),
        "small": torch.randn(7, generator=generator),
        "step": seed,
    }


def holds(folder: Path, seed: int) -> bool:
    """Whether the folder holds exactly that state."""
    found, wanted = reshard.read_state_dict(folder), state(seed)
    return found["step"] == seed and all(
        same_bits(found[name], wanted[name]) for name in ("large", "small")
    )


def failure_of(save: Callable[[], Any]) -> OSError:
    """The error of the disk with which a save fails."""
    with pytest.raises(reshard.CheckpointException) as caught:
        save()
    assert list(caught.value.failures) == [0]
    error = caught.value.failures[0][0]
    assert isinstance(error, OSError)
    assert caught.value.__cause__ is error
    place = "" if error.filename is None else f": {error.filename!r}"
    assert str(caught.value).startswith(f"{error.strerror}{place}")
    return error


def calls_of_a_save(folder: Path) -> list[str]:
    system = watching()
    reshard.save(state(2), storage_writer=WriterOn(folder, system))
    return [name for name, _, _ in system.calls]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A place with a checkpoint."""
    reshard.save(state(1), checkpoint_id=tmp_path / "place")
    return tmp_path / "place"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT])
def test_an_error_of_any_call_before_the_commit_keeps_the_old_checkpoint(
    error: int, tmp_path: Path
) -> None:
    reshard.save(state(1), checkpoint_id=tmp_path / "count")
    calls = calls_of_a_save(tmp_path / "count")
    commit = calls.index("rename")
    assert commit > 8

    place = tmp_path / "place"
    reshard.save(state(1), checkpoint_id=place)
    for at in range(commit + 1):
        writer = WriterOn(place, refusing(error, at=at))
        found = failure_of(lambda: reshard.save(state(2), storage_writer=writer))  # noqa: B023
        assert found.errno == error
        assert holds(place, 1), f"after call {at}, {calls[at]}"

    reshard.save(state(3), checkpoint_id=place)
    assert holds(place, 3)
    used = reshard.FileSystemReader(place).read_metadata().storage_data.values()
    assert {path.name for path in place.iterdir()} == {
        ".metadata",
        *(info.relative_path for info in used),
    }


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_an_error_of_the_disk_names_the_file(call: str, old: Path) -> None:
    writer = WriterOn(old, refusing(errno.ENOSPC, name=call))

    error = failure_of(lambda: reshard.save(state(2), storage_writer=writer))

    assert str(old) in str(error)


def test_old_files_that_cannot_be_removed_do_not_fail_a_save_that_is_committed(old: Path) -> None:
    writer = WriterOn(old, refusing(errno.EACCES, name="unlink"))

    reshard.save(state(2), storage_writer=writer)

    assert holds(old, 2)


def test_old_files_that_cannot_be_removed_do_not_harm_the_new_checkpoint(old: Path) -> None:
    writer = WriterOn(old, refusing(errno.EACCES, name="unlink"))

    with contextlib.suppress(reshard.CheckpointException):
        reshard.save(state(2), storage_writer=writer)

    assert holds(old, 2)


@pytest.mark.parametrize("most_bytes", [1000, 4096, 100_001])
def test_short_writes_are_continued(most_bytes: int, old: Path) -> None:
    system = ShortSystem(most_bytes)

    reshard.save(state(2), storage_writer=WriterOn(old, system))

    assert system.transfers > 360_000 / most_bytes
    assert holds(old, 2)


@pytest.mark.parametrize("most_bytes", [1000, 4096, 100_001])
def test_short_reads_are_continued(most_bytes: int, old: Path) -> None:
    system = ShortSystem(most_bytes)
    state_dict = state(2)

    reshard.load(state_dict, storage_reader=ReaderOn(old, system))

    assert system.transfers > 360_000 / most_bytes
    assert state_dict["step"] == 1
    assert same_bits(state_dict["large"], state(1)["large"])
    assert same_bits(state_dict["small"], state(1)["small"])


@pytest.mark.parametrize("stuck_at", [0, 100, 4096, 200_000])
def test_a_disk_that_takes_no_more_bytes_is_an_error_that_names_the_file(
    stuck_at: int, old: Path
) -> None:
    writer = WriterOn(old, ShortSystem(3000, stuck_at))

    error = failure_of(lambda: reshard.save(state(2), storage_writer=writer))

    # What is written first is the claim, then the shard file.
    assert re.search(rf"{old}/(\.metadata\.\w+\.[\w-]+\.draft|__0_0_\w+\.safetensors)", str(error))
    assert holds(old, 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "reshard-test", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no tmpfs can be mounted here: {error}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def large_state() -> dict[str, Any]:
    return {f"{n}": torch.randn(1 << 16) for n in range(16)}


def test_a_full_disk_keeps_the_old_checkpoint(small_disk: Path) -> None:
    reshard.save(state(1), checkpoint_id=small_disk / "place")

    error = failure_of(lambda: reshard.save(large_state(), checkpoint_id=small_disk / "place"))

    assert error.errno == errno.ENOSPC
    assert holds(small_disk / "place", 1)


def test_after_a_full_disk_a_save_that_fits_works(small_disk: Path) -> None:
    reshard.save(state(1), checkpoint_id=small_disk / "place")
    failure_of(lambda: reshard.save(large_state(), checkpoint_id=small_disk / "place"))

    reshard.save(state(2), checkpoint_id=small_disk / "place")

    assert holds(small_disk / "place", 2)


def test_a_read_only_file_system_is_an_error_that_names_it(small_disk: Path) -> None:
    place = small_disk / "place"
    reshard.save(state(1), checkpoint_id=place)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    for where in (place, small_disk / "another"):
        error = failure_of(lambda: reshard.save(state(2), checkpoint_id=where))  # noqa: B023
        assert error.errno == errno.EROFS
        assert str(where) in str(error)
    assert holds(place, 1)


def save_as_somebody_else(folder: str) -> tuple[int | None, str, bool]:
    os.setgid(65534)
    os.setuid(65534)
    error = failure_of(lambda: reshard.save(state(2), checkpoint_id=folder))
    return error.errno, str(error), holds(Path(folder), 1)


def test_a_directory_without_permission_is_an_error_that_names_it() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        place = Path(folder) / "place"
        reshard.save(state(1), checkpoint_id=place)
        place.chmod(0o555)

        number, message, still_there = run_alone(save_as_somebody_else, str(place))

        assert number == errno.EACCES
        assert str(place) in message
        assert still_there

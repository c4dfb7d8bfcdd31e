"""Which files may be deleted, and what keeps them."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api import CheckpointExistsError, CheckpointInUseError, UnsupportedFormatError
from reshard.checkpoint.debris import delete_checkpoint
from reshard.checkpoint.directory import claim_name, claim_text, deletion_name, deletion_text
from reshard.stores.local import LocalStore
from reshard.stores.owners import owner_tag


def save(folder: Path, step: int = 0, **options: object) -> None:
    state = {"frozen": torch.arange(5000.0), "step": step}
    reshard.save(state, checkpoint_id=folder, **options)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


# What is not ours


def save_with_dcp(folder: Path, **options: Any) -> None:
    import torch.distributed.checkpoint as dcp

    # In two files, since there are two threads.
    writer = dcp.FileSystemWriter(folder, thread_count=2, single_file_per_rank=False)
    dcp.save({"a": torch.ones(3), "b": torch.ones(4)}, storage_writer=writer, **options)


def write_over(folder: Path, format: str) -> None:
    new = {"a": torch.full((3,), 2.0)}
    if format.startswith("save"):
        reshard.save(new, checkpoint_id=folder, format=format.removeprefix("save "))  # type: ignore[arg-type]
        return
    reshard.save(new, checkpoint_id=folder.parent / "new")
    reshard.convert(folder.parent / "new", folder, format, overwrite=True)  # type: ignore[arg-type]


WAYS = ["save reshard", "save dcp", "reshard", "dcp", "huggingface"]


@pytest.mark.parametrize("way", WAYS)
def test_of_a_checkpoint_of_dcp_nothing_is_left_when_it_was_replaced(
    way: str, tmp_path: Path
) -> None:
    save_with_dcp(tmp_path / "a")
    older = {path.name for path in (tmp_path / "a").glob("*.distcp")}
    (tmp_path / "a/__7_7.distcp").touch()
    (tmp_path / "a/notes.txt").touch()

    write_over(tmp_path / "a", way)

    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert len(older) == 2
    assert not older & names
    assert {"notes.txt", "__7_7.distcp"} < names
    assert reshard.read_state_dict(tmp_path / "a")["a"].tolist() == [2.0] * 3


@pytest.mark.parametrize("way", WAYS)
def test_parts_that_dcp_wrote_without_collectives_are_replaced_too(
    way: str, tmp_path: Path
) -> None:
    save_with_dcp(tmp_path / "a")
    (tmp_path / "a/.metadata").rename(tmp_path / "a/__0.metadata")
    assert reshard.read_state_dict(tmp_path / "a")["a"].tolist() == [1.0] * 3

    write_over(tmp_path / "a", way)

    assert not list((tmp_path / "a").glob("__0*.metadata"))
    assert not list((tmp_path / "a").glob("__0_?.distcp"))
    assert reshard.read_state_dict(tmp_path / "a")["a"].tolist() == [2.0] * 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", ["../outside.distcp", "notes.txt", "../a/__0_9.distcp"])
def test_metadata_does_not_say_which_other_files_are_deleted(
    way: str, path: str, tmp_path: Path
) -> None:
    save_with_dcp(tmp_path / "a")
    metadata = pickle.loads((tmp_path / "a/.metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(info, relative_path=path)
    (tmp_path / "a/.metadata").write_bytes(pickle.dumps(metadata))
    for other in ("outside.distcp", "a/notes.txt", "a/__0_9.distcp"):
        (tmp_path / other).write_text("mine")

    write_over(tmp_path / "a", way)

    for other in ("outside.distcp", "a/notes.txt", "a/__0_9.distcp"):
        assert (tmp_path / other).read_text() == "mine"


@pytest.mark.parametrize("kind", ["dcp", "ours"])
def test_an_export_replaces_a_checkpoint_only_if_that_is_wanted(kind: str, tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "a") if kind == "dcp" else save(tmp_path / "a")
    reshard.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "new")
    before = contents(tmp_path / "a")

    with pytest.raises(CheckpointExistsError, match=r"a checkpoint at .*overwrite=True"):
        reshard.convert(tmp_path / "new", tmp_path / "a", "huggingface")
    assert contents(tmp_path / "a") == before
    reshard.convert(tmp_path / "new", tmp_path / "a", "huggingface", overwrite=True)

    assert contents(tmp_path / "a").keys() == {"model.safetensors"}


def test_an_export_does_not_replace_a_checkpoint_that_others_refer_to(tmp_path: Path) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b", step=1, base=tmp_path / "a")
    before = contents(tmp_path)

    with pytest.raises(CheckpointInUseError, match=r"holds data that other checkpoints refer to"):
        reshard.convert(
            tmp_path / "b", tmp_path / "a", "huggingface", exclude="step", overwrite=True
        )

    assert contents(tmp_path) == before


def test_a_checkpoint_of_dcp_is_not_deleted(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    before = contents(tmp_path)

    with pytest.raises(UnsupportedFormatError, match=r"a is not deleted: its \.metadata is no man"):
        reshard.delete(tmp_path / "a")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("content", [b"", b"my notes", b"\0" * 9000, b'12345678{"format": "pt"}'])
def test_a_folder_with_a_file_that_happens_to_have_the_name_is_not_deleted(
    content: bytes, tmp_path: Path
) -> None:
    save(tmp_path / "a")
    (tmp_path / "a" / ".metadata").write_bytes(content)
    before = contents(tmp_path)

    with pytest.raises(UnsupportedFormatError, match="remove the directory yourself"):
        reshard.delete(tmp_path / "a")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kept_bytes", [-1, 4000])
def test_a_damaged_checkpoint_is_deleted(kept_bytes: int, tmp_path: Path) -> None:
    save(tmp_path / "a")
    manifest = tmp_path / "a" / ".metadata"
    manifest.write_bytes(manifest.read_bytes()[:kept_bytes])

    reshard.delete(tmp_path / "a")

    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["latest", "latest/"])
def test_a_link_to_a_checkpoint_is_not_deleted(name: str, tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    (tmp_path / "latest").symlink_to("step-1")
    before = contents(tmp_path)

    with pytest.raises(ValueError, match=f"is a link to '{tmp_path / 'step-1'}': pass that"):
        reshard.delete(f"{tmp_path}/{name}")
    assert contents(tmp_path) == before


def test_a_checkpoint_below_a_link_is_deleted(tmp_path: Path) -> None:
    save(tmp_path / "real" / "step-1")
    (tmp_path / "runs").symlink_to("real")

    reshard.delete(tmp_path / "runs" / "step-1")

    assert not (tmp_path / "real" / "step-1").exists()


# Who may be at work elsewhere

ELSEWHERE = "00000000-12-345"
"""A process of another machine."""
HOURS = 3600.0


def announce(path: Path, text: bytes, hours_ago: float) -> None:
    path = path.with_name(path.name.replace(owner_tag(), ELSEWHERE))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text)
    when = path.stat().st_mtime - hours_ago * HOURS
    os.utime(path, (when, when))


def deletion(folder: Path, hours_ago: float) -> None:
    announce(folder / "a" / deletion_name(), deletion_text(), hours_ago)


def save_there(folder: Path, hours_ago: float) -> None:
    announce(folder / "a" / claim_name("0" * 16), claim_text([]), hours_ago)


def save_that_refers_to_it(folder: Path, hours_ago: float) -> None:
    announce(folder / "b" / claim_name("0" * 16), claim_text(["../a"]), hours_ago)


def delete_it(folder: Path) -> None:
    reshard.delete(folder / "a")
    assert not (folder / "a").exists()


def replace_it(folder: Path) -> None:
    save(folder / "a", 1)
    assert reshard.read_state_dict(folder / "a")["step"] == 1


def use_it_as_a_base(folder: Path) -> None:
    save(folder / "c", 1, base=folder / "a")


@pytest.mark.parametrize(
    ("announced", "act"),
    [
        (deletion, delete_it),
        (deletion, replace_it),
        (deletion, use_it_as_a_base),
        (save_there, delete_it),
        (save_that_refers_to_it, delete_it),
    ],
)
def test_what_another_machine_announced_counts_for_a_day(
    announced: Callable[[Path, float], None], act: Callable[[Path], None], tmp_path: Path
) -> None:
    save(tmp_path / "a")
    announced(tmp_path, 23)
    before = contents(tmp_path)

    who = r"\(.*, process \d+, since 2\d{3}-.*\).* If that process is gone, remove '\.metadata\..*"
    with pytest.raises(reshard.CheckpointException, match=who):
        act(tmp_path)
    assert contents(tmp_path) == before

    announced(tmp_path, 25)
    act(tmp_path)


def test_files_that_only_a_forgotten_save_may_refer_to_are_removed(tmp_path: Path) -> None:
    save(tmp_path / "a")
    save_that_refers_to_it(tmp_path, 23)
    save(tmp_path / "a", 1)
    assert len([*(tmp_path / "a").glob("*.safetensors")]) == 2

    save_that_refers_to_it(tmp_path, 25)
    save(tmp_path / "a", 2)
    assert len([*(tmp_path / "a").glob("*.safetensors")]) == 1


# What cannot be looked into


class Closed:
    """The os module, for a user who may not list one directory."""

    def __init__(self, closed: Path, error: OSError) -> None:
        self._closed, self._error = str(closed), error

    def listdir(self, path: str) -> list[str]:
        if str(path) == self._closed:
            raise self._error
        return os.listdir(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def test_a_neighbour_that_may_not_be_listed_is_passed_over_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lost+found").mkdir()
    system = Closed(tmp_path / "lost+found", PermissionError(13, "Permission denied"))
    with caplog.at_level(logging.WARNING):
        for name in "ab":
            save(tmp_path / name)
            delete_checkpoint(LocalStore(tmp_path / name, system), None)

    assert sorted(os.listdir(tmp_path)) == ["lost+found"]
    [record] = caplog.records
    assert "lost+found is taken not to refer to its neighbours" in record.getMessage()


def test_a_neighbour_that_fails_to_be_read_keeps_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "a")
    (tmp_path / "b").mkdir()
    system = Closed(tmp_path / "b", OSError(5, "Input/output error"))

    with pytest.raises(CheckpointInUseError, match=r"what .*b refers to cannot be told.*Input"):
        delete_checkpoint(LocalStore(tmp_path / "a", system), None)
    assert reshard.read_state_dict(tmp_path / "a")["step"] == 0


# Where references are looked for


def test_a_checkpoint_of_the_same_name_in_a_folder_beside_is_seen(tmp_path: Path) -> None:
    first, second = tmp_path / "step-1" / "model", tmp_path / "step-2" / "model"
    save(first)
    save(second, 1, base=first)

    with pytest.raises(CheckpointInUseError, match=f"refer to: {second}"):
        reshard.delete(first)
    save(first, 2)
    assert torch.equal(reshard.read_state_dict(second)["frozen"], torch.arange(5000.0))

    reshard.delete(first, materialise=True)
    assert reshard.read_state_dict(second)["step"] == 1


@pytest.mark.parametrize(
    ("base", "is_said"),
    [("a", False), ("../beside/new", False), ("../beside/a", True), ("../../far/a", True)],
)
def test_a_base_where_deletions_do_not_look_for_references_is_named(
    base: str, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "runs" / "one"
    save(root / base)
    with caplog.at_level(logging.WARNING):
        save(root / "new", 1, base=root / base)

    said = [record.getMessage() for record in caplog.records]
    assert [
        f"may refer to {(root / base).resolve()}, which is not beside it" in each for each in said
    ] == ([True] if is_said else [])

"""Stored checkpoints as wholes: made whole, deleted, and replaced while others refer to them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api import (
    BaseError,
    CheckpointException,
    CheckpointExistsError,
    CheckpointInUseError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from reshard.checkpoint import dependents
from reshard.checkpoint.directory import claim_name, claim_text, deletion_name, read_manifest
from reshard.stores.local import LocalStore
from reshard.stores.owners import owner_tag
from support.failing_system import WatchedSystem, WriterOn


def state(step: int = 0) -> dict[str, Any]:
    return {
        "frozen": torch.arange(5000, dtype=torch.float32),
        "tied": {"a": torch.ones(3, 4).bfloat16()},
        "scalar": torch.tensor(7.5),
        "empty": torch.zeros(0, 3),
        "trained": torch.full((10,), float(step)),
        "step": step,
    }


def save(folder: Path, step: int = 0, **options: Any) -> None:
    reshard.save(state(step), checkpoint_id=folder, **options)


def holds(folder: Path, step: int) -> bool:
    found, wanted = reshard.read_state_dict(folder), state(step)
    same = [torch.equal(found[name], wanted[name]) for name in ("frozen", "scalar", "trained")]
    return all(same) and torch.equal(found["tied"]["a"], wanted["tied"]["a"])


def origins(folder: Path) -> list[str]:
    return [origin.location for origin in read_manifest(LocalStore(folder)).origins]


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    """Three checkpoints; the second refers to the first, the third to both."""
    places = [tmp_path / name for name in "abc"]
    save(places[0])
    save(places[1], 1, base=places[0])
    other = {**state(1), "scalar": torch.tensor(7.5)}
    reshard.save(other, checkpoint_id=places[2], base=places[1])
    return places


DEAD = f"{owner_tag().split('-')[0]}-999999999-1"
"""A process of this machine that is not there."""


# Deleting


def test_a_checkpoint_that_nobody_refers_to_is_deleted_with_its_folder(tmp_path: Path) -> None:
    save(tmp_path / "a")

    reshard.delete(tmp_path / "a")

    assert not (tmp_path / "a").exists()


def test_what_is_not_of_a_checkpoint_stays(tmp_path: Path) -> None:
    save(tmp_path / "a")
    for name in ("notes.txt", "model.safetensors"):
        (tmp_path / "a" / name).write_text("of the user")

    reshard.delete(tmp_path / "a")

    assert {path.name for path in (tmp_path / "a").iterdir()} == {"notes.txt", "model.safetensors"}


def test_a_checkpoint_in_parts_is_deleted_whole(tmp_path: Path) -> None:
    save(tmp_path / "a", use_collectives=False)

    reshard.delete(tmp_path / "a")

    assert not (tmp_path / "a").exists()


def test_a_checkpoint_that_others_refer_to_is_not_deleted(chain: list[Path]) -> None:
    with pytest.raises(CheckpointInUseError) as raised:
        reshard.delete(chain[0])

    assert str(raised.value) == (
        f"{chain[0]} holds data that other checkpoints refer to: {chain[1]}, {chain[2]}. Delete "
        "those first, make them whole with reshard.materialise, or pass materialise=True"
    )
    assert holds(chain[0], 0)
    assert len(list(chain[0].iterdir())) == 2


def test_a_chain_is_deleted_from_its_end(chain: list[Path]) -> None:
    for place in reversed(chain):
        reshard.delete(place)

    assert list(chain[0].parent.iterdir()) == []


def test_those_that_refer_to_a_checkpoint_are_made_whole_before_it_goes(chain: list[Path]) -> None:
    reshard.delete(chain[0], materialise=True)

    assert not chain[0].exists()
    assert holds(chain[1], 1)
    assert holds(chain[2], 1)
    assert origins(chain[2]) == origins(chain[1]) == []


@pytest.mark.parametrize("use_collectives", [True, False])
def test_parts_that_refer_to_a_checkpoint_are_seen_and_made_whole(
    use_collectives: bool, tmp_path: Path
) -> None:
    save(tmp_path / "a", use_collectives=use_collectives)
    save(tmp_path / "b", 1, base=tmp_path / "a", use_collectives=False)
    with pytest.raises(CheckpointInUseError):
        reshard.delete(tmp_path / "a")

    reshard.delete(tmp_path / "a", materialise=True)

    assert holds(tmp_path / "b", 1)
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert len(names) == 1 + len(read_manifest(LocalStore(tmp_path / "b")).files), names


def test_two_that_refer_to_each_other_can_be_parted(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    save(a)
    save(b, 1, base=a)
    # The old files of the first stay, since the second refers to them.
    save(a, 1, base=b)
    assert holds(a, 1)
    assert holds(b, 1)
    assert origins(a) == ["../b"]
    for place in (a, b):
        with pytest.raises(CheckpointInUseError):
            reshard.delete(place)

    reshard.delete(b, materialise=True)

    assert holds(a, 1)
    assert not b.exists()


def test_a_reference_through_a_link_is_seen(tmp_path: Path) -> None:
    save(tmp_path / "a")
    (tmp_path / "latest").symlink_to("a")
    save(tmp_path / "b", 1, base=tmp_path / "latest")

    with pytest.raises(CheckpointInUseError, match="/b"):
        reshard.delete(tmp_path / "a")


def test_odd_neighbours_are_no_reason_to_keep_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "a")
    (tmp_path / "a" / "inside").mkdir()
    (tmp_path / "link to the inside").symlink_to("a/inside")
    (tmp_path / "link to itself").symlink_to("a")
    (tmp_path / "link to the parent").symlink_to(".")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "of torch").mkdir()
    (tmp_path / "of torch" / ".metadata").write_bytes(b"\x80\x04K\x00.")

    reshard.delete(tmp_path / "a")

    assert {path.name for path in (tmp_path / "a").iterdir()} == {"inside"}


def test_a_neighbour_that_cannot_be_read_is_named(chain: list[Path]) -> None:
    manifest = chain[1] / ".metadata"
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"\0")

    with pytest.raises(CheckpointInUseError, match=rf"what {chain[1]} refers to cannot be told"):
        reshard.delete(chain[0])
    assert holds(chain[2], 1)


@pytest.mark.parametrize("folder", ["missing", "empty", "of-the-user"])
def test_where_there_is_no_checkpoint_nothing_is_deleted(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "of-the-user").mkdir()
    (tmp_path / "of-the-user" / "model.safetensors").write_text("x")

    with pytest.raises(CheckpointNotFoundError, match=f"no checkpoint at .*{folder} to delete"):
        reshard.delete(tmp_path / folder)
    assert (tmp_path / "of-the-user" / "model.safetensors").exists()


def test_a_file_is_no_checkpoint_to_delete(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("x")

    with pytest.raises(CheckpointException, match=r"model\.pt"):
        reshard.delete(tmp_path / "model.pt")
    assert (tmp_path / "model.pt").exists()


def test_what_a_save_that_was_cut_off_left_is_deleted(tmp_path: Path) -> None:
    save(tmp_path / "a")
    (tmp_path / "a" / ".metadata").unlink()

    reshard.delete(tmp_path / "a")

    assert not (tmp_path / "a").exists()


# Who is at work meanwhile


def claim(folder: Path, owner: str, refers_to: list[str]) -> Path:
    path = folder / claim_name("0123456789abcdef").replace(owner_tag(), owner)
    folder.mkdir(exist_ok=True)
    path.write_bytes(claim_text(refers_to))
    return path


def test_a_save_to_the_same_place_keeps_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "a")
    path = claim(tmp_path / "a", owner_tag(), [])

    with pytest.raises(CheckpointInUseError, match=f"a save to {tmp_path / 'a'} is under way"):
        reshard.delete(tmp_path / "a")
    assert holds(tmp_path / "a", 0)

    path.rename(path.with_name(path.name.replace(owner_tag(), DEAD)))
    reshard.delete(tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("materialise", [False, True])
def test_a_save_that_may_refer_to_a_checkpoint_keeps_it(materialise: bool, tmp_path: Path) -> None:
    save(tmp_path / "a")
    path = claim(tmp_path / "b", owner_tag(), ["../other", "../a"])

    with pytest.raises(CheckpointInUseError, match=f"{tmp_path / 'b'}"):
        reshard.delete(tmp_path / "a", materialise=materialise)
    assert holds(tmp_path / "a", 0)

    path.rename(path.with_name(path.name.replace(owner_tag(), DEAD)))
    reshard.delete(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_save_that_refers_to_others_keeps_nothing(tmp_path: Path) -> None:
    save(tmp_path / "a")
    claim(tmp_path / "b", owner_tag(), ["../c", "../a/inside", "../aa"])

    reshard.delete(tmp_path / "a")

    assert not (tmp_path / "a").exists()


def test_a_claim_that_does_not_say_all_keeps_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dependents, "_UNDECIDED_SECONDS", 0.05)
    save(tmp_path / "a")
    for text in (b"", claim_text(["../a"])[:-3], (tmp_path / "a" / ".metadata").read_bytes()[:99]):
        claim(tmp_path / "b", owner_tag(), []).write_bytes(text)
        with pytest.raises(CheckpointInUseError):
            reshard.delete(tmp_path / "a")

    assert holds(tmp_path / "a", 0)


def call_before(name: str, then: Callable[[], Any]) -> WatchedSystem:
    """A system that does something else first, when it is first asked for a call."""
    done: list[Any] = []

    def on_call(number: int, called: str, proceed: Callable[[], Any]) -> Any:
        if called == name and not done:
            done.append(True)
            then()
        return proceed()

    return WatchedSystem(on_call)


def test_the_base_of_a_save_that_is_just_committing_is_kept(tmp_path: Path) -> None:
    refused: list[str] = []

    def delete() -> None:
        with pytest.raises(CheckpointInUseError) as raised:
            reshard.delete(tmp_path / "a")
        refused.append(str(raised.value))

    save(tmp_path / "a")
    writer = WriterOn(tmp_path / "b", call_before("rename", delete))

    reshard.save(state(1), storage_writer=writer, base=tmp_path / "a")

    assert len(refused) == 1
    assert holds(tmp_path / "b", 1)


def test_a_save_that_begins_after_its_base_was_announced_to_be_deleted_fails(
    tmp_path: Path,
) -> None:
    save(tmp_path / "a")
    announcement = tmp_path / "a" / deletion_name()
    announcement.write_text("")

    with pytest.raises(BaseError) as raised:
        save(tmp_path / "b", 1, base=tmp_path / "a")
    assert str(raised.value).startswith(
        f"the base cannot be used: {tmp_path / 'a'} is being deleted (another process, since "
    )
    assert not (tmp_path / "b").exists()

    announcement.rename(tmp_path / "a" / f".metadata.{DEAD}.deleting")
    save(tmp_path / "b", 1, base=tmp_path / "a")
    assert origins(tmp_path / "b") == ["../a"]


def test_a_save_to_a_place_that_is_being_deleted_fails(tmp_path: Path) -> None:
    save(tmp_path / "a")
    announcement = tmp_path / "a" / deletion_name()
    announcement.write_text("")

    with pytest.raises(CheckpointInUseError, match=f"{tmp_path / 'a'} is being deleted"):
        save(tmp_path / "a", 1)
    assert holds(tmp_path / "a", 0)

    announcement.rename(tmp_path / "a" / f".metadata.{DEAD}.deleting")
    save(tmp_path / "a", 1)
    assert holds(tmp_path / "a", 1)


def test_two_deletions_at_once_are_one(tmp_path: Path) -> None:
    save(tmp_path / "a")
    announcement = tmp_path / "a" / deletion_name()
    announcement.write_text("")

    with pytest.raises(CheckpointInUseError, match="is being deleted already"):
        reshard.delete(tmp_path / "a")
    assert holds(tmp_path / "a", 0)

    # What one that died has left does not stay.
    announcement.rename(tmp_path / "a" / f".metadata.{DEAD}.deleting")
    reshard.delete(tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("when", ["planned", "committed"])
def test_a_base_that_is_replaced_while_a_save_is_written_stays_readable(
    when: str, tmp_path: Path
) -> None:
    class Writer(WriterOn):
        def write_data(self, plan: Any, planner: Any) -> Any:
            if when == "planned":
                save(tmp_path / "a", 5)
            return super().write_data(plan, planner)

    save(tmp_path / "a")
    replace = call_before("rename", lambda: when == "planned" or save(tmp_path / "a", 5))

    reshard.save(state(1), storage_writer=Writer(tmp_path / "b", replace), base=tmp_path / "a")

    assert holds(tmp_path / "a", 5)
    assert holds(tmp_path / "b", 1)


def test_a_base_that_is_replaced_before_the_claim_fails_the_save(tmp_path: Path) -> None:
    save(tmp_path / "a")
    replace = call_before("makedirs", lambda: save(tmp_path / "a", 5))
    writer = WriterOn(tmp_path / "b", replace)

    with pytest.raises(BaseError, match=r"was replaced or deleted while this save began"):
        reshard.save(state(1), storage_writer=writer, base=tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_a_checkpoint_that_is_being_saved_in_the_background_is_waited_for(tmp_path: Path) -> None:
    class Slow(reshard.FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            gate.wait(60)
            super().finish(metadata, results)

    gate = threading.Event()
    reshard.async_save(state(), storage_writer=Slow(tmp_path / "a"))
    threading.Timer(0.1, gate.set).start()

    reshard.delete(tmp_path / "a")

    assert not (tmp_path / "a").exists()


# Replacing


def test_a_checkpoint_that_is_replaced_keeps_the_files_that_others_refer_to(
    chain: list[Path],
) -> None:
    before = {path.name for path in chain[0].glob("*.safetensors")}
    save(chain[0], 9)

    assert holds(chain[0], 9)
    assert holds(chain[1], 1)
    assert holds(chain[2], 1)
    after = {path.name for path in chain[0].glob("*.safetensors")}
    assert len(after) == 2
    assert before < after

    # They go when nobody refers to them.
    for place in chain[:0:-1]:
        reshard.delete(place)
    save(chain[0], 10)
    assert len(list(chain[0].glob("*.safetensors"))) == 1


# Making whole


def test_a_checkpoint_that_was_made_whole_needs_no_other(chain: list[Path]) -> None:
    assert reshard.materialise(chain[2])

    for place in chain[1::-1]:
        reshard.delete(place)
    assert holds(chain[2], 1)
    assert not reshard.materialise(chain[2])


@pytest.mark.parametrize("use_collectives", [True, False])
def test_a_whole_copy_is_made_elsewhere(use_collectives: bool, tmp_path: Path) -> None:
    save(tmp_path / "a", use_collectives=use_collectives)
    save(tmp_path / "b", 1, base=tmp_path / "a", use_collectives=use_collectives)

    assert reshard.materialise(tmp_path / "b", tmp_path / "far" / "copy")

    assert holds(tmp_path / "far" / "copy", 1)
    assert origins(tmp_path / "far" / "copy") == []
    assert origins(tmp_path / "b") == ["../a"]


def test_a_whole_copy_goes_where_nothing_is(chain: list[Path]) -> None:
    with pytest.raises(CheckpointExistsError, match=f"at {chain[0]} already: name a place where"):
        reshard.materialise(chain[1], chain[0])
    with pytest.raises(ValueError, match="is the checkpoint itself"):
        reshard.materialise(chain[1], os.path.relpath(chain[1]))
    with pytest.raises(CheckpointNotFoundError):
        reshard.materialise(chain[1].with_name("missing"))

    assert holds(chain[0], 0)
    assert holds(chain[1], 1)


def test_damaged_bytes_are_not_copied(chain: list[Path]) -> None:
    [shard] = chain[0].glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5000] ^= 1
    shard.write_bytes(data)
    before = sorted(path.name for path in chain[1].iterdir())

    with pytest.raises(CorruptCheckpointError, match="are damaged"):
        reshard.materialise(chain[1])
    with pytest.raises(CorruptCheckpointError, match="are damaged"):
        reshard.delete(chain[0], materialise=True)

    assert sorted(path.name for path in chain[1].iterdir()) == before
    assert len(list(chain[0].iterdir())) == 2


def test_damaged_bytes_of_compressed_chunks_are_not_copied(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(300, 1000).bfloat16()}
    reshard.save(tensors, checkpoint_id=tmp_path / "a", compress="zstd")
    reshard.save(tensors, checkpoint_id=tmp_path / "b", base=tmp_path / "a")
    [shard] = (tmp_path / "a").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5000] ^= 1
    shard.write_bytes(data)

    with pytest.raises(CorruptCheckpointError, match=r"bytes of 'w' .* are damaged, so that"):
        reshard.delete(tmp_path / "a", materialise=True)
    assert (tmp_path / "a" / ".metadata").exists()
    assert origins(tmp_path / "b") == ["../a"]

"""Checkpoints that are being read or pinned are not deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import reshard
from reshard.api import CheckpointInUseError, CheckpointNotFoundError
from reshard.checkpoint.directory import deletion_name, deletion_text
from reshard.checkpoint.keeping import being_read, is_pinned, pin, unpin
from reshard.stores.local import LocalStore

DEAD = ".metadata.00000000-1-1.reading"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    reshard.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    return LocalStore(tmp_path / "a")


def test_a_checkpoint_is_not_deleted_while_it_is_read(store: LocalStore) -> None:
    with being_read(store), pytest.raises(CheckpointInUseError, match="is being read"):
        reshard.delete(store.location)

    reshard.delete(store.location)
    assert not Path(store.location).exists()


def test_two_reads_at_once_in_one_process_are_one(store: LocalStore) -> None:
    with being_read(store):
        with being_read(store):
            pass
        with pytest.raises(CheckpointInUseError, match="is being read"):
            reshard.delete(store.location)


def test_a_pinned_checkpoint_is_deleted_once_it_is_unpinned(store: LocalStore) -> None:
    pin(store)
    pin(store)
    assert is_pinned(store)
    with pytest.raises(CheckpointInUseError, match=r"is pinned.*Unpin it first"):
        reshard.delete(store.location)
    assert reshard.read_tensor(store.location, "x").tolist() == [1, 1, 1]

    assert unpin(store)
    assert not unpin(store)
    reshard.delete(store.location)
    assert not Path(store.location).exists()


def test_what_is_being_deleted_is_neither_read_nor_pinned(store: LocalStore) -> None:
    (Path(store.location) / deletion_name()).write_bytes(deletion_text())

    with pytest.raises(CheckpointInUseError, match="is being deleted"):
        pin(store)
    with pytest.raises(CheckpointInUseError, match="is being deleted"), being_read(store):
        pass
    assert not is_pinned(store)


def test_there_must_be_a_checkpoint_to_pin(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint"):
        pin(LocalStore(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def test_a_reader_that_is_long_gone_keeps_nothing(store: LocalStore) -> None:
    left = Path(store.location) / DEAD
    left.write_bytes(b"")
    with pytest.raises(CheckpointInUseError, match="is being read"):
        reshard.delete(store.location)

    os.utime(left, (1000, 1000))
    reshard.delete(store.location)
    assert not Path(store.location).exists()

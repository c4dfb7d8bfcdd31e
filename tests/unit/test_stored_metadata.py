"""reshard.checkpoint.stored_metadata: metadata that reads itself from the checkpoint."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import reshard
from reshard.checkpoint.stored_metadata import StoredMetadata, can_be_read_back, refer_to
from reshard.metadata import Metadata


def save(path: Path, value: float = 1.0) -> tuple[reshard.FileSystemWriter, Metadata]:
    writer = reshard.FileSystemWriter(path)
    return writer, reshard.save({"w": torch.full((3,), value)}, storage_writer=writer)


def reference(path: Path) -> tuple[Metadata, Metadata]:
    writer, metadata = save(path)
    assert can_be_read_back(metadata)
    return refer_to(writer.open_store(), writer.save_id, writer.storage_meta()), metadata


def test_it_is_what_the_save_returned(tmp_path: Path) -> None:
    stored, metadata = reference(tmp_path)

    assert isinstance(stored, Metadata)
    assert isinstance(stored, StoredMetadata)
    assert list(stored.state_dict_metadata) == ["w"]
    assert stored == metadata
    assert type(stored) is Metadata


def test_it_is_equal_before_anybody_has_looked(tmp_path: Path) -> None:
    stored, metadata = reference(tmp_path)

    assert metadata == stored
    assert stored != Metadata({})


def test_its_repr_is_short_and_reads_nothing(tmp_path: Path) -> None:
    stored, _ = reference(tmp_path)
    shutil.rmtree(tmp_path)

    assert str(tmp_path) in repr(stored)
    assert len(repr(stored)) < 200 + len(str(tmp_path))


def test_it_travels_unread_and_can_be_replaced_and_changed(tmp_path: Path) -> None:
    stored, metadata = reference(tmp_path)
    copy = pickle.loads(pickle.dumps(stored))

    assert type(copy) is StoredMetadata
    assert dataclasses.replace(copy, version="x") == dataclasses.replace(metadata, version="x")
    stored.version = "y"
    assert stored == dataclasses.replace(metadata, version="y")


def test_a_writer_that_is_used_again_does_not_change_it(tmp_path: Path) -> None:
    writer, _ = save(tmp_path / "a")
    stored = refer_to(writer.open_store(), writer.save_id, writer.storage_meta())
    reshard.save({"v": 1}, checkpoint_id=tmp_path / "b", storage_writer=writer)

    assert list(stored.state_dict_metadata) == ["w"]


def test_a_checkpoint_that_was_replaced_is_refused(tmp_path: Path) -> None:
    stored, _ = reference(tmp_path)
    save(tmp_path, 2.0)

    with pytest.raises(reshard.CheckpointException, match=r"at .* was replaced: it is of save"):
        _ = stored.state_dict_metadata


def test_a_checkpoint_that_is_gone_is_refused(tmp_path: Path) -> None:
    stored, _ = reference(tmp_path / "x")
    shutil.rmtree(tmp_path / "x")

    with pytest.raises(reshard.CheckpointException, match="is gone, and its metadata with it"):
        _ = stored.planner_data

"""Small modules of DCP's that projects import from, compared with it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils as their_storages
from torch.distributed.checkpoint import _traverse as their_traverse
from torch.distributed.checkpoint import default_planner as their_planner
from torch.distributed.checkpoint import resharding as their_resharding

import reshard
from reshard import _checkpointer, _storage_utils, _traverse, _version, default_planner, resharding
from reshard.stores.local import LocalStore


def chunk(library: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    return library.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


BOXES = [((a, b), (c, d)) for a, b, c, d in itertools.product((0, 2), (1, 3), (1, 2), (1, 4))]


@pytest.mark.parametrize("one", BOXES)
def test_what_two_shards_have_in_common_is_what_dcp_says(one: Any) -> None:
    for other in BOXES:
        ours = chunk(reshard, *one), chunk(reshard, *other)
        theirs = chunk(dcp, *one), chunk(dcp, *other)
        overlap = their_resharding._check_shard_metadata_pair_overlap(*theirs)
        assert resharding._check_shard_metadata_pair_overlap(*ours) == overlap
        assert default_planner._check_box_overlap(*ours) == overlap
        assert resharding._shards_get_overlap_region_wrt_saved_tensor(
            *ours
        ) == their_resharding._shards_get_overlap_region_wrt_saved_tensor(*theirs)


@pytest.mark.parametrize("box", [*BOXES, ((-1, 0), (1, 1)), ((0, 0), (-1, 1))])
def test_whether_a_box_lies_within_a_shape_is_what_dcp_says(box: Any) -> None:
    for shape in itertools.product((1, 3, 4), (2, 4, 7)):
        found = default_planner._check_box_bounds(torch.Size(shape), chunk(reshard, *box))
        assert found == their_planner._check_box_bounds(torch.Size(shape), chunk(dcp, *box))


def test_a_state_dict_is_printed_as_dcp_prints_it() -> None:
    state = {"a": torch.ones(2), "b": {"c": [torch.ones(1), 3]}, "d": "text"}
    printed: list[list[str]] = []
    for library in (their_traverse, _traverse):
        lines: list[str] = []
        library.traverse_state_dict(
            state,
            lambda path, value, lib=library, to=lines: lib.print_tensor(path, value, to.append),
        )
        printed.append(lines)
    assert printed[0] == printed[1]
    assert len(printed[0]) == 4


def test_only_tensors_are_worth_a_look_into_a_list() -> None:
    assert _traverse._keep_visiting_tensors(torch.ones(1))
    assert not _traverse._keep_visiting_tensors([1])


def test_no_version_is_derived() -> None:
    assert _version._derived_version is None


# Choosing a storage


@pytest.mark.parametrize("name", ["new", "a/b/new", "ünï côdé", "a b%20c#d?e", "{x}", "s3:", "~"])
@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("reader", [False, True])
def test_any_path_that_is_not_there_yet_is_one_for_files(
    name: str, kind: type, reader: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (kind(tmp_path / name), kind(name)):
        monkeypatch.chdir(tmp_path)
        storage = _storage_utils._storage_setup(None, place, reader=reader)
        assert isinstance(storage, reshard.FileSystemReader if reader else reshard.FileSystemWriter)
        assert storage.checkpoint_id == Path(place)
        theirs = their_storages._storage_setup(None, place, reader=reader)
        assert type(theirs).__name__ == type(storage).__name__
    state = {"w": torch.ones(1)}
    reshard.save(state, checkpoint_id=kind(tmp_path / name))
    reshard.load(state, checkpoint_id=kind(tmp_path / name))
    assert not reader or LocalStore(tmp_path / name).list()


def test_a_storage_that_is_given_is_taken_and_told_the_place(tmp_path: Path) -> None:
    writer = reshard.FileSystemWriter(tmp_path / "a")
    assert _storage_utils._storage_setup(writer, None) is writer
    assert writer.path == tmp_path / "a"
    assert _storage_utils._storage_setup(writer, tmp_path / "b") is writer
    assert writer.path == tmp_path / "b"


@pytest.mark.parametrize("place", [None, "", "what://bucket/a"])
@pytest.mark.parametrize("reader", [False, True])
def test_a_place_that_no_storage_takes_is_refused(place: Any, reader: bool) -> None:
    for library in (their_storages, _storage_utils):
        with pytest.raises(RuntimeError):
            library._storage_setup(None, place, reader=reader)


def test_a_directory_that_may_only_be_read_is_a_place_for_files() -> None:
    # DCP asks whether a parent is writable, also to load.
    assert reshard.FileSystemReader.validate_checkpoint_id("/proc/1/c")


# The object that saves and loads


def test_a_checkpointer_saves_and_loads_at_one_place(tmp_path: Path) -> None:
    checkpointer = _checkpointer._Checkpointer(
        reshard.FileSystemWriter(tmp_path), reshard.FileSystemReader(tmp_path), no_dist=True
    )
    state = {"w": torch.ones(2)}
    assert checkpointer.save(state).state_dict_metadata["w"].size == (2,)
    checkpointer.async_save({"w": torch.full((2,), 2.0)}).result()
    checkpointer.load(state)
    torch.testing.assert_close(state["w"], torch.full((2,), 2.0))

"""File systems of users: their streams are what bytes go through."""

from __future__ import annotations

import dataclasses
import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.filesystem as theirs
from torch.distributed.checkpoint._extension import ZStandard

import reshard
from reshard import filesystem
from reshard.api import CheckpointExistsError, CommitConflictError
from reshard.filesystem import FileSystem, FileSystemBase
from reshard.planner import SavePlan
from reshard.stores.stream_store import StreamStore
from support.object_files import SCHEME, ListedObjects, ObjectReader, Objects, ObjectWriter
from support.ranks import run_ranks
from support.torch_version import needs_manifests_of_ranks

PLACE = f"{SCHEME}b/run/step-1"


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((300, 7), value), "b": torch.arange(3), "step": int(value)}


def empty() -> dict[str, Any]:
    return {"w": torch.zeros(300, 7), "b": torch.zeros(3, dtype=torch.int64), "step": 0}


@pytest.mark.parametrize("kind", [Objects, ListedObjects])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"thread_count": 4},
        {"single_file_per_rank": False},
        {"compress": "zstd"},
        {"extensions": [ZStandard()]},
    ],
    ids=["plain", "threads", "files", "compressed", "extensions"],
)
def test_a_checkpoint_goes_through_the_streams_of_a_user(
    kind: type[Objects], options: dict[str, Any], tmp_path: Path
) -> None:
    options = dict(options)
    extensions = options.pop("extensions", None)
    compress = options.pop("compress", None)
    writer = ObjectWriter(tmp_path, PLACE, kind, _extensions=extensions, **options)
    reader = ObjectReader(tmp_path, PLACE, kind)
    for value in (1.0, 2.0):
        reshard.save(state(value), storage_writer=writer, compress=compress)
        loaded = empty()
        reshard.load(loaded, storage_reader=reader, verify="full")
        torch.testing.assert_close(loaded, state(value))
    calls = writer.fs.calls  # type: ignore[attr-defined]
    assert any(call.startswith("wb __0_0") for call in calls)
    assert all(call.startswith("rb") for call in reader.fs.calls)  # type: ignore[attr-defined]
    assert f"{PLACE.removeprefix(SCHEME)}/.metadata" in Objects(tmp_path).all_keys()


def test_what_was_replaced_is_removed_where_it_can_be_listed(tmp_path: Path) -> None:
    for kind, most in ((ListedObjects, 2), (Objects, 3)):
        root = tmp_path / kind.__name__
        root.mkdir()
        for value in (1.0, 2.0):
            writer = ObjectWriter(root, PLACE, kind)
            reshard.save(state(value), storage_writer=writer)
        assert len(Objects(root).all_keys()) == most


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_background_save_goes_through_them_as_well(kind: str, tmp_path: Path) -> None:
    how = reshard.state_dict_saver.AsyncCheckpointerType(kind)
    writer = ObjectWriter(tmp_path, PLACE)
    saving: Any = reshard.async_save(state(), storage_writer=writer, async_checkpointer_type=how)
    saving.result()
    loaded = empty()
    reshard.load(loaded, storage_reader=ObjectReader(tmp_path, PLACE))
    torch.testing.assert_close(loaded, state())


def save_on_a_rank(root: str) -> None:
    own = {f"w{dist.get_rank()}": torch.full((2,), float(dist.get_rank())), "b": torch.ones(4)}
    writer = ObjectWriter(root, f"{SCHEME}elsewhere")
    metadata = reshard.save(own, storage_writer=writer, checkpoint_id=PLACE)
    assert len(metadata.state_dict_metadata) == 3
    loaded = {"w0": torch.zeros(2), "w1": torch.zeros(2)}
    reshard.load(loaded, storage_reader=ObjectReader(root, PLACE))
    assert [loaded["w0"][0].item(), loaded["w1"][0].item()] == [0.0, 1.0]


def test_all_ranks_use_the_file_system_of_their_writer(tmp_path: Path) -> None:
    run_ranks(2, save_on_a_rank, str(tmp_path))
    ranks = {key.rpartition("/")[2][:4] for key in Objects(tmp_path).all_keys()}
    assert ranks == {"__0_", "__1_", ".met"}


def test_a_writer_that_plans_names_of_its_own_still_saves(tmp_path: Path) -> None:
    class Prefixed(ObjectWriter):
        def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
            prefix = filesystem._StoragePrefix("0011/__0_")
            return [dataclasses.replace(plan, storage_data=prefix) for plan in plans]

    reshard.save(state(), storage_writer=Prefixed(tmp_path, PLACE))
    loaded = empty()
    reshard.load(loaded, storage_reader=ObjectReader(tmp_path, PLACE))
    torch.testing.assert_close(loaded, state())


def test_a_checkpoint_in_a_bucket_is_not_overwritten_against_its_will(tmp_path: Path) -> None:
    reshard.save(state(), storage_writer=ObjectWriter(tmp_path, PLACE))
    with pytest.raises(CheckpointExistsError):
        reshard.save(state(2.0), storage_writer=ObjectWriter(tmp_path, PLACE, overwrite=False))


def test_a_save_that_was_overtaken_in_a_bucket_says_so(tmp_path: Path) -> None:
    class Overtaken(ObjectWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            reshard.save(state(2.0), storage_writer=ObjectWriter(tmp_path, PLACE))
            return written

    with pytest.raises(CommitConflictError):
        reshard.save(state(1.0), storage_writer=Overtaken(tmp_path, PLACE))
    loaded = empty()
    reshard.load(loaded, storage_reader=ObjectReader(tmp_path, PLACE))
    torch.testing.assert_close(loaded, state(2.0))


def test_an_upload_that_fails_fails_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    class Full(Objects):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            with super().create_stream(path, mode) as stream:
                if "safetensors" in str(path):
                    stream.write = self._refuse
                yield stream

        def _refuse(self, data: Any) -> int:
            raise OSError("the bucket is full")

    with pytest.raises(reshard.CheckpointException, match="the bucket is full"):
        reshard.save(state(), storage_writer=ObjectWriter(tmp_path, PLACE, Full))
    assert Objects(tmp_path).all_keys() == []


def test_a_subclass_of_the_local_file_system_is_asked_for_its_streams(tmp_path: Path) -> None:
    opened = []

    class Watched(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            opened.append(mode)
            with super().create_stream(path, mode) as stream:
                yield stream

    writer = reshard.FileSystemWriter(tmp_path / "c")
    writer.fs = Watched()
    reshard.save(state(), storage_writer=writer)
    assert "wb" in opened
    loaded = empty()
    reshard.load(loaded, checkpoint_id=tmp_path / "c")
    torch.testing.assert_close(loaded, state())


# The store


@pytest.fixture
def store(tmp_path: Path) -> StreamStore:
    return StreamStore(ListedObjects(tmp_path), PLACE)


def test_early_pieces_wait_for_those_before_them(store: StreamStore) -> None:
    data = os.urandom(400)
    writer = store.open_writer("a", 400)
    pieces = [memoryview(data)[begin : begin + 100] for begin in (300, 100, 200, 0)]
    threads = [
        threading.Thread(target=writer.write, args=(begin, [piece]))
        for begin, piece in zip((300, 100, 200, 0), pieces, strict=True)
    ]
    for thread in threads:
        thread.start()
        thread.join()
    writer.close()
    reader = store.open_reader("a")
    found = bytearray(400)
    reader.read_into(0, [memoryview(found)])
    reader.close()
    assert bytes(found) == data


@pytest.mark.parametrize("nbytes", [10, None])
def test_a_file_with_a_gap_is_not_there(nbytes: int | None, store: StreamStore) -> None:
    writer = store.open_writer("a", nbytes)
    writer.write(5, [memoryview(b"12345")])
    writer.close()
    assert store.list() == []


def test_bytes_that_were_passed_on_cannot_be_written_again(store: StreamStore) -> None:
    writer = store.open_writer("a", 4)
    writer.write(0, [memoryview(b"1234")])
    with pytest.raises(OSError, match="twice"):
        writer.write(2, [memoryview(b"12")])
    writer.close()


def test_a_place_in_another_bucket_or_scheme_is_told_from_this_one(store: StreamStore) -> None:
    assert store.relative(f"{SCHEME}b/run/step-0") == "../step-0"
    assert store.relative(f"{SCHEME}c/run") == "../../../c/run"
    assert store.at("../../../c/run").location == f"{SCHEME}c/run"
    for other in ("s3://b/run/step-0", f"{PLACE}/inner"):
        with pytest.raises(ValueError, match="step-"):
            store.relative(other)


def test_a_file_system_that_renames_over_nothing_is_cleared_first(tmp_path: Path) -> None:
    class Strict(ListedObjects):
        def rename(self, path: Any, new_path: Any) -> None:
            if self.exists(new_path):
                raise FileExistsError(new_path)
            super().rename(path, new_path)

    store = StreamStore(Strict(tmp_path), PLACE)
    for content in (b"first", b"second"):
        writer = store.open_writer("draft", 0)
        writer.close()
        store.commit("draft", "m", content, store.version("m"))
    assert store.list() == ["m"]


def test_without_a_listing_only_what_is_known_is_listed(tmp_path: Path) -> None:
    store = StreamStore(Objects(tmp_path), PLACE, probed=("m",))
    Objects(tmp_path)._file(f"{PLACE}/other").write_bytes(b"1")
    assert store.list() == []
    Objects(tmp_path)._file(f"{PLACE}/m").write_bytes(b"1")
    assert store.list() == ["m"]
    with pytest.raises(OSError, match="ls"):
        store.neighbours()


# The contract and its local implementation


def test_the_local_file_system_does_what_that_of_dcp_does(tmp_path: Path) -> None:
    results = []
    for library in (theirs, filesystem):
        fs: Any = library.FileSystem()
        root = fs.init_path(str(tmp_path / library.__name__))
        fs.mkdir(fs.concat_path(root, "a/b"))
        fs.mkdir(fs.concat_path(root, "a/b"))
        with fs.create_stream(fs.concat_path(root, "x"), "wb") as stream:
            stream.write(b"123")
        fs.rename(fs.concat_path(root, "x"), fs.concat_path(root, "y"))
        with fs.create_stream(fs.concat_path(root, "y"), "rb") as stream:
            content = stream.read()
        listed = sorted(Path(each).name for each in fs.ls(root))
        fs.rm_file(fs.concat_path(root, "y"))
        gone = fs.exists(fs.concat_path(root, "y")), fs.exists(str(root))
        results.append((type(root), content, listed, gone))
    assert results[0] == results[1]


def test_a_file_system_must_have_all_methods_of_the_contract() -> None:
    class Half(FileSystemBase):
        def exists(self, path: Any) -> bool:
            return False

    with pytest.raises(TypeError, match="create_stream"):
        Half()  # type: ignore[abstract]


@needs_manifests_of_ranks
@pytest.mark.parametrize("rank", [None, 3])
def test_the_manifest_has_the_path_that_dcp_gives_it(rank: int | None, tmp_path: Path) -> None:
    for ours, other in (
        (reshard.FileSystemWriter(tmp_path), theirs.FileSystemWriter(tmp_path)),
        (reshard.FileSystemReader(tmp_path), theirs.FileSystemReader(tmp_path)),
    ):
        assert ours._get_metadata_path(rank) == other._get_metadata_path(rank)
    bucket = ObjectWriter(tmp_path, PLACE)
    assert bucket._get_metadata_path() == f"{PLACE}/.metadata"


def test_a_slice_of_a_file_is_a_file(tmp_path: Path) -> None:
    reader = reshard.FileSystemReader(tmp_path)
    whole = io.BytesIO(bytes(range(100)))
    part = reader._slice_file(whole, filesystem._StorageInfo("a", 10, 20))
    assert part.read() == bytes(range(10, 30))
    assert part.seek(-5, os.SEEK_END) == 15
    assert part.read(99) == bytes(range(25, 30))
    tensor = torch.arange(5)
    torch.save(tensor, saved := io.BytesIO())
    padded = io.BytesIO(b"\0" * 7 + saved.getvalue() + b"\0" * 9)
    sliced = reader._slice_file(padded, filesystem._StorageInfo("a", 7, len(saved.getvalue())))
    torch.testing.assert_close(torch.load(sliced, weights_only=True), tensor)


@pytest.mark.parametrize("kind", [Objects, ListedObjects])
def test_what_is_special_of_a_save_or_load_works_through_streams_too(
    kind: type[Objects], tmp_path: Path
) -> None:
    writer, reader = ObjectWriter(tmp_path, PLACE, kind), ObjectReader(tmp_path, PLACE, kind)
    with pytest.raises(reshard.api.CheckpointNotFoundError):
        reshard.load(empty(), storage_reader=reader)
    reshard.save(state(), storage_writer=writer, use_collectives=False)
    loaded = empty()
    reshard.load(loaded, storage_reader=reader, assign=True)
    torch.testing.assert_close(loaded, state())
    later = f"{SCHEME}b/run/step-2"
    reshard.save(state(), storage_writer=writer, checkpoint_id=later, base=PLACE)
    loaded = empty()
    reshard.load(loaded, storage_reader=reader, checkpoint_id=later)
    torch.testing.assert_close(loaded, state())


def test_streams_that_only_go_forward_are_refused_with_what_to_do(tmp_path: Path) -> None:
    class Forward(Objects):
        """As readers that are made for the records of DCP alone."""

        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            with super().create_stream(path, mode) as stream:
                if mode == "rb" and "safetensors" in str(path):
                    stream = io.BufferedReader(OnlyForward(stream.read()))
                yield stream

    class OnlyForward(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self._data = io.BytesIO(data)

        def readable(self) -> bool:
            return True

        def seekable(self) -> bool:
            return True

        def seek(self, offset: int, whence: int = 0) -> int:
            if whence == os.SEEK_END:
                raise ValueError("whence must be SEEK_CUR or SEEK_SET integers")
            return self._data.seek(offset, whence)

        def readinto(self, buffer: Any) -> int:
            return self._data.readinto(buffer)

    reshard.save(state(), storage_writer=ObjectWriter(tmp_path, PLACE))
    with pytest.raises(reshard.CheckpointException, match="cannot seek to the end"):
        reshard.load(empty(), storage_reader=ObjectReader(tmp_path, PLACE, Forward))

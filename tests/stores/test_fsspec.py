"""Checkpoints at URLs that fsspec knows, under the names of DCP and by their URL alone."""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import logging
import os
import pickle
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _fsspec_filesystem as theirs

import reshard
from reshard import fsspec_filesystem
from reshard.api import CheckpointExistsError, CheckpointNotFoundError, CommitConflictError
from reshard.fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from reshard.logger import _get_msg_dict
from reshard.state_dict_saver import AsyncCheckpointerType
from reshard.stores.local import LocalStore
from reshard.stores.places import open_place
from reshard.stores.urls import path_of, without_secrets
from support.fsspec_bucket import Bucket, installed_bucket
from support.ranks import run_ranks


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((300, 70), value), "b": torch.arange(3), "step": int(value)}


def empty() -> dict[str, Any]:
    return {"w": torch.zeros(300, 70), "b": torch.zeros(3, dtype=torch.int64), "step": 0}


@pytest.fixture
def bucket() -> Iterator[str]:
    """A place in a file system whose files count when they are closed."""
    with installed_bucket():
        yield "bucketfs://b/run/step-1"


@pytest.fixture(params=["memory", "file", "bucketfs"])
def url(request: pytest.FixtureRequest, tmp_path: Path, bucket: str) -> str:
    places = {
        "memory": f"memory://{uuid.uuid4()}/step-1",
        "file": (tmp_path / "with [odd] *names" / "step-1").as_posix().join(["file://", ""]),
        "bucketfs": bucket,
    }
    return places[request.param]


# By the URL alone


def test_a_url_is_a_place_for_every_call(url: str) -> None:
    for value in (1.0, 2.0):
        reshard.save(state(value), checkpoint_id=url)
        loaded = empty()
        reshard.load(loaded, checkpoint_id=url, verify="full")
        torch.testing.assert_close(loaded, state(value))
    torch.testing.assert_close(reshard.read_state_dict(url), state(2.0))
    part = reshard.read_tensor(url, "w", (slice(3, 5), slice(1, 60)))
    torch.testing.assert_close(part, torch.full((2, 59), 2.0))
    with pytest.raises(CheckpointNotFoundError):
        reshard.load(empty(), checkpoint_id=f"{url}-missing")


def test_a_background_save_goes_to_a_url_and_a_load_waits_for_it(url: str) -> None:
    reshard.async_save(state(3.0), checkpoint_id=url)
    torch.testing.assert_close(reshard.read_state_dict(url), state(3.0))


@pytest.mark.slow
def test_a_process_saves_to_a_url(tmp_path: Path) -> None:
    place = (tmp_path / "c").as_uri()
    saving: Any = reshard.async_save(
        state(), checkpoint_id=place, async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    saving.result()
    torch.testing.assert_close(reshard.read_state_dict(place), state())


@pytest.mark.parametrize("way", ["url", "writer", "cache"])
def test_memory_is_refused_to_another_process_before_anything_is_saved(way: str) -> None:
    place = f"memory://{uuid.uuid4()}/c"
    options: dict[str, Any] = {"checkpoint_id": place}
    if way == "writer":
        options = {"storage_writer": FsspecWriter(place)}
    if way == "cache":
        options = {"checkpoint_id": f"simplecache::{place}"}
    with pytest.raises(ValueError, match=r"memory of this process.*THREAD"):
        reshard.async_save(
            state(), async_checkpointer_type=AsyncCheckpointerType.PROCESS, **options
        )
    reshard.close()


def test_a_base_beside_a_url_is_referred_to(url: str) -> None:
    reshard.save(state(), checkpoint_id=url)
    later = url.replace("step-1", "step-2")
    reshard.async_save(state() | {"step": 2}, checkpoint_id=later, base=url).result()  # type: ignore[union-attr]
    torch.testing.assert_close(reshard.read_state_dict(later), state() | {"step": 2})
    # All tensors are in the base.
    stores = [open_place(each) for each in (url, later)]
    bytes_of = [
        sum(store.open_reader(key).nbytes for key in store.list() if key.startswith("__"))
        for store in stores
    ]
    assert bytes_of[1] < bytes_of[0] / 10


def test_a_base_on_another_file_system_is_refused(bucket: str, tmp_path: Path) -> None:
    reshard.save(state(), checkpoint_id=tmp_path / "base")
    with pytest.raises(reshard.CheckpointException, match="not on one file system"):
        reshard.save(state(), checkpoint_id=bucket, base=tmp_path / "base")
    assert Bucket.objects == {}


def test_a_file_of_hugging_face_is_read_from_a_url(bucket: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"w": torch.arange(20.0)}, tmp_path / "model.safetensors")
    Bucket.objects["b/hf/model.safetensors"] = (tmp_path / "model.safetensors").read_bytes()
    for place in ("bucketfs://b/hf", "bucketfs://b/hf/model.safetensors"):
        torch.testing.assert_close(reshard.read_tensor(place, "w"), torch.arange(20.0))


def test_checkpoints_at_urls_are_converted_made_whole_and_deleted(url: str) -> None:
    later, whole, other = (url.replace("step-1", name) for name in ("step-2", "whole", "other"))
    reshard.save(state(), checkpoint_id=url)
    reshard.save(state() | {"step": 2}, checkpoint_id=later, base=url)
    with pytest.raises(reshard.CheckpointException, match="step-2"):
        reshard.delete(url)
    reshard.materialise(later)
    reshard.delete(url)
    reshard.convert(later, whole, format="reshard")
    reshard.convert(later, other, format="dcp")
    for place in (later, whole, other):
        torch.testing.assert_close(reshard.read_state_dict(place), state() | {"step": 2})
    with pytest.raises(CheckpointNotFoundError):
        reshard.read_state_dict(url)


def test_a_url_of_a_file_is_the_path_that_it_means(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/c"
    saving: Any = reshard.async_save(state(), checkpoint_id=place)
    # A load of the path waits for the save to the URL.
    torch.testing.assert_close(reshard.read_state_dict(tmp_path / "c"), state())
    saving.result()
    assert isinstance(FsspecReader(place).open_store(), LocalStore)
    assert sorted(each.name[:4] for each in (tmp_path / "c").iterdir()) == [".met", "__0_"]


def save_on_a_rank(place: str) -> None:
    own = {f"w{dist.get_rank()}": torch.full((2,), float(dist.get_rank())), "b": torch.ones(4)}
    metadata = reshard.save(own, checkpoint_id=place)
    assert len(metadata.state_dict_metadata) == 3
    loaded = {"w0": torch.zeros(2), "w1": torch.zeros(2)}
    reshard.load(loaded, checkpoint_id=place)
    assert [loaded["w0"][0].item(), loaded["w1"][0].item()] == [0.0, 1.0]


def test_ranks_save_together_to_a_url(tmp_path: Path) -> None:
    run_ranks(2, save_on_a_rank, f"file://{tmp_path}/c")
    assert {each.name[:4] for each in (tmp_path / "c").iterdir()} == {"__0_", "__1_", ".met"}


# Options and secrets


def test_options_reach_the_file_system_in_every_call(bucket: str) -> None:
    options = {"endpoint": "here", "secret": "s3cr3t"}
    reshard.save(state(), checkpoint_id=bucket, storage_options=options)
    reshard.load(empty(), checkpoint_id=bucket, storage_options=options)
    reshard.read_state_dict(bucket, storage_options=options)
    reshard.read_tensor(bucket, "w", storage_options=options)
    reshard.async_save(state(), checkpoint_id=bucket, storage_options=options).result()  # type: ignore[union-attr]
    writer, reader = FsspecWriter(bucket, **options), FsspecReader(bucket, **options)
    # DCP forgets them when a call names another place.
    reshard.save(state(), storage_writer=writer, checkpoint_id="bucketfs://b/other")
    reshard.load(empty(), storage_reader=reader, checkpoint_id="bucketfs://b/other")
    # One for each thread, as fsspec has it.
    assert Bucket.options == [{"host": "", **options}] * 2


def test_options_that_would_have_no_effect_are_refused(bucket: str, tmp_path: Path) -> None:
    for arguments in ({"storage_writer": FsspecWriter(bucket)}, {"checkpoint_id": tmp_path / "c"}):
        with pytest.raises(ValueError, match="storage_options are for"):
            reshard.save(state(), storage_options={"a": 1}, **arguments)
    assert Bucket.objects == {}
    assert not (tmp_path / "c").exists()


SECRET = "pa:ss@word"
WITH_SECRET = f"bucketfs://someone:{SECRET}@b/run/step-1"


def test_a_password_is_used_and_never_shown(
    bucket: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    metadata = reshard.save(state(), checkpoint_id=WITH_SECRET)
    reshard.save(state(), checkpoint_id=WITH_SECRET, format="dcp")
    reshard.save(state(), checkpoint_id=f"{WITH_SECRET}-2")
    reshard.save(state(2.0), checkpoint_id=f"{WITH_SECRET}-3", base=f"{WITH_SECRET}-2")
    assert {"host": "", "username": "someone", "password": SECRET} in Bucket.options
    writer, reader = FsspecWriter(WITH_SECRET), FsspecReader(WITH_SECRET)
    shown += [repr(metadata), repr(reader.read_metadata()), repr(writer), repr(writer.open_store())]
    for wrong in (
        lambda: reshard.load(empty(), checkpoint_id=f"{WITH_SECRET}-missing"),
        lambda: reshard.load({"x": torch.ones(1)}, checkpoint_id=WITH_SECRET),
        lambda: reshard.read_tensor(WITH_SECRET, "missing"),
        lambda: reshard.save(state(), storage_writer=FsspecWriter(WITH_SECRET, overwrite=False)),
        lambda: reshard.save(state(), checkpoint_id=WITH_SECRET, base=WITH_SECRET),
        lambda: reshard.save(state(), checkpoint_id=WITH_SECRET.replace("bucketfs", "nosuch")),
        lambda: reshard.save({"w": Unpicklable()}, checkpoint_id=WITH_SECRET),
    ):
        with pytest.raises(Exception) as caught:
            wrong()
        shown.append(f"{caught.value}{caught.value!r}{caught.getrepr(style='short')}")
    Bucket.failing = "begin"
    future: Any = reshard.async_save(state(), checkpoint_id=WITH_SECRET)
    shown.append(repr(future.exception()))
    # What listeners to events are told.
    shown.append(str(_get_msg_dict("save", checkpoint_id=WITH_SECRET)))
    shown += [record.getMessage() for record in caplog.records]
    shown += [str(data) for data in Bucket.objects.values()]
    shown += capfd.readouterr()
    assert [each for each in shown if SECRET in each or "ss@word" in each] == []
    assert any("someone@b/run/step-1" in each for each in shown)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("sftp://user:pw@host/x", "sftp://user@host/x"),
        ("sftp://user:p@w:1@host:22/x", "sftp://user@host:22/x"),
        ("simplecache::ftp://u:p@h/x:y@z", "simplecache::ftp://u@h/x:y@z"),
        ("sftp://user@host:22/x", "sftp://user@host:22/x"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("/a:b@c", "/a:b@c"),
    ],
)
def test_only_the_password_is_taken_from_a_url(place: str, expected: str) -> None:
    assert without_secrets(place) == expected


def test_only_urls_of_files_are_paths() -> None:
    assert path_of("file:///a/b") == path_of("local:///a/b") == path_of(Path("/a/b")) == "/a/b"
    assert path_of("memory://a/file://") == "memory://a/file://"


# What is not there


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] in ("gcsfs", "paramiko"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for place, package in (("gcs://b/x", "gcsfs"), ("sftp://h/x", "paramiko")):
        with pytest.raises(ImportError, match=f"pip install {package}"):
            FsspecWriter(place)
    with pytest.raises(ImportError, match="pip install paramiko"):
        reshard.save(state(), checkpoint_id="sftp://user:pw@h/x")


def test_without_fsspec_a_url_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, *args: Any) -> Any:
        if name == "fsspec":
            raise ModuleNotFoundError("No module named 'fsspec'", name=name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", without)
    for call in (reshard.save, reshard.load):
        with pytest.raises(ImportError, match=r"pip install 'reshard\[fsspec\]'"):
            call(state(), checkpoint_id="memory://x")


@pytest.mark.parametrize("place", ["nosuch://a/b", "nosuch::memory://a/b"])
def test_a_scheme_that_nobody_knows_is_refused(place: str) -> None:
    for call in (reshard.save, reshard.load):
        with pytest.raises(RuntimeError, match="a kind that reshard does not know"):
            call(state(), checkpoint_id=place)


# Faults


@pytest.mark.parametrize("failing", ["begin", "part", "finish", "copy"])
def test_a_save_that_fails_leaves_no_upload_and_the_checkpoint_that_was_there(
    failing: str, bucket: str
) -> None:
    reshard.save(state(1.0), checkpoint_id=bucket)
    before = dict(Bucket.objects)
    Bucket.failing = failing
    with pytest.raises(reshard.CheckpointException, match=f"{failing} failed"):
        reshard.save(state(2.0), checkpoint_id=bucket)
    Bucket.failing = ""
    gc.collect()
    assert Bucket.objects == before
    assert Bucket.uploads == set()
    torch.testing.assert_close(reshard.read_state_dict(bucket), state(1.0))


def test_a_place_that_was_made_for_a_save_that_fails_is_gone(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    place = f"memory://{uuid.uuid4()}/runs/c"
    with pytest.raises(reshard.CheckpointException):
        reshard.save({"w": torch.ones(2), "x": Unpicklable()}, checkpoint_id=place)
    assert not fsspec.filesystem("memory").exists(place)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("it cannot be stored")


def test_a_read_that_is_cut_short_is_noticed(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reshard.save(state(), checkpoint_id=bucket)
    real = Bucket.cat_file

    def truncated(self: Bucket, *args: Any, **kwargs: Any) -> bytes:
        return real(self, *args, **kwargs)[:-1]

    monkeypatch.setattr(Bucket, "cat_file", truncated)
    store = open_place(bucket)
    (shard,) = [key for key in store.list() if key.startswith("__")]
    reader = store.open_reader(shard)
    with pytest.raises(OSError, match="the file ends at 70099"):
        reader.read_into(100, [memoryview(bytearray(70_000))])
    with pytest.raises(reshard.CheckpointException):
        reshard.load(empty(), checkpoint_id=bucket)


def test_a_save_that_was_overtaken_says_so(bucket: str) -> None:
    class Overtaken(FsspecWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            reshard.save(state(2.0), checkpoint_id=bucket)
            return written

    with pytest.raises(CommitConflictError):
        reshard.save(state(1.0), storage_writer=Overtaken(bucket))
    torch.testing.assert_close(reshard.read_state_dict(bucket), state(2.0))


def test_a_place_that_cannot_be_reached_is_named_without_its_secrets(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Bucket, **kwargs: Any) -> None:
        raise RuntimeError(f"no login with {kwargs}")

    monkeypatch.setattr(Bucket, "__init__", refuse)
    with pytest.raises(ConnectionError, match=r"someone@b.* cannot be opened") as caught:
        reshard.save(state(), checkpoint_id=WITH_SECRET)
    assert SECRET not in str(caught.getrepr(style="long"))
    with pytest.raises(ConnectionError) as caught:
        reshard.save(state(), checkpoint_id=bucket, storage_options={"api_key": SECRET})
    assert SECRET not in str(caught.value)
    with pytest.raises(ConnectionError, match="no login with"):
        reshard.save(state(), checkpoint_id=bucket, storage_options={"region": "here"})


def test_nothing_is_uploaded_of_a_file_in_a_cache_whose_writing_failed(bucket: str) -> None:
    fs = FileSystem()
    place = fs.init_path(f"simplecache::{bucket}")
    with contextlib.suppress(KeyError), fs.create_stream(f"{place}/x", "wb") as opened:
        opened.write(b"123")
        raise KeyError
    gc.collect()
    assert Bucket.objects == {}


# The store


def test_large_files_are_read_by_exact_ranges(bucket: str) -> None:
    data = os.urandom(1 << 20)
    Bucket.objects["b/x"] = data
    reader = open_place("bucketfs://b").open_reader("x")
    Bucket.calls.clear()
    found = [bytearray(10), bytearray(0), bytearray(300_000)]
    reader.read_into(17, [memoryview(each) for each in found])
    assert b"".join(found) == data[17 : 17 + 300_010]
    assert [call for call in Bucket.calls if "range" in call] == ["range of 300010"]


def test_where_a_file_cannot_be_copied_it_is_written_again(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(Bucket, "cp_file", cannot)
    for value in (1.0, 2.0):
        reshard.save(state(value), checkpoint_id=bucket)
    torch.testing.assert_close(reshard.read_state_dict(bucket), state(2.0))
    assert len(Bucket.objects) == 2


def test_a_file_system_that_moves_over_nothing_is_cleared_first(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def move(self: Bucket, path1: str, path2: str, **kwargs: Any) -> None:
        if path2 in self.objects:
            raise FileExistsError(path2)
        self.objects[path2] = self.objects.pop(path1)

    monkeypatch.setattr(Bucket, "mv", move)
    for value in (1.0, 2.0):
        reshard.save(state(value), checkpoint_id=bucket)
    torch.testing.assert_close(reshard.read_state_dict(bucket), state(2.0))


def test_without_times_and_tags_a_stamp_is_never_the_same(bucket: str) -> None:
    Bucket.objects["b/x"] = b"1"
    store = open_place("bucketfs://b")
    assert store.stamp("x") != store.stamp("x")
    assert store.modified("x") is None


def test_the_same_path_on_another_host_is_another_place() -> None:
    store = open_place("memory://a/b")
    assert store.relative("memory:///a/c") == "../c"
    for other in ("sftp://a/c", "/a/c", "simplecache::memory://a/c", "memory://a/b/c"):
        with pytest.raises(ValueError, match="a/"):
            store.relative(other)


# As torch's own


def test_torch_loads_what_is_saved_for_it_with_its_own_reader(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/c"
    reshard.save(state(), storage_writer=FsspecWriter(place), format="dcp")
    loaded = empty()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(loaded, storage_reader=theirs.FsspecReader(place))
    torch.testing.assert_close(loaded, state())


@pytest.mark.parametrize("place", ["memory", "file"])
def test_what_torch_saved_with_its_writer_loads(place: str, tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4()}/c" if place == "memory" else f"file://{tmp_path}/c"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state(), storage_writer=theirs.FsspecWriter(url, sync_files=False))
    loaded = empty()
    reshard.load(loaded, storage_reader=FsspecReader(url))
    torch.testing.assert_close(loaded, state())


def test_the_writer_takes_plain_paths_and_the_arguments_of_dcp(tmp_path: Path) -> None:
    writer = FsspecWriter(str(tmp_path / "c"), False, True, 3, 1000, False, None)
    reshard.save(state(), storage_writer=writer)
    loaded = empty()
    reshard.load(loaded, storage_reader=FsspecReader(str(tmp_path / "c")))
    torch.testing.assert_close(loaded, state())
    assert len(list((tmp_path / "c").glob("__0_*"))) == 3
    with pytest.raises(CheckpointExistsError):
        reshard.save(state(2.0), storage_writer=writer)


def test_a_second_save_replaces_the_first_if_it_may(url: str) -> None:
    reshard.save(state(1.0), storage_writer=FsspecWriter(url, overwrite=True))
    reshard.save(state(2.0), storage_writer=FsspecWriter(url, overwrite=True))
    loaded = empty()
    reshard.load(loaded, storage_reader=FsspecReader(url))
    torch.testing.assert_close(loaded, state(2.0))
    with pytest.raises(CheckpointExistsError):
        reshard.save(state(3.0), storage_writer=FsspecWriter(url, overwrite=False))


@pytest.mark.parametrize(
    "place", ["memory://a", "file:///a", "/a/b", "a", Path("/a"), "nosuch://a", "ftp://host/x"]
)
def test_places_are_accepted_as_dcp_accepts_them(place: Any) -> None:
    ours = [kind.validate_checkpoint_id(place) for kind in (FsspecWriter, FsspecReader, FileSystem)]
    expected = place == "ftp://host/x" or theirs.FileSystem.validate_checkpoint_id(place)
    # Theirs connects to find out.
    assert ours == [expected] * 3


@pytest.mark.parametrize("scheme", ["memory://", "file://"])
def test_the_file_system_does_what_that_of_dcp_does(scheme: str, tmp_path: Path) -> None:
    results = []
    for library in (theirs, fsspec_filesystem):
        fs: Any = library.FileSystem()
        root = fs.init_path(f"{scheme}{tmp_path}/{library.__name__}")
        fs.mkdir(fs.concat_path(root, "a/b"))
        fs.mkdir(fs.concat_path(root, "a/b"))
        with fs.create_stream(fs.concat_path(root, "x"), "wb") as stream:
            stream.write(b"123")
        with contextlib.suppress(KeyError), fs.create_stream(f"{root}/z", "wb") as stream:
            stream.write(b"123")
            raise KeyError
        fs.rename(fs.concat_path(root, "x"), fs.concat_path(root, "y"))
        with fs.create_stream(fs.concat_path(root, "y"), "rb") as stream:
            content = stream.read()
        listed = sorted(Path(each).name for each in fs.ls(root))
        fs.rm_file(fs.concat_path(root, "y"))
        gone = fs.exists(fs.concat_path(root, "y")), fs.exists(root)
        results.append((type(root), content, listed, gone))
    assert results[0] == results[1]


def test_a_subclass_with_streams_of_its_own_is_asked_for_them(tmp_path: Path) -> None:
    opened = []

    class Watched(FileSystem):
        def create_stream(self, path: Any, mode: str) -> Any:
            opened.append(mode)
            return super().create_stream(path, mode)

    writer = FsspecWriter(f"file://{tmp_path}/c")
    writer.fs = Watched()
    writer.path = writer.fs.init_path(f"file://{tmp_path}/c")
    reshard.save(state(), storage_writer=writer)
    assert "wb" in opened
    torch.testing.assert_close(reshard.read_state_dict(tmp_path / "c"), state())


def test_writers_and_readers_can_be_sent_to_another_process(bucket: str) -> None:
    writer = pickle.loads(pickle.dumps(FsspecWriter(bucket, endpoint="here")))
    reshard.save(state(), storage_writer=writer)
    loaded = empty()
    reshard.load(loaded, storage_reader=pickle.loads(pickle.dumps(FsspecReader(bucket))))
    torch.testing.assert_close(loaded, state())


def test_a_patch_covers_the_module_that_torch_has() -> None:
    with reshard.patch():
        patched = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
        assert patched.FsspecWriter is FsspecWriter
    again = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
    assert again.FsspecWriter is theirs.FsspecWriter

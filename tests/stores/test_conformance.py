"""What every store must do: one class of tests, one subclass for each store."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from reshard.stores.file_systems import FileSystem
from reshard.stores.fsspec_store import Connection, FsspecStore, file_system
from reshard.stores.local import LOCK_FILE, LocalStore
from reshard.stores.memory import MemoryStore
from reshard.stores.objects import ObjectStore
from reshard.stores.places import open_place
from reshard.stores.protocol import Mappable, Store, VersionConflict
from reshard.stores.stream_store import StreamStore
from support.failing_system import refusing
from support.faulty_proxy import FaultyProxy, seeded
from support.object_files import SCHEME, ListedObjects
from support.object_servers import Place


def put(store: Store, key: str, data: bytes) -> None:
    writer = store.open_writer(key, len(data))
    writer.write(0, [memoryview(data)])
    writer.sync()
    writer.close()


def publish(store: Store, data: bytes) -> str:
    """Commit in place of whatever is there."""
    put(store, "draft", b"")
    return store.commit("draft", ".metadata", data, store.version(".metadata"))


def get(
    store: Store, key: str, offset: int = 0, nbytes: int | None = None, ahead: int = 0
) -> bytes:
    reader = store.open_reader(key, ahead)
    try:
        buffer = bytearray(reader.nbytes - offset if nbytes is None else nbytes)
        reader.read_into(offset, [memoryview(buffer)])
        return bytes(buffer)
    finally:
        reader.close()


class StoreTests:
    """Subclasses give a `store` fixture: a place that is not made yet."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        raise NotImplementedError

    def test_a_place_that_was_not_made_has_no_keys(self, store: Store) -> None:
        assert store.list() == []

    def test_a_place_may_be_made_twice_and_keeps_its_files(self, store: Store) -> None:
        store.create()
        put(store, "a", b"1")
        store.create()

        assert store.list() == ["a"]

    def test_the_place_has_a_name_for_people(self, store: Store) -> None:
        assert isinstance(store.location, str)
        assert store.location

    def test_what_was_written_is_read_back(self, store: Store) -> None:
        store.create()
        data = os.urandom(100_003)
        put(store, "__0_0.safetensors", data)

        assert get(store, "__0_0.safetensors") == data

    def test_any_range_can_be_read(self, store: Store) -> None:
        store.create()
        data = os.urandom(1000)
        put(store, "a", data)

        for offset, nbytes in [(0, 1), (999, 1), (1, 998), (500, 0), (1000, 0), (0, 1000)]:
            assert get(store, "a", offset, nbytes) == data[offset : offset + nbytes]

    def test_a_range_can_be_read_into_several_buffers(self, store: Store) -> None:
        store.create()
        data = os.urandom(100)
        put(store, "a", data)
        buffers = [bytearray(3), bytearray(0), bytearray(7), bytearray(1)]
        reader = store.open_reader("a")
        reader.read_into(10, [memoryview(buffer) for buffer in buffers])
        reader.close()

        assert b"".join(buffers) == data[10:21]

    def test_ranges_can_be_written_in_any_order(self, store: Store) -> None:
        store.create()
        data = os.urandom(300)
        writer = store.open_writer("a", 300)
        writer.write(200, [memoryview(data)[200:]])
        writer.write(0, [memoryview(data)[:50], memoryview(b""), memoryview(data)[50:100]])
        writer.write(100, [memoryview(data)[100:200]])
        writer.close()

        assert get(store, "a") == data

    def test_a_file_of_unknown_size_is_as_long_as_what_was_written(self, store: Store) -> None:
        store.create()
        data = os.urandom(3000)
        writer = store.open_writer("a", None)
        writer.write(1000, [memoryview(data)[1000:2000]])
        writer.write(2000, [memoryview(data)[2000:]])
        writer.write(0, [memoryview(data)[:1000]])
        writer.close()

        assert get(store, "a") == data

    def test_more_buffers_than_the_system_takes_at_once_are_written_and_read(
        self, store: Store
    ) -> None:
        store.create()
        count = 2 * os.sysconf("SC_IOV_MAX") + 17
        data = os.urandom(3 * count)
        writer = store.open_writer("a", len(data))
        writer.write(0, [memoryview(data)[i : i + 3] for i in range(0, len(data), 3)])
        writer.close()
        buffers = [bytearray(3) for _ in range(count)]
        reader = store.open_reader("a")
        reader.read_into(0, [memoryview(buffer) for buffer in buffers])
        reader.close()

        assert get(store, "a") == data
        assert b"".join(buffers) == data

    def test_nothing_written_and_nothing_read_is_fine(self, store: Store) -> None:
        store.create()
        writer = store.open_writer("a", 0)
        writer.write(0, [])
        writer.write(0, [memoryview(b"")])
        writer.close()
        reader = store.open_reader("a")
        reader.read_into(0, [])
        reader.close()

        assert get(store, "a") == b""

    def test_the_size_of_a_file_is_known(self, store: Store) -> None:
        store.create()
        put(store, "a", b"12345")
        reader = store.open_reader("a")

        assert reader.nbytes == 5
        reader.close()

    def test_several_threads_write_and_read_one_file(self, store: Store) -> None:
        store.create()
        data = os.urandom(8 * 4096)
        result = bytearray(len(data))
        writer = store.open_writer("a", len(data))

        def in_threads(work: Any) -> None:
            threads = [threading.Thread(target=work, args=(4096 * n,)) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        in_threads(lambda begin: writer.write(begin, [memoryview(data)[begin : begin + 4096]]))
        writer.sync()
        writer.close()
        reader = store.open_reader("a")
        in_threads(
            lambda begin: reader.read_into(begin, [memoryview(result)[begin : begin + 4096]])
        )
        reader.close()

        assert bytes(result) == data

    def test_a_file_that_is_there_is_never_opened_for_writing_again(self, store: Store) -> None:
        store.create()
        put(store, "a", b"old")
        with pytest.raises(FileExistsError):
            store.open_writer("a", 3)

        assert get(store, "a") == b"old"

    def test_keys_are_listed_in_order(self, store: Store) -> None:
        store.create()
        for key in ("b", ".metadata", "__10_0.safetensors", "a"):
            put(store, key, b"x")

        assert store.list() == sorted([".metadata", "__10_0.safetensors", "a", "b"])

    def test_a_deleted_file_is_gone(self, store: Store) -> None:
        store.create()
        put(store, "a", b"1")
        put(store, "b", b"2")
        assert store.delete("a")

        assert store.list() == ["b"]
        with pytest.raises(FileNotFoundError):
            store.open_reader("a")

    def test_a_file_that_gets_another_name_replaces_what_had_it(self, store: Store) -> None:
        store.create()
        for key, content in {"old": b"old", "new": b"new!"}.items():
            writer = store.open_writer(key, len(content))
            writer.write(0, [memoryview(content)])
            writer.close()
        store.rename("new", "old")
        assert store.list() == ["old"]
        reader = store.open_reader("old")
        assert reader.nbytes == 4
        reader.close()

    def test_deleting_what_is_not_there_is_harmless(self, store: Store) -> None:
        store.create()

        assert not store.delete("a")
        assert store.list() == []

    def test_a_missing_file_is_an_error_that_names_it(self, store: Store) -> None:
        store.create()
        with pytest.raises(FileNotFoundError, match="missing-key"):
            store.open_reader("missing-key")

    def test_a_file_in_a_place_that_was_not_made_is_missing(self, store: Store) -> None:
        with pytest.raises(FileNotFoundError):
            store.open_reader("a")

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 11), (5, 6), (10, 1), (11, 1), (99, 5)])
    def test_reading_past_the_end_is_an_error(self, offset: int, nbytes: int, store: Store) -> None:
        store.create()
        put(store, "a", b"0123456789")

        with pytest.raises(OSError, match="ends"):
            get(store, "a", offset, nbytes)

    def test_a_file_may_be_closed_twice(self, store: Store) -> None:
        store.create()
        writer = store.open_writer("a", 1)
        writer.write(0, [memoryview(b"1")])
        writer.close()
        writer.close()
        reader = store.open_reader("a")
        reader.close()
        reader.close()

        assert get(store, "a") == b"1"

    def test_a_commit_publishes_the_whole_of_a_key_and_uses_its_draft_up(
        self, store: Store
    ) -> None:
        store.create()
        publish(store, b"first")
        assert get(store, ".metadata") == b"first"

        publish(store, b"2nd")
        assert get(store, ".metadata") == b"2nd"
        assert store.list() == [".metadata"]

    def test_a_commit_says_which_version_it_made(self, store: Store) -> None:
        store.create()
        assert store.version(".metadata") is None
        first = publish(store, b"first")
        assert store.version(".metadata") == first
        second = publish(store, b"other")

        assert store.version(".metadata") == second != first

    def test_a_commit_replaces_nothing_that_it_has_not_seen(self, store: Store) -> None:
        store.create()
        seen = publish(store, b"seen")
        for expected in (None, seen):
            publish(store, b"meanwhile")
            put(store, "draft", b"")
            with pytest.raises(VersionConflict):
                store.commit("draft", ".metadata", b"late", expected)
            assert get(store, ".metadata") == b"meanwhile"
            assert store.delete("draft")

    def test_a_commit_without_its_draft_publishes_nothing(self, store: Store) -> None:
        store.create()
        seen = publish(store, b"old")
        with pytest.raises(FileNotFoundError):
            store.commit("draft", ".metadata", b"new", seen)

        assert get(store, ".metadata") == b"old"

    def test_of_many_commits_in_place_of_one_version_one_succeeds(self, store: Store) -> None:
        store.create()
        seen = publish(store, b"old")
        winners: list[int] = []

        def commit(number: int) -> None:
            put(store, f"draft-{number}", b"")
            with contextlib.suppress(VersionConflict):
                store.commit(f"draft-{number}", ".metadata", b"%d" % number, seen)
                winners.append(number)

        threads = [threading.Thread(target=commit, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(winners) == 1
        assert get(store, ".metadata") == b"%d" % winners[0]

    def test_the_time_of_a_file_is_known(self, store: Store) -> None:
        store.create()
        put(store, "a", b"1")
        put(store, "b", b"1")

        assert store.modified("missing") is None
        assert store.modified("a") is not None
        assert store.modified("a") <= store.modified("b") <= time.time() + 60

    def test_a_file_that_was_replaced_has_another_stamp(self, store: Store) -> None:
        store.create()
        put(store, "a", b"1")
        before = store.stamp("a")

        assert store.stamp("missing") is None
        store.delete("a")
        put(store, "other", b"3")
        put(store, "a", b"2")
        assert store.stamp("a") != before

    def test_a_reader_of_the_old_content_is_not_disturbed_by_a_commit(self, store: Store) -> None:
        store.create()
        publish(store, b"old old old")
        reader = store.open_reader(".metadata")
        publish(store, b"new")
        buffer = bytearray(reader.nbytes)
        reader.read_into(0, [memoryview(buffer)])
        reader.close()

        assert bytes(buffer) == b"old old old"

    def test_a_reader_during_commits_sees_one_content_or_another(self, store: Store) -> None:
        store.create()
        contents = [bytes([n]) * (1000 * n + 1) for n in range(20)]
        publish(store, contents[0])
        running = True
        seen: list[bytes] = []

        def look() -> None:
            while running:
                # As manifests are read: where there are requests, by one.
                seen.append(get(store, ".metadata", ahead=1 << 20))

        thread = threading.Thread(target=look)
        thread.start()
        for content in contents * 5:
            publish(store, content)
        running = False
        thread.join()

        assert seen
        assert set(seen) <= set(contents)

    def test_a_file_that_can_be_mapped_is_mapped_as_private_memory(self, store: Store) -> None:
        store.create()
        content = bytes(range(256)) * 40
        put(store, "a", content)
        put(store, "empty", b"")
        reader, empty = store.open_reader("a"), store.open_reader("empty")
        if isinstance(reader, Mappable) and isinstance(empty, Mappable):
            memory, other = reader.map(), reader.map()
            assert empty.map() == b""
            reader.close()
            store.delete("a")
            assert memory == content
            memory[5] = 77
            assert memory[5] == 77
            assert other == content
        reader.close()
        empty.close()

    def test_all_that_was_written_can_be_synced(self, store: Store) -> None:
        store.create()
        put(store, "a", b"1")
        store.sync()

        assert get(store, "a") == b"1"

    def test_a_place_is_found_by_its_relative_location_from_either_side(self, store: Store) -> None:
        store.create()
        put(store, "a", b"here")
        other = store.at("../other")
        other.create()
        put(other, "b", b"there")

        assert store.relative(other.location) == "../other"
        assert get(store.at("../other"), "b") == b"there"
        back = other.relative(store.location)
        assert get(other.at(back), "a") == b"here"
        assert store.list() == ["a"]
        assert other.list() == ["b"]

    def test_a_place_is_at_its_own_location(self, store: Store) -> None:
        store.create()

        assert store.relative(store.location) == "."
        assert store.at("../other").relative(store.at("../other").location) == "."

    def test_a_location_of_nothing_has_no_files(self, store: Store) -> None:
        store.create()

        assert store.at("../nothing").list() == []
        assert store.at("../nothing").version("a") is None

    def test_folders_are_all_places_within_this_one(self, store: Store) -> None:
        assert list(store.folders()) == []
        store.create()
        for name in ("x", "y"):
            inner = store.at(name)
            inner.create()
            put(inner, "a", b"1")

        assert list(store.folders()) == ["x", "y"]

    def test_neighbours_are_all_places_beside_this_one_and_itself(self, store: Store) -> None:
        store.create()
        put(store, "a", b"1")
        for name in ("x", "y"):
            other = store.at(f"../{name}")
            other.create()
            put(other, "a", b"1")

        found = store.neighbours()

        assert {"../x", "../y"} < set(found)
        assert sum(store.relative(store.at(each).location) == "." for each in found) == 1
        assert all(store.at(each).list() == ["a"] for each in found)

    def test_a_place_with_files_is_not_removed(self, store: Store) -> None:
        store.create()
        put(store, "a", b"1")
        store.remove()

        assert get(store, "a") == b"1"

    def test_a_place_without_files_can_be_removed_and_made_again(self, store: Store) -> None:
        store.create()
        put(store, "a", b"1")
        store.delete("a")
        store.remove()
        store.remove()
        assert store.list() == []

        store.create()
        put(store, "a", b"2")
        assert get(store, "a") == b"2"


class TestLocalStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "some" / "place")

    def test_a_file_that_cannot_be_mapped_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        put(store, "a", b"123")
        reader = store.open_reader("a")
        reader.close()

        with pytest.raises(OSError, match=r"Bad file descriptor.*/a"):
            reader.map()

    def test_a_directory_is_made_with_its_parents(self, tmp_path: Path) -> None:
        LocalStore(tmp_path / "a" / "b" / "c").create()

        assert (tmp_path / "a" / "b" / "c").is_dir()

    def test_a_directory_is_removed_if_it_is_empty_and_its_parents_stay(
        self, tmp_path: Path
    ) -> None:
        store = LocalStore(tmp_path / "a" / "b")
        store.create()
        (tmp_path / "a" / "b" / "of others").mkdir()
        store.remove()
        assert (tmp_path / "a" / "b").is_dir()
        (tmp_path / "a" / "b" / "of others").rmdir()

        store.remove()

        assert (tmp_path / "a").is_dir()
        assert not (tmp_path / "a" / "b").exists()

    @pytest.mark.parametrize(
        ("place", "location"),
        [
            ("root/b", "../b"),
            ("root", "../../root"),
            ("other/b", "../../other/b"),
            ("root/here.more", "../here.more"),
            ("root/link", "."),
            ("root/here/../here/", "."),
            ("root/to b", "../b"),
        ],
    )
    def test_locations_end_with_a_name_and_lead_around_links(
        self, place: str, location: str, tmp_path: Path
    ) -> None:
        store = LocalStore(tmp_path / "root" / "here")
        store.create()
        (tmp_path / "root" / "link").symlink_to("here")
        (tmp_path / "root" / "to b").symlink_to("b")

        assert store.relative(tmp_path / place) == location
        assert store.relative(str(tmp_path / place)) == location
        if location != ".":
            assert store.at(location).location == os.path.realpath(tmp_path / place)

    @pytest.mark.parametrize("place", ["here/x", "here/x/y", "link"])
    def test_a_place_within_has_no_location(self, place: str, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "here")
        store.create()
        (tmp_path / "link").symlink_to("here/inside")

        with pytest.raises(ValueError, match="lies within"):
            store.relative(tmp_path / place)

    def test_a_store_that_is_reached_by_a_link_looks_around_where_it_really_is(
        self, tmp_path: Path
    ) -> None:
        for name in ("root/here", "root/b", "far"):
            (tmp_path / name).mkdir(parents=True)
        (tmp_path / "far" / "link").symlink_to(tmp_path / "root" / "here")
        store = LocalStore(tmp_path / "far" / "link")

        assert store.relative(tmp_path / "root" / "b") == "../b"
        assert store.at("../b").location == str(tmp_path / "root" / "b")
        assert store.neighbours() == ["../b", "../here"]

    def test_neighbours_are_directories_and_links_to_them(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "here")
        store.create()
        (tmp_path / "b").mkdir()
        (tmp_path / "file").write_bytes(b"")
        (tmp_path / "link").symlink_to("b")
        (tmp_path / "loop").symlink_to("loop")
        (tmp_path / "dangling").symlink_to("nothing")

        assert store.neighbours() == ["../b", "../here", "../link"]

    def test_a_file_was_written_when_what_a_link_leads_to_was(self, tmp_path: Path) -> None:
        (tmp_path / "target").write_bytes(b"1")
        (tmp_path / "link").symlink_to("target")
        os.utime(tmp_path / "target", (1000, 1000))

        assert LocalStore(tmp_path).modified("link") == 1000

    def test_a_stamp_tells_content_that_was_given_the_old_time(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"1")
        before, stamp = path.stat(), LocalStore(tmp_path).stamp("file")
        assert LocalStore(tmp_path).stamp("file") == stamp
        while path.stat().st_ctime_ns == before.st_ctime_ns:
            path.write_bytes(b"2")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

        assert path.stat().st_mtime_ns == before.st_mtime_ns
        assert LocalStore(tmp_path).stamp("file") != stamp

    @pytest.mark.parametrize("call", ["open", "pwritev", "fsync", "rename"])
    def test_a_commit_that_fails_leaves_the_old_content(self, call: str, tmp_path: Path) -> None:
        seen = publish(LocalStore(tmp_path), b"old")
        put(LocalStore(tmp_path), "draft", b"")

        with pytest.raises(OSError) as caught:
            LocalStore(tmp_path, refusing(errno.EIO, name=call)).commit(
                "draft", ".metadata", b"new", seen
            )

        assert caught.value.errno == errno.EIO
        assert get(LocalStore(tmp_path), ".metadata") == b"old"

    def test_a_file_where_the_directory_should_be_is_an_error_that_names_it(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "taken").write_bytes(b"")

        with pytest.raises(OSError, match="taken"):
            LocalStore(tmp_path / "taken").create()

    def test_files_are_closed_when_writing_fails(self, tmp_path: Path) -> None:
        put(LocalStore(tmp_path), "draft", b"")
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError):
            LocalStore(tmp_path, refusing(errno.ENOSPC, name="pwritev")).commit(
                "draft", "a", b"1", None
            )

        assert len(os.listdir("/proc/self/fd")) == before

    @pytest.mark.parametrize("kind", ["link", "pipe"])
    def test_a_draft_that_is_no_file_is_neither_followed_nor_waited_for(
        self, kind: str, tmp_path: Path
    ) -> None:
        store = LocalStore(tmp_path / "place")
        store.create()
        seen = publish(store, b"old")
        victim = tmp_path / "victim"
        victim.write_bytes(b"precious")
        draft = tmp_path / "place" / "draft"
        draft.symlink_to(victim) if kind == "link" else os.mkfifo(draft)

        with pytest.raises(OSError, match="draft"):
            store.commit("draft", ".metadata", b"new", seen)

        assert victim.read_bytes() == b"precious"
        assert get(store, ".metadata") == b"old"

    def test_a_lock_that_nobody_gives_back_is_an_error_after_a_while(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        store.lock_seconds = 0.05
        put(store, "draft", b"")
        holder = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(holder, fcntl.LOCK_EX)
        try:
            with pytest.raises(OSError, match="has held the lock on this directory"):
                store.commit("draft", ".metadata", b"new", None)
        finally:
            os.close(holder)
        store.commit("draft", ".metadata", b"new", None)

        assert store.list() == [".metadata"]

    def test_where_directories_have_no_locks_a_file_is_locked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = fcntl.flock

        def flock(descriptor: int, how: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(errno.EBADF, "as on NFS")
            real(descriptor, how)

        monkeypatch.setattr(fcntl, "flock", flock)
        self.test_of_many_commits_in_place_of_one_version_one_succeeds(LocalStore(tmp_path))

        assert (tmp_path / LOCK_FILE).exists()

    def test_where_there_are_no_locks_at_all_a_commit_works(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def flock(descriptor: int, how: int) -> None:
            raise OSError(errno.ENOLCK, "none")

        monkeypatch.setattr(fcntl, "flock", flock)
        self.test_a_commit_replaces_nothing_that_it_has_not_seen(LocalStore(tmp_path))


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return MemoryStore()


class TestFileSystemsOfUsers(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        root = tmp_path / "objects"
        root.mkdir()
        return StreamStore(ListedObjects(root), f"{SCHEME}b/here")


class TestLocalStreams(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return StreamStore(FileSystem(), tmp_path / "places" / "here")


class TestObjectStore(StoreTests):
    @pytest.fixture
    def store(self, s3: Place) -> Store:
        return ObjectStore(s3.url, s3.options)


@pytest.mark.slow
class TestObjectStoreThatOftenFails(StoreTests):
    @pytest.fixture
    def store(self, s3: Place, s3_proxy: FaultyProxy) -> Store:
        s3_proxy.script = seeded(15, 0.1)
        return ObjectStore(s3.url, s3.through(s3_proxy.endpoint).options)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("azurite")
class TestObjectStoreOnAzure(StoreTests):
    """The first test may have to install the server."""

    @pytest.fixture
    def store(self, azure: Place) -> Store:
        return ObjectStore(azure.url, azure.options)


class TestFsspecMemory(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_place(f"memory://{uuid.uuid4()}/places/here")


class TestFsspecFiles(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_place((tmp_path / "places" / "here").as_uri())


class TestFsspecStreamsOfFiles(StoreTests):
    """With nothing that is known of local files: as any other file system."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        url = (tmp_path / "places" / "here").as_uri()
        fs, path = file_system(url, {})
        return FsspecStore(Connection(fs), path, url)

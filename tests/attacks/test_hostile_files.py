"""No manifests, pickles, pipes, links and directories in the place of a checkpoint's files."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.api import CorruptCheckpointError
from support.hostile import (
    DOORS,
    MANIFEST,
    SAVE_ID,
    SHARD,
    STEP,
    OpenManifest,
    check_refused,
    load_all,
    memory_limit,
    refusal,
    seal,
    small_state,
    with_header,
)

HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "less than a length": b"\0" * 7,
    "only a length": b"\0" * 8,
    "a header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}",
    "a header of 2^63 bytes": (1 << 63).to_bytes(8, "little") + b"{}",
    "a header of 2^31 bytes": (1 << 31).to_bytes(8, "little") + b"{}",
    "a header one byte longer than the file": (3).to_bytes(8, "little") + b"{}",
    "an empty header": seal(with_header(b"")),
    "a header that is a list": seal(with_header(b"[]")),
    "a header that is a text": seal(with_header(b'"reshard"')),
    "a header that is cut off": seal(with_header(b'{"a": ')),
    "a header that is not UTF-8": seal(with_header(b'{"\xff\xfe": 1}')),
    "a header with half a surrogate pair": seal(with_header(b'{"\\ud800": 1}')),
    "a header nested in lists 100000 deep": seal(with_header(b'{"a":' + b"[" * 100_000)),
    "a header nested in objects 100000 deep": seal(with_header(b'{"a":' * 100_000)),
    "a shape nested 100000 deep": seal(
        with_header(b'{"a":{"dtype":"U8","shape":' + b"[" * 100_000 + b"]" * 100_000 + b"}}")
    ),
    "notes nested 500 deep": seal(
        with_header(b'{"__metadata__":' + b"[" * 500 + b"]" * 500 + b"}")
    ),
    "an entry that is a number": seal(with_header(b'{"a": 5}')),
    "an entry that is a text": seal(with_header(b'{"a": "dtype"}')),
    "an entry of nothing": seal(with_header(b'{"a": {}}')),
    "a number that no machine holds": seal(
        with_header(b'{"a":{"dtype":"U8","shape":[1' + b"0" * 5000 + b'],"data_offsets":[0,8]}}')
    ),
    "a page of HTML": b"<!DOCTYPE html><html>Sign in</html>" * 100,
    "a pointer of git lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "a gzip file": b"\x1f\x8b\x08\0" + b"\0" * 60,
    "a zip file": b"PK\3\4" + b"\0" * 60,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS.keys())
def test_a_file_that_is_no_manifest_is_refused_and_named(
    content: bytes, door: str, checkpoint: Path
) -> None:
    (checkpoint / MANIFEST).write_bytes(content)
    with memory_limit():
        check_refused(lambda: DOORS[door](checkpoint), str(checkpoint))


def test_a_name_twice_in_the_header_of_a_manifest_gives_nobody_two_columns(
    checkpoint: Path,
) -> None:
    path = checkpoint / MANIFEST
    length = int.from_bytes(path.read_bytes()[:8], "little")
    raw_manifest = path.read_bytes()
    text = raw_manifest[8 : 8 + length].rstrip()
    again = b',"chunks.begins":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}}'
    path.write_bytes(seal(with_header(text[:-1] + again) + raw_manifest[8 + length : -8]))
    check_refused(lambda: load_all(checkpoint), str(checkpoint))


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("door", DOORS)
def test_a_pickle_in_place_of_the_manifest_is_never_run(
    door: str, protocol: int, checkpoint: Path, tmp_path: Path
) -> None:
    trap = tmp_path / "executed"
    bomb = pickle.dumps(_Bomb(trap), protocol=protocol)
    (checkpoint / MANIFEST).write_bytes(bomb)
    check_refused(lambda: DOORS[door](checkpoint), str(checkpoint))
    assert not trap.exists()
    # The trap works: this is what a careless reader would do.
    pickle.loads(bomb)
    assert trap.exists()


def test_a_checkpoint_of_dcp_is_called_by_its_name(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    for door in DOORS.values():
        reason = refusal(lambda door=door: door(checkpoint))
        assert isinstance(reason, CorruptCheckpointError)
        assert "torch.distributed.checkpoint" in str(reason)


def test_pickled_planner_data_is_neither_run_nor_in_the_way(
    checkpoint: Path, tmp_path: Path
) -> None:
    trap = tmp_path / "executed"
    manifest = OpenManifest(checkpoint)
    manifest.set_bytes("planner_data", b"VRSV1P" + pickle.dumps(_Bomb(trap)))
    manifest.write()
    assert load_all(checkpoint)["step"] == small_state()["step"]
    assert reshard.read_state_dict(checkpoint)["step"] == small_state()["step"]
    assert not trap.exists()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("data", [b"VRSV1M\xc1", b"VRSV1X", b"V", b"Vgarbage", b"?", b"V\x80\4."])
def test_planner_data_that_makes_no_sense_is_refused(
    data: bytes, door: str, checkpoint: Path
) -> None:
    manifest = OpenManifest(checkpoint)
    manifest.set_bytes("planner_data", data)
    manifest.write()
    check_refused(lambda: DOORS[door](checkpoint), "planner_data", str(checkpoint))


def split_into_parts(checkpoint: Path, count: str, *ranks: int) -> None:
    """An index of `count` parts, and the parts of some ranks."""
    index = OpenManifest(checkpoint)
    for rank in ranks:
        part = checkpoint / f"{MANIFEST}.{rank}-of-{count}.{SAVE_ID.replace('-', '')[:16]}"
        part.write_bytes(index.encode())
    index.notes |= {"parts": count, "requires": "parts"}
    index.write()


def test_parts_that_are_all_there_are_a_checkpoint(checkpoint: Path) -> None:
    split_into_parts(checkpoint, "1", 0)
    assert load_all(checkpoint)["step"] == STEP


@pytest.mark.parametrize("door", DOORS)
def test_parts_of_which_one_is_missing_are_refused(door: str, checkpoint: Path) -> None:
    split_into_parts(checkpoint, "3", 0, 2)
    text = check_refused(lambda: DOORS[door](checkpoint), str(checkpoint))
    assert "what rank 1 of 3 saved" in text


@pytest.mark.parametrize("count", ["0", "-1", "two", "1e9", "1000000000000", ""])
def test_numbers_of_parts_that_there_cannot_be_are_refused(count: str, checkpoint: Path) -> None:
    split_into_parts(checkpoint, count)
    check_refused(lambda: load_all(checkpoint), str(checkpoint))


@pytest.mark.parametrize("door", DOORS)
def test_endless_parts_cost_nothing(door: str, checkpoint: Path) -> None:
    split_into_parts(checkpoint, "999999999")
    with memory_limit(256 << 20):
        check_refused(lambda: DOORS[door](checkpoint), str(checkpoint))


@pytest.mark.parametrize("name", [MANIFEST, SHARD])
@pytest.mark.parametrize("door", DOORS)
def test_a_directory_in_place_of_a_file_is_refused(door: str, name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    (checkpoint / name).mkdir()
    if name == SHARD:
        manifest = OpenManifest(checkpoint)
        size = (checkpoint / name).stat().st_size
        manifest.set_ints("files.nbytes", [max(size, 8192)])
        manifest.write()
        if size < 8192:
            for number in range(300):
                (checkpoint / name / f"{number:0200}").touch()
            manifest.set_ints("files.nbytes", [(checkpoint / name).stat().st_size])
            manifest.write()
    check_refused(lambda: DOORS[door](checkpoint), str(checkpoint))


@pytest.mark.parametrize("name", [MANIFEST, SHARD])
def test_a_named_pipe_in_place_of_a_file_does_not_hang(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    refusals: list[BaseException] = []

    def read() -> None:
        refusals.append(refusal(lambda: load_all(checkpoint)))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(0.5)
    hangs = thread.is_alive()
    if hangs:
        # Let it go: a writer that comes and leaves again.
        os.close(os.open(checkpoint / name, os.O_RDWR | os.O_NONBLOCK))
        thread.join(5)
    assert not hangs
    assert refusals


def test_a_link_in_place_of_a_shard_file_is_followed_but_its_bytes_are_checked(
    checkpoint: Path, tmp_path: Path
) -> None:
    shard = checkpoint / SHARD
    elsewhere = tmp_path / "elsewhere"
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)
    assert load_all(checkpoint)["step"] == small_state()["step"]
    elsewhere.write_bytes(b"s" * elsewhere.stat().st_size)
    check_refused(lambda: load_all(checkpoint), SHARD)
    elsewhere.write_bytes(b"secret")
    check_refused(lambda: load_all(checkpoint), SHARD)


@pytest.mark.parametrize("name", [MANIFEST, SHARD])
def test_links_in_a_loop_are_refused(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to(checkpoint / name)
    check_refused(lambda: load_all(checkpoint), str(checkpoint))

"""Checkpoints of torch.distributed.checkpoint and files of torch.save that lie."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import reshard
from reshard.api import CheckpointException, CorruptCheckpointError, UnsafeValueError
from support import dcp_files
from support.dcp_files import DATA, METADATA, Bomb, edit_metadata, replace_record, torch_file
from support.hostile import check_refused, memory_limit, refusal


def _load(directory: Path) -> Any:
    state = dcp_files.blank()
    reshard.load(state, checkpoint_id=directory, no_dist=True)
    return state


DOORS: dict[str, Callable[[Path], Any]] = {
    "load": _load,
    "read_state_dict": lambda directory: reshard.read_state_dict(directory),
    "mapped": lambda directory: reshard.read_state_dict(directory, mmap=True),
    "read_tensor": lambda directory: reshard.read_tensor(directory, "model.weight"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dcp_files.save(tmp_path_factory.mktemp("saved") / "ckpt")


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "ckpt"))


def _set(metadata: Any, path: str, value: Any) -> None:
    *above, last = path.split(".")
    for name in above:
        metadata = getattr(metadata, name)
    setattr(metadata, last, value)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_the_checkpoint_loads_when_nobody_attacks_it(checkpoint: Path, protocol: int) -> None:
    edit_metadata(checkpoint, lambda metadata: None, protocol)
    for door in DOORS.values():
        door(checkpoint)
    loaded = _load(checkpoint)
    assert torch.equal(loaded["model"]["weight"], dcp_files.state()["model"]["weight"])
    assert (loaded["step"], loaded["note"]) == (7, "a value")


PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "the whole": lambda metadata, bomb: bomb,
    "the entries": lambda metadata, bomb: _set(metadata, "state_dict_metadata", bomb),
    "an entry": lambda metadata, bomb: metadata.state_dict_metadata.update(note=bomb),
    "the storage data": lambda metadata, bomb: _set(metadata, "storage_data", bomb),
    "a place": lambda metadata, bomb: metadata.storage_data.update({MetadataIndex("note"): bomb}),
    "the properties": lambda metadata, bomb: _set(
        metadata.state_dict_metadata["model.weight"], "properties", bomb
    ),
    "the chunks": lambda metadata, bomb: _set(
        metadata.state_dict_metadata["model.weight"], "chunks", bomb
    ),
    "a size": lambda metadata, bomb: _set(
        metadata.state_dict_metadata["model.weight"], "size", bomb
    ),
    "a path": lambda metadata, bomb: _set(
        metadata.storage_data[MetadataIndex("note")], "relative_path", bomb
    ),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("place", PLACES)
def test_code_in_the_metadata_is_refused_and_never_run(
    checkpoint: Path, tmp_path: Path, place: str, protocol: int
) -> None:
    trap = tmp_path / "trap"
    edit_metadata(checkpoint, lambda m: PLACES[place](m, Bomb(trap)), protocol)
    for door in DOORS.values():
        check_refused(lambda door=door: door(checkpoint), ".metadata")
    assert not trap.exists()
    pickle.loads((checkpoint / METADATA).read_bytes())
    assert trap.exists()


@pytest.mark.parametrize("place", ["planner_data", "storage_meta", "anything"])
def test_code_in_what_is_not_needed_stays_closed(
    checkpoint: Path, tmp_path: Path, place: str
) -> None:
    trap = tmp_path / "trap"
    edit_metadata(checkpoint, lambda metadata: _set(metadata, place, Bomb(trap)))
    assert _load(checkpoint)["step"] == 7
    assert not trap.exists()


def test_code_in_the_record_of_a_tensor_is_refused_and_never_run(
    checkpoint: Path, tmp_path: Path
) -> None:
    trap = tmp_path / "trap"
    for thing in (Bomb(trap), [Bomb(trap)], {"a": Bomb(trap)}):
        replace_record(checkpoint, "model.weight", torch_file(thing))
        for door in DOORS.values():
            check_refused(lambda door=door: door(checkpoint), "posix.mkdir", "model.weight")
    assert not trap.exists()


def test_code_in_a_value_is_refused_before_anything_is_loaded(
    checkpoint: Path, tmp_path: Path
) -> None:
    trap = tmp_path / "trap"
    replace_record(checkpoint, "note", torch_file({"a": [Bomb(trap)]}))
    state = dcp_files.blank()
    with pytest.raises(UnsafeValueError, match=r"'note'.*posix\.mkdir.*allow_pickle"):
        reshard.load(state, checkpoint_id=checkpoint, no_dist=True)
    assert not state["model"]["weight"].any()
    assert not trap.exists()
    assert reshard.read_state_dict(checkpoint, keys={"step", "model"})["step"] == 7
    reshard.load(state, checkpoint_id=checkpoint, no_dist=True, allow_pickle=True)
    assert trap.exists()


def _info(metadata: Any, name: str) -> Any:
    return next(i for index, i in metadata.storage_data.items() if index.fqn == name)


def _move(**fields: Any) -> Callable[[Any], None]:
    return lambda metadata: vars(_info(metadata, "model.weight")).update(fields)


def _entry(**fields: Any) -> Callable[[Any], None]:
    return lambda metadata: vars(metadata.state_dict_metadata["model.weight"]).update(fields)


def _chunk(**fields: Any) -> Callable[[Any], None]:
    return lambda metadata: vars(metadata.state_dict_metadata["model.weight"].chunks[0]).update(
        fields
    )


LIES: dict[str, Callable[[Any], Any]] = {
    "a file above the checkpoint": _move(relative_path="../ckpt/" + DATA),
    "a file from the root": _move(relative_path="/etc/passwd"),
    "a file that is not there": _move(relative_path="__9_0.distcp"),
    "a path that is a number": _move(relative_path=5),
    "a path with a zero": _move(relative_path="a\0b"),
    "an offset beyond the file": _move(offset=1 << 40),
    "an offset beyond all files": _move(offset=1 << 80),
    "an offset before the file": _move(offset=-1),
    "a length beyond the file": _move(length=1 << 40),
    "a length beyond all memory": _move(length=1 << 80),
    "a negative length": _move(length=-5),
    "a length that is a text": _move(length="5"),
    "a record of one byte": _move(length=1),
    "a record without its end": _move(length=900),
    "an extension that nobody knows": _move(transform_descriptors=["stream.odd/1"]),
    "an extension that is a number": _move(transform_descriptors=[5]),
    "zstd in place of nothing": _move(transform_descriptors=["stream.zstd/1"]),
    "another record": lambda metadata: vars(_info(metadata, "model.weight")).update(
        vars(_info(metadata, "model.bias"))
    ),
    "the record of a value": lambda metadata: vars(_info(metadata, "model.weight")).update(
        vars(_info(metadata, "note"))
    ),
    "a larger shape": _entry(size=torch.Size([1 << 20, 1 << 20])),
    "a shape beyond all numbers": _entry(size=(1 << 70, 4)),
    "a shape of texts": _entry(size=("3", "4")),
    "a negative shape": _entry(size=(-3, -4)),
    "a shape of many dimensions": _entry(size=(1,) * 5000),
    "chunks that are a text": _entry(chunks="abc"),
    "a chunk outside": _chunk(offsets=torch.Size([1, 0])),
    "a chunk of many elements": _chunk(sizes=torch.Size([1 << 40, 4])),
    "a chunk of floats": _chunk(sizes=(3.0, 4.0)),
    "a chunk of one dimension": _chunk(sizes=torch.Size([3])),
    "a tensor of an enormous shape in one small record": lambda metadata: (
        _entry(size=torch.Size([1 << 50]))(metadata),
        _chunk(offsets=torch.Size([0]), sizes=torch.Size([1 << 50]))(metadata),
        None,
    )[-1],
    "no place": lambda metadata: metadata.storage_data.clear(),
    "a value in place of the tensor": lambda metadata: metadata.state_dict_metadata.update(
        {"model.weight": BytesStorageMetadata()}
    ),
    "a key that is a number": lambda metadata: metadata.state_dict_metadata.update({5: None}),
    "metadata that is None": lambda metadata: 5,
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies_is_refused(checkpoint: Path, lie: str) -> None:
    edit_metadata(checkpoint, LIES[lie])
    with memory_limit():
        for door in DOORS.values():
            refusal(lambda door=door: door(checkpoint))


def test_metadata_of_the_wrong_dtype_is_told(checkpoint: Path) -> None:
    def lie(metadata: Any) -> None:
        metadata.state_dict_metadata["model.weight"].properties.dtype = torch.int32

    edit_metadata(checkpoint, lie)
    for door in ("read_state_dict", "mapped", "read_tensor"):
        text = check_refused(lambda door=door: DOORS[door](checkpoint), "model.weight")
        assert "torch.float32" in text
        assert "torch.int32" in text


def test_every_cut_of_the_metadata_is_refused(checkpoint: Path) -> None:
    data = (checkpoint / METADATA).read_bytes()
    for end in range(1, len(data), 11):
        (checkpoint / METADATA).write_bytes(data[:end])
        refusal(lambda: reshard.read_state_dict(checkpoint))


def test_damage_to_the_metadata_is_refused_or_harmless(checkpoint: Path) -> None:
    data = (checkpoint / METADATA).read_bytes()
    for at in range(2, len(data), 5):
        for value in (0x00, 0x28, 0x52, 0x81, 0xFF):
            damaged = data[:at] + bytes([value]) + data[at + 1 :]
            (checkpoint / METADATA).write_bytes(damaged)
            try:
                reshard.read_state_dict(checkpoint)
            except CheckpointException:
                continue


def test_a_data_file_that_was_cut_is_refused(checkpoint: Path) -> None:
    with (checkpoint / DATA).open("r+b") as file:
        file.truncate(1500)
    for door in DOORS.values():
        check_refused(lambda door=door: door(checkpoint), DATA)


def test_a_pickle_that_asks_for_memory_gets_none(checkpoint: Path) -> None:
    bombs = [
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x02]r\xff\xff\xff\x7f.",
        b"\x80\x02" + b"](" * 100_000 + b"e" * 100_000 + b".",
    ]
    for bomb in bombs:
        (checkpoint / METADATA).write_bytes(bomb)
        with memory_limit():
            refusal(lambda: reshard.read_state_dict(checkpoint))
    shutil.copy(checkpoint / DATA, checkpoint / "copy")


def test_a_value_that_asks_for_memory_gets_none(checkpoint: Path) -> None:
    record = torch_file("a value")
    doubled = b"\x80\x02]q\x000" + b"".join(
        b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) + b"0" for i in range(60)
    )
    bombs = [
        doubled + b"h\x3c.",
        b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\xff\xff\xff\xff\xff\x01\x85R.",
        b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".",
        b"\x80\x02]q\x00h\x00a.",
    ]
    for bomb in bombs:
        replace_record(checkpoint, "note", dcp_files.with_member(record, "data.pkl", bomb))
        with memory_limit():
            refusal(lambda: reshard.read_state_dict(checkpoint))


def test_a_stream_that_decodes_to_too_much_is_refused(checkpoint: Path) -> None:
    import zstandard

    huge = zstandard.compress(b"\0" * (64 << 20))
    replace_record(checkpoint, "model.weight", huge)
    edit_metadata(checkpoint, _move(transform_descriptors=["stream.zstd/1"]))
    check_refused(lambda: reshard.read_tensor(checkpoint, "model.weight"), "decodes to more than")


# Files of torch.save


def test_code_in_a_file_of_torch_save_is_never_run(tmp_path: Path) -> None:
    trap, path = tmp_path / "trap", tmp_path / "model.pt"
    torch.save({"weight": torch.ones(3), "bad": Bomb(trap)}, path)
    with pytest.raises(UnsafeValueError, match=r"'bad'.*posix\.mkdir"):
        reshard.read_state_dict(path)
    assert torch.equal(reshard.read_tensor(path, "weight"), torch.ones(3))
    assert not trap.exists()
    torch.save(Bomb(trap), path)
    check_refused(lambda: reshard.read_state_dict(path), "not a state dict")
    assert not trap.exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
        b"\x80\x02}(X\x01\x00\x00\x00a" + b"]" * 5000 + b"a" * 4999 + b"u.",
        b"\x80\x02}K\x05K\x06s.",
        b"\x80\x02}(X\x01\x00\x00\x00a]q\x000"
        + b"".join(
            b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) + b"0"
            for i in range(60)
        )
        + b"h\x3cu.",
        b"\x80\x02}.",
    ],
    ids=["a circle", "depth", "a key that is a number", "doubling", "nothing"],
)
def test_odd_trees_in_a_file_are_refused_or_harmless(tmp_path: Path, pickled: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(dcp_files.with_member(torch_file({}), "data.pkl", pickled))
    with memory_limit():
        if pickled.endswith(b"}."):
            assert reshard.read_state_dict(path) == {}
        else:
            refusal(lambda: reshard.read_state_dict(path))


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole, path = torch_file({"weight": torch.ones(3)}), tmp_path / "model.pt"
    for end in range(2, len(whole), 37):
        path.write_bytes(whole[:end])
        refusal(lambda: reshard.read_state_dict(path))


def test_a_file_that_is_replaced_meanwhile_is_told(checkpoint: Path) -> None:
    # The record of another save of the same layout is as good as the first: DCP has no ids in its
    # data files. One of another layout is not.
    other = torch_file(torch.zeros(5, 5))
    data = bytearray((checkpoint / DATA).read_bytes())
    metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    info = _info(metadata, "model.weight")
    data[info.offset : info.offset + len(other)] = other
    (checkpoint / DATA).write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"model\.weight"):
        reshard.read_tensor(checkpoint, "model.weight")
    assert os.path.getsize(checkpoint / DATA) > 0

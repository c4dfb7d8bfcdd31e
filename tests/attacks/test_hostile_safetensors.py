"""Directories of safetensors files that lie, and what readers of them say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard._consolidate_hf_safetensors import consolidate_safetensors_files
from reshard.api import (
    CheckpointException,
    CorruptCheckpointError,
    CoverageError,
    UnsupportedFormatError,
)
from support.hostile import memory_limit
from support.plain_files import entry, write_index, write_raw, write_shard, write_tensors

DATA = bytes(16)
SOUND = entry([4], 0, 16)


def sharding_note(content: Any) -> dict[str, Any]:
    text = content if isinstance(content, str) else json.dumps(content)
    return {"__metadata__": {"DCP_SHARDING_INFO": text}}


def load(directory: Path, shape: tuple[int, ...] = (4,)) -> None:
    target = {"w": torch.empty(shape)}
    with memory_limit():
        reshard.load(
            target, storage_reader=reshard.HuggingFaceStorageReader(directory), no_dist=True
        )


HOSTILE: dict[str, tuple[Any, bytes, type[CheckpointException], str]] = {
    "huge header": (b"{}", DATA, CorruptCheckpointError, "announces a header of"),
    "header that is no JSON": (b"\xff\xfe", DATA, CorruptCheckpointError, "not JSON"),
    "header that is no object": ([1], DATA, CorruptCheckpointError, "not an object"),
    "deep header": (b"[" * 200_000, DATA, CorruptCheckpointError, "not JSON"),
    "notes that are no texts": (
        {"__metadata__": {"a": 1}, "w": SOUND},
        DATA,
        CorruptCheckpointError,
        "notes",
    ),
    "entry without a shape": ({"w": {"dtype": "F32"}}, DATA, CorruptCheckpointError, "'w'"),
    "negative offsets": ({"w": entry([4], -16, 0)}, DATA, CorruptCheckpointError, "'w'"),
    "offsets outside": ({"w": entry([4], 16, 32)}, DATA, CorruptCheckpointError, "16 to 32"),
    "offsets backwards": ({"w": entry([4], 16, 0)}, DATA, CorruptCheckpointError, "16 to 0"),
    "fewer bytes than the shape": ({"w": entry([9], 0, 16)}, DATA, CorruptCheckpointError, "16"),
    "shape that overflows": (
        {"w": entry([1 << 62, 1 << 62, 4], 0, 16)},
        DATA,
        CorruptCheckpointError,
        "'w'",
    ),
    "shape that overflows to its bytes": (
        {"w": entry([1 << 32, 1 << 32], 0, 0)},
        DATA,
        CorruptCheckpointError,
        "'w'",
    ),
    "empty shape that overflows": (
        {"w": entry([0, 1 << 62, 1 << 62], 0, 0)},
        DATA,
        CorruptCheckpointError,
        "'w'|number",
    ),
    "more dimensions than torch has": (
        {"w": entry([1] * 300 + [4], 0, 16)},
        DATA,
        CorruptCheckpointError,
        "dimensions",
    ),
    "unknown dtype": (
        {"w": entry([4], 0, 16, "F4_X")},
        DATA,
        UnsupportedFormatError,
        "'F4_X'",
    ),
    "overlapping data": (
        {"w": SOUND, "v": entry([4], 8, 24)},
        bytes(24),
        CorruptCheckpointError,
        "same bytes",
    ),
    "duplicate keys": (
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
        b'"w":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}',
        bytes(32),
        CorruptCheckpointError,
        "'w'",
    ),
    "number of too many digits": (
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16],"x":' + b"9" * 5000 + b"}}",
        DATA,
        CorruptCheckpointError,
        "malformed|not JSON",
    ),
    "note that is no JSON": (
        {**sharding_note("{"), "w": SOUND},
        DATA,
        CorruptCheckpointError,
        "malformed",
    ),
    "note that is no object": (
        {**sharding_note([1]), "w": SOUND},
        DATA,
        CorruptCheckpointError,
        "not an object",
    ),
    "note without the tensor": (
        {**sharding_note({}), "w": SOUND},
        DATA,
        CorruptCheckpointError,
        "where 'w' begins",
    ),
    "note with too few offsets": (
        {**sharding_note({"w": {"saved_offsets": []}}), "w": SOUND},
        DATA,
        CorruptCheckpointError,
        "where 'w' begins",
    ),
    "note with offsets that are no numbers": (
        {**sharding_note({"w": {"saved_offsets": ["0"]}}), "w": SOUND},
        DATA,
        CorruptCheckpointError,
        "where 'w' begins",
    ),
    "note with negative offsets": (
        {**sharding_note({"w": {"saved_offsets": [-4]}}), "w": SOUND},
        DATA,
        CorruptCheckpointError,
        "where 'w' begins",
    ),
    "note with an offset that overflows": (
        {**sharding_note({"w": {"saved_offsets": [(1 << 63) - 1]}}), "w": SOUND},
        DATA,
        CorruptCheckpointError,
        "number|'w'",
    ),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_file_that_lies_is_refused_with_a_reason(attack: str, tmp_path: Path) -> None:
    header, data, error, reason = HOSTILE[attack]
    length = 1 << 62 if attack == "huge header" else None
    write_raw(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(error, match=reason):
        load(tmp_path)


def test_a_header_of_which_little_is_there_takes_no_memory(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "model.safetensors", b"{}", length=(1 << 31) - 9)
    with path.open("r+b") as file:
        file.truncate(1 << 31)
    with pytest.raises(CorruptCheckpointError, match="too many"):
        load(tmp_path)


OUTSIDE = ["../other.safetensors", "/etc/passwd", "a/../../other.safetensors", "..", ""]


@pytest.mark.parametrize("path", OUTSIDE)
def test_an_index_that_names_a_file_outside_is_refused(path: str, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    write_tensors(tmp_path / "other.safetensors", {"w": torch.ones(4)})
    write_tensors(inside / "model.safetensors", {"w": torch.ones(4)})
    write_index(inside, {"w": path})
    with pytest.raises(CorruptCheckpointError, match="not inside"):
        load(inside)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "malformed"),
        ("[]", "malformed"),
        ('{"weight_map": {"w": 3}}', "malformed"),
        ('{"weight_map": ' + "[" * 200_000, "malformed"),
        ('{"weight_map": {"w": "gone.safetensors"}}', "not there"),
        ('{"weight_map": {"v": "model.safetensors"}}', "does not hold it"),
        ('{"weight_map": {"w": "model.safetensors", "w": "model.safetensors"}}', "two things"),
    ],
)
def test_an_index_that_lies_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"w": torch.ones(4)})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptCheckpointError, match=reason):
        load(tmp_path)


def gap(directory: Path) -> None:
    write_shard(directory / "shard-00001-model-00001-of-00001.safetensors", {"w": ([0], ONES)})
    write_shard(directory / "shard-00003-model-00001-of-00001.safetensors", {"w": ([8], ONES)})


def overlap(directory: Path) -> None:
    write_shard(directory / "shard-00001-model-00001-of-00001.safetensors", {"w": ([0], ONES)})
    write_shard(directory / "shard-00002-model-00001-of-00001.safetensors", {"w": ([3], ONES)})
    write_shard(directory / "shard-00003-model-00001-of-00001.safetensors", {"w": ([8], ONES)})


def other_dtype(directory: Path) -> None:
    write_shard(directory / "shard-00001-model-00001-of-00001.safetensors", {"w": ([0], ONES)})
    part = ONES.to(torch.bfloat16)
    write_shard(directory / "shard-00002-model-00001-of-00001.safetensors", {"w": ([4], part)})


ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (gap, CoverageError),
        (overlap, CorruptCheckpointError),
        (other_dtype, CorruptCheckpointError),
    ],
)
def test_shards_that_do_not_make_a_whole_are_refused(
    damage: Callable[[Path], None], error: type[Exception], tmp_path: Path
) -> None:
    damage(tmp_path / "in")
    with pytest.raises(error, match="'w'"):
        load(tmp_path / "in", (12,))
    with pytest.raises(error, match="'w'"):
        consolidate_safetensors_files(str(tmp_path / "in"), str(tmp_path / "out"), {"w": 1})
    assert not (tmp_path / "out").exists()


def test_shards_far_apart_make_no_tensor_of_that_size(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", {"w": ([0], ONES)})
    write_shard(tmp_path / "b.safetensors", {"w": ([1 << 40], ONES)})
    with memory_limit(), pytest.raises(CoverageError, match="'w'"):
        reshard.read_state_dict(tmp_path)

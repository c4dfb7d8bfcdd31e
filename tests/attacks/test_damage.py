"""Accidents: files cut off anywhere, bytes changed anywhere."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

import reshard
from reshard.api import CheckpointException, CorruptCheckpointError
from support.hostile import (
    MANIFEST,
    SHARD,
    OpenManifest,
    check_refused,
    load_all,
    memory_limit,
    reason_of,
    reseal,
)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flipped(byte: int) -> bytes:
    return bytes([byte ^ 0xFF])


def test_a_manifest_that_is_cut_off_at_any_byte_is_refused(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST
    for length in reversed(range(path.stat().st_size)):
        os.truncate(path, length)
        read = load_all if length % 50 == 0 else _read_weight
        check_refused(lambda read=read: read(checkpoint), str(checkpoint))


def _read_weight(checkpoint: Path) -> torch.Tensor:
    return reshard.read_tensor(checkpoint, "model.weight")


def test_a_manifest_that_grew_is_refused(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST
    path.write_bytes(path.read_bytes() + b"\0")
    check_refused(lambda: load_all(checkpoint), str(checkpoint))


def test_a_manifest_with_any_byte_changed_is_refused(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST
    content = path.read_bytes()
    for position, byte in enumerate(content):
        overwrite(path, position, flipped(byte))
        read = load_all if position % 50 == 0 else _read_weight
        check_refused(lambda read=read: read(checkpoint), str(checkpoint))
        overwrite(path, position, bytes([byte]))
    load_all(checkpoint)


@pytest.mark.parametrize("change", [0x01, 0x80, 0xFF])
def test_a_manifest_with_any_byte_changed_and_a_new_checksum_does_no_harm(
    change: int, checkpoint: Path
) -> None:
    """An attacker can also compute checksums: a clear error, or a load; nothing else."""
    path = checkpoint / MANIFEST
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    text_end = len(content[: 8 + length].rstrip())
    accidents: dict[str, list[int]] = {}
    outcomes = {"loaded": 0, "refused": 0}
    with memory_limit():
        for position in [*range(text_end), *range(8 + length, len(content) - 8)]:
            changed = bytearray(content)
            changed[position] ^= change
            path.write_bytes(reseal(bytes(changed)))
            try:
                load_all(checkpoint)
                reshard.read_state_dict(checkpoint)
                outcomes["loaded"] += 1
            except CheckpointException as error:
                outcomes["refused"] += 1
                reason = reason_of(error)
                if not isinstance(reason, CheckpointException):
                    what = f"{type(reason).__name__}: {reason}"
                    accidents.setdefault(what[:100], []).append(position)
    assert outcomes["loaded"] > 0
    assert outcomes["refused"] > 00
    assert not accidents


def test_a_shard_file_that_is_cut_off_anywhere_is_refused_and_named(checkpoint: Path) -> None:
    path = checkpoint / SHARD
    size = path.stat().st_size
    data_begins = min(OpenManifest(checkpoint).ints("chunks.begins"))
    lengths = {*range(data_begins - 8, size), *range(0, data_begins, 97), 1}
    for length in sorted(lengths, reverse=True):
        os.truncate(path, length)
        check_refused(lambda: load_all(checkpoint), SHARD)


def test_a_shard_file_that_grew_is_refused_and_named(checkpoint: Path) -> None:
    path = checkpoint / SHARD
    path.write_bytes(path.read_bytes() + b"\0")
    check_refused(lambda: load_all(checkpoint), SHARD)


@pytest.mark.parametrize("change", [0x01, 0x80, 0xFF])
def test_any_changed_byte_of_data_is_found_and_the_key_is_named(
    change: int, checkpoint: Path
) -> None:
    path = checkpoint / SHARD
    content = path.read_bytes()
    owner = _owners(checkpoint)
    assert sorted(owner) == list(range(min(owner), len(content))), "bytes that belong to nobody"
    for position, name in owner.items():
        overwrite(path, position, bytes([content[position] ^ change]))
        text = check_refused(lambda: load_all(checkpoint), f"'{name}'")
        assert SHARD in text
        check_refused(lambda: reshard.read_state_dict(checkpoint), f"'{name}'")
        overwrite(path, position, content[position : position + 1])
    load_all(checkpoint)


def _owners(checkpoint: Path) -> dict[int, str]:
    """To whom each byte of data belongs, by the manifest."""
    manifest = OpenManifest(checkpoint)
    sizes = {"model.weight": 48, "model.bias": 32}
    owner = {}
    for name, nbytes in sizes.items():
        begin = manifest.ints("chunks.begins")[manifest.chunk_row(name)]
        owner.update(dict.fromkeys(range(begin, begin + nbytes), name))
    for row, name in enumerate(manifest.texts("values.names")):
        begin, nbytes = manifest.ints("values.begins")[row], manifest.ints("values.nbytes")[row]
        owner.update(dict.fromkeys(range(begin, begin + nbytes), name))
    return owner


def test_any_changed_byte_of_the_header_of_a_shard_file_is_found(checkpoint: Path) -> None:
    path = checkpoint / SHARD
    content = path.read_bytes()
    for position in range(64):
        overwrite(path, position, flipped(content[position]))
        check_refused(lambda: load_all(checkpoint), SHARD)
        overwrite(path, position, content[position : position + 1])


def test_a_region_of_a_damaged_chunk_is_only_found_with_full_verification(
    checkpoint: Path,
) -> None:
    manifest = OpenManifest(checkpoint)
    begin = manifest.ints("chunks.begins")[manifest.chunk_row("model.weight")]
    path = checkpoint / SHARD
    overwrite(path, begin + 47, flipped(path.read_bytes()[begin + 47]))
    first_row = (slice(0, 1),)
    expected = torch.arange(4, dtype=torch.float32).reshape(1, 4)
    for verify in ("off", "chunks"):
        read = reshard.read_tensor(checkpoint, "model.weight", first_row, verify=verify)
        assert torch.equal(read, expected)
    check_refused(
        lambda: reshard.read_tensor(checkpoint, "model.weight", first_row, verify="full"),
        "'model.weight'",
    )
    assert not torch.equal(
        reshard.read_tensor(checkpoint, "model.weight", verify="off"),
        torch.arange(12, dtype=torch.float32).reshape(3, 4),
    )


def test_a_shard_file_of_another_save_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    weight = torch.ones(3, 4)
    reshard.save(
        {
            "model": {"weight": weight, "bias": torch.ones(4, dtype=torch.int64), "tied": weight},
            "step": 987654321,
            "note": "another",
        },
        checkpoint_id=other,
        no_dist=True,
    )
    [shard] = other.glob("*.safetensors")
    assert shard.stat().st_size == (checkpoint / SHARD).stat().st_size
    shutil.copy(shard, checkpoint / SHARD)
    check_refused(lambda: load_all(checkpoint), SHARD)
    # A part of a chunk has no checksum of its own; the id of the save tells.
    with pytest.raises(CorruptCheckpointError, match=SHARD):
        reshard.read_tensor(checkpoint, "model.weight", (slice(0, 1),))


@pytest.mark.parametrize("verify", ["off", "chunks"])
def test_a_shard_file_of_another_save_of_the_same_layout_is_refused_when_a_part_of_it_is_read(
    verify: Literal["off", "chunks"], tmp_path: Path
) -> None:
    for number, name in enumerate(("one", "two")):
        state = {"w": torch.full((4, 4), float(number))}
        reshard.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    theirs, ours = (next((tmp_path / n).glob("*.safetensors")) for n in ("two", "one"))
    shutil.copy(theirs, ours)

    with pytest.raises(CorruptCheckpointError, match=r"another save.*copied in"):
        reshard.read_tensor(tmp_path / "one", "w", (slice(0, 1),), verify=verify)


def test_a_damaged_header_of_a_shard_file_is_found_even_without_verification(
    checkpoint: Path,
) -> None:
    path = checkpoint / SHARD
    overwrite(path, 20, flipped(path.read_bytes()[20]))

    with pytest.raises(CorruptCheckpointError, match=r"header of.*is damaged"):
        reshard.read_tensor(checkpoint, "model.weight", verify="off")


TRUNCATED = """
import os, sys
import torch
import reshard
from reshard.engine import reading

folder = sys.argv[1]
reshard.save({"w": torch.ones(4096, 64)}, checkpoint_id=folder)
file = next(name for name in os.listdir(folder) if name.endswith(".safetensors"))
copy_rows = reading._Filler._copy_rows

def truncate_first(self, *args):
    os.truncate(os.path.join(folder, file), 4096)
    return copy_rows(self, *args)

reading._Filler._copy_rows = truncate_first
reading._BOUNCE_BYTES = reading._HASHED_ROWS_BYTES = 64 << 10
try:
    reshard.read_tensor(folder, "w", (slice(None), slice(3, 5)), verify=sys.argv[2])
except reshard.api.CorruptCheckpointError as error:
    sys.exit(0 if file in str(error) else 1)
sys.exit(2)
"""


@pytest.mark.parametrize("verify", ["off", "full"])
def test_a_file_that_is_truncated_while_columns_are_read_is_an_error_and_no_signal(
    verify: str, tmp_path: Path
) -> None:
    outcome = subprocess.run(
        [sys.executable, "-c", TRUNCATED, str(tmp_path / "c"), verify], timeout=60, check=False
    )

    assert outcome.returncode == 0

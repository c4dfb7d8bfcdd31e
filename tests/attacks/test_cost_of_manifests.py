"""Manifests with a sound checksum that are made to take long, or much memory.

What a manifest says costs time and memory in proportion to its size. Each of these takes
a fraction of a second; without the checks it takes from ten seconds to for ever.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import reshard
from reshard.api import CorruptCheckpointError, UnsupportedFormatError
from reshard.format.manifest import decode_manifest, encode_manifest
from reshard.format.merging import merge_manifests
from reshard.format.tables import Manifest
from reshard.format.values import encode_value
from reshard.planning.columns import DTYPE_CODES
from reshard.planning.overlaps import overlapping_pairs
from support.hostile import DOORS, MANIFEST, STEP, OpenManifest, refusal

SECONDS = 5.0


@contextmanager
def bounded(nbytes: int = 256 << 20) -> Iterator[None]:
    """The block takes a few seconds at most, and at its peak `nbytes` of memory."""
    tracemalloc.start()
    began = time.thread_time()
    try:
        yield
        taken, (_, peak) = time.thread_time() - began, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < SECONDS
    assert peak < nbytes


def manifest_of(boxes: Any, shape: Any) -> Manifest:
    """One tensor of bytes with the given chunks, offsets and sizes."""
    offsets, sizes = (np.asarray(column, dtype=np.int64) for column in boxes)
    count, width = offsets.shape
    nbytes = sizes.prod(axis=1)
    begins = 4096 + np.concatenate([[0], np.cumsum(nbytes)])
    none = np.empty(0, dtype=np.int64)
    zeros, numbers = np.zeros(count, dtype=np.int64), np.array([count], dtype=np.int64)
    return Manifest(
        files=["__0_0.safetensors"], file_sizes=begins[-1:], header_sizes=np.array([4096]),
        header_checksums=np.array([0]), tensor_names=["w"],
        dtypes=np.array([DTYPE_CODES[torch.uint8]]), flags=np.array([0]),
        ndims=np.array([width]), shapes=np.array([shape], dtype=np.int64),
        aliases=np.array([-1]), chunk_starts=np.concatenate([[0], numbers]),
        chunk_offsets=offsets, chunk_sizes=sizes, chunk_files=zeros, chunk_begins=begins[:-1],
        chunk_digests=np.zeros((len(offsets), 16), dtype=np.uint8), chunk_probes=zeros,
        value_names=[], value_files=none, value_begins=none,
        value_nbytes=none, value_checksums=none, value_pickled=none,
    )  # fmt: skip


def diagonal(dims: int) -> Any:
    """Two chunks that leave a gap, and cut the tensor along every dimension."""
    ones = np.ones(dims, dtype=np.int64)
    return (np.stack([0 * ones, ones]), np.stack([ones, ones])), 2 * ones


@pytest.mark.parametrize("dims", [2, 20, 22, 60])
def test_a_tensor_that_is_cut_along_many_dimensions_is_checked_at_once(dims: int) -> None:
    encoded = encode_manifest(manifest_of(*diagonal(dims)))
    with bounded(16 << 20):
        assert len(decode_manifest(encoded, "the manifest").chunk_files) == 2


def grid(rows: int, columns: int) -> Any:
    offsets = np.array(list(itertools.product(range(rows), range(columns))), dtype=np.int64)
    return offsets, np.ones_like(offsets)


def test_many_chunks_with_a_gap_are_checked_at_once() -> None:
    offsets, sizes = grid(200, 200)
    encoded = encode_manifest(manifest_of((offsets[:-1], sizes[:-1]), (200, 200)))
    with bounded():
        assert len(decode_manifest(encoded, "the manifest").chunk_files) == 39_999


def test_many_chunks_with_a_gap_and_an_overlap_are_refused_at_once() -> None:
    offsets, sizes = grid(200, 200)
    sizes[20_000] = (1, 2)
    encoded = encode_manifest(manifest_of((offsets[:-1], sizes[:-1]), (200, 200)))
    with bounded(), pytest.raises(CorruptCheckpointError, match="'w' that overlap"):
        decode_manifest(encoded, "the manifest")


def test_chunks_that_are_all_the_same_are_refused_at_once() -> None:
    offsets, sizes = np.zeros((30_000, 2), dtype=np.int64), np.ones((30_000, 2), dtype=np.int64)
    encoded = encode_manifest(manifest_of((offsets, sizes), (2, 2)))
    with bounded(), pytest.raises(CorruptCheckpointError, match="'w' that overlap"):
        decode_manifest(encoded, "the manifest")


def entangled(count: int) -> tuple[Any, Any]:
    """Beams along one dimension each, which no plane separates and of which none meet."""
    beams = np.arange(count)
    offsets, sizes = np.zeros((3 * count, 3), dtype=np.int64), np.ones((3 * count, 3), dtype=int)
    for dim, (one, other) in enumerate(((1, 2), (2, 0), (0, 1))):
        rows = beams + dim * count
        # Beams of one direction lie at even places of one of the others, and odd of the next.
        offsets[rows, one], offsets[rows, other] = 2 * beams, 2 * beams[::-1] + 1
        sizes[rows, dim] = 2 * count
    return offsets, sizes


def test_entangled_chunks_are_given_up_at_once_rather_than_compared_in_pairs() -> None:
    offsets, sizes = entangled(10_000)
    encoded = encode_manifest(manifest_of((offsets, sizes), (20_000, 20_000, 20_000)))
    with bounded(), pytest.raises(CorruptCheckpointError, match="'w' that leave gaps"):
        decode_manifest(encoded, "the manifest")


def test_a_few_entangled_chunks_are_compared() -> None:
    found = overlapping_pairs(np.zeros(30, dtype=np.int64), *entangled(10))
    assert len(found.left) == len(found.undecided) == 0


def test_many_tensors_with_gaps_are_checked_together() -> None:
    count = 20_000
    one = manifest_of(*diagonal(2))
    many = {
        "tensor_names": [f"w{n}" for n in range(count)],
        "chunk_starts": np.arange(count + 1) * 2,
        "chunk_begins": 4096 + np.arange(2 * count),
        "file_sizes": np.array([4096 + 2 * count]),
    }
    for name in ("dtypes", "flags", "ndims", "shapes", "aliases"):
        many[name] = np.repeat(getattr(one, name), count, axis=0)
    for name in ("chunk_offsets", "chunk_sizes"):
        many[name] = np.tile(getattr(one, name), (count, 1))
    for name in ("chunk_files", "chunk_probes"):
        many[name] = np.zeros(2 * count, dtype=np.int64)
    many["chunk_digests"] = np.zeros((2 * count, 16), dtype=np.uint8)
    encoded = encode_manifest(dataclasses.replace(one, **many))
    with bounded():
        decode_manifest(encoded, "the manifest")


def test_columns_wider_than_any_tensor_are_refused_at_once() -> None:
    width = 100_000
    boxes = np.zeros((1, width), dtype=np.int64), np.ones((1, width), dtype=np.int64)
    wide = manifest_of(boxes, np.ones(width))
    encoded = encode_manifest(dataclasses.replace(wide, ndims=np.array([1])))
    with bounded(), pytest.raises(CorruptCheckpointError, match=r"column 'tensors\.shapes'"):
        decode_manifest(encoded, "the manifest")


# How names nest


def packed_paths(paths: dict[str, tuple[Any, ...]]) -> bytes:
    cuts = [
        [-len(str(key)) if isinstance(key, int) else len(key) for key in path]
        for path in paths.values()
    ]
    return b"N" + msgspec.msgpack.encode([list(paths), cuts])


def spelled(*paths: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    return {".".join(map(str, path)): path for path in paths}


def big_keys(count: int) -> bytes:
    """Keys of one dict that were integers, all with the same hash."""
    names = [f"d.{n * sys.hash_info.modulus}" for n in range(1, count)]
    cuts = [[1, len(name) - 2 + (1 << 32)] for name in names]
    return b"N" + msgspec.msgpack.encode([names, cuts])


def in_value(planner_data: Any) -> bytes:
    return b"V" + encode_value(planner_data)


PATHS: dict[str, bytes] = {
    "lists 100 deep, each as long as may be": packed_paths(
        spelled(*(("a", n, *[4000] * 99) for n in range(1000)))
    ),
    "a list of 2^31 elements": packed_paths(spelled(("model", 2**31))),
    "a list with a position of 5000 digits": b"N"
    + msgspec.msgpack.encode([["a." + "9" * 5000], [[1, -5000]]]),
    "a position before the beginning": b"N" + msgspec.msgpack.encode([["a.-5"], [[1, -2]]]),
    "a key of 5000 digits": b"N"
    + msgspec.msgpack.encode([["a." + "9" * 5000], [[1, 5000 + (1 << 32)]]]),
    "a key that no integer is written as": b"N"
    + msgspec.msgpack.encode([["a.007"], [[1, 3 + (1 << 32)]]]),
    "paths of 1001 steps": packed_paths(spelled(("a",) * 1001)),
    "a path of a million steps": b"N" + msgspec.msgpack.encode([["a"], [[0] * 1_000_000]]),
    "an empty dict at position 2^31": b"N"
    + msgspec.msgpack.encode([[], [], [["a.2147483648", [1, -10]]]]),
    "keys with the same hash": big_keys(5000),
}


@pytest.mark.parametrize("data", PATHS.values(), ids=PATHS.keys())
def test_names_made_to_take_long_to_nest_are_refused_at_once(data: bytes, checkpoint: Path) -> None:
    manifest = OpenManifest(checkpoint)
    manifest.set_bytes("planner_data", data)
    manifest.write()
    with bounded():
        text = str(refusal(lambda: reshard.read_state_dict(checkpoint)))
    assert "damaged names" in text
    assert len(text) < 1000


def test_long_lists_in_the_data_of_a_custom_planner_are_refused_at_once(checkpoint: Path) -> None:
    manifest = OpenManifest(checkpoint)
    manifest.set_bytes("planner_data", in_value({"step": ("a", 2**31), "note": ["a", 3]}))
    manifest.write()
    with bounded():
        assert "damaged names" in str(refusal(lambda: reshard.read_state_dict(checkpoint)))


@pytest.mark.parametrize(
    "data", [{"step": "text"}, {"step": 5}, {"step": [1.5]}, {"step": []}, [1], {3: ("a",)}]
)
def test_other_data_of_a_custom_planner_is_not_taken_for_names(data: Any, checkpoint: Path) -> None:
    manifest = OpenManifest(checkpoint)
    manifest.set_bytes("planner_data", in_value(data))
    manifest.write()
    if data == {"step": []}:
        refusal(lambda: reshard.read_state_dict(checkpoint))
    else:
        assert reshard.read_state_dict(checkpoint)["step"] == STEP


def test_names_that_share_data_in_one_part_only_do_not_multiply_it() -> None:
    count = 20_000
    offsets, sizes = grid(count, 1)
    one = manifest_of((offsets, sizes), (count, 1))
    names = ["w", *(f"alias{n}" for n in range(count))]
    rows = {name: np.repeat(getattr(one, name), len(names), axis=0) for name in
            ("dtypes", "flags", "ndims", "shapes")}  # fmt: skip
    shared = Manifest(**{
        **vars(one),
        **rows,
        "tensor_names": names,
        "aliases": np.array([-1] + [0] * count),
        "chunk_starts": np.array([0] + [count] * (count + 1)),
    })  # fmt: skip
    # The other rank says that the names share the data of another tensor.
    other = Manifest(**{
        **vars(shared),
        "tensor_names": ["other", *names[1:]],
        "files": ["__1_0.safetensors"],
    })  # fmt: skip
    with bounded(), pytest.raises(CorruptCheckpointError, match="share the data"):
        merge_manifests([shared, other], "the checkpoint")


def make_sparse(path: Path, nbytes: int) -> None:
    path.write_bytes(b"")
    os.truncate(path, nbytes)


@pytest.mark.parametrize("door", DOORS)
def test_a_sparse_manifest_is_refused_before_it_is_read(door: str, checkpoint: Path) -> None:
    make_sparse(checkpoint / MANIFEST, 3 << 30)
    with bounded(16 << 20):
        text = str(refusal(lambda: DOORS[door](checkpoint)))
    assert str(3 << 30) in text
    assert str(1 << 30) in text
    assert "manifest_limit_bytes" in text


def test_a_sparse_manifest_below_the_limit_is_refused_by_its_header(checkpoint: Path) -> None:
    for beginning in (b"", (500 << 20).to_bytes(8, "little")):
        (checkpoint / MANIFEST).write_bytes(beginning)
        os.truncate(checkpoint / MANIFEST, 900 << 20)
        with bounded(16 << 20):
            refusal(lambda: reshard.read_state_dict(checkpoint))


def test_a_manifest_that_grew_by_a_hole_is_refused_by_its_header(checkpoint: Path) -> None:
    OpenManifest(checkpoint).write()
    os.truncate(checkpoint / MANIFEST, 900 << 20)
    with bounded(16 << 20):
        assert "cut short" in str(refusal(lambda: reshard.read_state_dict(checkpoint)))


def test_the_limit_on_a_manifest_is_an_option(checkpoint: Path) -> None:
    nbytes = (checkpoint / MANIFEST).stat().st_size

    def load_with(limit_bytes: int) -> Callable[[], Any]:
        reader = reshard.FileSystemReader(checkpoint, manifest_limit_bytes=limit_bytes)
        return lambda: reshard.load({"step": 0}, storage_reader=reader, no_dist=True)

    load_with(nbytes)()
    reason = refusal(load_with(nbytes - 1))
    assert isinstance(reason, UnsupportedFormatError)
    assert f"{nbytes} bytes" in str(reason)
    assert str(nbytes - 1) in str(reason)

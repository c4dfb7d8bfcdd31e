"""The manifest: what is encoded comes back, and what contradicts itself does not."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash

from reshard.api import CorruptCheckpointError, UnsupportedFormatError
from reshard.format.checks import check_dtypes
from reshard.format.manifest import decode_manifest, encode_manifest
from reshard.format.tables import Manifest, Origin
from reshard.planning.columns import DTYPE_CODES, DTYPES


def ints(*numbers: Any) -> Any:
    return np.array(numbers, dtype=np.int64)


def make(**changes: Any) -> Manifest:
    """Two tensors, the first in two chunks, an alias of it, and one value."""
    manifest = Manifest(
        files=["__0_0.safetensors", "__1_0.safetensors"],
        file_sizes=ints(8192, 5000),
        header_sizes=ints(4096, 4096),
        header_checksums=ints(7, -7),
        tensor_names=["w", "scalar", "tied"],
        dtypes=ints(
            DTYPE_CODES[torch.float32], DTYPE_CODES[torch.int64], DTYPE_CODES[torch.float32]
        ),
        flags=ints(1, 0, 1),
        ndims=ints(2, 0, 2),
        shapes=ints([4, 3], [1, 1], [4, 3]),
        aliases=ints(-1, -1, 0),
        chunk_starts=ints(0, 2, 3, 3),
        chunk_offsets=ints([0, 0], [2, 0], [0, 0]),
        chunk_sizes=ints([2, 3], [2, 3], [1, 1]),
        chunk_files=ints(0, 1, 0),
        chunk_begins=ints(4096, 4096, 4120),
        chunk_digests=np.arange(48, dtype=np.uint8).reshape(3, 16),
        chunk_probes=ints(-1, 2**63 - 1, -(2**63)),
        value_names=["step"],
        value_files=ints(1),
        value_begins=ints(4120),
        value_nbytes=ints(7),
        value_checksums=ints(-5),
        value_pickled=ints(0),
        planner_data=b"N\x92\x90\x90",
        notes={"created": "today"},
    )
    return dataclasses.replace(manifest, **changes)


def check_same(found: Manifest, expected: Manifest) -> None:
    for field in dataclasses.fields(Manifest):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "notes":
            assert dict(other).items() <= dict(one).items()
        elif isinstance(other, np.ndarray):
            np.testing.assert_array_equal(one, other, strict=True, err_msg=field.name)
        else:
            assert [*(one or ())] == [*(other or ())], field.name


def test_a_manifest_comes_back_as_it_was() -> None:
    check_same(decode_manifest(encode_manifest(make()), "here"), make())


def test_columns_that_may_be_absent_come_back_as_they_were() -> None:
    full = make(
        chunk_fingerprints=ints([1, -1], [2, -2], [3, -3]),
        chunk_codecs=ints(0, 1, 2),
        chunk_stored_nbytes=ints(24, 7, 3),
        value_codecs=ints(2),
        codec_names=["zstd", "other"],
        file_origins=ints(-1, 0),
        origins=[Origin("../step-1", "an id"), Origin("../../elsewhere/model", "")],
    )
    found = decode_manifest(encode_manifest(full), "here")
    check_same(found, full)
    assert found.features == ["references", "codecs"]
    assert found.notes["requires"] == "references codecs"
    assert found.origin_of(0) is None
    assert found.origin_of(1) == ("../step-1", "an id")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"file_origins": ints(-1, 1)}, "an origin that it does not list"),
        ({"file_origins": ints(-2, 0)}, "an origin that it does not list"),
        ({"file_origins": ints(0)}, "lists of different lengths"),
        ({"origins": [Origin("../a", ""), Origin("../a", "")]}, "the same origin twice"),
        *(
            ({"origins": [Origin(location, "")]}, "not a plain relative path")
            for location in (
                "/etc",
                "a",
                ".",
                "..",
                "../",
                "../..",
                "../a/../b",
                "../a//b",
                "../a/",
                "a/../../b",
                "../a\\b",
                "../a\nb",
                "../\0",
                "",
            )
        ),
        ({"codec_names": [], "chunk_codecs": ints(0, 1, 0)}, "a codec that it does not list"),
        ({"chunk_codecs": ints(0, 3, 0)}, "a codec that it does not list"),
        ({"value_codecs": ints(3)}, "a codec that it does not list"),
        ({"chunk_stored_nbytes": None}, "encoded chunks without their sizes"),
        ({"chunk_stored_nbytes": ints(23, 7, 3)}, "a chunk without a codec in another size"),
        ({"chunk_stored_nbytes": ints(24, 5000, 3)}, "5000 bytes long"),
        ({"chunk_stored_nbytes": ints(24, -1, 3)}, "-1 bytes long"),
        ({"chunk_fingerprints": ints([1, 2])}, "lists of different lengths"),
    ],
)
def test_columns_that_contradict_the_others_are_refused(changes: Any, reason: str) -> None:
    whole = {
        "chunk_codecs": ints(0, 1, 2),
        "chunk_stored_nbytes": ints(24, 7, 3),
        "codec_names": ["zstd", "other"],
        "file_origins": ints(-1, 0),
        "origins": [Origin("../step-1", "an id")],
    }
    bad = make(**whole | changes)
    with pytest.raises(CorruptCheckpointError, match=re.escape(reason)):
        decode_manifest(encode_manifest(bad), "here")


def test_two_chunks_may_refer_to_the_same_bytes_of_another_checkpoint_only() -> None:
    same = {"chunk_files": ints(0, 0, 1), "chunk_begins": ints(4096, 4096, 4200)}
    with pytest.raises(CorruptCheckpointError, match="gives the same bytes"):
        decode_manifest(encode_manifest(make(**same)), "here")
    origin = {"file_origins": ints(0, -1), "origins": [Origin("../step-1", "an id")]}
    decode_manifest(encode_manifest(make(**same, **origin)), "here")


def test_an_empty_manifest_comes_back() -> None:
    none = ints()
    table = np.zeros((0, 1), dtype=np.int64)
    empty = Manifest(
        files=[],
        tensor_names=[],
        value_names=[],
        **{
            field.name: table if field.name in ("shapes", "chunk_offsets", "chunk_sizes") else none
            for field in dataclasses.fields(Manifest)
            if field.type == "Ints" and field.name != "chunk_starts"
        },
        chunk_starts=ints(0),
        chunk_digests=np.zeros((0, 16), dtype=np.uint8),
    )
    check_same(decode_manifest(encode_manifest(empty), "here"), empty)


def test_dtypes_are_stored_by_name_not_by_a_number_of_this_process() -> None:
    raw = encode_manifest(make())
    loaded = safetensors.torch.load(raw)
    assert loaded["tensors.dtypes"].tolist() == [0, 1, 0]
    assert bytes(loaded["tensors.dtype_names"].numpy()) == b"\x92\xa7float32\xa5int64"


DENSE = [dtype for dtype in DTYPES if not str(dtype).startswith(("torch.qint", "torch.quint"))]


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_every_dtype_of_torch_has_a_name_in_the_manifest(dtype: torch.dtype) -> None:
    code = DTYPE_CODES[dtype]
    one = make(dtypes=ints(code, code, code), file_sizes=ints(1 << 20, 1 << 20))
    one = dataclasses.replace(one, chunk_begins=ints(4096, 4096, 8192), value_begins=ints(9000))
    assert decode_manifest(encode_manifest(one), "here").dtypes.tolist() == [code] * 3


def test_a_manifest_is_a_safetensors_file_with_aligned_columns() -> None:
    raw = encode_manifest(make())
    (length,) = struct.unpack("<Q", raw[:8])
    assert (8 + length) % 4096 == 0
    header = json.loads(raw[8 : 8 + length])
    notes = header.pop("__metadata__")
    assert notes == {
        "created": "today",
        "format": "reshard",
        "version": "1",
        "checksum": "xxh3-64",
        "digest": "xxh3-128",
    }
    for entry in header.values():
        if entry["dtype"] == "I64":
            assert entry["data_offsets"][0] % 8 == 0
    assert header["checksum"]["data_offsets"][1] == len(raw) - 8 - length
    assert struct.unpack("<Q", raw[-8:])[0] == xxhash.xxh3_64_intdigest(raw[:-8])
    assert safetensors.torch.load(raw)["chunks.begins"].tolist() == [4096, 4096, 4120]


def test_notes_of_the_writer_cannot_change_the_format() -> None:
    raw = encode_manifest(make(notes={"format": "other", "version": "9"}))
    assert decode_manifest(raw, "here").notes["version"] == "1"


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "chunks overlap in their file": {"chunk_begins": ints(4096, 4096, 4100)},
    "a value overlaps a chunk": {"value_begins": ints(4119)},
    "a chunk ends after its file": {"file_sizes": ints(4127, 5000)},
    "a value ends after its file": {"file_sizes": ints(8192, 4126)},
    "a file is not listed": {"chunk_files": ints(0, 2, 0)},
    "a name is there twice": {"value_names": ["w"]},
    "a path climbs out": {"files": ["../x", "y"]},
    "a path is absolute": {"files": ["/x", "y"]},
    "a chunk leaves its tensor": {"chunk_offsets": ints([0, 0], [3, 0], [0, 0])},
    "a shape is negative": {"shapes": ints([-4, 3], [1, 1], [-4, 3])},
    "an alias of an alias": {"aliases": ints(2, -1, 0)},
    "an alias of another shape": {"aliases": ints(-1, -1, 1)},
    "rows are missing": {"chunk_files": ints(0, 1)},
    "chunks belong to nobody": {"chunk_starts": ints(0, 1, 2, 2)},
    "chunk starts fall": {"chunk_starts": ints(0, 3, 2, 3)},
    "too many dimensions": {"ndims": ints(3, 0, 3)},
}


@pytest.mark.parametrize("change", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_manifest_that_contradicts_itself_is_refused_by_name(change: dict[str, Any]) -> None:
    raw = encode_manifest(make(**change))
    with pytest.raises(CorruptCheckpointError, match=r"^the manifest "):
        decode_manifest(raw, "the manifest")


def test_neighbours_that_touch_do_not_overlap() -> None:
    touching = make(chunk_begins=ints(4096, 4096, 4120), value_begins=ints(4120))
    decode_manifest(encode_manifest(touching), "here")


def test_empty_chunks_may_lie_anywhere_in_their_file() -> None:
    empty = make(
        shapes=ints([0, 3], [1, 1], [0, 3]),
        chunk_offsets=ints([0, 0], [0, 0], [0, 0]),
        chunk_sizes=ints([0, 3], [0, 3], [1, 1]),
        chunk_begins=ints(4121, 5000, 4120),
    )
    decode_manifest(encode_manifest(empty), "here")


def test_a_manifest_may_lie_in_memory_that_must_not_be_written() -> None:
    manifest = decode_manifest(memoryview(encode_manifest(make())).toreadonly(), "here")
    assert manifest.chunk_begins.tolist() == [4096, 4096, 4120]


def large(chunks: int) -> Manifest:
    rows = np.arange(chunks)
    return make(
        files=["f"],
        file_sizes=ints(4096 + 4 * chunks),
        header_sizes=ints(4096),
        header_checksums=ints(7),
        tensor_names=["w"],
        dtypes=ints(DTYPE_CODES[torch.float32]),
        flags=ints(0),
        ndims=ints(1),
        shapes=ints([chunks]),
        aliases=ints(-1),
        chunk_starts=ints(0, chunks),
        chunk_offsets=rows.reshape(-1, 1),
        chunk_sizes=np.ones((chunks, 1), dtype=np.int64),
        chunk_files=np.zeros(chunks, dtype=np.int64),
        chunk_begins=4096 + 4 * rows,
        chunk_digests=np.zeros((len(rows), 16), dtype=np.uint8),
        chunk_probes=rows,
        **dict.fromkeys(
            ("value_files", "value_begins", "value_nbytes", "value_checksums", "value_pickled"),
            ints(),
        ),
        value_names=[],
    )


def test_opening_a_large_manifest_makes_no_object_for_each_chunk() -> None:
    raw = encode_manifest(large(200_000))
    tracemalloc.start()
    try:
        manifest = decode_manifest(raw, "here")
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(manifest.chunk_begins) == 200_000
    # Columns are views of the file.
    assert kept < len(raw) // 20


def test_a_file_of_another_kind_is_told_from_a_damaged_one() -> None:
    other = safetensors.torch.save({"a": torch.zeros(2)})
    with pytest.raises(UnsupportedFormatError, match="not a Reshard manifest"):
        decode_manifest(other, "here")
    raw = encode_manifest(make())
    for newer in (b"2", b"x"):
        changed = raw.replace(b'"version":"1"', b'"version":"' + newer + b'"')
        with pytest.raises(UnsupportedFormatError, match="reads version 1"):
            decode_manifest(changed, "here")
    with pytest.raises(CorruptCheckpointError, match="damaged: its checksum"):
        decode_manifest(raw.replace(b"today", b"tuesd"), "here")


def test_a_dtype_of_another_torch_is_named_together_with_the_torch_at_hand() -> None:
    here = re.escape(torch.__version__)
    with pytest.raises(UnsupportedFormatError, match=rf"'float1024', which torch {here} "):
        check_dtypes(["float32", "float1024"], "here")

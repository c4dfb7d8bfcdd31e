"""Containers: what is built is safetensors, and what is read is not trusted."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.api import CorruptCheckpointError
from reshard.format.container import (
    ALIGNMENT,
    SAFETENSORS_DTYPES,
    Entry,
    build_header,
    parse_header,
)

names = st.text(max_size=8).filter(lambda name: name != "__metadata__")


def raw(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@given(
    st.dictionaries(names, st.lists(st.integers(0, 5), max_size=3), max_size=6),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_a_header_is_read_as_it_was_built(
    shapes: dict[str, list[int]], notes: dict[str, str]
) -> None:
    entries, end = {}, 0
    for name, shape in shapes.items():
        nbytes = int(torch.Size(shape).numel())
        entries[name] = Entry("U8", shape, end, end + nbytes)
        end += nbytes
    header = build_header(entries, notes)
    assert len(header) % ALIGNMENT == 0
    assert parse_header(header, len(header) + end, "x") == (entries, notes, len(header))


def test_the_library_reads_what_is_built() -> None:
    header = build_header(
        {"a": Entry("F32", (2, 1), 0, 8), "é": Entry("I8", (), 8, 9)}, {"format": "pt"}
    )
    loaded = safetensors.torch.load(header + struct.pack("<2fb", 1.5, -2, 7))
    assert loaded["a"].tolist() == [[1.5], [-2.0]]
    assert loaded["é"].item() == 7


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES, ids=str)
def test_every_dtype_has_the_name_that_the_library_gives_it(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    raw_file = safetensors.torch.save({"t": tensor})
    (length,) = struct.unpack("<Q", raw_file[:8])
    header = json.loads(raw_file[8 : 8 + length])
    assert header["t"]["dtype"] == SAFETENSORS_DTYPES[dtype]


def test_a_header_that_just_fits_a_page_is_not_padded_by_another() -> None:
    for length in range(ALIGNMENT - 120, ALIGNMENT + 120):
        header = build_header({}, {"n": "x" * length})
        assert len(header) % ALIGNMENT == 0
        (announced,) = struct.unpack("<Q", header[:8])
        assert announced + 8 == len(header)
        text = header[8:].rstrip()
        assert len(header) - 8 - len(text) < ALIGNMENT


GOOD = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"data_offsets": [0, 5]}, "'t' at bytes 0 to 5 of 4"),
        ({"data_offsets": [3, 2]}, "'t' at bytes 3 to 2 of 4"),
        ({"data_offsets": [-1, 3]}, "malformed description of 't'"),
        ({"data_offsets": [0]}, "malformed description of 't'"),
        ({"data_offsets": "04"}, "malformed description of 't'"),
        ({"shape": None}, "malformed description of 't'"),
        ({"shape": [1.5]}, "malformed description of 't'"),
        ({"shape": [True]}, "malformed description of 't'"),
        ({"dtype": 5}, "malformed description of 't'"),
    ],
)
def test_an_entry_that_cannot_be_is_refused_by_name(change: dict[str, Any], told: str) -> None:
    sound = raw(json.dumps({"t": GOOD}).encode())
    assert parse_header(sound, len(sound) + 4, "the file")[0]["t"].end == 4
    header = raw(json.dumps({"t": {**GOOD, **change}}).encode())
    with pytest.raises(CorruptCheckpointError, match=r"^the file ") as caught:
        parse_header(header, len(header) + 4, "the file")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\0" * 7,
        raw(b""),
        raw(b"{"),
        raw(b"[]"),
        raw(b"7"),
        raw(b'{"t": []}'),
        raw(b'{"__metadata__": {"a": 1}}'),
        raw(b'{"__metadata__": []}'),
        raw(b'{"\xff": 1}'),
        raw(b"[" * 50_000),
        struct.pack("<Q", 3) + b"{}",
        b"\xff" * 16,
    ],
    ids=lambda header: repr(header[:30]),
)
def test_a_header_that_is_none_is_refused_with_the_name_of_the_file(header: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^the file "):
        parse_header(header, len(header), "the file")

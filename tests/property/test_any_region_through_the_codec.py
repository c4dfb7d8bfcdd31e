"""Whatever the chunks that were encoded and the regions that are wanted: the same elements."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.engine import encoding
from reshard.engine.decoding import DecodedChunk, FrameBuffers
from reshard.engine.encoding import write_encoded_file
from reshard.engine.reading import Request, Verify, read_regions
from reshard.engine.writing import Content
from reshard.format import codec
from reshard.stores.memory import MemoryStore

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.complex64]


@st.composite
def cuts(draw: st.DrawFn, extent: int) -> list[tuple[int, int]]:
    """A dimension in one to three parts, some of them perhaps empty."""
    inner = draw(st.lists(st.integers(0, extent), max_size=2))
    return list(itertools.pairwise([0, *sorted(inner), extent]))


def boxes(parts: list[list[tuple[int, int]]]) -> list[tuple[slice, ...]]:
    return [tuple(slice(*part) for part in box) for box in itertools.product(*parts)]


def sizes(box: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_layout_of_encoded_chunks_is_read_in_any_other(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(50_001,), (300, 400), (70, 3, 500), (9, 11_000)]))
    dtype = data.draw(st.sampled_from(DTYPES))
    numbers = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=math.prod(shape))
    whole = (torch.from_numpy(numbers) * 5).to(dtype).view(shape)
    saved = boxes([data.draw(cuts(extent)) for extent in shape])
    wanted = boxes([data.draw(cuts(extent)) for extent in shape])
    store = MemoryStore()
    contents = [
        Content(f"t{i}", dtype, sizes(box), whole[box].nbytes, whole[box])
        for i, box in enumerate(saved)
    ]
    with (
        mock.patch.object(codec, "FRAME_BYTES", codec.LEAST_FRAME_BYTES),
        mock.patch.object(encoding, "LEAST_ENCODED_BYTES", 1000),
    ):
        written = write_encoded_file(store, "file", contents, 2, durable=False)
    assert written.encoded is not None
    assert written.stored_nbytes is not None

    readers: dict[str, Any] = {"file": store.open_reader("file")}
    buffers = FrameBuffers()
    places = []
    for i, content in enumerate(contents):
        begin, stored = int(written.begins[i]), int(written.stored_nbytes[i])
        if written.encoded[i]:
            readers[str(i)] = DecodedChunk(
                readers["file"], begin, stored, content.nbytes, buffers, "x"
            )
        places.append((str(i), 0) if written.encoded[i] else ("file", begin))
    found = torch.zeros_like(whole)
    requests = []
    for target in wanted:
        for i, source in enumerate(saved):
            common = tuple(
                slice(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop)))
                for a, b in zip(target, source, strict=True)
            )
            if math.prod(sizes(common)):
                offsets = tuple(a.start - b.start for a, b in zip(common, source, strict=True))
                requests.append(
                    Request(
                        f"t{i}", *places[i], sizes(source), dtype, written.digests[i].tobytes(),
                        offsets, sizes(common), found[common], "whole",
                    )
                )  # fmt: skip
    verify = data.draw(st.sampled_from(list(Verify)))
    read_regions(readers, requests, verify, 2, "memory")

    assert torch.equal(found, whole)

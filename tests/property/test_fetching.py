"""What is asked for ahead of a remote store: all that is read, in few requests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.engine import fetching
from reshard.engine.fetching import Prefetch, plan_fetches
from reshard.engine.open_files import OpenFiles
from reshard.engine.reading import Request, Verify, read_regions
from reshard.format.checksum import digest
from reshard.stores.protocol import Remote

CONTENT = np.random.default_rng(7).integers(0, 256, 3 << 20, dtype=np.uint8)


class RemoteFile:
    """A file that counts what it is asked for."""

    def __init__(self, content: np.ndarray[Any, Any]) -> None:
        self._content = content
        self.nbytes = len(content)
        self.asked: list[tuple[int, int]] = []
        self.direct = 0
        self.fails_from: int | None = None
        self._lock = threading.Lock()

    def fetch(self, offset: int, nbytes: int) -> memoryview:
        with self._lock:
            self.asked.append((offset, offset + nbytes))
        if self.fails_from is not None and offset >= self.fails_from:
            raise OSError("the store is gone")
        return memoryview(self._content[offset : offset + nbytes].tobytes())

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self._lock:
            self.direct += 1
        for buffer in buffers:
            buffer[:] = self._content[offset : offset + len(buffer)]
            offset += len(buffer)

    def close(self) -> None:
        """Nothing to release."""


@st.composite
def regions(draw: st.DrawFn) -> list[Request]:
    """Regions of chunks that lie one after the other."""
    requests, begin = [], draw(st.integers(0, 100))
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(1, 40), min_size=0, max_size=4)))
        offsets = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
        lengths = tuple(
            draw(st.integers(1, extent - offset))
            for extent, offset in zip(shape, offsets, strict=True)
        )
        nbytes = int(np.prod(shape, dtype=np.int64)) * 4
        if begin + nbytes > len(CONTENT):
            break
        chunk = CONTENT[begin : begin + nbytes]
        requests.append(
            Request(
                f"t{number}",
                "file",
                begin,
                shape,
                torch.int32,
                digest(memoryview(chunk.tobytes())),
                offsets,
                lengths,
                torch.zeros(lengths, dtype=torch.int32),
                f"t{number}",
            )
        )
        begin += nbytes + draw(st.sampled_from([0, 4, 1000, 100_000]))
    return requests


def expected(request: Request) -> torch.Tensor:
    count = int(np.prod(request.chunk_shape, dtype=np.int64))
    chunk = CONTENT[request.begin : request.begin + 4 * count].copy().view(np.int32)
    whole = torch.from_numpy(chunk).view(request.chunk_shape)
    index = tuple(slice(o, o + n) for o, n in zip(request.offsets, request.lengths, strict=True))
    return whole[index]


def load(
    file: RemoteFile, requests: list[Request], remote: Remote, verify: Verify, threads: int = 2
) -> Prefetch:
    files = OpenFiles(lambda path: file, 8)
    readers = {"file": files.reader("file")}
    wanted = plan_fetches(requests, verify, lambda request: None)
    with Prefetch(readers, wanted, remote) as ahead:
        files.ahead = ahead
        read_regions(readers, requests, verify, threads, "a store")
    return ahead


@settings(deadline=None, max_examples=150)
@given(
    regions(),
    st.sampled_from([Verify.OFF, Verify.CHUNKS, Verify.FULL]),
    st.sampled_from([80_000, 200_000, 8 << 20]),
    st.sampled_from([0, 70_000, 80_000]),
)
def test_all_that_is_read_was_asked_for_ahead(
    requests: list[Request], verify: Verify, piece_bytes: int, gap_bytes: int
) -> None:
    file = RemoteFile(CONTENT)
    ahead = load(file, requests, Remote(piece_bytes, gap_bytes, 3), verify)

    for request in requests:
        assert torch.equal(request.target, expected(request))
    assert file.direct == 0
    # Nothing twice, and nothing too long.
    assert len(set(file.asked)) == len(file.asked)
    assert all(0 < end - begin <= piece_bytes for begin, end in file.asked)
    assert ahead._held_bytes == 0


def whole(begin: int, nbytes: int, name: str = "t") -> Request:
    chunk = CONTENT[begin : begin + nbytes]
    sizes = (nbytes // 4,)
    return Request(
        name,
        "file",
        begin,
        sizes,
        torch.int32,
        digest(memoryview(chunk.tobytes())),
        (0,),
        sizes,
        torch.zeros(sizes, dtype=torch.int32),
        name,
    )


def test_neighbours_are_one_request_unless_much_lies_between() -> None:
    file = RemoteFile(CONTENT)
    requests = [whole(0, 400, "a"), whole(100_400, 400, "b"), whole(300_000, 400, "c")]
    load(file, requests, Remote(1 << 20, 100_000, 4), Verify.CHUNKS)
    assert sorted(file.asked) == [(0, 100_800), (300_000, 300_400)]


def test_little_memory_is_enough_for_much_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_BUDGET_BYTES", 20_000)
    file, highest = RemoteFile(CONTENT), [0]
    take = Prefetch._take

    def watched(self: Prefetch, piece: Any) -> None:
        take(self, piece)
        highest.append(self._held_bytes)

    monkeypatch.setattr(Prefetch, "_take", watched)
    requests = [whole(n * 300_000, 300_000, f"t{n}") for n in range(8)]
    load(file, requests, Remote(10_000, 0, 4), Verify.CHUNKS, threads=1)
    for request in requests:
        assert torch.equal(request.target, expected(request))
    # A request holds on to all of its pieces until it is done.
    assert max(highest) <= 300_000 + 20_000


def test_what_fails_ahead_fails_the_one_who_needs_it() -> None:
    file = RemoteFile(CONTENT)
    file.fails_from = 500_000
    requests = [whole(0, 400_000, "a"), whole(400_000, 400_000, "b")]
    with pytest.raises(OSError, match="the store is gone"):
        load(file, requests, Remote(50_000, 0, 2), Verify.CHUNKS)
    assert torch.equal(requests[0].target, expected(requests[0]))

"""What is asked for before it is needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from reshard.engine import fetching
from reshard.engine.fetching import Prefetch
from reshard.engine.reading import Request
from reshard.stores.protocol import Remote

PIECE_BYTES = 10
PIECES = 20


class Dying:
    """A reader whose store is gone after some answers, which say where they begin."""

    nbytes = PIECES * PIECE_BYTES

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._lock = threading.Lock()
        self.asked: list[int] = []

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self._lock:
            self.asked.append(offset)
            if len(self.asked) > self._answers:
                raise ConnectionError(f"gone at {offset}")
        for buffer in buffers:
            buffer[:] = bytes([offset]) * len(buffer)

    def close(self) -> None:
        """Nothing to release."""


def test_what_a_request_has_read_is_let_go_of_before_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetching, "_BUDGET_BYTES", 3 * PIECE_BYTES)
    reader = Dying(answers=PIECES)
    wanted = np.array([[5, 95], [102, 197]], dtype=np.int64)
    request = Request("t", "a", 0, (1,), torch.uint8, b"", (0,), (1,), torch.empty(1), "t")
    remote = Remote(piece_bytes=PIECE_BYTES, gap_bytes=10, concurrency=2)
    with Prefetch({"a": reader}, [(request, "a", wanted)], remote) as ahead:
        for begin, end in wanted.tolist():
            for position in range(begin, end, 15):
                parts = [bytearray(4), bytearray(min(15, end - position) - 4)]
                assert ahead.read_into("a", position, [*map(memoryview, parts)])
                places = range(position, position + sum(map(len, parts)))
                assert b"".join(parts) == bytes((each - 5) // 10 * 10 + 5 for each in places)
                assert ahead._held_bytes <= 4 * PIECE_BYTES
        assert not ahead._held_bytes

    assert len(reader.asked) == PIECES


def test_after_a_request_that_failed_no_other_is_made() -> None:
    reader = Dying(answers=3)
    wanted = np.array([[0, reader.nbytes]], dtype=np.int64)
    remote = Remote(piece_bytes=PIECE_BYTES, gap_bytes=1, concurrency=1)
    content = bytearray(PIECE_BYTES)
    with Prefetch({"a": reader}, [(None, "a", wanted)], remote) as ahead:
        for thread in ahead._threads:
            thread.join()
        assert ahead.read_into("a", 0, [memoryview(content)])
        for late in (30, 50, 190):
            with pytest.raises(ConnectionError, match="gone at 30"):
                ahead.read_into("a", late, [memoryview(content)])

    assert reader.asked == [0, 10, 20, 30]

"""What is asked for before it is needed, when the store does not answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from reshard.engine.fetching import Prefetch
from reshard.stores.protocol import Remote

PIECE_BYTES = 10
PIECES = 20


class Dying:
    """A reader whose store is gone after some answers."""

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

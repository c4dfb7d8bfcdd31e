"""What several tests of units need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reshard.staging import StagingPool


@pytest.fixture
def pool() -> Iterator[StagingPool]:
    pool = StagingPool()
    yield pool
    for buffer in [*pool._busy]:
        pool.release(buffer)
    pool.close()

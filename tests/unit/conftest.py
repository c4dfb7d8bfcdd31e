"""What several tests of units need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reshard.snapshots.pool import StagingPool, staging_pool


@pytest.fixture
def pool() -> Iterator[StagingPool]:
    pool = StagingPool()
    yield pool
    for buffer in [*pool._busy]:
        pool.release(buffer)
    pool.close()


@pytest.fixture
def process_pool(monkeypatch: pytest.MonkeyPatch, pool: StagingPool) -> StagingPool:
    """A new pool in the place of the one that all stagers of the process use."""
    monkeypatch.setattr(staging_pool, "_made", [pool])
    return staging_pool()

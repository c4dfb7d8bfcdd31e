"""A place for many short saves."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[str]:
    """A place where a sync costs nothing; to a process that is killed all disks are alike.

    It lies deep enough that a save looks at no folder of another test that runs beside it.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        nested = Path(folder, "runs", "run")
        nested.mkdir(parents=True)
        yield str(nested)

"""Views of local files: only of what is in memory, and never at the risk of a signal."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.stores import local
from reshard.stores.local import LocalStore

CONTENT = np.random.default_rng(0).bytes(5 << 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT)
    return tmp_path


@pytest.mark.parametrize("knows_cachestat", [True, False])
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, len(CONTENT)), (0, 1), (4095, 2), (1 << 20, 3 << 20), (len(CONTENT) - 1, 1), (7, 4096)],
)
def test_a_view_shows_the_bytes_of_the_file(
    offset: int, nbytes: int, knows_cachestat: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not knows_cachestat:
        monkeypatch.setattr(local, "_CACHESTAT", 100_000)
    reader = LocalStore(folder).open_reader("file")
    view = reader.view(offset, nbytes)
    assert view is not None, "it was just written, so it is in memory"
    assert bytes(view) == CONTENT[offset : offset + nbytes]
    reader.close()


def test_there_is_no_view_beyond_the_file_or_of_nothing(folder: Path) -> None:
    reader = LocalStore(folder).open_reader("file")
    assert reader.view(len(CONTENT) - 1, 2) is None
    assert reader.view(0, 0) is None
    reader.close()


@pytest.mark.parametrize("knows_cachestat", [True, False])
def test_there_is_no_view_of_what_is_not_in_memory(
    knows_cachestat: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not knows_cachestat:
        monkeypatch.setattr(local, "_CACHESTAT", 100_000)
    descriptor = os.open(folder / "file", os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    reader = LocalStore(folder).open_reader("file")
    seen = reader.view(0, len(CONTENT))
    reader.close()
    if seen is not None:
        pytest.skip("this file system keeps its files in memory")


@pytest.mark.parametrize(("error", "is_seen"), [(errno.EFAULT, False), (errno.EINVAL, True)])
def test_pages_that_cannot_be_read_are_left_to_a_read(
    error: int, is_seen: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> int:
        ctypes.set_errno(error)
        return -1

    monkeypatch.setattr(local, "_madvise", lambda: refuse)
    reader = LocalStore(folder).open_reader("file")
    # An old kernel does not know the question; any other error is one of the disk.
    assert (reader.view(0, 4096) is not None) == is_seen
    reader.close()

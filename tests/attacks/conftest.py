"""A small checkpoint, to be attacked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.hostile import save_small


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("saved") / "ckpt")


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "ckpt"))

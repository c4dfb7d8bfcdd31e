"""What belongs into the repository, and what the package says that it needs."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tracked_files() -> list[str]:
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    return found.stdout.splitlines()


def test_checkpoints_are_kept_only_as_golden_files() -> None:
    kept = [
        name
        for name in tracked_files()
        if name.endswith((".safetensors", ".distcp", ".pt")) or "/.metadata" in name
    ]
    assert kept
    assert [name for name in kept if not name.startswith("tests/golden/")] == []


def test_what_is_ignored_is_not_tracked() -> None:
    tracked_files()
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--ignored", "--exclude-standard"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)

    assert found.stdout.splitlines() == []


def imported_packages(folder: Path) -> set[str]:
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    found |= {alias.name.partition(".")[0] for alias in names}
                case ast.ImportFrom(module=str(module), level=0):
                    found.add(module.partition(".")[0])
    return found


def test_every_dependency_is_imported_by_the_package() -> None:
    toml = pytest.importorskip("tomllib", reason="came with Python 3.11")
    project = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=!~\[ ]", line)[0] for line in project["dependencies"]]
    needed = {name.replace("-", "_") for name in names}

    assert needed - imported_packages(ROOT / "src") == set()

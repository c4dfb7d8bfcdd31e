"""Which files only `make test-all` runs: those that start many worlds and worker processes."""

from __future__ import annotations

import pytest

SLOW_FILES = {
    "test_async_together.py",
    "test_frameworks.py",
    "test_torch_under_a_patch.py",
    "test_torchtitan.py",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)

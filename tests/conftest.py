"""Which files only `make test-all` runs, and that a run leaves nothing in the repository."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faulty_proxy import FaultyProxy
from support.object_servers import ObjectServer, Place, azurite, seaweedfs

SLOW_FILES = {
    "test_async_together.py",
    "test_frameworks.py",
    "test_torch_under_a_patch.py",
    "test_torchtitan.py",
    "test_transformers.py",
}
"""Those that start many worlds and worker processes."""

ROOT = Path(__file__).parents[1]
BEFORE = pytest.StashKey[set[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A folder without neighbours: what other tests left beside it might be referred to.

    Nor are there any beside the folder that it is in, which are looked at, too.
    """
    alone = tmp_path / "quite" / "alone"
    alone.mkdir(parents=True)
    return alone


@pytest.fixture(scope="session")
def s3_server() -> Iterator[ObjectServer]:
    """A real object store, which runs from the first test that wants it to the last test."""
    with seaweedfs() as server:
        yield server


@pytest.fixture
def s3(s3_server: ObjectServer) -> Place:
    """A prefix of its own in a bucket."""
    return s3_server.place()


@pytest.fixture
def s3_proxy(s3_server: ObjectServer) -> Iterator[FaultyProxy]:
    """A way to the same bucket on which everything goes well until a test says otherwise."""
    with FaultyProxy(s3_server.address) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def azure_server(request: pytest.FixtureRequest) -> Iterator[ObjectServer]:
    with azurite(request.config.cache.mkdir("servers")) as server:
        yield server


@pytest.fixture
def azure(azure_server: ObjectServer) -> Place:
    """A prefix of its own in a container."""
    return azure_server.place()


def files_in_the_way() -> set[str]:
    """What git sees that is neither tracked nor ignored; nothing where there is no git."""
    command = ["git", "-C", str(ROOT), "ls-files", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return set()
    return set(found.stdout.splitlines())


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEFORE] = files_in_the_way()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        # The process that started the workers looks when all are done.
        return
    left = files_in_the_way() - session.config.stash[BEFORE]
    if left:
        print(f"\nthis run left files in the repository: {sorted(left)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

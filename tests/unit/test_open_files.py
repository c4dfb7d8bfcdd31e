"""Many files are read with few of them open."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest

from reshard.engine.open_files import OpenFiles, most_open_files


class Files:
    """Files in memory that know which of them are open."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.opened: list[str] = []
        self.most = 0

    def __call__(self, path: str) -> OneFile:
        self.open.append(path)
        self.opened.append(path)
        self.most = max(self.most, len(self.open))
        return OneFile(self, path)


class OneFile:
    nbytes = 1

    def __init__(self, files: Files, path: str) -> None:
        self.files = files
        self.path = path

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        assert self.path in self.files.open, "a read of a file that is closed"
        for buffer in buffers:
            buffer[:] = self.path.encode()[:1] * len(buffer)

    def close(self) -> None:
        self.files.open.remove(self.path)


def read_one(opened: OpenFiles, path: str) -> bytes:
    buffer = bytearray(1)
    opened.reader(path).read_into(0, [memoryview(buffer)])
    return bytes(buffer)


def test_a_file_is_opened_once_while_there_is_room() -> None:
    files = Files()
    opened = OpenFiles(files, 3)
    assert b"".join(read_one(opened, path) for path in "abcabcabc") == b"abcabcabc"
    assert files.opened == ["a", "b", "c"]


def test_the_file_that_was_not_read_for_longest_makes_room() -> None:
    files = Files()
    opened = OpenFiles(files, 2)
    for path in "abac":
        assert read_one(opened, path) == path.encode()
    assert sorted(files.open) == ["a", "c"]
    assert read_one(opened, "b") == b"b"
    assert files.most == 2


def test_a_file_is_not_closed_under_a_reader() -> None:
    files = Files()
    opened = OpenFiles(files, 1)
    with opened.lend("a") as first, opened.lend("b"):
        first.read_into(0, [memoryview(bytearray(1))])
    read_one(opened, "c")
    assert files.open == ["c"]


def test_several_threads_read_many_files_with_few_open() -> None:
    files = Files()
    opened = OpenFiles(files, 5)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for i in range(400):
            path = chr(ord("a") + (i * 7 + seed) % 20)
            if read_one(opened, path) != path.encode():
                wrong.append(path)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert files.most <= 5 + 4


def test_all_files_are_closed_in_the_end() -> None:
    files = Files()
    opened = OpenFiles(files, 3)
    for path in "abcdef":
        read_one(opened, path)
    opened.close()
    assert files.open == []


def test_a_file_that_cannot_be_opened_is_not_kept() -> None:
    def refuse(path: str) -> OneFile:
        raise FileNotFoundError(path)

    opened = OpenFiles(refuse, 3)
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="a"):
            read_one(opened, "a")
    opened.close()


def test_a_load_takes_a_part_of_the_descriptors_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit, most in ((1024, 128), (256, 64), (2, 1), (resource.RLIM_INFINITY, 128)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert most_open_files() == most


MANY_FILES = """
import resource, sys
import torch
import reshard

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
state = {f"w{i}": torch.full((3,), float(i)) for i in range(1200)}
writer = reshard.FileSystemWriter(sys.argv[1], single_file_per_rank=False, sync_files=False)
reshard.save(state, storage_writer=writer)
found = {name: torch.zeros(3) for name in state}
reshard.load(found, checkpoint_id=sys.argv[1])
assert all(torch.equal(found[name], state[name]) for name in state)
"""


def test_more_shard_files_than_a_process_may_open_are_written_and_read(tmp_path: object) -> None:
    subprocess.run([sys.executable, "-c", MANY_FILES, str(tmp_path)], timeout=100, check=True)

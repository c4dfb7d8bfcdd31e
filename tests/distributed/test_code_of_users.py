"""The code of users: when it is called, and what is said when it fails."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard


class Recorder(reshard.DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.threads: set[str] = set()

    def note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.note("resolve")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.note("commit")

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.note("value")


class Resolver(reshard.DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def resolve_data(self, write_item: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        return super().resolve_data(write_item)


def test_planners_are_asked_for_one_tensor_at_a_time_in_the_thread_that_called(
    tmp_path: Path,
) -> None:
    state: dict[str, Any] = {f"w{i}": torch.rand(600, 600) for i in range(6)} | {"step": 3}
    saving, loading = Resolver(), Recorder()
    reshard.save(state, checkpoint_id=tmp_path, planner=saving)
    reshard.load(state, checkpoint_id=tmp_path, planner=loading)
    here = threading.current_thread().name
    assert (saving.threads, loading.threads) == ({here}, {here})
    assert loading.calls.count("value") == 1
    assert [c for c in loading.calls if c != "value"] == ["resolve", "commit"] * 6


class Unwilling:
    def __init__(self, method: str) -> None:
        self.method = method

    def state_dict(self) -> dict[str, Any]:
        if self.method == "state_dict":
            raise ValueError("no")
        return {"w": torch.ones(1)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ValueError("no")

    def __reduce__(self) -> Any:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"the": {"key": [Unwilling("")]}}, "saving 'the.key'"),
        ({"object": Unwilling("state_dict")}, "asking 'object' for its state"),
        ({"object": Unwilling("")}, "giving 'object' its state"),
    ],
)
def test_an_error_in_the_code_of_users_says_for_which_key(
    state: dict[str, Any], what: str, tmp_path: Path
) -> None:
    def save_and_load() -> None:
        reshard.save(state, checkpoint_id=tmp_path)
        reshard.load(state, checkpoint_id=tmp_path)

    with pytest.raises(reshard.CheckpointException, match=f"while {re.escape(what)}"):
        save_and_load()

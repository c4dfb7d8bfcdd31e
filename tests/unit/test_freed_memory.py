"""Tensors whose memory was freed or shrunk are refused by name: touching it ends the process.

Each case runs in a process of its own, since the failure that is tested for is a signal.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
import reshard
from reshard.api import CheckpointException, UnsupportedLayoutError

case, left, folder = sys.argv[1:]


class Resolving(reshard.DefaultSavePlanner):
    def resolve_data(self, write_item):
        return super().resolve_data(write_item)


class Filling(reshard.DefaultLoadPlanner):
    def resolve_tensor(self, read_item):
        return super().resolve_tensor(read_item)


reshard.save({"layer": {"w": torch.ones(1000, 100), "other": torch.ones(3)}}, checkpoint_id=folder)
w = torch.zeros(1000, 100)
other = torch.zeros(3)
if case == "save a view":
    w = torch.zeros(1001, 100)[1:]
if case == "save strided":
    w = torch.zeros(100, 1000).t()
w.untyped_storage().resize_(w.untyped_storage().nbytes() * int(left) // 100)
if case.endswith("sparse"):
    w = torch.ones(1000, 100).to_sparse()
    w._values().untyped_storage().resize_(w._values().nbytes * int(left) // 100)
if case.endswith("compressed"):
    w = torch.ones(1000, 100).to_sparse_csr()
    w.values().untyped_storage().resize_(w.values().nbytes * int(left) // 100)
state = {"layer": {"other": other, "w": w}}
if case == "save in a value":
    state = {"layer": {"w": {1, w}}}
try:
    if case == "save with a planner":
        reshard.save(state, checkpoint_id=folder + "2", planner=Resolving())
    elif case.startswith("async"):
        reshard.async_save(state, checkpoint_id=folder + "2").result(30)
    elif case.startswith("save"):
        reshard.save(state, checkpoint_id=folder + "2")
    elif case == "load with a planner":
        reshard.load(state, checkpoint_id=folder, planner=Filling())
    else:
        reshard.load(state, checkpoint_id=folder)
except CheckpointException as error:
    reason = error.failures[0][0] if error.failures else error
    assert isinstance(reason, UnsupportedLayoutError), repr(reason)
    assert "freed" in str(reason), reason
    assert "layer.w" in " ".join([str(reason), *getattr(reason, "__notes__", ())]), reason
    if case == "load":
        assert not other.any(), "something was loaded before the refusal"
    sys.exit(0)
sys.exit(2)
"""


@pytest.mark.parametrize("percent_left", [0, 99])
@pytest.mark.parametrize(
    "case",
    [
        "save",
        "save a view",
        "save strided",
        "save with a planner",
        "save in a value",
        "save sparse",
        "save compressed",
        "async save",
        "async save sparse",
        "load",
        "load with a planner",
    ],
)
def test_a_tensor_whose_memory_was_freed_is_refused_by_name(
    case: str, percent_left: int, tmp_path: Path
) -> None:
    outcome = subprocess.run(
        [sys.executable, "-c", SCRIPT, case, str(percent_left), str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert outcome.returncode == 0, outcome.stderr

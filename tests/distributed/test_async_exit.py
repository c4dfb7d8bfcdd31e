"""Processes that end or die with saves in flight."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import reshard
from reshard.state_dict_saver import AsyncCheckpointerType
from support.background import PROMPTLY, Gate, both_kinds, files_in_memory, is_running, wait_until


def run_script(folder: Path, text: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(_write_script(folder, text)), str(folder), *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _write_script(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(f"import sys\nsys.path.append({tests!r})\n{text}")
    return script


UNGUARDED = """
import reshard, torch
from support.background import FailingWriter

folder, kind = sys.argv[1:]
options = {"async_checkpointer_type": reshard.state_dict_saver.AsyncCheckpointerType(kind)}
with open(f"{folder}/runs", "a") as file:
    file.write("once\\n")
weight = torch.ones(3)
reshard.prewarm({"weight": weight}, **options)
reshard.async_save({"weight": weight}, checkpoint_id=f"{folder}/good", **options)
reshard.async_save({"a": 1}, storage_writer=FailingWriter(f"{folder}/bad", 0), **options)
weight.zero_()
"""


@both_kinds
def test_a_script_that_ends_has_its_saves_done_and_is_told_of_failures(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    outcome = run_script(tmp_path, UNGUARDED, kind.value)

    assert outcome.returncode == 0
    assert reshard.read_state_dict(tmp_path / "good")["weight"].tolist() == [1.0] * 3
    assert re.search(rf"save to '{tmp_path}/bad' failed", outcome.stderr)
    assert "rank 0 has no space left" in outcome.stderr
    assert "good" not in outcome.stderr
    assert outcome.stdout == ""
    assert (tmp_path / "runs").read_text() == "once\n", "the worker ran the script again"


OWN_PLANNER = """
import reshard, torch
from reshard.state_dict_saver import AsyncCheckpointerType

class Refusal(Exception):
    pass

class Planner(reshard.DefaultSavePlanner):
    def resolve_data(self, write_item):
        if write_item.index.fqn == "bad":
            raise Refusal("not this one")
        return super().resolve_data(write_item) * 2

if __name__ == "__main__":
    options = {"planner": Planner(), "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    good = reshard.async_save({"w": torch.ones(2)}, checkpoint_id=sys.argv[1], **options)
    good.result()
    bad = reshard.async_save({"bad": torch.ones(2)}, checkpoint_id=sys.argv[1], **options)
    reason, _ = bad.exception().failures[0]
    assert type(reason) is Refusal, repr(reason)
"""


def test_a_worker_knows_the_planners_and_errors_of_the_script_itself(tmp_path: Path) -> None:
    outcome = run_script(tmp_path, OWN_PLANNER)

    assert outcome.returncode == 0, outcome.stderr
    assert reshard.read_tensor(tmp_path, "w").tolist() == [2.0, 2.0]


ENDS_AT_ONCE = """
import reshard, torch
from reshard.state_dict_saver import AsyncCheckpointerType

class Planner(reshard.DefaultSavePlanner):
    pass

if __name__ == "__main__":
    options = {"planner": Planner(), "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    reshard.async_save({"w": torch.ones(2)}, checkpoint_id=sys.argv[1], **options)
"""


def test_a_worker_that_starts_when_the_script_has_ended_knows_the_script_too(
    tmp_path: Path,
) -> None:
    outcome = run_script(tmp_path, ENDS_AT_ONCE)

    assert outcome.stderr == ""
    assert reshard.read_tensor(tmp_path, "w").tolist() == [1.0, 1.0]


SLOW_CALLBACK = """
import reshard, threading, time

begun = threading.Event()

def note(future):
    begun.set()
    time.sleep(1)
    open(sys.argv[1] + "/noted", "w").close()

reshard.async_save({"a": 1}, checkpoint_id=sys.argv[1]).add_done_callback(note)
begun.wait()
"""


def test_a_script_that_ends_lets_a_callback_finish(tmp_path: Path) -> None:
    outcome = run_script(tmp_path, SLOW_CALLBACK)

    assert outcome.returncode == 0, outcome.stderr
    assert (tmp_path / "noted").exists()


DIES = """
import reshard, torch
from reshard.background.worker import worker_of_this_process
from reshard.state_dict_saver import AsyncCheckpointerType
from support.background import Gate, GatedWriter

folder = sys.argv[1]
reshard.prewarm({}, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
print(worker_of_this_process().start().pid, flush=True)
future = reshard.async_save(
    {"weight": torch.ones(1000)},
    storage_writer=GatedWriter(f"{folder}/place", Gate(folder)),
    async_checkpointer_type=AsyncCheckpointerType.PROCESS,
)
future.result()
"""


@pytest.mark.parametrize("has_handles", [True, False])
def test_a_worker_ends_at_once_with_a_trainer_that_was_killed(
    has_handles: bool, tmp_path: Path
) -> None:
    reshard.save({"weight": torch.zeros(1000)}, checkpoint_id=tmp_path / "place")
    in_memory = files_in_memory()
    gate = Gate(tmp_path)
    script = DIES if has_handles else f"import os\ndel os.pidfd_open\n{DIES}"
    with subprocess.Popen(
        [sys.executable, str(_write_script(tmp_path, script)), str(tmp_path)],
        stdout=subprocess.PIPE,
    ) as trainer:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        wait_until(lambda: gate.is_reached_by(worker))
        trainer.kill()

    # It is in the middle of a save, which nobody lets go on.
    wait_until(lambda: not is_running(worker), PROMPTLY)
    gate.open()
    wait_until(lambda: files_in_memory() <= in_memory, PROMPTLY)
    found = reshard.read_state_dict(tmp_path / "place")
    assert torch.equal(found["weight"], torch.zeros(1000)), "a save without a trainer was committed"


def test_a_worker_that_starts_when_its_trainer_has_ended_ends_too(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as trainer:
        handle = os.pidfd_open(trainer.pid)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code = "from reshard.background.worker_main import main; main(*map(int, sys.argv[1:]))"
        outcome = subprocess.run(
            [
                sys.executable,
                "-c",
                f"import sys; {code}",
                str(theirs.fileno()),
                str(trainer.pid),
                str(handle),
            ],
            pass_fds=[theirs.fileno(), handle],
            timeout=PROMPTLY,
            check=False,
        )
    os.close(handle)

    assert outcome.returncode == 1


SIGNALLED = """
import os, signal, threading
import reshard, torch
from reshard.background.worker import worker_of_this_process
from reshard.state_dict_saver import AsyncCheckpointerType
from support.background import Gate, GatedWriter, wait_until

folder = sys.argv[1]
gate, handled = Gate(folder), []
signals = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT]
for number in signals:
    signal.signal(number, lambda number, frame: handled.append(number))
reshard.prewarm({}, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
worker = worker_of_this_process().start().pid
future = reshard.async_save(
    {"weight": torch.ones(1000)},
    storage_writer=GatedWriter(f"{folder}/place", gate),
    async_checkpointer_type=AsyncCheckpointerType.PROCESS,
)
wait_until(lambda: gate.is_reached_by(worker))
for number in signals:
    # To the group, as a terminal does; and to each process, as some schedulers do.
    os.killpg(0, number)
    os.kill(worker, number)
wait_until(lambda: set(handled) == set(signals))
gate.open()
future.result()
assert worker_of_this_process().start().pid == worker, "it was another worker that saved"
"""


def test_a_worker_goes_on_when_the_trainer_handles_a_signal_to_both(tmp_path: Path) -> None:
    outcome = subprocess.run(
        [sys.executable, str(_write_script(tmp_path, SIGNALLED)), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
    )

    assert outcome.returncode == 0, outcome.stderr
    assert reshard.read_tensor(tmp_path / "place", "weight").eq(1).all()

"""reshard.background.worker: what may hit the process from outside."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from reshard.api import WorkerLostError
from reshard.background import worker
from reshard.background.worker import Worker, WorkerRequest, describe_script
from reshard.coordination.meeting import Meeting
from reshard.snapshots.segments import Segment

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker that hears of its end while it starts has to import torch first.
    monkeypatch.setattr(worker, "_STOP_SECONDS", 120.0)


def test_signals_that_hit_a_worker_while_it_starts_do_not_end_it() -> None:
    started = Worker(describe_script())
    for number in SIGNALS:
        os.kill(started.pid, number)
    started.stop()

    assert started._process.returncode == 0


def test_starting_a_worker_leaves_the_signals_of_the_thread_as_they_were() -> None:
    found: list[set[int]] = []

    def start() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR2})
        started = Worker(describe_script())
        found.append({int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())})
        started.stop()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

    assert found == [{int(signal.SIGUSR2)}]


def test_a_worker_that_is_lost_says_that_the_outcome_is_not_known() -> None:
    lost = Worker(describe_script())
    segment = Segment(1)
    os.kill(lost.pid, signal.SIGKILL)
    request = WorkerRequest(Meeting(), b"", segment.number, frozenset({segment.number}))

    with pytest.raises(WorkerLostError, match="look at the place before you rely on either"):
        lost.save(request, segment)

    lost.stop()
    segment.close()

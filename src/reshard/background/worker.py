"""The trainer's handle on its worker: the process that saves for it, free of its GIL.

A worker is started once, as a fresh interpreter, and serves one save at a time until its trainer
ends. `worker_main` is what it runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, NamedTuple

from reshard.api import WorkerLostError
from reshard.background.queue import save_queue
from reshard.coordination.meeting import Meeting
from reshard.engine.process_wide import ProcessWide
from reshard.metadata import STATE_DICT_TYPE, Metadata
from reshard.operations.save import SaveSettings
from reshard.operations.targets import SaveTarget
from reshard.planner import SavePlanner
from reshard.snapshots.segments import Segment

_MAIN = "reshard.background.worker_main"


_LAST_WORDS_BYTES = 4000
_STOP_SECONDS = 10.0
IN_THE_TRAINERS_HANDS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""A scheduler may signal every process of a job. What that means for a save is for the
trainer to say."""


class PackedSave(NamedTuple):
    """What a worker is to save, with what. Its tensors lie in the staging memory."""

    state_dict: STATE_DICT_TYPE
    target: SaveTarget
    planner: SavePlanner | None
    settings: SaveSettings


@dataclass(frozen=True)
class WorkerRequest:
    """A save for the worker.

    `payload` is a `PackedSave`, unpacked where a failure reaches all ranks.
    """

    meeting: Meeting
    payload: bytes
    segment: int
    live_segments: frozenset[int]
    limit_seconds: float | None = None


def describe_script() -> dict[str, Any]:
    """What a worker must know to find the classes of the script that runs here.

    To be asked while the script runs: when it has ended, it has forgotten its own file.
    """
    script = multiprocessing.spawn.get_preparation_data("reshard-worker")
    # Meant for connections of multiprocessing itself, and not to be sent.
    script.pop("authkey", None)
    return script


class Worker:
    """The trainer's side. Used by one thread at a time."""

    def __init__(self, script: dict[str, Any]) -> None:
        # Not through multiprocessing, which refuses in a process that is a daemon itself, and
        # imports the user's main module even if nothing in it is needed.
        ours, theirs = socket.socketpair()
        with theirs, _handle_of_this_process() as trainer, _signals_blocked():
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from {_MAIN} import main; "
                f"main({theirs.fileno()}, {os.getpid()}, {trainer})"
            )
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our own code
                [multiprocessing.spawn.get_executable(), "-c", code],
                pass_fds=[theirs.fileno(), *([] if trainer is None else [trainer])],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # What a terminal or a scheduler sends to the group of the trainer is for the
                # trainer, which may handle it.
                start_new_session=True,
            )
        self._pipe = Connection(ours.detach())
        self._last_words = b""
        self._known_segments: set[int] = set()
        self._listener = threading.Thread(
            target=self._listen, name="reshard-worker-stderr", daemon=True
        )
        self._listener.start()
        with contextlib.suppress(OSError):
            # A worker that is dead already is noticed by the save.
            self._pipe.send(script)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def save(self, request: WorkerRequest, segment: Segment) -> Metadata | bytes:
        """Have a save done. Blocks until it is committed, or has failed there: then its error,
        encoded. The other ranks know of that.
        """
        try:
            if segment.number not in self._known_segments:
                self._pipe.send(("segment", segment.number, segment.nbytes))
                send_handle(self._pipe, segment.descriptor, self.pid)
            self._known_segments |= {segment.number}
            self._known_segments &= request.live_segments
            self._pipe.send(("save", request))
            if not self._pipe.poll(request.limit_seconds):
                self._kill(request.limit_seconds)
            kind, content = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._explain_loss() from error
        if kind == "failed":
            return bytes(content)
        metadata: Metadata = pickle.loads(content)
        return metadata

    def _explain_loss(self) -> WorkerLostError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._listener.join(_STOP_SECONDS)
        code = self._process.returncode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-code).name}"
        words = self._last_words.decode(errors="replace").strip()
        said = f" It printed last:\n{words}" if words else " It printed nothing."
        return WorkerLostError(
            f"the worker process {self.pid} {how} in the middle of a save. The checkpoint "
            "there may be the older or the new one: look at the place before you rely on either. "
            f"The next save starts a new worker.{said}"
        )

    def _kill(self, seconds: float | None) -> None:
        """End a worker that has not answered in all the time that a save may take."""
        self._process.kill()
        self._last_words += f"\nkilled: it had not answered for {seconds} s".encode()

    def _listen(self) -> None:
        """Pass on what the worker prints, and keep the end of it."""
        stream: Any = self._process.stderr
        with stream:
            while data := stream.read1(1 << 16):
                self._last_words = (self._last_words + data)[-_LAST_WORDS_BYTES:]
                with contextlib.suppress(OSError):
                    os.write(2, data)

    def stop(self) -> None:
        """End the process and wait for it, so that no zombie is left."""
        # Not just closed: a child that training has forked has the same socket open.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        self._pipe.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(_STOP_SECONDS)


@contextlib.contextmanager
def _handle_of_this_process() -> Iterator[int | None]:
    """A descriptor that tells whoever holds it when this process ends; None if there is none.

    Unlike a process id, it can never come to mean another process.
    """
    try:
        handle = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Have a process that is started here begin with signals blocked, until it handles them.

    Signals for this process are taken by another thread, or wait for a moment.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IN_THE_TRAINERS_HANDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerKeeper:
    """The worker of this process: started when it is needed, and again if it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._script: dict[str, Any] = {}

    def learn_script(self) -> None:
        """Look at the script that runs now, for a worker that may be started when it has ended."""
        self._script = describe_script()

    def start(self) -> Worker:
        """The worker, running or on its way."""
        with self._lock:
            if self._worker is not None and not self._worker.is_alive:
                self._worker.stop()
                self._worker = None
            if self._worker is None:
                self._worker = Worker(self._script or describe_script())
                # It is ended with the process, after the last save.
                save_queue().watch_exit()
            return self._worker

    def stop(self) -> None:
        """End the worker, if there is one."""
        with self._lock:
            if self._worker is not None:
                self._worker.stop()
                self._worker = None


worker_of_this_process = ProcessWide(WorkerKeeper, WorkerKeeper.stop)
"""The worker that saves for this process, if asked to."""

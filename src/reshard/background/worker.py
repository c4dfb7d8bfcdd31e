"""The process that saves for a rank, beside the trainer and free of its GIL.

Started once, as a fresh interpreter; it lives as long as the trainer and serves one save
at a time. It sees the staging memory itself, and meets the workers of the other ranks
without the trainers' help. When the trainer is gone, however that came about, it ends at
once, in the middle of a save too: nothing is committed from then on, and the job that takes the
trainer's place must not find an older save committed over its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.spawn
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from types import FrameType
from typing import Any

import torch

from reshard.api import WorkerLostError
from reshard.coordination.channel import decode_error, encode_error
from reshard.coordination.meeting import Meeting
from reshard.metadata import Metadata
from reshard.snapshots.segments import Segment, map_segment

__all__ = ["FailedThere", "Request", "Worker", "describe_script"]

_LAST_WORDS_BYTES = 4000
_STOP_SECONDS = 10.0
_NICENESS = 5
_POLL_SECONDS = 0.2
_FOR_THE_TRAINER = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""A scheduler may signal every process of a job. What that means for a save is for the
trainer to say."""


@dataclass(frozen=True)
class Request:
    """A save for the worker. `payload` is only opened there, in front of all ranks."""

    meeting: Meeting
    payload: bytes
    use_collectives: bool
    segment: int
    live_segments: frozenset[int]
    limit_seconds: float | None = None


Serve = Callable[[Request, torch.Tensor], Metadata]
"""Carries out a request; module-level, since the worker imports it by its name."""


class FailedThere(Exception):  # noqa: N818 - not an error of its own, but the way of one
    """A save failed in the worker, where the other ranks heard of it."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(reason)
        self.reason = reason


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

    def __init__(self, serve: Serve, script: dict[str, Any]) -> None:
        # Not through multiprocessing, which refuses in a process that is a daemon itself, and
        # imports the user's main module even if nothing in it is needed.
        ours, theirs = socket.socketpair()
        with theirs, _handle_of_this_process() as trainer, _signals_blocked():
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; "
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
            self._pipe.send(serve)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def save(self, request: Request, segment: Segment) -> Metadata:
        """Have a save done. Blocks until it is committed, or raises what went wrong there."""
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
            raise self._obituary() from error
        if kind == "failed":
            raise FailedThere(decode_error(content)[0])
        metadata: Metadata = pickle.loads(content)
        return metadata

    def _obituary(self) -> WorkerLostError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._listener.join(_STOP_SECONDS)
        code = self._process.returncode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-code).name}"
        words = self._last_words.decode(errors="replace").strip()
        said = f" Its last words:\n{words}" if words else " It said nothing."
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# The worker's side


def main(descriptor: int, trainer: int, handle: int | None) -> None:
    """Serve the trainer at the other end of a socket until it hangs up or ends."""
    watch = threading.Thread(
        target=_end_with, args=(trainer, handle), name="reshard-watch", daemon=True
    )
    watch.start()
    # Not ignored, since that would be passed on to children.
    for number in _FOR_THE_TRAINER:
        signal.signal(number, _stay)
    # They were blocked from birth.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_TRAINER)
    faulthandler.enable()
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    pipe = Connection(descriptor)
    # The trainer is gone when there is nothing more to read.
    with contextlib.suppress(EOFError, OSError):
        main_module.learn(pipe.recv())
        serve: Serve = pipe.recv()
        _serve_all(pipe, serve)
    # At once: to take torch apart first would keep the trainer waiting for a second or two.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _stay(number: int, frame: FrameType | None) -> None:
    """Go on."""


def _end_with(trainer: int, handle: int | None) -> None:
    """End when the trainer has, also if a child of it still holds its end of the socket."""
    if handle is not None:
        with selectors.DefaultSelector() as selector:
            selector.register(handle, selectors.EVENT_READ)
            selector.select()
    else:
        while os.getppid() == trainer:
            time.sleep(_POLL_SECONDS)
    os._exit(1)


def _serve_all(pipe: Connection, serve: Serve) -> None:
    segments: dict[int, torch.Tensor] = {}
    while True:
        kind, content, *rest = pipe.recv()
        if kind == "segment":
            descriptor = recv_handle(pipe)
            segments[content] = map_segment(descriptor, rest[0])
            os.close(descriptor)
            continue
        request: Request = content
        for key in [key for key in segments if key not in request.live_segments]:
            del segments[key]
        try:
            answer = "done", pickle.dumps(serve(request, segments[request.segment]))
        except BaseException as error:  # noqa: BLE001 - raised by the trainer's future
            answer = "failed", encode_error(error)
        pipe.send(answer)


class MainModule:
    """The script that the trainer runs, imported only if something of it is needed.

    Its planners and storage classes can be sent to the worker that way; a script that has
    none of them is not run a second time.
    """

    def __init__(self) -> None:
        self._circumstances: dict[str, Any] = {}

    def learn(self, circumstances: dict[str, Any]) -> None:
        """Take over the paths of the trainer, and where its script is."""
        for key in ("init_main_from_name", "init_main_from_path"):
            if key in circumstances:
                self._circumstances[key] = circumstances.pop(key)
        multiprocessing.spawn.prepare(circumstances)

    def load(self) -> None:
        circumstances, self._circumstances = self._circumstances, {}
        if circumstances:
            multiprocessing.spawn.prepare(circumstances)


main_module = MainModule()

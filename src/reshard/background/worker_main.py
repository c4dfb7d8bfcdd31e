"""What the worker runs: it serves the saves of its trainer, one at a time.

It sees the staging memory itself, and meets the workers of the other ranks without the trainers'
help. When the trainer is gone, however that came about, it ends at once, in the middle of a save
too: nothing is committed from then on, and the job that takes the trainer's place must not find
an older save committed over its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing.spawn
import os
import pickle
import selectors
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch

from reshard.background.handover import unpack
from reshard.background.worker import IN_THE_TRAINERS_HANDS, PackedSave, WorkerRequest
from reshard.coordination.channel import failing_together
from reshard.coordination.error_wire import encode_error
from reshard.default_planner import DefaultSavePlanner, PlanCache
from reshard.engine.process_wide import ProcessWide
from reshard.metadata import Metadata
from reshard.operations.save import Save, SaveJob
from reshard.plans.traits import save_traits
from reshard.snapshots.segments import map_segment

_NICENESS = 5
_POLL_SECONDS = 0.2


def main(descriptor: int, trainer: int, handle: int | None) -> None:
    """Serve the trainer at the other end of a socket until it hangs up or ends."""
    watch = threading.Thread(
        target=_end_with, args=(trainer, handle), name="reshard-watch", daemon=True
    )
    watch.start()
    _outlive_signals()
    # They were blocked from birth.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IN_THE_TRAINERS_HANDS)
    faulthandler.enable()
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    pipe = Connection(descriptor)
    # The trainer is gone when there is nothing more to read.
    with contextlib.suppress(EOFError, OSError):
        _serve_all(pipe, TrainerScript(pipe.recv()))
    # At once: to take torch apart first would keep the trainer waiting for a second or two.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _outlive_signals() -> None:
    """Go on when a signal comes that is meant for the trainer.

    Not ignored, since that would be passed on to children. A function of C that does nothing, and
    not one of Python: with those, workers that were signalled in a save crashed in 9 of 75 runs on
    Python 3.11, without them in none of 41. Why is not known.
    """
    system = ctypes.CDLL(None)
    system.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    system.signal.restype = ctypes.c_void_p
    harmless = ctypes.cast(system.abs, ctypes.c_void_p)
    for number in IN_THE_TRAINERS_HANDS:
        system.signal(number, harmless)


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


def _serve_all(pipe: Connection, script: TrainerScript) -> None:
    segments: dict[int, torch.Tensor] = {}
    while True:
        kind, content, *rest = pipe.recv()
        if kind == "segment":
            descriptor = recv_handle(pipe)
            segments[content] = map_segment(descriptor, rest[0])
            os.close(descriptor)
            continue
        request: WorkerRequest = content
        for key in [key for key in segments if key not in request.live_segments]:
            del segments[key]
        try:
            answer = "done", pickle.dumps(_save(request, segments[request.segment], script))
        except BaseException as error:  # noqa: BLE001 - raised by the trainer's future
            answer = "failed", encode_error(error)
        pipe.send(answer)


def _save(request: WorkerRequest, memory: torch.Tensor, script: TrainerScript) -> Metadata:
    """Carry out the save of a trainer, together with the workers of the other ranks."""
    with request.meeting.open() as channel:
        with failing_together(channel, "plan"):
            packed: PackedSave = unpack(request.payload, memory, script.load)
            planner = packed.planner or DefaultSavePlanner()
            if save_traits(planner).is_default:
                planner.remember_in(_plan_caches())  # type: ignore[attr-defined]
            writer = packed.target.choose_writer()
        job = SaveJob(packed.state_dict, writer, planner, packed.settings)
        save = Save(job, channel)
        metadata = save.run()
        # The trainer reads it back when it needs it, if it can.
        return writer.referenced_metadata(save.reference) if save.reference else metadata


_plan_caches: ProcessWide[dict[str, PlanCache]] = ProcessWide(dict)
"""What planners remember: they themselves come anew with each save."""


class TrainerScript:
    """The script that the trainer runs, imported only if something of it is needed.

    Its planners and storage classes can be sent to the worker that way; a script that has
    none of them is not run a second time.
    """

    def __init__(self, preparation: dict[str, Any]) -> None:
        """Take over the paths of the trainer, and where its script is."""
        self._main: dict[str, Any] = {
            key: preparation.pop(key)
            for key in ("init_main_from_name", "init_main_from_path")
            if key in preparation
        }
        multiprocessing.spawn.prepare(preparation)

    def load(self) -> None:
        """Import the script, once."""
        main, self._main = self._main, {}
        if main:
            multiprocessing.spawn.prepare(main)

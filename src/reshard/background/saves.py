"""A save in the background, from the call to its outcome."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from reshard.api import CheckpointException, _text_of, _wrap_exception
from reshard.background.backlog import SaveFuture, WhenBusy, backlog, place_of
from reshard.background.handover import pack, unpack
from reshard.background.worker import FailedThere, Request, Worker, describe_script, main_module
from reshard.checkpoint.stored_metadata import StoredMetadata, can_be_read_back, refer_to
from reshard.coordination.channel import Channel, SoloChannel
from reshard.coordination.meeting import Meeting, call_meeting, check_meeting
from reshard.default_planner import DefaultSavePlanner, PlanCache
from reshard.filesystem import FileSystemWriter
from reshard.metadata import STATE_DICT_TYPE, Metadata
from reshard.operations.save import SaveJob, SaveOperation, choose_writer
from reshard.planner import SavePlanner
from reshard.staging import (
    AsyncStager,
    DefaultStager,
    Lease,
    Staged,
    StagingOptions,
    staging_pool,
)
from reshard.storage import StorageWriter
from reshard.tensors.composites import unfolded

__all__ = ["BackgroundSave", "worker_of_this_process"]

_EXCHANGES = 4
_GRACE_SECONDS = 10.0


class BackgroundSave:
    """One background save, as one rank sees it.

    The channel was opened by the thread that called: all ranks call in the same order,
    whatever order their saves then run in.
    """

    def __init__(
        self,
        *,
        checkpoint_id: str | os.PathLike[str] | None,
        storage_writer: StorageWriter | None,
        planner: SavePlanner | None,
        in_process: bool,
        use_collectives: bool,
        channel: Channel,
    ) -> None:
        self.checkpoint_id = _absolute(checkpoint_id, storage_writer)
        self.storage_writer = storage_writer
        self.planner = planner
        self.in_process = in_process
        self.use_collectives = use_collectives
        self.channel = channel
        self.staging: Future[None] | None = None
        self._staged: STATE_DICT_TYPE | Future[STATE_DICT_TYPE]
        self._kept: list[Lease] = []
        self._is_off = False

    def start(
        self,
        ask_state: Callable[[], STATE_DICT_TYPE],
        stager: AsyncStager | None,
        when_busy: WhenBusy,
    ) -> SaveFuture:
        """Copy the state away, and queue the rest.

        The failure of an earlier save is raised in the end: ranks learn of it at different
        times, and must not stay away from this one for it.
        """
        log = backlog()
        try:
            if self.in_process:
                check_meeting(self.channel)
                worker_of_this_process().learn_script()
            # Objects that are asked for their state may communicate, so nothing that only one
            # rank may fail in comes before.
            state_dict = ask_state()
            place = self._place()
            log.admit(when_busy)
            stager = stager or self._own_stager()
            self._staged = stager.stage(state_dict)
            del state_dict
            self._keep_memory()
            future = log.submit(place, self._work(), uses=(self.storage_writer, self.planner))
        except BaseException as error:
            self._is_off = True
            for lease in self._kept:
                lease.release()
            self._decline(error)
            raise
        if isinstance(self._staged, Future):
            self.staging = _outcome_only(self._staged)
        elif stager.should_synchronize_after_execute:
            stager.synchronize_staging()
        log.raise_unseen(before=future)
        return future

    def _place(self) -> str | None:
        """Where the save goes; raises if that is nowhere.

        The writer is not touched: it may be busy with an earlier save.
        """
        if self.storage_writer is None:
            return place_of(choose_writer(None, self.checkpoint_id))
        return place_of(self) if self.checkpoint_id is not None else place_of(self.storage_writer)

    def _own_stager(self) -> AsyncStager:
        if isinstance(self.storage_writer, AsyncStager):
            return self.storage_writer
        return DefaultStager(StagingOptions(use_async_staging=False))

    def _keep_memory(self) -> None:
        """Whoever staged may stage again; this copy must stay until it is saved."""

        def keep(staged: STATE_DICT_TYPE) -> None:
            if self._is_off:
                return
            # A stager of the user's may have made a dict of its own from what ours staged.
            own = isinstance(staged, Staged)
            leases = [staged.lease] if own else staging_pool().leases_of(staged)  # type: ignore[attr-defined]
            for lease in leases:
                lease.keep()
                self._kept.append(lease)

        def keep_result(done: Future[STATE_DICT_TYPE]) -> None:
            if done.exception() is None:
                keep(done.result())

        if isinstance(self._staged, Future):
            self._staged.add_done_callback(keep_result)
        else:
            keep(self._staged)

    def _decline(self, error: BaseException) -> None:
        """Tell the other ranks that this one takes no part in the save, and why."""
        if isinstance(self.channel, SoloChannel):
            return

        def fail() -> Any:
            raise error

        def decline() -> Metadata:
            if self.in_process:
                call_meeting(self.channel, fail)
            return self._save(fail)

        future = backlog().submit(None, decline)
        # The caller is told by the exception itself.
        future.seen = True

    def _work(self) -> Callable[[], Metadata]:
        """What is left to do when the state is copied away."""

        def work() -> Metadata:
            try:
                if self.in_process:
                    return self._send(call_meeting(self.channel, self._confirm))
                return self._save(self._prepare)
            finally:
                self._release()

        return work

    def _save(self, prepare: Callable[[], SaveJob]) -> Metadata:
        with self.channel:
            return SaveOperation(prepare, self.channel, self.use_collectives).run()

    def _prepare(self) -> SaveJob:
        writer = choose_writer(self.storage_writer, self.checkpoint_id)
        return SaveJob(self._state_dict(), writer, self.planner or DefaultSavePlanner())

    def _confirm(self) -> bytes:
        """Make sure that there is something to save, while that can be told to all ranks."""
        self._state_dict()
        return b""

    def _state_dict(self) -> STATE_DICT_TYPE:
        staged = self._staged.result() if isinstance(self._staged, Future) else self._staged
        if isinstance(staged, Staged) and staged.lease.was_given_back:
            raise CheckpointException(
                "the stager handed over a copy that an earlier save used, whose memory was given "
                "back when that was done: stage the state for each save"
            )
        return staged

    def _release(self) -> None:
        if isinstance(self._staged, Future):
            self._staged.exception()
        for lease in self._kept:
            lease.release()

    def _send(self, meeting: Meeting) -> Metadata:
        """Have the worker save."""
        copied: Staged | None = None
        try:
            staged = self._state_dict()
            if not isinstance(staged, Staged) or staged.lease.is_over:
                # It is where the worker cannot see it.
                staged = copied = staging_pool().stage(staged)
            state_dict = unfolded(dict(staged))
            parcel = _Parcel(state_dict, self.checkpoint_id, self.storage_writer, self.planner)
            segment = staged.segment
            request = Request(
                meeting,
                pack(parcel, segment.memory),
                self.use_collectives,
                segment.number,
                staging_pool().segment_numbers(),
                _limit(meeting),
            )
            return worker_of_this_process().start().save(request, segment)
        except FailedThere as error:
            # The other ranks know.
            raise error.reason from None
        except BaseException as error:
            meeting.cancel(self.channel, _reason(error))
            if isinstance(error, CheckpointException) or not isinstance(error, Exception):
                raise
            # As it would be if this process had saved by itself.
            failures = {self.channel.rank: _wrap_exception(error)}
            raise CheckpointException("handing the state to the worker", failures) from error
        finally:
            if copied is not None:
                copied.release()


def _absolute(
    checkpoint_id: str | os.PathLike[str] | None, writer: StorageWriter | None
) -> str | os.PathLike[str] | None:
    """A relative path where it is now: the save may run later, and in another process."""
    if writer is None or isinstance(writer, FileSystemWriter):
        chosen = writer.checkpoint_id if checkpoint_id is None and writer else checkpoint_id
        if chosen and FileSystemWriter.validate_checkpoint_id(chosen):
            return os.path.abspath(chosen)
    return checkpoint_id


def _limit(meeting: Meeting) -> float | None:
    """How long a worker may take: each of its exchanges is limited, if there are others."""
    if meeting.address is None or not meeting.timeout_seconds:
        return None
    return _EXCHANGES * (meeting.timeout_seconds + _GRACE_SECONDS)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {_text_of(error)}"


def _outcome_only(staging: Future[STATE_DICT_TYPE]) -> Future[None]:
    """A future that is done when `staging` is, without what was staged."""
    outcome: Future[None] = Future()

    def tell(done: Future[STATE_DICT_TYPE]) -> None:
        error = done.exception()
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    staging.add_done_callback(tell)
    return outcome


# The worker


@dataclass
class _Parcel:
    """What a worker needs to know to save."""

    state_dict: STATE_DICT_TYPE
    checkpoint_id: str | os.PathLike[str] | None
    storage_writer: StorageWriter | None
    planner: SavePlanner | None


class WorkerKeeper:
    """The worker of this process: started when it is needed, and again if it died."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._script: dict[str, Any] = {}

    def learn_script(self) -> None:
        """Look at the script that runs now, for a worker that may be started when it has ended."""
        self._forget_after_fork()
        self._script = describe_script()

    def start(self) -> Worker:
        """The worker, running or on its way."""
        self._forget_after_fork()
        with self._lock:
            if self._worker is not None and not self._worker.is_alive:
                self._worker.stop()
                self._worker = None
            if self._worker is None:
                self._worker = Worker(_serve, self._script or describe_script())
                backlog().on_close(self.stop)
            return self._worker

    def stop(self) -> None:
        """End the worker, if there is one."""
        self._forget_after_fork()
        with self._lock:
            if self._worker is not None:
                self._worker.stop()
                self._worker = None

    def _forget_after_fork(self) -> None:
        """A forked child has no worker: the one that it knows of is its parent's."""
        if self._pid != os.getpid():
            self.__init__()  # type: ignore[misc]


_keeper = WorkerKeeper()


def worker_of_this_process() -> WorkerKeeper:
    """The worker that saves for this process, if asked to."""
    return _keeper


_plan_caches: dict[str, PlanCache] = {}
"""What planners remember, in a worker: they themselves come anew with each save."""


def _serve(request: Request, memory: torch.Tensor) -> Metadata:
    """Carry out the save of a trainer, in its worker."""

    def prepare() -> SaveJob:
        parcel: _Parcel = unpack(request.payload, memory, main_module.load)
        writer = choose_writer(parcel.storage_writer, parcel.checkpoint_id)
        planner = parcel.planner or DefaultSavePlanner()
        if isinstance(planner, DefaultSavePlanner):
            planner.remember_in(_plan_caches)
        return SaveJob(parcel.state_dict, writer, planner)

    with request.meeting.open() as channel:
        operation = SaveOperation(prepare, channel, request.use_collectives)
        return _lightened(operation.run(), operation)


def _lightened(metadata: Metadata, operation: SaveOperation) -> Metadata:
    """The metadata for the trainer: where it is, if that is enough."""
    if not operation.use_collectives or isinstance(metadata, StoredMetadata):
        return metadata
    if isinstance(operation.writer, FileSystemWriter) and can_be_read_back(metadata):
        save_id = metadata.storage_meta.save_id  # type: ignore[union-attr]
        return refer_to(
            operation.writer.open_store(), str(save_id), operation.writer.storage_meta()
        )
    return metadata

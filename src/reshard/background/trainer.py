"""A save in the background, on the trainer's side: from the call to its outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch

from reshard.api import CheckpointException, _text_of, _wrap_exception
from reshard.background.handover import pack
from reshard.background.overlap import OverlapStager, find_optimizers
from reshard.background.queue import SaveFuture, WhenBusy, save_queue
from reshard.background.unchanged import Unchanged, find_unchanged
from reshard.background.worker import PackedSave, WorkerRequest, worker_of_this_process
from reshard.coordination.channel import Channel, failing_together
from reshard.coordination.error_wire import decode_error
from reshard.coordination.failures import join_failures
from reshard.coordination.meeting import Meeting, call_meeting, check_meeting
from reshard.default_planner import DefaultSavePlanner
from reshard.logger import logged
from reshard.metadata import STATE_DICT_TYPE, Metadata
from reshard.operations.adapters import check_kinds
from reshard.operations.ranks import Ranks
from reshard.operations.save import Save, SaveJob, SaveSettings
from reshard.operations.targets import SaveTarget
from reshard.operations.user_calls import ask_for_states, stages_by_itself, synchronize
from reshard.planner import SavePlanner
from reshard.snapshots.pool import Lease, Staged, staging_pool
from reshard.staging import AsyncStager, DefaultStager, StagingOptions
from reshard.storage import takes_any_keyword
from reshard.tensors.composites import split_composites

Staging: TypeAlias = Literal["blocking", "overlap"]
_EXCHANGES = 4
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class BackgroundOptions:
    """How a background save is done."""

    in_process: bool
    stager: AsyncStager | None
    when_busy: WhenBusy
    staging: Staging = "blocking"
    optimizers: Sequence[torch.optim.Optimizer] | None = None

    def check(self, writer: object) -> None:
        if self.staging not in ("blocking", "overlap"):
            raise ValueError(f"staging is 'blocking' or 'overlap', not {self.staging!r}")
        if self.staging == "blocking":
            if self.optimizers is not None:
                raise ValueError("optimizers are for staging='overlap': pass that too, or neither")
        elif self.stager is not None or stages_by_itself(writer):
            own = "async_stager" if self.stager is not None else "storage_writer"
            raise ValueError(
                f"the {own} that was passed stages in its own way: leave it out, or staging"
            )


def save_later(
    state_dict: STATE_DICT_TYPE,
    target: SaveTarget,
    planner: SavePlanner | None,
    ranks: Ranks,
    options: BackgroundOptions,
    settings: SaveSettings = SaveSettings(),  # noqa: B008 - frozen
) -> BackgroundSave:
    """Copy the state away, and save it while the caller goes on."""
    what = "async save in a process" if options.in_process else "async save"
    # Opened here, not in the thread that saves: all ranks call in the same order, whatever order
    # their saves then run in.
    channel = ranks.open_channel(target.intent(what, settings.use_collectives, settings.shared))
    save = BackgroundSave(target, planner, channel, options, settings, ranks.group)
    save.start(state_dict)
    return save


class BackgroundSave:
    """One background save, as one rank sees it."""

    future: SaveFuture
    staging: Future[None] | None = None
    """Done when the state may change, if the stager copies in the background."""

    def __init__(
        self,
        target: SaveTarget,
        planner: SavePlanner | None,
        channel: Channel,
        options: BackgroundOptions,
        settings: SaveSettings,
        group: Any = None,
    ) -> None:
        self._group = group
        self.settings = settings
        self.target = target
        self.planner = planner
        self.channel = channel
        self.options = options
        self._staged: STATE_DICT_TYPE | Future[STATE_DICT_TYPE]
        self._kept: list[Lease] = []
        self._is_off = False
        self._unchanged = Unchanged()

    # In the thread that calls

    def start(self, state_dict: STATE_DICT_TYPE) -> None:
        """Copy the state away, and queue the rest.

        The failure of an earlier save is raised in the end: ranks learn of it at different
        times, and must not stay away from this one for it.
        """
        queue = save_queue()
        try:
            if self.options.in_process:
                check_meeting(self.channel)
                worker_of_this_process().learn_script()
            # Objects that are asked for their state may communicate, so nothing that only one
            # rank may fail in comes before.
            given, state_dict = state_dict, ask_for_states(state_dict)
            check_kinds(writer=self.target.writer, save=self.planner)
            self.options.check(self.target.writer)
            self.target, self.settings = self.target.absolute(), self.settings.absolute()
            self._check_target()
            queue.admit(self.options.when_busy)
            stager = self.options.stager or self._own_stager(given)
            with logged("stage_state_dict", log_exceptions=True):
                self._staged = self._stage(stager, state_dict)
            del state_dict, given
            self._keep_memory()
            self.future = queue.submit(
                self.target.place, self._save, uses=(self.target.writer, self.planner)
            )
        except BaseException as error:
            self._release()
            self._decline(error)
            raise
        if isinstance(self._staged, Future):
            self.staging = _outcome_only(self._staged)
        else:
            with logged("maybe_synchronize_staging", log_exceptions=True):
                synchronize(stager)
        queue.raise_unseen(before=self.future)

    def _check_target(self) -> None:
        """Raise if the save goes nowhere. A writer is not touched: it may be busy."""
        writer = self.target.writer
        if writer is None:
            writer = self.target.choose_writer()
        self.settings.check(writer)
        if self.options.in_process and getattr(writer, "is_in_this_process", False):
            raise ValueError(
                f"{self.target.place} is memory of this process, which the process that saves does "
                "not see: save with async_checkpointer_type=AsyncCheckpointerType.THREAD, or to "
                "another place"
            )

    def _stage(
        self, stager: AsyncStager, state_dict: STATE_DICT_TYPE
    ) -> STATE_DICT_TYPE | Future[STATE_DICT_TYPE]:
        """Copy what the base does not hold already."""
        # A stager that was passed has its own way with tensors.
        may_leave_out = self.options.stager is None and takes_any_keyword(stager.stage)
        self._unchanged = find_unchanged(
            state_dict if may_leave_out else {}, self.target.place, self.settings, self.planner
        )
        if not self._unchanged.kept:
            return stager.stage(state_dict)
        return stager.stage(state_dict, kept=self._unchanged.tensors)  # type: ignore[call-arg]

    def _verify_unchanged(self) -> None:
        """Make sure that what was not copied is in the base, and say so to the save."""
        if self._unchanged.kept:
            self.settings = dataclasses.replace(self.settings, unchanged=self._unchanged.verify())

    def _own_stager(self, state_dict: STATE_DICT_TYPE) -> AsyncStager:
        if self.options.staging == "overlap":
            return OverlapStager(find_optimizers(state_dict, self.options.optimizers))
        if stages_by_itself(self.target.writer):
            return cast(AsyncStager, self.target.writer)
        return DefaultStager(StagingOptions(use_async_staging=False))

    def _keep_memory(self) -> None:
        """Whoever staged may stage again; this copy must stay until it is saved."""
        if isinstance(self._staged, Future):
            self._staged.add_done_callback(
                lambda done: self._keep(done.result()) if done.exception() is None else None
            )
        else:
            self._keep(self._staged)

    def _keep(self, staged: STATE_DICT_TYPE) -> None:
        if self._is_off:
            return
        # A stager of the user's may have made a dict of its own from what ours staged.
        own = isinstance(staged, Staged)
        for lease in [staged.lease] if own else staging_pool().leases_of(staged):  # type: ignore[attr-defined]
            lease.keep()
            self._kept.append(lease)

    def _release(self) -> None:
        # Whoever staged may tell of it only now.
        self._is_off = True
        for lease in self._kept:
            lease.release()

    def _decline(self, error: BaseException) -> None:
        """Tell the other ranks that this one takes no part in the save, and why."""
        if self.channel.world_size == 1:
            return

        def decline() -> Metadata:
            with self.channel, failing_together(self.channel, "open"):
                raise error

        future = save_queue().submit(None, decline)
        # The caller is told by the exception itself.
        future.seen = True

    # In the thread that saves

    def _save(self) -> Metadata:
        target = self.target
        arguments = {
            "checkpoint_id": target.checkpoint_id,
            "storage_writer": target.writer,
            "planner": self.planner,
            "process_group": self._group,
        }
        with logged("save", arguments, log_exceptions=True):
            return self._save_in_worker() if self.options.in_process else self._save_here()

    def _save_here(self) -> Metadata:
        try:
            with self.channel:
                with failing_together(self.channel, "plan"):
                    self._verify_unchanged()
                    job = SaveJob(
                        self._staged_state(),
                        self.target.choose_writer(),
                        self.planner or DefaultSavePlanner(),
                        self.settings,
                        self._group,
                    )
                return Save(job, self.channel).run()
        finally:
            self._finish_staging()

    def _save_in_worker(self) -> Metadata:
        try:
            with self.channel:
                with failing_together(self.channel, "meet"):
                    self._staged_state()
                    self._verify_unchanged()
                meeting = call_meeting(self.channel)
            return self._send(meeting)
        finally:
            self._finish_staging()

    def _staged_state(self) -> STATE_DICT_TYPE:
        staged = self._staged.result() if isinstance(self._staged, Future) else self._staged
        if isinstance(staged, Staged) and staged.lease.was_given_back:
            raise CheckpointException(
                "the stager handed over a copy that an earlier save used, whose memory was given "
                "back when that was done: stage the state for each save"
            )
        return staged

    def _finish_staging(self) -> None:
        if isinstance(self._staged, Future):
            self._staged.exception()
        self._release()

    def _send(self, meeting: Meeting) -> Metadata:
        """Have the worker save."""
        copied: Staged | None = None
        try:
            staged = self._staged_state()
            if not isinstance(staged, Staged) or staged.lease.is_over:
                # It is where the worker cannot see it.
                staged = copied = staging_pool().stage(staged, kept=self._unchanged.tensors)
            packed = PackedSave(
                split_composites(dict(staged)),
                self.target,
                self.planner,
                self.settings,
            )
            request = WorkerRequest(
                meeting,
                pack(packed, staged.segment.memory, self._unchanged.addresses),
                staged.segment.number,
                staging_pool().segment_numbers(),
                _limit(meeting),
            )
            outcome = worker_of_this_process().start().save(request, staged.segment)
        except BaseException as error:
            meeting.cancel(self.channel, f"{type(error).__name__}: {_text_of(error)}")
            if isinstance(error, CheckpointException) or not isinstance(error, Exception):
                raise
            # As it would be if this process had saved by itself.
            failures = {self.channel.rank: _wrap_exception(error)}
            failed = join_failures(failures, "handing over", self.channel.rank, error)
            raise failed from failed.__cause__
        finally:
            if copied is not None:
                copied.release()
        if isinstance(outcome, bytes):
            # The other ranks know.
            reason, _ = decode_error(outcome)
            raise reason
        return outcome


def _limit(meeting: Meeting) -> float | None:
    """How long a worker may take: each of its exchanges is limited, if there are others."""
    if meeting.address is None or not meeting.timeout_seconds:
        return None
    return _EXCHANGES * (meeting.timeout_seconds + _GRACE_SECONDS)


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

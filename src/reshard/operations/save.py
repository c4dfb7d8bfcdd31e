"""A save, as one rank sees it: plan, write, finish, together with the other ranks."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from reshard.api import StalePlanError
from reshard.checkpoint.stored_metadata import can_be_read_back, refer_to
from reshard.coordination.channel import Channel
from reshard.default_planner import DefaultSavePlanner
from reshard.engine.collector import paused_collection, paused_in_front
from reshard.filesystem import FileSystemWriter
from reshard.metadata import STATE_DICT_TYPE, Metadata
from reshard.operations.user_calls import refuse_dcp
from reshard.planner import SavePlan, SavePlanner
from reshard.plans.wire import (
    decode_answer,
    decode_results,
    decode_save_plans,
    encode_answer,
    encode_results,
    encode_save_plan,
)
from reshard.plans.write_items import WriteItems
from reshard.rank_values import name_rank_values
from reshard.storage import StorageWriter, takes_any_keyword

__all__ = ["SaveJob", "SaveOperation", "choose_writer"]

logger = logging.getLogger(__name__)

_GO, _AGAIN = b"g", b"a"


def choose_writer(
    storage_writer: StorageWriter | None, checkpoint_id: str | os.PathLike[str] | None
) -> StorageWriter:
    if storage_writer is not None:
        if checkpoint_id is not None:
            storage_writer.reset(checkpoint_id)
        return storage_writer
    if not checkpoint_id:
        raise RuntimeError(
            "`checkpoint_id` must be specified if `storage_writer` is None: say where to save"
        )
    if not FileSystemWriter.validate_checkpoint_id(checkpoint_id):
        raise RuntimeError(
            f"Cannot detect which storage {checkpoint_id!r} is in: pass a directory, or a "
            "storage_writer"
        )
    writer = FileSystemWriter(checkpoint_id)
    writer.reset(checkpoint_id)
    return writer


@dataclass
class SaveJob:
    """What to save, with what."""

    state_dict: STATE_DICT_TYPE
    writer: StorageWriter
    planner: SavePlanner


class SaveOperation:
    """One save, as one rank sees it.

    `prepare` is called where its failure reaches the other ranks. It may ask objects for
    their state, which may communicate in its turn; so what `check` raises is told to all
    ranks before that.
    """

    def __init__(
        self,
        prepare: Callable[[], SaveJob],
        channel: Channel,
        use_collectives: bool,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.prepare = prepare
        self.check = check
        self.channel = channel
        self.use_collectives = use_collectives
        self._job: SaveJob | None = None
        self._quiet = contextlib.ExitStack()
        self.writer: StorageWriter
        self.planner: SavePlanner
        self.sent: SavePlan
        self.answer: SavePlan
        self.answers: list[SavePlan] = []
        self.metadata: Metadata | None = None

    def run(self) -> Metadata:
        if self.check is not None:
            self.channel.gather_scatter("open", self.open, lambda messages: messages)
        try:
            with self._quiet:
                return self._run_together() if self.use_collectives else self._run_alone()
        except BaseException:
            self._discard()
            raise

    def _run_together(self) -> Metadata:
        reply = self.channel.gather_scatter("plan", self.plan_locally, self.plan_globally)
        if reply[:1] == _AGAIN:
            # Some rank relied on a cached plan that the coordinator no longer has.
            reply = self.channel.gather_scatter("plan", self.plan_anew, self.plan_globally)
        save_id, answer = msgspec.msgpack.decode(reply[1:])
        self._join(save_id)
        self.answer = decode_answer(answer, self.sent)
        outcome = self.channel.gather_scatter("write", self.write, self.finish)
        return self._learn(outcome)

    def _begin(self) -> str:
        """Claim the place, before any rank writes; the id of the save."""
        return self.writer.begin_save()

    def _join(self, save_id: str) -> None:
        self.writer.join_save(save_id, self.channel.rank)

    def _discard(self) -> None:
        """Free the space that the failed save took; a retry may need it."""
        if not self.channel.outcome_known:
            # The coordinator may have committed it; the next save cleans up if it has not.
            return
        writer = self._job.writer if self._job is not None else None
        if writer is not None:
            try:
                writer.discard_save()
            except Exception as error:  # noqa: BLE001 - why the save failed is what counts
                logger.warning("could not remove the files of a failed save: %s", error)

    def plan_locally(self) -> bytes:
        self._set_up()
        with paused_collection():
            plan = self.planner.create_local_plan()
        self.sent = self.writer.prepare_local_plan(plan)
        return encode_save_plan(self.sent)

    def _set_up(self) -> None:
        if self._job is None:
            self._job = self.prepare()
        job = self._job
        refuse_dcp(job.planner, job.writer)
        channel, planner, writer = self.channel, job.planner, job.writer
        self.planner, self.writer = planner, writer
        state_dict = name_rank_values(job.state_dict, channel.rank, channel.world_size)
        if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
            with paused_collection():
                planner.set_up_planner(
                    state_dict=state_dict,
                    storage_meta=writer.storage_meta(),
                    is_coordinator=channel.is_coordinator,
                )
        else:
            warnings.warn(
                f"{type(planner).__name__}.set_up_planner does not take storage_meta; add the "
                "parameter",
                stacklevel=2,
            )
            planner.set_up_planner(state_dict, channel.is_coordinator)  # type: ignore[arg-type]
        set_up = writer.set_up_storage_writer
        if takes_any_keyword(set_up):
            set_up(
                channel.is_coordinator,
                rank=channel.rank,
                use_collectives=self.use_collectives,
                world_size=channel.world_size,
            )
        else:
            set_up(channel.is_coordinator)
        # From here on nobody is asked for a state, which may take memory and make cycles.
        self._quiet.enter_context(paused_in_front())

    def plan_anew(self) -> bytes:
        if isinstance(self.planner, DefaultSavePlanner):
            self.planner.forget_cached_plans()
        return self.plan_locally()

    def plan_globally(self, messages: Sequence[bytes]) -> list[bytes]:
        try:
            with paused_collection():
                plans = decode_save_plans(messages)
                answers, self.metadata = self.planner.create_global_plan(plans)
        except StalePlanError:
            if isinstance(self.planner, DefaultSavePlanner) and any(not p.usable for p in plans):
                return [_AGAIN] * len(plans)
            raise
        save_id = self._begin()
        self.answers = self.writer.prepare_global_plan(answers)
        return [
            _GO + msgspec.msgpack.encode((save_id, encode_answer(answer, plan)))
            for answer, plan in zip(self.answers, plans, strict=True)
        ]

    def write(self) -> bytes:
        final = self.planner.finish_plan(self.answer)
        writes = self.writer.write_data(final, self.planner)
        writes.wait()
        results = writes.value()
        return encode_results(results, as_answered=self._as_answered(final, results))

    def _as_answered(self, final: SavePlan, results: Any) -> bool:
        """Whether the coordinator knows the items of `results` without being told."""
        items = getattr(results, "items", None)
        if not (isinstance(items, WriteItems) and items.untouched):
            return False
        if self.answer.usable:
            return items is self.answer.items
        if items is not final.items:
            return False
        mine = type(self.planner)
        return (
            isinstance(self.planner, DefaultSavePlanner)
            and mine.finish_plan is DefaultSavePlanner.finish_plan
            and mine.create_global_plan is DefaultSavePlanner.create_global_plan
        )

    def finish(self, messages: Sequence[bytes]) -> list[bytes]:
        if self.metadata is None:
            raise RuntimeError("there is no global plan to finish")
        plans = self.answers
        if isinstance(self.planner, DefaultSavePlanner):
            whole = self.planner.global_plan
            plans = [a if a.usable else whole[rank] for rank, a in enumerate(plans)]
        results = [
            decode_results(message, plan.items)
            for message, plan in zip(messages, plans, strict=True)
        ]
        self.channel.seal()
        self.writer.finish(metadata=self.metadata, results=results)
        return [self._tell()] * len(messages)

    def _tell(self) -> bytes:
        """What the other ranks need to know of the metadata."""
        metadata = self.metadata
        if isinstance(self.writer, FileSystemWriter) and can_be_read_back(metadata):
            return b"s" + str(metadata.storage_meta.save_id).encode()  # type: ignore[union-attr]
        return b"p" + pickle.dumps(metadata)

    def _learn(self, outcome: bytes) -> Metadata:
        if self.metadata is not None:
            return self.metadata
        kind, data = outcome[:1], outcome[1:]
        if kind == b"s":
            return refer_to(
                self.writer.open_store(),  # type: ignore[attr-defined]
                data.decode(),
                self.writer.storage_meta(),
            )
        metadata: Metadata = pickle.loads(data)
        return metadata

    def open(self) -> bytes:
        if self.check is not None:
            self.check()
        return b""

    def _run_alone(self) -> Metadata:
        """Save without a plan of all ranks. Only the id of the save is agreed on."""
        save_id = self.channel.gather_scatter("plan", self.set_up_alone, self.begin_alone)
        self.channel.gather_scatter(
            "save", lambda: self.save_alone(save_id.decode()), self.finish_alone
        )
        if self.metadata is None:
            raise RuntimeError("the save ended without metadata")
        return self.metadata

    def set_up_alone(self) -> bytes:
        self._set_up()
        if isinstance(self.planner, DefaultSavePlanner):
            # What it remembers was planned together with other ranks.
            self.planner.forget_cached_plans()
        return b""

    def begin_alone(self, messages: Sequence[bytes]) -> list[bytes]:
        return [self._begin().encode()] * len(messages)

    def save_alone(self, save_id: str) -> bytes:
        """Plan and write what this rank holds, without the others."""
        self._join(save_id)
        plan = self.writer.prepare_local_plan(self.planner.create_local_plan())
        plans, self.metadata = self.planner.create_global_plan([plan])
        final = self.planner.finish_plan(self.writer.prepare_global_plan(plans)[0])
        writes = self.writer.write_data(final, self.planner)
        writes.wait()
        self.writer.finish(metadata=self.metadata, results=[writes.value()])
        return b""

    def finish_alone(self, messages: Sequence[bytes]) -> list[bytes]:
        self.channel.seal()
        self.writer.finish_parts()
        return [b""] * len(messages)

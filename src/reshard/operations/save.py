"""A save, as one rank sees it: plan, write, finish, together with the other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.api import PlanError, StalePlanError
from reshard.background.queue import save_queue
from reshard.coordination.channel import Channel, checking_arguments
from reshard.coordination.exchange import TextExchange
from reshard.default_planner import DefaultSavePlanner
from reshard.engine.collector import paused_collection, paused_in_front
from reshard.format.codec import check_compress
from reshard.logger import logged
from reshard.metadata import STATE_DICT_TYPE, Metadata
from reshard.operations.adapters import adapt_for_save, check_kinds
from reshard.operations.ranks import Ranks
from reshard.operations.replicas import ReplicaCheck
from reshard.operations.targets import Place, SaveTarget, comparable_place
from reshard.operations.user_calls import (
    ask_for_states,
    overridden,
    set_up_save_planner,
    set_up_writer,
    with_defaults,
)
from reshard.planner import SavePlan, SavePlanner
from reshard.plans.results import are_results_of
from reshard.plans.traits import save_traits
from reshard.plans.wire import (
    ResultExchange,
    SaveAnswer,
    SaveOutcome,
    SavePlanExchange,
    Written,
)
from reshard.rank_values import name_rank_values
from reshard.storage import StorageWriter
from reshard.tensors.flatten import Rules

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveSettings:
    """How to save, as `save` documents it."""

    use_collectives: bool = True
    base: Place | None = None
    frozen: Sequence[str] = ()
    compress: str | None = None
    fingerprint: bool = False
    check_replicas: bool = False
    format: str = "reshard"
    unchanged: Mapping[str, bytes] | None = None
    """The digests of tensors that the state dict holds no data of, since the base does."""

    @property
    def shared(self) -> list[tuple[str, str]]:
        """Those that all ranks must agree on, with their values."""
        base = comparable_place(self.base)
        return [
            ("base", repr(base)),
            ("fingerprint", repr(bool(self.fingerprint))),
            ("check_replicas", repr(bool(self.check_replicas))),
        ]

    def check(self, writer: StorageWriter) -> None:
        """Refuse settings that contradict each other, or that the storage does not take."""
        self._check_base()
        if self.frozen and self.base is None:
            raise ValueError(
                "frozen names tensors that need not be copied because the base holds them: pass "
                "base as well"
            )
        check_compress(self.compress)
        asked = {"base": self.base, "compress": self.compress, "fingerprint": self.fingerprint}
        if self.is_for_dcp:
            self._check_for_dcp(asked)
        elif self.format != "reshard":
            raise ValueError(f"format is 'reshard' or 'dcp', not {self.format!r}")
        asked["format"] = self.is_for_dcp
        taken = getattr(writer, "call_settings", ())
        for name, value in asked.items():
            if value and name not in taken:
                raise ValueError(
                    f"{type(writer).__name__} takes no {name}: pass a FileSystemWriter or a "
                    f"storage that has it in call_settings, or leave {name} out"
                )

    def _check_base(self) -> None:
        if self.base is None:
            return
        if not isinstance(self.base, str | os.PathLike):
            raise TypeError(f"base is a path, as text or a pathlib.Path, not {self.base!r}")
        if not os.fspath(self.base):
            raise ValueError(
                "base is empty: pass the directory of a checkpoint, or None to save everything"
            )

    @property
    def is_for_dcp(self) -> bool:
        return self.format == "dcp"

    def _check_for_dcp(self, asked: Mapping[str, Any]) -> None:
        for name, value in asked.items():
            if value:
                raise ValueError(
                    f"format='dcp' takes no {name}: checkpoints of torch.distributed.checkpoint "
                    f"have no place for it. Leave {name} or format out"
                )
        if not self.use_collectives:
            raise ValueError(
                "format='dcp' takes no use_collectives=False: DCP would keep a file of each rank "
                "under a fixed name, and those cannot be committed together. Leave one of them out"
            )

    @contextlib.contextmanager
    def apply(self, writer: StorageWriter, planner: SavePlanner) -> Iterator[None]:
        """Set what a call asks of its storage and its planner, until the context ends."""
        with (
            overridden(
                writer,
                base=self.base,
                unchanged=self.unchanged,
                compress=self.compress,
                fingerprint=self.fingerprint or None,
                format=self.format if self.is_for_dcp else None,
            ),
            overridden(
                planner,
                rules=Rules.DCP if self.is_for_dcp else None,
                takes_composites=False if self.is_for_dcp else None,
            ),
        ):
            yield

    def absolute(self) -> SaveSettings:
        """The same for later, or for another process: relative paths are taken from here."""
        self._check_base()
        if self.base is None or "://" in str(self.base):
            return self
        return dataclasses.replace(self, base=os.path.abspath(self.base))


@dataclass(frozen=True)
class SaveJob:
    """What to save, with what."""

    state_dict: STATE_DICT_TYPE
    writer: StorageWriter
    planner: SavePlanner
    settings: SaveSettings = SaveSettings()
    group: Any = None
    """The process group of the call, for those that listen to its events."""


def save_now(
    state_dict: STATE_DICT_TYPE,
    target: SaveTarget,
    planner: SavePlanner | None,
    ranks: Ranks,
    settings: SaveSettings = SaveSettings(),  # noqa: B008 - frozen
) -> Metadata:
    """Save while the caller waits."""
    channel = ranks.open_channel(target.intent("save", settings.use_collectives, settings.shared))
    with checking_arguments(channel):
        check_kinds(writer=target.writer, save=planner)
        save_queue().wait_for_users(target.writer, planner)
        writer = target.choose_writer()
        settings.check(writer)
    job = SaveJob(state_dict, writer, planner or DefaultSavePlanner(), settings, ranks.group)
    with channel:
        # Before anybody is asked for a state, which may communicate with ranks that failed here.
        channel.do_together("open", lambda: _settle(target.place, settings.base))
        return Save(job, channel).run()


def _settle(place: str | None, base: Place | None) -> None:
    """Wait for background saves that write to the same place, or make the base."""
    queue = save_queue()
    queue.settle_before_save(place)
    queue.settle(comparable_place(base))


class Save:
    """One save, as one rank sees it."""

    def __init__(self, job: SaveJob, channel: Channel) -> None:
        self.job = job
        self.channel = channel
        self.writer, self.planner, self._planner_settings = adapt_for_save(job.writer, job.planner)
        self.traits = save_traits(self.planner)
        self._planner_hooks = with_defaults(self.planner, SavePlanner)
        self._writer_hooks = with_defaults(self.writer, StorageWriter)
        self._states: STATE_DICT_TYPE | None = None
        self.metadata: Metadata | None = None
        self.reference = ""
        """What the metadata can be read back by; empty if it cannot."""
        self._final_plans: Sequence[SavePlan] = ()
        """On the coordinator: what each rank writes."""
        self._drafted: SavePlan | None = None
        """A plan that was made to compare replicas, and is still to be carried out."""
        self._quiet = contextlib.ExitStack()

    def _logged(self, name: str) -> contextlib.AbstractContextManager[None]:
        place = getattr(self.writer, "checkpoint_id", None)
        return logged(name, {"checkpoint_id": place, "process_group": self.job.group})

    def run(self) -> Metadata:
        """Save, or leave nothing behind."""
        try:
            with (
                self.job.settings.apply(self.writer, self.planner),
                overridden(self.planner, **self._planner_settings),
                self._quiet,
            ):
                together = self.job.settings.use_collectives
                if self.job.settings.check_replicas:
                    ReplicaCheck(self.planner, self.channel).run(self._draft)
                return self._save_together() if together else self._save_alone()
        except BaseException:
            self._discard()
            raise

    def _save_together(self) -> Metadata:
        answer = self.channel.exchange(SavePlanExchange(), self._plan_locally, self._plan_globally)
        if answer.plan is None:
            answer = self.channel.exchange(SavePlanExchange(), self._plan_anew, self._plan_globally)
        outcome = self.channel.exchange(
            ResultExchange(self._final_plans), lambda: self._write(answer), self._finish
        )
        self.reference = outcome.reference
        if self.metadata is not None:
            return self.metadata
        return outcome.metadata or self.writer.referenced_metadata(outcome.reference)

    # Each rank

    def _draft(self) -> SavePlan:
        """Plan before anything else: what this rank holds, whatever is cached of it."""
        self._set_up()
        if not self.job.settings.use_collectives:
            self._planner_hooks.forget_cached_plans()
        with paused_collection():
            self._drafted = self.planner.create_local_plan()
        return self._drafted if self._drafted.usable else self.planner.plan  # type: ignore[attr-defined]

    def _plan_locally(self) -> SavePlan:
        with self._logged("local_step"):
            self._set_up()
            return self._local_plan()

    def _plan_anew(self) -> SavePlan:
        """Plan again: some rank relied on a cached plan that the coordinator no longer has."""
        self._planner_hooks.forget_cached_plans()
        return self._plan_locally()

    def _set_up(self) -> None:
        if self._drafted is not None:
            return
        channel = self.channel
        if self._states is None:
            self._states = ask_for_states(self.job.state_dict)
        named = name_rank_values(self._states, channel.rank, channel.world_size)
        with paused_collection():
            set_up_save_planner(self.planner, named, self.writer, channel)
        set_up_writer(self.writer, channel, self.job.settings.use_collectives)
        # From here on nobody is asked for a state, which may take memory and make cycles.
        self._quiet.enter_context(paused_in_front())

    def _local_plan(self) -> SavePlan:
        plan, self._drafted = self._drafted, None
        if plan is None:
            with paused_collection():
                plan = self.planner.create_local_plan()
        return self.writer.prepare_local_plan(plan)

    def _write(self, told: SaveAnswer) -> Written:
        self._writer_hooks.join_save(told.save_id, self.channel.rank)
        answer: SavePlan = told.plan  # type: ignore[assignment]  # planned anew, it is there
        with self._logged("write_data"):
            final = self.planner.finish_plan(answer)
            writes = self.writer.write_data(final, self.planner)
            writes.wait()
        results = writes.value()
        if answer.usable:
            return Written(results, are_results_of(results, answer))
        return Written(results, self.traits.keeps_answers and are_results_of(results, final))

    # The coordinator

    def _plan_globally(self, plans: Sequence[SavePlan]) -> list[SaveAnswer]:
        with self._logged("global_step"):
            return self._answer(plans)

    def _answer(self, plans: Sequence[SavePlan]) -> list[SaveAnswer]:
        try:
            with paused_collection():
                answers, self.metadata = self.planner.create_global_plan(list(plans))
        except StalePlanError:
            if self.traits.is_default and any(not plan.usable for plan in plans):
                return [SaveAnswer("", None)] * len(plans)
            raise
        if self.metadata is None or len(answers) != len(plans):
            raise PlanError(
                f"create_global_plan of {type(self.planner).__name__} returned {len(answers)} "
                f"plans for {len(plans)} ranks, and {self.metadata!r} as the metadata. Return a "
                "plan for each rank, and a Metadata"
            )
        save_id = self._writer_hooks.begin_save()
        answers = self.writer.prepare_global_plan(answers)
        self._final_plans = self._planner_hooks.final_plans(answers)
        return [SaveAnswer(save_id, answer) for answer in answers]

    def _finish(self, written: Sequence[Written]) -> list[SaveOutcome]:
        if self.metadata is None:
            raise RuntimeError("there is no global plan to finish")
        self.channel.seal()
        with self._logged("finish_checkpoint"):
            self.writer.finish(metadata=self.metadata, results=[each.results for each in written])
        try:
            reference = self._writer_hooks.reference_to(self.metadata)
        except Exception as error:  # noqa: BLE001 - the save is committed
            logger.warning("could not refer to the metadata of a save: %s", error)
            reference = ""
        return [SaveOutcome(reference, None if reference else self.metadata)] * len(written)

    # Without collectives: each rank plans for itself, and only the id of the save is agreed on

    def _save_alone(self) -> Metadata:
        save_id = self.channel.exchange(TextExchange("plan"), self._set_up_alone, self._begin_alone)
        self.channel.exchange(
            TextExchange("save"), lambda: self._write_alone(save_id), self._finish_alone
        )
        if self.metadata is None:
            raise RuntimeError("the save ended without metadata")
        return self.metadata

    def _set_up_alone(self) -> str:
        self._set_up()
        # What the planner remembers was planned together with other ranks.
        self._planner_hooks.forget_cached_plans()
        return ""

    def _begin_alone(self, messages: Sequence[str]) -> list[str]:
        return [self._writer_hooks.begin_save()] * len(messages)

    def _write_alone(self, save_id: str) -> str:
        self._writer_hooks.join_save(save_id, self.channel.rank)
        with self._logged("local_step"):
            plan = self._local_plan()
        with self._logged("global_step"):
            plans, self.metadata = self.planner.create_global_plan([plan])
            plans = self.writer.prepare_global_plan(plans)
        with self._logged("write_data"):
            writes = self.writer.write_data(self.planner.finish_plan(plans[0]), self.planner)
            writes.wait()
        with self._logged("finish_checkpoint"):
            self.writer.finish(metadata=self.metadata, results=[writes.value()])
        return ""

    def _finish_alone(self, messages: Sequence[str]) -> list[str]:
        self.channel.seal()
        self._writer_hooks.finish_parts()
        return list(messages)

    def _discard(self) -> None:
        """Free the space that the failed save took; a retry may need it."""
        if not self.channel.outcome_known:
            # The coordinator may have committed it; the next save cleans up if it has not.
            return
        try:
            self._writer_hooks.discard_save()
        except Exception as error:  # noqa: BLE001 - why the save failed is what counts
            logger.warning("could not remove the files of a failed save: %s", error)

"""The checkpoints of a training run: when to save, what to keep, where to resume."""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from reshard.api import CheckpointException, CheckpointInUseError, CheckpointNotFoundError, _explain
from reshard.checkpoint.keeping import being_read, pin, unpin
from reshard.coordination.failures import say_again
from reshard.coordination.pairing import Intent
from reshard.coordination.store_channel import DEFAULT_TIMEOUT_SECONDS
from reshard.metadata import STATE_DICT_TYPE
from reshard.operations.ranks import Ranks
from reshard.operations.upkeep import delete
from reshard.policies import (
    Best,
    EverySteps,
    check_keep_policy,
    check_save_policy,
    metrics_of,
    parts_of,
)
from reshard.runs.decisions import DECISION, Arrival, Decider, JsonExchange, Ruling, must_ask
from reshard.runs.errands import Errands
from reshard.runs.flights import Flight, Flights
from reshard.runs.history import History
from reshard.runs.holding import Hold, hold
from reshard.runs.preemption import PreemptionWatch
from reshard.runs.resuming import Restored, is_damage
from reshard.runs.retention import clear_debris, delete_unkept
from reshard.runs.root import Root
from reshard.runs.small_files import replace_small
from reshard.runs.warming import WarmingUp
from reshard.state_dict_loader import load

__all__ = ["CheckpointManager", "Restored"]

logger = logging.getLogger(__name__)

A = TypeVar("A")
_SLICE_SECONDS = 30.0
"""How long the coordinator looks for something new before it tells the others that it does."""


class CheckpointManager:
    """The checkpoints of one training run, in the folders `step-<n>` of a root.

    The root is a path, or a URL that takes `storage_options`. All ranks of `process_group` (of the
    default group if there is one) make the manager and call its methods; only `steps`, `latest`,
    `best` and `metrics` are for any rank alone, and `wait` and `close` wait for no other rank.

    `every` says at which steps `save` saves, `keep` which checkpoints stay (None: all), both as
    policies of `reshard.policies`. `mode` is `"sync"`, or `"thread"` or `"process"` for saves in
    the background, whose copy may run beside the next forward and backward pass with
    `staging="overlap"`, as `async_save` describes it. A save that fails is logged and tried again
    at the next step; after `max_failures` in a row its error is raised by the next `save`. With
    `on_failure="raise"` the first one is: by `save` itself, or of a background save by the next
    `save`, `wait` or `close`.

    With `on_preemption`, SIGTERM and SIGUSR1 on any rank make the next `save` save, whatever the
    policy says, and wait for the commit; then `preempted` is True on all ranks. Handlers that
    were there are called, and put back by `close`.

    One job holds a root. A second one is told who does, unless that is gone; `take_over` does not
    ask. With `read_only` nothing is held, saved or deleted: for jobs that follow a run.
    `save_options` are for every save: `{"fingerprint": True}`, for instance. Of all ranks, the
    `clock` of the coordinator counts.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        every: Any = EverySteps(1),  # noqa: B008 - frozen
        keep: Any = None,
        *,
        mode: Literal["sync", "thread", "process"] = "sync",
        staging: Literal["blocking", "overlap"] = "blocking",
        on_failure: Literal["warn", "raise"] = "warn",
        max_failures: int = 3,
        on_preemption: bool = False,
        read_only: bool = False,
        take_over: bool = False,
        save_options: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_save_policy(every)
        if keep is not None:
            check_keep_policy(keep)
        _check_choice("mode", mode, ("sync", "thread", "process"))
        _check_choice("staging", staging, ("blocking", "overlap"))
        if mode == "sync" and staging == "overlap":
            raise ValueError(
                'staging="overlap" is for saves in the background: choose another mode'
            )
        _check_choice("on_failure", on_failure, ("warn", "raise"))
        if max_failures < 1:
            raise ValueError(f"max_failures is 1 or more, not {max_failures}")
        self._every, self._keep = every, keep
        self._mode = mode
        self._raises = on_failure == "raise"
        self._read_only, self._take_over = read_only, take_over
        self._ranks = Ranks(process_group, timeout_seconds=timeout_seconds)
        is_alone = not (dist.is_available() and dist.is_initialized())
        self._is_coordinator = is_alone or dist.get_rank(process_group) == 0
        self._root = Root(root, storage_options)
        self._save_options = {
            **(save_options or {}),
            "process_group": process_group,
            "storage_options": storage_options,
            "timeout_seconds": timeout_seconds,
        }
        if staging == "overlap":
            self._save_options["staging"] = staging
        self._history = History(self._root.store)
        self._decider = Decider(every, clock, 1 if self._raises else max_failures)
        self._flights = Flights(mode, self._flight_ended)
        self._warming_up = WarmingUp(mode)
        self._errands = Errands()
        self._reading = contextlib.ExitStack()
        self._hold: Hold | None = None
        self._damaged: set[int] = set()
        self._last_called: int | None = None
        self._failed: Flight | None = None
        """The last save that failed, until it is raised or a later one succeeds."""
        self._is_closed = False
        self._watch = PreemptionWatch() if on_preemption else None
        try:
            self._found: list[int] = self._from_coordinator("open", self._open, list[int])
        except BaseException:
            self._let_go()
            raise
        self._known = Ruling(last_step=self._found[-1] if self._found else None)
        self._decider.restart(self._known.last_step)

    def _open(self) -> list[int]:
        """On the coordinator: hold the root, clear up, look what is there."""
        if not self._read_only:
            self._root.create()
            self._hold = hold(self._root.store, self._take_over)
            self._hold.keep_renewing()
            clear_debris(self._root)
        return self._root.committed()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointException as failure:
            # What ended the block is raised.
            logger.error("while the manager of %s was closed: %s", self._root.location, failure)

    # Saving

    @property
    def preempted(self) -> bool:
        """Whether any rank was told to end, as of the last `save`. The same on all ranks."""
        return self._known.is_preempted

    def save(
        self,
        step: int,
        state: STATE_DICT_TYPE,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Save the state if that is due, or in any case with `force`; whether it did.

        For the end of each step: `step` is how many are done. In the background modes it returns
        when the state may be changed. A step that is saved already is not saved again. `metrics`
        are kept with the checkpoint, those of the coordinator; one that is NaN is never the best.

        Ranks wait for each other only when something is saved, and otherwise about once a second
        if they have to: for policies that need a clock, with `on_preemption`, and to learn how a
        save ended.
        """
        self._check_may_write("save")
        step = self._check_step(step)
        self._check_metrics(step, metrics)
        if not must_ask(self._every, self._known, step, force, self._watch is not None):
            self._warming_up.begin(state)
            return False
        ruling = self._known = self._ask(step, force)
        if ruling.failed:
            raise self._failures(ruling.failed)
        if not ruling.save:
            self._warming_up.begin(state)
            return False
        return self._save(step, state, metrics, wait=ruling.is_preempted)

    def _ask(self, step: int, force: bool) -> Ruling:
        arrival = Arrival(step, force, self._watch is not None and self._watch.signalled)
        intent = Intent("manager decide", f"save of step {step} to {self._root.location!r}")

        def decide(arrivals: Any) -> Any:
            if self._hold is not None:
                self._hold.check()
            return self._decider.decide(arrivals)

        with self._ranks.open_channel(intent) as channel:
            return channel.exchange(DECISION, lambda: arrival, decide)

    def _save(
        self, step: int, state: STATE_DICT_TYPE, metrics: Mapping[str, Any] | None, wait: bool
    ) -> bool:
        self._warming_up.finish()
        if self._is_coordinator and metrics:
            values = {str(name): float(value) for name, value in metrics.items()}
            # Before the save, so that it is there when the checkpoint is.
            self._errands.add("store metrics", lambda: self._root.put_metrics(step, values))
        place = {"checkpoint_id": self._root.place_of(step)}
        flight = self._flights.begin(step, state, {**self._save_options, **place})
        if wait:
            self._flights.wait()
        if self._mode == "sync":
            self._errands.drain()
            # All ranks know how it ended. What failed is tried again, whatever was agreed on.
            is_pending = flight.error is not None
            self._known = self._known.after_save(is_pending)
            if flight.error is not None and self._raises:
                self._failed = None
                raise flight.error
        return flight.error is None

    def _flight_ended(self, flight: Flight) -> None:
        """Take note of the end of a save, in whatever thread it ended."""
        error = flight.error
        self._failed = None if error is None else flight
        if not self._is_coordinator:
            return
        reason = "" if error is None else _explain(error) or type(error).__name__
        if error is not None:
            place = self._root.open(flight.step).location
            logger.warning("the save to %s failed, and training goes on: %s", place, reason)
        self._decider.ended(flight.step, reason, self._raises and self._mode == "sync")
        self._errands.add("tidy up", lambda: self._tidy_up(flight, reason))

    def _tidy_up(self, flight: Flight, reason: str) -> None:
        """On the coordinator: write the history, and delete what is not kept."""
        sizes = {} if reason else self._root.open(flight.step).sizes()
        self._history.append(
            {
                "step": flight.step,
                "ok": not reason,
                **({"reason": reason} if reason else {}),
                "bytes": sum(sizes.values()),
                "stall_seconds": round(flight.stall_seconds, 6),
                "seconds": round(flight.seconds, 6),
                "mode": self._mode,
            }
        )
        if not reason:
            self._damaged.discard(flight.step)
            delete_unkept(self._root, self._keep, time.time(), self._damaged)

    def _failures(self, reason: str) -> BaseException:
        """The error for saves that failed, on a rank that may not have heard of it yet."""
        self._flights.wait()
        failed, self._failed = self._failed, None
        error = None if failed is None else failed.error
        where = f"to {self._root.location!r}"
        text = f"saves {where} have failed, and training would go on without them: {reason}"
        if isinstance(error, CheckpointException):
            return say_again(error, text)
        again = CheckpointException(text)
        again.__cause__ = error
        return again

    # Resuming

    def restore(
        self, state: dict[str, Any], step: int | None = None, **options: Any
    ) -> Restored | None:
        """Load the newest checkpoint, or that of a step; the step, or None if there is none.

        If the newest is damaged the one before it is loaded, and so on: that is logged, and the
        step that is returned has the reasons in `skipped`. A checkpoint that does not fit the state
        is an error. `options` are those of `load`; `verify` is `"full"` unless it is given.

        What became of every value is in `report.receipt()` of the step that is returned, and in the
        file `resume-<time>.json` of the root; with `strict="receipt"` all must be restored.
        """
        self._check_open()
        self.wait()
        there: list[int] = self._from_coordinator("look", self._root.committed, list[int])
        wanted = [step] if step is not None else there[::-1]
        skipped: dict[int, CheckpointException] = {}
        for each in wanted:
            try:
                restored = self._load(each, state, options)
            except CheckpointException as error:
                if step is not None or not is_damage(error):
                    raise
                skipped[each] = error
                if self._is_coordinator:
                    logger.warning(
                        "step %d of %s cannot be loaded, so the one before is tried: %s",
                        *(each, self._root.location, error),
                    )
                continue
            restored.skipped = {number: _explain(error) for number, error in skipped.items()}
            self._damaged |= set(skipped)
            self._found = there
            self._known = Ruling(last_step=each, is_preempted=self.preempted)
            self._decider.restart(each)
            self._last_called = None
            return restored
        if skipped:
            raise next(iter(skipped.values()))
        return None

    def _load(self, step: int, state: dict[str, Any], options: Mapping[str, Any]) -> Restored:
        place = self._root.open(step)
        reading = contextlib.ExitStack()
        with reading:

            def announce() -> str:
                reading.enter_context(being_read(place))
                return ""

            self._from_coordinator("announce", announce, str)
            restored = Restored(step)
            restored.report = load(
                state,
                checkpoint_id=self._root.place_of(step),
                process_group=self._ranks.group,
                storage_options=self._root.storage_options,
                timeout_seconds=self._ranks.timeout_seconds,
                **{"verify": "full", "receipt": True, **options},
            )
            if not self._read_only and options.get("receipt", True):
                self._from_coordinator("receipt", lambda: self._keep_receipt(restored), str)
            # The coordinator must not be done with it before the others are.
            self._from_coordinator("finish", str, str)
        return restored

    def _keep_receipt(self, restored: Restored) -> str:
        """On the coordinator: put what was restored beside the run, for people."""
        receipt = {"step": int(restored), **json.loads(restored.report.receipt().to_json())}
        name = time.strftime("resume-%Y-%m-%dT%H-%M-%SZ.json", time.gmtime())
        try:
            replace_small(self._root.store, name, json.dumps(receipt, indent=2).encode() + b"\n")
        except OSError as error:
            logger.warning("%s was not written to %s: %s", name, self._root.location, error)
        return name

    def wait_for_new(
        self, after: int | None = None, timeout: float | None = None, poll_seconds: float = 1.0
    ) -> int | None:
        """Wait for a checkpoint of a later step than `after`; the newest, or None in the end.

        It is not deleted before the next call of this, or `close`.
        """
        self._check_open()
        give_up = None if timeout is None else time.monotonic() + timeout

        def look() -> tuple[int | None, bool]:
            self._reading.close()
            pause = time.monotonic() + _SLICE_SECONDS
            while True:
                found = self._hold_newest(after)
                now = time.monotonic()
                is_over = give_up is not None and now >= give_up
                if found is not None or is_over or now >= pause:
                    return found, is_over
                left = poll_seconds if give_up is None else min(poll_seconds, give_up - now)
                time.sleep(max(0.0, left))

        while True:
            found, is_over = self._from_coordinator("wait", look, tuple[int | None, bool])
            if found is not None or is_over:
                return found

    def _hold_newest(self, after: int | None) -> int | None:
        for step in reversed(self._root.committed()):
            if after is not None and step <= after:
                return None
            with contextlib.suppress(CheckpointInUseError, CheckpointNotFoundError):
                self._reading.enter_context(being_read(self._root.open(step)))
                return step
        return None

    # What is there

    def steps(self) -> list[int]:
        """The steps that can be restored, in order. Only committed checkpoints count."""
        return self._root.committed()

    def latest(self) -> int | None:
        """The last of them."""
        return next(iter(reversed(self.steps())), None)

    def best(self, metric: str | None = None, largest: bool = False) -> int | None:
        """The step with the smallest value of a metric, or with the `largest`.

        Without a metric, what the first `Best` in `keep` says.
        """
        found = [part for part in parts_of(self._keep) if isinstance(part, Best)]
        if metric is not None:
            found = [Best(metric, largest=largest)]
        if not found:
            raise ValueError("name a metric, as in best('loss'): there is no Best in keep")
        return next(iter(found[0].ranked(self._root.saved(self.steps()))), None)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that a step was saved with."""
        return self._root.metrics(step)

    def delete(self, step: int) -> None:
        """Delete a checkpoint, unless it is pinned, being read, or referred to."""
        self._check_may_write("delete")

        def work() -> str:
            delete(self._root.place_of(step), False, self._root.storage_options)
            self._root.delete_metrics(step)
            return ""

        self._from_coordinator("delete", work, str)
        self._found = [each for each in self._found if each != step]

    def pin(self, step: int) -> None:
        """Keep a checkpoint, whatever the policy says."""

        def work() -> str:
            pin(self._root.open(step))
            return ""

        self._from_coordinator("pin", work, str)

    def unpin(self, step: int) -> bool:
        """Leave it to the policy again; whether it was pinned."""
        return self._from_coordinator("unpin", lambda: unpin(self._root.open(step)), bool)

    # The end

    def wait(self) -> None:
        """Block until this rank's saves are over, and what follows them.

        Raises the failure of a background save with `on_failure="raise"`.
        """
        self._flights.wait()
        self._errands.drain()
        if self._raises and self._failed is not None:
            raise self._failures(_explain(self._failed.error or CheckpointException("unknown")))

    def close(self) -> None:
        """Wait as `wait` does, and let go of the root. It may be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._warming_up.finish()
            self.wait()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._reading.close()
        if self._watch is not None:
            self._watch.close()
        if self._hold is not None:
            self._hold.release()

    # Ranks and arguments

    def _from_coordinator(self, what: str, work: Callable[[], A], kind: Any) -> A:
        """What `work` returns on the coordinator; an error on all ranks if it raises."""
        intent = Intent(f"manager {what}", f"{what} of the run at {self._root.location!r}")
        exchange = JsonExchange[str, A](what, str, kind)
        with self._ranks.open_channel(intent) as channel:
            return channel.exchange(exchange, str, lambda texts: [work()] * len(texts))

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(f"the manager of {self._root.location!r} is closed: make another")

    def _check_may_write(self, what: str) -> None:
        self._check_open()
        if self._read_only:
            raise ValueError(f"this manager is read_only, and cannot {what}")

    def _check_step(self, step: int) -> int:
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"a step is 0 or more, not {step}")
        if self._last_called is not None and step < self._last_called:
            raise ValueError(
                f"step {step} comes after step {self._last_called}: steps must not go backwards"
            )
        newer = [each for each in self._found if each > step and each not in self._damaged]
        if newer:
            raise ValueError(
                f"step {step} goes back behind step {newer[-1]}, which {self._root.location!r} has "
                "already: restore that first, delete it with CheckpointManager.delete, or choose "
                "another root"
            )
        self._last_called = step
        return step

    def _check_metrics(self, step: int, metrics: Mapping[str, Any] | None) -> None:
        missing = metrics_of(self._keep) - (metrics or {}).keys()
        if missing and self._is_coordinator:
            raise ValueError(
                f"the metrics of step {step} lack {', '.join(map(repr, sorted(missing)))}, which "
                f"keep={self._keep!r} decides by: pass it in metrics={{...}}"
            )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is one of {', '.join(map(repr, choices))}, not {value!r}")

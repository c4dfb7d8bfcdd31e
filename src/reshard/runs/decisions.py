"""Whether to save at a step: decided once, by the coordinator, for all ranks.

A rank asks the others only if it must. What depends on the step alone each rank finds out by
itself; the rest (clocks, signals, how background saves ended) only the coordinator knows, and it is
asked about once a second: its answer says at which step next. Between saves, a run that saves every
so many steps asks nobody.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from reshard.api import CheckpointException
from reshard.coordination.exchange import Exchange
from reshard.policies import Moment

CHECK_SECONDS = 1.0
"""How often ranks ask each other at most, for what no step tells."""
_MOST_STEPS = 1000
"""How many steps there are between two questions at most, however fast they are."""

M = TypeVar("M")
A = TypeVar("A")


class JsonExchange(Exchange[M, A], Generic[M, A]):
    """Small structures both ways."""

    def __init__(self, phase: str, message: type[M], answer: type[A]) -> None:
        self.phase = phase
        self._message = message
        self._answer = answer

    def encode(self, message: M) -> bytes:
        return msgspec.json.encode(message)

    def decode(self, messages: Sequence[bytes]) -> list[M]:
        return [msgspec.json.decode(message, type=self._message) for message in messages]

    def encode_answers(self, answers: Sequence[A], messages: Sequence[M]) -> list[bytes]:
        return [msgspec.json.encode(answer) for answer in answers]

    def decode_answer(self, answer: bytes, sent: M) -> A:
        return msgspec.json.decode(answer, type=self._answer)


class Arrival(msgspec.Struct, frozen=True):
    """What a rank says when it asks."""

    step: int
    force: bool
    signalled: bool


class Ruling(msgspec.Struct, frozen=True):
    """What all ranks are told, and know until they ask again."""

    save: bool = False
    last_step: int | None = None
    """The last step that was saved or restored, or is being saved."""
    is_pending: bool = False
    """Whether a background save has not ended yet, as far as all ranks know."""
    next_check: int = 0
    """The step from which on the coordinator may know something new."""
    is_preempted: bool = False
    failed: str = ""
    """Why the last of too many failed saves failed."""

    def after_save(self, is_pending: bool) -> Ruling:
        """The same once a save has ended on all ranks; if it failed, they ask at the next step."""
        next_check = 0 if is_pending else self.next_check
        return msgspec.structs.replace(self, is_pending=is_pending, next_check=next_check)


DECISION = JsonExchange[Arrival, Ruling]("decide", Arrival, Ruling)


def must_ask(every: Any, known: Ruling, step: int, force: bool, watches_signals: bool) -> bool:
    """Whether a rank has to ask the coordinator; the same on all ranks."""
    if force:
        return True
    may_wait = step < known.next_check
    if (watches_signals or known.is_pending) and not may_wait:
        return True
    is_due = every.due(Moment(step, known.last_step, None))
    if is_due is None:
        # Only if the next step is as good: EverySteps(100) & EveryMinutes(10) has one chance.
        return not (may_wait and every.due(Moment(step + 1, known.last_step, None)) is None)
    return bool(is_due)


class Decider:
    """What the coordinator knows, and how it decides. Background saves may end in any thread."""

    def __init__(self, every: Any, clock: Callable[[], float], most_failures: int) -> None:
        self._every = every
        self._clock = clock
        self._most_failures = most_failures
        self._lock = threading.Lock()
        self._ended: deque[tuple[int, str, bool]] = deque()
        self._under_way: list[int] = []
        self._failures = 0
        self._reason = ""
        self._preempted_at: int | None = None
        self._is_rescued = False
        self._asked: tuple[int, float] | None = None
        self._gap = 1
        self._saved: int | None = None
        self._last: int | None = None
        self._saved_at = self._last_at = clock()
        self.restart(None)

    def restart(self, last_step: int | None) -> None:
        """Go on from a step that was restored, or from nothing. No save may be under way."""
        self._settle()
        self._saved = self._last = last_step
        self._saved_at = self._last_at = self._clock()
        self._asked = None

    def ended(self, step: int, reason: str = "", was_raised: bool = False) -> None:
        """A save was committed, or failed for a reason, which all ranks may have raised already."""
        with self._lock:
            self._ended.append((step, reason, was_raised))

    def decide(self, arrivals: Sequence[Arrival]) -> Sequence[Ruling]:
        step = _agreed(arrivals, "step", "the same step")
        force = _agreed(arrivals, "force", "the same")
        self._settle()
        failed = ""
        if self._failures >= self._most_failures:
            failed, self._failures = self._reason, 0
        if self._preempted_at is None and any(arrival.signalled for arrival in arrivals):
            self._preempted_at = step
        save = not failed and self._last != step and (force or self._is_due(step))
        if save:
            self._last, self._last_at = step, self._clock()
            self._under_way.append(step)
        ruling = Ruling(
            save=save,
            last_step=self._last,
            is_pending=bool(self._under_way),
            next_check=step + (self._steps_to_wait(step) if len(arrivals) > 1 else 1),
            is_preempted=self._preempted_at is not None,
            failed=failed,
        )
        return [ruling] * len(arrivals)

    def _is_due(self, step: int) -> bool:
        if self._preempted_at is not None and not self._is_rescued:
            return True
        moment = Moment(step, self._last, self._clock() - self._last_at)
        return bool(self._every.due(moment))

    def _settle(self) -> None:
        """Take note of the saves that have ended."""
        with self._lock:
            ended = [*self._ended]
            self._ended.clear()
        for step, reason, was_raised in ended:
            self._under_way.remove(step)
            if reason:
                self._failures += not was_raised
                self._reason = reason
                if self._last == step:
                    # So that the next step is due again.
                    self._last, self._last_at = self._saved, self._saved_at
            else:
                self._failures = 0
                self._saved, self._saved_at = step, self._last_at
                self._is_rescued |= self._preempted_at is not None and step >= self._preempted_at

    def _steps_to_wait(self, step: int) -> int:
        now = self._clock()
        before, self._asked = self._asked, (step, now)
        if before is None or step <= before[0] or now <= before[1]:
            self._gap = 1
        else:
            per_step = (now - before[1]) / (step - before[0])
            wanted = max(1, math.floor(CHECK_SECONDS / per_step))
            # Slowly: the first steps of a run are not like those that follow.
            self._gap = min(wanted, 2 * self._gap, _MOST_STEPS)
        return self._gap


def _agreed(arrivals: Sequence[Arrival], name: str, what: str) -> Any:
    """What all ranks say."""
    ranks: dict[Any, int] = {}
    for rank, arrival in enumerate(arrivals):
        ranks.setdefault(getattr(arrival, name), rank)
    if len(ranks) > 1:
        shown = ", ".join(f"{value} on rank {rank}" for value, rank in ranks.items())
        raise CheckpointException(
            f"ranks disagree about the {name} that they save: {shown}. Call save on all ranks, "
            f"with {what}"
        )
    return next(iter(ranks))

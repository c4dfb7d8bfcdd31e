"""When to save, and what to keep: small objects that combine with `|` and `&`.

Pure: they decide by what they are given, and know neither clocks nor files. A policy of your own is
any object with `due` (`SavePolicy`) or `kept` (`KeepPolicy`); derive it from one of these to
combine it with others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "AtSteps",
    "Best",
    "EveryMinutes",
    "EverySteps",
    "KeepPolicy",
    "Latest",
    "LatestFor",
    "Moment",
    "Newer",
    "SavePolicy",
    "Saved",
]


# What is decided by


@dataclass(frozen=True)
class Moment:
    """A step of a run, at which a save may be due."""

    step: int
    last_step: int | None
    """The last step that was saved or restored; None if there is none."""
    seconds: float | None
    """How long ago the last save was, or else the beginning of the run; None if not known here."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is there."""

    step: int
    time: float
    """When it was committed, in seconds since 1970."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class _Policy:
    """`|` is either, `&` is both."""

    def __or__(self, other: Any) -> _Combination:
        return _combined(self, other, _AnyOf)

    def __and__(self, other: Any) -> _Combination:
        return _combined(self, other, _AllOf)


class SavePolicy(_Policy):
    """Says when to save."""

    def due(self, moment: Moment) -> bool | None:
        """Whether to save now; None if that depends on `moment.seconds`, and it is None.

        Each rank asks first with what all ranks know, and so must get the same answer. Only if it
        is None, the coordinator decides for all, by its clock.
        """
        raise NotImplementedError


class KeepPolicy(_Policy):
    """Says which checkpoints to keep."""

    metrics: Collection[str] = ()
    """The metrics that it decides by, which every save must have."""

    def kept(self, saved: Sequence[Saved], now: float) -> Collection[int]:
        """The steps to keep of `saved`, which are in the order of their steps.

        The newest is kept in any case, as are those that are pinned.
        """
        raise NotImplementedError


# Policies


@dataclass(frozen=True)
class EverySteps(SavePolicy, KeepPolicy):
    """To save: whenever a multiple of `count` steps is reached. To keep: steps that are one.

    Also if no save was called for at that very step, or if that failed: then the next step is due.
    """

    count: int

    def __post_init__(self) -> None:
        _check_count(self)

    def due(self, moment: Moment) -> bool:
        return moment.step // self.count > (moment.last_step or 0) // self.count

    def kept(self, saved: Sequence[Saved], now: float) -> Collection[int]:
        return {each.step for each in saved if each.step % self.count == 0}


@dataclass(frozen=True)
class EveryMinutes(SavePolicy):
    """To save: when the last save was that long ago, by the clock of the coordinator."""

    minutes: float

    def __post_init__(self) -> None:
        _check_positive("EveryMinutes", self.minutes)

    def due(self, moment: Moment) -> bool | None:
        return None if moment.seconds is None else moment.seconds >= self.minutes * 60


@dataclass(frozen=True, init=False)
class AtSteps(SavePolicy, KeepPolicy):
    """To save, and to keep: these steps."""

    steps: frozenset[int]

    def __init__(self, *steps: int) -> None:
        if not steps:
            raise ValueError("AtSteps names no steps: pass some, as in AtSteps(10, 1000)")
        if not all(isinstance(step, int) and step >= 0 for step in steps):
            raise ValueError(f"AtSteps takes numbers of steps, not {steps}")
        object.__setattr__(self, "steps", frozenset(steps))

    def due(self, moment: Moment) -> bool:
        # The last one may have failed: then the next step is due.
        passed = [step for step in self.steps if step <= moment.step]
        last = -1 if moment.last_step is None else moment.last_step
        return bool(passed) and max(passed) > last

    def kept(self, saved: Sequence[Saved], now: float) -> Collection[int]:
        return {each.step for each in saved} & self.steps


@dataclass(frozen=True)
class Latest(KeepPolicy):
    """To keep: the last `count`."""

    count: int

    def __post_init__(self) -> None:
        _check_count(self)

    def kept(self, saved: Sequence[Saved], now: float) -> Collection[int]:
        return {each.step for each in saved[-self.count :]}


@dataclass(frozen=True, kw_only=True)
class LatestFor(KeepPolicy):
    """To keep: those that are not older than that."""

    minutes: float = 0
    hours: float = 0
    days: float = 0

    def __post_init__(self) -> None:
        _check_positive("LatestFor", self.seconds)

    @property
    def seconds(self) -> float:
        return self.minutes * 60 + self.hours * 3600 + self.days * 86400

    def kept(self, saved: Sequence[Saved], now: float) -> Collection[int]:
        return {each.step for each in saved if now - each.time <= self.seconds}


@dataclass(frozen=True)
class Newer(KeepPolicy):
    """To keep: all steps after `step`."""

    step: int

    def kept(self, saved: Sequence[Saved], now: float) -> Collection[int]:
        return {each.step for each in saved if each.step > self.step}


@dataclass(frozen=True)
class Best(KeepPolicy):
    """To keep: the `count` steps with the smallest value of a metric, or with the `largest`.

    Of equal values the newer one is better. A step without the metric, or with NaN, is never among
    the best.
    """

    metric: str
    count: int = 1
    largest: bool = False

    def __post_init__(self) -> None:
        _check_count(self)

    @property
    def metrics(self) -> Collection[str]:  # type: ignore[override]
        return (self.metric,)

    def kept(self, saved: Sequence[Saved], now: float) -> Collection[int]:
        return set(self.ranked(saved)[: self.count])

    def ranked(self, saved: Sequence[Saved]) -> list[int]:
        """Steps by their metric, the best first."""
        sign = -1 if self.largest else 1
        found = [
            (sign * value, -each.step)
            for each in saved
            if not math.isnan(value := each.metrics.get(self.metric, math.nan))
        ]
        return [-step for _, step in sorted(found)]


def _check_count(policy: EverySteps | Latest | Best) -> None:
    name, count = type(policy).__name__, policy.count
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{name} takes a whole number of 1 or more, not {count!r}")


def _check_positive(name: str, amount: float) -> None:
    if not 0 < amount < math.inf:
        raise ValueError(f"{name} takes a time longer than 0, not {amount!r}")


# Combinations


class _Combination(SavePolicy, KeepPolicy):
    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    @property
    def metrics(self) -> Collection[str]:  # type: ignore[override]
        return {name for part in self.parts for name in getattr(part, "metrics", ())}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.parts == self.parts

    def __hash__(self) -> int:
        return hash((type(self), tuple(self.parts)))


class _AnyOf(_Combination):
    def __repr__(self) -> str:
        return f"({' | '.join(map(repr, self.parts))})"

    def due(self, moment: Moment) -> bool | None:
        answers = [part.due(moment) for part in self.parts]
        return True if True in answers else None if None in answers else False

    def kept(self, saved: Sequence[Saved], now: float) -> Collection[int]:
        return set[int]().union(*(part.kept(saved, now) for part in self.parts))


class _AllOf(_Combination):
    def __repr__(self) -> str:
        return f"({' & '.join(map(repr, self.parts))})"

    def due(self, moment: Moment) -> bool | None:
        answers = [part.due(moment) for part in self.parts]
        return False if False in answers else None if None in answers else True

    def kept(self, saved: Sequence[Saved], now: float) -> Collection[int]:
        first, *rest = (set(part.kept(saved, now)) for part in self.parts)
        return first.intersection(*rest)


def _combined(
    first: Any,
    second: Any,
    kind: Callable[[Sequence[Any]], _Combination],
) -> _Combination:
    """Both in one. They must be for the same decision."""
    if not (_is_for("due", first) and _is_for("due", second)) and not (
        _is_for("kept", first) and _is_for("kept", second)
    ):
        raise TypeError(
            f"{first!r} and {second!r} cannot be combined: one says when to save, the other what "
            "to keep"
        )
    return kind([first, second])


_CONTRACTS = {"due": SavePolicy.due, "kept": KeepPolicy.kept}


def _is_for(decision: str, policy: object) -> bool:
    if isinstance(policy, _Combination):
        return all(_is_for(decision, part) for part in policy.parts)
    own = getattr(type(policy), decision, None)
    return own is not None and own is not _CONTRACTS[decision]


# For the manager


def check_save_policy(policy: Any) -> None:
    """Refuse what cannot say when to save."""
    if not _is_for("due", policy):
        raise TypeError(
            f"every={policy!r} does not say when to save: pass a policy such as EverySteps(500), "
            "or an object that has due(moment)"
        )


def check_keep_policy(policy: Any) -> None:
    """Refuse what cannot say what to keep."""
    if not _is_for("kept", policy):
        raise TypeError(
            f"keep={policy!r} does not say what to keep: pass a policy such as Latest(3), an "
            "object that has kept(saved, now), or None to keep everything"
        )


def parts_of(policy: Any) -> Iterator[Any]:
    """The policies that one is made of."""
    if isinstance(policy, _Combination):
        for part in policy.parts:
            yield from parts_of(part)
    else:
        yield policy


def metrics_of(policy: Any) -> set[str]:
    """The metrics that a policy decides by."""
    return {name for part in parts_of(policy) for name in getattr(part, "metrics", ())}

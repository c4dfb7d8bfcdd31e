"""Policies, alone and combined, decide as a plain model says."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reshard.policies import (
    AtSteps,
    Best,
    EveryMinutes,
    EverySteps,
    Latest,
    LatestFor,
    Moment,
    Newer,
    Saved,
)

NOW = 10_000.0
COUNTS = st.integers(1, 6)
STEPS = st.integers(0, 30)
VALUES = st.sampled_from([0.0, 1.0, 2.0, float("nan")])

Model = Any
"""For a policy that keeps: whether it keeps one of all. For one that saves: whether at a moment."""


def ranks_before(one: Saved, other: Saved, sign: int) -> bool:
    a, b = sign * one.metrics["loss"], sign * other.metrics["loss"]
    return a < b or (a == b and one.step > other.step)


KEEPING: st.SearchStrategy[tuple[Any, Model]] = st.one_of(
    COUNTS.map(lambda n: (Latest(n), lambda x, all: sum(y.step > x.step for y in all) < n)),
    COUNTS.map(lambda n: (EverySteps(n), lambda x, all: x.step % n == 0)),
    STEPS.map(lambda n: (Newer(n), lambda x, all: x.step > n)),
    STEPS.map(lambda n: (AtSteps(n), lambda x, all: x.step == n)),
    COUNTS.map(lambda n: (LatestFor(minutes=n), lambda x, all: NOW - x.time <= 60 * n)),
    st.tuples(COUNTS, st.sampled_from([1, -1])).map(
        lambda how: (
            Best("loss", how[0], largest=how[1] < 0),
            lambda x, all: (
                x.metrics["loss"] == x.metrics["loss"]
                and sum(ranks_before(y, x, how[1]) for y in all) < how[0]
            ),
        )
    ),
)
SAVING: st.SearchStrategy[tuple[Any, Model]] = st.one_of(
    COUNTS.map(
        lambda n: (
            EverySteps(n),
            lambda m: any(s % n == 0 for s in range((m.last_step or 0) + 1, m.step + 1)),
        )
    ),
    STEPS.map(
        lambda n: (
            AtSteps(n),
            lambda m: n <= m.step and (m.last_step is None or n > m.last_step),
        )
    ),
    COUNTS.map(lambda n: (EveryMinutes(n), lambda m: m.seconds >= 60 * n)),
)


def combined(parts: st.SearchStrategy[tuple[Any, Model]]) -> st.SearchStrategy[tuple[Any, Model]]:
    def either(pair: Any) -> tuple[Any, Model]:
        (a, in_a), (b, in_b) = pair
        return a | b, lambda *args: in_a(*args) or in_b(*args)

    def both(pair: Any) -> tuple[Any, Model]:
        (a, in_a), (b, in_b) = pair
        return a & b, lambda *args: in_a(*args) and in_b(*args)

    pairs = st.tuples(parts, parts)
    return st.one_of(pairs.map(either), pairs.map(both))


@st.composite
def runs(draw: st.DrawFn) -> list[Saved]:
    steps = sorted(draw(st.sets(STEPS, max_size=8)))
    return [Saved(step, NOW - draw(st.integers(0, 400)), {"loss": draw(VALUES)}) for step in steps]


@given(st.recursive(KEEPING, combined, max_leaves=4), runs())
def test_what_is_kept_is_what_the_model_keeps(policy: tuple[Any, Model], run: list[Saved]) -> None:
    real, model = policy
    assert set(real.kept(run, NOW)) == {each.step for each in run if model(each, run)}


@given(
    st.recursive(SAVING, combined, max_leaves=4),
    STEPS,
    st.none() | st.integers(0, 30),
    st.integers(0, 400),
)
def test_a_save_is_due_when_the_model_says_so_and_never_otherwise_without_a_clock(
    policy: tuple[Any, Model], step: int, last: int | None, seconds: int
) -> None:
    real, model = policy
    expected = model(Moment(step, last, seconds))
    assert real.due(Moment(step, last, seconds)) is expected
    assert real.due(Moment(step, last, None)) in (expected, None)

"""When to save and what to keep: each policy on its own, combined, and refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import pytest

from reshard.policies import (
    AtSteps,
    Best,
    EveryMinutes,
    EverySteps,
    KeepPolicy,
    Latest,
    LatestFor,
    Moment,
    Newer,
    Saved,
    SavePolicy,
    check_keep_policy,
    check_save_policy,
    metrics_of,
)

NOW = 1_000_000.0


def saved(*steps: int, **metrics: Sequence[float]) -> list[Saved]:
    """Checkpoints of these steps, committed a minute after each other, the last one now."""
    times = [NOW - 60 * (len(steps) - 1 - n) for n in range(len(steps))]
    return [
        Saved(step, times[n], {name: values[n] for name, values in metrics.items()})
        for n, step in enumerate(steps)
    ]


def test_a_multiple_that_was_reached_since_the_last_save_is_due() -> None:
    policy = EverySteps(10)

    assert not policy.due(Moment(0, None, None))
    assert not policy.due(Moment(9, None, None))
    assert policy.due(Moment(10, None, None))
    assert policy.due(Moment(12, 9, None))
    assert not policy.due(Moment(19, 10, None))
    assert policy.due(Moment(20, 11, None))


def test_a_time_is_unknown_without_a_clock() -> None:
    policy = EveryMinutes(2)

    assert policy.due(Moment(1, None, None)) is None
    assert policy.due(Moment(1, None, 120.0)) is True
    assert policy.due(Moment(1, None, 119.0)) is False


def test_named_steps_are_due_once_and_again_if_they_failed() -> None:
    policy = AtSteps(0, 7)

    assert policy.due(Moment(0, None, None))
    assert not policy.due(Moment(1, 0, None))
    assert policy.due(Moment(7, 0, None))
    assert policy.due(Moment(8, 0, None))
    assert not policy.due(Moment(9, 8, None))


def test_what_cannot_be_told_is_unknown_only_if_it_matters() -> None:
    steps, minutes = EverySteps(10), EveryMinutes(1)

    assert (steps | minutes).due(Moment(10, 0, None)) is True
    assert (steps | minutes).due(Moment(11, 10, None)) is None
    assert (steps & minutes).due(Moment(10, 0, None)) is None
    assert (steps & minutes).due(Moment(11, 10, None)) is False


def test_policies_that_keep_combine() -> None:
    found = saved(10, 20, 30, 40, 50, loss=[1.0, 5.0, 4.0, 3.0, 2.0])

    assert Latest(2).kept(found, NOW) == {40, 50}
    assert LatestFor(minutes=1).kept(found, NOW) == {40, 50}
    assert Newer(20).kept(found, NOW) == {30, 40, 50}
    assert EverySteps(20).kept(found, NOW) == {20, 40}
    assert AtSteps(30, 35).kept(found, NOW) == {30}
    assert (Latest(1) | EverySteps(20) | Best("loss")).kept(found, NOW) == {10, 20, 40, 50}
    assert (EverySteps(20) & Newer(30)).kept(found, NOW) == {40}


def test_the_best_are_the_smallest_or_the_largest_and_the_newer_of_equals() -> None:
    found = saved(1, 2, 3, 4, loss=[2.0, math.nan, 1.0, 1.0])

    assert Best("loss").kept(found, NOW) == {4}
    assert Best("loss", 2).kept(found, NOW) == {3, 4}
    assert Best("loss", 9).kept(found, NOW) == {1, 3, 4}
    assert Best("loss", largest=True).kept(found, NOW) == {1}
    assert Best("accuracy").kept(found, NOW) == set()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Latest(0),
        lambda: Latest(-1),
        lambda: Latest(2.5),  # type: ignore[arg-type]
        lambda: EverySteps(0),
        lambda: EveryMinutes(0),
        lambda: EveryMinutes(math.nan),
        lambda: AtSteps(),
        lambda: AtSteps(-1),
        lambda: LatestFor(),
        lambda: Best("loss", 0),
    ],
)
def test_a_policy_that_would_save_or_keep_nothing_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"takes|names no steps"):
        make()


def test_policies_for_different_decisions_do_not_combine() -> None:
    with pytest.raises(TypeError, match="when to save, the other what to keep"):
        EveryMinutes(1) | Latest(1)


def test_a_policy_for_the_other_decision_is_refused() -> None:
    check_save_policy(EverySteps(1) | EveryMinutes(1))
    check_keep_policy(EverySteps(1) & Latest(1))
    with pytest.raises(TypeError, match="does not say when to save"):
        check_save_policy(Latest(1))
    with pytest.raises(TypeError, match="does not say what to keep"):
        check_keep_policy(EverySteps(1) | EveryMinutes(1))


def test_policies_of_users_combine_with_ours_and_need_no_base_class() -> None:
    class EvenSteps(KeepPolicy):
        metrics = ("accuracy",)

        def kept(self, saved: Sequence[Saved], now: float) -> Collection[int]:
            return [each.step for each in saved if each.step % 2 == 0]

    class WhenAsked(SavePolicy):
        def due(self, moment: Moment) -> bool:
            return moment.step == 5

    class Plain:
        def due(self, moment: Moment) -> bool:
            return True

    found = saved(1, 2, 3, accuracy=[1.0, 2.0, 3.0])
    assert (EvenSteps() | Latest(1)).kept(found, NOW) == {2, 3}
    assert metrics_of(Best("loss") | EvenSteps()) == {"loss", "accuracy"}
    assert (WhenAsked() | EverySteps(10)).due(Moment(5, 0, None))
    check_save_policy(Plain())

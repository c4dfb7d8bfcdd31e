"""reshard.coordination.pairing: which operation fails when ranks are at different ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from reshard.coordination.pairing import LOAD, PATIENCE, Arrival, judge, moved, patience_after


def arrivals(*keys: str) -> dict[int, Arrival]:
    return {rank: Arrival(key, key, rank, 0) for rank, key in enumerate(keys)}


def test_ranks_at_the_same_operation_go_on() -> None:
    assert judge(arrivals("a", "a", "a")) is None


def test_a_rank_that_failed_before_it_knew_its_place_fits_any() -> None:
    assert judge(arrivals("a", "", "a")) is None


def test_the_operation_of_the_most_ranks_fails_since_few_skip() -> None:
    assert judge(arrivals("b", "a", "a")) == ("a", 0)


def test_of_two_halves_the_one_that_came_first_fails() -> None:
    assert judge(arrivals("a", "b")) == ("a", 0)


def test_without_a_majority_among_three_everybody_fails() -> None:
    assert judge(arrivals("a", "b", "c")) == ("", 0)


def play(scripts: Sequence[Sequence[str]]) -> list[list[str]]:
    """What each rank's operations come to, if ranks call them whatever becomes of them."""
    waiting, passed = [0] * len(scripts), [0] * len(scripts)
    patience = [PATIENCE] * len(scripts)
    done: list[list[str]] = [[] for _ in scripts]
    ticket = 0
    while all(position < len(script) for position, script in zip(waiting, scripts, strict=True)):
        there = {}
        # Whoever was moved on is there first.
        for rank in sorted(range(len(scripts)), key=lambda r: passed[r] == 0):
            key = scripts[rank][waiting[rank]]
            there[rank] = Arrival(key, key, ticket := ticket + 1, passed[rank], patience[rank])
        ruling = judge(there)
        for rank, arrival in there.items():
            if ruling is not None and ruling.loses and arrival.key != ruling.loses:
                passed[rank] = moved(passed[rank], ruling.seen)
                patience[rank] = patience_after(
                    patience[rank], passed[rank], arrival.key, ruling.loses
                )
                continue
            done[rank].append(arrival.key if ruling is None else f"-{arrival.key}")
            waiting[rank] += 1
            passed[rank], patience[rank] = 0, PATIENCE
    return done


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("skipped", ["a", "ab", "abc", "bcd"])
def test_a_rank_that_skips_some_is_in_step_again_afterwards(ranks: int, skipped: str) -> None:
    whole = "abcdefghij"
    short = "".join(key for key in whole if key not in skipped)

    for done in play([whole] * (ranks - 1) + [short]):
        assert done[-(len(whole) - 4) :] == list("efghij")
        assert [key for key in done if key[0] == "-"] in ([f"-{key}" for key in skipped], [])


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_with_an_operation_of_its_own_is_in_step_again_afterwards(ranks: int) -> None:
    whole = "abcdefghijklmnop"

    for done in play([whole] * (ranks - 1) + ["x" + whole]):
        assert done[-8:] == list(whole[-8:])
        assert sum(key[0] == "-" for key in done) <= 2 * PATIENCE + 1


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("one", "others"), [(LOAD, "a"), ("a", LOAD)])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_load_in_place_of_a_save_costs_both_and_no_more(
    ranks: int, one: str, others: str, is_first: bool
) -> None:
    scripts = [[others, *"bcdefg"]] * (ranks - 1)
    scripts.insert(0 if is_first else ranks - 1, [one, *"bcdefg"])

    for script, done in zip(scripts, play(scripts), strict=True):
        assert done == [f"-{script[0]}", *"bcdefg"]


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize(("skipped", "following"), [("a", LOAD), (LOAD, "a")])
def test_a_rank_that_skips_a_save_before_a_load_or_the_reverse_is_in_step_again(
    ranks: int, skipped: str, following: str
) -> None:
    rest = [following, *"bcd"]

    *whole, short = play([[skipped, *rest]] * (ranks - 1) + [rest])

    assert short == rest
    assert whole == [[f"-{skipped}", *rest]] * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_load_that_one_rank_alone_calls_is_soon_forgotten(ranks: int) -> None:
    for done in play([list("abcdef")] * (ranks - 1) + [[LOAD, *"abcdef"]]):
        assert done[-4:] == list("cdef")

"""reshard.coordination.pairing: which operation fails when ranks are at different ones."""

from __future__ import annotations

import pytest

from reshard.coordination.pairing import PATIENCE, Arrival, judge, moved


def arrivals(*keys: str) -> dict[int, Arrival]:
    return {rank: Arrival(key, key, rank, 0) for rank, key in enumerate(keys)}


def test_ranks_at_the_same_operation_go_on() -> None:
    assert judge(arrivals("a", "a", "a")) is None


def test_a_rank_that_failed_before_it_knew_its_place_fits_any() -> None:
    assert judge(arrivals("a", "", "a")) is None


def test_the_operation_of_the_most_ranks_fails_since_few_skip() -> None:
    assert judge(arrivals("b", "a", "a")) == ("a", False)


def test_of_two_halves_the_one_that_came_first_fails() -> None:
    assert judge(arrivals("a", "b")) == ("a", False)


def test_without_a_majority_among_three_everybody_fails() -> None:
    assert judge(arrivals("a", "b", "c")) == ("", False)


def play(scripts: list[str]) -> list[list[str]]:
    """What each rank's operations come to, if ranks call them whatever becomes of them."""
    waiting, passed = [0] * len(scripts), [0] * len(scripts)
    done: list[list[str]] = [[] for _ in scripts]
    ticket = 0
    while all(position < len(script) for position, script in zip(waiting, scripts, strict=True)):
        there = {}
        # Whoever was moved on is there first.
        for rank in sorted(range(len(scripts)), key=lambda r: passed[r] == 0):
            key = scripts[rank][waiting[rank]]
            there[rank] = Arrival(key, key, ticket := ticket + 1, passed[rank])
        ruling = judge(there)
        for rank, arrival in there.items():
            if ruling is not None and ruling.loses and arrival.key != ruling.loses:
                passed[rank] = moved(passed[rank], ruling.is_odd)
                continue
            done[rank].append(arrival.key if ruling is None else f"-{arrival.key}")
            waiting[rank] += 1
            passed[rank] = 0
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

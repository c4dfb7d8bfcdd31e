"""Whether ranks that meet are about to do the same thing, and what becomes of those that are not.

Pure: decides by what ranks say of themselves. A rank that skipped an operation is at a
later one than the others, so two operations meet that do not belong together. One of them
must fail, and the other is moved on to the next meeting, where its ranks wait for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LOAD = "load"
"""The key of every load. All other keys are of saves."""
PATIENCE = 4
"""How many operations of others one may see fail before it is taken for the odd one itself."""
PATIENCE_WITH_ANOTHER_KIND = 1
"""The same, once a save has met a load: more likely a rank called one in place of the other."""


@dataclass(frozen=True)
class Intent:
    """What a rank is about to do: `key` is compared, `text` is for people.

    An empty key fits every other: that of a rank that failed before it knew. `settings` are those
    that all ranks must agree on, by name: the operation is the same, but cannot be done together.
    """

    key: str = ""
    text: str = ""
    settings: Sequence[tuple[str, str]] = ()

    def fits(self, other: str) -> bool:
        return not self.key or not other or self.key == other


UNKNOWN = Intent()


class Arrival(NamedTuple):
    """What a rank says when it comes to a meeting."""

    key: str
    text: str
    ticket: int
    """Who came first: tickets are drawn in order."""
    passed: int
    """How often it was moved on; see `moved`."""
    patience: int = PATIENCE
    """How often it may be; see `patience_after`."""
    settings: Sequence[tuple[str, str]] = ()


class Ruling(NamedTuple):
    """The operation that fails, by its key; empty if all do. The others are moved on."""

    loses: str
    seen: int
    """How often it was moved on if that was too often: the others do not come to it. Else 0."""


def judge(arrivals: Mapping[int, Arrival]) -> Ruling | None:
    """Which operation fails; None if all ranks are at the same one.

    Ranks that skipped an operation are few and come late, so that of the most ranks fails,
    and of two with as many the one that was there first. An operation that was moved on is
    waiting for the others to come along, and is spared until its patience is over.
    """
    sides: dict[str, list[Arrival]] = {}
    for arrival in arrivals.values():
        if arrival.key:
            sides.setdefault(arrival.key, []).append(arrival)
    if len(sides) < 2:
        return None
    most = max(map(len, sides.values()))
    if len(sides) > 2 and 2 * most <= len(arrivals):
        # Such as names with a clock in them. Nobody can say who skipped what.
        return Ruling("", 0)
    by_size = sorted(
        sides, key=lambda key: (-len(sides[key]), min(each.ticket for each in sides[key]))
    )
    passed = {key: max((each.passed for each in sides[key]), key=abs) for key in sides}
    for key in reversed(by_size):
        if passed[key] >= min(each.patience for each in sides[key]):
            return Ruling(key, passed[key])
    for key in by_size:
        if passed[key] == 0:
            return Ruling(key, 0)
    return Ruling(by_size[0], 0)


def disagreement(arrivals: Mapping[int, Arrival]) -> str:
    """On what setting ranks that are at the same operation disagree; empty if on none."""
    settings = {rank: dict(each.settings) for rank, each in arrivals.items() if each.key}
    for name in sorted({name for of_rank in settings.values() for name in of_rank}):
        ranks: dict[str, int] = {}
        for rank in sorted(settings):
            ranks.setdefault(settings[rank].get(name, "not given"), rank)
        if len(ranks) > 1:
            shown = ", ".join(f"{value} on rank {rank}" for value, rank in ranks.items())
            return f"ranks do not agree on {name}: {shown}. Pass the same on all ranks"
    return ""


def moved(passed: int, seen: int) -> int:
    """What `passed` becomes for an operation that is moved on.

    After an odd one, the rank that it belonged to has as many operations to catch up with
    as it has `seen` fail; they are waited for.
    """
    return -seen - 1 if seen else passed + 1


def patience_after(patience: int, passed: int, key: str, loser: str) -> int:
    """What the patience of `key`, moved on `passed` times, becomes once `loser` failed for it.

    Ranks that catch up, so that `passed` is negative, come to operations of any kind.
    """
    if passed > 0 and (key == LOAD) != (loser == LOAD):
        return min(patience, PATIENCE_WITH_ANOTHER_KIND)
    return patience

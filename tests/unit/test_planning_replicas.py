"""Which regions several ranks hold, and where they differ."""

from __future__ import annotations

import numpy as np
import torch

from reshard.planning.columns import SHARD, WriteColumns
from reshard.planning.global_plan import PlanTable, stack
from reshard.planning.replicas import describe_conflicts, find_replicated
from reshard.plans.write_items import RowBuilder

Region = tuple[str, tuple[int, ...], tuple[int, ...]]


def plan(*regions: Region) -> WriteColumns:
    builder = RowBuilder()
    for name, offsets, sizes in regions:
        builder.add_region(name, SHARD, torch.float32, 0, (8, 4)[: len(sizes)], offsets, sizes)
    builder.add_value("step")
    return builder.build()


def table() -> PlanTable:
    return stack(
        [
            plan(("w", (0, 0), (4, 4)), ("b", (0,), (8,)), ("s", (), ())),
            plan(("w", (4, 0), (4, 4)), ("b", (0,), (8,)), ("s", (), ())),
            plan(("w", (0, 0), (4, 4)), ("b", (0,), (8,)), ("e", (0, 0), (0, 4))),
            plan(("e", (0, 0), (0, 4))),
        ]
    )


def test_only_regions_with_elements_that_several_ranks_hold_are_compared() -> None:
    found = np.split(find_replicated(table()), table().plan_starts[1:-1])
    assert [each.tolist() for each in found] == [
        [True, True, True, False],
        [False, True, True, False],
        [True, True, False, False],
        [False, False],
    ]


def conflicts(prints: list[int]) -> list[str]:
    """The fingerprints are those of w, b, s on rank 0, b, s on rank 1, w, b on rank 2."""
    rows = np.flatnonzero(find_replicated(table()))
    columns = np.array([[value, 0] for value in prints], dtype=np.int64)
    return describe_conflicts(table(), rows, columns)


def test_equal_replicas_are_no_conflict() -> None:
    assert conflicts([1, 2, 3, 2, 3, 1, 2]) == []


def test_the_minority_is_named_and_of_as_many_the_higher_rank() -> None:
    assert conflicts([1, 7, 3, 2, 3, 1, 2]) == [
        "'b' at [0] of sizes [8]: rank 0 differs from ranks 1, 2"
    ]
    assert conflicts([1, 2, 3, 2, 4, 9, 2]) == [
        "'w' at [0, 0] of sizes [4, 4]: rank 2 differs from rank 0",
        "'s': rank 1 differs from rank 0",
    ]


def test_no_rank_holds_anything() -> None:
    nothing = stack([plan(), plan()])
    assert not find_replicated(nothing).any()
    assert describe_conflicts(nothing, np.zeros(0, np.int64), np.zeros((0, 2), np.int64)) == []

"""Overlaps of many groups of boxes at once are those of each group by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.planning import intersection
from reshard.planning.columns import Ints
from reshard.planning.intersection import intersect, intersect_groups

Boxes = list[tuple[tuple[int, int], tuple[int, int]]]
point = st.tuples(st.integers(0, 6), st.integers(0, 6))
boxes = st.lists(st.tuples(point, point), max_size=6)


def columns(groups: list[Boxes]) -> tuple[Ints, tuple[Ints, Ints]]:
    starts = np.cumsum([0, *(len(group) for group in groups)])
    flat = [box for group in groups for box in group]
    offsets = np.array([offset for offset, _ in flat], dtype=np.int64).reshape(len(flat), 2)
    sizes = np.array([size for _, size in flat], dtype=np.int64).reshape(len(flat), 2)
    return starts, (offsets, sizes)


@pytest.mark.parametrize("limits", [(1 << 21, 1 << 12), (8, 4)], ids=["ample", "tight"])
@given(groups=st.lists(st.tuples(boxes, boxes), max_size=5))
def test_groups_at_once_overlap_as_each_does_alone(
    limits: tuple[int, int], groups: list[tuple[Boxes, Boxes]]
) -> None:
    left_starts, left = columns([a for a, _ in groups])
    right_starts, right = columns([b for _, b in groups])
    expected = []
    for number, (a, b) in enumerate(groups):
        _, (left_offsets, left_sizes) = columns([a])
        _, (right_offsets, right_sizes) = columns([b])
        if not len(a) or not len(b):
            continue
        alone = intersect(left_offsets, left_sizes, right_offsets, right_sizes)
        expected += zip(
            (alone.left + left_starts[number]).tolist(),
            (alone.right + right_starts[number]).tolist(),
            alone.starts.tolist(),
            alone.sizes.tolist(),
            strict=True,
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intersection, "_PAIRS_AT_A_TIME", limits[0])
        patch.setattr(intersection, "_FEW_PAIRS", limits[1])
        found = intersect_groups(left_starts, left, right_starts, right)
    rows = zip(*(column.tolist() for column in found), strict=True)
    assert [*rows] == expected

"""Validation accepts exact covers and nothing else; counting elements is the judge."""

from __future__ import annotations

import itertools
import re
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from reshard.api import CoverageError
from reshard.planner import SavePlan
from reshard.planning import intersection, keys
from reshard.planning.columns import SHARD, ChunkTable
from reshard.planning.coverage import (
    describe_problem,
    find_overlapped,
    find_overlapping,
    find_untiled,
    out_of_bounds,
)
from reshard.planning.global_plan import check_coverage
from reshard.planning.intersection import intersect
from reshard.planning.keys import rank_points
from reshard.plans.global_plan import make_global_plan
from reshard.plans.write_items import RowBuilder, WriteItems
from support.boxes import (
    Box,
    Tiled,
    boxes_within,
    chunks_of,
    columns_of,
    count_cover,
    damaged,
    is_tiled,
    small_shapes,
    tilings,
)

PINWHEEL = Tiled(
    (3, 3),
    [
        Box((0, 0), (2, 1)),
        Box((2, 0), (3, 2)),
        Box((1, 2), (3, 3)),
        Box((0, 1), (1, 3)),
        Box((1, 1), (2, 2)),
    ],
)
# Every element of the middle row is missing and every one of the first is there twice.
SAME_VOLUME = Tiled((3, 2), [Box((0, 0), (1, 2)), Box((0, 0), (1, 2)), Box((2, 0), (3, 2))])
# Four boxes that count right in volume and along every dimension, but not everywhere.
SAME_MARGINS = Tiled(
    (2, 2),
    [Box((0, 0), (1, 1)), Box((0, 0), (1, 1)), Box((1, 1), (2, 2)), Box((1, 1), (2, 2))],
)

many_tilings = st.lists(tilings(), min_size=1, max_size=5)


@st.composite
def tensors_in_any_state(draw: st.DrawFn) -> Tiled:
    """A tiling, a tiling with damage, or boxes thrown at random."""
    kind = draw(st.sampled_from(["whole", "damaged", "damaged", "random"]))
    if kind == "random":
        shape = draw(small_shapes(min_dims=0))
        return Tiled(shape, draw(st.lists(boxes_within(shape), max_size=6)))
    tensor = draw(tilings())
    return tensor if kind == "whole" else draw(damaged(tensor))


def check(tensors: list[Tiled], whole: bool = True) -> list[str]:
    return check_coverage(chunks_of(tensors), whole)


# The verdict


@settings(deadline=None, max_examples=300)
@given(tensors=many_tilings)
@example(tensors=[PINWHEEL])
def test_every_exact_cover_is_accepted(tensors: list[Tiled]) -> None:
    assert all(map(is_tiled, tensors)), "the tilings of this test are at fault"
    assert find_untiled(chunks_of(tensors)).tolist() == []
    assert check(tensors) == []


@settings(deadline=None, max_examples=500)
@given(tensors=st.lists(tensors_in_any_state(), min_size=1, max_size=5))
@example(tensors=[SAME_VOLUME, PINWHEEL, SAME_MARGINS])
@example(tensors=[Tiled((), []), Tiled((), [Box((), ())]), Tiled((), [Box((), ())] * 2)])
@example(tensors=[Tiled((0, 3), []), Tiled((0, 3), [Box((0, 0), (0, 3))])])
def test_exactly_the_tensors_with_a_gap_or_an_overlap_are_found(tensors: list[Tiled]) -> None:
    expected = [number for number, tensor in enumerate(tensors) if not is_tiled(tensor)]
    assert find_untiled(chunks_of(tensors)).tolist() == expected


@settings(deadline=None, max_examples=200)
@given(tensor=tilings(), data=st.data())
def test_a_tiling_without_one_of_its_chunks_is_rejected(tensor: Tiled, data: st.DataObject) -> None:
    boxes = list(tensor.boxes)
    lost = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    assume(lost.volume)
    assert find_untiled(chunks_of([Tiled(tensor.shape, boxes)])).tolist() == [0]


@settings(deadline=None, max_examples=200)
@given(tensor=tilings(), data=st.data())
def test_a_tiling_with_one_more_chunk_is_rejected(tensor: Tiled, data: st.DataObject) -> None:
    extra = data.draw(boxes_within(tensor.shape))
    assume(extra.volume)
    boxes = [*tensor.boxes, extra]
    assert find_untiled(chunks_of([Tiled(tensor.shape, boxes)])).tolist() == [0]


@settings(deadline=None, max_examples=200)
@given(tensor=tilings(), data=st.data())
def test_a_tiling_with_a_chunk_that_grew_or_moved_is_rejected(
    tensor: Tiled, data: st.DataObject
) -> None:
    boxes = list(tensor.boxes)
    old = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    new = data.draw(boxes_within(tensor.shape))
    assume(new != old and (new.volume or old.volume))
    assert find_untiled(chunks_of([Tiled(tensor.shape, [*boxes, new])])).tolist() == [0]


@settings(deadline=None, max_examples=200)
@given(data=st.data(), rows=st.integers(2, 9), columns=st.integers(2, 9))
def test_volume_that_adds_up_does_not_hide_an_overlap(
    data: st.DataObject, rows: int, columns: int
) -> None:
    # A grid of equal chunks, of which some are replaced by copies of others.
    grid = [Box((r, c), (r + 1, c + 1)) for r in range(rows) for c in range(columns)]
    sources = data.draw(st.lists(st.sampled_from(grid), min_size=len(grid), max_size=len(grid)))
    tensor = Tiled((rows, columns), sources)
    assert sum(box.volume for box in sources) == rows * columns
    assert len(find_untiled(chunks_of([tensor]))) == (len({*sources}) < len(grid))


@pytest.mark.parametrize("moved", [0, 1, -1])
def test_shapes_too_large_to_number_their_elements_are_judged_as_exactly(moved: int) -> None:
    big = 1 << 40
    half = big // 2
    shape = (big, big, big)
    boxes = [
        Box((0, 0, 0), (half, big, big)),
        Box((half, 0, 0), (big, half, big)),
        Box((half, half + moved, 0), (big, big, big)),
    ]
    assert bool(len(find_untiled(chunks_of([Tiled(shape, boxes)])))) == bool(moved)


@settings(deadline=None, max_examples=200)
@given(tensor=tensors_in_any_state())
def test_a_tensor_that_is_there_in_part_is_judged_by_its_overlaps_alone(tensor: Tiled) -> None:
    assert bool(check([tensor], whole=False)) == bool((count_cover(tensor) > 1).any())


@settings(deadline=None, max_examples=200)
@given(data=st.data(), shape=small_shapes())
def test_rows_out_of_bounds_are_found_whatever_their_numbers(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    numbers = st.one_of(st.integers(-2, 14), st.sampled_from([-(1 << 62), (1 << 63) - 1]))
    rows = st.lists(numbers, min_size=len(shape), max_size=len(shape))
    offsets, sizes = data.draw(rows), data.draw(rows)
    inside = all(
        min(offset, size) >= 0 and offset + size <= extent
        for offset, size, extent in zip(offsets, sizes, shape, strict=True)
    )
    found = out_of_bounds(np.array([shape]), np.array([offsets]), np.array([sizes]), np.array([0]))
    assert found.tolist() == [not inside]


# The words


def parse_boxes(text: str) -> list[Box]:
    boxes = []
    for inside in re.findall(r"\[([\d:, ]*)\]", text):
        ranges = [part.split(":") for part in inside.split(", ") if part]
        boxes.append(Box(tuple(int(a) for a, _ in ranges), tuple(int(b) for _, b in ranges)))
    return boxes


@settings(deadline=None, max_examples=300)
@given(tensor=tensors_in_any_state())
@example(tensor=SAME_VOLUME)
@example(tensor=Tiled((), []))
@example(tensor=Tiled((2, 2), [Box((1, 0), (1, 1)), Box((0, 0), (1, 2)), Box((0, 0), (2, 1))]))
def test_a_message_names_ranges_that_do_overlap_and_a_range_that_nobody_holds(
    tensor: Tiled,
) -> None:
    counts = count_cover(tensor)
    assume((counts != 1).any())
    offsets, sizes = columns_of(tensor.boxes, len(tensor.shape))
    clauses = describe_problem(tensor.shape, offsets, sizes).split("; ")
    overlaps = [clause for clause in clauses if clause.endswith("overlap")]
    gaps = [clause for clause in clauses if clause.startswith("nobody holds")]
    assert len(overlaps) + len(gaps) == len(clauses)
    assert bool(overlaps) == bool((counts > 1).any())
    assert len(gaps) == bool((counts == 0).any())
    for clause in overlaps:
        left, right = parse_boxes(clause)
        assert left in tensor.boxes
        assert right in tensor.boxes
        both = count_cover(Tiled(tensor.shape, [left, right]))
        assert (both == 2).any()
    for clause in gaps:
        (gap,) = parse_boxes(clause)
        assert gap.volume
        assert (counts[gap.slices] == 0).all()


@settings(deadline=None, max_examples=200)
@given(tensors=st.lists(tensors_in_any_state(), min_size=1, max_size=5))
def test_there_is_one_message_for_each_bad_tensor_and_it_names_it(tensors: list[Tiled]) -> None:
    messages = check(tensors)
    bad = [number for number, tensor in enumerate(tensors) if not is_tiled(tensor)]
    assert len(messages) == len(bad)
    for number, message in zip(bad, messages, strict=True):
        assert message.startswith(f"'layer.{number}.w' of shape {list(tensors[number].shape)}: ")


def test_a_message_reads_as_one_would_slice_the_tensor() -> None:
    boxes = [Box((0, 0), (4, 8)), Box((3, 0), (6, 8))]
    assert check([Tiled((8, 8), boxes)]) == [
        "'layer.0.w' of shape [8, 8]: chunks [0:4, 0:8] and [3:6, 0:8] overlap; "
        "nobody holds [6:8, 0:8]"
    ]


def test_a_chunk_that_reaches_outside_is_reported_once_and_others_still_judged() -> None:
    outside = Tiled((4,), [Box((0,), (3,)), Box((3,), (6,))])
    gap = Tiled((4,), [Box((0,), (3,))])
    first, second = check([outside, PINWHEEL, gap])
    assert first.startswith("'layer.0.w'")
    assert "outside of its shape [4]" in first
    assert second == "'layer.2.w' of shape [4]: nobody holds [3:4]"


@settings(deadline=None, max_examples=200)
@given(
    tensors=st.lists(tensors_in_any_state(), min_size=1, max_size=4),
    outside=tilings(min_dims=2),
    at=st.integers(0, 4),
    by=st.integers(1, 20),
)
def test_a_chunk_that_reaches_outside_does_not_change_the_verdict_on_other_tensors(
    tensors: list[Tiled], outside: Tiled, at: int, by: int
) -> None:
    box = Box((0,) * len(outside.shape), tuple(n + by for n in outside.shape))
    tensors.insert(at, Tiled(outside.shape, [*outside.boxes, box]))
    at = min(at, len(tensors) - 1)
    bad = [
        f"'layer.{number}.w'"
        for number, tensor in enumerate(tensors)
        if number != at and not is_tiled(tensor)
    ]
    assert [message.split(" ")[0] for message in check(tensors)] == [f"'layer.{at}.w'", *bad]


def test_a_long_list_of_bad_tensors_is_cut_short_with_their_number() -> None:
    messages = check([Tiled((4,), [])] * 9)
    assert len(messages) == 6
    assert messages[-1] == "and 4 more tensors like these"


@settings(deadline=None, max_examples=100)
@given(tensor=tensors_in_any_state(), data=st.data())
def test_a_global_plan_is_refused_unless_its_chunks_tile_the_tensor(
    tensor: Tiled, data: st.DataObject
) -> None:
    # Equal chunks are replicas, not an overlap; a chunk of another size at the same place
    # is a conflict that is found before coverage is.
    boxes = list({box.low: box for box in tensor.boxes}.values())
    assume(boxes)
    tensor = Tiled(tensor.shape, boxes)
    builders = [RowBuilder(), RowBuilder()]
    for box in boxes:
        builder = builders[data.draw(st.integers(0, 1))]
        builder.add_region("net.w", SHARD, torch.int8, 0, tensor.shape, box.low, box.sizes)
    plans = [SavePlan(WriteItems(builder.build())) for builder in builders]
    if is_tiled(tensor):
        make_global_plan(plans)
        return
    with pytest.raises(CoverageError, match=r"'net\.w'.*(overlap|nobody holds)"):
        make_global_plan(plans)


# Intersection


@st.composite
def two_sets_of_boxes(draw: st.DrawFn) -> tuple[int, list[Box], list[Box]]:
    shape = draw(small_shapes(min_dims=0))
    boxes = st.lists(boxes_within(shape), max_size=14)
    return len(shape), draw(boxes), draw(boxes)


@settings(deadline=None, max_examples=300)
@given(sets=two_sets_of_boxes(), pairs_at_a_time=st.sampled_from([1, 2, 7, 1 << 21]))
def test_intersection_finds_the_pairs_that_comparing_all_pairs_finds(
    sets: tuple[int, list[Box], list[Box]], pairs_at_a_time: int
) -> None:
    dims, lefts, rights = sets
    with patch.object(intersection, "_PAIRS_AT_A_TIME", pairs_at_a_time):
        found = intersect(*columns_of(lefts, dims), *columns_of(rights, dims))
    expected = []
    for (j, right), (i, left) in itertools.product(enumerate(rights), enumerate(lefts)):
        low = tuple(map(max, left.low, right.low))
        high = tuple(map(min, left.high, right.high))
        if all(a < b for a, b in zip(low, high, strict=True)):
            expected.append((i, j, list(low), [b - a for a, b in zip(low, high, strict=True)]))
    rows = zip(*(column.tolist() for column in found), strict=True)
    assert list(rows) == expected


def test_blocks_of_pairs_keep_to_the_budget() -> None:
    offsets, sizes = np.arange(20)[:, None], np.full((20, 1), 3)
    with patch.object(intersection, "_PAIRS_AT_A_TIME", 12):
        blocks = list(intersection._candidates(offsets, offsets + sizes, offsets, offsets + sizes))
    assert len(blocks) > 5
    assert max(len(left) for left, _ in blocks) <= 12


@pytest.mark.parametrize("dim", [0, 1])
def test_a_thousand_chunks_against_a_thousand_others_are_not_all_compared(dim: int) -> None:
    offsets = np.zeros((1000, 2), dtype=np.int64)
    offsets[:, dim] = np.arange(1000) * 12
    ends = offsets + 12
    others, other_ends = offsets.copy(), offsets + 12
    others[:, dim] += 5
    other_ends[:, dim] += 5
    blocks = intersection._candidates(offsets, ends, others, other_ends)
    assert sum(len(left) for left, _ in blocks) == 1999


@settings(deadline=None, max_examples=200)
@given(tensor=tensors_in_any_state())
def test_overlapping_pairs_are_named_in_order_and_no_more_than_asked_for(tensor: Tiled) -> None:
    boxes = tensor.boxes
    every = [
        (a, b)
        for b in range(len(boxes))
        for a in range(b)
        if (count_cover(Tiled(tensor.shape, [boxes[a], boxes[b]])) == 2).any()
    ]
    columns = columns_of(boxes, len(tensor.shape))
    assert find_overlapping(*columns) == every[:3]
    assert find_overlapping(*columns, most=1) == every[:1]


@settings(deadline=None, max_examples=200)
@given(tensors=st.lists(tensors_in_any_state(), min_size=1, max_size=6))
def test_tensors_with_overlaps_are_found_all_at_once(tensors: list[Tiled]) -> None:
    chunks = chunks_of(tensors)
    expected = [n for n, tensor in enumerate(tensors) if (count_cover(tensor) > 1).any()]
    found, undecided = find_overlapped(chunks, np.arange(len(tensors)))
    assert found.tolist() == expected
    assert undecided.tolist() == []


# Keys


@st.composite
def points_of_tensors(
    draw: st.DrawFn, extents: st.SearchStrategy[int]
) -> tuple[list[int], list[list[int]], list[list[int]]]:
    dims, n_tensors = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    shapes = [[draw(extents) for _ in range(dims)] for _ in range(n_tensors)]
    tensors = draw(st.lists(st.integers(0, n_tensors - 1), min_size=1, max_size=20))
    points = [
        [draw(st.one_of(st.integers(0, n), st.sampled_from([0, n]))) for n in shapes[tensor]]
        for tensor in tensors
    ]
    return tensors, points, shapes


def places(keys_of_points: np.ndarray) -> list[int]:
    """Each key by its place among the distinct ones."""
    return np.unique(keys_of_points, return_inverse=True)[1].tolist()


EXTENTS = st.one_of(st.integers(0, 5), st.integers(0, 1 << 15), st.integers(1 << 18, 1 << 40))


@settings(deadline=None, max_examples=300)
@given(case=points_of_tensors(EXTENTS), sort=st.booleans())
@example(case=([0, 0, 1], [[0], [1 << 61], [0]], [[1 << 61], [3]]), sort=False)
def test_keys_order_points_as_their_coordinates_do_whatever_the_shapes(
    case: tuple[list[int], list[list[int]], list[list[int]]], sort: bool
) -> None:
    tensors, points, shapes = case
    tuples = [(tensor, *point) for tensor, point in zip(tensors, points, strict=True)]
    expected = [sorted({*tuples}).index(place) for place in tuples]
    limit = 0.0 if sort else keys._LARGEST
    with patch.object(keys, "_LARGEST", limit):
        found = rank_points(np.array(tensors), np.array(points), np.array(shapes))
    assert places(found) == expected


def test_keys_of_ordinary_shapes_are_positions_and_those_of_huge_ones_are_ranks() -> None:
    tensors, points = np.array([1, 0, 1]), np.array([[2, 3], [0, 1], [2, 3]])
    ordinary = rank_points(tensors, points, np.array([[4, 4], [4, 4]]))
    huge = rank_points(tensors, points, np.array([[1 << 40, 1 << 40], [4, 4]]))
    assert ordinary.tolist() == [25 + 2 * 5 + 3, 1, 25 + 2 * 5 + 3]
    assert huge.tolist() == [1, 0, 1]


def test_chunks_know_their_tensors() -> None:
    chunks = chunks_of([PINWHEEL, Tiled((4,), []), Tiled((4,), [Box((0,), (4,))])])
    assert isinstance(chunks, ChunkTable)
    assert chunks.owners.tolist() == [0, 0, 0, 0, 0, 2]
    offsets, sizes = chunks.of(2)
    assert offsets.tolist() == [[0, 0]]
    assert sizes.tolist() == [[4, 1]]

"""reshard.tensors.regions: which part of a tensor a rank holds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from reshard.tensors.regions import Cut, Region, local_regions


def held(shape: tuple[int, ...], cuts: tuple[Cut, ...], right_to_left: bool = False) -> np.ndarray:
    """How often each element is in the regions of these cuts."""
    count = np.zeros(shape, dtype=int)
    for region in local_regions(shape, cuts, right_to_left):
        box = tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))
        count[box] += 1
    return count


def test_without_cuts_there_is_the_whole_tensor() -> None:
    assert local_regions((4, 3), ()) == (Region((0, 0), (4, 3), (0, 0)),)


def test_a_scalar_is_one_region_without_dimensions() -> None:
    assert local_regions((), ()) == (Region((), (), ()),)


@pytest.mark.parametrize("size", [0, 1, 2, 5, 7, 8, 9])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_a_cut_is_sized_as_torch_chunk_sizes_it(size: int, parts: int) -> None:
    expected = [len(piece) for piece in torch.arange(size).chunk(parts)] if size else []
    expected += [0] * (parts - len(expected))
    regions = [local_regions((size,), (Cut(0, parts, index),)) for index in range(parts)]
    assert [len(found) for found in regions] == [1] * parts
    assert [found[0].sizes[0] for found in regions] == expected


def test_a_rank_that_gets_nothing_holds_an_empty_region_at_the_end() -> None:
    assert local_regions((3, 5), (Cut(0, 4, 3),)) == (Region((3, 0), (0, 5), (0, 0)),)


def test_cuts_of_one_dimension_are_made_left_to_right() -> None:
    sizes = [
        local_regions((7,), (Cut(0, 2, a), Cut(0, 2, b)))[0]
        for a, b in itertools.product(range(2), repeat=2)
    ]
    assert [(region.offsets[0], region.sizes[0]) for region in sizes] == [
        (0, 2),
        (2, 2),
        (4, 2),
        (6, 1),
    ]


def test_cuts_of_two_dimensions_give_a_box() -> None:
    (region,) = local_regions((4, 6), (Cut(0, 2, 1), Cut(1, 3, 2)))
    assert region == Region((2, 4), (2, 2), (0, 0))


def test_a_strided_cut_takes_a_part_of_each_piece() -> None:
    regions = local_regions((8,), (Cut(0, 2, 1, split_factor=2),))
    assert regions == (Region((2,), (2,), (0,)), Region((6,), (2,), (2,)))


def test_neighbouring_runs_of_a_strided_cut_are_joined() -> None:
    assert local_regions((8,), (Cut(0, 1, 0, split_factor=4),)) == (Region((0,), (8,), (0,)),)


def test_strided_runs_in_two_dimensions_are_all_combinations() -> None:
    cuts = (Cut(0, 2, 0, split_factor=2), Cut(1, 2, 1, split_factor=2))
    regions = local_regions((4, 4), cuts)
    assert [region.offsets for region in regions] == [(0, 1), (0, 3), (2, 1), (2, 3)]
    assert [region.local_offsets for region in regions] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("shape", [(7,), (8, 3), (5, 6), (1, 9), (0, 4)])
@pytest.mark.parametrize("factors", [(1, 1), (2, 1), (3, 1)])
@pytest.mark.parametrize("right_to_left", [False, True])
def test_the_ranks_of_a_mesh_hold_every_element_exactly_once(
    shape: tuple[int, ...], factors: tuple[int, int], right_to_left: bool
) -> None:
    total = sum(
        held(
            shape,
            (Cut(0, 3, a, factors[0]), Cut(len(shape) - 1, 2, b, factors[1])),
            right_to_left,
        )
        for a, b in itertools.product(range(3), range(2))
    )
    assert (total == 1).all()


def test_local_offsets_pack_the_regions_without_gaps() -> None:
    regions = local_regions((11,), (Cut(0, 2, 0, split_factor=3),))
    assert len(regions) > 1
    ends = [region.local_offsets[0] + region.sizes[0] for region in regions]
    assert [region.local_offsets[0] for region in regions] == [0, *ends[:-1]]


def test_from_right_to_left_the_last_mesh_dimension_cuts_first() -> None:
    cuts = (Cut(0, 2, 1, split_factor=2), Cut(0, 2, 1))
    assert local_regions((10,), cuts, right_to_left=True) == (Region((8,), (2,), (0,)),)


def test_regions_of_a_large_mesh_are_found_by_arithmetic_not_by_listing() -> None:
    (region,) = local_regions((1 << 40, 1 << 20), (Cut(0, 1 << 10, 5),))
    assert region == Region((5 << 30, 0), (1 << 30, 1 << 20), (0, 0))
    assert math.prod(region.sizes) == 1 << 50


def test_a_strided_cut_that_is_made_at_once_deals_the_pieces_out_in_turn() -> None:
    # Pieces of two rows, of which there are four; the last two of the six are empty.
    regions = [local_regions((8,), (Cut(0, 3, index, 2, at_once=True),)) for index in range(3)]
    assert [[(r.offsets[0], r.sizes[0]) for r in found] for found in regions] == [
        [(0, 2), (6, 2)],
        [(2, 2)],
        [(4, 2)],
    ]


@pytest.mark.parametrize(("rows", "parts", "factor"), [(8, 2, 2), (12, 3, 2), (12, 2, 3)])
def test_where_sizes_are_even_a_strided_cut_is_the_same_at_once_and_in_two_steps(
    rows: int, parts: int, factor: int
) -> None:
    for index in range(parts):
        at_once, in_steps = (
            local_regions((rows,), (Cut(0, parts, index, factor, way),)) for way in (True, False)
        )
        assert at_once == in_steps

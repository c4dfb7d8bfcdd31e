"""Columns as bytes: what goes in comes out, and no wider than it must be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.planning.columns import SHARD, TENSOR, WriteColumns
from reshard.planning.packing import (
    pack_array,
    pack_compressed,
    pack_regions,
    pack_schema,
    unpack_array,
    unpack_compressed,
    unpack_regions,
    unpack_schema,
)
from reshard.plans.write_items import RowBuilder

LIMITS = [
    (0, 255, 1),
    (-128, 127, 1),
    (-1, 128, 2),
    (0, 256, 2),
    (0, 65535, 2),
    (-32768, 32767, 2),
    (-1, 32768, 4),
    (0, 65536, 4),
    (0, (1 << 32) - 1, 4),
    (-(1 << 31), (1 << 31) - 1, 4),
    (-1, 1 << 31, 8),
    (0, 1 << 32, 8),
    (-(1 << 63), (1 << 63) - 1, 8),
]


@pytest.mark.parametrize(("low", "high", "width"), LIMITS)
def test_numbers_at_the_limits_of_a_width_survive_in_that_width(
    low: int, high: int, width: int
) -> None:
    column = np.array([low, high, low], dtype=np.int64)
    packed = pack_array(column)
    assert len(packed[0][1]) == 3 * width
    assert unpack_array(packed, 3, one_dimensional=True).tolist() == [low, high, low]


@pytest.mark.parametrize("value", [0, -1, 255, -(1 << 63), (1 << 63) - 1])
def test_a_column_of_equal_numbers_takes_the_space_of_one(value: int) -> None:
    short, long = (pack_array(np.full(rows, value, dtype=np.int64)) for rows in (1, 1000))
    assert short == long
    unpacked = unpack_array(long, 1000, one_dimensional=True)
    assert unpacked.tolist() == [value] * 1000


@settings(deadline=None, max_examples=200)
@given(data=st.data(), rows=st.integers(0, 6), width=st.integers(0, 5), bits=st.integers(0, 63))
def test_any_array_survives(data: st.DataObject, rows: int, width: int, bits: int) -> None:
    numbers = st.integers(-(1 << bits), (1 << bits) - 1)
    array = np.array(
        [[data.draw(numbers) for _ in range(width)] for _ in range(rows)], dtype=np.int64
    ).reshape(rows, width)
    unpacked = unpack_array(pack_array(array), rows)
    assert unpacked.dtype == np.int64
    np.testing.assert_array_equal(unpacked, array)


def test_each_column_of_an_array_is_as_narrow_as_it_can_be_by_itself() -> None:
    packed = pack_array(np.array([[1, 1 << 40, 7], [2, 3, 7]]))
    assert [len(data) if isinstance(data, bytes) else data for _, data in packed] == [2, 16, 7]


def test_unpacked_columns_can_be_written_to() -> None:
    array = unpack_array(pack_array(np.array([1, 2, 3])), 3, one_dimensional=True)
    array[0] = 1 << 40
    assert array.tolist() == [1 << 40, 2, 3]


def test_compressed_values_survive_and_are_smaller() -> None:
    value = ["model.layers.weight"] * 500 + [[1, -2, {"a": None}]]
    packed = pack_compressed(value)
    assert unpack_compressed(packed) == value
    assert len(packed) < 500


def plan() -> WriteColumns:
    builder = RowBuilder()
    builder.add_region("a.ü", SHARD, torch.bfloat16, 3, (4, 70_000), (2, 0), (2, 70_000), hint=5)
    builder.add_value("b", nbytes=1 << 35)
    builder.add_region("c", TENSOR, torch.complex64, 0, (), (), (), alias=0)
    builder.add_region("d", SHARD, torch.uint8, 255, (0,), (0,), (0,))
    return builder.build()


def nothing() -> WriteColumns:
    return RowBuilder().build()


@pytest.mark.parametrize("make", [plan, nothing])
def test_a_plan_survives_as_schema_and_placement(make) -> None:
    columns = make()
    schema = unpack_schema(pack_schema(columns.schema))
    assert schema.names == columns.schema.names
    for field in ("kinds", "dtypes", "flags", "ndims", "shapes"):
        found, expected = getattr(schema, field), getattr(columns.schema, field)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    placed = unpack_regions(pack_regions(columns), schema)
    assert placed.schema is schema
    for field in ("offsets", "sizes", "hints", "nbytes", "aliases"):
        np.testing.assert_array_equal(getattr(placed, field), getattr(columns, field))


def test_equal_columns_give_equal_bytes_and_different_ones_do_not() -> None:
    assert pack_schema(plan().schema) == pack_schema(plan().schema)
    assert pack_regions(plan()) == pack_regions(plan())
    other = plan().select(np.array([0, 1, 3, 2]))
    assert pack_schema(other.schema) != pack_schema(plan().schema)
    assert pack_regions(other) != pack_regions(plan())

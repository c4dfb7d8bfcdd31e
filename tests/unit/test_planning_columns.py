"""The columns that plans are made of: padding, selecting, dtype codes."""

from __future__ import annotations

import numpy as np
import torch

from reshard.planning.columns import (
    DTYPE_CODES,
    DTYPE_ITEMSIZES,
    DTYPES,
    SHARD,
    TENSOR,
    WriteColumns,
    pad_rows,
    widen,
)
from reshard.plans.write_items import RowBuilder


def three_rows() -> WriteColumns:
    """A matrix, a value, and a vector that shares the memory of the matrix."""
    builder = RowBuilder()
    builder.add_region("a", SHARD, torch.float32, 0, (4, 6), (2, 0), (2, 6), hint=5)
    builder.add_value("b", nbytes=17)
    builder.add_region("c", TENSOR, torch.int8, 1, (9,), (0,), (9,), alias=0)
    return builder.build()


def test_rows_of_different_lengths_are_padded_to_one_width() -> None:
    assert pad_rows([(1, 2), (), (3,)], 3, 7).tolist() == [[1, 2, 7], [7, 7, 7], [3, 7, 7]]


def test_rows_of_equal_lengths_are_padded_too() -> None:
    assert pad_rows([(1, 2), (3, 4)], 3, 0).tolist() == [[1, 2, 0], [3, 4, 0]]


def test_no_rows_give_an_array_of_the_right_width() -> None:
    assert pad_rows([], 4, 1).shape == (0, 4)


def test_widening_adds_columns_of_the_fill_and_leaves_wide_arrays_alone() -> None:
    array = np.array([[1, 2], [3, 4]])
    assert widen(array, 4, 9).tolist() == [[1, 2, 9, 9], [3, 4, 9, 9]]
    assert widen(array, 2, 9) is array
    assert widen(array, 1, 9) is array


def test_padding_of_built_rows_never_matters() -> None:
    columns = three_rows()
    assert columns.offsets.tolist() == [[2, 0], [0, 0], [0, 0]]
    assert columns.sizes.tolist() == [[2, 6], [1, 1], [9, 1]]
    assert columns.schema.shapes.tolist() == [[4, 6], [1, 1], [9, 1]]
    assert columns.schema.ndims.tolist() == [2, 0, 1]


def test_a_plan_of_scalars_alone_still_has_a_column() -> None:
    builder = RowBuilder()
    builder.add_region("step", TENSOR, torch.int64, 0, (), (), ())
    columns = builder.build()
    assert columns.sizes.tolist() == [[1]]
    assert columns.schema.ndims.tolist() == [0]


def test_selecting_rows_keeps_every_column_in_the_given_order() -> None:
    chosen = three_rows().select(np.array([2, 0]))
    assert len(chosen) == 2
    assert chosen.schema.names == ("c", "a")
    assert chosen.schema.kinds.tolist() == [TENSOR, SHARD]
    assert [DTYPES[code] for code in chosen.schema.dtypes] == [torch.int8, torch.float32]
    assert chosen.schema.flags.tolist() == [1, 0]
    assert chosen.schema.ndims.tolist() == [1, 2]
    assert chosen.schema.shapes.tolist() == [[9, 1], [4, 6]]
    assert chosen.offsets.tolist() == [[0, 0], [2, 0]]
    assert chosen.sizes.tolist() == [[9, 1], [2, 6]]
    assert chosen.hints.tolist() == [-1, 5]
    assert three_rows().select(np.array([1])).nbytes.tolist() == [17]


def test_an_alias_follows_its_target_to_its_new_row() -> None:
    assert three_rows().select(np.array([2, 1, 0])).aliases.tolist() == [2, -1, -1]


def test_an_alias_ends_when_its_target_is_left_out() -> None:
    assert three_rows().select(np.array([1, 2])).aliases.tolist() == [-1, -1]


def test_every_dtype_of_torch_has_a_code_and_its_size() -> None:
    named = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {*DTYPES} == named
    assert torch.float8_e4m3fn in named
    for dtype in named:
        assert DTYPES[DTYPE_CODES[dtype]] is dtype
        assert DTYPE_ITEMSIZES[DTYPE_CODES[dtype]] == dtype.itemsize

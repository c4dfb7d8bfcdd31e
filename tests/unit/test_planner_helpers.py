"""Items and plans one at a time, as torch's own helpers make and compare them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import planner_helpers as theirs
from torch.distributed.checkpoint.metadata import TensorProperties

from reshard import planner_helpers as ours
from reshard._dedup_tensors import dedup_tensors
from reshard.metadata import MetadataIndex
from reshard.planner import SavePlan

HAS_STRIDES = hasattr(TensorProperties(), "strides")


def told(item: Any) -> Any:
    """An item of either library as plain numbers and names."""
    if dataclasses.is_dataclass(item):
        names = [field.name for field in dataclasses.fields(item)]
        # New in torch 2.15.
        fields = [name for name in names if name != "strides" or HAS_STRIDES]
        return {name: told(getattr(item, name)) for name in fields}
    if isinstance(item, torch.Size | tuple | list):
        return [told(each) for each in item]
    return str(item)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_items_and_chunks_of_a_tensor_are_those_that_torch_makes(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    for name in ("_create_write_item_for_tensor", "_create_write_item_for_bytesio"):
        made = getattr(ours, name)("w", tensor)
        assert told(made) == told(getattr(theirs, name)("w", tensor))
    chunk = ours._create_chunk_from_tensor(tensor)
    assert told(chunk) == told(theirs._create_chunk_from_tensor(tensor))
    assert ours._create_chunk_list(tensor) == [chunk]


def test_items_to_read_are_those_that_torch_makes() -> None:
    index, other = MetadataIndex("w", [1, 2]), MetadataIndex("v", [0, 0], 3)
    for name, places in (
        ("_create_read_item_for_tensor", ((0, 1), (2, 3), (4, 5))),
        ("_create_read_item_for_byteio", (0, 1, 2)),
    ):
        args = index, places[0], other, places[1], places[2]
        assert told(getattr(ours, name)(*args)) == told(getattr(theirs, name)(*args))


def plan(*shapes: tuple[int, ...], usable: bool = True) -> SavePlan:
    items = [
        ours._create_write_item_for_tensor(f"w{i}", torch.zeros(shape))
        for i, shape in enumerate(shapes)
    ]
    return SavePlan(items, usable=usable)


def test_plans_are_the_same_if_they_write_the_same() -> None:
    assert ours._compare_save_plans(plan((2,), (3,)), plan((2,), (3,)))
    assert not ours._compare_save_plans(plan((2,), (3,)), plan((2,)))
    assert not ours._compare_save_plans(plan((2,), (3,)), plan((3,), (2,)))
    assert not ours._compare_save_plans(plan((2,)), plan((2,), usable=False))


def test_a_plan_that_says_nothing_new_stands_for_the_cached_one() -> None:
    cached, news = [plan((1,)), plan((2,))], [plan(usable=False), plan((3,))]
    assert ours._merge_delta_local_plans(cached, news) == [cached[0], news[1]]
    assert ours._contains_usable_plan(news)
    assert not ours._contains_usable_plan(news[:1])


def test_of_equal_tensors_the_first_plan_keeps_its_own() -> None:
    plans = dedup_tensors([plan((2,), (3,)), plan((2,)), plan((2,), (3,), (4,))])
    assert [[item.index.fqn for item in found.items] for found in plans] == [
        ["w0", "w1"],
        [],
        ["w2"],
    ]

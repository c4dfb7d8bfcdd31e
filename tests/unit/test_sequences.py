"""A lazy list is a list to whoever uses it, and costs nothing until somebody does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reshard.metadata import ChunkStorageMetadata, MetadataIndex
from reshard.planner import LoadItemType, ReadItem, WriteItem, WriteItemType
from reshard.planning.columns import DTYPES, SHARD
from reshard.plans.entries import ChunkList, chunk_columns
from reshard.plans.lazy_list import LazyList
from reshard.plans.read_items import ReadItems, read_columns
from reshard.plans.write_items import RowBuilder, WriteItems, write_columns
from support.boxes import Box, Tiled, chunks_of


class Words(LazyList[str]):
    """Made from letters; remembers which elements it had to make."""

    def __init__(self, letters: str) -> None:
        super().__init__()
        self.letters = letters
        self.made: list[int] = []

    def _column_length(self) -> int:
        return len(self.letters)

    def _make_one(self, position: int) -> str:
        self.made.append(position)
        return self.letters[position] * 2

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.copy(),)


@pytest.fixture
def words() -> Words:
    return Words("dacb")


PLAIN = ["dd", "aa", "cc", "bb"]


def test_asking_for_the_length_makes_no_element(words: Words) -> None:
    assert len(words) == 4
    assert words
    assert not Words("")
    assert words.made == []
    assert words.untouched


def test_an_element_is_made_when_it_is_looked_at_and_only_once(words: Words) -> None:
    assert words[2] is words[2]
    assert words[-2] is words[2]
    assert words.made == [2]
    assert not words.untouched


@pytest.mark.parametrize("index", [*range(-4, 4), np.int64(1), True])
def test_an_index_means_what_it_means_to_a_list(words: Words, index: Any) -> None:
    assert words[index] == PLAIN[index]


@pytest.mark.parametrize("index", [4, -5, 100])
@pytest.mark.parametrize("made", [False, True])
def test_an_index_out_of_range_is_an_error(words: Words, index: int, made: bool) -> None:
    if made:
        list(words)
    with pytest.raises(IndexError):
        words[index]


@pytest.mark.parametrize(
    "cut",
    [slice(None), slice(1, 3), slice(-2, None), slice(None, None, -1), slice(3, 1), slice(0, 9, 2)],
    ids=str,
)
def test_a_slice_is_a_list_of_the_same_elements(words: Words, cut: slice) -> None:
    assert type(words[cut]) is list
    assert words[cut] == PLAIN[cut]


@pytest.mark.parametrize("other", [[], ["x"], Words("xy")], ids=["empty", "list", "lazy"])
def test_it_adds_to_lists_from_both_sides(words: Words, other: Any) -> None:
    after, before = words + other, other + words
    assert type(after) is list
    assert type(before) is list
    assert after == PLAIN + list(other)
    assert before == list(other) + PLAIN
    assert words == PLAIN


def test_a_list_can_be_extended_by_it(words: Words) -> None:
    longer = ["x"]
    longer += words
    assert longer == ["x", *PLAIN]


def test_it_equals_lists_and_lazy_lists_with_equal_elements(words: Words) -> None:
    assert words == PLAIN
    plain = list(PLAIN)
    assert plain == words
    assert words == Words("dacb")
    assert words != PLAIN[:-1]
    assert PLAIN[::-1] != words
    assert words != Words("dabc")
    assert words != tuple(PLAIN)
    assert words != "ddaaccbb"


def test_it_cannot_be_hashed_as_no_list_can(words: Words) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(words)


def test_it_reads_like_a_list(words: Words) -> None:
    assert list(words) == PLAIN
    assert list(reversed(words)) == PLAIN[::-1]
    assert "cc" in words
    assert "c" not in words
    assert words.index("cc") == 2
    assert words.count("cc") == 1
    assert words.copy() == PLAIN


def test_the_repr_of_a_long_list_is_short_and_leaves_the_columns_in_charge() -> None:
    long = Words("x" * 100_000)
    assert repr(long) == repr(["xx"] * 10)[:-1] + ", ... and 99990 more]"
    assert long.made == [*range(10)]
    assert long.untouched


def test_a_copy_is_a_list_of_its_own(words: Words) -> None:
    words.copy().append("x")
    assert words == PLAIN


CHANGES: dict[str, Callable[[Any], Any]] = {
    "append": lambda some: some.append("x"),
    "extend": lambda some: some.extend(["x", "y"]),
    "extend by itself": lambda some: some.extend(some),
    "extend by a generator": lambda some: some.extend(c for c in "xy"),
    "insert": lambda some: some.insert(1, "x"),
    "insert at the front": lambda some: some.insert(-99, "x"),
    "set": lambda some: some.__setitem__(-1, "x"),
    "set a slice": lambda some: some.__setitem__(slice(1, 3), ["x"]),
    "delete": lambda some: some.__delitem__(1),
    "delete a slice": lambda some: some.__delitem__(slice(None, None, 2)),
    "pop": lambda some: some.pop(),
    "pop the first": lambda some: some.pop(0),
    "remove": lambda some: some.remove("cc"),
    "reverse": lambda some: some.reverse(),
    "sort": lambda some: some.sort(),
    "sort by a key": lambda some: some.sort(key=lambda word: -ord(word[0])),
    "sort backwards": lambda some: some.sort(reverse=True),
    "clear": lambda some: some.clear(),
    "add in place": lambda some: some.__iadd__(["x"]) and None,
}


@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_does_to_it_what_it_does_to_a_list(
    words: Words, change: Callable[[Any], Any], looked_at: bool
) -> None:
    if looked_at:
        assert words[1] == "aa"
    plain = list(PLAIN)
    assert change(words) == change(plain)
    assert list(words) == plain
    assert len(words) == len(plain)
    assert words[:] == plain
    assert not words.untouched


def test_elements_handed_out_are_the_ones_that_stay_in_the_list() -> None:
    class Boxes(LazyList[list[int]]):
        def _column_length(self) -> int:
            return 3

        def _make_one(self, position: int) -> list[int]:
            return [position]

    boxes = Boxes()
    boxes[1].append(99)
    assert boxes == [[0], [1, 99], [2]]
    boxes[-1].append(98)
    assert list(boxes)[2] == [2, 98]


# The lists of the package


def write_items() -> WriteItems:
    builder = RowBuilder()
    builder.add_region("a", SHARD, torch.float32, 0, (4, 6), (2, 0), (2, 6))
    builder.add_value("b", nbytes=17)
    builder.add_region("c", SHARD, torch.int8, 1, (9,), (0,), (9,), hint=3)
    return WriteItems(builder.build())


def chunk_list() -> ChunkList:
    return ChunkList(chunks_of([Tiled((4, 6), [Box((0, 0), (2, 6)), Box((2, 0), (4, 6))])]), 0)


def read_item(fqn: str, start: int) -> ReadItem:
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(fqn, (4,), 1),
        torch.Size((start,)),
        MetadataIndex(fqn + ".old", (0,)),
        torch.Size((start + 4,)),
        torch.Size((2,)),
    )


def read_items() -> ReadItems:
    return ReadItems(read_columns([read_item("a", 0), read_item("b", 2)]))


def shape_of(element: Any) -> Any:
    """An element with the hints of its indices, which do not take part in comparisons."""
    indices = [getattr(element, name, None) for name in ("index", "dest_index", "storage_index")]
    return element, [index.index for index in indices if index is not None]


@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("make", [write_items, chunk_list, read_items])
@pytest.mark.parametrize("through", [lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy])
def test_lists_survive_being_pickled_and_copied(through, make, looked_at: bool) -> None:
    items = make()
    if looked_at:
        assert items[0] == make()[0]
    again = through(items)
    assert type(again) is type(items)
    assert again is not items
    assert again.untouched
    assert [shape_of(item) for item in again] == [shape_of(item) for item in make()]


@pytest.mark.parametrize("make", [write_items, chunk_list, read_items])
def test_lists_that_were_changed_are_pickled_as_changed(make) -> None:
    items = make()
    expected = list(make())
    del items[0]
    items.append(expected[0])
    assert pickle.loads(pickle.dumps(items)) == [*expected[1:], expected[0]]


def test_a_change_in_place_of_a_handed_out_write_item_reaches_the_columns() -> None:
    items = write_items()
    items[0].tensor_data.properties.dtype = torch.float16
    columns = items.columns()
    assert [DTYPES[code] for code in columns.schema.dtypes[[0, 2]]] == [torch.float16, torch.int8]
    assert columns.offsets.tolist() == write_items().columns().offsets.tolist()
    assert columns.hints.tolist() == [-1, -1, 3]
    assert columns.nbytes.tolist() == [-1, 17, -1]
    assert pickle.loads(pickle.dumps(items))[0].tensor_data.properties.dtype is torch.float16


def test_a_change_of_every_write_item_in_a_loop_reaches_the_columns() -> None:
    items = write_items()
    for item in items:
        if item.type is not WriteItemType.BYTE_IO:
            item.tensor_data.properties.requires_grad = True
    assert [
        item.tensor_data.properties.requires_grad for item in WriteItems(items.columns())[::2]
    ] == [
        True,
        True,
    ]


def test_an_item_that_was_added_or_taken_away_reaches_the_columns() -> None:
    items = write_items()
    items.insert(1, WriteItem(MetadataIndex("extra"), WriteItemType.BYTE_IO))
    del items[0]
    assert items.columns().schema.names == ("extra", "b", "c")


def test_a_change_in_place_of_a_chunk_reaches_the_columns() -> None:
    chunks = chunk_list()
    chunks[1].offsets = torch.Size((3, 0))
    offsets, sizes = chunk_columns(chunks, 2)
    assert offsets.tolist() == [[0, 0], [3, 0]]
    assert sizes.tolist() == [[2, 6], [2, 6]]


def test_a_read_item_that_was_replaced_reaches_the_columns() -> None:
    items = read_items()
    items[1] = read_item("z", 7)
    columns = items.columns()
    assert columns.names == ("a", "a.old", "z", "z.old")
    assert columns.regions[1, :, 0].tolist() == [4, 7, 0, 11, 2]


def test_columns_of_an_untouched_list_are_the_ones_it_was_made_of() -> None:
    items = write_items()
    assert items.columns() is items.base
    assert write_columns(items) is items.base
    reads = read_items()
    assert reads.columns() is reads.base


def test_a_selection_of_rows_with_new_hints_makes_the_same_items_and_columns() -> None:
    chosen = WriteItems(write_items().base, np.array([2, 0]), np.array([7, 8]))
    assert len(chosen) == 2
    columns = chosen.columns()
    assert columns.schema.names == ("c", "a")
    assert columns.hints.tolist() == [7, 8]
    assert [(item.index.fqn, item.index.index) for item in chosen] == [("c", 7), ("a", 8)]
    assert [item.tensor_data.chunk for item in chosen] == [
        ChunkStorageMetadata(torch.Size((0,)), torch.Size((9,))),
        ChunkStorageMetadata(torch.Size((2, 0)), torch.Size((2, 6))),
    ]

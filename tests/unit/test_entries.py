"""reshard.plans.entries: metadata as views of a chunk table, and tables of any metadata."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from reshard.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from reshard.planning.columns import DTYPE_CODES, ChunkTable
from reshard.plans.entries import ChunkList, chunk_table, locate, make_entries, values_of
from reshard.plans.local_load_plan import build_read_items
from support.boxes import Box, Tiled, chunks_of

FLOAT = DTYPE_CODES[torch.float32]


def table(aliases: tuple[int, ...] = (-1, -1, 0)) -> ChunkTable:
    """`a` in two chunks, `b` in one, and `c`, which is another name of `a`."""
    halves = [Box((0,), (2,)), Box((2,), (4,))]
    made = chunks_of([Tiled((4,), halves), Tiled((), [Box((), ())]), Tiled((4,), [])])
    columns = {"dtypes": made.dtypes + FLOAT, "aliases": made.aliases * 0 + aliases}
    return dataclasses.replace(made, names=["a", "b", "c"], **columns)


def plain_entry(alias_of: str | None = None) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size([at]), torch.Size([2])) for at in (0, 2)]
    properties = TensorProperties(dtype=torch.float32)
    return TensorStorageMetadata(properties, torch.Size([4]), chunks, alias_of)


def entry_of(name: str) -> Any:
    return make_entries(table(), ["step"])[name]


def test_entries_say_what_the_table_says() -> None:
    entries: Any = make_entries(table(), ["step"])
    assert list(entries) == ["a", "b", "c", "step"]
    assert entries["step"] == BytesStorageMetadata()
    assert entries["a"] == plain_entry()
    assert entries["b"].size == torch.Size([])
    assert entries["c"] == plain_entry(alias_of="a")


def test_entries_come_in_the_order_that_is_asked_for_and_then_as_they_are() -> None:
    assert list(make_entries(table(), ["step"], ["step", "gone", "b"])) == ["step", "b", "a", "c"]


@pytest.mark.parametrize(
    "look",
    [
        lambda entry: entry.size,
        lambda entry: entry.alias_of,
        lambda entry: entry == entry,
        repr,
        pickle.dumps,
        copy.deepcopy,
        lambda entry: setattr(entry, "alias_of", "x"),
        lambda entry: dataclasses.replace(entry, alias_of="x"),
    ],
)
def test_an_entry_that_was_looked_at_is_a_plain_one(look: Any) -> None:
    entry = entry_of("a")
    assert type(entry) is not TensorStorageMetadata
    look(entry)
    assert type(entry) is TensorStorageMetadata
    assert set(vars(entry)) == {"properties", "size", "chunks", "alias_of"}


def test_an_entry_is_equal_to_a_plain_one_from_both_sides() -> None:
    assert entry_of("a") == plain_entry()
    assert plain_entry() == entry_of("a")
    assert entry_of("a") != entry_of("b")


def test_an_entry_that_travels_is_plain_and_equal() -> None:
    travelled = pickle.loads(pickle.dumps(entry_of("a")))
    assert type(travelled) is TensorStorageMetadata
    assert travelled == plain_entry()


def test_metadata_that_nobody_looked_at_gives_its_own_table_back() -> None:
    own = table()
    metadata = Metadata(make_entries(own, ["step"]))
    assert chunk_table(metadata) is own
    assert values_of(metadata) == ["step"]


def test_an_entry_that_was_changed_reaches_a_new_table() -> None:
    own = table()
    entries: Any = make_entries(own, [])
    entries["a"].properties.dtype = torch.float16
    found = chunk_table(Metadata(entries))
    assert found is not own
    assert [*found.names] == ["a", "b", "c"]
    assert found.dtypes.tolist() == [DTYPE_CODES[torch.float16], FLOAT, FLOAT]
    assert found.aliases.tolist() == [-1, -1, 0]
    assert found.starts.tolist() == [0, 2, 3, 3]


def test_entries_that_moved_or_are_missing_make_a_new_table() -> None:
    own = table()
    entries = make_entries(own, [])
    swapped = {"a": entries["b"], "b": entries["a"], "c": entries["c"]}
    assert [row.tolist() for row in chunk_table(Metadata(swapped)).of(1)] == [
        [[0], [2]],
        [[2], [2]],
    ]
    fewer = make_entries(own, [])
    del fewer["b"]
    assert chunk_table(Metadata(fewer)).names == ["a", "c"]


def test_wanted_entries_are_found_in_their_table_also_under_other_names() -> None:
    own = table()
    entries: Any = make_entries(own, ["step"])
    wanted = {
        "new.b": dataclasses.replace(entries["b"], alias_of="b"),
        "step": entries["step"],
        "c": entries["c"],
        "new.c": dataclasses.replace(make_entries(own, [])["c"]),
    }
    found = locate(wanted)
    assert found.table is own
    assert found.tensors.tolist() == [1, -1, 2, 0]
    assert found.storage_names == ["b", "step", "a", "a"]
    assert [*found.shapes()] == [(), None, (4,), (4,)]


@pytest.mark.parametrize("how", ["chunk looked at", "moved", "resized", "plain"])
def test_an_entry_that_is_not_certain_to_be_in_the_table_is_not_looked_up_there(how: str) -> None:
    own = table()
    entries: Any = make_entries(own, [])
    wanted = {"b": entries["b"], "a": entries["a"]}
    if how == "chunk looked at":
        _ = entries["a"].chunks[0]
    elif how == "moved":
        wanted = {"b": entries["b"], "x": entries["a"]}
    elif how == "resized":
        entries["a"].size = torch.Size([8])
    else:
        wanted["a"] = plain_entry()
    found = locate(wanted)
    assert found.table is not own
    assert found.tensors.tolist() == [0, 1]
    assert [row.tolist() for row in found.table.of(1)] == [[[0], [2]], [[2], [2]]]


def test_reads_of_untouched_metadata_know_the_rows_of_their_chunks() -> None:
    own = table()
    metadata = Metadata(make_entries(own, ["step"]))
    wanted = {"c": torch.zeros(4), "step": 0, "b": torch.zeros(())}
    columns = build_read_items(wanted, metadata).columns()
    assert columns.table is own
    assert columns.rows_in(own).tolist() == [0, 1, -1, 2]
    assert type(metadata.state_dict_metadata["c"]) is not TensorStorageMetadata


def test_reads_that_travelled_find_their_rows_by_name_and_offsets() -> None:
    own = table()
    wanted = {"c": torch.zeros(4), "step": 0, "b": torch.zeros(())}
    items = build_read_items(wanted, Metadata(make_entries(own, ["step"])))
    travelled = pickle.loads(pickle.dumps(items)).columns()
    assert travelled.table is None
    assert travelled.rows_in(own).tolist() == [0, 1, -1, 2]
    wrong = dataclasses.replace(travelled, storage_hints=travelled.storage_hints + 1)
    assert wrong.rows_in(own).tolist() == [-1, -1, -1, -1]


def test_the_chunks_of_an_alias_are_those_of_the_tensor_that_it_names() -> None:
    chunks = entry_of("c").chunks
    assert isinstance(chunks, ChunkList)
    assert chunks == plain_entry().chunks

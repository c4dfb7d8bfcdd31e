"""Pickles that are written opcode by opcode are read by pickle itself."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest

from reshard.format.pickle_writer import PickleWriter


@pytest.mark.parametrize(
    "value", [0, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**62, -1, -(2**31), -(2**31) - 1]
)
def test_integers_of_every_size_are_what_they_were(value: int) -> None:
    writer = PickleWriter()
    writer.integer(value)

    assert pickle.loads(writer.finish()) == value


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 9])
def test_tuples_of_every_length_are_what_they_were(length: int) -> None:
    writer = PickleWriter()
    writer.integers(range(length))

    assert pickle.loads(writer.finish()) == tuple(range(length))


def test_texts_that_return_are_stored_once_however_many_there_are() -> None:
    texts = [f"name {number}" for number in range(400)] + ["", "é\udcff"]
    writer = PickleWriter()
    writer.begin_list()
    for text in [*texts, *texts]:
        writer.text(text)
    writer.end_list()
    encoded = writer.finish()

    assert pickle.loads(encoded) == [*texts, *texts]
    assert encoded.count(b"name 399") == 1


def test_an_object_that_only_pickle_can_make_is_recalled_where_it_belongs() -> None:
    kept = {"counts": Counter("abba"), "again": ["abba", "abba"]}
    writer = PickleWriter()
    writer.keep("key", kept)
    writer.begin_dict()
    writer.text("abba")
    writer.recall("key")
    writer.text("same")
    writer.text("abba")
    writer.end_dict()

    assert pickle.loads(writer.finish()) == {"abba": kept, "same": "abba"}


def test_an_object_cannot_be_kept_once_others_have_taken_its_place() -> None:
    writer = PickleWriter()
    writer.text("first")

    with pytest.raises(ValueError, match="in use"):
        writer.keep("key", object)

"""reshard.coordination.error_wire: errors between ranks, whatever their classes are."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from reshard.api import CheckpointException, RemoteError, _wrap_exception
from reshard.coordination.error_wire import decode_error, encode_error


@pytest.fixture
def only_here() -> type[Exception]:
    """An exception class of a module that the receiver does not have."""
    module = types.ModuleType("only_here")
    exec("class OnlyHere(Exception): pass", vars(module))
    sys.modules["only_here"] = module
    kind: type[Exception] = module.OnlyHere
    return kind


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001
        return caught


def received(error: Exception) -> BaseException:
    data = encode_error(raised(error))
    sys.modules.pop("only_here", None)
    decoded, stack = decode_error(data)
    assert [frame.name for frame in stack] == ["raised"]
    return decoded


def test_an_error_arrives_as_it_was() -> None:
    error = received(KeyError("w"))

    assert type(error) is KeyError
    assert error.args == ("w",)


def test_an_error_whose_class_is_not_there_arrives_as_text(only_here: type[Exception]) -> None:
    error = received(only_here("the disk is on fire"))

    assert type(error) is RemoteError
    assert str(error).startswith("OnlyHere: the disk is on fire\nTraceback")


class Mute(Exception):
    """Such as one that formats its text from what it was never given."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class MuteAndBound(Mute):
    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


def test_an_error_whose_text_cannot_be_formatted_arrives() -> None:
    error = received(Mute(1))

    assert type(error) is Mute
    assert "Mute" in str(CheckpointException("write", {1: _wrap_exception(error)}))


@pytest.mark.parametrize("kind", [MuteAndBound, "only here"])
def test_an_error_that_can_neither_be_sent_nor_told_arrives_by_its_class(
    kind: Any, only_here: type[Exception]
) -> None:
    if kind == "only here":
        kind = type("MuteAndAway", (only_here,), {"__str__": Mute.__str__})
        kind.__module__ = "only_here"
        sys.modules["only_here"].MuteAndAway = kind  # type: ignore[attr-defined]
    error = received(kind(1))

    assert type(error) is RemoteError
    assert str(error).startswith(
        f"{kind.__name__}: its text cannot be formatted: ValueError\nTraceback"
    )


def test_failures_of_other_ranks_stay_failures_of_other_ranks(only_here: type[Exception]) -> None:
    inner = decode_error(encode_error(raised(only_here("the disk is on fire"))))
    error = received(CheckpointException("write", {3: inner, 5: (KeyError("w"), inner[1])}))

    assert isinstance(error, CheckpointException)
    assert str(error).startswith(
        "write: OnlyHere: the disk is on fire\nOn rank 3.\n\nKeyError: 'w'\nOn rank 5."
    )
    assert isinstance(error.failures[3][0], RemoteError)
    assert "the disk is on fire" in str(error.failures[3][0])
    assert isinstance(error.failures[5][0], KeyError)

"""What a person reads of an error, in a form that can be sent from a rank to a test."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple


class Told(NamedTuple):
    kind: str
    text: str
    cause: str
    failures: dict[int, str]
    printed: str

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")


def handled_here() -> BaseException | None:
    """What any error that is raised now gets as its context."""
    try:
        raise LookupError
    except LookupError as error:
        return error.__context__


def told(attempt: Callable[[], Any]) -> Told:
    """What an attempt is refused with on this rank."""
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 - handed to the test
        failures = getattr(error, "failures", {})
        return Told(
            type(error).__name__,
            str(error),
            type(error.__cause__).__name__,
            {rank: type(reason).__name__ for rank, (reason, _) in failures.items()},
            "".join(traceback.format_exception(error)),
        )
    raise AssertionError("nothing was refused")

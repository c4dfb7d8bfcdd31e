"""What ranks say to each other in one phase of an operation, and how it travels.

Operations speak in typed messages. Between processes a message is bytes; within one process it
is handed over as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

M = TypeVar("M")
A = TypeVar("A")


class Exchange(Generic[M, A]):
    """One kind of exchange: each rank gives an `M`, the coordinator answers each with an `A`."""

    phase: str
    """What ranks are doing meanwhile, for people."""

    def encode(self, message: M) -> bytes:
        raise NotImplementedError

    def decode(self, messages: Sequence[bytes]) -> list[M]:
        """The messages of all ranks, on the coordinator."""
        raise NotImplementedError

    def encode_answers(self, answers: Sequence[A], messages: Sequence[M]) -> list[bytes]:
        """The answer to each of `messages`."""
        raise NotImplementedError

    def decode_answer(self, answer: bytes, sent: M) -> A:
        """The answer to a rank that had `sent` a message."""
        raise NotImplementedError


class TextExchange(Exchange[str, str]):
    """Short texts both ways."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def encode(self, message: str) -> bytes:
        return message.encode()

    def decode(self, messages: Sequence[bytes]) -> list[str]:
        return [message.decode() for message in messages]

    def encode_answers(self, answers: Sequence[str], messages: Sequence[str]) -> list[bytes]:
        return [answer.encode() for answer in answers]

    def decode_answer(self, answer: bytes, sent: str) -> str:
        return answer.decode()

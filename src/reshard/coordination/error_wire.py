"""Errors on the wire: the exception itself where it can be, its text in any case.

A class that the sender has may be one that the receiver cannot import.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from traceback import StackSummary

from reshard.api import (
    WRAPPED_EXCEPTION,
    CheckpointException,
    RemoteError,
    _portable_exception,
    _whole_text_of,
)

__all__ = ["decode_error", "decode_failures", "encode_error", "encode_failures"]


def encode_error(error: BaseException, stack: StackSummary | None = None) -> bytes:
    """An error ready to be sent to another rank or process.

    `stack` is where it was raised, unless it says so itself.
    """
    portable, own_stack = _portable_exception(error)
    failures = None
    if isinstance(error, CheckpointException) and error.failures:
        encoded = {rank: encode_error(*wrapped) for rank, wrapped in error.failures.items()}
        failures = error.args[0], encoded
    return pickle.dumps(
        (
            pickle.dumps(portable),
            stack if stack is not None else own_stack,
            _whole_text_of(error),
            failures,
        )
    )


def decode_error(data: bytes) -> WRAPPED_EXCEPTION:
    """What `encode_error` encoded, on another rank or in another process of this job."""
    error, stack, text, failures = pickle.loads(data)
    try:
        return pickle.loads(error), stack
    except Exception:  # noqa: BLE001 - whatever keeps it from being read, its text is there
        if failures is not None:
            message, encoded = failures
            told = {rank: decode_error(each) for rank, each in encoded.items()}
            return CheckpointException(message, told), stack
        return RemoteError(text), stack


def encode_failures(failures: Mapping[int, bytes]) -> bytes:
    """What failed on which rank, by `encode_error`."""
    return pickle.dumps(dict(failures))


def decode_failures(data: bytes) -> dict[int, WRAPPED_EXCEPTION]:
    return {rank: decode_error(error) for rank, error in pickle.loads(data).items()}

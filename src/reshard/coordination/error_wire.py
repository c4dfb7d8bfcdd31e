"""Errors on the wire: the exception itself where it can be, its text in any case.

A class that the sender has may be one that the receiver cannot import.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from traceback import StackSummary

from reshard import api
from reshard.api import (
    WRAPPED_EXCEPTION,
    CheckpointException,
    RemoteError,
    _portable_exception,
    _restore,
    _whole_text_of,
    _wrap_exception,
)


def encode_error(error: BaseException, stack: StackSummary | None = None) -> bytes:
    """An error ready to be sent to another rank or process.

    `stack` is where it was raised, unless it says so itself.
    """
    if isinstance(error, CheckpointException):
        return _encode_own(error, stack)
    portable, own_stack = _portable_exception(error)
    text = _whole_text_of(error)
    return pickle.dumps((pickle.dumps(portable), stack or own_stack, text, "", {}))


def _encode_own(error: CheckpointException, stack: StackSummary | None) -> bytes:
    """An error of ours, or derived from one of ours, that arrives as at least that."""
    known = next(kind for kind in type(error).__mro__ if kind.__module__ == api.__name__)
    state = {key: value for key, value in error.__dict__.items() if key != "_failures"}
    failures = {r: encode_error(*told) for r, told in error.__dict__.get("_failures", {}).items()}
    try:
        exact = pickle.dumps((type(error), error.args, state))
    except Exception:  # noqa: BLE001 - any code may run in a pickle; the text is kept
        exact = b""
    own_stack = _wrap_exception(error)[1]
    return pickle.dumps((exact, stack or own_stack, error._reason, known.__name__, failures))


def decode_error(data: bytes) -> WRAPPED_EXCEPTION:
    """What `encode_error` encoded, on another rank or in another process of this job."""
    exact, stack, text, known, failures = pickle.loads(data)
    if known:
        return _decode_own(exact, text, known, failures), stack
    try:
        return pickle.loads(exact), stack
    except Exception:  # noqa: BLE001 - whatever keeps it from being read, its text is there
        return RemoteError(text), stack


def _decode_own(
    exact: bytes, text: str, known: str, failures: Mapping[int, bytes]
) -> CheckpointException:
    try:
        kind, args, state = pickle.loads(exact)
        error = _restore(kind, args)
        error.__dict__.update(state)
    except Exception:  # noqa: BLE001 - as above
        error = _restore(getattr(api, known), (text,))
        error._msg = text
    error._failures = {rank: decode_error(each) for rank, each in failures.items()}
    return error


def encode_failures(failures: Mapping[int, bytes]) -> bytes:
    """What failed on which rank, by `encode_error`."""
    return pickle.dumps(dict(failures))


def decode_failures(data: bytes) -> dict[int, WRAPPED_EXCEPTION]:
    return {rank: decode_error(error) for rank, error in pickle.loads(data).items()}

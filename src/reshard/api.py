"""The exceptions of Reshard, and how a failure travels between ranks.

    CheckpointException            a save or a load failed; `.failures` says on which ranks
    ├── PlanError                  (ValueError)    the pieces do not make a whole
    │   ├── CoverageError                          a gap, an overlap, a region out of bounds
    │   ├── ReplicaConflictError                   two ranks disagree about one tensor
    │   ├── ShapeMismatchError                     the checkpoint and the program disagree
    │   └── UnsupportedLayoutError                 a placement that cannot be saved
    ├── StateDictError             (ValueError)    the state dict itself cannot be flattened
    ├── MissingKeyError            (RuntimeError)  a key that the checkpoint does not have
    ├── StalePlanError             (RuntimeError)  a rank refers to a plan that is not cached
    ├── UnsafeValueError           (RuntimeError)  a value that only pickle could read
    ├── CorruptCheckpointError     (ValueError)    bytes that contradict themselves or a checksum
    ├── UnsupportedFormatError     (ValueError)    a version or kind that cannot be read here
    ├── CheckpointNotFoundError    (FileNotFoundError) nothing is committed at that place
    ├── CheckpointExistsError      (RuntimeError)  something is, and may not be overwritten
    ├── CommitConflictError        (RuntimeError)  another save was committed there meanwhile
    ├── RankLostError              (RuntimeError)  a rank died or did not answer in time
    ├── WorkerLostError            (RuntimeError)  the process that saves for a rank died
    └── BusyError                  (RuntimeError)  more saves in flight than there may be

Nothing here imports the rest of the package.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

__all__ = [
    "BusyError",
    "CheckpointException",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CommitConflictError",
    "CorruptCheckpointError",
    "CoverageError",
    "MissingKeyError",
    "PlanError",
    "RankLostError",
    "ReplicaConflictError",
    "ShapeMismatchError",
    "StalePlanError",
    "StateDictError",
    "UnsafeValueError",
    "UnsupportedFormatError",
    "UnsupportedLayoutError",
    "WorkerLostError",
]

WRAPPED_EXCEPTION: TypeAlias = tuple[BaseException, traceback.StackSummary]


@contextlib.contextmanager
def _noting(what: str) -> Iterator[None]:
    """Say with an error that comes from the code of users what was being done."""
    try:
        yield
    except Exception as error:
        # From Python 3.11 on; before that, the stack must do.
        if hasattr(error, "add_note"):
            error.add_note(f"while {what}")
        raise


class CheckpointException(Exception):  # noqa: N818 - the name is part of the contract
    """A save or a load failed.

    `failures` maps each rank that failed to its exception and the stack where it was
    raised. It is empty when the error was found on this rank before any exchange.
    """

    def __init__(self, msg: str, failures: Mapping[int, WRAPPED_EXCEPTION] | None = None) -> None:
        self._msg = msg
        self._failures = dict(failures or {})
        super().__init__(msg, self._failures)

    @property
    def failures(self) -> dict[int, WRAPPED_EXCEPTION]:
        """Rank -> (exception, stack) for every rank that failed."""
        return self._failures

    def __str__(self) -> str:
        if not self._failures:
            return self._msg
        ranks = ", ".join(str(rank) for rank in sorted(self._failures))
        lines = [f"{self._msg}: failed on rank {ranks}"]
        for rank in sorted(self._failures):
            error, stack = self._failures[rank]
            lines.append(f"\n[rank {rank}] Traceback (most recent call last):")
            if stack:
                lines.append("".join(traceback.format_list(list(stack))).rstrip("\n"))
            lines.append("".join(traceback.format_exception_only(error)).rstrip("\n"))
        return "\n".join(lines)


class PlanError(CheckpointException, ValueError):
    """The items that were planned do not describe a checkpoint."""


class CoverageError(PlanError):
    """The chunks of a tensor leave a gap, overlap, or reach outside of it."""


class ReplicaConflictError(PlanError):
    """Ranks offer the same name with another shape, dtype, kind or region."""


class ShapeMismatchError(PlanError):
    """The value to load into does not have the shape or the kind that was saved."""


class UnsupportedLayoutError(PlanError):
    """A tensor is laid out in a way that has no well-defined stored form."""


class StateDictError(CheckpointException, ValueError):
    """Two values of a state dict would get the same flat name."""


class MissingKeyError(CheckpointException, RuntimeError):
    """The checkpoint does not contain a key that the state dict asks for."""


class StalePlanError(CheckpointException, RuntimeError):
    """A rank refers to a cached plan that the coordinator does not hold."""


class UnsafeValueError(CheckpointException, RuntimeError):
    """A stored value could only be read by running code from the checkpoint."""


class CorruptCheckpointError(CheckpointException, ValueError):
    """The bytes of a checkpoint contradict themselves, or their checksum."""


class UnsupportedFormatError(CheckpointException, ValueError):
    """A checkpoint of a version or kind that this release does not read."""


class CheckpointNotFoundError(CheckpointException, FileNotFoundError):
    """Nothing is committed at the place where a checkpoint should be."""

    # Else they would be taken from the arguments of the constructor.
    errno = errno.ENOENT
    strerror = "No such checkpoint"


class CheckpointExistsError(CheckpointException, RuntimeError):
    """There is a checkpoint at that place, and it may not be overwritten."""


class CommitConflictError(CheckpointException, RuntimeError):
    """Another save was committed at the same place since this one began."""


class RankLostError(CheckpointException, RuntimeError):
    """A rank died, or did not answer within the time limit."""


class WorkerLostError(CheckpointException, RuntimeError):
    """The process that saves for this rank died in the middle of a save."""


class BusyError(CheckpointException, RuntimeError):
    """As many saves are in flight as there may be, and the caller would not wait."""


def _wrap_exception(exc: BaseException) -> WRAPPED_EXCEPTION:
    """`exc` with the stack where it was raised, in a form that pickles."""
    frames = [
        traceback.FrameSummary(frame.filename, frame.lineno, frame.name, line=frame.line)
        for frame in traceback.extract_tb(exc.__traceback__)
    ]
    return exc, traceback.StackSummary.from_list(frames)


class RemoteError(RuntimeError):
    """An error of another rank that could not be sent as it was; its text was."""


def _portable_exception(exc: BaseException) -> WRAPPED_EXCEPTION:
    """The same, as text if `exc` itself cannot be sent to another process."""
    wrapped = _wrap_exception(exc)
    try:
        pickle.loads(pickle.dumps(wrapped))
    except Exception:  # noqa: BLE001 - any code may run in a pickle; the text is kept
        return RemoteError(_whole_text_of(exc)), wrapped[1]
    return wrapped


def _text_of(exc: BaseException) -> str:
    """What `exc` says, whatever its class makes of that."""
    try:
        return str(exc)
    except Exception as error:  # noqa: BLE001 - it must not take the place of the failure
        return f"its text cannot be had: {type(error).__name__}"


def _whole_text_of(exc: BaseException) -> str:
    """What `exc` is and says, and where it was raised."""
    try:
        lines = "".join(traceback.format_exception(exc))
    except Exception as error:  # noqa: BLE001 - as above, of its notes and causes
        lines = f"Traceback cannot be had: {type(error).__name__}\n"
    return f"{type(exc).__name__}: {_text_of(exc)}\n{lines}"


def _is_wrapped_exception(obj: Any) -> bool:
    """Whether `obj` came from `_wrap_exception`."""
    match obj:
        case (BaseException(), traceback.StackSummary()):
            return isinstance(obj, tuple)
    return False

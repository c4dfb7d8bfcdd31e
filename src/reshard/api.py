"""The exceptions of Reshard, and how a failure travels between ranks.

    CheckpointException            a save or a load failed; `.failures` says on which ranks
    ├── PlanError                  (ValueError)    the pieces do not make a whole
    │   ├── CoverageError                          a gap, an overlap, a region out of bounds
    │   ├── ReplicaConflictError                   two ranks disagree about one tensor
    │   ├── ShapeMismatchError                     the checkpoint and the program disagree
    │   ├── DtypeMismatchError                     the same of dtypes, where none may be cast
    │   └── UnsupportedLayoutError                 a placement that cannot be saved
    ├── StateDictError             (ValueError)    the state dict itself cannot be flattened
    ├── MissingKeyError            (RuntimeError)  a key that the checkpoint does not have
    ├── NotRestoredError           (RuntimeError)  a load would leave a value as it was
    ├── StalePlanError             (RuntimeError)  a rank refers to a plan that is not cached
    ├── UnsafeValueError           (RuntimeError)  a value that only pickle could read
    ├── CorruptCheckpointError     (ValueError)    bytes that contradict themselves or a checksum
    ├── UnsupportedFormatError     (ValueError)    a version or kind that cannot be read here
    ├── CheckpointNotFoundError    (FileNotFoundError) nothing is committed at that place
    ├── CheckpointExistsError      (RuntimeError)  something is, and may not be overwritten
    ├── CommitConflictError        (RuntimeError)  another save was committed there meanwhile
    ├── BaseError                  (ValueError)    a base that a save cannot refer to
    ├── CheckpointInUseError       (RuntimeError)  other checkpoints refer to this one
    ├── RankLostError              (RuntimeError)  a rank died or did not answer in time
    ├── WorkerLostError            (RuntimeError)  the process that saves for a rank died
    └── BusyError                  (RuntimeError)  more saves in flight than there may be

Nothing here imports the rest of the package.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

__all__ = [
    "BaseError",
    "BusyError",
    "CheckpointException",
    "CheckpointExistsError",
    "CheckpointInUseError",
    "CheckpointNotFoundError",
    "CommitConflictError",
    "CorruptCheckpointError",
    "CoverageError",
    "DtypeMismatchError",
    "MissingKeyError",
    "NotRestoredError",
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


class CheckpointException(Exception):  # noqa: N818 - the name is part of the contract
    """A save or a load failed.

    `failures` maps each rank that failed to its exception and the stack where it was
    raised. It is empty when the error was found on this rank before any exchange.

    The text begins with the reason, says which ranks it holds for, and ends with the stacks
    of code that is not ours.
    """

    _raised_at: tuple[int, traceback.StackSummary] | None = None

    def __init__(self, msg: str, failures: Mapping[int, WRAPPED_EXCEPTION] | None = None) -> None:
        self._failures = dict(failures or {})
        self._msg = f"{msg}: {_describe(self._failures)}" if failures else msg
        super().__init__(self._msg)

    @property
    def failures(self) -> dict[int, WRAPPED_EXCEPTION]:
        """Rank -> (exception, stack) for every rank that failed."""
        told: dict[int, WRAPPED_EXCEPTION] = self.__dict__.get("_failures", {})
        if not told and self._raised_at is not None:
            # A copy without failures, so that code which follows them to the reason terminates.
            rank, stack = self._raised_at
            reason = _restore(type(self), self.args)
            reason.__dict__.update(self.__dict__, _raised_at=None)
            return {rank: (reason, stack)}
        return told

    @property
    def _reason(self) -> str:
        """The text without stacks."""
        return str(self.__dict__.get("_msg", Exception.__str__(self)))

    def __str__(self) -> str:
        stacks = _describe_stacks(self.__dict__.get("_failures", {}), self.__cause__)
        return "\n\n".join([self._reason, *stacks])

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by the constructor: those of subclasses take other arguments.
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[CheckpointException], args: tuple[Any, ...]) -> CheckpointException:
    error = kind.__new__(kind, *args)
    # The constructors of some classes of Python would have set them.
    error.args = args
    return error


class PlanError(CheckpointException, ValueError):
    """The items that were planned do not describe a checkpoint."""


class CoverageError(PlanError):
    """The chunks of a tensor leave a gap, overlap, or reach outside of it."""


class ReplicaConflictError(PlanError):
    """Ranks offer the same name with another shape, dtype, kind or region."""


class ShapeMismatchError(PlanError):
    """The value to load into does not have the shape or the kind that was saved."""


class DtypeMismatchError(PlanError):
    """A tensor to load into has another dtype than was saved, and no cast is allowed."""


class UnsupportedLayoutError(PlanError):
    """A tensor is laid out in a way that has no well-defined stored form."""


class StateDictError(CheckpointException, ValueError):
    """Two values of a state dict would get the same flat name."""


class MissingKeyError(CheckpointException, RuntimeError):
    """The checkpoint does not contain a key that the state dict asks for."""


class NotRestoredError(CheckpointException, RuntimeError):
    """A load does not restore every value as it was saved, and was asked to."""


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


class BaseError(CheckpointException, ValueError):
    """The base of a save cannot be referred to."""


class CheckpointInUseError(CheckpointException, RuntimeError):
    """Other checkpoints refer to this one, so that it cannot be deleted."""


class RankLostError(CheckpointException, RuntimeError):
    """A rank died, or did not answer within the time limit."""


class WorkerLostError(CheckpointException, RuntimeError):
    """The process that saves for this rank died in the middle of a save."""


class BusyError(CheckpointException, RuntimeError):
    """As many saves are in flight as there may be, and the caller would not wait."""


# Failures as text

_MOST_REASONS = 5
_HINTS = {
    errno.ENOSPC: "Free some space, or save somewhere else.",
    errno.EDQUOT: "Free some of the quota, or save somewhere else.",
    errno.EACCES: "Check who may read and write there.",
    errno.EROFS: "Save somewhere else.",
}


def _describe(failures: Mapping[int, WRAPPED_EXCEPTION], doing: str = "") -> str:
    """Each reason once, with the ranks that it holds for; `doing` is what they were doing."""
    groups = _by_reason(failures)
    paragraphs = []
    for reason, ranks in groups[:_MOST_REASONS]:
        error = failures[ranks[0]][0]
        names_ranks = isinstance(error, RankLostError) or error.__dict__.get("_failures")
        where = f"\nOn {_name_ranks(ranks)}{doing and f', {doing}'}."
        paragraphs.append(reason if names_ranks else reason + where)
    if others := [rank for _, ranks in groups[_MOST_REASONS:] for rank in ranks]:
        more = f"For {len(groups) - _MOST_REASONS} other reasons on {_name_ranks(sorted(others))}"
        paragraphs.append(f"{more}: see the failures of this exception.")
    return "\n\n".join(paragraphs)


def _by_reason(failures: Mapping[int, WRAPPED_EXCEPTION]) -> list[tuple[str, list[int]]]:
    groups: dict[object, tuple[str, list[int]]] = {}
    for rank in sorted(failures):
        error, stack = failures[rank]
        reason = _explain(error, stack)
        # A full disk is one reason, although each rank writes a file of its own.
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        groups.setdefault((type(error), is_full or reason), (reason, []))[1].append(rank)
    return list(groups.values())


def _name_ranks(ranks: Sequence[int]) -> str:
    """Sorted ranks for people: "ranks 0, 2 and 5-7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _explain(error: BaseException, stack: Sequence[traceback.FrameSummary] = ()) -> str:
    """Why `error` was raised, without its stack."""
    text = _text_of(error)
    if isinstance(error, CheckpointException):
        text = error._reason
    elif isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f": {_file_name(error.filename)!r}"
        hint = _HINTS.get(error.errno or 0, "")
        text = f"{error.strerror}{place}{hint and f'. {hint}'}"
    elif isinstance(error, RemoteError):
        text = re.split(r"\n\s*(?:\+ Exception Group )?Traceback", text)[0].removesuffix(": ")
    elif not _is_deliberate(error, stack):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    notes = getattr(error, "__notes__", ())
    for note in notes if isinstance(notes, list | tuple) else ():
        text += f" ({note})"
    return text


def _file_name(name: Any) -> str:
    """The file of an OSError, which may also be a descriptor."""
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else str(name)


def _describe_stacks(
    failures: Mapping[int, WRAPPED_EXCEPTION], shown: BaseException | None
) -> list[str]:
    """The stacks of code that is not ours; not that of `shown`, which Python prints."""
    texts = []
    for _, ranks in _by_reason(failures)[:_MOST_REASONS]:
        error, stack = failures[ranks[0]]
        if any(failures[rank][0] is shown for rank in ranks):
            continue
        if isinstance(error, CheckpointException):
            texts += _describe_stacks(error.__dict__.get("_failures", {}), shown)
        if frames := _frames_to_show(error, stack):
            lines = "".join(traceback.format_list(frames)).rstrip("\n")
            texts.append(f"Stack of rank {ranks[0]} (most recent call last):\n{lines}")
    return texts


def _frames_to_show(
    error: BaseException, stack: Sequence[traceback.FrameSummary]
) -> list[traceback.FrameSummary]:
    """The part of a stack that helps: code of users and what it called, or a bug of ours."""
    if not isinstance(error, Exception):
        return []
    if isinstance(error, CheckpointException) and (not stack or _is_internal(stack[-1].filename)):
        # Raised by us, on purpose.
        return []
    frames = list(itertools.dropwhile(lambda frame: _is_internal(frame.filename), stack))
    if frames or isinstance(error, OSError | MemoryError) or _is_deliberate(error, stack):
        return frames
    return list(stack)


def _is_deliberate(error: BaseException, stack: Sequence[traceback.FrameSummary]) -> bool:
    """Whether it was raised by a statement of ours, with a text for people."""
    if isinstance(error, CheckpointException):
        return True
    return any(
        frame.filename.startswith(_HERE) and (frame.line or "").startswith("raise ")
        for frame in stack[-1:]
    )


_HERE = os.path.dirname(__file__) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


def _is_internal(filename: str) -> bool:
    """Whether a file belongs to Reshard, torch or Python."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if filename.startswith((_HERE, "<frozen ")) or (
        torch and filename.startswith(os.path.dirname(torch) + os.sep)
    ):
        return True
    return filename.startswith(_STANDARD_LIBRARY) and "-packages" not in filename


def _interrupt_behind(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """The interrupt that led to `error`, if one did.

    Code that is cut off may fail at its clearing up, and raise that instead. `handled` is what was
    being handled before: it led to nothing here.
    """
    found: BaseException | None = error
    while found is not None and found is not handled:
        if not isinstance(found, Exception):
            return found
        found = None if found.__suppress_context__ else found.__context__
    return None


@contextlib.contextmanager
def _note_on_error(what: str) -> Iterator[None]:
    """Add a note that says what user code was running."""
    try:
        yield
    except Exception as error:
        # As `add_note` does, which is there from Python 3.11 on.
        before = getattr(error, "__notes__", ())
        notes = [*(before if isinstance(before, list) else ()), f"while {what}"]
        with contextlib.suppress(AttributeError):
            error.__notes__ = notes  # type: ignore[attr-defined]
        raise


# Failures on their way to other processes


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
    """As `_wrap_exception`, with a text for an `exc` that cannot be sent to another process."""
    wrapped = _wrap_exception(exc)
    try:
        if not _is_wrapped_exception(pickle.loads(pickle.dumps(wrapped))):
            raise TypeError("its pickle is another kind of object")
    except Exception:  # noqa: BLE001 - any code may run in a pickle; the text is kept
        return RemoteError(_whole_text_of(exc)), wrapped[1]
    return wrapped


def _text_of(exc: BaseException) -> str:
    """What `exc` says, whatever its class makes of that."""
    try:
        return str(exc)
    except Exception as error:  # noqa: BLE001 - it must not take the place of the failure
        return f"its text cannot be formatted: {type(error).__name__}"


def _whole_text_of(exc: BaseException) -> str:
    """What `exc` is and says, and where it was raised."""
    try:
        lines = "".join(traceback.format_exception(exc))
    except Exception as error:  # noqa: BLE001 - as above, of its notes and causes
        lines = f"Traceback cannot be formatted: {type(error).__name__}\n"
    return f"{type(exc).__name__}: {_text_of(exc)}\n{lines}"


def _is_wrapped_exception(obj: Any) -> bool:
    """Whether `obj` came from `_wrap_exception`."""
    match obj:
        case (BaseException(), traceback.StackSummary()):
            return isinstance(obj, tuple)
    return False

"""The one error that is raised when ranks have failed."""

from __future__ import annotations

from collections.abc import Mapping
from traceback import StackSummary
from types import TracebackType
from typing import TypeVar

from reshard.api import (
    WRAPPED_EXCEPTION,
    CheckpointException,
    RankLostError,
    _describe,
    _explain,
    _frames_to_show,
    _is_deliberate,
    _is_internal,
    _restore,
    _wrap_exception,
)
from reshard.coordination.pairing import Arrival, Ruling

C = TypeVar("C", bound=CheckpointException)

_PHASES = {
    "open": "while getting ready",
    "meet": "while getting ready",
    "handing over": "while handing the state to the worker process",
    "plan": "while planning",
    "write": "while writing",
    "save": "while writing",
    "commit": "while committing",
    "share": "while planning",
    "connect": "while connecting to each other",
    "read": "while reading",
    "give back": "while giving states back",
}


def _name_phase(phase: str) -> str:
    """What ranks do in a phase, for people."""
    return _PHASES.get(phase, f"in the step {phase!r}")


def join_failures(
    failures: Mapping[int, WRAPPED_EXCEPTION],
    phase: str,
    rank: int = -1,
    own: BaseException | None = None,
) -> CheckpointException:
    """The error that says what happened on all ranks.

    It is of the class of the failures if that is one of ours and the same for all. `own` is
    what was raised on this `rank`, of which the failures hold a copy.
    """
    told = dict(failures)
    if own is not None and rank in told:
        told[rank] = own, told[rank][1]
    text = _describe(told, _name_phase(phase))
    first = told[min(told)][0]
    if isinstance(first, CheckpointException) and len({type(e) for e, _ in told.values()}) == 1:
        joined = say_again(first, text)
    else:
        joined = CheckpointException(text)
    joined._failures = told
    if own is not None and rank in told:
        _link(joined, *told[rank])
    return joined


def fail_alone(error: Exception) -> CheckpointException:
    """What a process on its own raises for `error`: that itself, if its class is ours."""
    stack = _wrap_exception(error)[1]
    if isinstance(error, CheckpointException):
        error._raised_at = 0, stack
        kept = error.__traceback__ if _frames_to_show(error, stack) else None
        return error.with_traceback(from_user_code(kept))
    joined = CheckpointException(_explain(error, stack))
    joined._failures = {0: (error, stack)}
    _link(joined, error, stack)
    return joined


def rank_lost(rank: int, phase: str, operation: str, reason: str) -> RankLostError:
    """For a rank that will not answer any more."""
    where = f", in the {operation}" if operation else ""
    return RankLostError(
        f"lost rank {rank} {_name_phase(phase)}{where}: {reason.rstrip('.')}. What it printed last "
        "may say why"
    )


def rendezvous_lost(
    error: Exception, coordinator: int, phase: str, is_sealed: bool = False
) -> CheckpointException:
    """For a store that is gone, and with it mostly the process that held it."""
    text = (
        f"lost the rendezvous store of the job {_name_phase(phase)}: {error}. The process that "
        f"holds it, such as that of rank {coordinator}, may have ended"
    )
    if is_sealed:
        text += ". The checkpoint may be committed; the other ranks were not told"
    return join_failures({coordinator: _wrap_exception(RankLostError(text))}, phase)


def out_of_step(
    ruling: Ruling, arrivals: Mapping[int, Arrival], coordinator: int
) -> dict[int, CheckpointException]:
    """Why the operation that loses fails, by rank."""
    rule = "All ranks must do the same, in the same order"
    if not ruling.loses:
        doing = "; ".join(f"rank {r}: {a.text}" for r, a in sorted(arrivals.items()) if a.key)
        text = f"ranks are at different operations ({doing}). {rule}"
        return {coordinator: CheckpointException(text)}
    losing = next(each.text for each in arrivals.values() if each.key == ruling.loses)
    return {
        rank: CheckpointException(
            f"rank {rank} did not take part in {losing}: it is at {arrival.text}. {rule}"
        )
        for rank, arrival in arrivals.items()
        if arrival.key and arrival.key != ruling.loses
    }


def say_again(error: C, text: str) -> C:
    """An error of the same class, with the same failures and another text."""
    again = _restore(type(error), (text,))
    again.__dict__.update(error.__dict__)
    # They are part of the text.
    again.__dict__.pop("__notes__", None)
    again._msg, again.args = text, (text,)
    return again  # type: ignore[return-value]


def _link(joined: CheckpointException, error: BaseException, stack: StackSummary) -> None:
    """Make what was raised here the cause, unless that would only be printed twice.

    The stack in `failures` is complete. The error itself keeps the part that helps: frames
    hold on to the state dict.
    """
    joined.__suppress_context__ = True
    whole = error.__traceback__ if _frames_to_show(error, stack) else None
    error.with_traceback(from_user_code(whole) or whole)
    deliberate = _is_deliberate(error, stack) and not isinstance(error, OSError)
    if not deliberate and not isinstance(error, CheckpointException):
        joined.__cause__ = error


def from_user_code(part: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame on that is not ours; None if all are."""
    while part is not None and _is_internal(part.tb_frame.f_code.co_filename):
        part = part.tb_next
    return part

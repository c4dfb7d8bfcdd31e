"""Events of saves and loads: start, end and failure of each step, with their times.

They go to the logger that `torch.distributed.checkpoint` uses, as dicts with the same keys, so
that telemetry which listens to that hears of Reshard as well. Nothing is collected while nobody
listens.
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from reshard.stores.urls import without_secrets
from reshard.tensors.event_logger import describe_call, event_logger

__all__: list[str] = []

logger = logging.getLogger()
_dcp_logger = event_logger()

P = ParamSpec("P")
T = TypeVar("T")


def _dcp_method_logger(
    log_exceptions: bool = False, **wrapper_kwargs: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator that logs the start and the end of each call, and with `log_exceptions` failures.

    What an event says of a call comes from its keyword arguments and from `wrapper_kwargs`.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with logged(function.__name__, {**wrapper_kwargs, **kwargs}, log_exceptions):
                return function(*args, **kwargs)

        return call

    return decorate


class logged:  # noqa: N801 - used as a function
    """Log the start and the end of a block as if it were a call of a function of that name."""

    # Not a generator: contextlib changes what is raised, which some exceptions do not bear.

    def __init__(
        self, name: str, arguments: Mapping[str, Any] | None = None, log_exceptions: bool = False
    ) -> None:
        self._name = name
        self._arguments = arguments or {}
        self._log_exceptions = log_exceptions
        self._about: dict[str, Any] | None = None
        self._began = 0

    def __enter__(self) -> None:
        if not _is_heard():
            return
        self._about = _get_msg_dict(self._name, **self._arguments)
        self._about["log_exceptions"] = self._log_exceptions
        self._began = time.time_ns()
        _dcp_logger.debug({**self._about, "event": "start", "time": self._began})

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._about is None:
            return
        now = time.time_ns()
        if error is None:
            spent = now - self._began
            _dcp_logger.debug({**self._about, "event": "end", "time": now, "times_spent": spent})
        elif self._log_exceptions:
            told = {"event": "exception", "error": str(error), "time": now}
            _dcp_logger.error({**self._about, **told})


def _is_heard() -> bool:
    """Whether anybody takes events: by default there is one handler, which drops them."""
    listens = any(not isinstance(each, logging.NullHandler) for each in _dcp_logger.handlers)
    return (listens or _dcp_logger.propagate) and _dcp_logger.isEnabledFor(logging.ERROR)


def _get_msg_dict(func_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What an event says of a call."""
    return _msg_dict_from_dcp_method_args(*args, **kwargs) | describe_call(func_name, kwargs)


def _msg_dict_from_dcp_method_args(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """What an event says of the arguments of a call, and an id that is new for each call."""
    used = {name: kwargs.get(name) for name in ("storage_writer", "storage_reader", "planner")}
    place = kwargs.get("checkpoint_id")
    storage = used["storage_writer"] or used["storage_reader"]
    if not place and storage:
        place = getattr(storage, "checkpoint_id", None)
    names = {name: type(value).__name__ for name, value in used.items() if value}
    known = None if place is None else without_secrets(str(place))
    return {"checkpoint_id": known, "uuid": str(uuid.uuid4().int), **names}


def _init_logger(rank: int) -> None:
    """Have the root logger show what is at least of level INFO, each line with the rank."""
    shown = logging.StreamHandler()
    shown.setLevel(logging.INFO)
    form = f"[{rank}] %(asctime)s - %(name)s - %(levelname)s - %(message)s"
    shown.setFormatter(logging.Formatter(form))
    logger.setLevel(logging.INFO)
    logger.addHandler(shown)

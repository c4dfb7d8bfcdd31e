"""Calls to and from the code of users: arguments by position, planners and storages of others."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from reshard.api import PlanError

__all__ = ["_api_bc_check", "refuse_dcp"]

F = TypeVar("F", bound=Callable[..., Any])


def _api_bc_check(func: F) -> F:
    """Lets `save` and `load` take their storage by position, as they once did."""
    parameters = inspect.signature(func).parameters
    storage = "storage_writer" if "storage_writer" in parameters else "storage_reader"

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and isinstance(args[1], str | os.PathLike):
            raise TypeError(
                f"{func.__name__}() takes a place by its name: checkpoint_id={args[1]!r}"
            )
        if len(args) == 2 and storage not in kwargs:
            warnings.warn(
                f"pass {storage} to {func.__name__} by its name: it will not be taken by its "
                "position for ever",
                stacklevel=2,
            )
            return func(args[0], **{storage: args[1]}, **kwargs)
        return func(*args, **kwargs)

    return cast(F, call)


def refuse_dcp(*objects: object) -> None:
    """Raise for planners and storages that derive from those of DCP and not from ours."""
    for used in objects:
        for base in type(used).__mro__:
            if base.__module__.startswith("torch.distributed.checkpoint"):
                raise PlanError(
                    f"{type(used).__name__} derives from {base.__module__}.{base.__qualname__}: "
                    "derive it from the class of that name in reshard (under reshard.patch(), "
                    "import the module that defines it after the patch)"
                )

"""Calls to code of users: planners, storages and `Stateful` values, in all the forms they have."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from reshard.api import CheckpointException, _note_on_error
from reshard.coordination.channel import Channel
from reshard.coordination.failures import from_user_code
from reshard.logger import logged
from reshard.metadata import STATE_DICT_TYPE, Metadata
from reshard.planner import SavePlanner
from reshard.staging import AsyncStager
from reshard.stateful import is_stateful
from reshard.storage import StorageReader, StorageWriter, parameters_of, takes_any_keyword
from reshard.tensors.dcp_modules import is_of_dcp

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_STAGING = (
    "_synchronize_after_execute",
    "should_synchronize_after_execute",
    "stage",
    "synchronize_staging",
)
"""What makes a storage a stager as well. `close` is not in it: torch 2.8 has none."""


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
                "position in a later release",
                stacklevel=2,
            )
            kwargs[storage] = args[1]
            args = args[:1]
        try:
            return func(*args, **kwargs)
        except CheckpointException as error:
            # Its text and `failures` say what happened. The frames in between are ours, and
            # hold on to the state dict.
            raise error.with_traceback(from_user_code(error.__traceback__))  # noqa: B904

    return cast(F, call)


class _WithDefaults:
    """An object of a user that need not derive from a contract, with what the contract defaults."""

    def __init__(self, used: object, contract: type) -> None:
        self._used = used
        self._contract = contract

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._used, name):
            return getattr(self._used, name)
        default = getattr(self._contract, name)
        return functools.partial(default, self._used) if callable(default) else default


def with_defaults(used: T, contract: type) -> T:
    """`used` for calls of the optional methods of a contract."""
    return used if isinstance(used, contract) else cast(T, _WithDefaults(used, contract))


def ask_for_states(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    """`state_dict` with the states of `Stateful` values in their place."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"a state dict is a dict, not a {type(state_dict).__name__}: save "
            "{'model': model} in place of model"
        )
    states = dict(state_dict)
    name = "_stateful_to_state_dict"
    with logged(name, log_exceptions=True):
        for key, value in state_dict.items():
            if is_stateful(value):
                with (
                    _note_on_error(f"asking {key!r} for its state"),
                    logged(f"{name}.{key}", log_exceptions=True),
                ):
                    states[key] = value.state_dict()
    return states


def set_up_save_planner(
    planner: SavePlanner, state_dict: STATE_DICT_TYPE, writer: StorageWriter, channel: Channel
) -> None:
    """Hand the state dict to the planner. Older planners do not take `storage_meta`."""
    meta = writer.storage_meta()
    if "storage_meta" in parameters_of(planner.set_up_planner):
        planner.set_up_planner(
            state_dict=state_dict,
            storage_meta=meta,
            is_coordinator=channel.is_coordinator,
        )
        return
    warnings.warn(
        f"{type(planner).__name__}.set_up_planner does not take storage_meta; add the parameter",
        stacklevel=2,
    )
    planner.set_up_planner(state_dict, channel.is_coordinator)  # type: ignore[arg-type]


def set_up_writer(writer: StorageWriter, channel: Channel, use_collectives: bool) -> None:
    """Tell the storage its role, in as much detail as it takes."""
    details: dict[str, Any] = {}
    if takes_any_keyword(writer.set_up_storage_writer):
        details = {
            "rank": channel.rank,
            "use_collectives": use_collectives,
            "world_size": channel.world_size,
        }
    writer.set_up_storage_writer(channel.is_coordinator, **details)


def set_up_reader(reader: StorageReader, metadata: Metadata, channel: Channel) -> None:
    """The same for the storage of a load."""
    details: dict[str, Any] = {}
    if takes_any_keyword(reader.set_up_storage_reader):
        details = {"rank": channel.rank, "use_collectives": True}
    reader.set_up_storage_reader(metadata, channel.is_coordinator, **details)


def synchronize(stager: AsyncStager) -> None:
    """Wait until training may change the state, if a stager wants `async_save` to do that."""
    if not stager.should_synchronize_after_execute:
        return
    # That of torch's protocol does nothing, but warns that it is deprecated.
    if not is_of_dcp(type(stager).synchronize_staging) or not hasattr(
        type(stager).synchronize_staging, "__deprecated__"
    ):
        stager.synchronize_staging()


def stages_by_itself(writer: Any) -> bool:
    """Whether a storage copies states in a way of its own. Torch's storages do not."""
    return all(hasattr(writer, name) for name in _STAGING) and not is_of_dcp(type(writer).stage)


@contextlib.contextmanager
def overridden(used: object, **settings: Any) -> Iterator[None]:
    """Settings of one call on an object that was passed to it, as far as the object takes them.

    They are as before when the block ends. None stands for a setting that was not given.
    """
    taken = getattr(used, "call_settings", ())
    given = {name: settings[name] for name in taken if settings.get(name) is not None}
    before = {name: getattr(used, name) for name in given}
    try:
        for name, value in given.items():
            setattr(used, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(used, name, value)

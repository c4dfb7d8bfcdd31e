"""The story of a save."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace

import torch.distributed as dist

from reshard.api import _noting
from reshard.background.backlog import WhenBusy, backlog, place_of
from reshard.background.saves import BackgroundSave, worker_of_this_process
from reshard.coordination.channel import (
    DEFAULT_TIMEOUT_SECONDS,
    UNKNOWN,
    Channel,
    Intent,
    open_channel,
    telling_others,
)
from reshard.default_planner import DefaultSavePlanner
from reshard.filesystem import FileSystemWriter
from reshard.metadata import STATE_DICT_TYPE, Metadata
from reshard.operations.save import SaveJob, SaveOperation, choose_writer
from reshard.operations.user_calls import _api_bc_check
from reshard.planner import SavePlanner
from reshard.staging import AsyncStager, staging_pool
from reshard.stateful import Stateful as Stateful
from reshard.stateful import is_stateful
from reshard.storage import StorageWriter

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "async_save",
    "close",
    "prewarm",
    "save",
    "save_state_dict",
]


@_api_bc_check
def save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Metadata:
    """Save `state_dict`: every rank its part, and all of it or nothing.

    Called by all ranks of `process_group` (of the default group if there is one; without
    one, or with `no_dist`, this process saves on its own). Blocks until the checkpoint is
    committed, and durable unless the writer says otherwise. If any rank fails, every rank
    raises a `CheckpointException` with the reasons, and what was at `checkpoint_id`
    before is still there. A rank that does not answer for `timeout_seconds` counts as
    failed; 0 means to wait for ever.

    `Stateful` values are asked for their state. With `use_collectives=False` ranks do not
    plan together: each writes all that it holds, and a manifest of its own.
    """
    intent = _intent("save", storage_writer, checkpoint_id, use_collectives)
    channel = open_channel(process_group, _use_dist(no_dist), 0, timeout_seconds, intent)
    with telling_others(channel):
        backlog().wait_for_users(storage_writer, planner)
        writer = choose_writer(storage_writer, checkpoint_id)
    return _save(state_dict, writer, planner, channel, use_collectives)


def save_state_dict(
    state_dict: STATE_DICT_TYPE,
    storage_writer: StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Deprecated; use `save`."""
    warnings.warn("save_state_dict is deprecated; use save", FutureWarning, stacklevel=2)
    storage_writer.reset()
    return _save_state_dict(
        state_dict, storage_writer, process_group, coordinator_rank, no_dist, planner
    )


def _save_state_dict(
    state_dict: STATE_DICT_TYPE,
    storage_writer: StorageWriter,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
    use_collectives: bool = True,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Metadata:
    intent = _intent("save", storage_writer, None, use_collectives)
    channel = open_channel(
        process_group, _use_dist(no_dist), coordinator_rank, timeout_seconds, intent
    )
    return _save(state_dict, storage_writer, planner, channel, use_collectives)


def _save(
    state_dict: STATE_DICT_TYPE,
    storage_writer: StorageWriter,
    planner: SavePlanner | None,
    channel: Channel,
    use_collectives: bool,
) -> Metadata:
    def check() -> None:
        backlog().raise_unseen()
        backlog().settle(place_of(storage_writer))

    def prepare() -> SaveJob:
        return SaveJob(
            _stateful_to_state_dict(state_dict), storage_writer, planner or DefaultSavePlanner()
        )

    with channel:
        return SaveOperation(prepare, channel, use_collectives, check).run()


def _intent(
    what: str,
    writer: StorageWriter | None,
    checkpoint_id: str | os.PathLike[str] | None,
    use_collectives: bool,
) -> Intent:
    """What a call is about to do, in the same words on all ranks."""
    if not use_collectives:
        what += " without collectives"
    if writer is not None and not isinstance(writer, FileSystemWriter):
        # Other storages may have a place for each rank.
        return Intent(what, what)
    chosen = writer.checkpoint_id if checkpoint_id is None and writer else checkpoint_id
    # What is wrong with the arguments of this rank is told to all when they are used.
    if not chosen or not isinstance(chosen, str | os.PathLike):
        return UNKNOWN
    try:
        what += f" to {place_of(SimpleNamespace(checkpoint_id=chosen))!r}"
    except (OSError, ValueError):
        return UNKNOWN
    return Intent(what, what)


def _use_dist(no_dist: bool) -> bool:
    return not no_dist and dist.is_available() and dist.is_initialized()


def _stateful_to_state_dict(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"a state dict is a dict, not a {type(state_dict).__name__}: save "
            "{'model': model} in place of model"
        )
    states = dict(state_dict)
    for key, value in state_dict.items():
        if is_stateful(value):
            with _noting(f"asking {key!r} for its state"):
                states[key] = value.state_dict()
    return states


class AsyncCheckpointerType(Enum):
    """Who does a background save: a thread of this process, or a process beside it."""

    THREAD = "thread"
    PROCESS = "process"

    @classmethod
    def _missing_(cls, value: object) -> AsyncCheckpointerType | None:
        # The enum of torch means the same.
        return cls(value.value) if isinstance(value, Enum) else None


@dataclass
class AsyncSaveResponse:
    """What `async_save` returns when the stager copies in the background.

    The state must not change before `staging_completion` is done.
    """

    staging_completion: Future[None]
    upload_completion: Future[Metadata]


def async_save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    when_busy: WhenBusy = "wait",
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Future[Metadata] | AsyncSaveResponse:
    """Save `state_dict` while training goes on.

    Called by the same ranks as `save`. Returns when the state is copied away and may be
    changed: a future of the metadata that `save` would return. If the stager copies in
    the background it returns at once, with an `AsyncSaveResponse`.

    Saves of one process run one after the other. While one runs and another waits, a
    third call blocks until one of them is done, or raises `BusyError` with
    `when_busy="refuse"`. A save that fails raises from its future; if nobody looks at
    that, from the next `save` or `async_save` (whose own save goes on all the same), from
    `close`, or from a `load` of the same place, and what is left is reported on stderr
    when the process ends. A process that ends waits for its saves.

    No collective is issued, so training may use any group meanwhile.
    """
    if when_busy not in ("wait", "refuse"):
        raise ValueError(f"when_busy is 'wait' or 'refuse', not {when_busy!r}")
    in_process = AsyncCheckpointerType(async_checkpointer_type) is AsyncCheckpointerType.PROCESS
    how = "async save in a process" if in_process else "async save"
    intent = _intent(how, storage_writer, checkpoint_id, use_collectives)
    save = BackgroundSave(
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        in_process=in_process,
        use_collectives=use_collectives,
        channel=open_channel(process_group, _use_dist(no_dist), 0, timeout_seconds, intent),
    )
    future = save.start(lambda: _stateful_to_state_dict(state_dict), async_stager, when_busy)
    if save.staging is not None:
        return AsyncSaveResponse(save.staging, future)
    return future


def prewarm(
    state_dict: STATE_DICT_TYPE,
    *,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
) -> None:
    """Get ready to `async_save` such a state dict: the first will be as fast as the next.

    Takes the staging memory, and starts the worker process if one is asked for. No ranks
    wait for each other, unless `Stateful` values do that when they are asked for their
    state.
    """
    if AsyncCheckpointerType(async_checkpointer_type) is AsyncCheckpointerType.PROCESS:
        worker_of_this_process().start()
    staging_pool().prewarm(_stateful_to_state_dict(state_dict))


def close() -> None:
    """Wait for the saves in flight, end the worker process, give the staging memory back.

    Raises the failure of a background save that nobody has looked at. Not a collective.
    Saves may follow; they take what they need anew.
    """
    backlog().drain()
    worker_of_this_process().stop()
    staging_pool().close()
    backlog().raise_unseen()

"""Saving: `save`, `async_save`, and what belongs to them."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
import torch.distributed as dist

from reshard.background.overlap import late_copies
from reshard.background.queue import WhenBusy, save_queue
from reshard.background.trainer import BackgroundOptions, Staging, save_later
from reshard.background.worker import worker_of_this_process
from reshard.coordination.store_channel import DEFAULT_TIMEOUT_SECONDS
from reshard.engine.process_wide import release_all
from reshard.logger import _dcp_method_logger
from reshard.metadata import STATE_DICT_TYPE, Metadata
from reshard.operations.ranks import Ranks
from reshard.operations.save import SaveSettings, save_now
from reshard.operations.targets import SaveTarget
from reshard.operations.user_calls import _api_bc_check, ask_for_states
from reshard.operations.user_calls import ask_for_states as _stateful_to_state_dict  # noqa: F401
from reshard.planner import SavePlanner
from reshard.snapshots.pool import staging_pool
from reshard.staging import AsyncStager
from reshard.stateful import Stateful as Stateful
from reshard.storage import StorageWriter

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "async_save",
    "close",
    "finish_staging",
    "prewarm",
    "save",
    "save_state_dict",
]


@_api_bc_check
@_dcp_method_logger(log_exceptions=True)
def save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    base: str | os.PathLike[str] | None = None,
    frozen: Sequence[str] = (),
    compress: Literal["zstd"] | None = None,
    fingerprint: bool = False,
    check_replicas: bool = False,
    format: Literal["reshard", "dcp"] = "reshard",
    storage_options: Mapping[str, Any] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Metadata:
    """Save `state_dict`: every rank its part, and all of it or nothing.

    Called by all ranks of `process_group` (of the default group if there is one; without
    one, or with `no_dist`, this process saves on its own). Blocks until the checkpoint is
    committed, and durable unless the writer says otherwise. If any rank fails, every rank
    raises a `CheckpointException` with the reasons, and what was at `checkpoint_id`
    before is still there. A rank that does not answer for `timeout_seconds` counts as
    failed; 0 means no limit.

    `checkpoint_id` is a path, or a URL such as `s3://bucket/run/step-100`, whose store takes
    `storage_options` (see `ObjectStoreWriter`) and otherwise the usual environment variables.

    `Stateful` values are asked for their state. With `use_collectives=False` ranks do not
    plan together: each writes all that it holds, and a manifest of its own.

    With a `base`, another checkpoint or a directory of safetensors files such as one of Hugging
    Face, chunks that it holds with the same name, region and bytes are not written: the new
    checkpoint refers to them, and the base must be kept (`delete` sees to that; `materialise`
    ends it). `frozen` matters to `async_save` only.

    With `fingerprint`, the checkpoint keeps a fingerprint of each tensor that does not depend on
    the layout: `load(..., verify="fingerprint")` and `same` compare by it. With `check_replicas`,
    ranks that hold the same region of a tensor compare what they hold before anything is
    written; a difference is a `ReplicaConflictError` that names the tensor and the ranks.

    With `compress="zstd"` tensors are stored in fewer bytes: about 0.67 of them for weights in
    bfloat16, 0.83 for fp32 and the states of Adam. That takes a core a second for each
    gigabyte, so it pays for stores that are slower than that; a local disk is faster without. It
    needs `pip install 'reshard[compress]'`, here and where it is loaded.

    With `format="dcp"` the files are those of `torch.distributed.checkpoint`, for programs that
    load with that; they have no checksums. What that format has no place for is a `ValueError`.
    """
    return save_now(
        state_dict,
        SaveTarget(storage_writer, checkpoint_id, storage_options),
        planner,
        Ranks(process_group, no_dist, timeout_seconds=timeout_seconds),
        SaveSettings(
            use_collectives=use_collectives,
            base=base,
            frozen=frozen,
            compress=compress,
            fingerprint=fingerprint,
            check_replicas=check_replicas,
            format=format,
        ),
    )


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
    """The same without a warning, as tools of other projects call it."""
    return save_now(
        state_dict,
        SaveTarget(storage_writer, None),
        planner,
        Ranks(process_group, no_dist, coordinator_rank, timeout_seconds),
        SaveSettings(use_collectives=use_collectives),
    )


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


@_dcp_method_logger(log_exceptions=True)
def async_save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    staging: Staging = "blocking",
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    base: str | os.PathLike[str] | None = None,
    frozen: Sequence[str] = (),
    compress: Literal["zstd"] | None = None,
    fingerprint: bool = False,
    check_replicas: bool = False,
    format: Literal["reshard", "dcp"] = "reshard",
    storage_options: Mapping[str, Any] | None = None,
    when_busy: WhenBusy = "wait",
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Future[Metadata] | AsyncSaveResponse:
    """Save `state_dict` while training goes on.

    Called by the same ranks as `save`. Returns when the state is copied away and may be
    changed: a future of the metadata that `save` would return. If the stager copies in
    the background it returns at once, with an `AsyncSaveResponse`.

    With `staging="overlap"`, parameters and optimizer state are copied beside the next forward
    and backward pass, and the rest before the call returns an `AsyncSaveResponse`. A hook before
    `optimizer.step()` waits for what is left, and so do `load` and `close`. Whoever changes
    parameters or optimizer state in another way calls `finish_staging` before; if that is
    forgotten, the save fails rather than store a mixture. The optimizers are those of `TrainState`
    and other values of the state dict, or are passed as `optimizers`; what is owned by others, or
    by one that calls no hooks, is copied before the call returns.

    Saves of one process run one after the other. While one runs and another waits, a
    third call blocks until one of them is done, or raises `BusyError` with
    `when_busy="refuse"`. A save that fails raises from its future; if nobody looks at
    that, from the next `save`, which then saves nothing, or `async_save`, whose own save
    goes on all the same, from `close`, or from a `load` of the same place, and what is left
    is reported on stderr when the process ends. A process that ends waits for its saves.

    With a `base`, tensors that it holds are not copied: they are compared with it, by checksum,
    before the call returns. Those whose names match a pattern of `frozen` (`*` and `?` as in a
    shell) must not change before the save is done. They are compared in the background, which
    saves half of the stall and more; the save fails if one is not what the base holds.

    No collective is issued, so training may use any group meanwhile.
    """
    if when_busy not in ("wait", "refuse"):
        raise ValueError(f"when_busy is 'wait' or 'refuse', not {when_busy!r}")
    kind = AsyncCheckpointerType(async_checkpointer_type)
    save = save_later(
        state_dict,
        SaveTarget(storage_writer, checkpoint_id, storage_options),
        planner,
        Ranks(process_group, no_dist, timeout_seconds=timeout_seconds),
        BackgroundOptions(
            in_process=kind is AsyncCheckpointerType.PROCESS,
            stager=async_stager,
            when_busy=when_busy,
            staging=staging,
            optimizers=optimizers,
        ),
        SaveSettings(
            use_collectives=use_collectives,
            base=base,
            frozen=frozen,
            compress=compress,
            fingerprint=fingerprint,
            check_replicas=check_replicas,
            format=format,
        ),
    )
    return save.future if save.staging is None else AsyncSaveResponse(save.staging, save.future)


def finish_staging() -> None:
    """Block until parameters and optimizer state may be changed.

    That is until all is copied that an `async_save` with `staging="overlap"` left for later. Steps
    of optimizers wait by themselves. A copy that failed is over too; its save raises the reason.
    """
    late_copies().finish()


def prewarm(
    state_dict: STATE_DICT_TYPE,
    *,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    background: bool = False,
) -> Future[None]:
    """Get ready to `async_save` such a state dict: the first will be as fast as the next.

    Takes the staging memory, and starts the worker process if one is asked for. No ranks
    wait for each other, unless `Stateful` values do that when they are asked for their
    state. Optimizers have no state before their first step, so it is best called after that.

    With `background` it returns at once, and memory is taken while training goes on; the future
    that is returned tells when that is done, or why it failed. A save that comes before waits.
    """
    in_process = AsyncCheckpointerType(async_checkpointer_type) is AsyncCheckpointerType.PROCESS
    take_memory = staging_pool().plan_prewarm(ask_for_states(state_dict))
    done: Future[None] = Future()

    def work() -> None:
        try:
            take_memory()
            if in_process:
                worker_of_this_process().start()
        except BaseException as error:  # noqa: BLE001 - raised by the future
            done.set_exception(error)
        else:
            done.set_result(None)

    if background:
        threading.Thread(target=work, name="reshard-prewarm", daemon=True).start()
    else:
        work()
        done.result()
    return done


def close() -> None:
    """Wait for the saves in flight, end the worker process, give the staging memory back.

    Raises the failure of a background save that nobody has looked at. Not a collective.
    Saves may follow; they take what they need anew.
    """
    queue = save_queue()
    queue.drain()
    release_all()
    queue.raise_unseen()

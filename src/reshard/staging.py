"""Stagers: how `async_save` copies a state so that training can go on."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
import weakref
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from reshard.metadata import STATE_DICT_TYPE
from reshard.snapshots.pool import LastLease, Staged, staging_pool
from reshard.snapshots.transport import PGTransport

__all__ = [
    "AsyncStager",
    "BlockingAsyncStager",
    "DefaultStager",
    "StagingOptions",
]


@runtime_checkable
class AsyncStager(Protocol):
    """Copies the state for `async_save`. Meant to be subclassed.

    `stage` returns a state dict that training cannot change any more, or a future of one;
    in that case the caller must not change the state before the future is done. If
    `should_synchronize_after_execute`, `async_save` calls `synchronize_staging` before it
    returns.
    """

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether `async_save` waits for staging."""
        return self._synchronize_after_execute

    def stage(self, state_dict: STATE_DICT_TYPE) -> Future[STATE_DICT_TYPE] | STATE_DICT_TYPE:
        """A copy of `state_dict`, or a future of one."""
        raise NotImplementedError(f"{type(self).__name__} has no stage method")

    def synchronize_staging(self) -> None:
        """Block until training may change the state."""

    def close(self) -> None:
        """Release the resources of the stager."""


@dataclass
class StagingOptions:
    """How a `DefaultStager` copies.

    `use_pinned_memory` and `use_non_blocking_copy` have an effect only with CUDA.
    `use_shared_memory` has none: staging memory is always shared with the worker process.
    With `use_async_staging`, `stage` returns a future and copies in a thread.
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = True
    use_non_blocking_copy: bool = True


class DefaultStager(AsyncStager):
    """Copies into the staging pool of the process.

    What `stage` returns is valid as long as it is referenced; if it was passed to
    `async_save`, until that save is done. Memory that is not in use any more is reused.
    """

    _synchronize_after_execute = False

    def __init__(self, config: StagingOptions = StagingOptions()) -> None:  # noqa: B008
        self._config = config
        self._thread: ThreadPoolExecutor | None = None
        self._staging: Future[STATE_DICT_TYPE] | None = None
        self._last = LastLease()
        # Memory returns to the pool even if the stager is never closed.
        weakref.finalize(self, self._last.end).atexit = False
        self._pid = os.getpid()

    def stage(
        self, state_dict: STATE_DICT_TYPE, **kwargs: Any
    ) -> Future[STATE_DICT_TYPE] | STATE_DICT_TYPE:
        # For `async_save`: the ids of tensors that need not be copied.
        kept = kwargs.get("kept", ())
        if not self._config.use_async_staging:
            return self._stage(state_dict, kept)
        if self._thread is None or self._pid != os.getpid():
            # A forked child does not have the threads of its parent.
            self._pid = os.getpid()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="reshard-staging")
        # Drop the previous copy first, so that its memory can be reused.
        self._staging = None
        self._staging = self._thread.submit(self._stage, state_dict, kept)
        return self._staging

    def _stage(self, state_dict: STATE_DICT_TYPE, kept: Collection[int]) -> Staged:
        self._last.end()
        cuda = torch.cuda.is_available()
        staged = staging_pool().stage(
            state_dict,
            pinned=self._config.use_pinned_memory and cuda,
            non_blocking=self._config.use_non_blocking_copy and cuda,
            kept=kept,
        )
        self._last.lease = staged.lease
        return staged

    def synchronize_staging(self) -> None:
        """Block until the last call of `stage` is done."""
        if self._staging is not None:
            self._staging.result()

    def close(self) -> None:
        """End the staging thread. The memory stays in the pool, for the next stager."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        self._staging = None
        self._last.end()


class BlockingAsyncStager(DefaultStager):
    """Copies before `stage` returns.

    `cache_staged_state_dict` has no effect: memory is always kept for the next save.
    """

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        super().__init__(StagingOptions(use_async_staging=False))
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        self.state_dict_cache: STATE_DICT_TYPE | None = None
        if type_check:
            warnings.warn("type_check has no effect: every value is copied", stacklevel=2)


class _ReplicationStager(AsyncStager):
    """Exchanges the state with a partner, half the world away, and keeps what comes in a file.

    `stage` returns the state of the partner, which a save then stores as that of this rank. A
    collective over all ranks of `pg`, whose number must be even. Without a process group it
    returns the state as it is. The file is a `torch.save` file in `storage_dir`; it stays, so
    that a rank that lost its memory finds it.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        pg: dist.ProcessGroup,
        timeout: timedelta = timedelta(minutes=30),
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
        storage_dir: str | None = None,
    ) -> None:
        self._pg = pg
        self._transport = PGTransport(pg, timeout, device)
        self._storage_dir = storage_dir or tempfile.mkdtemp(prefix="replication_stager_")
        os.makedirs(self._storage_dir, exist_ok=True)

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        if not (dist.is_available() and dist.is_initialized()):
            return state_dict
        rank, world_size = self._pg.rank(), self._pg.size()
        if world_size % 2:
            raise ValueError(f"{world_size} ranks cannot be paired: replicate over an even number")
        partner = (rank + world_size // 2) % world_size
        # One of two sends first, so that they never wait for each other.
        if rank < partner:
            self._transport.send_checkpoint([partner], state_dict)
        received = self._transport.recv_checkpoint(partner)
        if rank > partner:
            self._transport.send_checkpoint([partner], state_dict)
        self._persist(received, self._get_persisted_path(rank, partner))
        return received  # type: ignore[return-value]

    def _get_persisted_path(self, current_rank: int, partner_rank: int) -> str:
        """Where a rank keeps the state of its partner."""
        name = f"rank_{current_rank}_replica_partner_{partner_rank}.pt"
        return os.path.join(self._storage_dir, name)

    def _persist(self, state_dict: object, path: str) -> None:
        draft = f"{path}.tmp"
        try:
            with open(draft, "wb") as file:
                torch.save(state_dict, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.remove(draft)
            raise

    def synchronize_staging(self) -> None:
        """Nothing to do: `stage` is done when it returns."""

    def close(self) -> None:
        """Nothing to release. Files stay."""

"""Stagers: how `async_save` copies a state so that training can go on."""

from __future__ import annotations

import os
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from reshard.metadata import STATE_DICT_TYPE
from reshard.snapshots.pool import LastLease, Staged, staging_pool

__all__ = [
    "AsyncStager",
    "BlockingAsyncStager",
    "DefaultStager",
    "StagingOptions",
]


@runtime_checkable
class AsyncStager(Protocol):
    """What `async_save` asks to copy the state away. Made to be subclassed.

    `stage` returns a state dict that training cannot change any more, or a future of one:
    then the caller must not change the state before that is done. If
    `should_synchronize_after_execute`, `synchronize_staging` is called before
    `async_save` returns.
    """

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether `async_save` waits for the staging by itself."""
        return self._synchronize_after_execute

    def stage(self, state_dict: STATE_DICT_TYPE) -> Future[STATE_DICT_TYPE] | STATE_DICT_TYPE:
        """A copy of `state_dict`, or the promise of one."""
        raise NotImplementedError(f"{type(self).__name__} has no stage method")

    def synchronize_staging(self) -> None:
        """Block until the state may be changed."""

    def close(self) -> None:
        """Give back what the stager holds."""


@dataclass
class StagingOptions:
    """How a `DefaultStager` copies.

    `use_pinned_memory` and `use_non_blocking_copy` matter only where there is CUDA, and
    are accepted without. Staging memory can always be shared with the process that saves,
    so `use_shared_memory` is accepted and changes nothing. With `use_async_staging`,
    `stage` returns a future and copies in a thread.
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = True
    use_non_blocking_copy: bool = True


class DefaultStager(AsyncStager):
    """Copies into the staging pool of the process.

    What `stage` returns stays valid for as long as anybody holds it, unless `async_save` was
    given it: then, until that save is done. Memory that nobody looks at any more is used for
    the next call.
    """

    _synchronize_after_execute = False

    def __init__(self, config: StagingOptions = StagingOptions()) -> None:  # noqa: B008
        self._config = config
        self._thread: ThreadPoolExecutor | None = None
        self._staging: Future[STATE_DICT_TYPE] | None = None
        self._last = LastLease()
        # Who forgets to close a stager does not lose the memory.
        weakref.finalize(self, self._last.end).atexit = False
        self._pid = os.getpid()

    def stage(
        self, state_dict: STATE_DICT_TYPE, **kwargs: Any
    ) -> Future[STATE_DICT_TYPE] | STATE_DICT_TYPE:
        if not self._config.use_async_staging:
            return self._stage(state_dict)
        if self._thread is None or self._pid != os.getpid():
            # A thread does not come along into a forked child.
            self._pid = os.getpid()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="reshard-staging")
        # So that it does not hold on to what was staged before.
        self._staging = None
        self._staging = self._thread.submit(self._stage, state_dict)
        return self._staging

    def _stage(self, state_dict: STATE_DICT_TYPE) -> Staged:
        self._last.end()
        cuda = torch.cuda.is_available()
        staged = staging_pool().stage(
            state_dict,
            pinned=self._config.use_pinned_memory and cuda,
            non_blocking=self._config.use_non_blocking_copy and cuda,
        )
        self._last.lease = staged.lease
        return staged

    def synchronize_staging(self) -> None:
        """Block until the last `stage` is done."""
        if self._staging is not None:
            self._staging.result()

    def close(self) -> None:
        """End the staging thread. The memory stays with the pool, for the next stager."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        self._staging = None
        self._last.end()


class BlockingAsyncStager(DefaultStager):
    """Copies before `stage` returns.

    `cache_staged_state_dict` is accepted: memory is always kept for the next save.
    """

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        super().__init__(StagingOptions(use_async_staging=False))
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        self.state_dict_cache: STATE_DICT_TYPE | None = None
        if type_check:
            warnings.warn("type_check has no effect: every value is copied", stacklevel=2)

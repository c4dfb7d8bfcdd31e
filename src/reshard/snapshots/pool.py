"""Memory for staged state dicts, reused from save to save.

There is one staging pool per process. It keeps as many buffers as saves were ever in flight
at once. A buffer is one block of memory, which grows when a larger state dict comes.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from reshard.engine.process_wide import ProcessWide
from reshard.snapshots.rebuild import rebuild
from reshard.snapshots.segments import Segment
from reshard.snapshots.survey import Layout, Survey, addresses_in, copy_moves, survey


class Buffer:
    """One block of staging memory, and how the last state dict lies in it."""

    def __init__(self) -> None:
        self.segment: Segment | None = None
        self.layout: Layout | None = None

    def prepare(self, plan: Survey, pinned: bool) -> Layout:
        """Allocate memory for a state dict, unless the present memory will do."""
        if self.layout is not None and self.layout.form == plan.form and self.layout.is_in_place():
            return self.layout
        layout = Layout(plan)
        if self.segment is None or self.segment.nbytes < layout.nbytes:
            # Free the old memory first: there may not be enough for both.
            self.free()
            self.segment = Segment(layout.nbytes, pinned)
        layout.place(self.segment.memory, plan)
        self.layout = layout
        return layout

    def free(self) -> None:
        self.layout = None
        if self.segment is not None:
            self.segment.close()
            self.segment = None


class Staged(dict[str, Any]):
    """A staged state dict in memory of the pool. Copies of it are ordinary dicts."""

    lease: Lease

    @property
    def segment(self) -> Segment:
        """The memory of all its tensors."""
        return self.lease.segment

    def release(self) -> None:
        """Return the memory to the pool."""
        self.lease.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class Lease:
    """The loan of a buffer to one staged state dict.

    It ends when neither the stager nor a save needs it any more.
    """

    def __init__(self, pool: StagingPool, buffer: Buffer, staged: Staged) -> None:
        self.buffer = buffer
        self.begin, self.end_of_memory = 0, 0
        if buffer.segment is not None:
            self.begin, self.end_of_memory = buffer.segment.begin, buffer.segment.end
        self._pool = pool
        # A weak reference, so that `end` can tell whether anybody else holds it.
        self._staged = weakref.ref(staged)
        self._lock = threading.Lock()
        self._keepers = 0
        self.is_over = False
        self.was_given_back = False

    @property
    def segment(self) -> Segment:
        if self.buffer.segment is None:
            raise RuntimeError("the memory of this staged state dict was given back")
        return self.buffer.segment

    def holds(self, address: int) -> bool:
        return self.begin <= address < self.end_of_memory

    def keep(self) -> None:
        """Extend the lease until `release` was called as often as this."""
        with self._lock:
            self._keepers += 1

    def release(self) -> None:
        """Return the memory to the pool, unless others keep it. Idempotent."""
        with self._lock:
            self._keepers -= 1
            if self.is_over or self._keepers > 0:
                return
            self.is_over = self.was_given_back = True
        staged = self._staged()
        if staged is not None:
            # The next save overwrites its tensors, which would also keep memory alive.
            staged.clear()
        self._pool.release(self.buffer)

    def end(self) -> None:
        """End the lease for the stager. Memory that is still in use is left to its users."""
        with self._lock:
            if self.is_over or self._keepers > 0:
                return
            self.is_over = True
        if self.buffer.layout is not None and self.buffer.layout.is_held():
            self._pool.abandon(self.buffer)
        else:
            self._pool.release(self.buffer)


class Filling:
    """Staging memory while a state dict is being copied into it."""

    def __init__(
        self,
        pool: StagingPool,
        buffer: Buffer,
        state_dict: Mapping[str, Any],
        plan: Survey,
        layout: Layout,
    ) -> None:
        self.buffer = buffer
        self.plan = plan
        self.moves = layout.moves(plan)
        self._pool = pool
        self._state_dict = state_dict
        self._copies = layout.copies

    def staged(self) -> Staged:
        """The state dict in staging memory, with the values of now where they are no tensors.

        Tensors that were not copied yet may still be.
        """
        with torch.inference_mode(False), torch.no_grad():
            staged = Staged(rebuild(self._state_dict, self.plan, self._copies))
        self._pool.lend(self.buffer, staged)
        return staged

    def give_up(self) -> None:
        """Return the memory to the pool."""
        self._pool.release(self.buffer)


class LastLease:
    """The last lease of a stager, which ends with the stager at the latest."""

    lease: Lease | None = None

    def end(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.end()


class StagingPool:
    """The staging memory of a process. Thread-safe.

    A forked child starts with an empty pool, since the parent still uses its memory.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Buffer] = []
        self._busy: list[Buffer] = []
        self._lent: dict[int, Lease] = {}
        self._prewarming: list[threading.Event] = []

    def stage(
        self,
        state_dict: Mapping[str, Any],
        pinned: bool = False,
        non_blocking: bool = False,
        kept: Collection[int] = (),
    ) -> Staged:
        """Copy `state_dict` into staging memory, but for tensors whose ids are in `kept`."""
        non_blocking = non_blocking and torch.accelerator.is_available()
        filling = self.begin(state_dict, pinned, kept)
        try:
            copy_moves(filling.moves, non_blocking)
            if non_blocking:
                wait_for_devices(filling.plan.tensors)
            return filling.staged()
        except BaseException:
            filling.give_up()
            raise

    def begin(
        self, state_dict: Mapping[str, Any], pinned: bool = False, kept: Collection[int] = ()
    ) -> Filling:
        """Take staging memory for `state_dict`, without copying anything yet."""
        self._wait_for_prewarming()
        plan = survey(state_dict, kept)
        buffer = self._take(plan)
        try:
            # Tensors made in inference mode cannot be written to outside of it.
            with torch.inference_mode(False):
                layout = buffer.prepare(plan, pinned)
                return Filling(self, buffer, state_dict, plan, layout)
        except BaseException:
            self.release(buffer)
            raise

    def lend(self, buffer: Buffer, staged: Staged) -> None:
        """Lend a buffer to what was staged in it."""
        staged.lease = Lease(self, buffer, staged)
        with self._mine():
            self._lent[id(buffer)] = staged.lease

    def prewarm(self, state_dict: Mapping[str, Any], pinned: bool = False) -> None:
        """Allocate the memory for such a state dict ahead of the first save."""
        self.plan_prewarm(state_dict, pinned)()

    def plan_prewarm(
        self, state_dict: Mapping[str, Any], pinned: bool = False
    ) -> Callable[[], None]:
        """A function that does what `prewarm` does, to be called once, in any thread.

        What is staged until it returns waits for it, rather than take memory twice.
        """
        plan = survey(state_dict)
        buffer = self._take(plan)
        done = threading.Event()
        with self._mine():
            self._prewarming.append(done)

        def take() -> None:
            try:
                with torch.inference_mode(False):
                    buffer.prepare(plan, pinned)
            finally:
                self.release(buffer)
                with self._mine():
                    self._prewarming.remove(done)
                done.set()

        return take

    def _wait_for_prewarming(self) -> None:
        with self._mine():
            prewarming = list(self._prewarming)
        for each in prewarming:
            each.wait()

    def leases_of(self, state_dict: Mapping[str, Any]) -> list[Lease]:
        """The leases of memory that tensors in `state_dict` use, also if it is another dict."""
        with self._mine():
            lent = list(self._lent.values())
        addresses = addresses_in(state_dict) if lent else []
        return [lease for lease in lent if any(map(lease.holds, addresses))]

    def release(self, buffer: Buffer) -> None:
        """Return a buffer to the pool."""
        with self._mine():
            self._lent.pop(id(buffer), None)
            if buffer in self._busy:
                self._busy.remove(buffer)
                self._idle.append(buffer)

    def abandon(self, buffer: Buffer) -> None:
        """Leave a buffer to its users. Its memory is freed with the last of them."""
        with self._mine():
            self._lent.pop(id(buffer), None)
            if buffer in self._busy:
                self._busy.remove(buffer)
        buffer.free()

    def close(self) -> None:
        """Free the memory that no save uses."""
        with self._mine():
            for buffer in self._idle:
                buffer.free()
            self._idle.clear()

    @property
    def nbytes(self) -> int:
        """The size of all memory of the pool."""
        return sum(segment.nbytes for segment in self._segments())

    def segment_numbers(self) -> frozenset[int]:
        """The numbers of all segments of the pool."""
        return frozenset(segment.number for segment in self._segments())

    def _segments(self) -> list[Segment]:
        with self._mine():
            segments = [buffer.segment for buffer in (*self._idle, *self._busy)]
        return [segment for segment in segments if segment is not None]

    def _mine(self) -> threading.Lock:
        """The lock of this process."""
        if self._pid != os.getpid():
            self.__init__()  # type: ignore[misc]
        return self._lock

    def _take(self, plan: Survey) -> Buffer:
        with self._mine():
            buffer = _best(self._idle, plan) or Buffer()
            if buffer in self._idle:
                self._idle.remove(buffer)
            self._busy.append(buffer)
            return buffer


def _best(buffers: Sequence[Buffer], plan: Survey) -> Buffer | None:
    """The buffer that has to change least: one of the same form, or else large enough."""
    for buffer in buffers:
        if buffer.layout is not None and buffer.layout.form == plan.form:
            return buffer
    nbytes = Layout(plan).nbytes if buffers else 0
    sizes = [0 if buffer.segment is None else buffer.segment.nbytes for buffer in buffers]
    enough = [place for place, size in enumerate(sizes) if size >= nbytes]
    if enough:
        return buffers[min(enough, key=sizes.__getitem__)]
    # None is large enough: let the largest grow.
    return buffers[sizes.index(max(sizes))] if buffers else None


def wait_for_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for what devices still do (tested with stand-ins only: no device was available)."""
    for device in {tensor.device for tensor in tensors}:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.current_stream(device).synchronize()


staging_pool = ProcessWide(StagingPool, StagingPool.close)
"""The pool of this process."""

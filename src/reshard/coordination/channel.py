"""The channel between the ranks of one operation.

It runs over the rendezvous store. No collective is ever issued, on no group: whatever
the training thread does meanwhile, the two cannot get in each other's way. Every wait is
bounded, and every exchange carries either results or the reasons why there are none.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch.distributed as dist

from reshard.api import CheckpointException, _interrupt_behind
from reshard.coordination.exchange import Exchange
from reshard.coordination.failures import fail_alone, rendezvous_lost
from reshard.coordination.pairing import UNKNOWN, Intent
from reshard.coordination.rendezvous import GroupStore, Rendezvous, RendezvousThread
from reshard.coordination.store_channel import (
    DEFAULT_TIMEOUT_SECONDS,
    StoreChannel,
    announce_process,
)
from reshard.tensors.groups import default_group, default_store

M = TypeVar("M")
A = TypeVar("A")


class Channel(Protocol):
    """What an operation needs of the other ranks."""

    rank: int
    world_size: int
    is_coordinator: bool
    outcome_known: bool
    """False on a rank that left without an answer while the coordinator may have committed."""

    def exchange(
        self,
        kind: Exchange[M, A],
        give: Callable[[], M],
        decide: Callable[[Sequence[M]], Sequence[A]],
    ) -> A:
        """Each rank gives, the coordinator decides, each rank gets its answer.

        If anybody fails, everybody raises one error that says who and why: of the class that
        all failures have, or else a `CheckpointException`.
        """

    def do_together(self, phase: str, work: Callable[[], object]) -> None:
        """Each rank works; nobody goes on before all are done, and nobody if one has failed."""

    def seal(self) -> None:
        """Called by the coordinator right before it commits; raises if a rank has left.

        Once it returns, a rank that leaves does not delete what may be committed.
        """

    def __enter__(self) -> Channel: ...
    def __exit__(self, *error: object) -> None: ...


class SoloChannel:
    """One process on its own."""

    rank = 0
    world_size = 1
    is_coordinator = True
    outcome_known = True

    def exchange(
        self,
        kind: Exchange[M, A],
        give: Callable[[], M],
        decide: Callable[[Sequence[M]], Sequence[A]],
    ) -> A:
        return _alone(lambda: decide([give()])[0])

    def do_together(self, phase: str, work: Callable[[], object]) -> None:
        _alone(work)

    def seal(self) -> None:
        pass

    def __enter__(self) -> SoloChannel:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _alone(work: Callable[[], A]) -> A:
    handled = sys.exc_info()[1]
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - all are raised
        interrupt = _interrupt_behind(error, handled)
        if interrupt is not None:
            raise interrupt from None
        # Not from `error`: it may be that itself, and the cause is set where there is one.
        raise fail_alone(error)  # noqa: B904


@contextlib.contextmanager
def failing_together(channel: Channel, phase: str) -> Iterator[None]:
    """Work of one rank between two exchanges: if it fails, all ranks fail in their next one."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - raised below, by all ranks
        reason = error
    else:
        return

    def fail() -> None:
        raise reason

    channel.do_together(phase, fail)


@contextlib.contextmanager
def checking_arguments(channel: Channel) -> Iterator[None]:
    """Work that comes before a rank takes part: if it fails, the other ranks hear why.

    Here it is raised as it is: what is wrong is what the caller passed.
    """
    try:
        yield
    except BaseException as error:
        raised_at = error.__traceback__
        with (
            channel,
            contextlib.suppress(CheckpointException),
            failing_together(channel, "open"),
        ):
            raise
        error.with_traceback(raised_at)
        raise


def open_channel(
    process_group: dist.ProcessGroup | None,
    use_dist: bool,
    coordinator: int = 0,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    intent: Intent = UNKNOWN,
) -> Channel:
    """A channel between the ranks of `process_group`, for one operation.

    Not a collective, but every rank of the group must open its channels in the same
    order. `intent` is what the operation is; ranks that are at different ones are told.
    `coordinator` is a rank within the group.
    """
    if not use_dist:
        return SoloChannel()
    group = process_group or default_group()
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process group that it was called with: only "
            "the ranks of the group call save and load"
        )
    if world_size == 1:
        return SoloChannel()
    origin = default_store()
    # Numbered per group, since operations on different groups have no common order; and by
    # the store, so that the count goes on where the group is made again over the same one.
    name = f"reshard/{group.group_name}"
    thread = RendezvousThread(GroupStore(origin), timeout_seconds)

    def draw_number(store: Rendezvous) -> int:
        # It stays: it tells of this rank when it dies before the operation begins, or after.
        announce_process(store, name, rank, intent.text)
        return store.add(f"{name}/opened/{rank}", 1)

    try:
        number = thread.run(draw_number)
    except RuntimeError as error:
        raise rendezvous_lost(error, coordinator, "open") from None
    return StoreChannel(
        thread=thread,
        group=name,
        rank=rank,
        world_size=world_size,
        coordinator=coordinator,
        timeout_seconds=timeout_seconds,
        number=number,
        intent=intent,
        origin=origin,
    )

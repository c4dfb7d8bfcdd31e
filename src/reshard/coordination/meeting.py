"""How the worker processes of all ranks find each other for one operation.

The ranks themselves agree on a name through their rendezvous store; their workers then
connect to the same store on their own and meet under that name. Nothing is waited for.
"""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from reshard.api import CheckpointException
from reshard.coordination.channel import Channel, SoloChannel, StoreChannel
from reshard.coordination.liveness import make_card

__all__ = ["Meeting", "call_meeting"]


@dataclass(frozen=True)
class Meeting:
    """One operation of workers. Can be sent to a worker; `open` is for there."""

    address: tuple[str, str, int] | None
    trainers: str
    name: str
    rank: int
    world_size: int
    coordinator: int
    timeout_seconds: float

    def open(self) -> Channel:
        """The channel to the other workers."""
        if self.address is None:
            return SoloChannel()
        return StoreChannel(
            store=_connect(self.address),
            # Workers come and go: each operation has cards of its own. Until a worker comes,
            # the card of its trainer tells whether it still can.
            group=self.name,
            standing_cards=self.trainers,
            name=self.name,
            rank=self.rank,
            world_size=self.world_size,
            coordinator=self.coordinator,
            timeout_seconds=self.timeout_seconds,
        )

    def excuse(self, channel: Channel, reason: str) -> None:
        """Tell the others that the worker of this rank will not come, or not come back.

        `channel` is what the meeting was called with.
        """
        if not isinstance(channel, StoreChannel):
            return
        with contextlib.suppress(RuntimeError):
            # If the store is gone there is nobody left to tell.
            _without_prefix(channel.store).set(f"{self.name}/gone/{self.rank}", reason)


def call_meeting(channel: Channel) -> Meeting:
    """A meeting of workers in place of `channel`, which is then not used."""
    if not isinstance(channel, StoreChannel):
        return Meeting(None, "", "", 0, 1, 0, 0.0)
    store = _without_prefix(channel.store)
    address = _address_of(store)
    # A store may outlive the ranks, and then sees the same names again after a restart.
    token = channel.store.compare_set(f"{channel.group}/workers", "", uuid.uuid4().hex).decode()
    trainers = f"reshard-workers/{token}"
    # It stays, like those of ranks that save by themselves.
    store.set(f"{trainers}/card/{channel.rank}", make_card())
    return Meeting(
        address=address,
        trainers=trainers,
        name=f"{trainers}/{channel.name.rpartition('/')[2]}",
        rank=channel.rank,
        world_size=channel.world_size,
        coordinator=channel.coordinator,
        timeout_seconds=channel.timeout_seconds,
    )


def _without_prefix(store: Any) -> Any:
    """The store as a worker sees it, which does not know the prefix of the trainers."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _address_of(store: Any) -> tuple[str, str, int]:
    if isinstance(store, TCPStore):
        return "tcp", store.host, store.port
    if isinstance(store, FileStore):
        return "file", store.path, -1  # type: ignore[attr-defined]
    raise CheckpointException(
        f"workers cannot reach the rendezvous store of this job, a {type(store).__name__}. Use "
        "AsyncCheckpointerType.THREAD, or set the ranks up with a TCPStore or FileStore"
    )


@cache
def _connect(address: tuple[str, str, int]) -> Any:
    """A connection that never waits, so all operations of a process may share it."""
    kind, place, number = address
    if kind == "tcp":
        return TCPStore(place, number, is_master=False, wait_for_workers=False)
    return FileStore(place, number)

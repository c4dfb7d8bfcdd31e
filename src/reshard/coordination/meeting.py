"""How the worker processes of all ranks find each other for one operation.

The ranks themselves meet on their channel, whose coordinator names the meeting; their
workers then connect to the same store on their own and meet under that name.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from reshard.api import CheckpointException
from reshard.coordination.channel import Channel, SoloChannel
from reshard.coordination.exchange import TextExchange
from reshard.coordination.failures import rendezvous_lost
from reshard.coordination.liveness import describe_process
from reshard.coordination.rendezvous import GroupStore, Rendezvous, RendezvousThread
from reshard.coordination.store_channel import StoreChannel, announce_departure
from reshard.engine.process_wide import ProcessWide


@dataclass(frozen=True)
class _Address:
    """Where a store is. Can be sent to another process, which connects on its own."""

    kind: str
    place: str
    port: int

    def connect(self, in_front: bool) -> Any:
        return _connect(self)

    def forget(self) -> None:
        _connections().clear()


@dataclass(frozen=True)
class Meeting:
    """One operation of workers. Can be sent to a worker; `open` is for there."""

    address: _Address | None = None
    trainers: str = ""
    name: str = ""
    rank: int = 0
    world_size: int = 1
    coordinator: int = 0
    timeout_seconds: float = 0.0

    def open(self) -> Channel:
        """The channel to the other workers."""
        if self.address is None:
            return SoloChannel()
        return StoreChannel(
            thread=RendezvousThread(self.address, self.timeout_seconds),
            # Workers come and go: each operation has descriptions of its own. Until a worker comes,
            # that of its trainer tells whether it still can.
            group=self.name,
            trainers=self.trainers,
            rank=self.rank,
            world_size=self.world_size,
            coordinator=self.coordinator,
            timeout_seconds=self.timeout_seconds,
        )

    def cancel(self, channel: Channel, reason: str) -> None:
        """Tell the others that the worker of this rank will not come, or not come back.

        `channel` is what the meeting was called on.
        """
        if not isinstance(channel, StoreChannel):
            return
        # If the store is gone there is nobody left to tell.
        with contextlib.suppress(CheckpointException):
            _run_bare(channel, lambda s: announce_departure(s, self.name, self.rank, reason))


def call_meeting(channel: Channel) -> Meeting:
    """Have the ranks of `channel` agree on a meeting of their workers. Collective."""
    if not isinstance(channel, StoreChannel):
        return Meeting()
    address = _address_of(channel.origin)
    name = channel.exchange(TextExchange("meet"), str, _name_meeting)
    trainers, _, _ = name.rpartition("/")
    process = describe_process().encode()
    # It stays, like those of ranks that save by themselves.
    _run_bare(channel, lambda store: store.put({f"{trainers}/process/{channel.rank}": process}))
    return Meeting(
        address=address,
        trainers=trainers,
        name=name,
        rank=channel.rank,
        world_size=channel.world_size,
        coordinator=channel.coordinator,
        timeout_seconds=channel.timeout_seconds,
    )


def check_meeting(channel: Channel) -> None:
    """Raise if workers could not meet."""
    if isinstance(channel, StoreChannel):
        _address_of(channel.origin)


def rendezvous_host(channel: Channel) -> str | None:
    """The machine that serves the rendezvous store of a job, as the ranks name it."""
    store = _without_prefix(getattr(channel, "origin", None))
    return str(store.host) if isinstance(store, TCPStore) else None


def _name_meeting(messages: Sequence[str]) -> list[str]:
    # A store may outlive the ranks, and then sees the same numbers again after a restart.
    name = f"reshard-workers/{_process_token()}/{uuid.uuid4().hex}"
    return [name] * len(messages)


_process_token = ProcessWide(lambda: uuid.uuid4().hex)
"""Names this process, as long as it lives."""


def _run_bare(channel: StoreChannel, work: Callable[[Rendezvous], None]) -> None:
    """Call the store as a worker sees it."""
    thread = RendezvousThread(_BareStore(channel.origin), channel.timeout_seconds)
    try:
        thread.run(work)
    except RuntimeError as error:
        raise rendezvous_lost(error, channel.coordinator, "meet") from None
    finally:
        thread.stop()


class _BareStore(GroupStore):
    """The store without the prefix of the trainers, which workers do not know."""

    def connect(self, in_front: bool) -> Any:
        return _without_prefix(super().connect(in_front))


def _without_prefix(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _address_of(store: Any) -> _Address:
    store = _without_prefix(store)
    if isinstance(store, TCPStore):
        return _Address("tcp", store.host, store.port)
    if isinstance(store, FileStore):
        return _Address("file", store.path, -1)  # type: ignore[attr-defined]
    raise CheckpointException(
        f"workers cannot reach the rendezvous store of this job, a {type(store).__name__}. Use "
        "AsyncCheckpointerType.THREAD, or set the ranks up with a TCPStore or FileStore"
    )


_connections: ProcessWide[dict[_Address, Any]] = ProcessWide(dict)


def _connect(address: _Address) -> Any:
    """A connection on which nobody waits, so all operations of a process may share it."""
    if address not in _connections():
        if address.kind == "tcp":
            store: Any = TCPStore(
                address.place, address.port, is_master=False, wait_for_workers=False
            )
        else:
            store = FileStore(address.place, address.port)
        _connections()[address] = store
    return _connections()[address]

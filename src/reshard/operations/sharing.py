"""Loads whose ranks read for each other.

Ranks agree to do so, say what they want, learn from the coordinator who reads what, and connect
to each other. Where any of that cannot be done, each rank reads for itself.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, NamedTuple, get_args

from reshard.api import CheckpointException
from reshard.checkpoint.shared_reads import SharedRead
from reshard.coordination.agreement import agree_on_checkpoint
from reshard.coordination.channel import Channel
from reshard.coordination.exchange import Exchange, TextExchange
from reshard.coordination.peers import Listener, PeerAddress, choose_host, close_all
from reshard.engine.sharing import PeerLost
from reshard.planning.packing import pack_array, pack_compressed, unpack_array, unpack_compressed
from reshard.planning.sharing import SharedReads, Wants, share_reads
from reshard.plans.traits import can_share_reads
from reshard.stores.owners import machine

logger = logging.getLogger(__name__)

ReplicatedReads = Literal["auto", "direct", "share"]
REPLICATED_READS: tuple[str, ...] = get_args(ReplicatedReads)
_SEVERAL_MACHINES, _ONE_MACHINE = "several machines", "one machine"


def wants_to_share(mode: str, reader: Any, planner: Any, channel: Channel) -> bool:
    """Whether this rank would read for others, and have others read for it."""
    if mode == "direct" or channel.world_size == 1:
        return False
    if not can_share_reads(reader, planner):
        if mode == "share":
            logger.info(
                "each rank reads for itself: %s and %s cannot read for other ranks",
                type(reader).__name__,
                type(planner).__name__,
            )
        return False
    return mode == "share" or reader.open_store().remote is not None


def announce(shares: bool, opened: str) -> str:
    """What a rank says when it has opened the checkpoint."""
    return f"{(machine() or '?') if shares else ''}\n{opened}"


def agree(messages: Sequence[str]) -> Sequence[str]:
    """Check that all ranks have opened the same save; whether, and where, they share reads."""
    machines, opened = zip(*(message.split("\n", 1) for message in messages), strict=True)
    agree_on_checkpoint(opened)
    answer = ""
    if all(machines):
        is_one = len({*machines}) == 1 and "?" not in machines
        answer = _ONE_MACHINE if is_one else _SEVERAL_MACHINES
    elif any(machines):
        logger.info("each rank reads for itself: not all ranks want to share what they read")
    return [answer] * len(messages)


def read_together(
    channel: Channel,
    agreed: str,
    open_read: Callable[[], AbstractContextManager[SharedRead]],
    done: Callable[[SharedRead], None],
) -> None:
    """Read what all ranks want, each byte once. `agreed` is what ranks were answered.

    `done` is called once this rank has everything. Collective.
    """
    with ExitStack() as stack:
        reading = _Reading(channel, agreed == _ONE_MACHINE, open_read, stack)
        answer = channel.exchange(_SharingExchange(), reading.offer, reading.decide)
        shared, links = answer.shared, dict[int, socket.socket]()
        if shared is not None:
            problem = channel.exchange(
                TextExchange("connect"),
                lambda: reading.connect(answer.peers, links),
                _first_problem,
            )
            if problem:
                logger.info("each rank reads for itself: %s", problem)
                shared = None

        def read() -> str:
            lost = reading.carry_out(shared, links)
            if not lost:
                done(reading.read)
            return lost

        channel.exchange(TextExchange("read"), read, _refuse_lost)


class _Offer(NamedTuple):
    """What a rank wants, of which checkpoint, and where it can be reached."""

    address: PeerAddress | None
    fingerprint: bytes
    wants: Wants


class _Answer(NamedTuple):
    """What a rank reads; None if nothing is shared. And the ranks that it has to do with."""

    shared: SharedReads | None
    peers: dict[int, PeerAddress]


class _Reading:
    """The read of one rank."""

    read: SharedRead
    listener: Listener

    def __init__(
        self,
        channel: Channel,
        on_one_machine: bool,
        open_read: Callable[[], AbstractContextManager[SharedRead]],
        stack: ExitStack,
    ) -> None:
        self._channel = channel
        self._on_one_machine = on_one_machine
        self._open_read = open_read
        self._stack = stack

    def offer(self) -> _Offer:
        self.read = self._stack.enter_context(self._open_read())
        address = None
        try:
            self.listener = Listener(choose_host(self._channel, self._on_one_machine))
        except OSError as error:
            logger.info("this rank cannot listen for others: %s", error)
        else:
            self._stack.callback(self.listener.close)
            address = self.listener.address
        return _Offer(address, self.read.fingerprint, self.read.wants)

    def decide(self, offers: Sequence[_Offer]) -> list[_Answer]:
        """Who reads what. On the coordinator."""
        nothing = [_Answer(None, {})] * len(offers)
        addresses = {rank: o.address for rank, o in enumerate(offers) if o.address is not None}
        if len(addresses) < len(offers):
            logger.info("each rank reads for itself: not all ranks can be connected to")
            return nothing
        if len({offer.fingerprint for offer in offers}) > 1:
            logger.info("each rank reads for itself: ranks see different chunks")
            return nothing
        shared = share_reads([offer.wants for offer in offers], self.read.chunks())
        if not any(len(each.part_ranks) for each in shared):
            return nothing
        return [
            _Answer(each, {peer: addresses[peer] for peer in each.peers(rank)})
            for rank, each in enumerate(shared)
        ]

    def connect(self, peers: dict[int, PeerAddress], links: dict[int, socket.socket]) -> str:
        """Connect to other ranks; what went wrong, if anything."""
        silence_seconds = getattr(self._channel, "timeout_seconds", 0.0)
        try:
            links |= self.listener.connect(self._channel.rank, peers, silence_seconds)
        except OSError as error:
            return f"rank {self._channel.rank} could not connect to all others ({error})"
        self._stack.callback(close_all, links)
        return ""

    def carry_out(self, shared: SharedReads | None, links: dict[int, socket.socket]) -> str:
        """Read; which connection broke, if one did."""
        if shared is None:
            self.read.read_directly()
            return ""
        try:
            self.read.read(self._channel.rank, shared, links)
        except PeerLost as error:
            return f"rank {self._channel.rank} lost the connection to rank {error}"
        finally:
            # At once: whoever still waits for this rank would wait for nothing.
            close_all(links)
        return ""


def _first_problem(problems: Sequence[str]) -> list[str]:
    return [next(filter(None, problems), "")] * len(problems)


def _refuse_lost(messages: Sequence[str]) -> Sequence[str]:
    """Fail if a connection broke and no rank says why: then it failed by itself."""
    lost = [*filter(None, messages)]
    if lost:
        raise CheckpointException(
            f"ranks that share what they read lost each other: {'; '.join(lost[:4])}. Load again, "
            "or load with replicated_reads='direct'"
        )
    return messages


class _SharingExchange(Exchange[_Offer, _Answer]):
    phase = "share"

    def encode(self, message: _Offer) -> bytes:
        return pack_compressed((message.address, message.fingerprint, *_pack(message.wants)))

    def decode(self, messages: Sequence[bytes]) -> list[_Offer]:
        offers = []
        for message in messages:
            address, fingerprint, *columns = unpack_compressed(message)
            offers.append(
                _Offer(address and PeerAddress(*address), fingerprint, Wants(*_unpack(columns)))
            )
        return offers

    def encode_answers(self, answers: Sequence[_Answer], messages: Sequence[_Offer]) -> list[bytes]:
        return [
            pack_compressed((a.shared and _pack(a.shared), [*a.peers.items()])) for a in answers
        ]

    def decode_answer(self, answer: bytes, sent: _Offer) -> _Answer:
        columns, peers = unpack_compressed(answer)
        shared = None if columns is None else SharedReads(*_unpack(columns))
        return _Answer(shared, {rank: PeerAddress(*address) for rank, address in peers})


def _pack(columns: Sequence[Any]) -> list[Any]:
    return [(column.ndim, len(column), pack_array(column)) for column in columns]


def _unpack(columns: Sequence[Any]) -> list[Any]:
    return [unpack_array(packed, rows, one_dimensional=dims == 1) for dims, rows, packed in columns]

"""The channel between the ranks of one operation.

It runs over the rendezvous store, through a connection of its own. No collective is ever
issued, on no group: whatever the training thread does meanwhile, the two cannot get in
each other's way. Every wait is bounded, and every exchange carries either results or the
reasons why there are none.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from reshard.api import (
    WRAPPED_EXCEPTION,
    CheckpointException,
    RankLostError,
    _portable_exception,
    _wrap_exception,
)
from reshard.coordination.liveness import Pulse, Watch, make_card

__all__ = [
    "Channel",
    "SoloChannel",
    "StoreChannel",
    "agree",
    "decode_error",
    "encode_error",
    "open_channel",
    "telling_others",
]

DEFAULT_TIMEOUT_SECONDS = 30 * 60.0
_LOOK_AROUND_SECONDS = 1.0
_SHORTEST_PAUSE_SECONDS = 0.0002
_LONGEST_PAUSE_SECONDS = 0.002
_LAST_ANSWER_SECONDS = 5.0
_ANSWER_GRACE_SECONDS = 5.0
_PART_BYTES = 4 << 20
_VALUE, _FAILURE = b"\0", b"\1"


class Channel(Protocol):
    """What an operation needs of the other ranks."""

    rank: int
    world_size: int
    is_coordinator: bool

    def gather_scatter(
        self,
        phase: str,
        give: Callable[[], bytes],
        decide: Callable[[Sequence[bytes]], Sequence[bytes]],
    ) -> bytes:
        """Each rank gives, the coordinator decides, each rank gets its answer.

        If anybody fails, everybody raises one `CheckpointException` that says who.
        """

    def __enter__(self) -> Channel: ...
    def __exit__(self, *error: object) -> None: ...


class SoloChannel:
    """One process on its own."""

    rank = 0
    world_size = 1
    is_coordinator = True

    def gather_scatter(
        self,
        phase: str,
        give: Callable[[], bytes],
        decide: Callable[[Sequence[bytes]], Sequence[bytes]],
    ) -> bytes:
        try:
            return decide([give()])[0]
        except Exception as error:
            raise CheckpointException(phase, {0: _wrap_exception(error)}) from error

    def __enter__(self) -> SoloChannel:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@dataclass
class StoreChannel:
    """Ranks of a process group that talk through its rendezvous store.

    `name` must be the same on all ranks of one operation and new for each operation;
    `group` is what all operations of these ranks have in common.
    """

    store: Any
    group: str
    name: str
    rank: int
    world_size: int
    coordinator: int = 0
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    standing_cards: str = ""
    """Where to look for the card of a rank that has none in `group` yet."""
    origin: Any = None
    """What must not go away while the channel is used: it may be the store's server."""

    def __post_init__(self) -> None:
        self.is_coordinator = self.rank == self.coordinator
        self._phase = 0
        self._watch = Watch(self._card_of, self._pulse_of)
        self._pulse = Pulse(self._beat)
        self._interrupt: BaseException | None = None

    def __enter__(self) -> StoreChannel:
        try:
            self._beat("0")
            # The card stays: it tells of this rank when it dies before the next operation.
            self.store.set(f"{self.group}/card/{self.rank}", make_card())
        except RuntimeError as error:
            raise _store_lost(error, self.coordinator, "open") from error
        self._pulse.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._pulse.__exit__(*error)
        kind = error[0]
        with contextlib.suppress(RuntimeError):
            # If the store is gone there is nobody left to tell.
            if isinstance(kind, type):
                self.store.set(f"{self.name}/gone/{self.rank}", kind.__name__)
            self.store.delete_key(f"{self.name}/pulse/{self.rank}")
            if self.group == self.name:
                self.store.delete_key(f"{self.group}/card/{self.rank}")

    def gather_scatter(
        self,
        phase: str,
        give: Callable[[], bytes],
        decide: Callable[[Sequence[bytes]], Sequence[bytes]],
    ) -> bytes:
        self._phase += 1
        prefix = f"{self.name}/{self._phase}"
        message, self._interrupt = _attempt(give)
        try:
            answer = self._exchange(phase, prefix, message, decide)
        except RuntimeError as error:
            raise _store_lost(error, self.coordinator, phase) from error
        if self._interrupt is not None:
            raise self._interrupt
        if answer[:1] == _FAILURE:
            raise CheckpointException(phase, _decode_failures(answer[1:]))
        return answer[1:]

    def _exchange(
        self,
        phase: str,
        prefix: str,
        message: bytes,
        decide: Callable[[Sequence[bytes]], Sequence[bytes]],
    ) -> bytes:
        if self.is_coordinator:
            answers = self._decide(phase, prefix, message, decide)
            keys = {
                rank: f"{prefix}/answer/{rank}"
                for rank in range(self.world_size)
                if rank != self.rank
            }
            for rank, key in keys.items():
                self._put(key, answers[rank])
            _last_answers.remember(self.store, self.origin, [*keys.values()])
            return answers[self.rank]
        self._put(f"{prefix}/message/{self.rank}", message)
        if self._interrupt is not None:
            return message
        key = f"{prefix}/answer/{self.rank}"
        # Longer than the coordinator waits: if it gives somebody up, it will say whom.
        waiting = self._wait_for({self.coordinator: key}, phase, _ANSWER_GRACE_SECONDS)
        for lost in waiting.values():
            return _FAILURE + pickle.dumps({self.coordinator: encode_error(lost)})
        return self._take(key)

    def _decide(
        self,
        phase: str,
        prefix: str,
        own: bytes,
        decide: Callable[[Sequence[bytes]], Sequence[bytes]],
    ) -> list[bytes]:
        others = {
            rank: f"{prefix}/message/{rank}" for rank in range(self.world_size) if rank != self.rank
        }
        lost = self._wait_for(others, phase)
        failures = {rank: encode_error(error) for rank, error in lost.items()}
        messages: list[bytes] = []
        for rank in range(self.world_size):
            if rank in lost:
                continue
            message = own if rank == self.rank else self._take(others[rank])
            if message[:1] == _FAILURE:
                failures[rank] = message[1:]
            messages.append(message[1:])
        if not failures:
            result, self._interrupt = _attempt(lambda: pickle.dumps(list(decide(messages))))
            if self._interrupt is None and result[:1] == _VALUE:
                return [_VALUE + answer for answer in pickle.loads(result[1:])]
            failures[self.rank] = result[1:]
        return [_FAILURE + pickle.dumps(failures)] * self.world_size

    def _wait_for(
        self, keys: Mapping[int, str], phase: str, grace: float = 0.0
    ) -> dict[int, RankLostError]:
        """Wait until each rank has left its key, or will not; which ranks are lost."""
        began = time.monotonic()
        give_up = began + (self.timeout_seconds or math.inf) + grace
        look_around = began + _LOOK_AROUND_SECONDS
        waiting, lost = dict(keys), dict[int, RankLostError]()
        pause = _SHORTEST_PAUSE_SECONDS
        # Polling, since the store's own wait warns on stderr whenever its time is up.
        while waiting:
            if self.store.check(list(waiting.values())):
                break
            now = time.monotonic()
            if now >= look_around:
                waiting = {r: k for r, k in waiting.items() if not self.store.check([k])}
                lost |= self._find_lost(list(waiting), phase, now > give_up)
                waiting = {rank: key for rank, key in waiting.items() if rank not in lost}
                look_around = now + _LOOK_AROUND_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, max(_LONGEST_PAUSE_SECONDS, self.world_size / 10_000))
        return lost

    def _find_lost(
        self, ranks: Sequence[int], phase: str, out_of_time: bool
    ) -> dict[int, RankLostError]:
        lost = {}
        for rank in ranks:
            gone = self._read(f"{self.name}/gone/{rank}")
            reason = f"it left with {gone}" if gone else self._watch.lost(rank)
            if reason is None and out_of_time:
                reason = f"it did not answer within {self.timeout_seconds:.0f} s"
            if reason is not None:
                lost[rank] = RankLostError(f"lost rank {rank} in phase {phase!r}: {reason}")
        return lost

    def _put(self, key: str, message: bytes) -> None:
        """Leave a message. The store takes values of a few megabytes, so it may be cut."""
        first, *rest = _parts(message)
        for number, part in enumerate(rest):
            self.store.set(f"{key}/{number}", part)
        self.store.set(key, len(rest).to_bytes(4, "little") + first)

    def _take(self, key: str) -> bytes:
        """A message that is there, which is then gone."""
        head = bytes(self.store.get(key))
        keys = [f"{key}/{number}" for number in range(int.from_bytes(head[:4], "little"))]
        message = b"".join([head[4:], *(bytes(self.store.get(part)) for part in keys)])
        for used in [key, *keys]:
            self.store.delete_key(used)
        return message

    def _beat(self, beat: str) -> None:
        self.store.set(f"{self.name}/pulse/{self.rank}", beat)

    def _card_of(self, rank: int) -> str:
        card = self._read(f"{self.group}/card/{rank}")
        if not card and self.standing_cards:
            card = self._read(f"{self.standing_cards}/card/{rank}")
        return card

    def _pulse_of(self, rank: int) -> str:
        return self._read(f"{self.name}/pulse/{rank}")

    def _read(self, key: str) -> str:
        return bytes(self.store.get(key)).decode() if self.store.check([key]) else ""


def _store_lost(error: Exception, coordinator: int, phase: str) -> CheckpointException:
    """The store is gone, and with it mostly the process that held it."""
    lost = RankLostError(f"lost the rendezvous store in phase {phase!r}: {error}")
    return CheckpointException(phase, {coordinator: _wrap_exception(lost)})


class _LastAnswers:
    """The answers that were given last, for the end of the process.

    The store may live in this very process: if it ended at once, ranks that have not
    fetched their answer yet would take a save for failed that was committed.
    """

    def __init__(self) -> None:
        self._answers: tuple[Any, Any, list[str]] | None = None

    def remember(self, store: Any, origin: Any, keys: list[str]) -> None:
        if self._answers is None:
            atexit.register(self.wait)
        self._answers = store, origin, keys

    def wait(self) -> None:
        """Give the others a moment to fetch their answers."""
        if self._answers is None:
            return
        store, _, keys = self._answers
        give_up = time.monotonic() + _LAST_ANSWER_SECONDS
        # Without the store there is nothing left to fetch.
        with contextlib.suppress(RuntimeError):
            while keys and time.monotonic() < give_up:
                keys = [key for key in keys if store.check([key])]
                time.sleep(_LONGEST_PAUSE_SECONDS)


_last_answers = _LastAnswers()


def _attempt(work: Callable[[], bytes]) -> tuple[bytes, BaseException | None]:
    """The result or the error of `work`, ready to be sent; and what must not be held back."""
    try:
        return _VALUE + work(), None
    except Exception as error:  # noqa: BLE001 - sent to all ranks, which raise it
        return _FAILURE + encode_error(error), None
    except BaseException as error:  # noqa: BLE001 - raised by the caller
        # An interrupt: the others are told, and then it goes its way.
        return _FAILURE + encode_error(error), error


def encode_error(error: BaseException) -> bytes:
    """An error ready to be sent; as text, if it cannot be sent as it is."""
    return pickle.dumps(_portable_exception(error))


def decode_error(data: bytes) -> WRAPPED_EXCEPTION:
    """What `encode_error` encoded, on another rank or in another process of this job."""
    error: WRAPPED_EXCEPTION = pickle.loads(data)
    return error


def _decode_failures(data: bytes) -> dict[int, WRAPPED_EXCEPTION]:
    return {rank: decode_error(error) for rank, error in pickle.loads(data).items()}


def _parts(message: bytes) -> list[bytes]:
    return [
        message[begin : begin + _PART_BYTES]
        for begin in range(0, max(1, len(message)), _PART_BYTES)
    ]


def agree(messages: Sequence[bytes]) -> Sequence[bytes]:
    """To decide that all ranks are about to do the same thing; messages are what that is."""
    intents = [message.decode() for message in messages]
    for rank, intent in enumerate(intents):
        if intent != intents[0]:
            raise ValueError(
                f"rank 0 is about to {intents[0]}, but rank {rank} to {intent}: all ranks must do "
                "the same, in the same order"
            )
    return messages


@contextlib.contextmanager
def telling_others(channel: Channel) -> Iterator[None]:
    """Work that comes before a rank takes part: if it fails, the other ranks hear why."""
    try:
        yield
    except Exception as error:
        reason = error

        def fail() -> bytes:
            raise reason

        with channel, contextlib.suppress(CheckpointException):
            channel.gather_scatter("open", fail, lambda messages: messages)
        raise


def open_channel(
    process_group: dist.ProcessGroup | None,
    use_dist: bool,
    coordinator: int = 0,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Channel:
    """A channel between the ranks of `process_group`, for one operation.

    Not a collective, but every rank of the group must open its channels in the same
    order. `coordinator` is a rank within the group.
    """
    if not use_dist:
        return SoloChannel()
    group = process_group or dist.distributed_c10d._get_default_group()
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process group that it was called with: only "
            "the ranks of the group call save and load"
        )
    if world_size == 1:
        return SoloChannel()
    origin = dist.distributed_c10d._get_default_store()
    # Numbered per group, since operations on different groups have no common order; and by
    # the store, so that the count begins anew with a new group.
    name = f"reshard/{group.group_name}"
    try:
        store = _connection(origin)
        number = store.add(f"{name}/opened/{rank}", 1)
    except RuntimeError as error:
        raise _store_lost(error, coordinator, "open") from error
    return StoreChannel(
        store=store,
        group=name,
        name=f"{name}/{number}",
        rank=rank,
        world_size=world_size,
        coordinator=coordinator,
        timeout_seconds=timeout_seconds,
        origin=origin,
    )


_connections: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _connection(store: Any) -> Any:
    """A connection to the store that is ours alone, made once for each store.

    Whoever waits on a connection keeps it busy, so that of the training loop is not used.
    Ours never waits, so operations may share it. Connecting anew for each operation would
    cost a name lookup in the one thread that serves all ranks.
    """
    connection = _connections.get(store)
    if connection is None:
        connection = _connections[store] = store.clone()
    return connection

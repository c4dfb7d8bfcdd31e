"""The channel of ranks that talk through their rendezvous store.

Each exchange is a message of every rank, a decision of the coordinator, and its answer.
Keys of an operation, below its name:

    {phase}/message/{rank}   what a rank sends; deleted by it when it has the answer
    {phase}/answer           the answer, or that each rank has one of its own
    {phase}/answer/{rank}    that; deleted by the rank
    pulse/{rank}             changes while the rank takes part
    gone/{rank}              why the rank left without an answer
    verdict                  "commit", or who left before that; whoever sets it first
    left                     how many ranks are through; the last one deletes what remains
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from reshard.api import CheckpointException, RankLostError, _wrap_exception
from reshard.coordination.error_wire import decode_failures, encode_error, encode_failures
from reshard.coordination.exchange import Exchange
from reshard.coordination.failures import join_failures, out_of_step, rank_lost, rendezvous_lost
from reshard.coordination.last_answers import last_answers
from reshard.coordination.liveness import Watch, describe_process, read_doing
from reshard.coordination.pairing import (
    PATIENCE,
    Arrival,
    Intent,
    disagreement,
    judge,
    moved,
    patience_after,
)
from reshard.coordination.rendezvous import Rendezvous, RendezvousThread
from reshard.engine.process_wide import ProcessWide

T = TypeVar("T")
M = TypeVar("M")
A = TypeVar("A")
Decide = Callable[[Sequence[bytes]], Sequence[bytes]]

DEFAULT_TIMEOUT_SECONDS = 30 * 60.0
_LOOK_AROUND_SECONDS = 1.0
_SHORTEST_PAUSE_SECONDS = 0.0002
_LONGEST_PAUSE_SECONDS = 0.002
_LEAVE_SECONDS = 5.0
_ANSWER_GRACE_SECONDS = 5.0
_BLOCK = 64
"""How many messages are asked for at once: the cost of asking for all grows with the ranks."""
_COMMIT = "commit"
_VALUE, _FAILURE, _EACH = range(3)


class _Answer(NamedTuple):
    kind: int
    body: bytes
    key: str = ""
    """Of a first answer: the intent that it is for."""
    seen: int = 0
    """Of one that fails: as in `Ruling`."""


class _Gathered(NamedTuple):
    messages: dict[int, bytes]
    arrivals: dict[int, Arrival]
    lost: dict[int, RankLostError]


@dataclass(eq=False)
class StoreChannel:
    """Ranks of a process group that talk through its rendezvous store, for one operation.

    An operation is named by its group and its number: how many operations of the group this
    rank has begun. Ranks that find each other at the same number with different intents sort that
    out: see `pairing`. Without an `intent`, `group` itself names the operation.
    """

    thread: RendezvousThread
    group: str
    rank: int
    world_size: int
    coordinator: int = 0
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    number: int = 0
    intent: Intent | None = None
    trainers: str = ""
    """Where trainers say which process they are: for a rank whose worker has not come yet."""
    origin: Any = None
    """What must not go away while the channel is used: it may be the store's server."""

    def __post_init__(self) -> None:
        self.is_coordinator = self.rank == self.coordinator
        self.outcome_known = True
        self._phase = 0
        self._passed = 0
        self._patience = PATIENCE
        self._beats = 0
        self._watch = Watch()
        self._interrupt: BaseException | None = None
        self._own_error: BaseException | None = None
        self._is_sealed = False
        self._was_told = False
        self._pending: tuple[str, int] | None = None
        self._answer: tuple[str, int] | None = None
        self._lost_ranks: set[int] = set()
        if self.intent is not None:
            with _numbering().lock:
                _numbering().unmet.add(self)

    @property
    def name(self) -> str:
        return self.group if self.intent is None else f"{self.group}/{self.number}"

    @property
    def _prefix(self) -> str:
        return f"{self.name}/{self._phase}"

    def __enter__(self) -> StoreChannel:
        self.thread.beat_with(self._beat)
        self.thread.post(self._show_up)
        return self

    def __exit__(self, *error: object) -> None:
        self._settle_number()
        self._own_error = None
        self.thread.beat_with(None)
        kind = error[0]
        left_early = isinstance(kind, type) and not self._was_told
        reason = kind.__name__ if isinstance(kind, type) else ""
        # If the store is gone there is nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self.thread.run(lambda store: self._leave(store, left_early, reason), _LEAVE_SECONDS)
        if self.is_coordinator and not self.thread.is_lost:
            expected = self.world_size - len(self._lost_ranks)
            last_answers().remember(self.thread, self.origin, f"{self.name}/left", expected)
        self.thread.stop()

    def gather_scatter(self, phase: str, give: Callable[[], bytes], decide: Decide) -> bytes:
        self._phase += 1
        own = self._attempt(give)
        while True:
            answer = self._exchange(phase, own, decide)
            if self._interrupt is not None:
                raise self._interrupt
            if self._phase > 1 or self.intent is None or self.intent.fits(answer.key):
                break
            # It is for another operation, which this rank skipped or the others did.
            self._passed = moved(self._passed, answer.seen)
            self._patience = patience_after(
                self._patience, self._passed, self.intent.key, answer.key
            )
            self._run(phase, self._move_on)
        self._settle_number()
        if answer.kind == _FAILURE:
            self._was_told = True
            failures = decode_failures(answer.body)
            raise join_failures(failures, phase, self.rank, self._own_error)
        if self.intent is not None:
            _numbering().behind.get(self.origin, set()).discard((self.group, self.rank))
        return answer.body

    def exchange(
        self,
        kind: Exchange[M, A],
        give: Callable[[], M],
        decide: Callable[[Sequence[M]], Sequence[A]],
    ) -> A:
        sent: list[M] = []

        def give_bytes() -> bytes:
            sent.append(give())
            return kind.encode(sent[0])

        def decide_bytes(data: Sequence[bytes]) -> list[bytes]:
            messages = kind.decode(data)
            return kind.encode_answers(decide(messages), messages)

        return kind.decode_answer(
            self.gather_scatter(kind.phase, give_bytes, decide_bytes), sent[0]
        )

    def do_together(self, phase: str, work: Callable[[], object]) -> None:
        def give() -> bytes:
            work()
            return b""

        self.gather_scatter(phase, give, lambda messages: messages)

    def seal(self) -> None:
        """Decide that the operation is committed, unless a rank has left it.

        For the coordinator, right before it commits. From here on a rank that gives up
        knows that it cannot know.
        """
        stands = self._run("commit", lambda store: store.claim(f"{self.name}/verdict", _COMMIT))
        if stands != _COMMIT:
            raise RankLostError(f"nothing was committed: {stands}")
        self._is_sealed = True

    def _exchange(self, phase: str, own: _Answer, decide: Decide) -> _Answer:
        if self.is_coordinator:
            return self._coordinate(phase, own, decide)
        self.outcome_known = False
        answer = self._run(phase, lambda store: self._ask(store, phase, own))
        if isinstance(answer, RankLostError):
            raise join_failures({self.coordinator: _wrap_exception(answer)}, phase)
        self.outcome_known = True
        return answer

    def _attempt(self, work: Callable[[], bytes]) -> _Answer:
        """The result or the error of `work`, ready to be sent."""
        self._interrupt = self._own_error = None
        try:
            return _Answer(_VALUE, work())
        except BaseException as error:  # noqa: BLE001 - sent to all ranks, which raise it
            self._own_error = error
            if not isinstance(error, Exception):
                # An interrupt: the others are told, and then it is raised.
                self._interrupt = error
            return _Answer(_FAILURE, encode_error(error))

    def _run(self, phase: str, work: Callable[[Rendezvous], T]) -> T:
        try:
            return self.thread.run(work)
        except RuntimeError as error:
            if self._is_sealed:
                self.outcome_known = False
            raise rendezvous_lost(error, self.coordinator, phase, self._is_sealed) from None

    # The side of every rank but the coordinator; in the thread of the store

    def _ask(self, store: Rendezvous, phase: str, own: _Answer) -> _Answer | RankLostError:
        while True:
            self._skip_what_is_over(store)
            number = self.number
            key = f"{self._prefix}/message/{self.rank}"
            message = self._first_message(store, own) if self._phase == 1 else _encode(own)
            self._pending = key, len(message)
            store.put({key: message})
            if self._interrupt is not None:
                # The coordinator has yet to read it.
                self._pending = None
                return own
            answer = self._wait_for_answer(store, phase, number)
            if answer is not None:
                return answer
            # An earlier operation of this rank was moved on, and this one with it.
            self._show_up(store)

    def _first_message(self, store: Rendezvous, own: _Answer) -> bytes:
        return msgspec.msgpack.encode((self._arrive(store), _encode(own)))

    def _arrive(self, store: Rendezvous) -> Arrival:
        if self.intent is None:
            return Arrival("", "", 0, 0)
        ticket = store.add(f"{self.group}/tickets", 1)
        key, text, settings = self.intent.key, self.intent.text, self.intent.settings
        return Arrival(key, text, ticket, self._passed, self._patience, settings)

    def _wait_for_answer(
        self, store: Rendezvous, phase: str, number: int
    ) -> _Answer | RankLostError | None:
        key = f"{self._prefix}/answer"
        began = time.monotonic()
        # Longer than the coordinator waits: if it gives somebody up, it will say whom.
        give_up = began + (self.timeout_seconds or math.inf) + _ANSWER_GRACE_SECONDS
        look_around = began + _LOOK_AROUND_SECONDS
        pause = max(_SHORTEST_PAUSE_SECONDS, self.world_size / 20_000)
        # Polling, since the store's own wait warns on stderr whenever its time is up, and
        # keeps the connection busy. Seldom, the more ranks there are: it is one server.
        if self.world_size > _BLOCK:
            store.pause(pause)
        while (value := store.look(key)) is None:
            if self.number != number:
                return None
            now = time.monotonic()
            if now >= look_around:
                lost = self._find_lost(store, [self.coordinator], phase, now > give_up)
                for error in lost.values():
                    return self._give_up(store, error)
                look_around = now + _LOOK_AROUND_SECONDS
            store.pause(pause)
            pause = min(2 * pause, self._longest_pause)
        self._answer = key, len(value)
        answer = _decode(value)
        if answer.kind == _EACH:
            own_key = f"{key}/{self.rank}"
            (own_value,) = store.get_all([own_key])
            store.delete_value(own_key, len(own_value))
            answer = _decode(own_value)
        self._withdraw(store)
        return answer

    @property
    def _longest_pause(self) -> float:
        return max(_LONGEST_PAUSE_SECONDS, self.world_size / 10_000)

    def _give_up(self, store: Rendezvous, error: RankLostError) -> RankLostError:
        """Leave before the answer came, unless the coordinator is committing already."""
        stands = store.claim(f"{self.name}/verdict", f"rank {self.rank} left: {error}")
        self.outcome_known = stands != _COMMIT
        if self.outcome_known:
            return error
        return RankLostError(
            f"the outcome is not known: {error}. It was committing the checkpoint by then; look "
            "at what is there before you rely on it, or on an older one"
        )

    def _withdraw(self, store: Rendezvous) -> None:
        """Delete the message that was sent last."""
        if self._pending is not None:
            store.delete_value(*self._pending)
            self._pending = None

    # The coordinator's side

    def _coordinate(self, phase: str, own: _Answer, decide: Decide) -> _Answer:
        key = self.intent.key if self.intent is not None else ""
        if self._interrupt is not None:
            # Nobody is waited for any more.
            return self._scatter_failures(phase, {self.rank: own.body}, key)
        gathered = self._run(phase, lambda store: self._gather(store, phase, own))
        failures = {rank: encode_error(error) for rank, error in gathered.lost.items()}
        self._lost_ranks |= set(failures)
        if not failures:
            ruling = judge(gathered.arrivals)
            if ruling is not None:
                errors = out_of_step(ruling, gathered.arrivals, self.coordinator)
                failures = {rank: encode_error(error) for rank, error in errors.items()}
                return self._scatter_failures(phase, failures, ruling.loses, ruling.seen)
        messages = {r: _decode(message) for r, message in sorted(gathered.messages.items())}
        failures |= {r: m.body for r, m in messages.items() if m.kind == _FAILURE}
        if not failures and (text := disagreement(gathered.arrivals)):
            failures = {self.rank: encode_error(CheckpointException(text))}
        if not failures:
            answers: list[bytes] = []

            def decide_for_all() -> bytes:
                answers[:] = decide([message.body for message in messages.values()])
                if len(answers) != self.world_size:
                    raise ValueError(f"{len(answers)} answers for {self.world_size} ranks")
                return b""

            outcome = self._attempt(decide_for_all)
            if outcome.kind == _VALUE:
                return self._scatter(phase, [_Answer(_VALUE, each, key) for each in answers])
            failures = {self.rank: outcome.body}
        return self._scatter_failures(phase, failures, key)

    def _scatter_failures(
        self, phase: str, failures: Mapping[int, bytes], key: str, seen: int = 0
    ) -> _Answer:
        self._was_told = True
        answer = _Answer(_FAILURE, encode_failures(failures), key, seen)
        return self._scatter(phase, [answer] * self.world_size)

    def _scatter(self, phase: str, answers: Sequence[_Answer]) -> _Answer:
        own, key = answers[self.rank], f"{self._prefix}/answer"
        if all(answer is own or answer == own for answer in answers):
            # One for all, which stays until all have it.
            values = {key: _encode(own)}
        else:
            values = {
                f"{key}/{rank}": _encode(answer)
                for rank, answer in enumerate(answers)
                if rank != self.rank
            }
            values[key] = _encode(_Answer(_EACH, b""))
        old, self._answer = self._answer, (key, len(values[key]))

        def leave_answers(store: Rendezvous) -> None:
            store.put(values)
            # Whoever sends a message has the answer to the last. After an interrupt, messages
            # were not waited for.
            if old is not None and not self._lost_ranks and self._interrupt is None:
                store.delete_value(*old)

        # Waited for: else the thread that does it would wait for the interpreter's lock.
        self._run(phase, leave_answers)
        return own

    def _gather(self, store: Rendezvous, phase: str, own: _Answer) -> _Gathered:
        while True:
            self._skip_what_is_over(store)
            number = self.number
            gathered = self._gather_once(store, phase, own, number)
            if gathered is not None:
                return gathered
            self._show_up(store)

    def _gather_once(
        self, store: Rendezvous, phase: str, own: _Answer, number: int
    ) -> _Gathered | None:
        keys = {
            rank: f"{self._prefix}/message/{rank}"
            for rank in range(self.world_size)
            if rank != self.rank
        }
        arrivals = {self.rank: self._arrive(store)} if self._phase == 1 else {}
        lost, elsewhere = dict[int, RankLostError](), dict[int, Arrival]()
        began = time.monotonic()
        give_up = began + (self.timeout_seconds or math.inf)
        look_around = began + _LOOK_AROUND_SECONDS
        waiting, pause = list(keys), _SHORTEST_PAUSE_SECONDS
        while waiting:
            if store.exist([keys[rank] for rank in waiting[:_BLOCK]]):
                del waiting[:_BLOCK]
                continue
            if self._phase == 1 and self.number != number:
                return None
            now = time.monotonic()
            if now >= look_around:
                waiting = [rank for rank in waiting if not store.exist([keys[rank]])]
                elsewhere |= self._find_elsewhere(store, waiting)
                waiting = [rank for rank in waiting if rank not in elsewhere]
                lost |= self._find_lost(store, waiting, phase, now > give_up)
                waiting = [rank for rank in waiting if rank not in lost]
                look_around = now + _LOOK_AROUND_SECONDS
            store.pause(pause)
            pause = min(2 * pause, self._longest_pause)
        there = [rank for rank in keys if rank not in lost and rank not in elsewhere]
        values = store.get_all([keys[rank] for rank in there])
        messages = dict(zip(there, values, strict=True))
        if self._phase == 1:
            for rank, value in messages.items():
                arrival, messages[rank] = msgspec.msgpack.decode(value)
                arrivals[rank] = Arrival(*arrival)
        messages[self.rank] = _encode(own)
        return _Gathered(messages, arrivals | elsewhere, lost)

    def _find_elsewhere(self, store: Rendezvous, ranks: Sequence[int]) -> dict[int, Arrival]:
        """Ranks that were here with another intent than this one's, and have left."""
        found = {}
        if self._phase == 1 and self.intent is not None:
            for rank in ranks:
                key, text, _ = self._gone(store, rank)
                if not self.intent.fits(key):
                    found[rank] = Arrival(key, text, 0, 0)
        return found

    # What both sides do

    def _find_lost(
        self, store: Rendezvous, ranks: Sequence[int], phase: str, out_of_time: bool
    ) -> dict[int, RankLostError]:
        lost = {}
        for rank in ranks:
            _, _, left = self._gone(store, rank)
            process = self._process_of(store, rank)
            pulse = partial(self._pulse_of, store, rank)
            reason = left or self._watch.lost(rank, process, pulse)
            if reason is None and out_of_time:
                reason = f"it did not answer within {self.timeout_seconds:.0f} s"
                if self._phase == 1 and not self._pulse_of(store, rank):
                    last = read_doing(process)
                    reason += ", nor come to it" + (f" (its last was {last})" if last else "")
            if reason is not None:
                operation = self.intent.text if self.intent else ""
                lost[rank] = rank_lost(rank, phase, operation, reason)
        return lost

    def _gone(self, store: Rendezvous, rank: int) -> tuple[str, str, str]:
        """The intent with which a rank was here, and why it left."""
        value = store.look(f"{self.name}/gone/{rank}")
        return msgspec.msgpack.decode(value, type=tuple[str, str, str]) if value else ("", "", "")

    def _show_up(self, store: Rendezvous) -> None:
        if self.intent is None:
            announce_process(store, self.group, self.rank)
        self._beat(store)

    def _beat(self, store: Rendezvous) -> None:
        self._beats += 1
        store.put({f"{self.name}/pulse/{self.rank}": str(self._beats).encode()})

    def _process_of(self, store: Rendezvous, rank: int) -> str:
        process = store.look(f"{self.group}/process/{rank}")
        if not process and self.trainers:
            process = store.look(f"{self.trainers}/process/{rank}")
        return (process or b"").decode()

    def _pulse_of(self, store: Rendezvous, rank: int) -> str:
        return (store.look(f"{self.name}/pulse/{rank}") or b"").decode()

    def _move_on(self, store: Rendezvous) -> None:
        """Leave the number to others, and meet at the next; with all that was begun later."""
        self._depart(store)
        store.add(f"{self.group}/opened/{self.rank}", 1)
        with _numbering().lock:
            here = self.number
            for channel in _numbering().unmet:
                is_mine = channel.origin is self.origin and channel.rank == self.rank
                if is_mine and channel.group == self.group and channel.number >= here:
                    channel.number += 1
        self._was_told = False
        self._answer = None
        self._show_up(store)

    def _skip_what_is_over(self, store: Rendezvous) -> None:
        """Move on to what the others have not given up, if this rank was told that it is behind.

        It is told by the first operation that it finds over. It may be late, and what it has
        must not become part of a later operation of the others without a word.
        """
        if self._phase > 1 or self.intent is None:
            return
        behind = _numbering().behind.setdefault(self.origin, set())
        while self._is_over(store, self.intent):
            if (self.group, self.rank) not in behind:
                behind.add((self.group, self.rank))
                return
            self._move_on(store)

    def _is_over(self, store: Rendezvous, intent: Intent) -> bool:
        """Whether the others gave this operation up before this rank came to it."""
        if not self.is_coordinator:
            value = store.look(f"{self._prefix}/answer")
            return value is not None and intent.fits(_decode(value).key)
        for rank in range(self.world_size):
            key, _, left = self._gone(store, rank) if rank != self.rank else ("", "", "itself")
            if not left or not intent.fits(key):
                return False
        return True

    def _settle_number(self) -> None:
        with _numbering().lock:
            _numbering().unmet.discard(self)

    def _leave(self, store: Rendezvous, left_early: bool, reason: str) -> None:
        if left_early:
            reason = f"it left with {reason}"
            announce_departure(store, self.name, self.rank, reason, self.intent or Intent())
            stands = store.claim(f"{self.name}/verdict", f"rank {self.rank} left: {reason}")
            self.outcome_known = self.outcome_known or stands != _COMMIT
        self._depart(store)
        if self.intent is None:
            store.delete([f"{self.group}/process/{self.rank}"])

    def _depart(self, store: Rendezvous) -> None:
        """Delete what this rank left, and, if it is the last, what all did."""
        name = self.name
        self._withdraw(store)
        store.delete([f"{name}/pulse/{self.rank}"])
        if store.add(f"{name}/left", 1) < self.world_size:
            return
        # Set if a rank has left early, or else by `seal`.
        stands = store.claim(f"{name}/verdict", "over")
        if stands not in ("over", _COMMIT):
            store.delete([f"{name}/gone/{rank}" for rank in range(self.world_size)])
        store.delete([f"{name}/verdict", f"{name}/left"])
        store.delete_value(*(self._answer or (f"{self._prefix}/answer", 0)))


class _Numbering:
    """Which numbers the operations of this process have."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.unmet: weakref.WeakSet[StoreChannel] = weakref.WeakSet()
        """The operations that may still be moved on."""
        self.behind: weakref.WeakKeyDictionary[Any, set[tuple[str, int]]] = (
            weakref.WeakKeyDictionary()
        )
        """By store, the groups and ranks that came to an operation which was over."""


_numbering = ProcessWide(_Numbering)


def announce_process(store: Rendezvous, group: str, rank: int, doing: str = "") -> None:
    """Say which process is `rank`, so that others can tell whether it is there."""
    store.put({f"{group}/process/{rank}": describe_process(doing).encode()})


def announce_departure(
    store: Rendezvous, name: str, rank: int, reason: str, intent: Intent | None = None
) -> None:
    """Say why `rank` is not in the operation of that name any more."""
    key, text = (intent.key, intent.text) if intent is not None else ("", "")
    store.put({f"{name}/gone/{rank}": msgspec.msgpack.encode((key, text, reason))})


def _encode(answer: _Answer) -> bytes:
    return msgspec.msgpack.encode(tuple(answer))


def _decode(data: bytes) -> _Answer:
    return _Answer(*msgspec.msgpack.decode(data))

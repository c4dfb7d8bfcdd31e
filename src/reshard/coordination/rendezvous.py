"""Calls on the rendezvous store, made in a thread that nobody has to wait for.

The client of a TCPStore blocks in `recv` while the server process is stopped, whatever
timeout is set, and cannot be interrupted. So no thread of the user's calls the store:
each operation has a daemon thread that does, is handed whole sequences of calls, and is
left behind when one call takes longer than the operation may. The thread also renews
the pulse that tells the other ranks that this one is there.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from reshard.engine.process_wide import ProcessWide

T = TypeVar("T")

PULSE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_IDLE_SECONDS = 1.0
_PART_BYTES = 4 << 20
_BATCH_BYTES = 1 << 20
_BATCH_KEYS = 128
# No value of ours is this text: each begins with the number of its parts.
_ABSENT = "reshard: absent"


class RendezvousLost(RuntimeError):  # noqa: N818 - how a store is lost, for the errors that say so
    """The process that serves the rendezvous store does not answer."""


class _Cancelled(Exception):  # noqa: N818 - ends a sequence, and is never seen outside
    pass


class _Job(Generic[T]):
    """A sequence of calls, and what came of it."""

    def __init__(self, work: Callable[[Rendezvous], T]) -> None:
        self.work = work
        self.done = threading.Event()
        self.is_cancelled = False
        self.result: T
        self.error: BaseException | None = None


class Rendezvous:
    """The store, as a sequence of calls sees it.

    Values are bytes of any length: the store takes a few megabytes at most, so they may
    be cut into parts.
    """

    def __init__(self, store: Any, thread: RendezvousThread) -> None:
        self._store = store
        self._thread = thread
        # One round trip where `get` takes two, and `check` before it a third. For a file it
        # would take the lock that writers need.
        self._looks_by_comparing = bool(store.has_extended_api())

    def _call(self, method: str, *arguments: Any) -> Any:
        self._thread.called_at = time.monotonic()
        try:
            return getattr(self._store, method)(*arguments)
        finally:
            self._thread.called_at = None

    def put(self, values: Mapping[str, bytes]) -> None:
        """Leave values under their keys, in this order."""
        keys: list[str] = []
        parts: list[bytes] = []
        nbytes = 0
        for key, value in values.items():
            first, *rest = _parts(value)
            head = len(rest).to_bytes(4, "little") + first
            for name, part in [*((f"{key}/{n}", p) for n, p in enumerate(rest)), (key, head)]:
                if keys and nbytes + len(part) > _BATCH_BYTES:
                    self._call("multi_set", keys, parts)
                    keys, parts, nbytes = [], [], 0
                keys.append(name)
                parts.append(part)
                nbytes += len(part)
        if len(keys) == 1:
            self._call("set", keys[0], parts[0])
        elif keys:
            self._call("multi_set", keys, parts)

    def look(self, key: str) -> bytes | None:
        """The value under a key, if there is one."""
        head = self._look_once(key)
        return None if head is None else self._joined(key, head)

    def _look_once(self, key: str) -> bytes | None:
        if self._looks_by_comparing:
            head = bytes(self._call("compare_set", key, _ABSENT, _ABSENT))
            return None if head == _ABSENT.encode() else head
        if self._call("check", [key]):
            return bytes(self._call("get", key))
        return None

    def get_all(self, keys: list[str]) -> list[bytes]:
        """The values under keys that are all there."""
        values: list[bytes] = []
        for begin in range(0, len(keys), _BATCH_KEYS):
            batch = keys[begin : begin + _BATCH_KEYS]
            heads = self._call("multi_get", batch)
            values += [self._joined(k, bytes(head)) for k, head in zip(batch, heads, strict=True)]
        return values

    def _joined(self, key: str, head: bytes) -> bytes:
        count = int.from_bytes(head[:4], "little")
        if not count:
            return head[4:]
        rest = (bytes(self._call("get", f"{key}/{number}")) for number in range(count))
        return b"".join([head[4:], *rest])

    def exist(self, keys: list[str]) -> bool:
        """Whether there is a value under each of the keys."""
        return bool(self._call("check", keys))

    def claim(self, key: str, value: str) -> str:
        """Set a key unless it is set; what it then says. Not cut into parts."""
        return bytes(self._call("compare_set", key, "", value)).decode()

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def count(self, key: str) -> int | None:
        """What `add` has counted under a key, if anything."""
        # Empty if it was deleted between two calls.
        return int(self._look_once(key) or 0) or None

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._call("delete_key", key)

    def delete_value(self, key: str, nbytes: int) -> None:
        """Delete a value of `nbytes` with its parts."""
        self.delete([key, *(f"{key}/{n}" for n in range(max(0, nbytes - 1) // _PART_BYTES))])

    def pause(self, seconds: float) -> None:
        """Wait within a sequence. The pulse goes on; a caller that was interrupted ends it."""
        self._thread.rest(self, seconds)


def _parts(value: bytes) -> list[bytes]:
    return [
        value[begin : begin + _PART_BYTES] for begin in range(0, max(1, len(value)), _PART_BYTES)
    ]


class RendezvousThread:
    """Makes the calls of one operation.

    No call may take longer than `limit_seconds` (0: no limit): then the thread is lost,
    and so is what it was doing.
    """

    def __init__(self, connector: Connector, limit_seconds: float) -> None:
        self._connector = connector
        self._in_front = False
        self._limit_seconds = limit_seconds or math.inf
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._job: _Job[Any] | None = None
        self._beat: Callable[[Rendezvous], None] | None = None
        self._next_beat = math.inf
        self.called_at: float | None = None
        """When the call began that has not returned yet."""
        self.is_lost = False

    def run(self, work: Callable[[Rendezvous], T], limit_seconds: float = math.inf) -> T:
        """What `work` returns or raises. Blocks for as long as it waits, and can be interrupted.

        Raises `RendezvousLost` if the store does not answer one of its calls in time.
        """
        limit = min(self._limit_seconds, limit_seconds)
        job = self._submit(work)
        try:
            if self.is_lost:
                raise _lost(limit)
            while not job.done.wait(min(_LOOK_SECONDS, limit)):
                called_at = self.called_at
                if called_at is not None and time.monotonic() - called_at > limit:
                    self.is_lost = True
                    self._connector.forget()
                    raise _lost(limit)
        except BaseException:
            job.is_cancelled = True
            raise
        if job.error is not None:
            raise job.error
        return job.result

    def post(self, work: Callable[[Rendezvous], None]) -> None:
        """Have `work` done, without waiting for it. That it fails shows in what follows."""
        self._submit(work)

    def _submit(self, work: Callable[[Rendezvous], T]) -> _Job[T]:
        job = _Job(work)
        with self._starting:
            self._in_front = threading.current_thread() is threading.main_thread()
            if self._thread is None and not self.is_lost:
                thread = threading.Thread(
                    target=self._serve, name="reshard-rendezvous", daemon=True
                )
                thread.start()
                self._thread = thread
            self._jobs.put(job)
        return job

    def beat_with(self, beat: Callable[[Rendezvous], None] | None) -> None:
        """Call `beat` every few seconds from now on, whatever else the thread does."""
        self._beat = beat
        self._next_beat = math.inf if beat is None else time.monotonic() + PULSE_SECONDS

    def stop(self) -> None:
        """End the thread. `run` starts it again."""
        with self._starting:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._jobs.put(None)
        if not self.is_lost:
            thread.join(_LOOK_SECONDS)

    def _serve(self) -> None:
        rendezvous: Rendezvous | None = None
        in_front = False
        while True:
            job = self._next_job(rendezvous)
            if job is None:
                return
            self._job = job
            try:
                if rendezvous is None or in_front != self._in_front:
                    in_front = self._in_front
                    rendezvous = self._connect()
                job.result = job.work(rendezvous)
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the job
                job.error = error
            job.done.set()
            # Not kept until the next one comes: it holds messages.
            self._job = job = None

    def _next_job(self, rendezvous: Rendezvous | None) -> _Job[Any] | None:
        """Wait for something to do; None if there is nothing more."""
        while True:
            try:
                wait = min(_IDLE_SECONDS, self._next_beat - time.monotonic())
                return self._jobs.get(timeout=max(0.0, wait))
            except queue.Empty:
                if self._beat is None:
                    # An operation may have been named, and then not begun.
                    with self._starting:
                        if self._jobs.empty():
                            self._thread = None
                            return None
                elif rendezvous is not None and time.monotonic() >= self._next_beat:
                    self._beat_once(rendezvous)

    def _connect(self) -> Rendezvous:
        self.called_at = time.monotonic()
        try:
            return Rendezvous(self._connector.connect(self._in_front), self)
        finally:
            self.called_at = None

    def rest(self, rendezvous: Rendezvous, seconds: float) -> None:
        job = self._job
        if job is not None and job.is_cancelled:
            raise _Cancelled
        time.sleep(seconds)
        if time.monotonic() >= self._next_beat:
            self._beat_once(rendezvous)

    def _beat_once(self, rendezvous: Rendezvous) -> None:
        beat = self._beat
        self._next_beat = math.inf if beat is None else time.monotonic() + PULSE_SECONDS
        try:
            if beat is not None:
                beat(rendezvous)
        except RuntimeError:
            # The store is gone; the operation itself will say so better.
            self._next_beat = math.inf


def _lost(limit: float) -> RendezvousLost:
    return RendezvousLost(
        f"the process that serves it has not answered for {limit:.0f} s; it may be stopped, "
        "swapped out or cut off from this machine"
    )


class Connector(Protocol):
    """How to reach the store."""

    def connect(self, in_front: bool) -> Any:
        """The store; `in_front` if the main thread waits for the operation."""

    def forget(self) -> None:
        """Connect anew the next time: a call on the present connection did not return."""


class GroupStore:
    """The store of a process group.

    Whoever waits on a connection keeps it busy, so an operation in the background does not
    use that of the training loop, but one of our own, made once for each store. An operation
    in front does: training waits for it, and a new connection is not cheap. Torch looks up
    names when it connects, also in the one thread of the server that serves all ranks, and
    a lookup that times out stalls everybody for seconds.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def connect(self, in_front: bool) -> Any:
        store = self._store
        if in_front and store not in _given_up():
            return store
        connection = _connections().get(store)
        if connection is None:
            connection = _connections()[store] = store.clone()
        return connection

    def forget(self) -> None:
        _connections().pop(self._store, None)
        _given_up().add(self._store)


_connections: ProcessWide[weakref.WeakKeyDictionary[Any, Any]] = ProcessWide(
    weakref.WeakKeyDictionary
)
_given_up: ProcessWide[weakref.WeakSet[Any]] = ProcessWide(weakref.WeakSet)

"""The background saves of this process, in order, and their failures until somebody looks.

Saves run one after the other, in a thread that lives while there is work. So two saves to
one place never meet, and memory is bounded by how many may be in flight.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Literal

from reshard.api import BusyError, CheckpointException, _explain, _wrap_exception
from reshard.coordination.failures import say_again
from reshard.coordination.last_answers import last_answers
from reshard.engine.process_wide import ProcessWide, release_all
from reshard.metadata import Metadata

logger = logging.getLogger(__name__)

WhenBusy = Literal["wait", "refuse"]
MOST_IN_FLIGHT = 2
"""One save that runs, and one that is staged and waits for it."""


class SaveFuture(Future[Metadata]):
    """The outcome of a background save. Remembers whether anybody has seen it fail."""

    def __init__(self, place: str | None, uses: Sequence[object] = ()) -> None:
        super().__init__()
        self.place = place
        self.uses = [each for each in uses if each is not None]
        self.seen = False
        self.failure: BaseException | None = None
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Metadata:
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
            return super().result()
        finally:
            # As in the standard library: the traceback holds this frame.
            del error, self

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.seen = True
        return error


class SaveQueue:
    """The saves in flight, oldest first. Safe to use from several threads."""

    def __init__(self) -> None:
        self._finishing: SaveFuture | None = None
        self._changed = threading.Condition()
        self._waiting: deque[tuple[SaveFuture, Callable[[], Metadata]]] = deque()
        self._in_flight: list[SaveFuture] = []
        self._failed: list[SaveFuture] = []
        self._thread: threading.Thread | None = None
        self._watching_exit = False

    def submit(
        self, place: str | None, work: Callable[[], Metadata], uses: Sequence[object] = ()
    ) -> SaveFuture:
        """Queue a save. `place` is what it writes to, in a form that can be compared.

        `uses` are objects that nobody else may use meanwhile.
        """
        future = SaveFuture(place, uses)
        with self._changed:
            self.watch_exit()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="reshard-save", daemon=True)
                # It waits for the lock, so it finds the work that follows.
                thread.start()
                self._thread = thread
            self._in_flight.append(future)
            self._waiting.append((future, work))
        return future

    @property
    def _in_own_thread(self) -> bool:
        """Whether this is a callback of a save. Waiting on the save thread would deadlock."""
        return threading.current_thread() is self._thread

    def admit(self, when_busy: WhenBusy) -> None:
        """Return once another save may be staged; with `"refuse"`, raise if that is not now."""
        with self._changed:
            if self._in_own_thread:
                return
            if when_busy == "refuse" and len(self._in_flight) >= MOST_IN_FLIGHT:
                places = ", ".join(repr(future.place) for future in self._in_flight)
                raise BusyError(
                    f"{len(self._in_flight)} saves are in flight, to {places}. Wait for one of "
                    "their futures, or pass when_busy='wait'"
                )
            self._changed.wait_for(lambda: len(self._in_flight) < MOST_IN_FLIGHT)

    def raise_unseen(self, place: str | None = None, before: SaveFuture | None = None) -> None:
        """Raise the failure of an earlier save that nobody has looked at, once.

        With `place`, only failures of saves to that place count; with `before`, only those
        of saves that were queued before that one.
        """
        with self._changed:
            for future in self._failed:
                if future is before:
                    return
                error = future.failure
                if not future.seen and error is not None and place in (None, future.place):
                    future.seen = True
                    raise _again(future, error, "failed earlier")

    def settle(self, place: str | None) -> None:
        """Wait for the saves to a place, and raise their failures as `raise_unseen` does."""
        if place is None:
            return
        with self._changed:
            if not self._in_own_thread:
                self._changed.wait_for(
                    lambda: not any(future.place == place for future in self._in_flight)
                )
        self.raise_unseen(place)

    def is_busy_with(self, place: str) -> bool:
        """Whether a save to a place is in flight."""
        with self._changed:
            return any(future.place == place for future in self._in_flight)

    def settle_before_save(self, place: str | None) -> None:
        """Make sure that a save may begin: no earlier one has failed unseen, none writes there."""
        self.raise_unseen()
        self.settle(place)

    def wait_for_users(self, *objects: object) -> None:
        """Block until no save in flight uses any of `objects`."""
        with self._changed:
            if not self._in_own_thread:
                self._changed.wait_for(
                    lambda: (
                        not any(
                            used is each
                            for future in self._in_flight
                            for used in future.uses
                            for each in objects
                        )
                    )
                )

    def drain(self) -> None:
        """Block until no save is in flight, and no callback of one runs."""
        with self._changed:
            if not self._in_own_thread:
                self._changed.wait_for(lambda: not self._in_flight and self._finishing is None)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return
                future, work = self._waiting.popleft()
            self._do(future, work)
            # Not kept until the next save comes: it holds the state dict.
            del future, work

    def _do(self, future: SaveFuture, work: Callable[[], Metadata]) -> None:
        metadata: Metadata | None = None
        failure: BaseException | None = None
        try:
            metadata = work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the outcome
            failure = error
            # The error may be kept for long, and would keep the state dict with it.
            for kept in filter(None, (error, error.__cause__)):
                traceback.clear_frames(kept.__traceback__)
            if isinstance(error, CheckpointException):
                # Its text and `failures` say what happened; the frames are ours.
                error.with_traceback(None)
        with self._changed:
            self._in_flight.remove(future)
            self._finishing = future
            # Failures that somebody has seen are of no more use.
            self._failed = [f for f in self._failed if not f.seen]
            future.failure = failure
            future.uses = []
            if failure is not None:
                self._failed.append(future)
            self._changed.notify_all()
        # Callbacks run here, and may start the next save. Whatever they raise, it goes on.
        with _reported():
            if failure is not None:
                future.set_exception(failure)
            else:
                future.set_result(metadata)  # type: ignore[arg-type]
        # The traceback of a failure holds this frame, so this frame must not hold the failure.
        del failure, future, work
        with self._changed:
            self._finishing = None
            self._changed.notify_all()

    # The end of the process

    def watch_exit(self) -> None:
        """Have the process wait for its saves when it ends, and give back what it holds."""
        if self._watching_exit:
            return
        self._watching_exit = True
        # Hooks run in reverse: answers are waited for when the saves are done.
        last_answers()
        # Thread pools refuse work once the interpreter begins to end, which is before the
        # functions of atexit run; this hook comes before that.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(self._at_exit, os.getpid())

    def _at_exit(self, pid: int) -> None:
        if pid != os.getpid():
            # A forked child has none of the threads that would do the work.
            return
        try:
            if self._in_flight:
                logger.info("waiting for %d saves to finish", len(self._in_flight))
            self.drain()
        except KeyboardInterrupt:
            for future in self._in_flight:
                _say(f"reshard: the save to {future.place!r} was cut off and is not there")
        with _reported():
            release_all()
        for future in self._failed:
            error = future.failure
            if error is not None and not future.seen:
                again = _again(future, error, "failed, and nobody looked at its future")
                _say(f"reshard: {again}\n\nThere is no new checkpoint at that place.")


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except BaseException:  # noqa: BLE001 - there is nobody to raise it to
        _say(traceback.format_exc())


def _say(text: str) -> None:
    """Write to the terminal itself: loggers and streams may be closed by now."""
    os.write(2, (text.rstrip() + "\n").encode())


def _again(future: SaveFuture, error: BaseException, how: str) -> CheckpointException:
    """`error` for somebody who did not start that save."""
    text = f"the save to {future.place!r} {how}: {_explain(*_wrap_exception(error))}"
    if isinstance(error, CheckpointException):
        return say_again(error, text)
    again = CheckpointException(text)
    again.__cause__ = error
    return again


save_queue = ProcessWide(SaveQueue)
"""The saves of this process."""

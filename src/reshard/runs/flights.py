"""The saves of a run that are under way, from their beginning to their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.api import CheckpointException
from reshard.metadata import STATE_DICT_TYPE
from reshard.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save


@dataclass
class Flight:
    """One save, as this rank sees it."""

    step: int
    began: float = field(default_factory=time.perf_counter)
    stall_seconds: float = 0.0
    """How long the training loop had to wait."""
    seconds: float = 0.0
    error: BaseException | None = None
    is_over: threading.Event = field(default_factory=threading.Event)


class Flights:
    """Starts saves, and knows those that have not ended. `on_end` may be called in any thread."""

    def __init__(self, mode: str, on_end: Callable[[Flight], None]) -> None:
        self._kind = None if mode == "sync" else AsyncCheckpointerType(mode)
        self._on_end = on_end
        self._under_way: list[Flight] = []

    def begin(self, step: int, state: STATE_DICT_TYPE, arguments: Mapping[str, Any]) -> Flight:
        """Save, or begin to. A failure is in the flight; only bad arguments raise here."""
        self._under_way = [each for each in self._under_way if not each.is_over.is_set()]
        flight = Flight(step)
        self._under_way.append(flight)
        future: Any = None
        saving: Any
        try:
            if self._kind is None:
                save(state, **arguments)
            else:
                saving = async_save(state, async_checkpointer_type=self._kind, **arguments)
                is_late = isinstance(saving, AsyncSaveResponse)
                future = saving.upload_completion if is_late else saving
                # Its failure is looked at here: nobody else has to be told.
                future.seen = True
        except CheckpointException as error:
            flight.error = error
        except BaseException as error:
            flight.error = error
            self._end(flight)
            raise
        finally:
            flight.stall_seconds = time.perf_counter() - flight.began
        if future is None:
            self._end(flight)
        else:
            future.add_done_callback(lambda done: self._end(flight, done.exception()))
        return flight

    def _end(self, flight: Flight, error: BaseException | None = None) -> None:
        flight.error = flight.error or error
        flight.seconds = time.perf_counter() - flight.began
        try:
            self._on_end(flight)
        finally:
            flight.is_over.set()

    def wait(self) -> None:
        """Block until no save is under way."""
        for flight in self._under_way:
            flight.is_over.wait()
        self._under_way = []

"""Getting ready for the first background save while the first steps run."""

from __future__ import annotations

import logging
import threading

from reshard.metadata import STATE_DICT_TYPE
from reshard.operations.user_calls import ask_for_states
from reshard.state_dict_saver import AsyncCheckpointerType, prewarm

logger = logging.getLogger(__name__)


class WarmingUp:
    """Takes the staging memory once, in a thread of its own."""

    def __init__(self, mode: str) -> None:
        self._kind = None if mode == "sync" else AsyncCheckpointerType(mode)
        self._thread: threading.Thread | None = None
        self._is_done = self._kind is None

    def begin(self, state: STATE_DICT_TYPE) -> None:
        """Begin, unless that was done before. Best effort: failures are logged."""
        if self._is_done:
            return
        self._is_done = True
        # Here: objects that are asked for their state may communicate with other ranks.
        asked = ask_for_states(state)
        kind = self._kind or AsyncCheckpointerType.THREAD

        def run() -> None:
            try:
                prewarm(asked, async_checkpointer_type=kind)
            except Exception as error:  # noqa: BLE001 - the first save does it, or says why not
                logger.warning("could not get ready for the first save: %s", error)

        self._thread = threading.Thread(target=run, name="reshard-prewarm", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until it is done, if it has begun."""
        self._is_done = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None

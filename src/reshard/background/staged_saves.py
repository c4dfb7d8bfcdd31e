"""Background saves of a state that somebody else has staged."""

from __future__ import annotations

import os
from concurrent.futures import Future

from reshard.background.queue import SaveFuture
from reshard.background.trainer import BackgroundOptions, save_later
from reshard.metadata import STATE_DICT_TYPE
from reshard.operations.ranks import Ranks
from reshard.operations.save import SaveSettings
from reshard.operations.targets import SaveTarget
from reshard.planner import SavePlanner
from reshard.staging import AsyncStager
from reshard.storage import StorageWriter

Place = str | os.PathLike[str]


def save_staged(
    staged: STATE_DICT_TYPE | Future[STATE_DICT_TYPE],
    target: tuple[StorageWriter | None, Place | None],
    planner: SavePlanner | None,
    ranks: Ranks,
    in_process: bool,
    use_collectives: bool,
) -> SaveFuture:
    """Queue a save of what `staged` is, or will be."""
    # A future has no content yet, so there is nobody in it to ask for a state.
    state_dict: STATE_DICT_TYPE = {} if isinstance(staged, Future) else staged
    options = BackgroundOptions(in_process, _AlreadyStaged(staged), when_busy="wait")
    settings = SaveSettings(use_collectives=use_collectives)
    return save_later(state_dict, SaveTarget(*target), planner, ranks, options, settings).future


class _AlreadyStaged(AsyncStager):
    """Hands over what was staged before."""

    _synchronize_after_execute = False

    def __init__(self, staged: STATE_DICT_TYPE | Future[STATE_DICT_TYPE]) -> None:
        self._staged = staged

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE | Future[STATE_DICT_TYPE]:
        # With the states of `Stateful` values, if it was there before.
        return self._staged if isinstance(self._staged, Future) else state_dict

    def synchronize_staging(self) -> None:
        """Nothing to do: a save waits for the future."""

    def close(self) -> None:
        """Nothing to release."""

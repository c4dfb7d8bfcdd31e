"""Who saves a state that is staged already, in the background."""

from __future__ import annotations

import abc
import os
from concurrent.futures import Future

import torch.distributed as dist

from reshard.metadata import STATE_DICT_TYPE, Metadata
from reshard.planner import SavePlanner
from reshard.storage import StorageWriter

__all__ = ["_AsyncCheckpointExecutor"]


class _AsyncCheckpointExecutor(abc.ABC):
    """Saves what a stager has copied. Made to be subclassed."""

    @abc.abstractmethod
    def execute_save(
        self,
        staging_future_or_state_dict: STATE_DICT_TYPE | Future[STATE_DICT_TYPE],
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        use_collectives: bool = True,
    ) -> Future[Metadata]:
        """Start to save; a future of the metadata that `save` would return.

        Called by all ranks in the same order. What was staged must not change until it is done.
        """

"""Saving what is staged in the worker process of this one."""

from __future__ import annotations

import os
from concurrent.futures import Future

import torch.distributed as dist

from reshard._async_executor import _AsyncCheckpointExecutor
from reshard.background.staged_saves import save_staged
from reshard.metadata import STATE_DICT_TYPE, Metadata
from reshard.operations.ranks import Ranks
from reshard.planner import SavePlanner
from reshard.storage import StorageWriter

__all__ = ["_ProcessBasedAsyncCheckpointExecutor"]


class _ProcessBasedAsyncCheckpointExecutor(_AsyncCheckpointExecutor):
    """Saves in the worker, which is started if there is none, and serves all later saves."""

    def execute_save(
        self,
        staging_future_or_state_dict: Future[STATE_DICT_TYPE] | STATE_DICT_TYPE,
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        use_collectives: bool = True,
    ) -> Future[Metadata]:
        return save_staged(
            staging_future_or_state_dict,
            (storage_writer, checkpoint_id),
            planner,
            Ranks(process_group, no_dist),
            in_process=True,
            use_collectives=use_collectives,
        )

"""Saving what is staged in a thread of this process."""

from __future__ import annotations

import os
from concurrent.futures import Future

import torch.distributed as dist

from reshard._async_executor import _AsyncCheckpointExecutor
from reshard.background.staged_saves import save_staged
from reshard.metadata import STATE_DICT_TYPE, Metadata
from reshard.operations.ranks import Ranks
from reshard.planner import SavePlanner
from reshard.state_dict_saver import save
from reshard.storage import StorageWriter

__all__ = ["_ThreadBasedAsyncCheckpointExecutor", "save_wrapper"]


def save_wrapper(
    staging_future_or_state_dict: Future[STATE_DICT_TYPE] | STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Wait for the state to be staged, and save it in the thread that calls."""
    staged = staging_future_or_state_dict
    return save(
        staged.result() if isinstance(staged, Future) else staged,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )


class _ThreadBasedAsyncCheckpointExecutor(_AsyncCheckpointExecutor):
    """Saves in the thread that all background saves of the process run in, one after the other."""

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
            in_process=False,
            use_collectives=use_collectives,
        )

"""Saving and loading with settings that are given once."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from reshard.metadata import STATE_DICT_TYPE, Metadata
from reshard.planner import LoadPlanner, SavePlanner
from reshard.state_dict_loader import load
from reshard.state_dict_saver import AsyncSaveResponse, _save_state_dict, async_save
from reshard.storage import StorageReader, StorageWriter

__all__: list[str] = []


class _Checkpointer:
    """`save`, `async_save` and `load` of one storage, with the same planners and group each time.

    With `no_dist`, this process saves and loads on its own.
    """

    def __init__(
        self,
        storage_writer: StorageWriter,
        storage_reader: StorageReader,
        *,
        process_group: dist.ProcessGroup | None = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        load_planner: LoadPlanner | None = None,
        save_planner: SavePlanner | None = None,
    ) -> None:
        self.storage_writer = storage_writer
        self.storage_reader = storage_reader
        self.process_group = process_group
        self.coordinator_rank = coordinator_rank
        self.no_dist = no_dist
        self.load_planner = load_planner
        self.save_planner = save_planner

    def save(self, state_dict: STATE_DICT_TYPE) -> Metadata:
        """As `save` does, at the place that the storage writer has."""
        return _save_state_dict(
            state_dict,
            self.storage_writer,
            self.process_group,
            self.coordinator_rank,
            self.no_dist,
            self.save_planner,
        )

    def async_save(self, state_dict: STATE_DICT_TYPE) -> Future[Metadata]:
        """As `async_save` does: a future of what `save` returns."""
        saving = async_save(
            state_dict,
            storage_writer=self.storage_writer,
            process_group=self.process_group,
            planner=self.save_planner,
            no_dist=self.no_dist,
        )
        return saving.upload_completion if isinstance(saving, AsyncSaveResponse) else saving

    def load(self, state_dict: dict[str, Any]) -> None:
        """As `load` does, from the place that the storage reader has."""
        load(
            state_dict,
            storage_reader=self.storage_reader,
            process_group=self.process_group,
            planner=self.load_planner,
            no_dist=self.no_dist,
        )

"""Loading straight from a file of torch.save, under the names that DCP has for it."""

from __future__ import annotations

import os
from typing import Any

import torch

from reshard.api import CheckpointException
from reshard.default_planner import DefaultLoadPlanner
from reshard.filesystem import FileSystemReader
from reshard.metadata import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from reshard.planner import LoadPlan
from reshard.plans.single_items import _create_chunk_list
from reshard.plans.traits import default_step


class BroadcastingTorchSaveReader(FileSystemReader):
    """Reads a file of torch.save: each rank the bytes that it needs, so all must see the file.

    Nothing is broadcast, in spite of its name, and a process on its own can use it too. Its
    pickle is not run; objects that only pickle could make need `allow_pickle`.
    `coordinator_rank` has no effect.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        coordinator_rank: int = 0,
        *,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__(checkpoint_id or "", allow_pickle=allow_pickle)
        self.coordinator_rank = coordinator_rank
        self._is_set = checkpoint_id is not None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:  # type: ignore[override]
        return self.path if self._is_set else None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.path.isfile(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._is_set = checkpoint_id is not None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if not self._is_set:
            raise ValueError(
                f"{type(self).__name__} does not know which file to read: pass checkpoint_id to "
                "load"
            )
        if not os.path.isfile(self.path):
            raise CheckpointException(
                f"{str(self.path)!r} is not a file that this rank can see. All ranks read the file "
                "themselves: put it where each of them finds it"
            )
        return super().read_metadata(*args, **kwargs)

    @default_step
    def prepare_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """Plans without metadata: it takes for stored what the state dict asks for.

    That is for storages that have none to give. Only tensors can be loaded from those. If the
    storage has metadata, as `BroadcastingTorchSaveReader` has, this is the default planner.
    """

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is not None and metadata.state_dict_metadata:
            return
        entries: dict[str, STORAGE_TYPES] = {}
        for name, value in self.state_dict.items():
            if not isinstance(value, torch.Tensor):
                raise RuntimeError(
                    f"{name!r} is a {type(value).__name__}: without metadata only tensors can be "
                    f"planned by {type(self).__name__}. Leave it out of the state dict"
                )
            entries[name] = TensorStorageMetadata(
                TensorProperties(dtype=value.dtype), value.size(), _create_chunk_list(value)
            )
        self.metadata = Metadata(entries)

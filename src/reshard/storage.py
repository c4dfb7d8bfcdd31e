"""The storage contract: who writes the items of a plan, and who reads them.

Nothing here touches a disk; the storages of this package do, and so may a user's.
"""

from __future__ import annotations

import abc
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch.futures import Future

from reshard.metadata import Metadata, MetadataIndex, StorageMeta
from reshard.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner

__all__ = ["StorageInfo", "StorageReader", "StorageWriter", "WriteResult"]


@dataclass(frozen=True)
class WriteResult:
    """What became of one `WriteItem`: how large it is and where the storage put it."""

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any


@dataclass
class StorageInfo:
    """A range of bytes in one file of a checkpoint; the path is relative to it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None


class StorageWriter(abc.ABC):
    """Writes plans. One instance lives on each rank and is called in this order:

    1. `reset`, on every rank: a new checkpoint begins.
    2. `storage_meta` and `set_up_storage_writer`, on every rank.
    3. `prepare_local_plan`, on every rank.
    4. `prepare_global_plan`, on the coordinator.
    5. `write_data`, on every rank.
    6. `finish`, on the coordinator: the checkpoint becomes visible.
    """

    call_settings: tuple[str, ...] = ()
    """Attributes that `save` sets for one call: `base`, `compress` and `fingerprint`, if any."""

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new checkpoint; with a `checkpoint_id`, that one."""

    @abc.abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the role of this rank."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """`plan` with what the storage needs to add, best in `storage_data`."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans of all ranks with what the storage decides centrally."""

    @abc.abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Start to write every item of `plan`; `planner.resolve_data` gives the data.

        The future completes when all of it is written. Data may be on any device and
        be views; it is best resolved item by item, since resolving may allocate.
        """

    @abc.abstractmethod
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Store `metadata` with the `results` of all ranks, and commit."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this storage can serve `checkpoint_id`; used to choose a storage."""

    def storage_meta(self) -> StorageMeta | None:
        """What the planner should know about the checkpoint; None for nothing."""
        return None

    # For storages that commit atomically. The defaults do nothing.

    def shared_place(self, checkpoint_id: str | os.PathLike[str] | None = None) -> str | None:
        """Where all ranks write to together, or would with `checkpoint_id`, in a form that can be
        compared; None if each rank may have a place of its own.
        """
        return None

    def begin_save(self) -> str:
        """Claim the place, on the coordinator, before any rank writes: the id of the save."""
        return ""

    def join_save(self, save_id: str, rank: int) -> None:  # noqa: B027
        """Take part in the save that the coordinator has begun."""

    def finish_parts(self) -> None:  # noqa: B027
        """Commit, on the coordinator, what ranks that did not plan together have finished."""

    def discard_save(self) -> None:  # noqa: B027
        """Remove what a failed save has written."""

    def reference_to(self, metadata: Metadata) -> str:
        """What the other ranks can read the metadata of the save back by, when they need it.

        Called on the coordinator after `finish`. Empty if they must be sent the metadata itself.
        """
        return ""

    def referenced_metadata(self, reference: str) -> Metadata:
        """The metadata that `reference_to` referred to, on another rank or in another process."""
        raise NotImplementedError(f"{type(self).__name__} makes no references to metadata")


class StorageReader(abc.ABC):
    """Reads plans. One instance lives on each rank and is called in this order:

    1. `reset`, on every rank: a new load begins.
    2. `read_metadata` and `set_up_storage_reader`, on every rank.
    3. `prepare_local_plan`, on every rank.
    4. `prepare_global_plan`, on the coordinator.
    5. `read_data`, on every rank.
    """

    call_settings: tuple[str, ...] = ()
    """Attributes that `load` sets for one call: `verify` and `allow_pickle`, if any."""

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load; with a `checkpoint_id`, of that checkpoint."""

    @abc.abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint contains."""

    @abc.abstractmethod
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata and learn the role of this rank."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """`plan` with what the storage needs to add, best in `storage_data`."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans of all ranks with what the storage decides centrally."""

    @abc.abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Start to read every item of `plan`, into what `planner` offers.

        Values go to `planner.load_bytes`; a tensor is asked for with `resolve_tensor`,
        filled across devices if need be, and given back with `commit_tensor`.
        """

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this storage can serve `checkpoint_id`; used to choose a storage."""

    def read_values(self, names: Sequence[str]) -> dict[str, bytes]:
        """The stored bytes of values that are to be looked at before anything is loaded.

        Called between `set_up_storage_reader` and `read_data`; a storage that cannot do that
        returns none of them.
        """
        return {}


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether a function of the user's takes keywords that it does not name."""
    parameters = parameters_of(function).values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function or method."""
    return _parameters_of(getattr(function, "__func__", function))


@lru_cache(maxsize=64)
def _parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters

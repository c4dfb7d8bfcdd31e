"""The planning contract: items, plans, and the two planners that users may subclass.

Nothing here plans anything; `default_planner` does.
"""

from __future__ import annotations

import abc
import io
import math
import weakref
from collections.abc import Collection, Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from reshard.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)

__all__ = [
    "BytesIOWriteData",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]


class _ItemType(Enum):
    """Equal to the member of torch's enum that has its name.

    Code that was imported before a patch compares with that, and would take a value for a
    tensor in silence.
    """

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Enum):
            return self is other
        kind = type(other)
        return (
            kind.__module__ == "torch.distributed.checkpoint.planner"
            and kind.__name__ == type(self).__name__
            and other.name == self.name
        )

    __hash__ = Enum.__hash__


class WriteItemType(_ItemType):
    """What a `WriteItem` writes: a whole tensor, a part of one, or another value."""

    TENSOR = auto()
    SHARD = auto()
    BYTE_IO = auto()


class LoadItemType(_ItemType):
    """What a `ReadItem` reads: a region of a tensor, or another value."""

    TENSOR = auto()
    BYTE_IO = auto()


@dataclass(frozen=True)
class BytesIOWriteData:
    """The size of a value that is not a tensor, where it is known."""

    nbytes: int


@dataclass(frozen=True)
class TensorWriteData:
    """The region to write, and the whole tensor that it is a region of."""

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size


@dataclass(frozen=True)
class WriteItem:
    """One thing that a rank writes."""

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None

    def tensor_storage_size(self) -> int | None:
        """Bytes of the whole tensor that this item belongs to; None for other values."""
        if self.tensor_data is None:
            return None
        return math.prod(self.tensor_data.size) * self.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True)
class ReadItem:
    """One region to copy: from a stored chunk, to a local shard.

    `storage_offsets` count from the start of the stored chunk, `dest_offsets` from the
    start of the local shard; `lengths` is the size of the region in both.
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: torch.Size
    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size


@dataclass(frozen=True)
class SavePlan:
    """What one rank writes.

    `items` is a list or behaves like one. A plan with `usable=False` carries no items:
    it says that the plan of the previous save still holds. `fingerprint` is for planners
    that cache: what they recognise the plan by.
    """

    items: MutableSequence[WriteItem]
    storage_data: Any = None
    planner_data: Any = None
    usable: bool = True
    fingerprint: bytes = b""


@dataclass
class LoadPlan:
    """What one rank reads. `items` is a list or behaves like one."""

    items: MutableSequence[ReadItem]
    storage_data: Any = None
    planner_data: Any = None


class _CachedByKey(MutableMapping[str, Any]):
    """One of the things that the planners of this process remember, by `_cached_plans_key`.

    A view of the caches that planners have of their own; of several planners with one key it
    shows the newest that remembers anything. To delete an entry is to have all planners of that
    key forget everything. Entries cannot be set.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __getitem__(self, key: str) -> Any:
        return self._entries()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError(
            f"the cached plans of {key!r} belong to its planners and cannot be set here: pass a "
            "PlanCache to the planner, or delete the entry to have it plan anew"
        )

    def __delitem__(self, key: str) -> None:
        if key not in self._entries():
            raise KeyError(key)
        for planner in _caching_planners.values():
            if planner._cached_plans_key == key:
                planner.forget_cached_plans()

    def __repr__(self) -> str:
        return f"<{self._what} of the planners {list(self)}>"

    def _entries(self) -> dict[str, Any]:
        remembered = (
            (planner._cached_plans_key, planner._remembered().get(self._what))
            for planner in _caching_planners.values()
        )
        return {key: value for key, value in remembered if value}


class SavePlanner(abc.ABC):
    """Decides what each rank writes.

    One instance lives on each rank. Its methods are called in this order:

    1. `set_up_planner`, on every rank, with the state dict to save.
    2. `create_local_plan`, on every rank.
    3. `create_global_plan`, on the coordinator, with the plans of all ranks in order.
    4. `finish_plan`, on every rank, with this rank's part of the global plan.
    5. `resolve_data`, on every rank, at least once for each item of the final plan,
       possibly from several threads at once.

    Most planners extend `DefaultSavePlanner` and override one method; `examples/`
    holds the usual ones.
    """

    _cached_save_plan: ClassVar = _CachedByKey("save_plan")
    _cached_final_save_plan: ClassVar = _CachedByKey("final_save_plan")
    _cached_all_plans: ClassVar = _CachedByKey("all_plans")
    _cached_global_plan: ClassVar = _CachedByKey("global_plan")
    _cached_metadata: ClassVar = _CachedByKey("metadata")
    _cached_plans_key: str = ""

    @abc.abstractmethod
    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict to save. It is not handed over again later."""

    @abc.abstractmethod
    def create_local_plan(self) -> SavePlan:
        """The plan of this rank, to be sent to the coordinator."""

    @abc.abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The final plan of each rank, in order, and the metadata of the checkpoint."""

    @abc.abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan that this rank carries out, given the coordinator's answer."""

    @abc.abstractmethod
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of one item: a tensor of any device and layout, or bytes.

        Must give the same answer each time and be safe to call from several threads.
        Memory for a transformed value is best allocated here, not earlier.
        """

    def final_plans(self, answers: list[SavePlan]) -> list[SavePlan]:
        """What each rank writes, on the coordinator, given what it was answered.

        For planners that cache: an answer with `usable=False` stands for an earlier plan.
        """
        return answers

    def forget_cached_plans(self) -> None:  # noqa: B027
        """Plan from scratch next time. For planners that cache; called on every rank."""

    def _remembered(self) -> Mapping[str, Any]:
        """What the planner keeps for the next save, by the names of `_CachedByKey`."""
        return {}

    def _show_cache(self) -> None:
        """Let the views of cached plans show those of this planner, as long as it lives."""
        _caching_planners[id(self)] = self


_caching_planners: weakref.WeakValueDictionary[int, SavePlanner] = weakref.WeakValueDictionary()


class LoadPlanner:
    """Decides what each rank reads, and where to.

    Not an ABC: planners in use today leave out the methods that their storage never
    calls, and must go on to work.

    One instance lives on each rank. Its methods are called in this order:

    1. `set_up_planner`, on every rank, with the state dict to fill.
    2. `create_local_plan`, on every rank.
    3. `create_global_plan`, on the coordinator, with the plans of all ranks in order.
    4. `finish_plan`, on every rank, with this rank's part of the global plan.
    5. For each item of the final plan: `load_bytes` for a value, `resolve_tensor` and
       then `commit_tensor` for a region of a tensor; possibly from several threads.

    Most planners extend `DefaultLoadPlanner` and override one or two methods;
    `examples/` holds the usual ones.
    """

    call_settings: tuple[str, ...] = ()
    """Attributes that `load` sets for one call: `exclude`, `allow_pickle`, `allow_partial_load`."""
    covered_prefixes: tuple[str, ...] = ()
    """What stored names begin with that the planner takes care of under another name."""
    tied_names: Collection[str] = ()
    """Names that are not stored, but are filled with one that is: they share its memory."""
    casts: Mapping[str, tuple[torch.dtype, torch.dtype]] = MappingProxyType({})
    """The tensors that the plan fills from another dtype: the stored one, and their own."""

    @abc.abstractmethod
    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict to fill and the metadata of the checkpoint."""

    @abc.abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """The plan of this rank, to be sent to the coordinator."""

    @abc.abstractmethod
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The final plan of each rank, in order."""

    @abc.abstractmethod
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan that this rank carries out, given the coordinator's answer."""

    @abc.abstractmethod
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put the value that `value` encodes into the state dict.

        The encoding is that of the `SavePlanner` that wrote it.
        """

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """A buffer of the state dict for a storage that fills buffers in place."""
        raise NotImplementedError(
            f"{type(self).__name__} does not offer a buffer to fill in place for "
            f"{read_item.dest_index.fqn!r}; the storage should call load_bytes"
        )

    @abc.abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor to fill for `read_item`, of the size `read_item.lengths`.

        Best a view of the one in the state dict. Where that cannot be, `commit_tensor`
        moves the data on.
        """

    @abc.abstractmethod
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Called once `tensor`, as `resolve_tensor` returned it, holds the data."""

    def excludes(self, fqn: str) -> bool:
        """Whether a key of the state dict is to stay as it is."""
        return False

    def values_to_check(self) -> list[str]:
        """Stored values, by name, that must be looked at before anything is loaded.

        Called after `create_local_plan`.
        """
        return []

    def check_values(self, values: Mapping[str, bytes]) -> None:
        """Raise if stored values do not fit. Those that the storage cannot read early are left
        out.
        """

    def finish_load(self) -> None:
        """Do what is left to do when all is read. Called once, after the last tensor."""

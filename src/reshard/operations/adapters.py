"""Planners and storages that derive from torch's classes, made to fit our contracts.

They are handed torch's plans, items and metadata, and what they return is taken over. An object
is adapted once for each operation, by `adapt_for_save` and `adapt_for_load`; those that derive
from our contracts, or from none, are used as they are.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.futures import Future

from reshard.api import CheckpointException, PlanError
from reshard.engine.reading import Verify
from reshard.format.torch_files import decode_stored
from reshard.format.values import MAGIC, decode_value
from reshard.metadata import STATE_DICT_TYPE, Metadata, MetadataIndex, StorageMeta
from reshard.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from reshard.plans.traits import load_traits, save_traits
from reshard.storage import StorageReader, StorageWriter, parameters_of, takes_any_keyword
from reshard.tensors import dcp_types
from reshard.tensors.dcp_modules import is_of_dcp, originals
from reshard.tensors.flatten import Rules
from reshard.tensors.shards_for_torch import with_shards_for_torch

Place = str | os.PathLike[str]


class ForSave(NamedTuple):
    """Who writes, who plans, and how the planner is to be set."""

    writer: StorageWriter
    planner: SavePlanner
    planner_settings: dict[str, Any]


def adapt_for_save(writer: StorageWriter, planner: SavePlanner) -> ForSave:
    """The storage and the planner of a save, such that they fit our contracts and each other."""
    if _is_torchs(planner, SavePlanner):
        planner = _TorchSavePlanner(planner)
    if not _is_torchs(writer, StorageWriter):
        return ForSave(writer, planner, {})
    return ForSave(_TorchWriter(writer), planner, {"rules": Rules.DCP, "finds_ties": False})


def adapt_for_load(
    reader: StorageReader, planner: LoadPlanner
) -> tuple[StorageReader, LoadPlanner]:
    """The same for a load."""
    if _is_torchs(reader, StorageReader):
        reader = _TorchReader(reader)
    if _is_torchs(planner, LoadPlanner):
        planner = _TorchLoadPlanner(planner, reader)
    return reader, planner


def check_kinds(
    *, writer: object = None, reader: object = None, save: object = None, load: object = None
) -> None:
    """Raise for objects that derive from torch's classes and cannot be adapted."""
    for used, contract in (
        (writer, StorageWriter),
        (reader, StorageReader),
        (save, SavePlanner),
        (load, LoadPlanner),
    ):
        _is_torchs(used, contract)


def _is_torchs(used: object, contract: type) -> bool:
    """Whether `used` implements the contract of that name of torch's, and not ours."""
    theirs = [base for base in type(used).__mro__ if is_of_dcp(base)]
    if not theirs:
        return False
    name = contract.__name__
    implements = any(base.__name__ == name for base in theirs)
    if isinstance(used, contract):
        if not implements:
            # Such as a storage of ours that is a stager of torch's as well.
            return False
        raise PlanError(
            f"{type(used).__name__} derives from the {name} of torch.distributed.checkpoint and "
            "from that of reshard, so nobody can say whose plans it takes: derive it from one of "
            "them"
        )
    if not implements:
        raise PlanError(
            f"{type(used).__name__} derives from {theirs[0].__module__}.{theirs[0].__qualname__} "
            f"and not from the {name} that is needed here: pass a {name}"
        )
    return True


# Storages


class _TorchWriter(StorageWriter):
    """A storage that takes torch's plans. What it returns of results goes back to it."""

    def __init__(self, used: Any) -> None:
        self._used = used

    def reset(self, checkpoint_id: Place | None = None) -> None:
        self._used.reset(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return dcp_types.to_storage_meta(self._used.storage_meta())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        method = self._used.set_up_storage_writer
        taken = _taken(method, kwargs, "rank", "use_collectives")
        apart = kwargs.get("world_size", 1) > 1 and not kwargs.get("use_collectives", True)
        # One of a user may know by itself; torch's of 2.8 lets ranks overwrite each other's.
        if apart and "use_collectives" not in taken and is_of_dcp(method):
            raise PlanError(
                f"{type(self._used).__name__} of torch {torch.__version__} writes one manifest for "
                "all ranks, and without collectives each has its own: leave use_collectives out, "
                "or pass a storage of reshard"
            )
        method(is_coordinator, **taken)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        prepared = self._used.prepare_local_plan(dcp_types.to_torch_save_plan(plan))
        return dcp_types.to_save_plan(prepared, plan.fingerprint)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        given = [dcp_types.to_torch_save_plan(plan) for plan in plans]
        prepared = _as_many(self._used.prepare_global_plan(given), plans, self._used)
        return [
            dcp_types.to_save_plan(theirs, plan.fingerprint)
            for theirs, plan in zip(prepared, plans, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        written: Future[Any] = self._used.write_data(
            dcp_types.to_torch_save_plan(plan), _save_planner_for_torch(planner)
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        self._check_complete(metadata, results)
        theirs = dcp_types.to_torch_metadata(metadata)
        # Most storages pickle the metadata.
        with originals.in_place():
            self._used.finish(metadata=theirs, results=[list(each) for each in results])
        metadata.storage_data = dcp_types.to_storage_data(theirs.storage_data)
        metadata.storage_meta = dcp_types.to_storage_meta(theirs.storage_meta)
        metadata.version = getattr(theirs, "version", metadata.version)

    def _check_complete(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Raise if the metadata would promise what the storage does not hold."""
        for rank, each in enumerate(results):
            # What a storage returns is its own affair: some return no WriteResults.
            if any(isinstance(getattr(result, "index", None), MetadataIndex) for result in each):
                raise PlanError(
                    f"rank {rank} wrote with another kind of storage than "
                    f"{type(self._used).__name__}: pass the same on all ranks"
                )
        for name, entry in metadata.state_dict_metadata.items():
            if entry.alias_of is not None:
                raise PlanError(
                    f"{name!r} is planned as another name of {entry.alias_of!r}, which "
                    f"{type(self._used).__name__} cannot store: have the planner write it as well"
                )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        """True: whoever made the storage has chosen its place."""
        return True


class _TorchReader(StorageReader):
    """A storage that takes torch's plans, and reads metadata of torch's."""

    call_settings = ("allow_pickle", "verify")

    def __init__(self, used: Any) -> None:
        self._used = used
        self.allow_pickle = False
        self._read: tuple[Any, Metadata] | None = None

    @property
    def verify(self) -> Verify:
        return Verify.OFF

    @verify.setter
    def verify(self, value: Verify) -> None:
        if value is not Verify.OFF:
            raise ValueError(
                f"{type(self._used).__name__} keeps no checksums that Reshard knows, so "
                f"verify={value.value!r} has nothing to compare with: leave it out"
            )

    @property
    def checkpoint_id(self) -> Any:
        return getattr(self._used, "checkpoint_id", None)

    def reset(self, checkpoint_id: Place | None = None) -> None:
        self._used.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        method = self._used.read_metadata
        try:
            # Most storages unpickle the metadata.
            with originals.in_place():
                theirs = method(**_taken(method, kwargs, "rank"))
        except pickle.UnpicklingError as error:
            raise CheckpointException(
                f"the metadata at {str(self.checkpoint_id)!r} is no pickle, which "
                f"{type(self._used).__name__} reads. If Reshard has saved this checkpoint, leave "
                "storage_reader out or pass a reshard.FileSystemReader"
            ) from error
        self._read = theirs, dcp_types.to_metadata(theirs)
        return self._read[1]

    def metadata_for_torch(self, metadata: Metadata) -> Any:
        """Metadata for code of torch's: what was read, if it is that."""
        if self._read is not None and metadata is self._read[1]:
            return self._read[0]
        return dcp_types.to_torch_metadata(metadata)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        method = self._used.set_up_storage_reader
        details = _taken(method, kwargs, "rank", "use_collectives")
        method(self.metadata_for_torch(metadata), is_coordinator, **details)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        prepared = self._used.prepare_local_plan(dcp_types.to_torch_load_plan(plan))
        return dcp_types.to_load_plan(prepared)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        given = [dcp_types.to_torch_load_plan(plan) for plan in plans]
        prepared = _as_many(self._used.prepare_global_plan(given), plans, self._used)
        return [dcp_types.to_load_plan(plan) for plan in prepared]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        read: Future[None] = self._used.read_data(
            dcp_types.to_torch_load_plan(plan), _load_planner_for_torch(planner, self.allow_pickle)
        )
        return read

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        """True: whoever made the storage has chosen its place."""
        return True


def _taken(method: Any, details: dict[str, Any], *names: str) -> dict[str, Any]:
    """Those of `details` that torch has too, as far as a method of a user takes them."""
    parameters, takes_all = parameters_of(method), takes_any_keyword(method)
    return {
        name: details[name]
        for name in names
        if name in details and (takes_all or name in parameters)
    }


def _as_many(plans: Sequence[Any], given: Sequence[Any], used: object) -> Sequence[Any]:
    if len(plans) != len(given):
        raise PlanError(
            f"{type(used).__name__} returned {len(plans)} plans for {len(given)} ranks: return one "
            "for each"
        )
    return plans


# Planners


class _TorchSavePlanner(SavePlanner):
    """A planner that makes torch's plans."""

    def __init__(self, used: Any) -> None:
        self.used = used

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # In a process that saves for its trainer there is no mesh.
        state_dict = with_shards_for_torch(state_dict)
        if "storage_meta" not in parameters_of(self.used.set_up_planner):
            # As planners were before torch 2.3.
            self.used.set_up_planner(state_dict, is_coordinator)
            return
        self.used.set_up_planner(
            state_dict=state_dict,
            storage_meta=dcp_types.to_torch_storage_meta(storage_meta),
            is_coordinator=is_coordinator,
        )

    @property
    def plan(self) -> SavePlan:
        """What was planned last, for a planner that only says that it has not changed."""
        return dcp_types.to_save_plan(self.used.plan)

    def create_local_plan(self) -> SavePlan:
        return dcp_types.to_save_plan(self.used.create_local_plan())

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        given = [dcp_types.to_torch_save_plan(plan) for plan in all_plans]
        plans, metadata = self.used.create_global_plan(given)
        return [dcp_types.to_save_plan(plan) for plan in plans], dcp_types.to_metadata(metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        theirs = self.used.finish_plan(dcp_types.to_torch_save_plan(new_plan))
        final = dcp_types.to_save_plan(theirs)
        if new_plan.usable:
            return final
        # A plan of an earlier save. What the storage said then is of no use any more.
        return SavePlan(final.items, new_plan.storage_data, final.planner_data)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data: torch.Tensor | io.BytesIO = self.used.resolve_data(
            dcp_types.to_torch_write_item(write_item)
        )
        return data

    def forget_cached_plans(self) -> None:
        dcp_types.forget_cached_plans(self.used)


class _TorchLoadPlanner(LoadPlanner):
    """A planner that makes torch's plans.

    Torch's metadata cannot say that a tensor is stored under another name, so that is put right
    in the items that the planner makes.
    """

    def __init__(self, used: Any, reader: StorageReader) -> None:
        self.used = used
        self._reader = reader
        self._stored_names: dict[str, str] = {}
        if hasattr(used, "allow_partial_load"):
            self.call_settings = ("allow_partial_load",)

    @property
    def allow_partial_load(self) -> bool:
        return bool(self.used.allow_partial_load)

    @allow_partial_load.setter
    def allow_partial_load(self, value: bool) -> None:
        self.used.allow_partial_load = value

    @property
    def state_dict(self) -> Any:
        return self.used.state_dict

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        theirs: Any = None
        if metadata is not None:
            entries = metadata.state_dict_metadata.items()
            self._stored_names = {n: e.alias_of for n, e in entries if e.alias_of is not None}
            theirs = (
                self._reader.metadata_for_torch(metadata)
                if isinstance(self._reader, _TorchReader)
                else dcp_types.to_torch_metadata(metadata)
            )
        self.used.set_up_planner(state_dict, theirs, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        plan = dcp_types.to_load_plan(self.used.create_local_plan())
        if self._stored_names:
            plan.items = [self._with_stored_name(item) for item in plan.items]
        return plan

    def _with_stored_name(self, item: ReadItem) -> ReadItem:
        index = item.storage_index
        stored = self._stored_names.get(index.fqn)
        if stored is None:
            return item
        return replace(item, storage_index=replace(index, fqn=stored))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        given = [dcp_types.to_torch_load_plan(plan) for plan in global_plan]
        plans = _as_many(self.used.create_global_plan(given), global_plan, self.used)
        return [dcp_types.to_load_plan(plan) for plan in plans]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return dcp_types.to_load_plan(
            self.used.finish_plan(dcp_types.to_torch_load_plan(central_plan))
        )

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.used.load_bytes(dcp_types.to_torch_read_item(read_item), value)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        buffer: io.BytesIO = self.used.resolve_bytes(dcp_types.to_torch_read_item(read_item))
        return buffer

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor: torch.Tensor = self.used.resolve_tensor(dcp_types.to_torch_read_item(read_item))
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.used.commit_tensor(dcp_types.to_torch_read_item(read_item), tensor)


# Planners of ours, as storages of torch's see them


class _ForTorch:
    """What a storage of torch's asks a planner for. All else is the planner's own."""

    def __init__(self, planner: Any, allow_pickle: bool = False) -> None:
        self._planner = planner
        self._allow_pickle = allow_pickle

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_planner" not in vars(self):
            # A copy that is being made has nothing yet.
            raise AttributeError(name)
        return getattr(self._planner, name)


class _SavesForTorch(_ForTorch):
    """Gives values as files of torch.save, which is what torch reads."""

    def __reduce__(self) -> Any:
        # A storage may write in processes of its own.
        return _save_planner_for_torch, (self._planner,)

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._planner.set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> Any:
        return dcp_types.to_torch_save_plan(self._planner.create_local_plan())

    def create_global_plan(self, all_plans: Any) -> Any:
        plans = [dcp_types.to_save_plan(plan) for plan in all_plans]
        answers, metadata = self._planner.create_global_plan(plans)
        theirs = [dcp_types.to_torch_save_plan(plan) for plan in answers]
        return theirs, dcp_types.to_torch_metadata(metadata)

    def finish_plan(self, new_plan: Any) -> Any:
        final = self._planner.finish_plan(dcp_types.to_save_plan(new_plan))
        return dcp_types.to_torch_save_plan(final)

    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        item, planner = dcp_types.to_write_item(write_item), self._planner
        if item.type is not WriteItemType.BYTE_IO:
            tensor: torch.Tensor = planner.resolve_data(item)
            return tensor
        if save_traits(planner).keeps_values:
            return _torch_file(planner.lookup_object(item.index))
        data: io.BytesIO = planner.resolve_data(item)
        encoded = data.getvalue()
        if encoded[: len(MAGIC)] != MAGIC:
            return data
        # Encoded a moment ago, by this process.
        return _torch_file(decode_value(encoded, item.index.fqn, allow_pickle=True))


class _LoadsForTorch(_ForTorch):
    """Hands on what is read, values under the rules of ours: nothing is executed."""

    def __reduce__(self) -> Any:
        return _load_planner_for_torch, (self._planner, self._allow_pickle)

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._planner.set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> Any:
        return dcp_types.to_torch_load_plan(self._planner.create_local_plan())

    def create_global_plan(self, global_plan: Any) -> Any:
        plans = [dcp_types.to_load_plan(plan) for plan in global_plan]
        return [dcp_types.to_torch_load_plan(p) for p in self._planner.create_global_plan(plans)]

    def finish_plan(self, central_plan: Any) -> Any:
        final = self._planner.finish_plan(dcp_types.to_load_plan(central_plan))
        return dcp_types.to_torch_load_plan(final)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        item = dcp_types.to_read_item(read_item)
        if not load_traits(self._planner).decodes_values and not self._allow_pickle:
            # The planner of a user unpickles it, so it must not be more than plain data.
            decode_stored(item.storage_index.fqn, value.getvalue(), allow_pickle=False)
        self._planner.load_bytes(item, value)

    def resolve_bytes(self, read_item: Any) -> Any:
        return self._planner.resolve_bytes(dcp_types.to_read_item(read_item))

    def resolve_tensor(self, read_item: Any) -> Any:
        return self._planner.resolve_tensor(dcp_types.to_read_item(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self._planner.commit_tensor(dcp_types.to_read_item(read_item), tensor)


@cache
def _as_torch_class(kind: type, contract: str) -> Any:
    """`kind` as a class that derives from torch's contract as well, for code that asks."""
    return type(contract, (kind, getattr(dcp_types.torch_types().planner, contract)), {})


def _save_planner_for_torch(planner: Any) -> Any:
    if isinstance(planner, _TorchSavePlanner):
        return planner.used
    return _as_torch_class(_SavesForTorch, "SavePlanner")(planner)


def _load_planner_for_torch(planner: Any, allow_pickle: bool) -> Any:
    if isinstance(planner, _TorchLoadPlanner):
        return planner.used
    return _as_torch_class(_LoadsForTorch, "LoadPlanner")(planner, allow_pickle)


def _torch_file(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    return file

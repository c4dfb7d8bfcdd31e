"""Conversion between the classes of `torch.distributed.checkpoint` and ours, both ways.

Tensor subclasses that implement torch's checkpointable protocol use torch's, and so do planners
and storages that derive from torch's. Functions that begin with `to_torch_` make torch's objects,
the others ours. Code that was imported before a patch may mix both, so what is ours already is
taken as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

import torch

from reshard.api import PlanError
from reshard.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from reshard.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from reshard.storage import StorageInfo
from reshard.tensors.dcp_modules import torch_module
from reshard.tensors.paths import PathMap


@dataclasses.dataclass(frozen=True)
class TorchTypes:
    """The classes of torch's that plans, metadata and results are made of."""

    planner: Any
    metadata: Any
    storage: Any
    storage_info: Any


@cache
def torch_types() -> TorchTypes:
    # They stay the same objects for as long as the process lives, patched or not.
    return TorchTypes(
        torch_module("planner"),
        torch_module("metadata"),
        torch_module("storage"),
        torch_module("filesystem")._StorageInfo,
    )


# To ours


def to_chunk(chunk: Any) -> ChunkStorageMetadata:
    if isinstance(chunk, ChunkStorageMetadata):
        return chunk
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


def to_index(index: Any) -> MetadataIndex:
    if isinstance(index, MetadataIndex):
        return index
    return MetadataIndex(index.fqn, index.offset, index.index)


def to_properties(properties: Any) -> TensorProperties:
    if isinstance(properties, TensorProperties):
        return properties
    return TensorProperties(**_common_fields(properties, TensorProperties))


def to_write_item(item: Any) -> WriteItem:
    if isinstance(item, WriteItem):
        return item
    _refuse_own_fields(item, torch_types().planner.WriteItem)
    data, known = item.tensor_data, item.bytes_io_data
    return WriteItem(
        to_index(item.index),
        WriteItemType[item.type.name],
        None if known is None else BytesIOWriteData(known.nbytes),
        None
        if data is None
        else TensorWriteData(
            to_chunk(data.chunk), to_properties(data.properties), torch.Size(data.size)
        ),
    )


def to_read_item(item: Any) -> ReadItem:
    if isinstance(item, ReadItem):
        return item
    _refuse_own_fields(item, torch_types().planner.ReadItem)
    return ReadItem(
        LoadItemType[item.type.name],
        to_index(item.dest_index),
        torch.Size(item.dest_offsets),
        to_index(item.storage_index),
        torch.Size(item.storage_offsets),
        torch.Size(item.lengths),
    )


def to_save_plan(plan: Any, fingerprint: bytes = b"") -> SavePlan:
    """A plan of torch's, which has no place for a `fingerprint`."""
    if not isinstance(plan, SavePlan):
        _refuse_own_fields(plan, torch_types().planner.SavePlan)
    return SavePlan(
        [to_write_item(item) for item in plan.items],
        storage_data=plan.storage_data,
        planner_data=plan.planner_data,
        usable=getattr(plan, "usable", True),
        fingerprint=fingerprint,
    )


def to_load_plan(plan: Any) -> LoadPlan:
    if not isinstance(plan, LoadPlan):
        _refuse_own_fields(plan, torch_types().planner.LoadPlan)
    return LoadPlan(
        [to_read_item(item) for item in plan.items],
        storage_data=plan.storage_data,
        planner_data=plan.planner_data,
    )


def to_storage_meta(meta: Any) -> StorageMeta | None:
    if meta is None or isinstance(meta, StorageMeta):
        return meta
    return StorageMeta(**_common_fields(meta, StorageMeta))


def to_metadata(metadata: Any) -> Metadata:
    """Metadata of torch's, with what its storage and its planner keep in it."""
    return Metadata(
        {name: _to_entry(entry) for name, entry in metadata.state_dict_metadata.items()},
        planner_data=metadata.planner_data,
        storage_data=to_storage_data(metadata.storage_data),
        # Not there in files of older versions.
        storage_meta=to_storage_meta(getattr(metadata, "storage_meta", None)),
        version=getattr(metadata, "version", None),
    )


def _to_entry(entry: Any) -> STORAGE_TYPES:
    if isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
        return entry
    if not hasattr(entry, "chunks"):
        return BytesStorageMetadata()
    return TensorStorageMetadata(
        to_properties(entry.properties),
        torch.Size(entry.size),
        [to_chunk(chunk) for chunk in entry.chunks],
    )


def to_storage_data(data: Any) -> Any:
    """Where a storage has put things. What is not a dict by index is the storage's own."""
    types = torch_types()
    if not isinstance(data, Mapping):
        return data
    return {
        to_index(key) if isinstance(key, types.metadata.MetadataIndex) else key: (
            StorageInfo(**_common_fields(value, StorageInfo))
            if type(value) is types.storage_info
            else value
        )
        for key, value in data.items()
    }


# To torch's


def to_torch_index(index: MetadataIndex) -> Any:
    return torch_types().metadata.MetadataIndex(index.fqn, index.offset, index.index)


def _to_torch_chunk(chunk: ChunkStorageMetadata) -> Any:
    return torch_types().metadata.ChunkStorageMetadata(chunk.offsets, chunk.sizes)


def _to_torch_properties(properties: TensorProperties) -> Any:
    kind = torch_types().metadata.TensorProperties
    return kind(**_common_fields(properties, kind))


def to_torch_write_item(item: WriteItem) -> Any:
    planner = torch_types().planner
    data, known = item.tensor_data, item.bytes_io_data
    return planner.WriteItem(
        to_torch_index(item.index),
        planner.WriteItemType[item.type.name],
        None if known is None else planner.BytesIOWriteData(known.nbytes),
        None
        if data is None
        else planner.TensorWriteData(
            _to_torch_chunk(data.chunk), _to_torch_properties(data.properties), data.size
        ),
    )


def to_torch_read_item(item: ReadItem) -> Any:
    planner = torch_types().planner
    return planner.ReadItem(
        planner.LoadItemType[item.type.name],
        to_torch_index(item.dest_index),
        item.dest_offsets,
        to_torch_index(item.storage_index),
        item.storage_offsets,
        item.lengths,
    )


def to_torch_save_plan(plan: SavePlan) -> Any:
    kind = torch_types().planner.SavePlan
    items = [to_torch_write_item(item) for item in plan.items]
    return kind(items, plan.storage_data, plan.planner_data, plan.usable)


def to_torch_load_plan(plan: LoadPlan) -> Any:
    items = [to_torch_read_item(item) for item in plan.items]
    return torch_types().planner.LoadPlan(items, plan.storage_data, plan.planner_data)


def to_torch_storage_meta(meta: StorageMeta | None) -> Any:
    if meta is None:
        return None
    kind = torch_types().metadata.StorageMeta
    return kind(**_common_fields(meta, kind))


def to_torch_metadata(metadata: Metadata) -> Any:
    """Metadata for code of torch's. It has no word for a tensor that another one holds."""
    kind = torch_types().metadata.Metadata
    entries = metadata.state_dict_metadata.items()
    values = {
        "state_dict_metadata": {name: _to_torch_entry(entry) for name, entry in entries},
        "planner_data": _plain_paths(metadata.planner_data),
        "storage_data": metadata.storage_data,
        "storage_meta": to_torch_storage_meta(metadata.storage_meta),
        "version": metadata.version,
    }
    # Older torch has no version.
    return kind(**{name: values[name] for name in _common_fields(metadata, kind)})


def _to_torch_entry(entry: STORAGE_TYPES) -> Any:
    kinds = torch_types().metadata
    if isinstance(entry, BytesStorageMetadata):
        return kinds.BytesStorageMetadata()
    return kinds.TensorStorageMetadata(
        _to_torch_properties(entry.properties),
        torch.Size(entry.size),
        [_to_torch_chunk(chunk) for chunk in entry.chunks],
    )


def _plain_paths(planner_data: Any) -> Any:
    """How names nest, in types that can be read without this library."""
    if not isinstance(planner_data, PathMap):
        return planner_data
    return {
        name: tuple(str(key) if isinstance(key, str) else key for key in path)
        for name, path in planner_data.items()
    }


# What else code of torch's is asked


def default_extension_registry() -> Any:
    """The stream extensions that torch knows by itself."""
    return torch_module("_extension").ExtensionRegistry()


def forget_cached_plans(planner: Any) -> None:
    """Have a planner of torch's plan from scratch. It caches in its class, by a key."""
    key = getattr(planner, "_cached_plans_key", None)
    for name in (
        "_cached_save_plan",
        "_cached_final_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
    ):
        getattr(planner, name, {}).pop(key, None)


def _common_fields(value: Any, kind: Any) -> dict[str, Any]:
    """The fields of `kind` that `value` has too: versions of torch differ in some."""
    own: Any = type(value)
    names = _shared_names(own, kind)
    # An object from an older pickle may lack a field of its class.
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


@cache
def _shared_names(one: Any, other: Any) -> tuple[str, ...]:
    own = {f.name for f in fields(one)}
    return tuple(f.name for f in fields(other) if f.name in own)


def _refuse_own_fields(value: Any, kind: Any) -> None:
    """Raise for an item or plan with more fields than can be carried to other ranks."""
    if type(value) is kind:
        return
    own = getattr(value, "__dataclass_fields__", {}).keys() - {f.name for f in fields(kind)}
    if own or not isinstance(value, kind):
        why = f" with fields of its own ({', '.join(sorted(own))})" if own else ""
        raise PlanError(
            f"{type(value).__qualname__} stands for the {kind.__name__} of "
            f"torch.distributed.checkpoint{why}: plans travel between ranks as columns, which have "
            "no place for that. Return a plain one, and keep what is needed in planner_data or "
            "storage_data of the plan"
        )

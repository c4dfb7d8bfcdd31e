"""Loading optimizer state in the layout of its model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from reshard.api import CheckpointException, CoverageError, MissingKeyError
from reshard.background.queue import save_queue
from reshard.default_planner import DefaultLoadPlanner
from reshard.metadata import (
    STATE_DICT_TYPE,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from reshard.operations.targets import comparable_place
from reshard.planner import LoadPlan, LoadPlanner, ReadItem
from reshard.plans.local_load_plan import create_read_items_for_chunk_list
from reshard.state_dict_loader import _load_state_dict
from reshard.storage import StorageReader
from reshard.tensors.flatten import unflatten_state_dict
from reshard.tensors.parameter_layout import chunk_sharded, empty_like_parameter, nested_part
from reshard.tensors.paths import StatePath
from reshard.tensors.shards import local_shards

__all__ = ["load_sharded_optimizer_state_dict"]

STATE_DICT_2D_LAYOUT = dict[str, tuple[Sequence[int] | None, Sequence[int]]]

_FLAT_PREFIX = "state."


def load_sharded_optimizer_state_dict(
    model_state_dict: STATE_DICT_TYPE,
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> STATE_DICT_TYPE:
    """Load the optimizer state of a checkpoint, sharded like the parameters it belongs to.

    The checkpoint determines which state there is; no optimizer is needed. A collective over
    the default group, if there is one. Returns a dict with `optimizer_key` as its only key.
    State of parameters that are not in `model_state_dict` is sharded along its first
    dimension over all ranks.
    """
    save_queue().settle(comparable_place(getattr(storage_reader, "checkpoint_id", None)))
    metadata = storage_reader.read_metadata()
    paths = metadata.planner_data
    if not isinstance(paths, Mapping):
        raise CheckpointException(
            "the checkpoint does not say how its keys nest, as it was saved without flattening; "
            "load its optimizer state with load()"
        )
    wanted: STATE_DICT_TYPE = {}
    offsets: dict[str, tuple[int, ...]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        path = paths.get(name, (name,))
        if path[0] != optimizer_key:
            continue
        if isinstance(entry, BytesStorageMetadata):
            wanted[name] = None
            continue
        parameter = model_state_dict.get(_parameter_name(path, model_state_dict))
        wanted[name] = _memory_for(entry, parameter)
        part = nested_part(parameter)
        if part is not None and wanted[name].size() != entry.size:
            offsets[name] = part.offsets
    if not wanted:
        there = sorted({str(path[0]) for path in paths.values()})
        raise MissingKeyError(
            f"the checkpoint has no {optimizer_key!r}; what it has at the top is {there}"
        )
    # Parts of stored tensors need a planner that knows their offsets.
    chosen = planner if planner is not None and not offsets else _ReaderWithOffset(offsets)
    _load_state_dict(wanted, storage_reader, planner=chosen)
    loaded = unflatten_state_dict(wanted, paths)
    if isinstance(loaded[optimizer_key], dict) and "param_groups" in loaded[optimizer_key]:
        # Nothing is stored for the empty state of an optimizer that was never stepped.
        loaded[optimizer_key].setdefault("state", {})
    return loaded


def _parameter_name(path: StatePath, model_state_dict: Mapping[str, Any]) -> str:
    """The parameter of a state at `optim / state / name / exp_avg`, nested or flattened."""
    if len(path) > 2 and str(path[2]) in model_state_dict:
        return str(path[2])
    flat = str(path[1]) if len(path) > 1 else ""
    if flat.startswith(_FLAT_PREFIX):
        return flat.removeprefix(_FLAT_PREFIX).rpartition(".")[0]
    return ""


def _memory_for(entry: TensorStorageMetadata, parameter: Any) -> torch.Tensor:
    dtype = entry.properties.dtype
    if parameter is not None:
        made = empty_like_parameter(parameter, entry.size, dtype)
        if made is not None:
            return made
    if math.prod(entry.size) <= 1 or not (dist.is_available() and dist.is_initialized()):
        return torch.empty(entry.size, dtype=dtype, device="cpu")
    return chunk_sharded(entry.size, dtype)


def _get_state_dict_2d_layout(
    state_dict: STATE_DICT_TYPE,
) -> tuple[STATE_DICT_2D_LAYOUT, dist.ProcessGroup | None]:
    """Which part of each tensor this rank has a share of, as tensor parallelism under FSDP cuts it.

    By name the offset of the part, None if it is all of the tensor, and its size; and the group
    that shards the parts.
    """
    layout: STATE_DICT_2D_LAYOUT = {}
    group: dist.ProcessGroup | None = None
    for name, value in state_dict.items():
        part = nested_part(value)
        layout[name] = (None, value.size()) if part is None else (part.offsets, part.sizes)
        group = group if part is None else part.group
    return layout, group


def _alloc_tensor(
    props: TensorProperties, size: Sequence[int], device_type: str = "cuda"
) -> torch.Tensor:
    """An empty tensor on the current device of a kind."""
    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, torch.get_device_module(device_type).current_device())
    return torch.empty(
        size,
        dtype=props.dtype,
        layout=props.layout,
        requires_grad=props.requires_grad,
        pin_memory=props.pin_memory,
        device=device,
    )


class _ReaderWithOffset(DefaultLoadPlanner):
    """Loads tensors that are parts of stored ones, as with tensor parallelism.

    `fqn_to_offset` has the offset of each in the stored tensor of the same name.
    """

    def __init__(self, fqn_to_offset: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.fqn_to_offset = fqn_to_offset

    def create_local_plan(self) -> LoadPlan:
        everything = self.state_dict
        self.state_dict = {k: v for k, v in everything.items() if k not in self.fqn_to_offset}
        try:
            items = super().create_local_plan().items
        finally:
            self.state_dict = everything
        if not self.fqn_to_offset:
            return LoadPlan(items)
        return LoadPlan(
            [*items, *(item for name in self.fqn_to_offset for item in self._items(name))]
        )

    def _items(self, name: str) -> list[ReadItem]:
        entry = self.metadata.state_dict_metadata[name] if self.metadata is not None else None
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointException(f"{name!r} is not stored as a tensor")
        found = []
        shift = self.fqn_to_offset[name]
        for shard in local_shards(name, self.state_dict[name]):
            begin = torch.Size(a + b for a, b in zip(shard.offsets, shift, strict=True))
            chunk = ChunkStorageMetadata(begin, torch.Size(shard.sizes))
            items = create_read_items_for_chunk_list(name, entry, [chunk])
            if sum(item.lengths.numel() for item in items) != math.prod(shard.sizes):
                raise CoverageError(
                    f"the checkpoint does not hold {tuple(shard.sizes)} of {name!r} at "
                    f"{tuple(begin)}, exactly once"
                )
            # The offset in the stored tensor differs from that in the local one.
            index = MetadataIndex(name, shard.offsets)
            found += [dataclasses.replace(item, dest_index=index) for item in items]
        return found

"""A stored checkpoint as something to save: a planner that reads what it is asked to write."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from reshard.api import CoverageError, StateDictError
from reshard.checkpoint.planner_data import unpack_planner_data
from reshard.checkpoint.stored_tensors import StoredTensors
from reshard.convert.copying import regions_of
from reshard.convert.selection import Selection, check_plain, check_savable, pick_tensors
from reshard.default_planner import DefaultSavePlanner
from reshard.metadata import STATE_DICT_TYPE, StorageMeta
from reshard.planner import SavePlan, WriteItem, WriteItemType
from reshard.planning.columns import SHARD, TENSOR
from reshard.plans.write_items import RowBuilder, WriteItems
from reshard.tensors.paths import PathMap, StatePath

_CHUNK_BYTES = 128 << 20
"""Larger chunks are cut, since each is read at once. Some threads do that at the same time."""


class StoredPlanner(DefaultSavePlanner):
    """Saves what another checkpoint holds. All ranks offer all of it, and write their share.

    Chunks stay as they are, but large ones are cut. Values are copied as they are stored, so that
    no pickle has to be opened.
    """

    def __init__(self, source: StoredTensors, selection: Selection) -> None:
        super().__init__()
        self._source = source
        self._selection = selection
        self._tensors: dict[str, int] = {}
        self._values: dict[str, int] = {}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        m = self._source.manifest
        self.is_coordinator = is_coordinator
        self.state_dict = {}
        names = self._selection.names(self._source)
        self._values = {names[name]: row for row, name in enumerate(m.value_names) if name in names}
        if not self.takes_composites:
            check_plain(self._values, self._source.location, "a checkpoint of DCP")
        stored = unpack_planner_data(m.planner_data, self._source.location, allow_pickle=False)
        self.mappings = renamed_paths(stored, names, self._selection)
        self._items = self._build_items(names)

    def _build_items(self, names: Mapping[str, str]) -> WriteItems:
        picked, others = pick_tensors(self._source, names, self._selection)
        if not self.takes_composites:
            check_savable(picked, self._source.location)
        by_name = {tensor.name: tensor for tensor in picked}
        builder, m = RowBuilder(), self._source.manifest
        first_rows: dict[str, int] = {}
        for name in [name for name in names.values() if name in by_name or name in others]:
            tensor = by_name[others.get(name, name)]
            self._tensors[name] = tensor.tensor
            regions = list(self._regions(tensor.tensor))
            if sum(math.prod(sizes) for _, sizes in regions) != math.prod(tensor.shape):
                raise CoverageError(
                    f"{self._source.location} does not hold all of {name!r}. Save it with all of "
                    "its ranks, or leave it out"
                )
            kind = TENSOR if len(regions) == 1 else SHARD
            first_rows[name] = len(builder)
            for number, (offsets, sizes) in enumerate(regions):
                alias = first_rows[others[name]] + number if name in others else -1
                flags = int(m.flags[tensor.tensor])
                builder.add_region(
                    name, kind, tensor.dtype, flags, tensor.shape, offsets, sizes, -1, alias
                )
        for name in self._values:
            builder.add_value(name)
        return WriteItems(builder.build())

    def _regions(self, tensor: int) -> Any:
        m, dims = self._source.manifest, len(self._source.shape(tensor))
        itemsize = self._source.dtype(tensor).itemsize
        for row in self._source.rows(tensor):
            begins = m.chunk_offsets[row, :dims].tolist()
            shape = tuple(m.chunk_sizes[row, :dims].tolist())
            for offsets, sizes in regions_of(shape, itemsize, _CHUNK_BYTES):
                yield [a + b for a, b in zip(begins, offsets, strict=True)], sizes

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name, data = write_item.index.fqn, write_item.tensor_data
        if write_item.type is WriteItemType.BYTE_IO or data is None:
            return io.BytesIO(self._source.value(self._values[name]))
        tensor, sizes = self._tensors[name], tuple(data.chunk.sizes)
        region = torch.empty(sizes, dtype=self._source.dtype(tensor), device="cpu")
        self._source.read(tensor, tuple(data.chunk.offsets), sizes, region)
        return region.to(data.properties.dtype)


def renamed_paths(stored: Any, names: Mapping[str, str], selection: Selection) -> PathMap:
    """The paths of what is saved, by stored `names` and their new ones.

    Parts that a new name ends with stay what they are.
    """
    paths = PathMap()
    if not isinstance(stored, PathMap):
        return paths
    for name, path in stored.items():
        if name in names:
            new = names[name]
            paths[new] = path if new == name else _renamed_path(path, new)
    _check_containers(paths)
    paths.empties = tuple(_renamed_empties(stored.empties, selection))
    return paths


def _renamed_empties(empties: Iterable[StatePath], selection: Selection) -> Iterator[StatePath]:
    for path in empties:
        name = ".".join(map(str, path))
        if selection.is_wanted(name):
            new = selection.new_name(name)
            yield path if new == name else _renamed_path(path, new)


def _check_containers(paths: PathMap) -> None:
    """Refuse new names that would put a key into a list, or a position into a dict."""
    kinds: dict[StatePath, tuple[bool, str]] = {}
    for name, path in paths.items():
        for depth in range(1, len(path)):
            is_list = isinstance(path[depth], int)
            known, other = kinds.setdefault(path[:depth], (is_list, name))
            if known != is_list:
                raise StateDictError(
                    f"rename makes a list and a dict of {'.'.join(map(str, path[:depth]))!r}, by "
                    f"{other!r} and {name!r}. Choose other names"
                )


def _renamed_path(path: StatePath, new: str) -> StatePath:
    kept: list[str | int] = []
    for part in reversed(path):
        if new == str(part) and isinstance(part, str):
            return (part, *kept)
        if not new.endswith(f".{part}"):
            break
        new = new.removesuffix(f".{part}")
        kept.insert(0, part)
    return (*new.split("."), *kept)

"""The planners that are used unless the user brings others."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reshard.format.torch_files import decode_stored, encode_stored
from reshard.format.values import decode_value
from reshard.metadata import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from reshard.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from reshard.plans.cache import PlanCache
from reshard.plans.chunk_pairs import _check_box_bounds as _check_box_bounds
from reshard.plans.chunk_pairs import _check_box_overlap as _check_box_overlap
from reshard.plans.entries import dtype_of, locate
from reshard.plans.global_plan import (
    combine_plans,
    make_global_plan,
    merge_paths,
    plan_fingerprint,
    validate,
)
from reshard.plans.local_load_plan import _create_read_items as _create_read_items
from reshard.plans.local_load_plan import build_read_items, check_complete, find_tied
from reshard.plans.local_save_plan import _create_default_metadata_only_plan, build_write_items
from reshard.plans.local_save_plan import _create_write_items as _create_write_items
from reshard.plans.read_items import Casts, planned_casts
from reshard.plans.traits import default_step, load_traits, save_traits
from reshard.tensors.blanks import fill_blank, is_blank, make_blank
from reshard.tensors.composites import (
    KIND,
    CompositeTargets,
    expand_for_save,
    refuse_composites,
    stored_shards,
)
from reshard.tensors.flatten import Rules, flatten_state_dict, put_empties
from reshard.tensors.flatten import (
    flatten_sharded_tensors as _flatten_sharded_tensors,  # noqa: F401
)
from reshard.tensors.materialise import materialise
from reshard.tensors.paths import (
    PathMap,
    StatePath,
    keys_above,
    paths_in,
    set_element,
    set_elements,
)
from reshard.tensors.shards import (
    DTensorReader,
    check_local_memory,
    find_state_dict_object,
    with_held_shards,
)

logger = logging.getLogger(__name__)

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "PlanCache",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
]


class DefaultSavePlanner(SavePlanner):
    """Saves a nested state dict: every shard once, bytes balanced over the ranks.

    With `enable_plan_caching`, a save whose layout is that of the previous save sends a
    fingerprint in place of its plan. Subclasses may override `lookup_object` and
    `transform_object` as well as the methods of the contract.
    """

    mappings: Mapping[str, StatePath]
    _is_default_planner = True
    call_settings = ("rules", "finds_ties", "takes_composites")
    rules = Rules.CURRENT
    finds_ties = True
    """Whether memory under two names is written once."""
    takes_composites = True
    """Whether tensors may consist of others, which are then stored in their place."""

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        plan_cache: PlanCache | None = None,
    ) -> None:
        if dedup_replicated_tensors is not None:
            logger.warning(
                "dedup_replicated_tensors has no effect: replicated tensors are always written "
                "once. Leave the argument out"
            )
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank
        self.mappings = {}
        self._reader = DTensorReader()
        self._enable_plan_caching = enable_plan_caching or plan_cache is not None
        self._cache = plan_cache if plan_cache is not None else PlanCache()
        self._cached_plans_key = type(self).__name__
        if self._enable_plan_caching:
            self._show_cache()

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict, self.rules)
        state_dict = with_held_shards(state_dict)
        self.state_dict, self.mappings = expand_for_save(state_dict, self.mappings)
        if not self.takes_composites:
            refuse_composites(self.state_dict)
        self.is_coordinator = is_coordinator
        self._reader = DTensorReader()

    @default_step
    def create_local_plan(self) -> SavePlan:
        traits = save_traits(self)
        find_ties = traits.keeps_values and self.finds_ties
        items = build_write_items(self.state_dict, find_ties)
        self.plan = SavePlan(items, planner_data=self.mappings if self.flatten_state_dict else None)
        if not self._enable_plan_caching:
            return self.plan
        self.plan = dataclasses.replace(self.plan, fingerprint=plan_fingerprint(self.plan))
        # A subclass that edits the plan may do so differently each time.
        return self._cache.abbreviate(self.plan) if traits.keeps_local_plan else self.plan

    def final_plans(self, answers: list[SavePlan]) -> list[SavePlan]:
        return [a if a.usable else self.global_plan[rank] for rank, a in enumerate(answers)]

    def forget_cached_plans(self) -> None:
        self._cache.clear()

    def _remembered(self) -> Mapping[str, Any]:
        return self._cache.contents()

    def remember_in(self, caches: dict[str, PlanCache]) -> None:
        """Go on with what this planner remembered when it was here before, in another copy."""
        if self._enable_plan_caching:
            self._cache = caches.setdefault(self._cache.key, self._cache)

    @default_step
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if not self._enable_plan_caching:
            self.global_plan, self.metadata = self._create_global_plan(all_plans)
            return self.global_plan, self.metadata
        self.global_plan, self.metadata = self._cache.plan(all_plans, self._create_global_plan)
        # A storage adds its own to the metadata that it gets; the cached one stays as it is.
        entries, data = self.metadata.state_dict_metadata, self.metadata.planner_data
        return self._cache.answers(all_plans), dataclasses.replace(
            self.metadata, state_dict_metadata=dict(entries), planner_data=copy.copy(data)
        )

    def _create_global_plan(self, all_plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        global_plan, metadata = make_global_plan(all_plans, self.dedup_save_to_lowest_rank)
        if self.flatten_state_dict:
            metadata = dataclasses.replace(metadata, planner_data=merge_paths(all_plans))
        return global_plan, metadata

    @default_step
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if self._enable_plan_caching:
            new_plan = self._cache.final(new_plan)
            # Only now is the plan known to have been accepted.
            self._cache.local_plan = self.plan
        self.plan = new_plan
        return new_plan

    @default_step
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data: torch.Tensor | io.BytesIO = self.transform_object(
            write_item, self.lookup_object(write_item.index)
        )
        return data

    @default_step
    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value, or the local shard, that `index` names. Made to be overridden."""
        return find_state_dict_object(self.state_dict, index, self._reader)

    @default_step
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """What to write for `object`: tensors as they are, values as bytes."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        return io.BytesIO(encode_stored(object))


class DefaultLoadPlanner(LoadPlanner):
    """Loads into a nested state dict, whatever the layouts on both sides.

    With `allow_partial_load`, keys that the checkpoint does not have stay as they are;
    otherwise they are an error. Subclasses may override `lookup_tensor` and
    `transform_tensor` as well as the methods of the contract.
    """

    original_state_dict: STATE_DICT_TYPE
    mappings: Mapping[str, StatePath]
    _is_default_planner = True
    call_settings = ("exclude", "allow_pickle", "allow_partial_load", "keeps_blanks")
    keeps_blanks = False
    """Whether tensors without memory stay so until they are read: see `fill_blanks`."""

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.allow_partial_load = allow_partial_load
        self.allow_pickle = False
        self.exclude: tuple[str, ...] = ()
        self.original_state_dict = {}
        self.mappings = {}
        self.blanks: dict[str, torch.Tensor] = {}
        self.tied_names: Mapping[str, str] = {}
        self.casts: Casts = {}
        self.composites = CompositeTargets()
        self._reader = DTensorReader()

    @default_step
    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if self.keeps_blanks:
            materialise(state_dict, leave=is_blank)
        else:
            materialise(state_dict)
        self.original_state_dict = state_dict
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict)
        self._adopt(state_dict, metadata, is_coordinator)

    def _adopt(
        self, flat: STATE_DICT_TYPE, metadata: Metadata | None, is_coordinator: bool
    ) -> None:
        """Plan to fill a flat state dict."""
        flat = with_held_shards(flat)
        self.composites = CompositeTargets()
        if metadata is not None:
            flat = self.composites.expand(flat, metadata, self.excludes)
        self.state_dict = flat
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._reader = DTensorReader()

    @default_step
    def create_local_plan(self) -> LoadPlan:
        if self.metadata is None:
            raise ValueError(
                "the load planner has no metadata: pass that of the checkpoint to set_up_planner"
            )
        if self.flatten_state_dict:
            self._match_older_names(self.metadata)
        wanted = self.state_dict
        if self.exclude:
            wanted = {name: value for name, value in wanted.items() if not self.excludes(name)}
        stored = self.metadata.state_dict_metadata
        fills_by_itself = load_traits(self).fills_by_itself
        self.tied_names = find_tied(wanted, stored) if fills_by_itself else {}
        if self.keeps_blanks:
            self.blanks = {
                n: v
                for n, v in wanted.items()
                if (n in stored or n in self.tied_names) and is_blank(v)
            }
        if self.tied_names:
            wanted = {n: v for n, v in wanted.items() if n not in self.tied_names}
        if fills_by_itself:
            wanted = self._without_twins(wanted)
            for name, value in wanted.items():
                if name not in self.blanks:
                    check_local_memory(name, value)
        strict = not self.allow_partial_load
        plan = create_default_local_load_plan(wanted, self.metadata, strict)
        if fills_by_itself:
            casts = planned_casts(plan.items)
            tied = {n: casts[held] for n, held in self.tied_names.items() if held in casts}
            self.casts = {**casts, **tied}
        return plan

    def _without_twins(self, wanted: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """What has to be read to fill `wanted`. Made to be overridden."""
        return wanted

    @default_step
    def fill_blanks(self, views: Mapping[str, torch.Tensor]) -> None:
        """Put tensors in the place of blanks: those given by name, and new ones for the rest.

        Called when it is known what can be viewed; then nothing else is in the way of the load.
        """
        blanks, self.blanks = self.blanks, {}
        memory = {id(blanks[name]): tensor for name, tensor in views.items()}
        made: dict[int, torch.Tensor] = {}
        for name, blank in blanks.items():
            key = id(blank)
            if key not in made:
                made[key] = fill_blank(blank, memory.get(key))
            self.state_dict[name] = made[key]
        if self.flatten_state_dict:
            places = ((self.mappings[name], self.state_dict[name]) for name in blanks)
            set_elements(self.original_state_dict, places)

    def excludes(self, name: str) -> bool:
        """Whether a key is to stay as it is."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude)

    def _match_older_names(self, metadata: Metadata) -> None:
        """Flatten by the rules of older checkpoints if that is what makes names match."""
        stored = metadata.state_dict_metadata
        if all(name in stored for name in self.state_dict):
            return
        current, _ = flatten_state_dict(self.original_state_dict)
        if current.keys() != self.state_dict.keys():
            # A custom planner has chosen the names.
            return
        for rules in (Rules.DCP, Rules.DCP_2_3):
            flat, paths = flatten_state_dict(self.original_state_dict, rules)
            if any(name in stored for name in flat.keys() - current.keys()):
                self.state_dict, self.mappings = flat, paths
                return

    @default_step
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return new_plan

    @default_step
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        loaded = decode_stored(fqn, value.getvalue(), self.allow_pickle)
        if self.composites.takes(fqn, loaded):
            return
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[fqn], loaded)
        else:
            self.state_dict[fqn] = loaded

    @property
    def covered_prefixes(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.composites.covers

    def values_to_check(self) -> list[str]:
        return list(self._descriptions().values())

    def check_values(self, values: Mapping[str, bytes]) -> None:
        for name, stored in self._descriptions().items():
            if stored in values:
                self.composites.check(name, decode_value(values[stored], name))

    def _descriptions(self) -> dict[str, str]:
        """The entries that say what composite tensors are, and the names they are stored under."""
        wanted = [name for name in self.state_dict if name.endswith(f".{KIND}")]
        if not wanted or self.metadata is None:
            return {}
        entries, composites = self.metadata.state_dict_metadata, stored_shards(self.metadata)
        return {
            name: entries[name].alias_of or name
            for name in wanted
            if name.removesuffix(f".{KIND}") in composites and not self.excludes(name)
        }

    def finish_load(self) -> None:
        self.composites.finish()

    @default_step
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    @default_step
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: `resolve_tensor` gave a view of the tensor to fill."""

    @default_step
    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The local shard that `index` names. Made to be overridden."""
        tensor: torch.Tensor = find_state_dict_object(self.state_dict, index, self._reader)
        return tensor

    @default_step
    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a local shard that `read_item` fills. Made to be overridden."""
        region = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (offset, length) in enumerate(region):
            if length != tensor.size(dim):
                tensor = tensor.narrow(dim, offset, length)
        return tensor


class _EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Loads without a template: makes every tensor, whole, from the metadata.

    Takes an empty dict and fills it. With `keys`, only what is named by one of them, or
    lies below one of them, is loaded. Names that shared one memory when they were saved get
    one tensor, so that tied weights stay tied and take their memory once.
    """

    def __init__(self, keys: Any = None, *args: Any, **kwargs: Any) -> None:
        self.keys = keys
        self._longest_key = max(map(len, keys or ()), default=0)
        self._read_from: Metadata | None = None
        self._read_paths = PathMap()
        super().__init__(*args, **kwargs)

    def _should_include_key(self, key: str, metadata: Metadata) -> bool:
        if self.keys is None or key in self.keys:
            return True
        return self._is_below_a_key(self._paths(metadata).get(key) or tuple(key.split(".")))

    def _is_below_a_key(self, path: StatePath) -> bool:
        return self.keys is None or any(keys_above(path, self.keys, self._longest_key))

    def _paths(self, metadata: Metadata) -> PathMap:
        """The paths of names, as far as the checkpoint has usable ones."""
        data = metadata.planner_data
        if isinstance(data, PathMap):
            return data
        if self._read_from is not metadata:
            self._read_from, self._read_paths = (
                metadata,
                paths_in(data, metadata.state_dict_metadata),
            )
        return self._read_paths

    @default_step
    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if state_dict:
            raise ValueError(
                f"this planner fills an empty dict, but got one with {len(state_dict)} keys"
            )
        if metadata is None:
            raise ValueError("this planner needs the metadata of the checkpoint")
        paths = self._paths(metadata)
        entries = metadata.state_dict_metadata
        if self.keys is not None:
            entries = {n: e for n, e in entries.items() if self._should_include_key(n, metadata)}
        # Not found by flattening what is made here: a list may have gaps, and then has others.
        flat = self._make_tensors(entries)
        mappings = PathMap((name, paths.get(name, (name,))) for name in flat)
        set_elements(state_dict, zip(mappings.values(), flat.values(), strict=True))
        mappings.empties = tuple(filter(self._is_below_a_key, paths.empties))
        put_empties(state_dict, mappings, mappings.empties)
        if not self.flatten_state_dict:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        self.original_state_dict, self.mappings = state_dict, mappings
        self._adopt(flat, metadata, is_coordinator)

    def _make_tensors(self, entries: Mapping[str, STORAGE_TYPES]) -> STATE_DICT_TYPE:
        """A tensor for each stored one, or a blank; other entries as they are."""
        located = locate(entries)
        check_complete(located)
        make = make_blank if self.keeps_blanks else _make_tensor
        flat: STATE_DICT_TYPE = dict(entries)
        made: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        columns = zip(entries.items(), located.storage_names, located.shapes(), strict=True)
        for (name, entry), stored, shape in columns:
            if shape is None or not isinstance(entry, TensorStorageMetadata):
                continue
            key = stored, shape, dtype_of(entry)
            value = made.get(key)
            if value is None:
                value = made[key] = make(shape, key[2])
            flat[name] = value
        return flat

    def _without_twins(self, wanted: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """Each tensor under one of its names: it is read once."""
        names: dict[int, str] = {}
        for name, value in wanted.items():
            names.setdefault(id(value), name)
        return {
            name: value
            for name, value in wanted.items()
            if not isinstance(value, torch.Tensor) or names[id(value)] == name
        }


def _make_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def create_default_local_save_plan(state_dict: dict[str, Any], is_coordinator: bool) -> SavePlan:
    """What this rank can write of a flat state dict: its shards, and every other value.

    All ranks offer values that all of them have; the global plan chooses one writer.
    """
    return SavePlan(build_write_items(state_dict))


def create_default_global_save_plan(
    all_plans: list[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """The metadata of deduplicated plans, and the plans with their position in it."""
    return combine_plans(all_plans, rewrite_index_hints)


def _validate_global_plan(global_plan: list[SavePlan], metadata: Metadata) -> list[str]:
    """What is wrong with the chunks of each tensor; an empty list if nothing is.

    The plan of a single rank may hold a part of a tensor only.
    """
    return validate(metadata, whole=len(global_plan) > 1)


def create_default_local_load_plan(
    state_dict: dict[str, Any], metadata: Metadata, strict: bool = True
) -> LoadPlan:
    """What this rank reads to fill a flat state dict, from whatever chunks are stored.

    Raises before anything is touched: on keys that are not stored (if `strict`), other
    shapes, and tensors that the checkpoint holds only in part.
    """
    return LoadPlan(build_read_items(state_dict, metadata, strict))


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """The plans as they are: by default, ranks read without regard to each other."""
    return all_plans


def _create_default_local_metadata(state_dict: STATE_DICT_TYPE) -> Metadata:
    """The metadata that a save of `state_dict` would have, as far as this rank can tell."""
    _, metadata = create_default_global_save_plan([_create_default_metadata_only_plan(state_dict)])
    return metadata

"""Optimizer state by parameter name, for any optimizer and layout. No step is ever taken.

State is stored as `state / parameter / name`, and parameter groups as `groups / key`, with a
key derived from the names of the parameters in the group, so that the stages of a pipeline add
their groups to the same checkpoint. State of an optimizer as a whole is stored as
`common / key / name`, with a key derived from the names of all its parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import xxhash
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from reshard.api import CheckpointException
from reshard.format.values import encode_value
from reshard.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from reshard.tensors.composites import KIND, StoredShards, assemble, region_name, stored_shards
from reshard.tensors.flatten import flatten_state_dict
from reshard.tensors.modules import (
    fsdp1_optimizer_state,
    is_fsdp1,
    load_fsdp1_optimizer_state,
    model_state,
    parameter_names,
)
from reshard.tensors.parameter_layout import device_of, empty_like_parameter, own_region, with_local
from reshard.tensors.paths import StatePath, get_element, set_element
from reshard.tensors.shards import is_sharded

_Entry: TypeAlias = TensorStorageMetadata | BytesStorageMetadata
_COUNTERS = {"step", "mu_product", "eta", "mu"}
"""State that torch's optimizers keep as a number, even if the parameter itself is a scalar."""


@dataclass
class OptimizerReport:
    """What a load did with optimizer state.

    `missing` is state that the optimizer has but the checkpoint does not. `stateless` are
    parameters without any state in a checkpoint that has state of others; `unknown` are those of
    them that were in no optimizer when it was saved. `groups_missing` are groups that it knows
    no parameter of.
    """

    restored: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    groups_left: list[str] = field(default_factory=list)
    stateless: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    groups_missing: list[str] = field(default_factory=list)


@dataclass
class _Part:
    """One optimizer, and the parameters of the models that it has.

    For a ZeroRedundancyOptimizer, `whole` is that, and `optimizer` the local one inside.
    """

    optimizer: torch.optim.Optimizer
    whole: torch.optim.Optimizer
    models: list[nn.Module]
    names: dict[nn.Parameter, str]

    @property
    def fsdp1(self) -> nn.Module | None:
        return next((model for model in self.models if is_fsdp1(model)), None)

    @property
    def key(self) -> str:
        """A key derived from parameter names."""
        return _names_key(self.names[p] for p in _parameters(self.optimizer) if p in self.names)

    @property
    def common(self) -> dict[str, Any]:
        """State of the optimizer itself, rather than of a parameter."""
        state: Mapping[Any, Any] = self.optimizer.state
        own = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        for key in own:
            if not isinstance(key, str):
                raise CheckpointException(
                    f"the optimizer keeps state under {key!r}, a {type(key).__name__}: only state "
                    "of parameters, or under a string, can be stored"
                )
        return own


@dataclass
class _StateOwner:
    """A parameter and its present state."""

    parameter: Any
    values: dict[str, Any]
    steps_on_device: bool
    saved_dtype: torch.dtype | None = None


class OptimizerStates:
    """The state of some optimizers over the parameters of some models.

    `models` has the prefix of each model's names.
    """

    def __init__(
        self,
        models: Sequence[tuple[str, nn.Module]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._models = models
        self._parts = [self._part(optimizer) for optimizer in optimizers]
        self._check_apart()
        self._new_names: dict[str, str] = {}
        self._in_parts: set[str] = set()
        self._stored_groups: set[str] = set()
        self.report = OptimizerReport()

    def _check_apart(self) -> None:
        """Refuse two optimizers with a common parameter: their states would get one name."""
        seen: set[int] = set()
        for part in self._parts:
            own = [p for group in part.whole.param_groups for p in group["params"]]
            for parameter in own:
                if id(parameter) in seen:
                    name = part.names.get(parameter, f"of shape {tuple(parameter.shape)}")
                    raise CheckpointException(
                        f"two of the optimizers have the parameter {name!r}, so that their states "
                        "would get one name: make a TrainState for each of them"
                    )
            seen |= {id(parameter) for parameter in own}

    def _part(self, whole: torch.optim.Optimizer) -> _Part:
        optimizer: Any = whole.optim if isinstance(whole, ZeroRedundancyOptimizer) else whole
        names: dict[nn.Parameter, str] = {}
        models = []
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for prefix, model in self._models:
            own = {p: prefix + name for p, name in parameter_names(model).items()}
            if any(id(parameter) in wanted for parameter in own):
                names |= own
                models.append(model)
        part = _Part(optimizer, whole, models, names)
        if part.fsdp1 is not None:
            if len(models) > 1 or any(prefix and m is part.fsdp1 for prefix, m in self._models):
                raise CheckpointException(
                    "an optimizer over several models, or over models with prefixes, cannot be "
                    "saved with FSDP1: give each model an optimizer and a TrainState of its own"
                )
            return part
        strange = [p for p in _parameters(optimizer) if p not in names]
        if strange:
            raise CheckpointException(
                f"the optimizer has {len(strange)} parameters that the model does not have, the "
                f"first of shape {tuple(strange[0].shape)}: pass the model that it was made for"
            )
        return part

    # Saving

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        for part in self._parts:
            found = _by_name(part)
            state |= {name: values for name, values in found["state"].items() if values}
            for group in found["param_groups"]:
                names = sorted(group["params"])
                groups[_names_key(names)] = {"params": names, **_settings(group)}
        common = {part.key: part.common for part in self._parts if part.common}
        return {"state": state, "groups": groups} | ({"common": common} if common else {})

    # Loading

    def template(self, metadata: Metadata, prefix: StatePath) -> dict[str, Any]:
        """The state dict to load into, for the state that the metadata lists.

        State that the optimizers have already is filled in place.
        """
        self.report = OptimizerReport()
        template: dict[str, Any] = {"state": {}, "groups": {}}
        owners = self._all_owners(metadata, prefix)
        common = {part.key: part.common for part in self._parts}
        entries = list(_entries_below(metadata, prefix))
        self._new_names = _new_names(metadata, prefix, entries)
        composites = _composites(metadata, prefix, entries)
        self._in_parts = set()
        self._stored_groups = {str(path[1]) for path, _ in entries if path[0] == "groups"}
        for path, entry in entries:
            if composites and any(path[:depth] in composites for depth in range(3, len(path))):
                continue
            if path[0] == "groups":
                set_element(template, path, _placeholder(entry))
            elif path[0] == "common" and path[1] in common:
                existing = get_element(common[str(path[1])], path[2:])
                set_element(template, path, _fitting(existing, entry, _placeholder))
            elif self._is_wanted(path, owners):
                target = _target(entry, owners[str(path[1])], path[2:])
                set_element(template, path, target)
        for path, shards in composites.items():
            if self._is_wanted(path, owners):
                target = _composite_target(shards, owners[str(path[1])], path)
                set_element(template, path, target)
                if isinstance(target, dict):
                    self._in_parts.add(".".join(map(str, path[1:])))
        self._report_missing(template, owners, common)
        return template

    def _is_wanted(self, path: StatePath, owners: Mapping[str, _StateOwner]) -> bool:
        """Whether a stored value is the state of a parameter here; reports it either way."""
        wanted = path[0] == "state" and str(path[1]) in owners
        noted = self.report.restored if wanted else self.report.unexpected
        noted.append(".".join(map(str, path[1:])))
        return wanted

    def _report_missing(
        self,
        template: Mapping[str, Any],
        owners: Mapping[str, _StateOwner],
        common: Mapping[str, Mapping[str, Any]],
    ) -> None:
        found: Mapping[str, Any] = template["state"]
        missing = [
            f"{name}.{key}"
            for name, owner in owners.items()
            for key in owner.values
            if str(key) not in found.get(name, {})
        ]
        shared: Mapping[str, Any] = template.get("common", {})
        missing += [k for key, own in common.items() for k in own if k not in shared.get(key, {})]
        self.report.missing = sorted(missing)
        if found:
            self.report.stateless = sorted(
                name
                for name, owner in owners.items()
                if name not in found and getattr(owner.parameter, "requires_grad", True)
            )

    def _all_owners(self, metadata: Metadata, prefix: StatePath) -> dict[str, _StateOwner]:
        owners = {name: owner for part in self._parts for name, owner in self._owners(part)}
        for name, owner in owners.items():
            saved = metadata.state_dict_metadata.get(f"{prefix[0]}.model.{name}")
            if isinstance(saved, TensorStorageMetadata):
                owner.saved_dtype = saved.properties.dtype
        return owners

    def _owners(self, part: _Part) -> Iterator[tuple[str, _StateOwner]]:
        """The parameters by name, with their present state."""
        if part.fsdp1 is not None:
            state = fsdp1_optimizer_state(part.fsdp1, part.optimizer)["state"]
            for name, parameter in model_state(part.fsdp1).items():
                yield name, _StateOwner(parameter, dict(state.get(name, {})), False)
            return
        for group in part.optimizer.param_groups:
            # Like torch: steps are counted on the CPU, unless kernels of the device count them.
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                values = dict(part.optimizer.state.get(parameter, {}))
                yield part.names[parameter], _StateOwner(parameter, values, on_device)

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        state, groups = loaded.get("state", {}), loaded.get("groups", {})
        parameters = {n: p for part in self._parts for p, n in part.names.items()}
        state = {
            name: {
                key: _assembled(label, value, parameters.get(name))
                if (label := f"{name}.{key}") in self._in_parts
                else value
                for key, value in values.items()
            }
            for name, values in state.items()
        }
        self._forget_what_was_left_out(state)
        settings = {
            self._new_names.get(name, name): _settings(group)
            for group in groups.values()
            for name in group.get("params", ())
        }
        if settings:
            self.report.unknown = [n for n in self.report.stateless if n not in settings]
        for part in self._parts:
            if part.fsdp1 is not None:
                common = part.common | loaded.get("common", {}).get(part.key, {})
                self._load_fsdp1(part, part.fsdp1, state, settings)
                part.optimizer.state.update(common)
                continue
            for parameter in _parameters(part.optimizer):
                values = state.get(part.names[parameter])
                if values:
                    own = part.optimizer.state.get(parameter, {})
                    part.optimizer.state[parameter] = _merge(own, values)
            groups_here = part.optimizer.param_groups
            if part.whole is not part.optimizer:
                groups_here = [*groups_here, *part.whole.param_groups]
            for group in groups_here:
                names = [part.names[p] for p in group["params"]]
                group.update(self._settings_for(names, settings))
            part.optimizer.state.update(loaded.get("common", {}).get(part.key, {}))

    def _load_fsdp1(
        self, part: _Part, model: nn.Module, state: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        current = fsdp1_optimizer_state(model, part.optimizer)
        for group in current["param_groups"]:
            group.update(self._settings_for(list(group["params"]), settings))
        names = {name for group in current["param_groups"] for name in group["params"]}
        # FSDP1 replaces all state, so present state that the checkpoint lacks is passed along.
        merged = {
            name: _merge(current["state"].get(name, {}), state.get(name, {})) for name in names
        }
        current["state"] = {name: values for name, values in merged.items() if values}
        load_fsdp1_optimizer_state(model, part.optimizer, current)

    def _forget_what_was_left_out(self, state: Mapping[str, Any]) -> None:
        """Remove state that the caller chose not to load from the report."""
        there = set(flatten_state_dict(state)[0])
        self.report.restored = [label for label in self.report.restored if label in there]

    def _settings_for(
        self, names: Sequence[str], settings: Mapping[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """The settings of the group that a checkpoint had these parameters in."""
        found = [settings[name] for name in names if name in settings]
        label = f"{names[0]} and {len(names) - 1} others" if names else "an empty group"
        if not found:
            self.report.groups_left.append(label)
            if _names_key(names) not in self._stored_groups:
                # Not one that is stored, and that the caller chose not to load.
                self.report.groups_missing.append(label)
            return {}
        apart = {id(each): each for each in found}
        if len({encode_value(each) for each in apart.values()}) > 1:
            # The groups were merged since: the settings of the first one win.
            self.report.groups_left.append(f"{label} (were in groups that differ)")
        # Groups that were split since must not share mutable settings.
        return copy.deepcopy(found[0])


def _merge(existing: Any, new: Any) -> Any:
    """Existing state updated with new values. Keys that read alike are the same key."""
    if not isinstance(existing, dict) or not isinstance(new, dict):
        return new
    merged = dict(existing)
    for key, value in new.items():
        own = next((k for k in existing if k == key or str(k) == str(key)), key)
        merged[own] = _merge(existing.get(own), value)
    return merged


def _by_name(part: _Part) -> dict[str, Any]:
    """The state and groups of one optimizer, with names in place of parameters."""
    if part.fsdp1 is not None:
        found = fsdp1_optimizer_state(part.fsdp1, part.optimizer)
        known = {name for group in found["param_groups"] for name in group["params"]}
        found["state"] = {n: values for n, values in found["state"].items() if n in known}
        return found
    optimizer, names = part.optimizer, part.names
    return {
        "state": {names[p]: dict(optimizer.state.get(p, {})) for p in _parameters(optimizer)},
        "param_groups": [
            {**group, "params": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _names_key(names: Iterable[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(sorted(names)).encode())


def _entries_below(metadata: Metadata, prefix: StatePath) -> Iterator[tuple[StatePath, _Entry]]:
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    below = ".".join(map(str, prefix)) + "."
    for name, entry in metadata.state_dict_metadata.items():
        if not name.startswith(below):
            continue
        path = paths.get(name)
        if path is not None and tuple(path[: len(prefix)]) == tuple(prefix):
            yield tuple(path[len(prefix) :]), entry
        elif path is None:
            old = paths.get(entry.alias_of or "", ())
            yield _renamed_path(name.removeprefix(below), old), entry


def _renamed_path(name: str, old: StatePath) -> StatePath:
    """The path of an entry that the load renamed, so that the checkpoint has no path for it.

    First comes its kind, then a name that may contain dots, then the rest of the old path.
    """
    kind, _, rest = name.partition(".")
    tail = old[old.index(kind) + 2 :] if kind in old else ()
    below = ".".join(map(str, tail))
    if tail and rest.endswith(f".{below}"):
        return kind, rest.removesuffix(f".{below}"), *tail
    first, _, last = rest.rpartition(".") if kind == "state" else rest.partition(".")
    return kind, first, last


def _new_names(
    metadata: Metadata, prefix: StatePath, entries: Sequence[tuple[StatePath, _Entry]]
) -> dict[str, str]:
    """New names of parameters by the names they were saved with, if the load renames them."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    found = {}
    for path, entry in entries:
        renamed = ".".join(map(str, (*prefix, *path))) not in paths
        old = paths.get(entry.alias_of or "", ()) if renamed else ()
        if path[0] == "state" and "state" in old:
            found[str(old[old.index("state") + 1])] = str(path[1])
    return found


def _placeholder(entry: _Entry) -> Any:
    if isinstance(entry, BytesStorageMetadata):
        return None
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")


def _fitting(existing: Any, entry: _Entry, make: Callable[[TensorStorageMetadata], Any]) -> Any:
    """The target of a stored value: what is there if it fits, or else new memory."""
    if isinstance(entry, BytesStorageMetadata):
        return existing
    fits = isinstance(existing, torch.Tensor) and existing.size() == entry.size
    return existing if fits else make(entry)


def _composites(
    metadata: Metadata, prefix: StatePath, entries: Sequence[tuple[StatePath, _Entry]]
) -> dict[StatePath, StoredShards]:
    """Composite states by path."""
    paths = [path[:-1] for path, _ in entries if path[-1] == KIND]
    stored = stored_shards(metadata) if paths else {}
    found = {path: stored.get(".".join(map(str, (*prefix, *path)))) for path in paths}
    return {path: shards for path, shards in found.items() if shards is not None}


def _composite_target(stored: StoredShards, owner: _StateOwner, path: StatePath) -> Any:
    """The target of a composite state: the one that is there, or new parts."""
    label = ".".join(map(str, path[1:]))
    existing = get_element(owner.values, path[2:])
    if isinstance(existing, torch.Tensor):
        return existing
    if stored.has_sharded_parts and is_sharded(owner.parameter):
        # Each part was sharded, rather than a shard split into parts.
        return {
            region_name(box): {
                part: _target(entry, owner, (part,))
                for part, entry in parts.items()
                if entry is not None
            }
            for box, parts in stored.shards.items()
        } | {KIND: None}
    needed = stored.needed_for(label, own_region(owner.parameter, stored.shape))
    device = device_of(owner.parameter)
    return {region_name(box): stored.empty_parts(label, box, device) for box in needed} | {
        KIND: None
    }


def _assembled(label: str, value: Any, parameter: Any) -> Any:
    """A composite state from its parts."""
    shape = value[KIND][0][1]
    parts = [part for shard in value.values() if isinstance(shard, dict) for part in shard.values()]
    if any(map(is_sharded, parts)):
        return assemble(label, value, own_region(None, shape))
    local = assemble(label, value, own_region(parameter, shape))
    return with_local(parameter, local, shape)


def _target(entry: _Entry, owner: _StateOwner, path: StatePath) -> Any:
    """The target of a state of a parameter."""

    def make(entry: TensorStorageMetadata) -> Any:
        if not entry.size and path[-1] in _COUNTERS:
            made = _placeholder(entry)
            return made.to(device_of(owner.parameter)) if owner.steps_on_device else made
        dtype = entry.properties.dtype
        if dtype is owner.saved_dtype and entry.size == owner.parameter.size():
            # It had the precision of the parameter, which may have changed.
            dtype = owner.parameter.dtype
        made = empty_like_parameter(owner.parameter, entry.size, dtype)
        return made if made is not None else _placeholder(entry)

    return _fitting(get_element(owner.values, path), entry, make)

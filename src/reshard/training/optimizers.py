"""Optimizer state by the names of parameters: any optimizer, any layout, never a step.

State is kept as `state / parameter / name`, and parameter groups as `groups / key`, where
the key is made from the names of the parameters in the group: stages of a pipeline, which
have parameters of their own, add their groups to the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import nn

from reshard.api import CheckpointException
from reshard.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from reshard.tensors.flatten import StatePath, set_element
from reshard.tensors.likeness import empty_like_parameter
from reshard.tensors.modules import (
    fsdp1_optimizer_state,
    is_fsdp1,
    load_fsdp1_optimizer_state,
    model_state,
    parameter_names,
)

__all__ = ["OptimizerReport", "OptimizerStates"]


@dataclass
class OptimizerReport:
    """What became of optimizer state in a load."""

    restored: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    groups_left: list[str] = field(default_factory=list)


@dataclass
class _Part:
    """One optimizer, with the parameters that it has of the models."""

    optimizer: torch.optim.Optimizer
    models: list[nn.Module]
    names: dict[nn.Parameter, str]

    @property
    def fsdp1(self) -> nn.Module | None:
        return next((model for model in self.models if is_fsdp1(model)), None)


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
        self.report = OptimizerReport()

    def _part(self, optimizer: torch.optim.Optimizer) -> _Part:
        names: dict[nn.Parameter, str] = {}
        models = []
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for prefix, model in self._models:
            own = {p: prefix + name for p, name in parameter_names(model).items()}
            if any(id(parameter) in wanted for parameter in own):
                names |= own
                models.append(model)
        part = _Part(optimizer, models, names)
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
                groups[_group_key(names)] = {"params": names, **_settings(group)}
        return {"state": state, "groups": groups}

    # Loading

    def template(self, metadata: Metadata, prefix: StatePath) -> dict[str, Any]:
        """What to load of a checkpoint, and where to: its own metadata says what there is.

        State that the optimizers have already is filled in place.
        """
        self.report = OptimizerReport()
        template: dict[str, Any] = {"state": {}, "groups": {}}
        known = {name: values for part in self._parts for name, values in self._homes(part)}
        missing = {f"{name}.{key}" for name, (_, values) in known.items() for key in values}
        for path, entry in _entries_below(metadata, prefix):
            if path[0] == "groups":
                set_element(template, path, _placeholder(entry))
                continue
            label = ".".join(map(str, path[1:]))
            home = known.get(str(path[1]))
            if path[0] != "state" or home is None:
                self.report.unexpected.append(label)
                continue
            missing.discard(label)
            self.report.restored.append(label)
            set_element(template, path, _target(entry, home, path[2:]))
        self.report.missing = sorted(missing)
        return template

    def _homes(self, part: _Part) -> Iterator[tuple[str, tuple[Any, dict[str, Any]]]]:
        """Each parameter by name, and the state that it has already."""
        if part.fsdp1 is not None:
            state = fsdp1_optimizer_state(part.fsdp1, part.optimizer)["state"]
            for name, parameter in model_state(part.fsdp1).items():
                yield name, (parameter, dict(state.get(name, {})))
            return
        for parameter in _parameters(part.optimizer):
            state = part.optimizer.state.get(parameter, {})
            yield part.names[parameter], (parameter, dict(state))

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        state, groups = loaded.get("state", {}), loaded.get("groups", {})
        settings = {
            name: _settings(group) for group in groups.values() for name in group.get("params", ())
        }
        for part in self._parts:
            if part.fsdp1 is not None:
                self._load_fsdp1(part, part.fsdp1, state, settings)
                continue
            for parameter in _parameters(part.optimizer):
                values = state.get(part.names[parameter])
                if values:
                    part.optimizer.state[parameter] = {
                        **part.optimizer.state.get(parameter, {}),
                        **values,
                    }
            for group in part.optimizer.param_groups:
                names = [part.names[p] for p in group["params"]]
                group.update(self._settings_for(names, settings))

    def _load_fsdp1(
        self, part: _Part, model: nn.Module, state: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        current = fsdp1_optimizer_state(model, part.optimizer)
        for group in current["param_groups"]:
            group.update(self._settings_for(list(group["params"]), settings))
        names = {name for group in current["param_groups"] for name in group["params"]}
        current["state"] = {name: values for name, values in state.items() if name in names}
        load_fsdp1_optimizer_state(model, part.optimizer, current)

    def _settings_for(
        self, names: Sequence[str], settings: Mapping[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """The settings of the group that a checkpoint had these parameters in."""
        found = [settings[name] for name in names if name in settings]
        label = f"{names[0]} and {len(names) - 1} others" if names else "an empty group"
        if not found:
            self.report.groups_left.append(label)
            return {}
        if any(other != found[0] for other in found[1:]):
            # Groups were joined since; the first one speaks for all of them.
            self.report.groups_left.append(f"{label} (were in groups that differ)")
        return found[0]


def _by_name(part: _Part) -> dict[str, Any]:
    """State and groups of one optimizer, with names in place of parameters."""
    if part.fsdp1 is not None:
        return fsdp1_optimizer_state(part.fsdp1, part.optimizer)
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


def _group_key(names: Sequence[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(sorted(names)).encode())


def _entries_below(
    metadata: Metadata, prefix: StatePath
) -> Iterator[tuple[StatePath, TensorStorageMetadata | BytesStorageMetadata]]:
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    below = ".".join(map(str, prefix)) + "."
    for name, entry in metadata.state_dict_metadata.items():
        if not name.startswith(below):
            continue
        path = paths.get(name)
        if path is not None and tuple(path[: len(prefix)]) == tuple(prefix):
            yield tuple(path[len(prefix) :]), entry
        elif path is None and name.startswith(f"{below}state."):
            # Renamed on the way: the last part is the state's name, what is before it the
            # parameter's.
            parameter, _, key = name.removeprefix(f"{below}state.").rpartition(".")
            yield ("state", parameter, key), entry


def _placeholder(entry: TensorStorageMetadata | BytesStorageMetadata) -> Any:
    if isinstance(entry, BytesStorageMetadata):
        return None
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _target(
    entry: TensorStorageMetadata | BytesStorageMetadata,
    home: tuple[Any, dict[str, Any]],
    path: StatePath,
) -> Any:
    """Where a stored state goes: to the one that is there, or to new memory like it."""
    parameter, values = home
    existing: Any = values
    for key in path:
        existing = existing.get(key) if isinstance(existing, Mapping) else None
    if isinstance(entry, BytesStorageMetadata):
        return existing
    if isinstance(existing, torch.Tensor) and existing.size() == entry.size:
        return existing
    made = empty_like_parameter(parameter, entry.size, entry.properties.dtype)
    return made if made is not None else _placeholder(entry)

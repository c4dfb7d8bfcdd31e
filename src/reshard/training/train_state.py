"""A `Stateful` that knows how training runs are put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from reshard.api import CheckpointException
from reshard.format.values import OpaqueValue
from reshard.metadata import Metadata
from reshard.rank_values import OnResize, PerRank, per_rank
from reshard.state_dict_saver import finish_staging
from reshard.stateful import is_stateful
from reshard.tensors.composites import KIND
from reshard.tensors.modules import load_model_state, model_state
from reshard.tensors.nesting import Walk
from reshard.training.optimizers import OptimizerReport, OptimizerStates
from reshard.training.randomness import random_state, restore_random_state

logger = logging.getLogger(__name__)


@dataclass
class TrainReport:
    """What the last load of a `TrainState` found, beyond the model.

    `missing` are parts that the checkpoint does not have, `unexpected` are parts that only
    the checkpoint has, and `dropped` are parts that were not loaded because the number of
    ranks changed.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    optimizer: OptimizerReport = field(default_factory=OptimizerReport)


class TrainState:
    """The model, the optimizer and everything else that a run resumes from, in any layout.

    Put it into the state dict of `save`, `async_save` and `load` as it is. Saving changes
    nothing: no step is taken, gradients stay. Loading restores in place. State that an
    optimizer does not have yet is made from the checkpoint; state that the checkpoint
    does not have stays as it is; `report` says which.

    `model` may be wrapped in DDP, FSDP (1 and 2), tensor parallelism or torch.compile, and
    may be a list (stages of a pipeline that this rank holds) or a dict, whose keys become
    prefixes of the names. `optimizer` may be None, for a load of the model alone (with
    `rng=False`, the random state stays as it is as well), or a list. The random state
    (`rng`) and the position of the `dataloader` are those of each rank; with another number
    of ranks, `on_resize` says what happens to them, as in `per_rank`. `extra` is a dict of
    more values, which may be `Stateful`.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: Any = None,
        dataloader: Any = None,
        rng: bool = True,
        extra: dict[str, Any] | None = None,
        *,
        on_resize: OnResize = "drop",
    ) -> None:
        if on_resize not in ("error", "drop", "first"):
            raise ValueError(f"on_resize is 'error', 'drop' or 'first', not {on_resize!r}")
        if isinstance(optimizer, Mapping):
            raise TypeError("pass a list of optimizers: they are told apart by their parameters")
        if dataloader is not None and not is_stateful(dataloader):
            raise TypeError(
                f"the dataloader is a {type(dataloader).__name__}, which has no state_dict and "
                "load_state_dict: use one that has (such as torchdata's StatefulDataLoader)"
            )
        self._models = _by_prefix(model)
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self._optimizers = list(optimizers or [])
        self._schedulers = list(scheduler) if isinstance(scheduler, list | tuple) else scheduler
        self._dataloader = dataloader
        self._rng = rng
        self._extra = extra
        self._on_resize = on_resize
        self._states: OptimizerStates | None = None
        self._names: list[list[str]] = []
        self.report = TrainReport()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those whose steps a save with `staging="overlap"` makes wait."""
        return list(self._optimizers)

    def state_dict(self) -> dict[str, Any]:
        """The whole state. A collective with FSDP1."""
        state: dict[str, Any] = {"model": self._model_state()}
        if self._optimizers:
            state["optimizer"] = OptimizerStates(self._models, self._optimizers).state_dict()
        return state | self._other_state()

    def _model_state(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        self._names = []
        for prefix, model in self._models:
            state = model_state(model)
            self._names.append(list(state))
            for name, value in state.items():
                if prefix + name in merged:
                    raise CheckpointException(
                        f"two of the models have {name!r}: pass a dict of models, whose keys then "
                        "tell them apart"
                    )
                merged[prefix + name] = value
        return merged

    def _other_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self._schedulers is not None:
            state["scheduler"] = {
                str(i): OpaqueValue(each.state_dict())
                for i, each in enumerate(self._all_schedulers())
            }
        if self._dataloader is not None:
            state["dataloader"] = per_rank(
                OpaqueValue(self._dataloader.state_dict()), self._on_resize
            )
        if self._rng:
            state["rng"] = per_rank(random_state(), self._on_resize)
        if self._extra is not None:
            state["extra"] = {
                key: value.state_dict() if is_stateful(value) else value
                for key, value in self._extra.items()
            }
        return state

    def _all_schedulers(self) -> list[Any]:
        return self._schedulers if isinstance(self._schedulers, list) else [self._schedulers]

    def template_for(
        self, metadata: Metadata, key: str, rank: int, world_size: int
    ) -> dict[str, Any]:
        """What to load of a checkpoint in which this object was saved as `key`.

        Called by `load` in place of `state_dict`.
        """
        self.report = TrainReport()
        template: dict[str, Any] = {"model": self._model_state()}
        stored = [
            n[len(key) + 1 :] for n in metadata.state_dict_metadata if n.startswith(key + ".")
        ]
        present = {name.split(".")[0] for name in stored}
        if self._optimizers:
            self._states = OptimizerStates(self._models, self._optimizers)
            template["optimizer"] = self._states.template(metadata, (key, "optimizer"))
            self.report.optimizer = self._states.report
            if "optimizer" not in present:
                self.report.missing.append("optimizer")
        for part, value in self._other_state().items():
            if part not in present:
                self.report.missing.append(part)
                continue
            template[part] = value
            saved_by = f"{part}.rank-{rank}-of-{world_size}"
            if (
                isinstance(value, PerRank)
                and value.on_resize == "drop"
                and saved_by not in {".".join(name.split(".")[:2]) for name in stored}
            ):
                self.report.dropped.append(part)
        if self._schedulers is not None:
            own = {f"scheduler.{i}" for i in range(len(self._all_schedulers()))}
            found = {name for name in stored if name.startswith("scheduler.")}
            self.report.unexpected = sorted(found - own)
        for what, parts in (
            ("the checkpoint does not have", self.report.missing),
            ("not needed here, so not loaded:", self.report.unexpected),
            ("left as they are, since the number of ranks has changed:", self.report.dropped),
        ):
            if parts and rank == 0:
                logger.warning("loading %r: %s %s", key, what, ", ".join(parts))
        return template

    def missing_names(self, key: str) -> list[str]:
        """What the checkpoint does not have of this object, under the names that a save gives.

        Called by `load`, when the template is made and when it was loaded: which groups and
        parameters an optimizer had is stored as a value.
        """
        found, optimizer = self.report.missing, self.report.optimizer
        names = [f"{key}.{part}" for part in found]
        if "optimizer" not in found:
            names += [f"{key}.optimizer.state.{label}" for label in optimizer.missing]
            names += [f"{key}.optimizer.state.{name}" for name in optimizer.unknown]
            names += [f"{key}.optimizer.groups.{label}" for label in optimizer.groups_missing]
        return list(dict.fromkeys(names))

    def pruned(
        self, template: dict[str, Any], key: str, unwanted: Callable[[str], bool]
    ) -> tuple[dict[str, Any], list[str]]:
        """The template without unwanted values, and the names of those.

        Called by `load`. Only values that memory is allocated for are left out: others stay in
        the template as they are.
        """
        left_out: list[str] = []
        kept = dict(template)
        for part, kind in (("model", torch.Tensor), ("optimizer", object)):
            if part in kept:
                pruning = _Pruning(f"{key}.{part}", unwanted, kind)
                kept[part] = pruning.run(kept[part])
                left_out += pruning.left_out
        return kept, left_out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Apply a loaded state."""
        finish_staging()
        if not self._names:
            self._model_state()
        loaded = state_dict["model"]
        for (prefix, model), names in zip(self._models, self._names, strict=True):
            own = {name: loaded[prefix + name] for name in names if prefix + name in loaded}
            load_model_state(model, own)
        if self._optimizers and "optimizer" in state_dict:
            states = self._states or OptimizerStates(self._models, self._optimizers)
            states.load_state_dict(state_dict["optimizer"])
            self._states = None
        if "scheduler" in state_dict:
            for i, scheduler in enumerate(self._all_schedulers()):
                if str(i) in state_dict["scheduler"]:
                    scheduler.load_state_dict(_unwrap_opaque(state_dict["scheduler"][str(i)]))
        if "dataloader" in state_dict and "dataloader" not in self.report.dropped:
            self._dataloader.load_state_dict(_unwrap_opaque(_unwrap_mark(state_dict["dataloader"])))
        if "rng" in state_dict and "rng" not in self.report.dropped:
            restore_random_state(_unwrap_mark(state_dict["rng"]))
        for key, value in state_dict.get("extra", {}).items():
            current = (self._extra or {}).get(key)
            if is_stateful(current):
                current.load_state_dict(value)  # type: ignore[union-attr]
            elif self._extra is not None:
                if isinstance(current, PerRank) and not isinstance(value, PerRank):
                    value = current.__replace_value__(value)
                self._extra[key] = value


class _Pruning(Walk):
    """Leaves unwanted values of a type out of the template at `prefix`."""

    skipped = frozenset()
    # Whether a value is wanted depends on its name.
    enters_once = False

    def __init__(self, prefix: str, unwanted: Callable[[str], bool], kind: type) -> None:
        super().__init__()
        self.left_out: list[str] = []
        self._prefix = prefix
        self._unwanted = unwanted
        self._kind = kind

    def _name(self) -> str:
        return ".".join([self._prefix, *map(str, self.path)])

    def enter(self, container: Any) -> Iterable[tuple[Any, Any]] | None:
        # A dict with the parts of a composite tensor is left out as a whole.
        if type(container) is not dict or (KIND in container and self._unwanted(self._name())):
            return None
        return container.items()

    def leaf(self, value: Any) -> Any:
        name = self._name()
        if not self._unwanted(name) or not isinstance(value, self._kind):
            return value
        self.left_out.append(name)
        return _LEFT_OUT

    def leave(self, container: Any, changed: dict[Any, Any]) -> Any:
        kept = {**container, **changed}
        return {key: value for key, value in kept.items() if value is not _LEFT_OUT}


_LEFT_OUT = object()


def _by_prefix(
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
) -> list[tuple[str, nn.Module]]:
    """The models with the prefix of each one's names."""
    if isinstance(model, nn.Module):
        return [("", _unwrap_model(model))]
    if isinstance(model, Mapping):
        return [(f"{key}.", _unwrap_model(each)) for key, each in model.items()]
    return [("", _unwrap_model(each)) for each in model]


def _unwrap_model(model: nn.Module) -> nn.Module:
    # torch strips the prefixes of other wrappers, but not of this one.
    return model.module if isinstance(model, nn.DataParallel) else model


def _unwrap_mark(value: Any) -> Any:
    """The value of this rank, loaded or as it was."""
    return value.value if isinstance(value, PerRank) else value


def _unwrap_opaque(loaded: OpaqueValue | Sequence[Any]) -> Any:
    """The value inside of an `OpaqueValue`, loaded or as it was."""
    return loaded.value if isinstance(loaded, OpaqueValue) else loaded[0]

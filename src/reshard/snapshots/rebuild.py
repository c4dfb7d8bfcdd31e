"""State dicts with copies in place of their tensors, which training can no longer change.

Values that are not tensors are copied as `copy.deepcopy` copies them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from reshard.api import UnsupportedLayoutError
from reshard.snapshots.survey import Survey
from reshard.tensors.nesting import PLAIN, Walk, replace_elements
from reshard.tensors.parts import TensorParts


def rebuild(
    state_dict: Mapping[str, Any], plan: Survey, copies: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """The surveyed `state_dict` with `copies` in place of its plain tensors."""
    rebuilt: dict[str, Any] = _Rebuilding(plan, copies).run(state_dict)
    return rebuilt


class _Rebuilding(Walk):
    skipped = PLAIN | {torch.dtype, torch.device}
    # A container in two places is one copy in two places, as in the survey.
    enters_once = True

    def __init__(self, plan: Survey, copies: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._parts: Iterator[TensorParts | None] = iter(plan.parts)
        self._copies: Iterator[torch.Tensor] = iter(copies)

    def leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        return _deep(value, self.path)

    def _tensor(self, value: torch.Tensor) -> Any:
        parts = next(self._parts)
        if parts is None:
            return _like_original(next(self._copies), value, self.path)
        return parts.join([self._tensor(part) for part in parts.tensors])

    def leave(self, container: Any, changed: dict[Any, Any]) -> Any:
        return refill(container, changed)


def refill(container: Any, changed: dict[Any, Any]) -> Any:
    """A copy of a container with other elements, of the same type if possible."""
    if type(container) in (dict, list):
        return replace_elements(container, changed)
    if isinstance(container, Mapping):
        return _refilled(container, replace_elements(container, changed))
    if isinstance(container, list | tuple):
        return _sequence_like(container, replace_elements([*container], changed))
    return container.__replace_value__(changed.get(None, container.value))


def _deep(value: Any, path: Sequence[Any]) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        name = ".".join(map(str, path))
        raise UnsupportedLayoutError(
            f"{name!r} is a {type(value).__name__} that cannot be copied ({error}), so it "
            "could change while it is saved. Save it with save(), or save what it consists of"
        ) from error


def _like_original(copied: torch.Tensor, tensor: torch.Tensor, path: Sequence[Any]) -> torch.Tensor:
    """The copy of a plain tensor with the type and the attributes of the original."""
    # Detached: changes such as requires_grad must not carry over to the next save.
    twin = copied.detach()
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        twin = twin.as_subclass(kind)
        twin.__dict__.update(_deep(vars(tensor), path))
    elif tensor.__dict__:
        # Attributes are for planners. They are not saved, so they need not be copied.
        twin.__dict__.update(tensor.__dict__)
    return twin.requires_grad_() if tensor.requires_grad else twin


def _refilled(original: Mapping[Any, Any], inner: dict[Any, Any]) -> Any:
    """A dict with other values, of the type of `original` if possible."""
    if not isinstance(original, dict):
        # A copy of a mapping may be a view of the same dict: writing to it changes the original.
        return inner
    try:
        twin: Any = copy.copy(original)
        if twin is original:
            return inner
        for key, value in inner.items():
            twin[key] = value
    except Exception:  # noqa: BLE001 - a type that cannot be copied becomes a dict
        return inner
    return twin


def _sequence_like(original: Any, elements: list[Any]) -> Any:
    """A list or tuple with other elements, of the type of `original` if possible."""
    try:
        if isinstance(original, list):
            twin = copy.copy(original)
            if twin is original:
                return elements
            twin[:] = elements
            return twin
        try:
            return tuple.__new__(type(original), elements)
        except TypeError:
            # Types implemented in C, such as torch.Size, need their own constructor.
            return type(original)(elements)
    except Exception:  # noqa: BLE001 - as above
        return elements if isinstance(original, list) else tuple(elements)

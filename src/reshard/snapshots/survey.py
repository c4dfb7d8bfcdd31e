"""Surveys: which tensors a state dict consists of, and which of them share memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reshard.api import UnsupportedLayoutError
from reshard.tensors.nesting import Walk
from reshard.tensors.parts import TensorParts, take_apart
from reshard.tensors.storages import bytes_spanned

__all__ = [
    "ALIGNMENT",
    "Survey",
    "addresses_in",
    "dense_strides",
    "lead_of",
    "span_of",
    "survey",
]

ALIGNMENT = 64


@dataclass(frozen=True)
class Survey:
    """The plain tensors of a state dict in the order of a walk, and which of them share memory.

    `parts` has an entry for each tensor that was met: None for a plain one. `form` is equal
    for two state dicts that need the same memory in the same layout.
    """

    tensors: list[torch.Tensor]
    parts: list[TensorParts | None]
    groups: list[tuple[int, ...]]
    form: tuple[Any, ...]


def survey(state_dict: Mapping[str, Any]) -> Survey:
    """Find the tensors of a nested state dict. Nothing is copied."""
    walk = _TensorWalk()
    walk.run(state_dict)
    tensors = walk.tensors
    groups = [group for group in _overlapping(tensors) if lead_of(tensors, group) is not None]
    shapes = [(tensor.shape, dense_strides(tensor), tensor.dtype) for tensor in tensors]
    shared = [
        (
            lead_of(tensors, group),
            *((i, *_geometry(tensors[group[0]], tensors[i])) for i in group),
        )
        for group in groups
    ]
    return Survey(tensors, walk.parts, groups, (tuple(shapes), tuple(shared)))


def addresses_in(value: Any) -> list[int]:
    """Where the plain tensors in any value begin, as far as it can be taken apart."""
    walk = _AddressWalk()
    walk.run(value)
    return [tensor.data_ptr() for tensor in walk.tensors if tensor.numel()]


class _TensorWalk(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self.parts: list[TensorParts | None] = []

    def leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self._add(value)
        return value

    def _add(self, tensor: torch.Tensor) -> None:
        parts = take_apart(tensor, self.path)
        self.parts.append(parts)
        if parts is None:
            self.tensors.append(tensor)
            return
        for part in parts.tensors:
            self._add(part)

    def leave(self, container: Any, changed: dict[Any, Any]) -> Any:
        return container


class _AddressWalk(_TensorWalk):
    def leaf(self, value: Any) -> Any:
        try:
            return super().leaf(value)
        except UnsupportedLayoutError:
            return value

    def cycle(self, container: Any) -> Any:
        return container


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that is permuted without gaps: a subclass may depend on them."""
    if tensor.is_contiguous() or bytes_spanned(tensor) != tensor.nbytes or 0 in tensor.stride():
        return None
    return tensor.stride()


def _geometry(first: torch.Tensor, tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor lies in memory that it shares with `first`."""
    apart = tensor.data_ptr() - first.data_ptr()
    return apart, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _overlapping(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Groups of tensors in which each shares memory with another, sorted by address."""
    # Equal addresses on different devices are different memory.
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        # An empty tensor has no address.
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(i)
    return [group for places in by_device.values() for group in _sweep(tensors, places)]


def _sweep(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> list[tuple[int, ...]]:
    count = len(places)
    begins = np.fromiter((tensors[i].data_ptr() for i in places), dtype=np.int64, count=count)
    extents = np.fromiter((bytes_spanned(tensors[i]) for i in places), dtype=np.int64, count=count)
    order = np.argsort(begins, kind="stable")
    reach = np.maximum.accumulate(begins[order] + extents[order])
    meets = begins[order][1:] < reach[:-1]
    if not meets.any():
        return []
    borders = [0, *(np.flatnonzero(~meets) + 1).tolist(), count]
    return [
        tuple(places[i] for i in order[first:last].tolist())
        for first, last in itertools.pairwise(borders)
        if last - first > 1
    ]


def lead_of(tensors: Sequence[torch.Tensor], group: Sequence[int]) -> int | None:
    """The distance of a group from an aligned address at which all its elements are aligned.

    The same as in the original if possible. None if there is no such distance, as in memory
    that was not allocated for tensors.
    """
    begin = tensors[group[0]].data_ptr()
    apart = [(tensors[i].data_ptr() - begin, tensors[i].itemsize) for i in group]
    for lead in (begin % ALIGNMENT, *range(ALIGNMENT)):
        if all((lead + distance) % itemsize == 0 for distance, itemsize in apart):
            return int(lead)
    return None


def span_of(tensors: Sequence[torch.Tensor], group: Sequence[int]) -> int:
    begin = tensors[group[0]].data_ptr()
    return max(tensors[i].data_ptr() + bytes_spanned(tensors[i]) for i in group) - begin

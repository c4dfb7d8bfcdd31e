"""Surveys of state dicts, and how their tensors lie in one block of memory.

Tensors that share memory, wholly or in part, share it in the block too.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from reshard.api import UnsupportedLayoutError
from reshard.tensors.nesting import Walk
from reshard.tensors.parts import TensorParts, take_apart
from reshard.tensors.storages import (
    bytes_spanned,
    copy_all,
    lazy_view,
    own_storage,
    storage_uses,
)

_ALIGNMENT = 64


@dataclass(frozen=True)
class Survey:
    """The plain tensors of a state dict in the order of a walk, and which of them share memory.

    `parts` has an entry for each tensor that was met: None for a plain one. `direct` says for
    each plain tensor whether it stands for itself or is the local part of a DTensor, rather than
    a part of a subclass, whose code may look at values when it is rebuilt. `form` is equal for two
    state dicts that need the same memory in the same layout.
    """

    tensors: list[torch.Tensor]
    direct: list[bool]
    parts: list[TensorParts | None]
    groups: list[tuple[int, ...]]
    form: tuple[Any, ...]


def survey(state_dict: Mapping[str, Any], kept: Collection[int] = ()) -> Survey:
    """Find the tensors of a nested state dict. Nothing is copied.

    Tensors whose ids are in `kept` stay as they are.
    """
    walk = _TensorWalk(kept)
    walk.run(state_dict)
    tensors = walk.tensors
    groups = [group for group in _overlapping(tensors) if _lead(tensors, group) is not None]
    shapes = [(tensor.shape, _dense_strides(tensor), tensor.dtype) for tensor in tensors]
    shared = [
        (
            _lead(tensors, group),
            *((i, *_geometry(tensors[group[0]], tensors[i])) for i in group),
        )
        for group in groups
    ]
    form = (tuple(shapes), tuple(shared))
    return Survey(tensors, walk.direct, walk.parts, groups, form)


def addresses_in(value: Any) -> list[int]:
    """Where the plain tensors in any value begin, as far as it can be taken apart."""
    walk = _AddressWalk()
    walk.run(value)
    return [tensor.data_ptr() for tensor in walk.tensors if tensor.numel()]


def tensors_in(value: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors in any value, and the plain ones that they consist of, as far as it is known."""
    walk = _AddressWalk()
    walk.run(value)
    return walk.met, walk.tensors


@dataclass(frozen=True)
class Move:
    """One copy into a block of memory, of one tensor or of several that share memory.

    `members` are their places in the survey.
    """

    source: torch.Tensor
    target: torch.Tensor
    members: tuple[int, ...]


class Layout:
    """Where each tensor of a surveyed state dict lies in a block of memory."""

    def __init__(self, plan: Survey) -> None:
        self.form = plan.form
        self.nbytes = 0
        self._groups = plan.groups
        self._in_group = {i for group in plan.groups for i in group}
        self._begins = [0] * len(plan.tensors)
        self.copies: list[torch.Tensor] = []
        """The tensors in the block, in the order of the survey."""
        for i, tensor in enumerate(plan.tensors):
            if i not in self._in_group:
                self._begins[i] = self._reserve(tensor.nbytes)
        for group in plan.groups:
            first = plan.tensors[group[0]]
            lead = _lead(plan.tensors, group) or 0
            begin = self._reserve(lead + _span(plan.tensors, group)) + lead
            for i in group:
                self._begins[i] = begin + plan.tensors[i].data_ptr() - first.data_ptr()

    def _reserve(self, nbytes: int) -> int:
        begin = self.nbytes
        self.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return begin

    def place(self, memory: torch.Tensor, plan: Survey) -> None:
        """Make `copies` as views of `memory`, which are reused for all state dicts of the form."""
        self._memory = memory
        self.copies = self._views(memory, plan)
        self._uses = list(map(storage_uses, self.copies))
        self._places = [view.data_ptr() for view in self.copies]

    def _views(self, memory: torch.Tensor, plan: Survey) -> list[torch.Tensor]:
        views = []
        shared = self._shared_storages(plan)
        for i, (begin, tensor) in enumerate(zip(self._begins, plan.tensors, strict=True)):
            if i in shared:
                storage, start = shared[i]
                offset = (begin - start) // tensor.itemsize
                view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
                view = view.set_(storage, offset, tensor.shape, tensor.stride())
                view = lazy_view(view, tensor.is_conj(), tensor.is_neg())
            elif tensor.numel():
                flat = own_storage(memory[begin : begin + tensor.nbytes]).view(tensor.dtype)
                strides = _dense_strides(tensor)
                view = (
                    flat.as_strided(tensor.shape, strides) if strides else flat.view(tensor.shape)
                )
            else:
                view = torch.empty(tensor.shape, dtype=tensor.dtype, device=memory.device)
            views.append(view)
        return views

    def is_in_place(self) -> bool:
        """Whether all copies are where they were put: torch moves tensors that it shares."""
        return [view.data_ptr() for view in self.copies] == self._places

    def _shared_storages(self, plan: Survey) -> dict[int, tuple[torch.UntypedStorage, int]]:
        """The shared storage of each tensor that shares memory, and where that begins."""
        shared = {}
        for group in self._groups:
            first = self._begins[group[0]]
            start = first - (_lead(plan.tensors, group) or 0)
            memory = self._memory[start : first + _span(plan.tensors, group)]
            storage = own_storage(memory).untyped_storage()
            shared.update(dict.fromkeys(group, (storage, start)))
        return shared

    def is_held(self) -> bool:
        """Whether anybody looks at the memory through a tensor that `rebuild` handed out."""
        return any(
            storage_uses(view) > before
            for view, before in zip(self.copies, self._uses, strict=True)
        )

    def moves(self, plan: Survey) -> list[Move]:
        """What to copy to have a state dict of the same form in the block."""
        moves = [
            Move(tensor.detach(), self.copies[i], (i,))
            for i, tensor in enumerate(plan.tensors)
            if i not in self._in_group
        ]
        for group in self._groups:
            begin, nbytes = self._begins[group[0]], _span(plan.tensors, group)
            source = _memory_from(plan.tensors[group[0]], nbytes)
            moves.append(Move(source, self._memory[begin : begin + nbytes], group))
        return moves


def copy_moves(moves: Sequence[Move], non_blocking: bool = False) -> None:
    """Copy in one call, which loops outside the GIL."""
    if moves:
        with torch.inference_mode(False), torch.no_grad():
            targets = [move.target for move in moves]
            copy_all(targets, [move.source for move in moves], non_blocking)


class _TensorWalk(Walk):
    def __init__(self, kept: Collection[int] = ()) -> None:
        super().__init__()
        self._kept = kept
        self.met: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        self.direct: list[bool] = []
        self.parts: list[TensorParts | None] = []

    def leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.met.append(value)
            self._add(value, direct=True)
        return value

    def _add(self, tensor: torch.Tensor, direct: bool) -> None:
        parts = take_apart(tensor, self.path)
        if id(tensor) in self._kept:
            parts = TensorParts([], lambda _: tensor.detach())
        self.parts.append(parts)
        if parts is None:
            self.tensors.append(tensor)
            self.direct.append(direct)
            return
        for part in parts.tensors:
            self._add(part, direct and isinstance(tensor, DTensor))

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


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
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


def _lead(tensors: Sequence[torch.Tensor], group: Sequence[int]) -> int | None:
    """The distance of a group from an aligned address at which all its elements are aligned.

    The same as in the original if possible. None if there is no such distance, as in memory
    that was not allocated for tensors.
    """
    begin = tensors[group[0]].data_ptr()
    apart = [(tensors[i].data_ptr() - begin, tensors[i].itemsize) for i in group]
    for lead in (begin % _ALIGNMENT, *range(_ALIGNMENT)):
        if all((lead + distance) % itemsize == 0 for distance, itemsize in apart):
            return int(lead)
    return None


def _span(tensors: Sequence[torch.Tensor], group: Sequence[int]) -> int:
    begin = tensors[group[0]].data_ptr()
    return max(tensors[i].data_ptr() + bytes_spanned(tensors[i]) for i in group) - begin


def _memory_from(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The bytes that begin where `tensor` does."""
    if tensor.device.type == "cpu":
        block = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
        return torch.frombuffer(block, dtype=torch.uint8)
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    begin = tensor.storage_offset() * tensor.itemsize
    return view.set_(tensor.untyped_storage(), begin, (nbytes,), (1,))

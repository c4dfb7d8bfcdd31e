"""How the tensors of a state dict lie in one block of memory.

Tensors that share memory, wholly or in part, share it in the block too.
"""

from __future__ import annotations

import ctypes

import torch

from reshard.snapshots.survey import ALIGNMENT, Survey, dense_strides, lead_of, span_of
from reshard.tensors.storages import copy_all, lazy_view, own_storage, storage_uses

__all__ = ["Layout"]


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
            lead = lead_of(plan.tensors, group) or 0
            begin = self._reserve(lead + span_of(plan.tensors, group)) + lead
            for i in group:
                self._begins[i] = begin + plan.tensors[i].data_ptr() - first.data_ptr()

    def _reserve(self, nbytes: int) -> int:
        begin = self.nbytes
        self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
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
                strides = dense_strides(tensor)
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
            start = first - (lead_of(plan.tensors, group) or 0)
            memory = self._memory[start : first + span_of(plan.tensors, group)]
            storage = own_storage(memory).untyped_storage()
            shared.update(dict.fromkeys(group, (storage, start)))
        return shared

    def is_held(self) -> bool:
        """Whether anybody looks at the memory through a tensor that `rebuild` handed out."""
        return any(
            storage_uses(view) > before
            for view, before in zip(self.copies, self._uses, strict=True)
        )

    def copy(self, plan: Survey, non_blocking: bool = False) -> None:
        """Copy the tensors of a state dict of the same form into the block."""
        sources, targets = [], []
        for i, tensor in enumerate(plan.tensors):
            if i not in self._in_group:
                sources.append(tensor.detach())
                targets.append(self.copies[i])
        for group in self._groups:
            begin, nbytes = self._begins[group[0]], span_of(plan.tensors, group)
            sources.append(_memory_from(plan.tensors[group[0]], nbytes))
            targets.append(self._memory[begin : begin + nbytes])
        if sources:
            copy_all(targets, sources, non_blocking)


def _memory_from(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The bytes that begin where `tensor` does."""
    if tensor.device.type == "cpu":
        block = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
        return torch.frombuffer(block, dtype=torch.uint8)
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    begin = tensor.storage_offset() * tensor.itemsize
    return view.set_(tensor.untyped_storage(), begin, (nbytes,), (1,))

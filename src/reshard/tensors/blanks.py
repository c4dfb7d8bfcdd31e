"""Blanks: tensors on the meta device that stand for memory which is found or made later.

A load that replaces tensors plans with blanks, and only then knows which of them can be views
of stored bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from reshard.tensors.flatten import traverse_state_dict
from reshard.tensors.materialise import with_local
from reshard.tensors.nesting import Walk
from reshard.tensors.paths import StatePath, get_element, set_elements
from reshard.tensors.shards import is_dense, is_plain, plain_local_tensor


def make_blank(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A blank like no other, even of the same shape."""
    # Twice as fast as making each one; most tensors have the shape of another.
    return _any_blank(shape, dtype).detach()


@lru_cache(maxsize=256)
def _any_blank(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def is_blank(value: Any) -> bool:
    """Whether `value` has no memory, and may get any CPU memory of its shape and dtype."""
    if is_plain(value):
        return value.is_meta and is_dense(value)
    local = plain_local_tensor(value) if isinstance(value, DTensor) else None
    if local is None or value.device_mesh.device_type != "cpu":
        return False
    return local.is_meta and is_dense(local)


def blank_layout(blank: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """The dtype and shape of the memory that a blank needs; None unless it is contiguous."""
    local = blank if is_plain(blank) else plain_local_tensor(blank)
    if local is None or not local.is_contiguous():
        return None
    return local.dtype, tuple(local.shape)


def fill_blank(blank: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
    """A tensor like `blank`, in the given memory or in new memory."""
    if not isinstance(blank, DTensor):
        return memory if memory is not None else torch.empty_like(blank, device="cpu")
    if memory is None:
        memory = torch.empty_like(blank._local_tensor, device="cpu")
    return with_local(blank, memory)


class BlankState:
    """A nested state with other tensors in place of its own, which are to be replaced.

    `state` has blanks where tensors are on the CPU or have no memory, and new tensors where they
    are on another device. Tensors that share one memory have one stand-in.
    """

    def __init__(self, original: Mapping[str, Any]) -> None:
        blanking = _Blanking()
        self.state: dict[str, Any] = blanking.run(dict(original))
        self._stand_ins = {id(tensor): tensor for tensor in blanking.stand_ins.values()}

    def put_back(
        self, original: MutableMapping[str, Any], loaded: Mapping[str, Any], filled: Collection[int]
    ) -> None:
        """Replace the tensors and values of `original` by those of `loaded`.

        Stand-ins are left out, unless their identity is in `filled`.
        """
        dressed: dict[tuple[int, bool], torch.Tensor] = {}
        places: list[tuple[StatePath, Any]] = []

        def put(path: StatePath, new: Any) -> None:
            if id(new) in self._stand_ins and id(new) not in filled:
                return
            old = get_element(original, path)
            if new is old:
                return
            if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
                key = id(new), isinstance(old, nn.Parameter)
                new = dressed.setdefault(key, _dressed(new, old))
            places.append((path, new))

        traverse_state_dict(loaded, put)
        set_elements(original, places)


def with_ties(owner: Any, state: Any) -> Any:
    """`state` with one parameter under all names of a tied parameter, if `owner` is a module.

    Otherwise the module would get a parameter of its own for each name.
    """
    if not isinstance(owner, nn.Module) or not isinstance(state, MutableMapping):
        return state
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in owner.named_parameters(remove_duplicate=False):
        if isinstance(state.get(name), torch.Tensor):
            names.setdefault(parameter, []).append(name)
    for parameter, tied in names.items():
        if len(tied) > 1:
            shared = nn.Parameter(state[tied[-1]].detach(), parameter.requires_grad)
            state.update(dict.fromkeys(tied, shared))
    return state


def _dressed(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """A new tensor as what the old one is to autograd and to modules."""
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new.requires_grad_() if old.requires_grad else new


class _Blanking(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.stand_ins: dict[Any, torch.Tensor] = {}

    def leaf(self, value: Any) -> Any:
        local = value if is_plain(value) else plain_local_tensor(value)
        if not isinstance(value, torch.Tensor) or local is None or not is_dense(local):
            return value
        memory = local.untyped_storage()._cdata, local.storage_offset()
        key = (*memory, local.shape, local.stride(), local.dtype, type(value) is DTensor)
        found = self.stand_ins.get(key) if local.numel() else None
        if found is None:
            if local.is_meta:
                found = local.detach()
            else:
                found = torch.empty_like(local, device="meta" if local.is_cpu else None)
            if isinstance(value, DTensor):
                found = with_local(value, found)
            self.stand_ins[key if local.numel() else id(value)] = found
        return found

    def cycle(self, container: Any) -> Any:
        return container

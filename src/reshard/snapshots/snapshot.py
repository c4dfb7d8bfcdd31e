"""Copies of state dicts that training can no longer change.

All tensors of a state dict go into one block of memory. Tensors that share memory, wholly
or in part, share it in the copy too. Everything else is copied as Python copies it.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import Shard  # type: ignore[attr-defined]
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from reshard.api import StateDictError, UnsupportedLayoutError
from reshard.tensors.allocation import elements_spanned
from reshard.tensors.shards import check_allocated, is_dense
from reshard.tensors.subclasses import join_parts, split_parts

__all__ = ["Layout", "Survey", "addresses_in", "survey"]

_ALIGNMENT = 64
_SIMPLE = frozenset({int, float, bool, str, bytes, type(None), torch.dtype, torch.device})
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Survey:
    """The plain tensors of a state dict, in order, and which of them share memory.

    `form` is equal for two state dicts that need the same memory in the same layout.
    """

    tensors: list[torch.Tensor]
    groups: list[tuple[int, ...]]
    form: tuple[Any, ...]


def survey(state_dict: Mapping[str, Any]) -> Survey:
    """Find the tensors of a nested state dict. Nothing is copied."""
    with _shallow_enough():
        tensors = list(_plain_tensors(state_dict, ()))
    groups = [group for group in _overlapping(tensors) if _lead(tensors, group) is not None]
    shapes = [(tensor.shape, _dense_strides(tensor), tensor.dtype) for tensor in tensors]
    shared = [
        (
            _lead(tensors, group),
            *((i, *_geometry(tensors[group[0]], tensors[i])) for i in group),
        )
        for group in groups
    ]
    return Survey(tensors, groups, (tuple(shapes), tuple(shared)))


def addresses_in(value: Any) -> list[int]:
    """Where the plain tensors in a state dict begin, as far as it can be taken apart."""
    try:
        if isinstance(value, Mapping):
            return [each for inner in value.values() for each in addresses_in(inner)]
        if isinstance(value, list | tuple):
            return [each for inner in value for each in addresses_in(inner)]
        return [tensor.data_ptr() for tensor in _plain_tensors(value, ()) if tensor.numel()]
    except UnsupportedLayoutError:
        return []


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that is permuted but has no gaps; a subclass may insist on them."""
    if tensor.is_contiguous() or _extent(tensor) != tensor.nbytes or 0 in tensor.stride():
        return None
    return tensor.stride()


def _geometry(first: torch.Tensor, tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor lies in the memory that it shares with `first`."""
    apart = tensor.data_ptr() - first.data_ptr()
    return apart, tensor.stride(), tensor.is_conj(), tensor.is_neg()


class Layout:
    """Where each tensor of a surveyed state dict lies in a block of memory."""

    def __init__(self, plan: Survey) -> None:
        self.form = plan.form
        self.nbytes = 0
        self._groups = plan.groups
        self._in_group = {i for group in plan.groups for i in group}
        self._begins = [0] * len(plan.tensors)
        self._copies: list[torch.Tensor] = []
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
        """Make the tensors that look at `memory`, once for all copies into it."""
        self._memory = memory
        self._copies = self._views(memory, plan)
        self._uses = [_uses(view) for view in self._copies]
        self._places = [view.data_ptr() for view in self._copies]

    def _views(self, memory: torch.Tensor, plan: Survey) -> list[torch.Tensor]:
        views = []
        shared = self._shared_storages(plan)
        for i, (begin, tensor) in enumerate(zip(self._begins, plan.tensors, strict=True)):
            if i in shared:
                storage, start = shared[i]
                offset = (begin - start) // tensor.itemsize
                view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
                view = view.set_(storage, offset, tensor.shape, tensor.stride())
                view = view.conj() if tensor.is_conj() else view
                view = torch._neg_view(view) if tensor.is_neg() else view
            elif tensor.numel():
                flat = _own_storage(memory[begin : begin + tensor.nbytes]).view(tensor.dtype)
                strides = _dense_strides(tensor)
                view = (
                    flat.as_strided(tensor.shape, strides) if strides else flat.view(tensor.shape)
                )
            else:
                view = torch.empty(tensor.shape, dtype=tensor.dtype, device=memory.device)
            views.append(view)
        return views

    def is_in_place(self) -> bool:
        """Whether all copies are where they were put; torch moves what it sends to a process."""
        return [view.data_ptr() for view in self._copies] == self._places

    def _shared_storages(self, plan: Survey) -> dict[int, tuple[torch.UntypedStorage, int]]:
        """For each tensor that shares memory: the storage that is shared, and where it starts."""
        shared = {}
        for group in self._groups:
            first = self._begins[group[0]]
            start = first - (_lead(plan.tensors, group) or 0)
            memory = self._memory[start : first + _span(plan.tensors, group)]
            storage = _own_storage(memory).untyped_storage()
            shared.update(dict.fromkeys(group, (storage, start)))
        return shared

    def is_held(self) -> bool:
        """Whether anybody looks at the memory through a tensor that `rebuild` handed out."""
        return any(
            _uses(view) > before for view, before in zip(self._copies, self._uses, strict=True)
        )

    def copy(self, plan: Survey, non_blocking: bool = False) -> None:
        """Copy the tensors of a state dict of the same form into place."""
        sources, targets = [], []
        for i, tensor in enumerate(plan.tensors):
            if i not in self._in_group:
                sources.append(tensor.detach())
                targets.append(self._copies[i])
        for group in self._groups:
            begin, nbytes = self._begins[group[0]], _span(plan.tensors, group)
            sources.append(_memory_from(plan.tensors[group[0]], nbytes))
            targets.append(self._memory[begin : begin + nbytes])
        if sources:
            # One call for all: it loops outside the GIL.
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)

    def rebuild(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of the same form, with the copies in place of the tensors."""
        with _shallow_enough():
            rebuilt: dict[str, Any] = _rebuild(state_dict, (), iter(self._copies))
        return rebuilt


@contextlib.contextmanager
def _shallow_enough() -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise StateDictError(
            "the state dict is nested too deeply to be copied before it is saved. Save it with "
            "save(), or keep it in fewer containers"
        ) from error


# Going through a state dict: once to find its tensors, once to put others in their place.


class _Parts(NamedTuple):
    """What a tensor consists of, and how to put such parts together again."""

    tensors: list[torch.Tensor]
    join: Callable[[list[Any]], Any]


def _plain_tensors(value: Any, path: Path) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        parts = _take_apart(value, path)
        if parts is None:
            yield value
        else:
            for part in parts.tensors:
                yield from _plain_tensors(part, path)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _plain_tensors(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _plain_tensors(inner, (*path, i))
    elif hasattr(type(value), "__replace_value__"):
        yield from _plain_tensors(value.value, path)


def _rebuild(value: Any, path: Path, copies: Iterator[torch.Tensor]) -> Any:
    kind = type(value)
    if kind in _SIMPLE:
        return value
    if isinstance(value, torch.Tensor):
        parts = _take_apart(value, path)
        if parts is None:
            return _dressed(next(copies), value, path)
        return parts.join([_rebuild(part, path, copies) for part in parts.tensors])
    if isinstance(value, Mapping):
        inner = {key: _rebuild(each, (*path, key), copies) for key, each in value.items()}
        return inner if kind is dict else _refilled(value, inner)
    if isinstance(value, list | tuple):
        elements = [_rebuild(each, (*path, i), copies) for i, each in enumerate(value)]
        return elements if kind is list else _sequence_like(value, elements)
    if hasattr(type(value), "__replace_value__"):
        return value.__replace_value__(_rebuild(value.value, path, copies))
    return _deep(value, path)


def _deep(value: Any, path: Path) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise UnsupportedLayoutError(
            f"{_spell(path)} is a {type(value).__name__} that cannot be copied ({error}), so it "
            "could change while it is saved. Save it with save(), or save what it consists of"
        ) from error


def _dressed(copied: torch.Tensor, tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """The copy of a plain tensor, as the same kind of tensor."""
    # Detached, so that what is asked of one save's tensor does not stay for the next.
    twin = copied.detach()
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        twin = twin.as_subclass(kind)
        twin.__dict__.update(_deep(vars(tensor), path))
    elif tensor.__dict__:
        # Marks that a planner may look at. They are not saved, so they need not be copied.
        twin.__dict__.update(tensor.__dict__)
    return twin.requires_grad_() if tensor.requires_grad else twin


def _own_storage(memory: torch.Tensor) -> torch.Tensor:
    """The same memory as the whole of a storage."""
    return torch.from_numpy(memory.numpy())


def _uses(tensor: torch.Tensor) -> int:
    """How many tensors, arrays and others have the storage of this one."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def _refilled(original: Mapping[Any, Any], inner: dict[Any, Any]) -> Any:
    """A dict of the type of `original`, if such can be made, with other values."""
    if not isinstance(original, dict):
        # A copy may be a view of the same dict; to write into it would change the original.
        return inner
    try:
        twin: Any = copy.copy(original)
        if twin is original:
            return inner
        for key, value in inner.items():
            twin[key] = value
    except Exception:  # noqa: BLE001 - whatever the type objects to, a dict has the same content
        return inner
    return twin


def _sequence_like(original: Any, elements: list[Any]) -> Any:
    """A list or tuple of the type of `original`, if such can be made, with other elements."""
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
            # A type of C code, such as torch.Size, insists on its own constructor.
            return type(original)(elements)
    except Exception:  # noqa: BLE001 - as above
        return elements if isinstance(original, list) else tuple(elements)


def _take_apart(tensor: torch.Tensor, path: Path) -> _Parts | None:
    """The parts of a tensor that is more than its own memory; None if it is just that."""
    kind = type(tensor)
    if (kind is torch.Tensor or kind is torch.nn.Parameter) and is_dense(tensor):
        if tensor.is_meta:
            return _Parts([], lambda _: _cloned(tensor))
        _check_memory(tensor, path)
        return None
    if isinstance(tensor, DTensor) and kind is DTensor:
        # Built by hand: from_local would ask the mesh about every tensor.
        return _Parts(
            [tensor._local_tensor],
            lambda local: DTensor(local[0], tensor._spec, requires_grad=tensor.requires_grad),  # type: ignore[no-untyped-call]
        )
    if isinstance(tensor, AsyncCollectiveTensor):
        return _Parts([tensor.trigger_wait()], lambda waited: waited[0])  # type: ignore[no-untyped-call]
    if isinstance(tensor, UninitializedTensorMixin):
        raise UnsupportedLayoutError(
            f"{_spell(path)} has no shape yet: run the lazy module once before saving"
        )
    if isinstance(tensor, ShardedTensor):
        return _Parts(
            [shard.tensor for shard in tensor.local_shards()],
            lambda locals_: _sharded_like(tensor, locals_),
        )
    if hasattr(kind, "__tensor_flatten__"):
        return _take_subclass_apart(tensor)
    if tensor.is_meta or not is_dense(tensor):
        check_allocated(_name(path), tensor)
        return _Parts([], lambda _: _cloned(tensor))
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedLayoutError(
            f"{_spell(path)} is a {kind.__name__}, a tensor subclass that does not say what it "
            "consists of: give it __tensor_flatten__ and __tensor_unflatten__, or save it with "
            "save()"
        )
    _check_memory(tensor, path)
    return None


def _check_memory(tensor: torch.Tensor, path: Path) -> None:
    if tensor.is_nested:
        raise UnsupportedLayoutError(
            f"{_spell(path)} is a nested tensor of the strided kind; use layout=torch.jagged"
        )
    check_allocated(_name(path), tensor)


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _sharded_like(tensor: ShardedTensor, local_tensors: Sequence[torch.Tensor]) -> ShardedTensor:
    metadata = copy.deepcopy(tensor.metadata())
    metadata.tensor_properties.pin_memory = any(local.is_pinned() for local in local_tensors)
    metadata.shards_metadata = [_on_cpu(shard) for shard in metadata.shards_metadata]
    shards = [
        Shard(local, _on_cpu(shard.metadata))
        for local, shard in zip(local_tensors, tensor.local_shards(), strict=True)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=tensor._process_group
    )


def _on_cpu(shard: Any) -> Any:
    """Where a shard is, were it in the memory of the same rank."""
    rank = None if shard.placement is None else shard.placement.rank()
    place = "cpu" if rank is None else f"rank:{rank}/cpu"
    return ShardMetadata(list(shard.shard_offsets), list(shard.shard_sizes), place)


def _take_subclass_apart(tensor: Any) -> _Parts:
    own, _ = split_parts(tensor)

    def join(parts: list[Any]) -> Any:
        twin = join_parts(tensor, dict(zip(own, parts, strict=True)))
        wanted = tensor.requires_grad and not twin.requires_grad and twin.is_leaf
        return twin.requires_grad_() if wanted else twin

    return _Parts(list(own.values()), join)


def _spell(path: Path) -> str:
    return repr(_name(path))


def _name(path: Path) -> str:
    return ".".join(map(str, path))


# Memory that several tensors share


def _extent(tensor: torch.Tensor) -> int:
    """How many bytes lie between the first and the last element, that included."""
    return elements_spanned(tensor.shape, tensor.stride()) * tensor.itemsize


def _overlapping(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Groups of tensors of which each shares memory with another of its group.

    The one that begins first comes first.
    """
    # Equal addresses on different devices are different memory.
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        # An empty tensor lies nowhere.
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(i)
    return [group for places in by_device.values() for group in _sweep(tensors, places)]


def _sweep(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> list[tuple[int, ...]]:
    count = len(places)
    begins = np.fromiter((tensors[i].data_ptr() for i in places), dtype=np.int64, count=count)
    extents = np.fromiter((_extent(tensors[i]) for i in places), dtype=np.int64, count=count)
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
    """How far from an aligned address a group begins, so that each element is aligned.

    As far as in the original where that will do. None if it cannot be, in memory that
    was never made for tensors.
    """
    begin = tensors[group[0]].data_ptr()
    apart = [(tensors[i].data_ptr() - begin, tensors[i].itemsize) for i in group]
    for lead in (begin % _ALIGNMENT, *range(_ALIGNMENT)):
        if all((lead + distance) % itemsize == 0 for distance, itemsize in apart):
            return int(lead)
    return None


def _span(tensors: Sequence[torch.Tensor], group: Sequence[int]) -> int:
    begin = tensors[group[0]].data_ptr()
    return max(tensors[i].data_ptr() + _extent(tensors[i]) for i in group) - begin


def _memory_from(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The bytes that begin where `tensor` does."""
    if tensor.device.type == "cpu":
        block = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
        return torch.frombuffer(block, dtype=torch.uint8)
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    begin = tensor.storage_offset() * tensor.itemsize
    return view.set_(tensor.untyped_storage(), begin, (nbytes,), (1,))

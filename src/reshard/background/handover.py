"""Passing a staged state dict to the worker process without copying its tensors.

It is pickled with each tensor as a reference to the staging memory. Sharded tensors are
passed as the shards that this rank holds, since a worker has no mesh.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from reshard.tensors.dcp_modules import reduce_class
from reshard.tensors.nesting import Walk
from reshard.tensors.shards import HeldShards, held_shards, is_dense, is_sharded
from reshard.tensors.storages import elements_spanned, lazy_view, own_storage

_LEVELS_PER_PIECE = 100
_MAP_NORESERVE = 0x4000
"""Of Linux; `mmap` has a name for it from Python 3.13 on."""


def pack(value: Any, memory: torch.Tensor, left_out: Collection[int] = ()) -> bytes:
    """`value` as bytes, for another process that has `memory` too.

    Tensors that begin at one of the addresses of `left_out` arrive without their content.
    """
    try:
        return _pickle([value], memory, left_out)
    except RecursionError:
        deep = _DeepSplit()
        rest = deep.run(value)
        return _pickle([*deep.pieces, rest], memory, left_out)


def _pickle(pieces: list[Any], memory: torch.Tensor, left_out: Collection[int]) -> bytes:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, memory, left_out)
    pickler.dump(len(pieces))
    for piece in pieces:
        pickler.dump(piece)
    return buffer.getvalue()


def unpack(data: bytes, memory: torch.Tensor, load_main: Callable[[], None]) -> Any:
    """What `pack` packed. Only for data that the trainer of this job sent.

    `load_main` is called when a class of the trainer's own script is needed.
    """
    return _Unpickler(io.BytesIO(data), memory, load_main).load_all()


@dataclass(frozen=True)
class _Piece:
    """Stands for a container that is pickled before the one that it lies in."""

    number: int


class _DeepSplit(Walk):
    """Replaces containers at every 100th level: pickle recurses, and would run out of stack."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Any] = []

    def leave(self, container: Any, changed: dict[Any, Any]) -> Any:
        piece = super().leave(container, changed)
        if not self.path or len(self.path) % _LEVELS_PER_PIECE:
            return piece
        self.pieces.append(piece)
        return _Piece(len(self.pieces) - 1)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, memory: torch.Tensor, left_out: Collection[int]) -> None:
        super().__init__(file, protocol=5)
        self._left_out = left_out
        self._begin = memory.data_ptr()
        self._end = memory.data_ptr() + memory.nbytes

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is _Piece:
            return obj.number
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_meta:
            return None
        if is_sharded(obj):
            return None
        # An empty tensor has no address.
        address = obj.data_ptr() if obj.numel() else self._begin
        if obj.is_quantized:
            return None
        is_left_out = address in self._left_out
        if not self._begin <= address < self._end and not is_left_out:
            return None
        bits = obj.requires_grad, obj.is_conj(), obj.is_neg()
        place = address if is_left_out else address - self._begin
        return is_left_out, place, obj.dtype, tuple(obj.shape), obj.stride(), *bits

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return reduce_class(obj)
        kind, requires_grad = type(obj), obj.requires_grad
        if is_sharded(obj):
            held = held_shards(obj)
            return HeldShards, (held.dtype, held.shape, held.requires_grad, held.shards)
        if hasattr(kind, "__tensor_flatten__"):
            names, context = obj.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = {name: getattr(obj, name) for name in names}
            shape, stride = tuple(obj.shape), obj.stride()
            return _join_parts, (kind, parts, context, shape, stride, requires_grad)
        if kind not in _KNOWN and is_dense(obj):
            plain = obj.detach().as_subclass(torch.Tensor)
            return _restore_subclass, (kind, plain, vars(obj), requires_grad)
        return NotImplemented


_KNOWN = (torch.Tensor, torch.nn.Parameter)


def _join_parts(kind: Any, parts: Any, context: Any, shape: Any, stride: Any, grad: bool) -> Any:
    joined = kind.__tensor_unflatten__(parts, context, torch.Size(shape), stride)
    return joined.requires_grad_() if grad and not joined.requires_grad else joined


def _restore_subclass(
    kind: Any, plain: torch.Tensor, attributes: dict[str, Any], grad: bool
) -> Any:
    restored = plain.as_subclass(kind)
    restored.__dict__.update(attributes)
    return restored.requires_grad_() if grad else restored


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, memory: torch.Tensor, load_main: Callable[[], None]
    ) -> None:
        super().__init__(file)
        self._load_main = load_main
        self._memory = memory
        self._pieces: list[Any] = []
        self._empty: dict[tuple[int, int], torch.Tensor] = {}

    def load_all(self) -> Any:
        for _ in range(self.load()):
            self._pieces.append(self.load())
        return self._pieces[-1]

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name in ("__main__", "__mp_main__"):
            self._load_main()
        return super().find_class(module_name, global_name)

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is int:
            return self._pieces[pid]
        is_left_out, begin, dtype, shape, stride, requires_grad, is_conj, is_neg = pid
        # A script that was imported may have chosen another default device.
        if 0 in shape:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            nbytes = elements_spanned(shape, stride) * dtype.itemsize
            if is_left_out:
                memory = self._reserve(begin, nbytes)
            else:
                memory = self._memory[begin : begin + nbytes]
            # Some subclasses require that their parts begin a storage.
            tensor = own_storage(memory).view(dtype).as_strided(shape, stride)
        tensor = lazy_view(tensor, is_conj, is_neg)
        return tensor.requires_grad_() if requires_grad else tensor

    def _reserve(self, address: int, nbytes: int) -> torch.Tensor:
        """Addresses without memory, the same for names that share theirs."""
        reserved = self._empty.get((address, nbytes))
        if reserved is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            pages = mmap.mmap(-1, nbytes, flags=flags)
            reserved = self._empty[address, nbytes] = torch.frombuffer(pages, dtype=torch.uint8)
        return reserved

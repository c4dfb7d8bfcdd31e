"""A staged state dict on its way to the worker: its tensors stay where they are.

What travels is a pickle in which each tensor is a place in the staging memory. Sharded
tensors travel as the shards that this rank holds, since a worker has no mesh.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from reshard.tensors.allocation import elements_spanned
from reshard.tensors.shards import HeldShards, held_shards, is_dense, is_sharded

__all__ = ["pack", "unpack"]


def pack(value: Any, memory: torch.Tensor) -> bytes:
    """`value` for another process that has `memory` too."""
    buffer = io.BytesIO()
    _Pickler(buffer, memory).dump(value)
    return buffer.getvalue()


def unpack(data: bytes, memory: torch.Tensor, load_main: Callable[[], None]) -> Any:
    """What `pack` packed. Only for what the trainer of this very job sent.

    `load_main` is called when a class of the trainer's own script is needed.
    """
    return _Unpickler(io.BytesIO(data), memory, load_main).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, memory: torch.Tensor) -> None:
        super().__init__(file, protocol=5)
        self._begin = memory.data_ptr()
        self._end = memory.data_ptr() + memory.nbytes

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_meta:
            return None
        # An empty tensor lies nowhere.
        address = obj.data_ptr() if obj.numel() else self._begin
        if not self._begin <= address < self._end or obj.is_quantized:
            return None
        return (
            address - self._begin,
            obj.dtype,
            tuple(obj.shape),
            obj.stride(),
            obj.requires_grad,
            obj.is_conj(),
            obj.is_neg(),
        )

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and is_sharded(obj):
            held = held_shards(obj)
            return HeldShards, (held.dtype, held.shape, held.requires_grad, held.shards)
        if isinstance(obj, torch.Tensor) and hasattr(type(obj), "__tensor_flatten__"):
            names, context = obj.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = {name: getattr(obj, name) for name in names}
            return _join, (
                type(obj),
                parts,
                context,
                tuple(obj.shape),
                obj.stride(),
                obj.requires_grad,
            )
        if isinstance(obj, torch.Tensor) and type(obj) not in _KNOWN and is_dense(obj):
            plain = obj.detach().as_subclass(torch.Tensor)
            return _dress, (type(obj), plain, vars(obj), obj.requires_grad)
        return NotImplemented


_KNOWN = (torch.Tensor, torch.nn.Parameter)


def _join(kind: Any, parts: Any, context: Any, shape: Any, stride: Any, grad: bool) -> Any:
    joined = kind.__tensor_unflatten__(parts, context, torch.Size(shape), stride)
    return joined.requires_grad_() if grad and not joined.requires_grad else joined


def _dress(kind: Any, tensor: torch.Tensor, attributes: dict[str, Any], grad: bool) -> Any:
    dressed = tensor.as_subclass(kind)
    dressed.__dict__.update(attributes)
    return dressed.requires_grad_() if grad else dressed


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, memory: torch.Tensor, load_main: Callable[[], None]
    ) -> None:
        super().__init__(file)
        self._load_main = load_main
        self._memory = memory

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name in ("__main__", "__mp_main__"):
            self._load_main()
        return super().find_class(module_name, global_name)

    def persistent_load(self, pid: Any) -> torch.Tensor:
        begin, dtype, shape, stride, requires_grad, is_conj, is_neg = pid
        # A script that was imported may have chosen another default device.
        if 0 in shape:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            nbytes = elements_spanned(shape, stride) * dtype.itemsize
            memory = self._memory[begin : begin + nbytes]
            # A storage of its own, as subclasses may insist on.
            tensor = torch.from_numpy(memory.numpy()).view(dtype).as_strided(shape, stride)
        tensor = tensor.conj() if is_conj else tensor
        tensor = torch._neg_view(tensor) if is_neg else tensor
        return tensor.requires_grad_() if requires_grad else tensor

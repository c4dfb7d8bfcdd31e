"""Values that are not tensors, as bytes: typed, tagged, and never executed.

    b"RSV1" kind payload

`kind` is b"M" for the tagged encoding, a MessagePack tree in which every type that
MessagePack lacks is an extension, or b"P" for a pickle, after the name of its type as a
MessagePack string. Pickles are only made for types that the tagged encoding does not
know, and only read when the caller says so.
"""

from __future__ import annotations

import argparse
import datetime
import io
import math
import pickle
import re
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from reshard.api import CorruptCheckpointError, UnsafeValueError, UnsupportedLayoutError

__all__ = ["MAGIC", "Whole", "decode_value", "encode_value", "is_pickled"]

MAGIC = b"RSV1"
TAGGED, PICKLED = b"M", b"P"
_DEEPEST = 64


class _Tag(IntEnum):
    TUPLE = 1
    MAP = 2
    SET = 3
    FROZENSET = 4
    BIG_INT = 5
    COMPLEX = 6
    BYTEARRAY = 7
    ORDERED_MAP = 8
    BUFFER = 9
    COUNTER = 10
    DEQUE = 11
    DEFAULT_MAP = 12
    NAMESPACE = 13
    PATH = 14
    NUMPY_ARRAY = 16
    NUMPY_SCALAR = 17
    TORCH_SIZE = 32
    TORCH_DTYPE = 33
    TORCH_DEVICE = 34
    TORCH_TENSOR = 35
    DATETIME = 48
    DATE = 49
    TIME = 50
    TIMEDELTA = 51


@dataclass(frozen=True)
class Whole:
    """Marks a value that is stored and replaced as one, tensors in it included.

    It is stored, and comes back, as a tuple of one element.
    """

    value: Any


class _Unknown(Exception):  # noqa: N818 - control flow, never seen by a user
    """The tagged encoding has no form for a value."""


def encode_value(value: Any) -> bytes:
    """The bytes to store for `value`."""
    try:
        return MAGIC + TAGGED + msgspec.msgpack.encode(_to_tree(value, 0))
    except (_Unknown, UnicodeEncodeError) as error:
        if isinstance(value, Whole):
            value = (value.value,)
        kind = _type_name(value)
        if isinstance(error, _Unknown) and error.args[0] is not value:
            kind = f"{kind}, for the {_type_name(error.args[0])} in it"
        name = msgspec.msgpack.encode(kind[:200])
        return b"".join([MAGIC, PICKLED, name, pickle.dumps(value, protocol=4)])


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def is_pickled(data: bytes | memoryview) -> bool:
    return bytes(data[:5]) == MAGIC + PICKLED


def decode_value(data: bytes, fqn: str, allow_pickle: bool = False) -> Any:
    """The value that `encode_value` encoded. Runs no code unless `allow_pickle`."""
    kind, payload = data[4:5], memoryview(data)[5:]
    if data[:4] != MAGIC or kind not in (TAGGED, PICKLED):
        raise CorruptCheckpointError(f"{fqn!r} is not stored as a value of this format")
    if kind == PICKLED:
        name, pickled = _split_name(payload, fqn)
        if not allow_pickle:
            raise UnsafeValueError(
                f"{fqn!r} is stored as a pickled object of type {name}, which could run code when "
                "it is read. Pass allow_pickle=True to load it, if you trust where the checkpoint "
                "comes from"
            )
        return pickle.loads(pickled)
    try:
        return _Decoder().decode(payload)
    except (
        msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError, RuntimeError,
        OverflowError, EOFError, MemoryError,
    ) as error:  # fmt: skip
        raise CorruptCheckpointError(
            f"the stored value of {fqn!r} makes no sense: {error}"
        ) from error


def _split_name(payload: memoryview, fqn: str) -> tuple[str, memoryview]:
    """The type that a pickle is of, and the pickle."""
    length = len(payload)
    # A MessagePack string of up to 255 bytes: its length is in the first or second byte.
    if length and 0xA0 <= payload[0] <= 0xBF:
        begin, size = 1, payload[0] & 0x1F
    elif length > 1 and payload[0] == 0xD9:
        begin, size = 2, payload[1]
    else:
        raise CorruptCheckpointError(f"the pickled value of {fqn!r} does not name its type")
    return bytes(payload[begin : begin + size]).decode(errors="replace"), payload[begin + size :]


_PLAIN = (bool, float, str, bytes)


def _to_tree(value: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _big_int(value)
    if depth > _DEEPEST:
        raise _Unknown(value)
    if kind is list:
        return [_to_tree(inner, depth + 1) for inner in value]
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: _to_tree(inner, depth + 1) for key, inner in value.items()}
        return _ext(_Tag.MAP, _pairs(value, depth))
    if kind is tuple:
        return _ext(_Tag.TUPLE, [_to_tree(inner, depth + 1) for inner in value])
    encode = _ENCODERS.get(kind)
    if encode is not None:
        return encode(value, depth)
    if kind is np.ndarray and value.dtype.kind in "biufcSU":
        return _ext(_Tag.NUMPY_ARRAY, _array(value))
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSU":
        return _ext(_Tag.NUMPY_SCALAR, _array(np.asarray(value)))
    raise _Unknown(value)


def _ext(tag: _Tag, content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(int(tag), msgspec.msgpack.encode(content))


def _big_int(value: int) -> msgspec.msgpack.Ext:
    nbytes = value.bit_length() // 8 + 1
    return _ext(_Tag.BIG_INT, value.to_bytes(nbytes, "little", signed=True))


def _pairs(value: Any, depth: int) -> list[Any]:
    return [(_to_tree(key, depth + 1), _to_tree(inner, depth + 1)) for key, inner in value.items()]


def _array(array: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _tensor(value: torch.Tensor, depth: int) -> msgspec.msgpack.Ext:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise _Unknown(value)
    if value.numel() and not value.untyped_storage().nbytes():
        raise UnsupportedLayoutError("the memory of a tensor within the value was freed")
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # A tensor of one element counts as contiguous whatever its stride; a view does not.
    flat = flat.as_strided(flat.shape, (1,))
    data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    return _ext(_Tag.TORCH_TENSOR, (_dtype_name(value.dtype), tuple(value.shape), data))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, dict, set, bool)}
"""What a defaultdict may fill itself with."""


def _factory_name(factory: Any) -> str | None:
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise _Unknown(factory)
    return str(name)


def _elements(tag: _Tag) -> Any:
    def encode(value: Any, depth: int) -> msgspec.msgpack.Ext:
        # Sorted by their encoding, so that equal sets give equal bytes.
        parts = [msgspec.msgpack.encode(_to_tree(inner, depth + 1)) for inner in value]
        return _ext(tag, [msgspec.Raw(part) for part in sorted(parts)])

    return encode


_ENCODERS: dict[type, Any] = {
    Whole: lambda value, depth: _ext(_Tag.TUPLE, [_to_tree(value.value, depth + 1)]),
    OrderedDict: lambda value, depth: _ext(_Tag.ORDERED_MAP, _pairs(value, depth)),
    set: _elements(_Tag.SET),
    frozenset: _elements(_Tag.FROZENSET),
    complex: lambda value, depth: _ext(_Tag.COMPLEX, (value.real, value.imag)),
    bytearray: lambda value, depth: _ext(_Tag.BYTEARRAY, bytes(value)),
    Counter: lambda value, depth: _ext(_Tag.COUNTER, _pairs(value, depth)),
    deque: lambda value, depth: _ext(
        _Tag.DEQUE, ([_to_tree(inner, depth + 1) for inner in value], value.maxlen)
    ),
    defaultdict: lambda value, depth: _ext(
        _Tag.DEFAULT_MAP, (_factory_name(value.default_factory), _pairs(value, depth))
    ),
    argparse.Namespace: lambda value, depth: _ext(_Tag.NAMESPACE, _pairs(vars(value), depth)),
    type(Path()): lambda value, depth: _ext(_Tag.PATH, str(value)),
    io.BytesIO: lambda value, depth: _ext(_Tag.BUFFER, (value.getvalue(), value.tell())),
    torch.Size: lambda value, depth: _ext(_Tag.TORCH_SIZE, tuple(value)),
    torch.dtype: lambda value, depth: _ext(_Tag.TORCH_DTYPE, _dtype_name(value)),
    torch.device: lambda value, depth: _ext(_Tag.TORCH_DEVICE, str(value)),
    torch.Tensor: _tensor,
    datetime.datetime: lambda value, depth: _ext(_Tag.DATETIME, (value.isoformat(), value.fold)),
    datetime.date: lambda value, depth: _ext(_Tag.DATE, value.isoformat()),
    datetime.time: lambda value, depth: _ext(_Tag.TIME, (value.isoformat(), value.fold)),
    datetime.timedelta: lambda value, depth: _ext(
        _Tag.TIMEDELTA, (value.days, value.seconds, value.microseconds)
    ),
}


class _Decoder:
    """Decodes one tree; extensions nest, so it counts how deep it is."""

    def __init__(self) -> None:
        self._depth = 0

    def decode(self, data: bytes | memoryview) -> Any:
        return msgspec.msgpack.decode(data, ext_hook=self._extension)

    def _extension(self, code: int, data: memoryview) -> Any:
        tag = _Tag(code)
        self._depth += 1
        if self._depth > 4 * _DEEPEST:
            raise ValueError("it is nested too deeply")
        content = self.decode(data)
        self._depth -= 1
        return _DECODERS[tag](content)


_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufcSU]\d{1,9}")


def _is(content: Any, *kinds: type) -> None:
    if type(content) not in kinds:
        raise TypeError(f"a {type(content).__name__} in the place of a {kinds[0].__name__}")


def _check_extents(shape: Any, itemsize: int, nbytes: int) -> None:
    """The data must be as long as the shape says, before anything is allocated."""
    if not all(type(extent) is int and 0 <= extent < 2**62 for extent in shape):
        raise ValueError(f"the shape {shape}")
    if math.prod(shape) * itemsize != nbytes:
        raise ValueError(f"{nbytes} bytes for the shape {shape}")


def _to_array(content: Any) -> np.ndarray[Any, Any]:
    name, shape, data = content
    _is(name, str)
    _is(data, bytes)
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"an array of dtype {name!r}")
    dtype = np.dtype(name)
    _check_extents(shape, dtype.itemsize, len(data))
    return np.array(np.frombuffer(data, dtype=dtype).reshape(shape))


def _bytes(content: Any) -> bytes:
    _is(content, bytes)
    return bytes(content)


def _to_buffer(content: Any) -> io.BytesIO:
    data, position = content
    buffer = io.BytesIO(_bytes(data))
    buffer.seek(position)
    return buffer


def _to_deque(content: Any) -> deque[Any]:
    elements, longest = content
    return deque(elements, longest)


def _to_default_map(content: Any) -> defaultdict[Any, Any]:
    factory, pairs = content
    return defaultdict(None if factory is None else _FACTORIES[factory], dict(pairs))


def _folded(kind: Any, content: Any) -> Any:
    text, fold = content
    return kind.fromisoformat(text).replace(fold=fold)


def _to_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


def _to_tensor(content: Any) -> torch.Tensor:
    name, shape, data = content
    _is(data, bytes)
    dtype = _to_dtype(name)
    if name.startswith(("qint", "quint")):
        raise ValueError("a quantized tensor")
    _check_extents(shape, dtype.itemsize, len(data))
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


_DECODERS: dict[_Tag, Any] = {
    _Tag.TUPLE: tuple,
    _Tag.MAP: dict,
    _Tag.ORDERED_MAP: OrderedDict,
    _Tag.SET: set,
    _Tag.FROZENSET: frozenset,
    _Tag.BIG_INT: lambda content: int.from_bytes(_bytes(content), "little", signed=True),
    _Tag.COMPLEX: lambda content: complex(*content),
    _Tag.BYTEARRAY: lambda content: bytearray(_bytes(content)),
    _Tag.BUFFER: _to_buffer,
    _Tag.COUNTER: lambda content: Counter(dict(content)),
    _Tag.DEQUE: _to_deque,
    _Tag.DEFAULT_MAP: _to_default_map,
    _Tag.NAMESPACE: lambda content: argparse.Namespace(**dict(content)),
    _Tag.PATH: Path,
    _Tag.NUMPY_ARRAY: _to_array,
    _Tag.NUMPY_SCALAR: lambda content: _to_array(content)[()],
    _Tag.TORCH_SIZE: torch.Size,
    _Tag.TORCH_DTYPE: _to_dtype,
    _Tag.TORCH_DEVICE: torch.device,
    _Tag.TORCH_TENSOR: _to_tensor,
    _Tag.DATETIME: lambda content: _folded(datetime.datetime, content),
    _Tag.DATE: datetime.date.fromisoformat,
    _Tag.TIME: lambda content: _folded(datetime.time, content),
    _Tag.TIMEDELTA: lambda content: datetime.timedelta(*content),
}

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
import logging
import math
import pickle
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, Union
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import torch

from reshard.api import (
    CorruptCheckpointError,
    UnsafeValueError,
    UnsupportedFormatError,
    UnsupportedLayoutError,
)
from reshard.planning.columns import MOST_DIMS
from reshard.tensors.storages import is_allocated

logger = logging.getLogger(__name__)

MAGIC = b"RSV1"
TAGGED, PICKLED = b"M", b"P"
_DEEPEST = 64
# A dict of the last depth takes three levels: the extension, its pairs, and one of them.
_DEEPEST_LEVEL = 3 * (_DEEPEST + 2)
_MOST_ALIKE = 64
_LONGEST_REASON = 300
_WIDEST_OF_NONE_BYTES = 1 << 16


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
class OpaqueValue:
    """A value that is stored and loaded as a unit, including the tensors in it.

    It is stored as a tuple of one element, and loaded as such.
    """

    value: Any


class _Unknown(Exception):  # noqa: N818 - control flow, never seen by a user
    """The tagged encoding has no form for a value."""


def encode_value(value: Any) -> bytes:
    """The bytes to store for `value`."""
    try:
        return MAGIC + TAGGED + msgspec.msgpack.encode(_to_tree(value, 0))
    except (_Unknown, UnicodeEncodeError) as error:
        if isinstance(value, OpaqueValue):
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


def pickle_of(data: bytes, fqn: str) -> bytes:
    """The pickle in a value that is stored as one."""
    return bytes(_split_name(memoryview(data)[5:], fqn)[1])


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
        return _from_bytes(payload, 0)
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"cannot read {fqn!r}: {error}") from error
    except Exception as error:
        # numpy, torch and datetime raise all kinds of errors for malformed content.
        raise CorruptCheckpointError(
            f"the stored value of {fqn!r} is malformed: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(error) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


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
    if kind is np.ndarray and _has_numpy_form(value):
        return _ext(_Tag.NUMPY_ARRAY, _array(value))
    if isinstance(value, np.generic) and _has_numpy_form(value):
        return _ext(_Tag.NUMPY_SCALAR, _array(np.asarray(value)))
    raise _Unknown(value)


def _ext(tag: _Tag, content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(int(tag), msgspec.msgpack.encode(content))


def _big_int(value: int) -> msgspec.msgpack.Ext:
    nbytes = value.bit_length() // 8 + 1
    return _ext(_Tag.BIG_INT, value.to_bytes(nbytes, "little", signed=True))


def _pairs(value: Any, depth: int) -> list[Any]:
    if _hash_alike(value):
        raise _Unknown(value)
    return [(_to_tree(key, depth + 1), _to_tree(inner, depth + 1)) for key, inner in value.items()]


def _has_numpy_form(value: Any) -> bool:
    dtype = value.dtype
    return dtype.kind in "biufcSU" and not _too_wide(dtype.itemsize, value.nbytes)


def _array(array: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _tensor(value: torch.Tensor, depth: int) -> msgspec.msgpack.Ext:
    if not is_allocated(value):
        raise UnsupportedLayoutError("the memory of a tensor within the value was freed or shrunk")
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise _Unknown(value)
    if value.dim() > MOST_DIMS:
        raise _Unknown(value)
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # A tensor of one element counts as contiguous whatever its stride; a view does not.
    flat = flat.as_strided(flat.shape, (1,))
    data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    return _ext(_Tag.TORCH_TENSOR, (_dtype_name(value.dtype), tuple(value.shape), data))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, dict, set, bool)}
"""The default factories that a stored defaultdict may have."""


def _factory_name(factory: Any) -> str | None:
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise _Unknown(factory)
    return str(name)


def _elements(tag: _Tag) -> Any:
    def encode(value: Any, depth: int) -> msgspec.msgpack.Ext:
        if _hash_alike(value):
            raise _Unknown(value)
        # Sorted by their encoding, so that equal sets give equal bytes.
        parts = [msgspec.msgpack.encode(_to_tree(inner, depth + 1)) for inner in value]
        return _ext(tag, [msgspec.Raw(part) for part in sorted(parts)])

    return encode


def _moment(value: Any) -> tuple[Any, ...]:
    zone = value.tzinfo
    key = zone.key if isinstance(zone, ZoneInfo) else None
    if key is None or not _ZONE.fullmatch(key):
        return value.isoformat(), value.fold
    return value.isoformat(), value.fold, key


_ENCODERS: dict[type, Any] = {
    OpaqueValue: lambda value, depth: _ext(_Tag.TUPLE, [_to_tree(value.value, depth + 1)]),
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
    datetime.datetime: lambda value, depth: _ext(_Tag.DATETIME, _moment(value)),
    datetime.date: lambda value, depth: _ext(_Tag.DATE, value.isoformat()),
    datetime.time: lambda value, depth: _ext(_Tag.TIME, _moment(value)),
    datetime.timedelta: lambda value, depth: _ext(
        _Tag.TIMEDELTA, (value.days, value.seconds, value.microseconds)
    ),
}


# Decoding. The content is untrusted: nothing is hashed, allocated or entered before its form is
# checked. msgspec checks types while it parses, keys of maps are strings, and extensions are
# decoded one at a time.

_Ext: TypeAlias = msgspec.msgpack.Ext
_LEAVES = frozenset({type(None), bool, int, float, str, bytes})
_LEVELS_AT_ONCE = 4


def _tree_of(text: type, levels: int) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of lists and dicts inside each other; what lies below `levels` stays raw."""
    leaves = (None, bool, int, float, text, _Ext)
    inner: Any = msgspec.Raw
    for _ in range(levels + 1):
        forms = (*leaves, list[inner], dict[str, inner])
        inner = Union[forms]  # noqa: UP007 - of a tuple
    return msgspec.msgpack.Decoder(inner)


# A union of msgspec cannot have both str and bytes: a tree with both is decoded level by level.
_TREES = (_tree_of(str, _LEVELS_AT_ONCE), _tree_of(bytes, _LEVELS_AT_ONCE), _tree_of(str, 0))


def _from_bytes(data: Any, level: int) -> Any:
    """The value that one MessagePack object stands for."""
    data = memoryview(data)
    first = data[0] if len(data) else 0xC1
    if first in _EXT_HEADERS:
        # Split here, since msgspec would copy what may be a large array.
        return _from_extension(*_split_extension(data), level)
    if first in _BIN_HEADERS:
        return msgspec.msgpack.decode(data, type=bytes)
    return _from_tree(_parsed(data), level)


def _parsed(data: memoryview) -> Any:
    *several, one = _TREES
    for decoder in several:
        try:
            return decoder.decode(data)
        except msgspec.ValidationError:
            continue
    return one.decode(data)


def _from_tree(tree: Any, level: int) -> Any:
    kind = type(tree)
    if kind is _Ext:
        return _from_extension(tree.code, tree.data, level)
    if kind is msgspec.Raw:
        return _from_bytes(tree, level)
    if kind is not list and kind is not dict:
        return tree
    if level > _DEEPEST_LEVEL:
        raise ValueError("it is nested too deeply")
    if not _LEAVES.issuperset(map(type, tree if kind is list else tree.values())):
        for place, inner in enumerate(tree) if kind is list else tree.items():
            if type(inner) not in _LEAVES:
                tree[place] = _from_tree(inner, level + 1)
    return tree


_BIN_HEADERS = frozenset({0xC4, 0xC5, 0xC6})
_EXT_HEADERS = {
    # First byte: how many bytes of length follow, or else how many of data.
    0xC7: (1, 0), 0xC8: (2, 0), 0xC9: (4, 0),
    0xD4: (0, 1), 0xD5: (0, 2), 0xD6: (0, 4), 0xD7: (0, 8), 0xD8: (0, 16),
}  # fmt: skip


def _split_extension(data: memoryview) -> tuple[int, memoryview]:
    """The tag and the content of an extension that is all of `data`."""
    digits, fixed = _EXT_HEADERS[data[0]]
    nbytes = int.from_bytes(data[1 : 1 + digits], "big") if digits else fixed
    content = data[2 + digits :]
    if len(data) < 2 + digits or len(content) != nbytes:
        raise ValueError("an extension is not as long as it says")
    return data[1 + digits], content


def _from_extension(code: int, data: Any, level: int) -> Any:
    tag = _Tag(code)
    if level > _DEEPEST_LEVEL:
        raise ValueError("it is nested too deeply")
    if tag in _CONTAINERS:
        content = _from_bytes(data, level + 1)
        if type(content) is not list:
            raise TypeError(f"a {type(content).__name__} in the place of a list")
        return _CONTAINERS[tag](content)
    form, build = _SCALARS[tag]
    return build(msgspec.msgpack.decode(data, type=form))


def _hash_alike(keys: Iterable[Any]) -> bool:
    """Whether so many keys have the same hash that building a dict takes quadratic time.

    Numbers and tuples of numbers can be chosen for that. The hashes of strings are salted.
    """
    keys = list(keys)
    if frozenset((str, bytes)).issuperset(map(type, keys)):
        return False
    hashes = list(map(hash, keys))
    if len(hashes) - len(set(hashes)) < _MOST_ALIKE:
        return False
    return Counter(hashes).most_common(1)[0][1] > _MOST_ALIKE


def _to_set(kind: Callable[[list[Any]], Any], elements: list[Any]) -> Any:
    if _hash_alike(elements):
        raise ValueError(f"more than {_MOST_ALIKE} elements have the same hash")
    return kind(elements)


def _to_dict(pairs: Any) -> dict[Any, Any]:
    if type(pairs) is not list or not all(type(pair) is list for pair in pairs):
        raise TypeError("a dict is not a list of pairs")
    if _hash_alike(key for key, _ in pairs):
        raise ValueError(f"more than {_MOST_ALIKE} keys have the same hash")
    return dict(pairs)


def _to_deque(content: list[Any]) -> deque[Any]:
    elements, longest = content
    if type(elements) is not list:
        raise TypeError("the elements of a deque are not a list")
    return deque(elements, longest)


def _to_default_map(content: list[Any]) -> defaultdict[Any, Any]:
    factory, pairs = content
    if factory is not None and type(factory) is not str:
        raise TypeError("a defaultdict does not name what it fills itself with")
    return defaultdict(None if factory is None else _FACTORIES[factory], _to_dict(pairs))


_CONTAINERS: dict[_Tag, Callable[[list[Any]], Any]] = {
    _Tag.TUPLE: tuple,
    _Tag.MAP: _to_dict,
    _Tag.ORDERED_MAP: lambda pairs: OrderedDict(_to_dict(pairs)),
    _Tag.SET: partial(_to_set, set),
    _Tag.FROZENSET: partial(_to_set, frozenset),
    _Tag.COUNTER: lambda pairs: Counter(_to_dict(pairs)),
    _Tag.DEQUE: _to_deque,
    _Tag.DEFAULT_MAP: _to_default_map,
    _Tag.NAMESPACE: lambda pairs: argparse.Namespace(**_to_dict(pairs)),
}
"""Extensions that hold any values: how to build one from the list of its contents."""


_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufcSU]\d{1,9}")
_ARRAY = tuple[str, list[int], bytes]


def _check_extents(shape: list[int], itemsize: int, nbytes: int) -> None:
    """The data must be as long as the shape says, before anything is allocated."""
    if len(shape) > MOST_DIMS:
        raise ValueError(f"{len(shape)} dimensions")
    if not all(0 <= extent < 2**62 for extent in shape):
        raise ValueError(f"the shape {shape}")
    if math.prod(shape) * itemsize != nbytes:
        raise ValueError(f"{nbytes} bytes for the shape {shape}")


def _too_wide(itemsize: int, nbytes: int) -> bool:
    """Whether an empty array has an itemsize so large that numpy may allocate one element."""
    return nbytes == 0 and itemsize > _WIDEST_OF_NONE_BYTES


def _to_array(content: tuple[str, list[int], bytes]) -> np.ndarray[Any, Any]:
    name, shape, data = content
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"an array of dtype {name[:20]!r}")
    dtype = np.dtype(name)
    _check_extents(shape, dtype.itemsize, len(data))
    if _too_wide(dtype.itemsize, len(data)):
        raise ValueError(f"no elements of {dtype.itemsize} bytes")
    return np.array(np.frombuffer(data, dtype=dtype).reshape(shape))


def _to_buffer(content: tuple[bytes, int]) -> io.BytesIO:
    data, position = content
    buffer = io.BytesIO(data)
    buffer.seek(position)
    return buffer


def _to_size(extents: list[int]) -> torch.Size:
    # torch makes a size of larger numbers too, and then cannot print it.
    if any(not -(2**63) <= extent < 2**63 for extent in extents):
        raise ValueError("a size beyond 64 bits")
    return torch.Size(extents)


def _to_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name[:20]!r} is not a dtype")
    return dtype


def _to_tensor(content: tuple[str, list[int], bytes]) -> torch.Tensor:
    name, shape, data = content
    dtype = _to_dtype(name)
    if name.startswith(("qint", "quint")):
        raise ValueError("a quantized tensor")
    _check_extents(shape, dtype.itemsize, len(data))
    if data:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    # As a view, since torch cannot make, or warns about, tensors of some dtypes.
    return flat.view(dtype).reshape(shape)


class _Moment(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A datetime or a time; `zone` is the key of its time zone, if that has one."""

    text: str
    fold: int
    zone: str | None = None


_ZONE = re.compile(r"(?!.{65})[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")


def _to_moment(kind: Any, content: _Moment) -> Any:
    moment = kind.fromisoformat(content.text).replace(fold=content.fold)
    if content.zone is None:
        return moment
    if not _ZONE.fullmatch(content.zone):
        raise ValueError(f"a time zone called {content.zone[:20]!r}")
    try:
        return moment.replace(tzinfo=ZoneInfo(content.zone))
    except (LookupError, ValueError, OSError) as error:
        if moment.tzinfo is None:
            raise UnsupportedFormatError(
                f"it is a time of the zone {content.zone!r}, which this machine does not know. "
                "Install the package tzdata"
            ) from error
    logger.warning(
        "this machine does not know the time zone %r: a datetime keeps its offset from UTC. "
        "Install the package tzdata",
        content.zone,
    )
    return moment


_SCALARS: dict[_Tag, tuple[Any, Callable[[Any], Any]]] = {
    _Tag.BIG_INT: (bytes, lambda data: int.from_bytes(data, "little", signed=True)),
    _Tag.COMPLEX: (tuple[float, float], lambda parts: complex(*parts)),
    _Tag.BYTEARRAY: (bytes, bytearray),
    _Tag.BUFFER: (tuple[bytes, int], _to_buffer),
    _Tag.PATH: (str, Path),
    _Tag.NUMPY_ARRAY: (_ARRAY, _to_array),
    _Tag.NUMPY_SCALAR: (_ARRAY, lambda content: _to_array(content)[()]),
    _Tag.TORCH_SIZE: (list[int], _to_size),
    _Tag.TORCH_DTYPE: (str, _to_dtype),
    _Tag.TORCH_DEVICE: (str, torch.device),
    _Tag.TORCH_TENSOR: (_ARRAY, _to_tensor),
    _Tag.DATETIME: (_Moment, partial(_to_moment, datetime.datetime)),
    _Tag.DATE: (str, datetime.date.fromisoformat),
    _Tag.TIME: (_Moment, partial(_to_moment, datetime.time)),
    _Tag.TIMEDELTA: (tuple[int, int, int], lambda parts: datetime.timedelta(*parts)),
}
"""Extensions of a fixed form: the type of the content, and how to build the value."""

"""What the pickle of an archive of `torch.save` holds, as objects of Python and torch.

Only what can be made without running code: containers, numbers, texts, and a few types of
torch. Tensors are left to the caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from reshard.api import CorruptCheckpointError
from reshard.format.pickles import Copier, Maker, Ordered, Table, Unknown, read_pickle
from reshard.format.torch_zip import TORCH_TABLE, Archive, StoredTensor, find_storage

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_PLAIN = _SCALARS | {torch.dtype, torch.Size, torch.device}
_MOST_LEVELS = 200
_PARTS_PER_BYTE, _PARTS_AT_LEAST = 4, 1 << 12


def read_tree(archive: Archive, where: str) -> tuple[Any, int]:
    """What the pickle of an archive describes, and how long it is."""
    pickled = archive.read("data.pkl")
    return read_pickle(pickled, _VALUE_TABLE, where, find_storage, keep_unknown=True), len(pickled)


class Closed(Exception):  # noqa: N818 - control flow between a tree and whoever wants a value
    """Something in a tree can only be made by running code. `name` says what."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def to_objects(
    tree: Any,
    where: str,
    pickled_nbytes: int,
    make_tensor: Callable[[StoredTensor], Any],
    make_closed: Callable[[str, Any], Any] | None = None,
) -> Any:
    """A tree as containers of Python, with `make_tensor` for each dense tensor of it.

    What is closed is made by `make_closed`, of its name and what the tree has, or raises `Closed`.
    Parts that occur several times are
    made once, but may not unfold to much more than there are bytes: whoever walks the result
    sees them each time.
    """
    most = _PARTS_PER_BYTE * pickled_nbytes + _PARTS_AT_LEAST
    return _Conversion(where, most, make_tensor, make_closed).convert(tree, 0)[0]


class _Conversion:
    def __init__(
        self,
        where: str,
        most: int,
        make_tensor: Callable[[StoredTensor], Any],
        make_closed: Callable[[str, Any], Any] | None,
    ) -> None:
        self._where, self._most = where, most
        self._make_tensor, self._make_closed = make_tensor, make_closed
        self._known: dict[int, tuple[Any, int] | None] = {}
        """Containers by identity, with the number of parts they unfold to; None while open."""

    def convert(self, tree: Any, depth: int) -> tuple[Any, int]:
        kind = type(tree)
        if kind in _PLAIN:
            return tree, 1
        key = id(tree)
        if key in self._known:
            known = self._known[key]
            if known is None:
                raise CorruptCheckpointError(f"{self._where} has a container that contains itself")
            return known
        if kind is StoredTensor:
            found: tuple[Any, int] = self._make_tensor(tree), 1
        elif kind in _CONTAINERS:
            if depth >= _MOST_LEVELS:
                raise CorruptCheckpointError(
                    f"{self._where} is nested deeper than {_MOST_LEVELS} levels"
                )
            self._known[key] = None
            found = self._container(tree, kind, depth + 1)
            if found[1] > self._most:
                raise CorruptCheckpointError(
                    f"{self._where} unfolds to more than {self._most} parts, many more than it has "
                    "bytes"
                )
        else:
            name = tree.name if kind is Unknown else getattr(tree, "kind", kind.__name__)
            if self._make_closed is None:
                raise Closed(name)
            found = self._make_closed(name, tree), 1
        self._known[key] = found
        return found

    def _container(self, tree: Any, kind: type, depth: int) -> tuple[Any, int]:
        if kind in (dict, Ordered):
            made: Any = OrderedDict() if kind is Ordered else {}
            count = 1
            for name, part in tree.items():
                if type(name) not in _KEYS:
                    name = self.convert(name, depth)[0]
                made[name], parts = self.convert(part, depth)
                count += parts
            return made, count
        pairs = [self.convert(part, depth) for part in tree]
        return kind(part for part, _ in pairs), 1 + sum(parts for _, parts in pairs)


_CONTAINERS = frozenset({dict, Ordered, list, tuple, set, frozenset})
_KEYS = frozenset({str, int, bool})


def _set(items: Any = ()) -> Any:
    # Of other elements, the hashes may have been chosen to take long.
    is_plain = type(items) is list and {str, bytes, bool, type(None)}.issuperset(map(type, items))
    is_short = type(items) is list and len(items) <= _MOST_LEVELS
    if is_plain or (is_short and _SCALARS.issuperset(map(type, items))):
        return set(items)
    return Unknown("builtins.set")


def _encode(text: Any, encoding: Any = "") -> Any:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes in another encoding")
    return text.encode("latin-1")


def _device(name: Any, index: Any = None) -> Any:
    if type(name) is not str or type(index) not in (int, type(None)):
        raise ValueError("a malformed device")
    try:
        return torch.device(name) if index is None else torch.device(name, index)
    except RuntimeError as error:
        raise ValueError(f"a malformed device: {name[:100]!r}") from error


def _complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex:
    return complex(float(real), float(imaginary))


def _bytearray(data: Any = b"", encoding: Any = "latin-1") -> bytearray:
    if type(data) is bytes:
        return bytearray(data)
    return bytearray(_encode(data, encoding))


def _torch_size(extents: Any = ()) -> torch.Size:
    if type(extents) is not tuple or not {int}.issuperset(map(type, extents)):
        raise ValueError("a size that is not a tuple of integers")
    return torch.Size(extents)


_BUILTINS: dict[str, Callable[..., Any]] = {
    "set": _set,
    "complex": _complex,
    "bytearray": _bytearray,
}
_VALUE_TABLE: Table = {
    **TORCH_TABLE,
    **{
        (module, name): Copier(make)
        for module in ("builtins", "__builtin__")
        for name, make in _BUILTINS.items()
    },
    ("_codecs", "encode"): Copier(_encode),
    ("torch", "Size"): Copier(_torch_size),
    ("torch", "device"): Maker(_device),
}

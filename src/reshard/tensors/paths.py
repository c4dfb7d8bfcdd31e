"""Paths of values in nested state dicts, and the flat names made from them."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

import msgspec

from reshard.api import CorruptCheckpointError, StateDictError
from reshard.tensors.nesting import spell_path, tuple_like

StatePath: TypeAlias = tuple[str | int, ...]
MOST_LEVELS = 1000
"""How many containers a value may lie in, the state dict included."""
_WAS_INT = 1 << 32
_MOST_DIGITS = 4300


class IntKey(str):
    """A dict key that was an integer. In names and paths it is a string."""

    __slots__ = ()


class PathMap(dict[str, StatePath]):
    """A dict of flat names to paths, which pickles as a few bytes per name.

    `empties` are the paths of empty dicts, which have no name.
    """

    def __init__(self, paths: Any = (), empties: Iterable[StatePath] = ()) -> None:
        super().__init__(paths)
        self.empties = tuple(empties)

    @property
    def is_regular(self) -> bool:
        """Whether each name is its path joined by dots. Custom planners may add others."""
        return all(
            isinstance(path, tuple) and name == ".".join(map(str, path))
            for name, path in self.items()
        )

    def add(self, other: Mapping[str, StatePath]) -> None:
        """Add the names of `other` that are not here yet."""
        for name, path in other.items():
            self.setdefault(name, path)
        more = getattr(other, "empties", ())
        if more and more != self.empties:
            self.empties = tuple(dict.fromkeys((*self.empties, *more)))

    def pack(self) -> bytes:
        """Encode regular paths in a deterministic, compact form."""
        # A path is its name cut into pieces, so only the lengths are stored: negative for
        # positions in a list, with a flag for keys that were integers.
        packed: list[Any] = [list(self), [_cuts(path) for path in self.values()]]
        if self.empties:
            packed.append([(".".join(map(str, path)), _cuts(path)) for path in self.empties])
        return msgspec.msgpack.encode(packed)

    @classmethod
    def unpack(cls, data: bytes) -> PathMap:
        packed = msgspec.msgpack.decode(data, type=_Packed)
        paths = zip(packed.names, map(_path, packed.names, packed.cuts), strict=True)
        return cls(paths, [_path(name, cuts) for name, cuts in packed.empties])

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.is_regular:
            return PathMap, (dict(self), self.empties)
        return _unpack_compressed, (zlib.compress(self.pack(), 1),)


class _Packed(msgspec.Struct, array_like=True):
    names: list[str]
    cuts: list[list[int]]
    empties: list[tuple[str, list[int]]] = []


def _unpack_compressed(data: bytes) -> PathMap:
    return PathMap.unpack(zlib.decompress(data))


def _cuts(path: StatePath) -> list[int]:
    return [
        -len(str(key)) if isinstance(key, int) else len(key) + _WAS_INT * isinstance(key, IntKey)
        for key in path
    ]


def _path(name: str, cuts: list[int]) -> StatePath:
    path: list[str | int] = []
    begin = 0
    for cut in cuts:
        was_int = cut >= _WAS_INT
        length = cut - _WAS_INT if was_int else abs(cut)
        piece = name[begin : begin + length]
        if (was_int or cut < 0) and _integer(piece) is None:
            raise ValueError(f"{piece[:20]!r} is not an integer")
        path.append(int(piece) if cut < 0 else IntKey(piece) if was_int else piece)
        begin += length + 1
    return tuple(path)


def _integer(text: str) -> int | None:
    """The integer that `text` is the canonical form of; "03" is not one."""
    if not text.removeprefix("-").isdecimal() or len(text) > _MOST_DIGITS:
        return None
    number = int(text)
    return number if str(number) == text else None


_ELEMENTS_PER_PART, _ELEMENTS_AT_LEAST = 16, 1 << 16
_MOST_ALIKE = 64


def paths_in(planner_data: Any, names: Collection[str]) -> PathMap:
    """The valid paths in the planner data that a custom planner stored."""
    paths = PathMap(
        (name, tuple(path))
        for name, path in (planner_data.items() if isinstance(planner_data, Mapping) else ())
        if isinstance(name, str)
        and name in names
        and isinstance(path, list | tuple)
        and all(type(key) in (int, str) for key in path)
    )
    try:
        check_paths(paths)
    except ValueError as error:
        raise CorruptCheckpointError(f"the checkpoint has damaged names: {error}") from error
    return paths


def check_paths(paths: PathMap) -> None:
    """Raise ValueError for paths that take much more memory to follow than to store.

    The lists that they make may not be much longer than the paths. Only older checkpoints
    have lists with gaps.
    """
    nodes: dict[tuple[int, str | int], int] = {}
    longest: dict[int, int] = {}
    steps = 0
    alike: dict[int, set[str]] = {}
    for path in (*paths.values(), *paths.empties):
        if not path or not isinstance(path[0], str) or len(path) > MOST_LEVELS:
            raise ValueError(f"a path of {len(path)} steps: {spell_path(path)}")
        steps += len(path)
        last = max((depth for depth, key in enumerate(path) if type(key) is int), default=-1)
        node = 0
        for key in path[: last + 1]:
            if type(key) is int:
                if key < 0:
                    raise ValueError(f"the position {key} in a list")
                longest[node] = max(longest.get(node, 0), key + 1)
            node = nodes.setdefault((node, key), len(nodes) + 1)
        for key in path:
            # Only large integers can have equal hashes.
            if isinstance(key, IntKey) and len(key) > 18:
                alike.setdefault(hash(int(key)), set()).add(key)
    if sum(longest.values()) > _ELEMENTS_PER_PART * steps + _ELEMENTS_AT_LEAST:
        raise ValueError(f"lists of {sum(longest.values())} elements for {len(paths)} names")
    if any(len(keys) > _MOST_ALIKE for keys in alike.values()):
        raise ValueError(f"more than {_MOST_ALIKE} keys with the same hash")


def keys_above(path: StatePath, keys: Collection[str], longest: int) -> Iterator[str]:
    """Those of `keys` that name the value at `path` or a container around it.

    `longest` is the length of the longest key.
    """
    spelled, end = ".".join(map(str, path)), 0
    for part in path:
        end += len(str(part))
        if end > longest:
            return
        if spelled[:end] in keys:
            yield spelled[:end]
        end += 1


def set_element(root_dict: MutableMapping[str, Any], path: StatePath, value: Any) -> None:
    """Put `value` at `path`, creating dicts and lists on the way as needed."""
    container: Any = root_dict
    # A mutable container, and the tuples inside of it that have to be replaced.
    above: list[tuple[Any, Any]] = []
    for depth, key in enumerate(path, 1):
        if isinstance(container, Mapping):
            key = existing_key(container, key)
        elif not isinstance(key, int):
            raise StateDictError(
                f"cannot store at key {key!r}: there is a {type(container).__name__} in its place"
            )
        if not isinstance(container, tuple):
            above = []
        above.append((container, key))
        inner = value if depth == len(path) else _inner(container, key)
        if depth < len(path) and isinstance(inner, Mapping | list | tuple):
            container = inner
            continue
        if depth < len(path):
            inner = {} if isinstance(path[depth], str) else []
        _put(above, inner)
        container = inner


def set_elements(
    root_dict: MutableMapping[str, Any], elements: Iterable[tuple[StatePath, Any]]
) -> None:
    """The same for many values; faster where neighbours lie in the same dict."""
    last: StatePath | None = None
    container: Any = None
    for path, value in elements:
        above = path[:-1]
        if above != last or not isinstance(container, dict):
            set_element(root_dict, path, value)
            last, container = above, get_element(root_dict, above)
        else:
            container[existing_key(container, path[-1])] = value


def _put(above: list[tuple[Any, Any]], value: Any) -> None:
    """Put `value` into the last of the containers `above`, each of which contains the next."""
    for container, key in reversed(above):
        if isinstance(container, tuple):
            elements = [*container]
            elements[key] = value
            value = tuple_like(container, elements)
            continue
        if isinstance(container, list):
            container.extend([None] * (int(key) + 1 - len(container)))
        container[key] = value


def _inner(container: Any, key: Any) -> Any:
    if isinstance(container, Mapping):
        return container.get(key)
    return container[key] if key < len(container) else None


def existing_key(container: Mapping[Any, Any], key: str | int) -> Any:
    """The key of `container` that `key` stands for: integers are stored as strings."""
    if key in container or not isinstance(key, str):
        return key
    number = _integer(key)
    if number is not None and (isinstance(key, IntKey) or number in container):
        return number
    return key


def get_element(root_dict: Mapping[str, Any], path: StatePath, default_value: Any = None) -> Any:
    """The value at `path`, or `default_value` if there is none."""
    value: Any = root_dict
    for key in path:
        if isinstance(key, int):
            if not isinstance(value, list | tuple) or not -len(value) <= key < len(value):
                return default_value
        elif not isinstance(value, Mapping):
            return default_value
        else:
            key = existing_key(value, key)
            if key not in value:
                return default_value
        value = value[key]
    return value

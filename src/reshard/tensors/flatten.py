"""Nested state dicts as flat ones, and back.

Dicts are always entered. Lists are entered when they hold tensors or dicts somewhere,
tuples when they hold tensors; other lists and tuples are values. The name of a value
is its path joined by dots.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from enum import Enum
from typing import Any, TypeAlias

import msgspec
import torch

from reshard.api import StateDictError
from reshard.tensors.shards import HeldShards

__all__ = [
    "IntKey",
    "PathMap",
    "Rules",
    "StatePath",
    "flatten_state_dict",
    "get_element",
    "set_element",
    "traverse_state_dict",
    "unflatten_state_dict",
]

StatePath: TypeAlias = tuple[str | int, ...]
_WAS_INT = 1 << 32


class IntKey(str):
    """The key of a dict that was an integer. In names, and in paths, it is text like any other."""

    __slots__ = ()


class Rules(Enum):
    """Which containers count as values.

    Checkpoints that DCP wrote keep tuples, and before 2.4 also dicts without tensors,
    as values. A load tries those rules when names do not match.
    """

    CURRENT = "current"
    DCP = "dcp"
    DCP_2_3 = "dcp-2.3"


class PathMap(dict[str, StatePath]):
    """Flat names to paths. Pickles as a few bytes per name."""

    @property
    def is_regular(self) -> bool:
        """Whether each name is its path, joined with dots. Planners may put others in."""
        return all(
            isinstance(path, tuple) and name == ".".join(map(str, path))
            for name, path in self.items()
        )

    def pack(self) -> bytes:
        """These paths in a deterministic, compact form, if they are regular."""
        # A path is its name cut into pieces: only the lengths need to be stored,
        # negative for positions in a list, with a mark for keys that were integers.
        return msgspec.msgpack.encode((list(self), [_cuts(path) for path in self.values()]))

    @classmethod
    def unpack(cls, data: bytes) -> PathMap:
        names, cuts = msgspec.msgpack.decode(data, type=tuple[list[str], list[list[int]]])
        return cls(zip(names, map(_path, names, cuts), strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.is_regular:
            return PathMap, (dict(self),)
        return _unpack_compressed, (zlib.compress(self.pack(), 1),)


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
        if was_int and not piece.removeprefix("-").isdecimal():
            raise ValueError(f"{piece!r} is not an integer")
        path.append(int(piece) if cut < 0 else IntKey(piece) if was_int else piece)
        begin += length + 1
    return tuple(path)


def flatten_state_dict(
    state_dict: Mapping[str, Any], rules: Rules = Rules.CURRENT
) -> tuple[dict[str, Any], PathMap]:
    """The values of `state_dict` by flat name, and the path of each."""
    flat: dict[str, Any] = {}
    paths = PathMap()
    for path, value in _leaves(state_dict, rules):
        name = ".".join(map(str, path))
        if name in flat:
            raise StateDictError(
                f"two values of the state dict get the name {name!r}: the one at "
                f"{_spell(paths[name])} and the one at {_spell(path)}. Rename a key that "
                "contains a dot, or that reads like another key"
            )
        flat[name] = value
        paths[name] = path
    return flat, paths


def _spell(path: StatePath) -> str:
    return "".join(f"[{key!r}]" for key in path)


def traverse_state_dict(
    state_dict: Mapping[str, Any],
    visitor: Callable[[StatePath, Any], None],
    keep_traversing: Callable[[Any], bool] | None = None,
) -> None:
    """Call `visitor(path, value)` for each value of a nested state dict.

    `keep_traversing` says which elements make it worth entering a list; tensors if not
    given.
    """
    for path, value in _leaves(state_dict, Rules.CURRENT, keep_traversing or _is_tensor):
        visitor(path, value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | HeldShards)


def _leaves(
    state_dict: Mapping[str, Any],
    rules: Rules,
    worth_entering: Callable[[Any], bool] = _is_tensor,
) -> Iterator[tuple[StatePath, Any]]:
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise TypeError(
                f"the state dict has the key {key!r} of type {type(key).__name__}; keys at the "
                "top are strings. Rename it, for example to its str()"
            )
        if not isinstance(value, Mapping | list | tuple):
            yield (key,), value
        else:
            yield from _enter((key,), value, rules, worth_entering)


def _enter(
    path: StatePath, value: Any, rules: Rules, worth_entering: Callable[[Any], bool]
) -> Iterator[tuple[StatePath, Any]]:
    if not _has_inside(value, rules, worth_entering):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise TypeError(
                    f"the dict at {_spell(path)} has the key {key!r} of type "
                    f"{type(key).__name__}; only strings and integers can be stored and "
                    "restored. Rename it, for example to its str()"
                )
            if isinstance(key, int) and str(key) in value:
                raise StateDictError(
                    f"the dict at {_spell(path)} has both the key {key!r} and the key "
                    f"{str(key)!r}, which would get the same name. Rename one of them"
                )
            text = IntKey(key) if isinstance(key, int) else key
            yield from _enter((*path, text), inner, rules, worth_entering)
    else:
        for position, inner in enumerate(value):
            yield from _enter((*path, position), inner, rules, worth_entering)


def _has_inside(value: Any, rules: Rules, worth_entering: Callable[[Any], bool]) -> bool:
    """Whether a container is entered, rather than being a value itself."""
    if isinstance(value, Mapping):
        if rules is not Rules.DCP_2_3:
            return True
        inner = value.values()
    elif isinstance(value, list):
        inner = value  # type: ignore[assignment]
    elif isinstance(value, tuple) and rules is Rules.CURRENT:
        return any(_holds_tensor(element, worth_entering) for element in value)
    else:
        return False
    return any(
        worth_entering(element) or _has_inside(element, rules, worth_entering) for element in inner
    )


def _holds_tensor(value: Any, worth_entering: Callable[[Any], bool]) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensor(inner, worth_entering) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(inner, worth_entering) for inner in value)
    return worth_entering(value)


def unflatten_state_dict(
    state_dict: Mapping[str, Any], mapping: Mapping[str, StatePath]
) -> dict[str, Any]:
    """The nested dict that `flatten_state_dict` flattened; tuples come back as lists."""
    nested: dict[str, Any] = {}
    for name, value in state_dict.items():
        set_element(nested, mapping[name], value)
    return nested


def set_element(root_dict: MutableMapping[str, Any], path: StatePath, value: Any) -> None:
    """Put `value` at `path`, making dicts and lists on the way where there are none."""
    _store(root_dict, path, value)


def _store(container: Any, path: StatePath, value: Any) -> Any:
    """`container` with `value` at `path`: itself if it could be changed in place."""
    key, rest = path[0], path[1:]
    if isinstance(container, Mapping):
        key = _existing_key(container, key)
        inner = container.get(key)
    elif isinstance(key, int):
        inner = container[key] if key < len(container) else None
    else:
        raise StateDictError(
            f"cannot store at key {key!r}: there is a {type(container).__name__} in its place"
        )
    if rest:
        if not isinstance(inner, Mapping | list | tuple):
            inner = {} if isinstance(rest[0], str) else []
        value = _store(inner, rest, value)
    if isinstance(container, tuple):
        elements = [*container]
        elements[key] = value
        return _tuple_like(container, elements)
    if isinstance(container, list):
        container.extend([None] * (int(key) + 1 - len(container)))
    container[key] = value
    return container


def _existing_key(container: Mapping[Any, Any], key: str | int) -> Any:
    """The key of `container` that reads like `key`, or is to; integers are stored as text."""
    if key in container or not isinstance(key, str):
        return key
    if isinstance(key, IntKey) or (key.removeprefix("-").isdecimal() and int(key) in container):
        return int(key)
    return key


def _tuple_like(original: tuple[Any, ...], elements: list[Any]) -> tuple[Any, ...]:
    if hasattr(original, "_fields"):
        return type(original)(*elements)
    return type(original)(elements)


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
            key = _existing_key(value, key)
            if key not in value:
                return default_value
        value = value[key]
    return value

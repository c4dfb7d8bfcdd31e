"""Nested state dicts as flat ones, and back.

Dicts are always entered. Lists are entered when they hold tensors or dicts somewhere,
tuples when they hold tensors; other lists and tuples are values. The name of a value
is its path joined by dots. Dicts without content have no name, but their paths are kept.

Nothing here recurses: state dicts may be nested deeper than Python's stack allows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from enum import Enum
from typing import Any, TypeAlias

import msgspec
import torch

from reshard.api import CorruptCheckpointError, StateDictError
from reshard.tensors.nesting import tuple_like
from reshard.tensors.shards import HeldShards

__all__ = [
    "IntKey",
    "MOST_LEVELS",
    "PathMap",
    "Rules",
    "SplitDict",
    "StatePath",
    "check_paths",
    "flatten_sharded_tensors",
    "flatten_state_dict",
    "get_element",
    "keys_above",
    "paths_in",
    "put_empties",
    "set_element",
    "traverse_state_dict",
    "unflatten_state_dict",
]

StatePath: TypeAlias = tuple[str | int, ...]
MOST_LEVELS = 1000
"""How many containers a value may lie in, the state dict included."""
_WAS_INT = 1 << 32
_MOST_DIGITS = 4300


class IntKey(str):
    """The key of a dict that was an integer. In names, and in paths, it is text like any other."""

    __slots__ = ()


class SplitDict(dict[Any, Any]):
    """A dict whose content is stored by name, also inside of a tuple that is a value otherwise."""


class Rules(Enum):
    """Which containers count as values.

    Checkpoints that DCP wrote keep tuples, and before 2.4 also dicts without tensors,
    as values. A load tries those rules when names do not match.
    """

    CURRENT = "current"
    DCP = "dcp"
    DCP_2_3 = "dcp-2.3"


class PathMap(dict[str, StatePath]):
    """Flat names to paths. Pickles as a few bytes per name.

    `empties` are the paths of dicts without content, which have no name.
    """

    def __init__(self, paths: Any = (), empties: Iterable[StatePath] = ()) -> None:
        super().__init__(paths)
        self.empties = tuple(empties)

    @property
    def is_regular(self) -> bool:
        """Whether each name is its path, joined with dots. Planners may put others in."""
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
        """These paths in a deterministic, compact form, if they are regular."""
        # A path is its name cut into pieces: only the lengths need to be stored,
        # negative for positions in a list, with a mark for keys that were integers.
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
    """The integer that is written exactly so; "03" is text."""
    if not text.removeprefix("-").isdecimal() or len(text) > _MOST_DIGITS:
        return None
    number = int(text)
    return number if str(number) == text else None


_ELEMENTS_PER_PART, _ELEMENTS_AT_LEAST = 16, 1 << 16
_MOST_ALIKE = 64


def paths_in(told: Any, names: Collection[str]) -> PathMap:
    """Paths in what a planner of the user's left in a checkpoint, for whatever purpose."""
    paths = PathMap(
        (name, tuple(path))
        for name, path in (told.items() if isinstance(told, Mapping) else ())
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
    """Raise ValueError for paths that take more to follow than to store.

    All lists together are not much longer than there are steps in all paths. Only older
    checkpoints have lists with positions that nothing is at.
    """
    nodes: dict[tuple[int, str | int], int] = {}
    longest: dict[int, int] = {}
    steps = 0
    alike: dict[int, set[str]] = {}
    for path in (*paths.values(), *paths.empties):
        if not path or not isinstance(path[0], str) or len(path) > MOST_LEVELS:
            raise ValueError(f"a path of {len(path)} steps: {_spell(path)}")
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
            # Small integers have different hashes.
            if isinstance(key, IntKey) and len(key) > 18:
                alike.setdefault(hash(int(key)), set()).add(key)
    if sum(longest.values()) > _ELEMENTS_PER_PART * steps + _ELEMENTS_AT_LEAST:
        raise ValueError(f"lists of {sum(longest.values())} elements for {len(paths)} names")
    if any(len(keys) > _MOST_ALIKE for keys in alike.values()):
        raise ValueError(f"more than {_MOST_ALIKE} keys with the same hash")


def flatten_state_dict(
    state_dict: Mapping[str, Any], rules: Rules = Rules.CURRENT
) -> tuple[dict[str, Any], PathMap]:
    """The values of `state_dict` by flat name, and the path of each."""
    flat: dict[str, Any] = {}
    paths = PathMap()
    empties: list[StatePath] = []
    for path, value in _leaves(state_dict, rules, _is_tensor, empties):
        name = ".".join(map(str, path))
        if name in flat:
            raise StateDictError(
                f"two values of the state dict get the name {name!r}: the one at "
                f"{_spell(paths[name])} and the one at {_spell(path)}. Rename a key that "
                "contains a dot, or that reads like another key"
            )
        flat[name] = value
        paths[name] = path
    paths.empties = tuple(empties)
    return flat, paths


def _spell(path: Iterable[Any]) -> str:
    """A path as one would write it, or the beginning of a long one."""
    keys = list(path)
    text = "".join(f"[{key!r}]" for key in keys[:_MOST_SPELLED])
    return text if len(keys) <= _MOST_SPELLED else f"{text}..."


_MOST_SPELLED = 32


def traverse_state_dict(
    state_dict: Mapping[str, Any],
    visitor: Callable[[StatePath, Any], None],
    keep_traversing: Callable[[Any], bool] | None = None,
) -> None:
    """Call `visitor(path, value)` for each value of a nested state dict.

    `keep_traversing` says which elements make it worth entering a list; tensors if not
    given.
    """
    for path, value in _leaves(state_dict, Rules.CURRENT, keep_traversing or _is_tensor, []):
        visitor(path, value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | HeldShards)


def _leaves(
    state_dict: Mapping[str, Any],
    rules: Rules,
    worth_entering: Callable[[Any], bool],
    empties: list[StatePath],
) -> Iterator[tuple[StatePath, Any]]:
    """The values of a state dict with their paths; those of empty dicts go to `empties`."""
    search = _Search(rules, worth_entering)
    path: list[str | int] = []
    containers: list[Any] = [state_dict]
    steps = [_steps(state_dict, path)]
    inside = {id(state_dict)}
    while steps:
        step = next(steps[-1], None)
        if step is None:
            steps.pop()
            inside.discard(id(containers.pop()))
            if path:
                path.pop()
            continue
        key, value = step
        path.append(key)
        if isinstance(value, Mapping | list | tuple) and search.enters(value):
            if len(value):
                if id(value) in inside:
                    raise StateDictError(f"the container at {_spell(path)} contains itself")
                if len(path) >= MOST_LEVELS:
                    raise StateDictError(
                        f"the state dict is nested deeper than {MOST_LEVELS} levels at "
                        f"{_spell(path)}. Keep what is there in fewer containers"
                    )
                inside.add(id(value))
                containers.append(value)
                steps.append(_steps(value, path))
                continue
            empties.append(tuple(path))
        else:
            yield tuple(path), value
        path.pop()


def _steps(container: Any, path: list[str | int]) -> Iterator[tuple[str | int, Any]]:
    """The elements of the container at `path`, with the key or position of each."""
    if not isinstance(container, Mapping):
        yield from enumerate(container)
        return
    for key, value in container.items():
        if not path and not isinstance(key, str):
            raise TypeError(
                f"the state dict has the key {key!r} of type {type(key).__name__}; keys at the "
                "top are strings. Rename it, for example to its str()"
            )
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise TypeError(
                f"the dict at {_spell(path)} has the key {key!r} of type "
                f"{type(key).__name__}; only strings and integers can be stored and "
                "restored. Rename it, for example to its str()"
            )
        if isinstance(key, int) and str(key) in container:
            raise StateDictError(
                f"the dict at {_spell(path)} has both the key {key!r} and the key "
                f"{str(key)!r}, which would get the same name. Rename one of them"
            )
        yield IntKey(key) if isinstance(key, int) else key, value


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


class _Search:
    """Which containers are entered, rather than being values. Looks into each once."""

    def __init__(self, rules: Rules, worth_entering: Callable[[Any], bool]) -> None:
        self._rules = rules
        self._worth_entering = worth_entering
        # By identity, which only those that are kept alive have for themselves.
        self._known: dict[tuple[int, bool], bool] = {}
        self._kept: list[Any] = []

    def enters(self, container: Any) -> bool:
        if isinstance(container, Mapping):
            if self._rules is not Rules.DCP_2_3:
                return True
        elif isinstance(container, tuple) and self._rules is not Rules.CURRENT:
            return False
        return self._finds(container, isinstance(container, tuple))

    def _finds(self, container: Any, in_tuple: bool) -> bool:
        """Whether there is something inside for which the container is entered.

        Inside of tuples only tensors are, in lists also dicts.
        """
        root = id(container), in_tuple
        if root in self._known:
            return self._known[root]
        open_keys = {root: self._elements(container)}
        while open_keys:
            key, elements = next(reversed(open_keys.items()))
            in_tuple = key[1]
            inner = self._next_inside(elements, in_tuple)
            if inner is True:
                self._known.update(dict.fromkeys(open_keys, True))
                return True
            if inner is None:
                self._known[key] = False
                del open_keys[key]
                continue
            below = id(inner), in_tuple or isinstance(inner, tuple)
            if below in open_keys:
                raise StateDictError(
                    f"a {type(inner).__name__} of the state dict contains itself. Save what is in "
                    "it, without the way back"
                )
            if below not in self._known:
                open_keys[below] = self._elements(inner)
            elif self._known[below]:
                self._known.update(dict.fromkeys(open_keys, True))
                return True
        return False

    def _elements(self, container: Any) -> Iterator[Any]:
        self._kept.append(container)
        if isinstance(container, Mapping):
            return iter(container.values())
        if self._worth_entering is _is_tensor and _PLAIN.issuperset(map(type, container)):
            return iter(())
        return iter(container)

    def _next_inside(self, elements: Iterator[Any], in_tuple: bool) -> Any:
        """The next container to look into; True if an element decides, None at the end."""
        for element in elements:
            is_container = isinstance(element, Mapping | list | tuple)
            if not (in_tuple and is_container) and self._worth_entering(element):
                return True
            if not is_container:
                continue
            if in_tuple:
                return True if isinstance(element, SplitDict) else element
            if isinstance(element, Mapping) and self._rules is not Rules.DCP_2_3:
                return True
            if not isinstance(element, tuple) or self._rules is Rules.CURRENT:
                return element
        return None


def flatten_sharded_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` as it is: planning resolves sharded tensors nested in one another.

    Kept for planners that call it before handing a state dict on.
    """
    return state_dict


def keys_above(path: StatePath, keys: Collection[str], longest: int) -> Iterator[str]:
    """Those of `keys` that name the value at `path`, or a container that it lies in.

    None of the keys is longer than `longest`.
    """
    spelled, end = ".".join(map(str, path)), 0
    for part in path:
        end += len(str(part))
        if end > longest:
            return
        if spelled[:end] in keys:
            yield spelled[:end]
        end += 1


def unflatten_state_dict(
    state_dict: Mapping[str, Any], mapping: Mapping[str, StatePath]
) -> dict[str, Any]:
    """The nested dict that `flatten_state_dict` flattened; tuples come back as lists."""
    nested: dict[str, Any] = {}
    for name, value in state_dict.items():
        set_element(nested, mapping[name], value)
    put_empties(nested, mapping, getattr(mapping, "empties", ()))
    return nested


def put_empties(
    root_dict: dict[str, Any], mapping: Mapping[str, StatePath], empties: Iterable[StatePath]
) -> None:
    """Put empty dicts at the paths `empties`, unless something else is there."""
    for path in empties:
        if _is_free(root_dict, path, mapping):
            set_element(root_dict, path, {})


def _is_free(root_dict: Mapping[str, Any], path: StatePath, mapping: Mapping[str, Any]) -> bool:
    value: Any = root_dict
    for depth, key in enumerate(path):
        if isinstance(value, Mapping):
            key = _existing_key(value, key)
            if key not in value:
                return True
        elif not isinstance(value, list) or not isinstance(key, int):
            return False
        elif key >= len(value):
            return True
        value = value[key]
        if value is None:
            # The value None, or a position of a list that nothing was put at.
            return ".".join(map(str, path[: depth + 1])) not in mapping
    return False


def set_element(root_dict: MutableMapping[str, Any], path: StatePath, value: Any) -> None:
    """Put `value` at `path`, making dicts and lists on the way where there are none."""
    container: Any = root_dict
    # The container that can be changed, and the tuples in it that would have to be replaced.
    above: list[tuple[Any, Any]] = []
    for depth, key in enumerate(path, 1):
        if isinstance(container, Mapping):
            key = _existing_key(container, key)
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


def _put(above: list[tuple[Any, Any]], value: Any) -> None:
    """Put `value` into the last of the containers `above`, each of which holds the next."""
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


def _existing_key(container: Mapping[Any, Any], key: str | int) -> Any:
    """The key of `container` that reads like `key`, or is to; integers are stored as text."""
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
            key = _existing_key(value, key)
            if key not in value:
                return default_value
        value = value[key]
    return value

"""Nested state dicts as flat ones, and back.

Dicts are always entered. Lists are entered when they hold tensors or dicts somewhere,
tuples when they hold tensors; other lists and tuples are values. The name of a value
is its path joined by dots. Dicts without content have no name, but their paths are kept.

Nothing here recurses: state dicts may be nested deeper than Python's stack allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch

from reshard.api import StateDictError
from reshard.tensors.paths import (
    MOST_LEVELS,
    IntKey,
    PathMap,
    StatePath,
    existing_key,
    set_element,
    spell_path,
)
from reshard.tensors.shards import HeldShards

__all__ = [
    "Rules",
    "SplitDict",
    "flatten_sharded_tensors",
    "flatten_state_dict",
    "put_empties",
    "traverse_state_dict",
    "unflatten_state_dict",
]


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
                f"{spell_path(paths[name])} and the one at {spell_path(path)}. Rename a key that "
                "contains a dot, or that reads like another key"
            )
        flat[name] = value
        paths[name] = path
    paths.empties = tuple(empties)
    return flat, paths


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
                    raise StateDictError(f"the container at {spell_path(path)} contains itself")
                if len(path) >= MOST_LEVELS:
                    raise StateDictError(
                        f"the state dict is nested deeper than {MOST_LEVELS} levels at "
                        f"{spell_path(path)}. Keep what is there in fewer containers"
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
                f"the dict at {spell_path(path)} has the key {key!r} of type "
                f"{type(key).__name__}; only strings and integers can be stored and "
                "restored. Rename it, for example to its str()"
            )
        if isinstance(key, int) and str(key) in container:
            raise StateDictError(
                f"the dict at {spell_path(path)} has both the key {key!r} and the key "
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
            key = existing_key(value, key)
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

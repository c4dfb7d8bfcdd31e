"""Flattening of nested state dicts, and back.

Dicts are always entered, lists if there are tensors or dicts inside, tuples if there are
tensors inside; other lists and tuples are values. The name of a value is its path joined by
dots. Empty dicts have no name, but their paths are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import torch

from reshard.api import StateDictError
from reshard.tensors.nesting import Walk, spell_path
from reshard.tensors.paths import (
    MOST_LEVELS,
    IntKey,
    PathMap,
    StatePath,
    existing_key,
    set_element,
)
from reshard.tensors.shards import HeldShards

_STRINGS = frozenset({str})


class SplitDict(dict[Any, Any]):
    """A dict that is always entered, even inside of a tuple without tensors."""


class Rules(Enum):
    """Which containers count as values.

    In DCP's checkpoints, tuples are values, and before torch 2.4 also dicts without tensors.
    A load tries those rules if names do not match.
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

    def add(path: StatePath, value: Any) -> None:
        name = ".".join(map(str, path))
        if name in flat:
            raise StateDictError(
                f"two values of the state dict get the name {name!r}: the one at "
                f"{spell_path(paths[name])} and the one at {spell_path(path)}. Rename a key that "
                "contains a dot, or that reads like another key"
            )
        flat[name] = value
        paths[name] = path

    walk = _Flattening(add, _Search(rules, _is_tensor))
    walk.run(state_dict)
    paths.empties = tuple(walk.empties)
    return flat, paths


def traverse_state_dict(
    state_dict: Mapping[str, Any],
    visitor: Callable[[StatePath, Any], None],
    keep_traversing: Callable[[Any], bool] | None = None,
) -> None:
    """Call `visitor(path, value)` for each value of a nested state dict.

    `keep_traversing` says which elements make it worth entering a list: by default, tensors.
    """
    _Flattening(visitor, _Search(Rules.CURRENT, keep_traversing or _is_tensor)).run(state_dict)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | HeldShards)


class _Flattening(Walk):
    """Visits the values of a state dict. `empties` are the paths of empty dicts."""

    skipped = frozenset()
    # The same values have other names elsewhere.
    enters_once = False

    def __init__(self, visitor: Callable[[StatePath, Any], None], search: _Search) -> None:
        super().__init__()
        self.empties: list[StatePath] = []
        self._visitor = visitor
        self._search = search

    def enter(self, container: Any) -> Iterable[tuple[str | int, Any]] | None:
        path = self.path
        if path and not self._search.is_entered(container):
            return None
        if not len(container):
            if path:
                self.empties.append(tuple(path))
            return ()
        if len(path) >= MOST_LEVELS:
            raise StateDictError(
                f"the state dict is nested deeper than {MOST_LEVELS} levels at "
                f"{spell_path(path)}. Keep what is there in fewer containers"
            )
        if not isinstance(container, Mapping):
            return enumerate(container)
        if path and _STRINGS.issuperset(map(type, container)):
            return container.items()
        return [(_checked_key(key, container, path), each) for key, each in container.items()]

    def leaf(self, value: Any) -> Any:
        self._visitor(tuple(self.path), value)
        return value

    def leave(self, container: Any, changed: dict[Any, Any]) -> Any:
        return container


def _checked_key(key: Any, container: Mapping[Any, Any], path: list[Any]) -> str:
    if isinstance(key, str):
        return key
    if not path:
        raise TypeError(
            f"the state dict has the key {key!r} of type {type(key).__name__}; keys at the "
            "top are strings. Rename it, for example to its str()"
        )
    if isinstance(key, bool) or not isinstance(key, int):
        raise TypeError(
            f"the dict at {spell_path(path)} has the key {key!r} of type "
            f"{type(key).__name__}; only strings and integers can be stored and "
            "restored. Rename it, for example to its str()"
        )
    if str(key) in container:
        raise StateDictError(
            f"the dict at {spell_path(path)} has both the key {key!r} and the key "
            f"{str(key)!r}, which would get the same name. Rename one of them"
        )
    return IntKey(key)


class _Found(Exception):  # noqa: N818 - control flow, never seen by a user
    """A search is over."""


class _Search(Walk):
    """Decides which containers are entered, rather than being values. Looks into each once."""

    # See `_known`: it matters where a container lies.
    enters_once = False

    def __init__(self, rules: Rules, worth_entering: Callable[[Any], bool]) -> None:
        super().__init__()
        self._rules = rules
        self._worth_entering = worth_entering
        if worth_entering is not _is_tensor:
            self.skipped = frozenset()
        # Results by identity and whether it is inside of a tuple, where only tensors count.
        self._known: dict[tuple[int, bool], bool] = {}
        # Those that are being searched, and all that were: identity is theirs while they live.
        self._open: list[tuple[int, bool]] = []
        self._kept: list[Any] = []

    def is_entered(self, container: Any) -> bool:
        if isinstance(container, (dict, Mapping)):
            if self._rules is not Rules.DCP_2_3:
                return True
        elif isinstance(container, tuple):
            if self._rules is not Rules.CURRENT:
                return False
        elif not isinstance(container, list):
            return False
        if self.skipped.issuperset(map(type, container)) and not isinstance(container, Mapping):
            return False
        self._open = []
        try:
            self.run(container)
        except _Found:
            self._known.update(dict.fromkeys(self._open, True))
            return True
        return False

    def enter(self, container: Any) -> Iterable[tuple[Any, Any]] | None:
        is_tuple = isinstance(container, tuple)
        if not isinstance(container, Mapping | list | tuple):
            return None
        in_tuple = bool(self._open) and self._open[-1][1]
        if self._open and self._decides(container, in_tuple):
            raise _Found
        key = id(container), in_tuple or is_tuple
        known = self._known.get(key)
        if known:
            raise _Found
        self._open.append(key)
        is_value = is_tuple and self._rules is not Rules.CURRENT
        if known is not None or (is_value and not in_tuple):
            return ()
        self._kept.append(container)
        return container.items() if isinstance(container, Mapping) else enumerate(container)

    def _decides(self, element: Any, in_tuple: bool) -> bool:
        """Whether the container of an element is entered for it, whatever is inside."""
        if in_tuple:
            return isinstance(element, SplitDict)
        is_dict = isinstance(element, Mapping) and self._rules is not Rules.DCP_2_3
        return is_dict or self._worth_entering(element)

    def leaf(self, value: Any) -> Any:
        if self._worth_entering(value):
            raise _Found
        return value

    def leave(self, container: Any, changed: dict[Any, Any]) -> Any:
        self._known[self._open.pop()] = False
        return container

    def cycle(self, container: Any) -> Any:
        raise StateDictError(
            f"a {type(container).__name__} of the state dict contains itself. Save what is in it, "
            "without the way back"
        )


def flatten_sharded_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns `state_dict` unchanged: planning resolves nested sharded tensors.

    Exists for planners that call it.
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
    """Put empty dicts at the paths `empties`, unless there is something else."""
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
            # Either the value None or a gap in a list.
            return ".".join(map(str, path[: depth + 1])) not in mapping
    return False

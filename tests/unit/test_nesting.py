"""reshard.tensors.nesting: the walk through nested containers."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from reshard.api import StateDictError
from reshard.rank_values import PerRank, per_rank
from reshard.tensors.nesting import Walk, put_elements, replace_elements


class Pair(NamedTuple):
    first: Any
    second: Any


class Leaf:
    """A value that is no container and is not skipped."""


class Noted(Walk):
    """Puts text in the place of leaves, and notes where each was."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[tuple[Any, ...]] = []

    def leaf(self, value: Any) -> Any:
        self.paths.append(tuple(self.path))
        return "new" if isinstance(value, Leaf) else value


CONTAINERS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "dict": (lambda inner: {"a": 1, "b": inner}, ("b",)),
    "integer keys": (lambda inner: {0: inner, 1: 2}, (0,)),
    "mapping": (lambda inner: MappingProxyType({"a": inner}), ("a",)),
    "list": (lambda inner: [1, inner], (1,)),
    "tuple": (lambda inner: (1, inner), (1,)),
    "named tuple": (lambda inner: Pair(inner, 2), (0,)),
    "mark": (per_rank, ()),
    "mark in a tuple": (lambda inner: (per_rank(inner),), (0,)),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_values_are_replaced_in_every_kind_of_container(kind: str) -> None:
    wrap, path = CONTAINERS[kind]
    walk = Noted()
    original = wrap(wrap(Leaf()))
    replaced = walk.run(original)
    assert replaced == wrap(wrap("new"))
    assert walk.paths == [path + path]
    assert original != replaced


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_in_which_nothing_changes_stay_the_same_objects(kind: str) -> None:
    wrap, _ = CONTAINERS[kind]
    kept = wrap(object())
    assert Noted().run(kept) is kept
    replaced = Noted().run({"kept": kept, "other": [Leaf()]})
    assert replaced["kept"] is kept
    assert replaced["other"] == ["new"]


def test_a_root_that_is_no_container_is_a_leaf() -> None:
    assert Noted().run(Leaf()) == "new"


def test_a_container_behind_a_proxy_is_a_container() -> None:
    leaf, inner = Leaf(), OrderedDict(a=Leaf())
    walk = Noted()
    walk.run([weakref.proxy(leaf), weakref.proxy(inner)])
    assert walk.paths == [(0,), (1, "a")]


@pytest.mark.parametrize("wrap", [lambda inner: {"a": inner}, lambda inner: (inner,), per_rank])
def test_a_walk_goes_deeper_than_the_stack(wrap: Any) -> None:
    depth = 3 * sys.getrecursionlimit()
    value: Any = Leaf()
    for _ in range(depth):
        value = wrap(value)
    replaced = Noted().run({"deep": value})["deep"]
    for _ in range(depth):
        replaced = only_element(replaced)
    assert replaced == "new"


def only_element(container: Any) -> Any:
    if isinstance(container, PerRank):
        return container.value
    [element] = container.values() if isinstance(container, dict) else container
    return element


def test_a_container_that_contains_itself_is_refused_by_its_path() -> None:
    loop: dict[str, Any] = {"x": 1}
    loop["again"] = [loop]
    with pytest.raises(StateDictError, match=r"at \['a'\]\['again'\]\[0\] contains itself"):
        Noted().run({"a": loop})


def test_a_container_that_does_not_change_is_entered_once() -> None:
    value: Any = [object()]
    for _ in range(15):
        value = [value, value]
    walk = Noted()
    walk.run(value)
    assert len(walk.paths) == 1


def test_a_container_that_changes_is_visited_at_each_of_its_paths() -> None:
    shared = {"a": Leaf()}
    walk = Noted()
    assert walk.run([shared, shared]) == [{"a": "new"}, {"a": "new"}]
    assert walk.paths == [(0, "a"), (1, "a")]


def test_elements_are_put_in_place_where_that_is_possible() -> None:
    for container in ({"a": 1, "b": 2}, OrderedDict(a=1, b=2)):
        assert put_elements(container, {"a": 3}) is container
        assert dict(container) == {"a": 3, "b": 2}
    numbers = [1, 2]
    assert put_elements(numbers, {1: 3}) is numbers == [1, 3]
    assert put_elements(MappingProxyType({"a": 1}), {"a": 3}) == {"a": 3}
    assert put_elements(Pair(1, 2), {1: 3}) == Pair(1, 3)


def test_replacing_elements_leaves_the_container_alone() -> None:
    container = {"a": 1, "b": 2}
    assert list(replace_elements(container, {"a": 3}).items()) == [("a", 3), ("b", 2)]
    assert container == {"a": 1, "b": 2}

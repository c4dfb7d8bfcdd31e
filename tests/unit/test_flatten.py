"""reshard.tensors.flatten: nested state dicts as flat ones, and back."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten_of_dcp

from reshard._nested_dict import flatten_state_dict, unflatten_state_dict
from reshard._traverse import get_element, set_element, traverse_state_dict
from reshard.api import StateDictError
from reshard.tensors.flatten import Rules
from reshard.tensors.paths import PathMap

T = torch.ones(1)


class Moments(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    ("state_dict", "names"),
    [
        ({"a": 1}, ["a"]),
        ({"a": {"b": {"c": 1}}}, ["a.b.c"]),
        ({"a": OrderedDict(b=1, c=T)}, ["a.b", "a.c"]),
        ({"a": {3: 1, -1: 2}}, ["a.3", "a.-1"]),
        ({"a": [1, 2, 3]}, ["a"]),
        ({"a": [T, 2]}, ["a.0", "a.1"]),
        ({"a": [{"b": 1}, 2]}, ["a.0.b", "a.1"]),
        ({"a": [[1], [[T]]]}, ["a.0", "a.1.0.0"]),
        ({"a": (1, 2)}, ["a"]),
        ({"a": ({"b": 1}, 2)}, ["a"]),
        ({"a": (T, 2)}, ["a.0", "a.1"]),
        ({"a": ([{"b": T}], 2)}, ["a.0.0.b", "a.1"]),
        ({"a": Moments(T, 0)}, ["a.0", "a.1"]),
        ({"a": {}}, []),
        ({"a": []}, ["a"]),
        ({"a": None, "b": "text", "c": b"raw"}, ["a", "b", "c"]),
    ],
)
def test_names_are_paths_joined_by_dots(state_dict: dict[str, Any], names: list[str]) -> None:
    flat, paths = flatten_state_dict(state_dict)
    assert [*flat] == names
    assert [*paths] == names
    assert all(get_element(state_dict, paths[name]) is flat[name] for name in names)


@pytest.mark.parametrize(
    "state_dict",
    [
        {"model": {"layer": {"weight": T, "bias": T}}, "step": 3},
        {"optim": {"state": {0: {"exp_avg": T}, 1: {}}, "param_groups": [{"params": [0, 1]}]}},
        {"a": [1, 2], "b": [T, [1, {"c": 2}]], "d": (1, (2, 3))},
    ],
)
def test_names_are_those_of_dcp_where_no_tuple_holds_a_tensor(state_dict: dict[str, Any]) -> None:
    flat, paths = flatten_state_dict(state_dict)
    their_flat, their_paths = flatten_of_dcp(state_dict)
    assert [*flat] == [*their_flat]
    assert paths == their_paths


def test_unflatten_gives_back_dicts_lists_and_values() -> None:
    state_dict = {"a": {"b": [T, {"c": 1}], "d": (1, 2)}, "e": [1, 2]}
    assert unflatten_state_dict(*flatten_state_dict(state_dict)) == state_dict


def test_unflatten_gives_back_a_tuple_of_tensors_as_a_list() -> None:
    assert unflatten_state_dict(*flatten_state_dict({"a": (T, 2)})) == {"a": [T, 2]}


@pytest.mark.parametrize(
    ("state_dict", "first", "second"),
    [
        ({"a.b": 1, "a": {"b": 2}}, "['a.b']", "['a']['b']"),
        ({"a": {"b.c": 1, "b": {"c": 2}}}, "['a']['b.c']", "['a']['b']['c']"),
        ({"a": {"0": 1}, "a.0": 2}, "['a']['0']", "['a.0']"),
        ({"a": [T], "a.0": T}, "['a'][0]", "['a.0']"),
    ],
)
def test_two_values_with_one_name_are_refused_with_both_places(
    state_dict: dict[str, Any], first: str, second: str
) -> None:
    with pytest.raises(StateDictError) as raised:
        flatten_state_dict(state_dict)
    assert f"the one at {first} and the one at {second}" in str(raised.value)
    assert "Rename a key" in str(raised.value)


def test_a_number_and_its_text_as_keys_of_one_dict_are_refused() -> None:
    with pytest.raises(StateDictError, match=r"at \['a'\] has both the key 1 and the key '1'"):
        flatten_state_dict({"a": {1: 1, "1": 2}})


@pytest.mark.parametrize("key", [1, 1.5, None, True, ("a",)])
def test_a_key_at_the_top_that_is_not_a_string_is_refused(key: Any) -> None:
    with pytest.raises(TypeError, match="keys at the top are strings") as raised:
        flatten_state_dict({key: T})
    assert repr(key) in str(raised.value)


@pytest.mark.parametrize("key", [1.5, None, True, ("a",)])
def test_a_key_inside_that_is_neither_string_nor_integer_is_refused(key: Any) -> None:
    with pytest.raises(TypeError, match="only strings and integers") as raised:
        flatten_state_dict({"outer": {"inner": {key: T}}})
    assert "['outer']['inner']" in str(raised.value)
    assert repr(key) in str(raised.value)


def test_the_rules_of_dcp_keep_tuples_as_values() -> None:
    state_dict = {"t": (T, 2), "d": {"x": 1}}
    assert [*flatten_state_dict(state_dict, Rules.DCP)[0]] == ["t", "d.x"]


def test_the_rules_of_dcp_2_3_keep_dicts_without_tensors_as_values() -> None:
    state_dict = {"t": (T,), "plain": {"x": {"y": 1}}, "mixed": {"x": {"y": 1}, "w": T}}
    flat, _ = flatten_state_dict(state_dict, Rules.DCP_2_3)
    assert [*flat] == ["t", "plain", "mixed.x", "mixed.w"]


def test_the_rules_of_dcp_2_3_are_those_that_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import _version

    state_dict = {"a": {"b": [1, {"c": T}], "d": {"e": 1}}, "f": {"g": {}}, "h": [{"i": 1}]}
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    assert flatten_state_dict(state_dict, Rules.DCP_2_3) == flatten_of_dcp(state_dict)


def test_traverse_visits_every_value_with_its_path() -> None:
    seen: dict[Any, Any] = {}
    traverse_state_dict({"a": {"b": 1}, "c": [T, 2], "d": [1]}, seen.__setitem__)
    assert seen == {("a", "b"): 1, ("c", 0): T, ("c", 1): 2, ("d",): [1]}


def test_traverse_enters_the_lists_that_hold_what_the_caller_looks_for() -> None:
    seen: dict[Any, Any] = {}
    traverse_state_dict(
        {"a": ["x", 1], "b": [2]}, seen.__setitem__, lambda value: isinstance(value, str)
    )
    assert seen == {("a", 0): "x", ("a", 1): 1, ("b",): [2]}


def test_set_element_makes_the_containers_on_its_way() -> None:
    root: dict[str, Any] = {}
    set_element(root, ("a", 1, "b"), 5)
    assert root == {"a": [None, {"b": 5}]}


def test_set_element_changes_containers_in_place() -> None:
    inner: list[Any] = [1, {"b": 2}]
    root = {"a": inner}
    set_element(root, ("a", 1, "b"), 5)
    assert root["a"] is inner
    assert inner == [1, {"b": 5}]


def test_set_element_finds_the_integer_key_that_a_name_was_made_of() -> None:
    root: dict[str, Any] = {"state": {0: {"step": 1}, -2: 1}}
    set_element(root, ("state", "0", "step"), 7)
    set_element(root, ("state", "-2"), 8)
    assert root == {"state": {0: {"step": 7}, -2: 8}}


def test_set_element_prefers_the_string_key_if_there_is_one() -> None:
    root: dict[str, Any] = {"a": {"0": 1}}
    set_element(root, ("a", "0"), 2)
    assert root == {"a": {"0": 2}}


def test_set_element_replaces_tuples_by_tuples_of_the_same_type() -> None:
    root: dict[str, Any] = {"a": ((1, 2), 3), "m": Moments(1, {"x": 2})}
    set_element(root, ("a", 0, 1), 9)
    set_element(root, ("m", 1, "x"), 8)
    set_element(root, ("m", 0), 7)
    assert root == {"a": ((1, 9), 3), "m": Moments(7, {"x": 8})}
    assert type(root["m"]) is Moments


def test_set_element_refuses_a_name_where_a_list_is() -> None:
    with pytest.raises(StateDictError, match="cannot store at key 'b': there is a list"):
        set_element({"a": [1]}, ("a", "b"), 2)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("a", "b"), 1),
        (("l", 1), 3),
        (("t", 0), 4),
        (("n", "7"), 5),
        (("a", "x"), "default"),
        (("l", 2), "default"),
        (("l", "a"), "default"),
        (("a", 0), "default"),
        (("a", "b", "c"), "default"),
    ],
)
def test_get_element_gives_the_value_at_a_path_or_the_default(path: Any, value: Any) -> None:
    root = {"a": {"b": 1}, "l": [2, 3], "t": (4,), "n": {7: 5}}
    assert get_element(root, path, "default") == value


@pytest.mark.parametrize(
    "state_dict",
    [
        {},
        {"a": {"b": {"c": T}}, "l": [T, [T, {"x.y": T}]], "": {"": 1}},
        {"state": {n: {"step": n} for n in range(12)}, "dotted.key": 1, "ünï": {"↯": 2}},
    ],
)
def test_paths_survive_packing_and_pickling(state_dict: dict[str, Any]) -> None:
    _, paths = flatten_state_dict(state_dict)
    for copy in (PathMap.unpack(paths.pack()), pickle.loads(pickle.dumps(paths))):
        assert type(copy) is PathMap
        assert copy == paths
        assert [*copy] == [*paths]


def test_pickled_paths_take_a_few_bytes_per_name() -> None:
    names = {f"layers.{n}": {"attention": {"weight": 1, "bias": 2}} for n in range(500)}
    _, paths = flatten_state_dict(names)
    assert len(pickle.dumps(paths)) < 10 * len(paths)


def test_integer_keys_come_back_as_integers() -> None:
    nested = {"state": {0: {"step": 1}, -3: {"step": 2}, "7": {"step": 3}}, "list": [{1: 2}]}
    flat, paths = flatten_state_dict(nested)
    assert sorted(flat) == ["list.0.1", "state.-3.step", "state.0.step", "state.7.step"]
    assert paths["state.0.step"] == ("state", "0", "step")
    for mapping in (paths, PathMap.unpack(paths.pack())):
        assert unflatten_state_dict(flat, mapping) == nested


def test_a_damaged_integer_key_is_an_error() -> None:
    _, paths = flatten_state_dict({"state": {12: 1}})
    packed = paths.pack().replace(b"state.12", b"state.1x")
    with pytest.raises(ValueError, match="'1x' is not an integer"):
        PathMap.unpack(packed)

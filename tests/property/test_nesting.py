"""Any nesting comes back from its flat form, and is flattened by the rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.tensors.flatten import Rules, flatten_state_dict, unflatten_state_dict
from reshard.tensors.paths import PathMap, check_paths, get_element

T = torch.zeros(1)
keys = st.sampled_from(["a", "b", "03", "", "x.y"]) | st.integers(-3, 3)
trees = st.recursive(
    st.sampled_from([T, None, 1, "text"]),
    lambda inner: (
        st.dictionaries(keys, inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)
state_dicts = st.dictionaries(st.sampled_from(["one", "two", "3"]), trees, max_size=3)


def with_lists(value: Any) -> Any:
    """What comes back of a value: tuples that hold tensors as lists."""
    if isinstance(value, dict):
        return {key: with_lists(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) and enters(value, Rules.CURRENT):
        return [with_lists(inner) for inner in value]
    return value


def is_unambiguous(state_dict: dict[str, Any]) -> bool:
    try:
        flatten_state_dict(state_dict)
    except ValueError:
        return False
    return True


@settings(deadline=None, max_examples=400)
@given(state_dict=state_dicts.filter(is_unambiguous))
def test_any_nesting_comes_back_from_its_flat_form(state_dict: dict[str, Any]) -> None:
    flat, paths = flatten_state_dict(state_dict)
    check_paths(paths)
    assert all(get_element(state_dict, path) is flat[name] for name, path in paths.items())
    for mapping in (paths, PathMap.unpack(paths.pack())):
        assert unflatten_state_dict(flat, mapping) == with_lists(state_dict)


# The rules, as a recursion.


def holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_tensor, value))
    return value is T


def enters(value: Any, rules: Rules) -> bool:
    if isinstance(value, Mapping):
        inside = [*value.values()]
        if rules is not Rules.DCP_2_3:
            return True
    elif isinstance(value, tuple):
        return rules is Rules.CURRENT and any(map(holds_tensor, value))
    elif isinstance(value, list):
        inside = value
    else:
        return False
    return any(inner is T or enters(inner, rules) for inner in inside)


def names(value: Any, path: str, rules: Rules) -> Iterator[str]:
    if not enters(value, rules):
        yield path
        return
    elements = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, inner in elements:
        yield from names(inner, f"{path}.{key}", rules)


@pytest.mark.parametrize("rules", Rules)
@settings(deadline=None, max_examples=200)
@given(state_dict=state_dicts.filter(is_unambiguous))
def test_the_rules_decide_what_is_entered(rules: Rules, state_dict: dict[str, Any]) -> None:
    expected = [n for key, value in state_dict.items() for n in names(value, key, rules)]
    try:
        flat, _ = flatten_state_dict(state_dict, rules)
    except ValueError:
        assert len(set(expected)) < len(expected)
    else:
        assert [*flat] == expected

"""State dicts of unusual shape: empty, deep, wide, with marks in odd places."""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

import reshard
from reshard.api import (
    CheckpointException,
    CorruptCheckpointError,
    StateDictError,
    UnsupportedLayoutError,
)
from reshard.checkpoint.directory import read_manifest
from reshard.checkpoint.to_manifest import check_readable
from reshard.default_planner import DefaultSavePlanner
from reshard.planner import SavePlan
from reshard.plans.global_plan import merge_paths, plan_fingerprint
from reshard.plans.wire import decode_save_plans, encode_save_plan
from reshard.stores.local import LocalStore
from reshard.tensors.flatten import flatten_state_dict, unflatten_state_dict
from reshard.tensors.paths import MOST_LEVELS, PathMap, check_paths, get_element, set_element
from support.hostile import check_refused, reason_of

T = torch.arange(3.0)


class Moments(NamedTuple):
    first: Any
    second: Any


def plain(value: Any) -> Any:
    """Tensors as lists, to be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def saved(state: dict[str, Any], place: Path) -> Path:
    reshard.save(state, checkpoint_id=place, no_dist=True)
    return place


# Dicts without content


EMPTY: dict[str, dict[str, Any]] = {
    "at the top": {"a": {}, "b": 1},
    "in a list": {"a": [{}, {}, {"w": T}], "b": [{}]},
    "in a list of lists": {"a": [[{}], [{}, {"w": T}]]},
    "below a dict": {"a": {"b": {"c": {}}, "d": 1}},
    "in a tuple": {"a": [({"x": {}}, T), {}]},
    "under an integer": {"state": {0: {}, 1: {"step": 1}}},
    "six thousand": {"a": [*({} for _ in range(6000)), {"w": T}]},
}


@pytest.mark.parametrize("state", EMPTY.values(), ids=EMPTY.keys())
def test_empty_dicts_come_back_where_they_were(state: dict[str, Any], tmp_path: Path) -> None:
    assert plain(reshard.read_state_dict(saved(state, tmp_path))) == plain(state)


def test_empty_dicts_take_no_part_in_what_must_match(tmp_path: Path) -> None:
    filled = {"state": {"step": 3}, "w": T}
    saved({"state": {}, "w": T}, tmp_path / "empty")
    saved(filled, tmp_path / "filled")
    template: dict[str, Any] = {"state": {}, "w": torch.zeros(3)}
    report = reshard.load(template, checkpoint_id=tmp_path / "filled", no_dist=True)
    assert (template["state"], report.missing, report.unexpected) == ({}, [], ["state.step"])
    template = {"state": {"step": 5}, "w": torch.zeros(3)}
    report = reshard.load(template, checkpoint_id=tmp_path / "empty", no_dist=True, strict=False)
    assert (template["state"], report.missing) == ({"step": 5}, ["state.step"])


def test_paths_of_empty_dicts_survive_packing_pickling_and_the_wire() -> None:
    _, paths = flatten_state_dict({"a": [{}, {3: {}}, T], "b.c": {}})
    expected = (("a", 0), ("a", 1, "3"), ("b.c",))
    plan = SavePlan([], planner_data=paths)
    for copy in (
        PathMap.unpack(paths.pack()),
        pickle.loads(pickle.dumps(paths)),
        pickle.loads(pickle.dumps(PathMap({"other": ("x",)}, paths.empties))),
        decode_save_plans([encode_save_plan(plan)])[0].planner_data,
        merge_paths([SavePlan([], planner_data=PathMap()), plan]),
    ):
        assert copy.empties == expected
    assert unflatten_state_dict({"a.2": T}, paths) == {"a": [{}, {3: {}}, T], "b.c": {}}
    without = SavePlan([], planner_data=PathMap(paths))
    assert plan_fingerprint(plan) != plan_fingerprint(without)


def test_paths_without_empty_dicts_are_stored_as_they_always_were() -> None:
    _, paths = flatten_state_dict({"a": {"b": 1}})
    assert msgspec.msgpack.decode(paths.pack()) == [["a.b"], [[1, 1]]]


def test_an_empty_dict_of_one_rank_gives_way_to_the_content_of_another() -> None:
    _, one = flatten_state_dict({"a": {"b": {}, "n": {}, "l": [{}, {}]}})
    flat, other = flatten_state_dict({"a": {"b": {"c": 1}, "n": None, "l": [{"x": 2}]}})
    merged = PathMap()
    merged.add(other)
    merged.add(one)
    assert unflatten_state_dict(flat, merged) == {
        "a": {"b": {"c": 1}, "n": None, "l": [{"x": 2}, {}]}
    }


def test_parts_without_collectives_bring_their_empty_dicts_together(tmp_path: Path) -> None:
    planner = DefaultSavePlanner()
    reshard.save(
        {"a": [{}, {"w": T}]},
        checkpoint_id=tmp_path,
        planner=planner,
        no_dist=True,
        use_collectives=False,
    )
    assert plain(reshard.read_state_dict(tmp_path)) == {"a": [{}, {"w": [0, 1, 2]}]}


# Keys


def test_texts_that_read_like_an_integer_stay_texts(tmp_path: Path) -> None:
    state = {"d": {3: 6, "03": 8, "٣": 9, "-0": 10, "+3": 11}}
    assert reshard.read_state_dict(saved(state, tmp_path)) == state
    template = {"d": dict.fromkeys(state["d"], 0)}
    reshard.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert template == state


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("opt.1", {"opt": [None, {"w": [0, 1, 2], "x": 1}]}),
        ("opt.1.x", {"opt": [None, {"x": 1}]}),
        ("opt.2", {"opt": [None, None, {}]}),
        ({"opt.1.x", "opt.3"}, {"opt": [None, {"x": 1}, None, 7]}),
        ("opt", {"opt": [{"w": [0, 1, 2]}, {"w": [0, 1, 2], "x": 1}, {}, 7]}),
        ("empty.below", {"empty": {"below": {}}}),
        ("dotted.key", {"dotted.key": 1}),
        ("dotted.key.not", None),
        ("opt.4", None),
        ("op", None),
    ],
)
def test_read_state_dict_reads_what_lies_at_or_below_a_key(
    keys: Any, expected: Any, tmp_path: Path
) -> None:
    state = {
        "opt": [{"w": T}, {"w": T, "x": 1}, {}, 7],
        "empty": {"below": {}},
        "dotted.key": 1,
    }
    saved(state, tmp_path)
    if expected is None:
        check_refused(lambda: reshard.read_state_dict(tmp_path, keys), keys)
    else:
        assert plain(reshard.read_state_dict(tmp_path, keys)) == expected


# Depth and width


def nested(depth: int, kind: Callable[[Any], Any], inside: Any) -> Any:
    for _ in range(depth):
        inside = kind(inside)
    return inside


WRAPS: dict[str, Callable[[Any], Any]] = {
    "dicts": lambda inner: {"a": inner},
    "lists": lambda inner: [inner],
    "tuples": lambda inner: (1, inner),
    "named tuples": lambda inner: Moments(inner, 2),
}


@pytest.mark.parametrize("depth", [300, MOST_LEVELS - 1])
@pytest.mark.parametrize("kind", WRAPS)
def test_deep_nesting_is_saved_and_loaded(kind: str, depth: int, tmp_path: Path) -> None:
    saved({"deep": nested(depth, WRAPS[kind], T), "w": T}, tmp_path)
    template = {"deep": nested(depth, WRAPS[kind], torch.zeros(3)), "w": torch.zeros(3)}
    reshard.load(template, checkpoint_id=tmp_path, no_dist=True)
    found: Any = reshard.read_state_dict(tmp_path, "deep")["deep"]
    loaded: Any = template["deep"]
    for _ in range(depth):
        found = found["a"] if kind == "dicts" else found[1 if kind == "tuples" else 0]
        loaded = loaded["a"] if kind == "dicts" else loaded[1 if kind == "tuples" else 0]
    assert torch.equal(found, T)
    assert torch.equal(loaded, T)


@pytest.mark.parametrize("kind", WRAPS)
def test_what_is_nested_too_deeply_is_refused_by_the_beginning_of_its_path(kind: str) -> None:
    with pytest.raises(StateDictError, match=r"1000 levels at \['deep'\]") as raised:
        flatten_state_dict({"deep": nested(MOST_LEVELS, WRAPS[kind], T)})
    assert len(str(raised.value)) < 1000


def test_a_list_nested_deeper_than_the_stack_is_a_value_without_tensors() -> None:
    deep = nested(3 * sys.getrecursionlimit(), WRAPS["lists"], 1)
    assert [*flatten_state_dict({"deep": deep})[0]] == ["deep"]


@pytest.mark.parametrize("holds_tensor", [False, True])
def test_a_container_that_contains_itself_is_refused(holds_tensor: bool) -> None:
    for loop in ([], {}):
        inside: Any = [loop, loop, T] if holds_tensor else [loop, loop]
        loop.append(inside) if isinstance(loop, list) else loop.update(x=inside)
        with pytest.raises(StateDictError, match="contains itself"):
            flatten_state_dict({"loop": loop})


def test_looking_for_tensors_takes_time_in_proportion_to_the_containers() -> None:
    class Counted(list[Any]):
        looks = 0

        def __iter__(self) -> Any:
            Counted.looks += 1
            return super().__iter__()

    inside: Any = Counted([1, "x", object()])
    for _ in range(200):
        inside = Counted([inside, inside])
    flatten_state_dict({"a": inside, "b": inside})
    assert Counted.looks < 1000


@pytest.mark.parametrize("kind", WRAPS)
def test_a_state_nested_almost_as_deep_as_the_stack_is_staged_and_saved(
    kind: str, tmp_path: Path
) -> None:
    depth = 900
    state = {"deep": nested(depth, WRAPS[kind], T.clone())}
    reshard.async_save(state, checkpoint_id=tmp_path, no_dist=True).result()
    template = {"deep": nested(depth, WRAPS[kind], torch.zeros(3))}
    reshard.load(template, checkpoint_id=tmp_path, no_dist=True)
    flat, _ = flatten_state_dict(template)
    [loaded] = [value for value in flat.values() if isinstance(value, torch.Tensor)]
    assert torch.equal(loaded, T)


@pytest.mark.parametrize("dims", [65, 255])
def test_tensors_of_many_dimensions_are_saved_and_loaded(dims: int, tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape([4, *[1] * (dims - 2), 3])
    for place, value in {"dense": tensor, "strided": tensor.transpose(0, dims - 1)}.items():
        saved({"w": value}, tmp_path / place)
        template = {"w": torch.zeros(value.shape)}
        reshard.load(template, checkpoint_id=tmp_path / place, no_dist=True)
        assert torch.equal(template["w"], value)
        assert torch.equal(reshard.read_state_dict(tmp_path / place)["w"], value)
        region = reshard.read_tensor(tmp_path / place, "w", slice(1, 3))  # type: ignore[arg-type]
        assert torch.equal(region, value.narrow(0, 1, 2))


def test_a_tensor_of_more_dimensions_than_can_be_stored_is_refused_by_name(tmp_path: Path) -> None:
    saved({"w": T}, tmp_path)
    with pytest.raises(CheckpointException) as raised:
        saved({"wide": torch.zeros([1] * 256)}, tmp_path)
    assert isinstance(reason_of(raised.value), UnsupportedLayoutError)
    assert "'wide' has 256 dimensions" in str(reason_of(raised.value))
    assert torch.equal(reshard.read_tensor(tmp_path, "w"), T)


# What a reader accepts


def test_a_reader_checks_its_own_manifest_as_a_save_can(tmp_path: Path) -> None:
    saved({"a": [{}, {"w": T}]}, tmp_path)
    manifest = read_manifest(LocalStore(tmp_path))
    check_readable(manifest, "the manifest")
    too_deep = b"N" + PathMap({"w": ("w",) * 1001}).pack()
    with pytest.raises(CorruptCheckpointError, match="the manifest has damaged names"):
        check_readable(replace(manifest, planner_data=too_deep), "the manifest")


# Marks


@pytest.mark.parametrize(
    "wrap",
    [
        lambda mark: (mark, 5),
        lambda mark: (1, (mark, 5)),
        lambda mark: Moments(5, mark),
        lambda mark: [Moments(5, [mark])],
        lambda mark: OrderedDict(a=1, b=mark),
        lambda mark: MappingProxyType({"a": 1, "b": mark}),
        lambda mark: ({"x": (mark,)}, 5),
        lambda mark: nested(600, lambda inner: (1, inner), mark),
    ],
)
def test_marks_are_found_in_any_container_and_come_back_in_place(
    wrap: Callable[[Any], Any], tmp_path: Path
) -> None:
    saved({"s": wrap(reshard.per_rank("mine")), "w": T}, tmp_path)
    names = reshard.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert sum(name.endswith(".rank-0-of-1") for name in names) == 1
    state = {"s": wrap(reshard.per_rank("old")), "w": torch.zeros(3)}
    reshard.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert type(state["s"]) in (type(wrap("mine")), dict)
    found, expected = state["s"], wrap("mine")
    _, paths = flatten_state_dict({"s": wrap(T)})
    (path,) = (path for path in paths.values() if get_element({"s": wrap(T)}, path) is T)
    assert get_element({"s": found}, path) == "mine"
    if not isinstance(expected, MappingProxyType) and len(path) < 100:
        assert found == expected


def test_containers_around_a_mark_stay_the_same_objects(tmp_path: Path) -> None:
    saved({"s": {"mark": reshard.per_rank(1), "step": 2, "l": [reshard.per_rank(3)]}}, tmp_path)
    inner: dict[str, Any] = {"mark": reshard.per_rank(0), "step": 0, "l": [reshard.per_rank(0)]}
    elements = inner["l"]
    reshard.load({"s": inner}, checkpoint_id=tmp_path, no_dist=True)
    assert inner == {"mark": 1, "step": 2, "l": [3]}
    assert inner["l"] is elements


def test_a_marked_empty_dict_comes_back(tmp_path: Path) -> None:
    saved({"s": reshard.per_rank({}), "w": T}, tmp_path)
    state = {"s": reshard.per_rank({}), "w": torch.zeros(3)}
    reshard.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["s"] == {}


def test_a_mark_in_a_tuple_that_is_dropped_leaves_its_value(tmp_path: Path) -> None:
    saved({"s": (5,), "w": T}, tmp_path)
    state = {"s": (reshard.per_rank(1, on_resize="drop"),), "w": torch.zeros(3)}
    reshard.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["s"] == (1,)


def test_a_mark_in_a_tuple_is_found_after_staging(tmp_path: Path) -> None:
    state = {"s": (reshard.per_rank("mine"), Moments(reshard.per_rank(T), 1)), "w": T}
    reshard.async_save(state, checkpoint_id=tmp_path, no_dist=True).result()
    loaded = {
        "s": (reshard.per_rank(""), Moments(reshard.per_rank(torch.zeros(3)), 0)),
        "w": torch.zeros(3),
    }
    reshard.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert plain(loaded["s"]) == ["mine", [[0, 1, 2], 1]]
    assert type(loaded["s"][1]) is Moments


# Elements


def test_set_element_makes_a_container_inside_of_a_tuple() -> None:
    root: dict[str, Any] = {"a": [((None, 2), 3)]}
    set_element(root, ("a", 0, 0, 0, "b"), 5)
    assert root == {"a": [(({"b": 5}, 2), 3)]}


def test_lists_are_bounded_all_together_not_each() -> None:
    long = ".".join(["a", *["4000"] * 40])
    parts = ("a", *[4000] * 40)
    with pytest.raises(ValueError, match="lists of 160040 elements for 1 names"):
        check_paths(PathMap({long: parts}))
    check_paths(PathMap({f"a.{n}": ("a", n) for n in range(100_000)}))


# Dicts of classes of their own


class Watching(dict[str, Any]):
    """Remembers what was put into it."""

    def __init__(self, **content: Any) -> None:
        super().__init__(content)
        self.put: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.put.append(key)
        super().__setitem__(key, value)


@pytest.mark.parametrize("others", [{}, {"model": torch.nn.Linear(1, 1)}], ids=["", "stateful"])
def test_loaded_values_are_put_into_the_dict_and_stateful_ones_stay(
    others: dict[str, Any], tmp_path: Path
) -> None:
    state = {"nested": {"t": T, "numbers": [1, 2]}, "step": 3}
    watching = Watching(nested={"t": torch.zeros(3), "numbers": []}, step=0, **others)
    reshard.load(watching, checkpoint_id=saved({**state, **others}, tmp_path), no_dist=True)
    assert plain({key: watching[key] for key in state}) == plain(state)
    assert {*watching.put} == {*state}

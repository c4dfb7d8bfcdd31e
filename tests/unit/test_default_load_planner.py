"""reshard.default_planner.DefaultLoadPlanner: what is read, and what is refused."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from reshard.api import (
    CheckpointException,
    CoverageError,
    MissingKeyError,
    ShapeMismatchError,
    UnsafeValueError,
)
from reshard.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
    create_default_local_load_plan,
)
from reshard.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from reshard.planner import LoadItemType, ReadItem
from reshard.planner_helpers import _create_read_items, create_read_items_for_chunk_list
from support.fake_ranks import as_rank, distributed, mesh_of, on_each_rank
from support.memory_storage import MemoryCheckpoint, load_from_memory, save_in_memory

quiet_about_default_device = pytest.mark.filterwarnings("ignore::UserWarning")


def saved(state_dict: dict[str, Any], **options: Any) -> MemoryCheckpoint:
    return save_in_memory([DefaultSavePlanner(**options)], [state_dict])


def load(
    checkpoint: MemoryCheckpoint, state_dict: dict[str, Any], **options: Any
) -> dict[str, Any]:
    load_from_memory(checkpoint, [DefaultLoadPlanner(**options)], [state_dict])
    return state_dict


def plan(checkpoint: MemoryCheckpoint, state_dict: dict[str, Any], **options: Any) -> Any:
    planner = DefaultLoadPlanner(**options)
    planner.set_up_planner(state_dict, checkpoint.metadata)
    return planner.create_local_plan()


def chunks_of(*bounds: tuple[int, int]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size([a]), torch.Size([b - a])) for a, b in bounds]


def stored_in(*bounds: tuple[int, int], size: int) -> Metadata:
    properties = TensorProperties(torch.float32)
    entry = TensorStorageMetadata(properties, torch.Size([size]), chunks_of(*bounds))
    return Metadata({"w": entry})


# What is read


def test_a_load_reads_the_parts_of_stored_chunks_that_are_wanted() -> None:
    items = create_read_items_for_chunk_list(
        "w", stored_in((0, 4), (4, 8), size=8).state_dict_metadata["w"], chunks_of((3, 7))
    )
    assert items == [
        ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex("w", [3]),
            torch.Size([dest]),
            MetadataIndex("w", [chunk]),
            torch.Size([start]),
            torch.Size([length]),
        )
        for dest, chunk, start, length in ((0, 0, 3, 1), (1, 4, 0, 3))
    ]
    assert [(item.dest_index.index, item.storage_index.index) for item in items] == [(0, 0), (0, 1)]


def test_the_building_block_of_custom_planners_leaves_out_what_is_not_stored() -> None:
    entry = stored_in((0, 2), size=8).state_dict_metadata["w"]
    items = create_read_items_for_chunk_list("w", entry, chunks_of((1, 8)))
    assert [tuple(item.lengths) for item in items] == [(1,)]
    assert create_read_items_for_chunk_list("w", entry, chunks_of((4, 8))) == []
    assert create_read_items_for_chunk_list("w", entry, []) == []


def test_a_value_is_read_by_one_item_without_a_region() -> None:
    (item,) = _create_read_items("v", BytesStorageMetadata(), object())
    assert item.type is LoadItemType.BYTE_IO
    assert item.dest_index == item.storage_index == MetadataIndex("v")


def test_a_dtensor_is_loaded_from_chunks_of_another_layout() -> None:
    full = torch.arange(21.0).reshape(7, 3)

    def source(_: int) -> dict[str, Any]:
        return {"w": distributed(full, mesh_of(3), [Shard(0)])}

    def target(_: int) -> dict[str, Any]:
        return {"w": distributed(torch.zeros(7, 3), mesh_of(2), [Shard(1)])}

    checkpoint = save_in_memory([DefaultSavePlanner() for _ in range(3)], on_each_rank(3, source))
    targets = on_each_rank(2, target)
    load_from_memory(checkpoint, [DefaultLoadPlanner() for _ in range(2)], targets)
    locals_ = [state_dict["w"].to_local() for state_dict in targets]
    assert torch.equal(torch.cat(locals_, dim=1), full)


def test_a_tensor_is_filled_in_place_through_views() -> None:
    memory = torch.zeros(3, 4)
    load(saved({"w": torch.ones(3, 2)}), {"w": memory[:, 1:3]})
    assert memory.sum(dim=0).tolist() == [0, 3, 3, 0]


def test_a_parameter_that_requires_grad_is_filled_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    state_dict = load(saved({"w": torch.ones(2)}), {"w": parameter})
    assert state_dict["w"] is parameter
    assert parameter.tolist() == [1, 1]


# What is missing


def test_a_missing_key_is_refused_with_the_names_that_come_close() -> None:
    checkpoint = saved({"layers.0.weight": torch.ones(1), "layers.0.bias": torch.ones(1), "v": 1})
    with pytest.raises(MissingKeyError) as raised:
        plan(checkpoint, {"layers.0.wieght": torch.ones(1)})
    message = str(raised.value)
    assert message.startswith("Missing key in checkpoint state_dict: layers.0.wieght.")
    assert "The checkpoint has 'layers.0.weight'" in message
    assert "'v'" not in message
    assert "allow_partial_load=True" in message


def test_a_missing_key_that_resembles_nothing_gets_no_suggestion() -> None:
    with pytest.raises(MissingKeyError) as raised:
        plan(saved({"w": torch.ones(1)}), {"scheduler": 1})
    assert "The checkpoint has" not in str(raised.value)


def test_all_missing_keys_are_counted_and_some_are_named() -> None:
    with pytest.raises(MissingKeyError) as raised:
        plan(saved({"w": torch.ones(1)}), {f"m{n}": 1 for n in range(9)})
    assert "8 more keys are missing, such as 'm1', 'm2', 'm3', 'm4', 'm5'." in str(raised.value)


def test_a_partial_load_leaves_missing_keys_as_they_are() -> None:
    state_dict = {"w": torch.zeros(2), "new": torch.full((2,), 7.0), "v": "default"}
    load(saved({"w": torch.ones(2)}), state_dict, allow_partial_load=True)
    assert state_dict["w"].tolist() == [1, 1]
    assert state_dict["new"].tolist() == [7, 7]
    assert state_dict["v"] == "default"


def test_a_partial_load_still_refuses_another_shape() -> None:
    with pytest.raises(ShapeMismatchError):
        plan(saved({"w": torch.ones(2)}), {"w": torch.ones(3)}, allow_partial_load=True)


def test_keys_of_the_checkpoint_that_nobody_asks_for_are_not_read() -> None:
    assert len(plan(saved({"a": torch.ones(1), "b": 1}), {"a": torch.ones(1)}).items) == 1


# What does not fit


def test_another_shape_is_refused_before_anything_is_touched() -> None:
    checkpoint = saved({"a": torch.ones(2), "step": 5, "z": torch.ones(2, 3)})
    state_dict = {"a": torch.zeros(2), "step": 0, "z": torch.zeros(3, 2)}
    with pytest.raises(ShapeMismatchError) as raised:
        load(checkpoint, state_dict)
    message = str(raised.value)
    assert "saved (2, 3) and current: (3, 2) for 'z'" in message
    assert "Build the model with the shape that was saved" in message
    assert state_dict["a"].tolist() == [0, 0]
    assert state_dict["step"] == 0


@pytest.mark.parametrize("value", [3, None, [1.0], io.BytesIO()], ids=lambda v: type(v).__name__)
def test_a_value_in_the_place_of_a_stored_tensor_is_refused(value: Any) -> None:
    with pytest.raises(ShapeMismatchError) as raised:
        plan(saved({"layer.w": torch.ones(2, 3)}), {"layer": {"w": value}})
    assert "'layer.w' is stored as a tensor of shape (2, 3)" in str(raised.value)
    assert f"a {type(value).__name__} in its place" in str(raised.value)


def test_a_tensor_in_the_place_of_a_stored_value_is_replaced_by_the_value() -> None:
    assert load(saved({"step": 5}), {"step": torch.zeros(2)}) == {"step": 5}


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        (stored_in((0, 3), size=4), r"nobody holds \[3:4\]"),
        (stored_in(size=4), r"nobody holds \[0:4\]"),
        (stored_in((0, 3), (2, 4), size=4), r"chunks \[0:3\] and \[2:4\] overlap"),
    ],
)
def test_a_checkpoint_that_does_not_hold_a_tensor_exactly_once_is_refused(
    metadata: Metadata, problem: str
) -> None:
    with pytest.raises(CoverageError, match=problem) as raised:
        create_default_local_load_plan({"w": torch.zeros(4)}, metadata)
    assert "does not hold all of 'w'" in str(raised.value)


def test_a_gap_that_this_rank_does_not_want_is_no_error() -> None:
    with as_rank(0, 2):
        wanted = distributed(torch.zeros(4), mesh_of(2), [Shard(0)])
        items = create_default_local_load_plan({"w": wanted}, stored_in((0, 3), size=4)).items
    assert [tuple(item.lengths) for item in items] == [(2,)]


def test_planning_without_metadata_is_refused() -> None:
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"w": torch.ones(1)})
    with pytest.raises(ValueError, match="has no metadata"):
        planner.create_local_plan()


# Where values go


class Moments(NamedTuple):
    first: Any
    second: Any


def test_values_are_put_into_dicts_lists_tuples_and_under_integer_keys() -> None:
    source = {
        "dict": OrderedDict(a={"b": 1}),
        "list": [torch.ones(1), 2, {"c": 3}],
        "tuple": (torch.ones(1), 4),
        "named": Moments(torch.ones(1), {"d": 5}),
        "state": {0: {"step": 6}, 7: 7},
        "whole": [8, 9],
    }
    target = {
        "dict": OrderedDict(a={"b": 0}),
        "list": [torch.zeros(1), 0, {"c": 0}],
        "tuple": (torch.zeros(1), 0),
        "named": Moments(torch.zeros(1), {"d": 0}),
        "state": {0: {"step": 0}, 7: 0},
        "whole": [],
    }
    inner = target["dict"]
    load(saved(source), target)
    assert target == source
    assert target["dict"] is inner
    assert type(target["named"]) is Moments


def test_without_flattening_values_are_put_at_the_top() -> None:
    checkpoint = saved({"nested": {"a": [1]}, "w": torch.ones(1)}, flatten_state_dict=False)
    state_dict = {"nested": {"a": []}, "w": torch.zeros(1)}
    load(checkpoint, state_dict, flatten_state_dict=False)
    assert state_dict == {"nested": {"a": [1]}, "w": torch.ones(1)}


def test_a_value_that_only_running_code_could_read_is_refused_by_name() -> None:
    checkpoint = saved({"deep": {"path": PurePosixPath("a")}})
    with pytest.raises(UnsafeValueError) as raised:
        load(checkpoint, {"deep": {"path": None}})
    assert "'deep.path' is stored as a pickled object" in str(raised.value)
    assert "Pass allow_pickle=True" in str(raised.value)
    assert isinstance(raised.value, CheckpointException)


def test_values_that_dcp_wrote_with_torch_save_are_read() -> None:
    stored = io.BytesIO()
    torch.save({"lr": 0.1}, stored)
    state_dict = {"config": {}}
    load(
        MemoryCheckpoint(
            Metadata({"config": BytesStorageMetadata()}),
            {MetadataIndex("config"): stored.getvalue()},
        ),
        state_dict,
        flatten_state_dict=False,
    )
    assert state_dict == {"config": {"lr": 0.1}}


# Checkpoints of DCP


def saved_under(names: dict[str, Any]) -> MemoryCheckpoint:
    """A checkpoint with exactly these flat names, as an older version may have written it."""
    return saved(names, flatten_state_dict=False)


def test_a_tuple_that_dcp_stored_as_one_value_is_loaded_as_one() -> None:
    checkpoint = saved_under({"pair": (torch.ones(2), 3), "a.b": torch.ones(1), "c.lr": 0.1})
    state_dict = {"pair": (torch.zeros(2), 0), "a": {"b": torch.zeros(1)}, "c": {"lr": 0.0}}
    load(checkpoint, state_dict)
    assert state_dict["pair"][0].tolist() == [1, 1]
    assert state_dict["pair"][1] == 3
    assert state_dict["a"]["b"].item() == 1
    assert state_dict["c"] == {"lr": 0.1}


def test_a_dict_that_dcp_2_3_stored_as_one_value_is_loaded_as_one() -> None:
    checkpoint = saved_under({"config": {"lr": {"start": 0.1}}, "model.w": torch.ones(1)})
    state_dict = {"config": {"lr": {"start": 0.0}}, "model": {"w": torch.zeros(1)}}
    load(checkpoint, state_dict)
    assert state_dict == {"config": {"lr": {"start": 0.1}}, "model": {"w": torch.ones(1)}}


def test_a_key_that_no_older_rule_explains_is_reported_by_its_name_of_today() -> None:
    with pytest.raises(MissingKeyError, match=r"state_dict: pair\.0\."):
        plan(saved_under({"w": torch.ones(1)}), {"pair": (torch.zeros(2), 0)})


def test_an_older_checkpoint_can_be_loaded_in_part() -> None:
    checkpoint = saved_under({"config": {"lr": 0.1}})
    state_dict = {"config": {"lr": 0.0}, "new": {"x": 1}}
    load(checkpoint, state_dict, allow_partial_load=True)
    assert state_dict == {"config": {"lr": 0.1}, "new": {"x": 1}}


# Loading without a template


def fill(checkpoint: MemoryCheckpoint, **options: Any) -> dict[str, Any]:
    state_dict: dict[str, Any] = {}
    load_from_memory(checkpoint, [_EmptyStateDictLoadPlanner(**options)], [state_dict])
    return state_dict


NESTED = {
    "model": {"layer": {"w": torch.arange(4.0), "b": torch.ones(2, dtype=torch.int8)}},
    "optim": {"state": {"0": {"step": 1}, "10": {"step": 2}}},
    "groups": [{"lr": 0.1}, {"lr": 0.2}],
}


def test_an_empty_dict_is_filled_with_everything_as_it_was_nested() -> None:
    state_dict = fill(saved(NESTED))
    assert torch.equal(state_dict["model"]["layer"].pop("w"), torch.arange(4.0))
    loaded = state_dict["model"]["layer"].pop("b")
    assert (loaded.tolist(), loaded.dtype) == ([1, 1], torch.int8)
    assert state_dict == {
        "model": {"layer": {}},
        "optim": NESTED["optim"],
        "groups": NESTED["groups"],
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"optim"}, {"optim": {"state": {"0": {"step": 1}, "10": {"step": 2}}}}),
        ({"optim.state.0"}, {"optim": {"state": {"0": {"step": 1}}}}),
        ({"optim.state.1"}, {}),
        ({"optim.state.10.step"}, {"optim": {"state": {"10": {"step": 2}}}}),
        (["groups.0"], {"groups": [{"lr": 0.1}]}),
        (["model.layer.w", "groups"], {"model": {"layer": {"w": 1}}, "groups": NESTED["groups"]}),
        (set(), {}),
    ],
    ids=str,
)
def test_keys_choose_what_is_loaded_into_an_empty_dict(keys: Any, expected: dict[str, Any]) -> None:
    state_dict = fill(saved(NESTED), keys=keys)
    if "model" in state_dict:
        state_dict["model"]["layer"]["w"] = 1
    assert state_dict == expected


def test_an_empty_dict_is_filled_from_a_checkpoint_without_nesting_information() -> None:
    checkpoint = saved_under({"a.b": torch.ones(1), "c": 1})
    assert checkpoint.metadata.planner_data is None
    assert fill(checkpoint, keys={"a"}) == {"a.b": torch.ones(1)}
    assert fill(checkpoint) == {"a.b": torch.ones(1), "c": 1}


def test_a_dict_that_is_not_empty_is_refused_by_the_planner_that_fills_one() -> None:
    with pytest.raises(ValueError, match="fills an empty dict, but got one with 2 keys"):
        _EmptyStateDictLoadPlanner().set_up_planner({"a": 1, "b": 2}, Metadata({}))


def test_the_planner_that_fills_an_empty_dict_needs_metadata() -> None:
    with pytest.raises(ValueError, match="needs the metadata"):
        _EmptyStateDictLoadPlanner().set_up_planner({})


# Meta tensors


def test_meta_tensors_get_memory_wherever_they_are() -> None:
    meta = torch.device("meta")
    state_dict = {
        "w": torch.empty(2, device=meta),
        "nest": {"list": [torch.empty(1, device=meta), 1], "tuple": (torch.empty(1, device=meta),)},
        "named": Moments(torch.empty(1, device=meta), 2),
        "kept": torch.zeros(1),
    }
    kept, nest = state_dict["kept"], state_dict["nest"]
    source = {
        "w": torch.ones(2),
        "nest": {"list": [torch.ones(1), 3], "tuple": (torch.ones(1),)},
        "named": Moments(torch.ones(1), 4),
        "kept": torch.ones(1),
    }
    load(saved(source), state_dict)
    assert state_dict["w"].tolist() == [1, 1]
    assert state_dict["nest"] is nest
    assert nest["list"] == [torch.ones(1), 3]
    assert nest["tuple"][0].item() == 1
    assert state_dict["named"] == Moments(torch.ones(1), 4)
    assert state_dict["kept"] is kept


@quiet_about_default_device
def test_a_meta_dtensor_gets_memory_for_its_uneven_shard() -> None:
    checkpoint = saved({"w": torch.arange(5.0)})

    def build(_: int) -> torch.Tensor:
        meta = distributed(torch.empty(5, device="meta"), mesh_of(2), [Shard(0)])
        state_dict = load(checkpoint, {"w": meta})
        assert isinstance(state_dict["w"], DTensor)
        assert state_dict["w"].placements == (Shard(0),)
        return state_dict["w"].to_local()

    assert [local.tolist() for local in on_each_rank(2, build)] == [[0, 1, 2], [3, 4]]


def test_reading_without_a_template_gives_tied_weights_one_tensor_that_is_read_once() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tied = {"embedding": weight, "head": weight, "tail": {"again": weight}, "other": torch.ones(2)}
    checkpoint = saved(tied)
    planner = _EmptyStateDictLoadPlanner()
    planner.set_up_planner({}, checkpoint.metadata)
    assert len(planner.create_local_plan().items) == 2

    found: dict[str, Any] = {}
    load_from_memory(checkpoint, [_EmptyStateDictLoadPlanner()], [found])

    assert found["head"] is found["embedding"]
    assert found["tail"]["again"] is found["embedding"]
    assert torch.equal(found["head"], weight)
    assert torch.equal(found["other"], torch.ones(2))


@pytest.mark.parametrize("key", ["embedding", "head", "tail"])
def test_reading_one_name_of_tied_weights_without_a_template_finds_it(key: str) -> None:
    weight = torch.arange(6.0)
    checkpoint = saved({"embedding": weight, "head": weight, "tail": weight})
    found: dict[str, Any] = {}

    load_from_memory(checkpoint, [_EmptyStateDictLoadPlanner(keys={key})], [found])

    assert found.keys() == {key}
    assert torch.equal(found[key], weight)


def test_a_planner_that_fills_tensors_of_its_own_is_asked_for_every_name_of_tied_weights() -> None:
    class Own(_EmptyStateDictLoadPlanner):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[str] = []

        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            self.asked.append(read_item.dest_index.fqn)
            return super().resolve_tensor(read_item)

    weight = torch.arange(6.0)
    planner = Own()

    load_from_memory(saved({"embedding": weight, "head": weight}), [planner], [{}])

    assert sorted(planner.asked) == ["embedding", "head"]

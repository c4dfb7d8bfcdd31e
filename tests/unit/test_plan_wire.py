"""reshard.plans.wire: plans as bytes between ranks; and plans as pickles."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from reshard.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from reshard.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from reshard.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from reshard.plans.wire import (
    decode_answer,
    decode_load_plan,
    decode_save_plans,
    encode_answer,
    encode_load_plan,
    encode_save_plan,
)
from support.fake_ranks import distributed, mesh_of, on_each_rank
from support.memory_storage import plan_load, plan_save, save_in_memory


def state_dicts(count: int = 3) -> list[dict[str, Any]]:
    def build(rank: int) -> dict[str, Any]:
        mesh = mesh_of(count)
        return {
            "sharded": distributed(torch.arange(20.0).reshape(10, 2), mesh, [Shard(0)]),
            "plain": torch.ones(2, 3, 4, dtype=torch.bfloat16),
            "scalar": torch.tensor(1),
            "empty": torch.empty(0, 2),
            "nest": {"list": [torch.ones(1), {"x": 1}], f"of_rank_{rank}": rank},
            "grad": torch.nn.Parameter(torch.ones(2)),
        }

    return on_each_rank(count, build)


def local_plans(options: dict[str, Any] | None = None) -> list[SavePlan]:
    plans = []
    for state_dict in state_dicts():
        planner = DefaultSavePlanner(**(options or {}))
        planner.set_up_planner(state_dict)
        plans.append(planner.create_local_plan())
    return plans


def send(plan: SavePlan) -> SavePlan:
    (received,) = decode_save_plans([encode_save_plan(plan)])
    return received


def chunk(start: int, length: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([start]), torch.Size([length]))


ODD_ITEMS = [
    WriteItem(MetadataIndex("v", index=3), WriteItemType.BYTE_IO, BytesIOWriteData(17)),
    WriteItem(MetadataIndex("u"), WriteItemType.BYTE_IO),
    WriteItem(
        MetadataIndex("w", [2], 5),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk(2, 1 << 40),
            TensorProperties(
                torch.float8_e5m2,
                layout=torch.sparse_coo,
                requires_grad=True,
                memory_format=torch.channels_last,
                pin_memory=True,
            ),
            torch.Size([1 << 41]),
        ),
    ),
    WriteItem(
        MetadataIndex("no offset"),
        WriteItemType.TENSOR,
        tensor_data=TensorWriteData(chunk(0, 4), TensorProperties(torch.int8), torch.Size([4])),
    ),
]


# Save plans


def test_save_plans_arrive_as_they_were_sent() -> None:
    plans = local_plans()
    received = decode_save_plans([encode_save_plan(plan) for plan in plans])
    assert received == plans
    assert [[*plan.planner_data] for plan in received] == [[*plan.planner_data] for plan in plans]


def test_items_that_were_made_by_hand_arrive_with_every_field() -> None:
    received = send(SavePlan(ODD_ITEMS))
    assert received.items == ODD_ITEMS
    # The position of a chunk takes no part in comparisons of an index.
    assert [item.index.index for item in received.items] == [3, None, 5, None]
    assert received.items[3].index.offset is None


def test_items_that_were_changed_in_place_arrive_changed() -> None:
    plan = local_plans()[0]
    for item in plan.items:
        if item.tensor_data is not None:
            item.tensor_data.properties.dtype = torch.float16
    received = send(plan)
    dtypes = {item.tensor_data.properties.dtype for item in received.items if item.tensor_data}
    assert dtypes == {torch.float16}


def test_one_item_that_was_changed_by_position_arrives_changed_among_the_others() -> None:
    plan = local_plans()[0]
    before = [copy.deepcopy(item) for item in local_plans()[0].items]
    plan.items[1].tensor_data.properties.requires_grad = True
    received = send(plan)
    assert received.items[1].tensor_data.properties.requires_grad
    assert [*received.items[:1], *received.items[2:]] == [*before[:1], *before[2:]]


@pytest.mark.parametrize(
    "data", [None, b"raw", {"a": [1, 2]}, "text", ("a", 3)], ids=lambda data: type(data).__name__
)
def test_what_users_attach_to_a_plan_arrives(data: Any) -> None:
    received = send(SavePlan([], planner_data=data, storage_data=data))
    assert received.planner_data == data
    assert received.storage_data == data


def test_a_plan_without_items_arrives_and_says_whether_it_is_usable() -> None:
    for usable in (True, False):
        received = send(SavePlan([], usable=usable))
        assert (len(received.items), received.usable) == (0, usable)


def test_ranks_with_the_same_names_share_one_schema_on_the_coordinator() -> None:
    planners = [DefaultSavePlanner() for _ in range(2)]
    messages = []
    for planner in planners:
        planner.set_up_planner({"w": torch.ones(2), "v": 1})
        messages.append(encode_save_plan(planner.create_local_plan()))
    first, second = decode_save_plans(messages)
    assert first.items.base.schema is second.items.base.schema
    assert first.planner_data is second.planner_data


# Answers


def test_an_answer_says_which_items_stay_and_where_they_are_in_the_metadata() -> None:
    local = local_plans()
    received = decode_save_plans([encode_save_plan(plan) for plan in local])
    answers, _ = DefaultSavePlanner().create_global_plan(received)
    arrived = [
        decode_answer(encode_answer(answer, got), sent)
        for answer, got, sent in zip(answers, received, local, strict=True)
    ]
    assert arrived == answers
    assert [[item.index.index for item in plan.items] for plan in arrived] == [
        [item.index.index for item in plan.items] for plan in answers
    ]
    assert sum(len(plan.items) for plan in arrived) < sum(len(plan.items) for plan in local)


def test_an_answer_takes_far_fewer_bytes_than_the_plan_that_it_answers() -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({f"layers.{n}.weight": torch.ones(n) for n in range(1000)})
    sent = send(planner.create_local_plan())
    (answer,), _ = planner.create_global_plan([sent])
    # A bit for whether an item stays, and its position in the metadata.
    assert len(encode_answer(answer, sent)) < 1000 / 8 + 64 < len(encode_save_plan(sent)) / 10


def test_an_answer_that_somebody_rebuilt_is_sent_in_full() -> None:
    sent = local_plans()[0]
    rebuilt = SavePlan([ODD_ITEMS[2], sent.items[0]], storage_data="mine")
    assert decode_answer(encode_answer(rebuilt, sent), sent) == rebuilt


def test_an_answer_whose_items_were_changed_in_place_arrives_changed() -> None:
    local = local_plans()
    received = decode_save_plans([encode_save_plan(plan) for plan in local])
    answers, _ = DefaultSavePlanner().create_global_plan(received)
    item = next(item for item in answers[0].items if item.tensor_data is not None)
    item.tensor_data.properties.dtype = torch.float16
    arrived = decode_answer(encode_answer(answers[0], received[0]), local[0])
    assert arrived == answers[0]
    assert torch.float16 in [
        item.tensor_data.properties.dtype for item in arrived.items if item.tensor_data
    ]


def test_an_answer_gives_a_rank_back_the_very_data_that_it_sent() -> None:
    sent = SavePlan([], planner_data=object(), storage_data=object())
    arrived = decode_answer(encode_answer(sent, sent), sent)
    assert arrived.planner_data is sent.planner_data
    assert arrived.storage_data is sent.storage_data


def test_an_answer_with_other_data_carries_it() -> None:
    sent = SavePlan([], planner_data="sent", storage_data=None)
    answer = SavePlan([], planner_data=None, storage_data={"prefix": "__0_"}, usable=False)
    assert decode_answer(encode_answer(answer, sent), sent) == answer


# Load plans


def load_plan() -> LoadPlan:
    checkpoint = save_in_memory([DefaultSavePlanner() for _ in range(3)], state_dicts())
    target = {
        "sharded": torch.zeros(10, 2),
        "plain": torch.zeros(2, 3, 4),
        "scalar": torch.tensor(0),
        "empty": torch.zeros(0, 2),
        "nest": {"list": [torch.zeros(1), {"x": 0}]},
    }
    (plan,) = plan_load([DefaultLoadPlanner()], [target], checkpoint.metadata)
    return plan


def hints(plan: LoadPlan) -> list[tuple[int | None, int | None]]:
    return [(item.dest_index.index, item.storage_index.index) for item in plan.items]


def test_load_plans_arrive_as_they_were_sent() -> None:
    plan = load_plan()
    received = decode_load_plan(encode_load_plan(plan))
    assert received == plan
    assert hints(received) == hints(plan)
    assert len(received.items) == 7


def test_read_items_that_were_made_by_hand_arrive_with_every_field() -> None:
    zero = torch.Size((0,))
    items = [
        ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex("to", [4, 0], 1),
            torch.Size([1, 0]),
            MetadataIndex("from", [0, 8], 2),
            torch.Size([3, 1 << 35]),
            torch.Size([1, 2]),
        ),
        ReadItem(LoadItemType.BYTE_IO, MetadataIndex("v"), zero, MetadataIndex("u"), zero, zero),
    ]
    sent = LoadPlan(items, storage_data={"a": 1}, planner_data="mine")
    received = decode_load_plan(encode_load_plan(sent))
    assert received == sent
    assert hints(received) == [(1, 2), (None, None)]


def test_a_load_plan_without_items_arrives() -> None:
    assert decode_load_plan(encode_load_plan(LoadPlan([]))) == LoadPlan([])


# Pickle


def no_pickle(*_: Any, **__: Any) -> bytes:
    raise AssertionError("a plan of the default planners was pickled")


@pytest.mark.parametrize("options", [{}, {"flatten_state_dict": False}, {"enable_plan_caching": 1}])
def test_plans_of_the_default_planners_travel_without_pickle(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dumps", "loads", "dump", "load"):
        monkeypatch.setattr(pickle, name, no_pickle)
    planners = [DefaultSavePlanner(**options) for _ in range(3)]
    _, metadata = plan_save(planners, state_dicts())
    plan_save(planners, state_dicts())
    flatten = options.get("flatten_state_dict", True)
    loaders = [DefaultLoadPlanner(flatten_state_dict=flatten) for _ in range(3)]
    plans = plan_load(loaders, state_dicts(), metadata)
    assert all(len(plan.items) for plan in plans)
    with pytest.raises(AssertionError, match="was pickled"):
        encode_save_plan(SavePlan([], planner_data={"of": "a user"}))


def wide_plan(count: int = 2000) -> tuple[list[SavePlan], Metadata, LoadPlan]:
    state_dict = {f"layers.{n}.mlp.weight": torch.ones(3, 4) for n in range(count)}
    plans, metadata = plan_save([DefaultSavePlanner()], [state_dict])
    (load,) = plan_load([DefaultLoadPlanner()], [state_dict], metadata)
    return plans, metadata, load


class CountsItems(pickle.Pickler):
    """Notices if items are pickled one by one."""

    def reducer_override(self, obj: Any) -> Any:
        assert not isinstance(obj, WriteItem | ReadItem), "an item was pickled"
        return NotImplemented


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    CountsItems(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def test_save_plans_pickle_as_columns_and_come_back_equal() -> None:
    (plan,), _, _ = wide_plan()
    data = pickled(plan)
    assert pickle.loads(data) == plan
    assert len(data) < 40 * len(plan.items)


def test_load_plans_pickle_as_columns_and_come_back_equal() -> None:
    _, _, plan = wide_plan()
    data = pickled(plan)
    assert pickle.loads(data) == plan
    assert hints(pickle.loads(data)) == hints(plan)
    assert len(data) < 40 * len(plan.items)


def test_metadata_pickles_and_comes_back_equal() -> None:
    _, metadata = plan_save([DefaultSavePlanner() for _ in range(3)], state_dicts())
    metadata.version = "1"
    assert pickle.loads(pickle.dumps(metadata)) == metadata


def test_the_chunks_of_a_tensor_pickle_as_columns() -> None:
    def build(_: int) -> dict[str, Any]:
        return {"w": distributed(torch.zeros(64, 2), mesh_of(64), [Shard(0)])}

    _, metadata = plan_save([DefaultSavePlanner() for _ in range(64)], on_each_rank(64, build))
    chunks = metadata.state_dict_metadata["w"].chunks
    data = pickle.dumps(chunks)
    assert pickle.loads(data) == chunks
    assert len(data) < len(pickle.dumps(list(chunks))) / 5


def test_a_plan_whose_items_were_changed_pickles_the_change() -> None:
    (plan,), _, _ = wide_plan(3)
    plan.items[1].tensor_data.properties.dtype = torch.float16
    del plan.items[0]
    received = pickle.loads(pickle.dumps(plan))
    dtypes = [item.tensor_data.properties.dtype for item in received.items]
    assert dtypes == [torch.float16, torch.float32]


def test_a_deep_copy_of_a_plan_is_independent_of_it() -> None:
    (plan,), _, _ = wide_plan(2)
    duplicate = copy.deepcopy(plan)
    plan.items[0].tensor_data.properties.dtype = torch.float16
    assert duplicate.items[0].tensor_data.properties.dtype is torch.float32
    assert duplicate != plan

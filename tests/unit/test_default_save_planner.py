"""reshard.default_planner.DefaultSavePlanner: what is planned for each kind of value."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from reshard.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _create_default_local_metadata,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from reshard.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from reshard.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from support.fake_ranks import distributed, mesh_of, on_each_rank
from support.memory_storage import load_from_memory, plan_save, save_in_memory

QUANTIZED = [torch.qint8, torch.qint32, torch.quint8, torch.quint2x4, torch.quint4x2]
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - {*QUANTIZED},
    key=str,
)
quiet_about_experimental_dtypes = pytest.mark.filterwarnings("ignore::UserWarning")


def planners(count: int, **options: Any) -> list[DefaultSavePlanner]:
    return [DefaultSavePlanner(**options) for _ in range(count)]


def save_one(state_dict: dict[str, Any]) -> tuple[SavePlan, Any]:
    (plan,), metadata = plan_save(planners(1), [state_dict])
    return plan, metadata


def round_trip(tensor: torch.Tensor) -> torch.Tensor:
    checkpoint = save_in_memory(planners(1), [{"w": tensor}])
    state_dict = {"w": torch.zeros(tensor.shape, dtype=tensor.dtype)}
    load_from_memory(checkpoint, [DefaultLoadPlanner()], [state_dict])
    return state_dict["w"]


# Kinds of tensors


@quiet_about_experimental_dtypes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_dtype_is_planned_with_its_dtype_and_its_own_memory(
    dtype: torch.dtype,
) -> None:
    tensor = torch.empty(3, dtype=dtype)
    planner = DefaultSavePlanner()
    (plan,), metadata = plan_save([planner], [{"w": tensor}])
    (item,) = plan.items
    assert item.tensor_data.properties.dtype is dtype
    assert metadata.state_dict_metadata["w"].properties.dtype is dtype
    assert item.tensor_storage_size() == 3 * dtype.itemsize
    assert planner.resolve_data(item) is tensor


@quiet_about_experimental_dtypes
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_a_quantized_tensor_is_stored_as_a_value_since_its_bytes_alone_mean_nothing(
    dtype: torch.dtype,
) -> None:
    plan, metadata = save_one({"w": torch.empty(3, dtype=dtype)})
    assert plan.items[0].type is WriteItemType.BYTE_IO
    assert metadata.state_dict_metadata == {"w": BytesStorageMetadata()}


@quiet_about_experimental_dtypes
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64],
    ids=str,
)
def test_data_of_a_dtype_comes_back_bit_by_bit(dtype: torch.dtype) -> None:
    raw = torch.arange(8 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    assert torch.equal(round_trip(raw.view(dtype)).view(torch.uint8), raw)


def test_a_tensor_without_dimensions_is_one_chunk_without_offsets() -> None:
    plan, metadata = save_one({"w": torch.tensor(5.0)})
    (item,) = plan.items
    assert item.index == MetadataIndex("w", torch.Size([]))
    assert metadata.state_dict_metadata["w"].chunks == [
        ChunkStorageMetadata(torch.Size([]), torch.Size([]))
    ]
    assert round_trip(torch.tensor(5.0)).item() == 5


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
def test_a_tensor_without_elements_keeps_its_shape(shape: tuple[int, ...]) -> None:
    plan, metadata = save_one({"w": torch.empty(shape)})
    assert len(plan.items) == 1
    assert metadata.state_dict_metadata["w"].size == torch.Size(shape)
    assert round_trip(torch.empty(shape)).shape == shape


def test_a_tensor_without_elements_may_be_on_all_ranks() -> None:
    checkpoint = save_in_memory(planners(3), [{"w": torch.empty(0, 2)}] * 3)
    assert len(checkpoint.chunks) == 1


BASE = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE.t(),
        BASE[:, ::2],
        BASE[1:3, 2:5],
        BASE[0, 0].expand(3, 2),
        BASE.reshape(2, 2, 3, 2).contiguous(memory_format=torch.channels_last),
        torch.nn.Parameter(BASE),
        torch.nn.Parameter(BASE)[1],
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    ],
    ids=[
        "transposed",
        "strided",
        "window",
        "expanded",
        "channels_last",
        "parameter",
        "view_of_parameter",
        "conjugate",
        "negated",
    ],
)
def test_what_is_stored_are_the_values_whatever_the_memory_looks_like(tensor: torch.Tensor) -> None:
    assert torch.equal(round_trip(tensor), tensor)


def test_a_parameter_is_recorded_as_one_that_requires_grad() -> None:
    _, metadata = save_one({"p": torch.nn.Parameter(torch.ones(1)), "b": torch.ones(1)})
    entries = metadata.state_dict_metadata
    assert [entries[name].properties.requires_grad for name in "pb"] == [True, False]


def test_a_sparse_tensor_is_stored_as_a_value() -> None:
    plan, metadata = save_one({"w": torch.eye(2).to_sparse()})
    assert plan.items[0].type is WriteItemType.BYTE_IO
    assert metadata.state_dict_metadata == {"w": BytesStorageMetadata()}


# Values and names


def test_values_are_written_as_bytes_that_the_load_planner_reads() -> None:
    planner = DefaultSavePlanner()
    (plan,), metadata = plan_save([planner], [{"a": {"step": 3}, "b": [1, "x"]}])
    assert metadata.state_dict_metadata == {
        "a.step": BytesStorageMetadata(),
        "b": BytesStorageMetadata(),
    }
    loaded: dict[str, Any] = {"a": {"step": 0}, "b": []}
    reader = DefaultLoadPlanner()
    reader.set_up_planner(loaded, metadata)
    for written, read in zip(plan.items, reader.create_local_plan().items, strict=True):
        data = planner.resolve_data(written)
        assert isinstance(data, io.BytesIO)
        reader.load_bytes(read, io.BytesIO(data.getvalue()))
    assert loaded == {"a": {"step": 3}, "b": [1, "x"]}


def test_metadata_keeps_how_the_names_of_all_ranks_nest() -> None:
    _, metadata = plan_save(planners(2), [{"a": {"b": 1}}, {"a": {"c": [torch.ones(1)]}}])
    assert metadata.planner_data == {"a.b": ("a", "b"), "a.c.0": ("a", "c", 0)}


def test_without_flattening_a_nested_dict_is_one_value() -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    (plan,), metadata = plan_save([planner], [{"a": {"b": torch.ones(1)}, "w": torch.ones(1)}])
    assert [item.index.fqn for item in plan.items] == ["a", "w"]
    assert metadata.planner_data is None


def test_without_flattening_a_key_that_is_not_a_string_is_refused() -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({7: torch.ones(1)})
    with pytest.raises(TypeError, match="key 7 of type int; names are strings"):
        planner.create_local_plan()


def test_the_argument_that_has_no_effect_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="reshard"):
        DefaultSavePlanner(dedup_replicated_tensors=True)
    assert "dedup_replicated_tensors has no effect" in caplog.text
    caplog.clear()
    DefaultSavePlanner()
    assert not caplog.text


# Replicas


def test_replicas_are_written_once_and_spread_over_the_ranks_by_bytes() -> None:
    state_dict = {f"w{n}": torch.ones(100) for n in range(8)} | {"big": torch.ones(800)}
    checkpoint = save_in_memory(planners(2), [state_dict] * 2)
    assert len(checkpoint.chunks) == 9
    load = [0, 0]
    for index, rank in checkpoint.written_by.items():
        load[rank] += state_dict[index.fqn].numel()
    assert load == [800, 800]


def test_replicas_go_to_the_lowest_rank_if_that_is_asked_for() -> None:
    checkpoint = save_in_memory(
        planners(3, dedup_save_to_lowest_rank=True),
        [{"b": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1)}],
    )
    owners = {index.fqn: rank for index, rank in checkpoint.written_by.items()}
    assert owners == {"b": 0, "a": 1}


def test_shards_that_some_ranks_replicate_are_written_once_each() -> None:
    def build(_: int) -> dict[str, Any]:
        return {"w": distributed(torch.arange(6.0), mesh_of(2, 2), [Replicate(), Shard(0)])}

    checkpoint = save_in_memory(planners(4), on_each_rank(4, build))
    assert sorted(index.offset[0] for index in checkpoint.chunks) == [0, 3]
    chunks = checkpoint.metadata.state_dict_metadata["w"].chunks
    assert [(chunk.offsets[0], chunk.sizes[0]) for chunk in chunks] == [(0, 3), (3, 3)]


def test_items_of_the_final_plan_know_their_place_in_the_list_of_chunks() -> None:
    def build(_: int) -> dict[str, Any]:
        return {"v": 1, "w": distributed(torch.arange(8.0), mesh_of(4), [Shard(0)])}

    plans, metadata = plan_save(planners(4), on_each_rank(4, build))
    chunks = metadata.state_dict_metadata["w"].chunks
    items = [item for plan in plans for item in plan.items if item.index.fqn == "w"]
    assert sorted(item.index.index for item in items) == [0, 1, 2, 3]
    assert all(chunks[item.index.index] == item.tensor_data.chunk for item in items)


# Tied tensors


def tied(**extra: Any) -> dict[str, Any]:
    weight = torch.arange(4.0)
    return {"embed": weight, "head": weight, **extra}


def test_tied_tensors_are_written_once_and_restored_to_both_names() -> None:
    checkpoint = save_in_memory(planners(2), [tied() for _ in range(2)])
    assert checkpoint.written_names == ["embed"]
    entries = checkpoint.metadata.state_dict_metadata
    assert (entries["embed"].alias_of, entries["head"].alias_of) == (None, "embed")
    assert entries["head"].chunks == entries["embed"].chunks
    loaded = {"embed": torch.zeros(4), "head": torch.zeros(4)}
    load_from_memory(checkpoint, [DefaultLoadPlanner()], [loaded])
    assert loaded["embed"].tolist() == loaded["head"].tolist() == [0, 1, 2, 3]


def test_tied_tensors_can_be_loaded_by_the_name_that_was_not_written() -> None:
    checkpoint = save_in_memory(planners(1), [tied()])
    loaded = {"head": torch.zeros(4)}
    load_from_memory(checkpoint, [DefaultLoadPlanner()], [loaded])
    assert loaded["head"].tolist() == [0, 1, 2, 3]


def test_three_names_of_one_memory_are_written_once() -> None:
    state_dict = tied()
    state_dict["third"] = state_dict["embed"]
    assert save_in_memory(planners(2), [state_dict] * 2).written_names == ["embed"]


def test_tied_dtensors_are_written_once_and_can_be_loaded_in_another_layout() -> None:
    def build(_: int) -> dict[str, Any]:
        weight = distributed(torch.arange(6.0), mesh_of(2), [Shard(0)])
        return {"embed": weight, "head": weight}

    checkpoint = save_in_memory(planners(2), on_each_rank(2, build))
    assert checkpoint.written_names == ["embed"]
    loaded = {"head": torch.zeros(6)}
    load_from_memory(checkpoint, [DefaultLoadPlanner()], [loaded])
    assert loaded["head"].tolist() == [0, 1, 2, 3, 4, 5]


def test_tied_dtensors_are_written_once_also_when_a_rank_holds_nothing_of_them() -> None:
    def build(_: int) -> dict[str, Any]:
        weight = distributed(torch.arange(3.0), mesh_of(4), [Shard(0)])
        return {"embed": weight, "head": weight}

    assert save_in_memory(planners(4), on_each_rank(4, build)).written_names == ["embed"]


def test_names_are_not_merged_when_one_memory_is_a_part_of_different_tensors() -> None:
    def build(_: int) -> dict[str, Any]:
        local, mesh = torch.arange(2.0), mesh_of(2)
        return {
            "replica": DTensor.from_local(local, mesh, [Replicate()], run_check=False),
            "shard": DTensor.from_local(local, mesh, [Shard(0)], run_check=False),
        }

    checkpoint = save_in_memory(planners(2), on_each_rank(2, build))
    loaded = {"replica": torch.zeros(2), "shard": torch.zeros(4)}
    load_from_memory(checkpoint, [DefaultLoadPlanner()], [loaded])
    assert loaded["replica"].tolist() == [0, 1]
    assert loaded["shard"].tolist() == [0, 1, 0, 1]


def test_names_are_not_merged_when_only_some_ranks_tie_them() -> None:
    apart = {"embed": torch.arange(4.0), "head": torch.arange(4.0)}
    checkpoint = save_in_memory(planners(2), [tied(), apart])
    assert checkpoint.written_names == ["embed", "head"]
    assert checkpoint.metadata.state_dict_metadata["head"].alias_of is None


def test_names_are_not_merged_when_ranks_tie_them_to_different_names() -> None:
    a, b = torch.arange(4.0), torch.arange(4.0)
    checkpoint = save_in_memory(planners(2), [{"a": a, "b": b, "c": a}, {"a": a, "b": b, "c": b}])
    assert checkpoint.written_names == ["a", "b", "c"]


MEMORY = torch.arange(8.0)
COMPLEX = torch.tensor([1 + 2j, 3 - 1j])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (MEMORY[:4], MEMORY[2:6]),
        (MEMORY[:4], MEMORY[:6]),
        (MEMORY[:4], MEMORY[:8:2]),
        (MEMORY.view(2, 4), MEMORY.view(4, 2)),
        (MEMORY.view(2, 4)[:, :2], MEMORY.view(4, 2)[:2]),
        (MEMORY[:4], MEMORY[:4].view(torch.int32)),
        (COMPLEX, COMPLEX.conj()),
        (COMPLEX.imag, COMPLEX.conj().imag),
    ],
    ids=[
        "overlap", "longer", "strided", "reshaped", "other_strides", "other_dtype", "conjugate",
        "negated",
    ],
)  # fmt: skip
def test_views_that_share_memory_but_differ_are_both_written(
    first: torch.Tensor, second: torch.Tensor
) -> None:
    checkpoint = save_in_memory(planners(1), [{"a": first, "b": second}])
    loaded = {"a": torch.zeros_like(first), "b": torch.zeros_like(second)}
    load_from_memory(checkpoint, [DefaultLoadPlanner()], [loaded])
    assert torch.equal(loaded["a"], first)
    assert torch.equal(loaded["b"], second)
    assert checkpoint.written_names == ["a", "b"]


def test_tensors_without_elements_are_never_taken_for_tied() -> None:
    checkpoint = save_in_memory(planners(1), [{"a": torch.empty(0), "b": torch.empty(0)}])
    assert checkpoint.written_names == ["a", "b"]


class Doubles(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        factor = 2 if write_item.index.fqn == "head" else 1
        return super().resolve_data(write_item) * factor


class LooksUp(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index) * (2 if index.fqn == "head" else 1)


class Transforms(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return super().transform_object(write_item, object) * (
            2 if write_item.index.fqn == "head" else 1
        )


@pytest.mark.parametrize("planner", [Doubles, LooksUp, Transforms])
def test_ties_are_not_looked_for_when_a_planner_may_write_something_else(
    planner: type[DefaultSavePlanner],
) -> None:
    checkpoint = save_in_memory([planner(), planner()], [tied() for _ in range(2)])
    assert checkpoint.written_names == ["embed", "head"]
    loaded = {"head": torch.zeros(4)}
    load_from_memory(checkpoint, [DefaultLoadPlanner()], [loaded])
    assert loaded["head"].tolist() == [0, 2, 4, 6]


def test_ties_are_kept_by_a_planner_that_only_looks_at_the_result() -> None:
    class Reports(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            self.count = len(new_plan.items)
            return super().finish_plan(new_plan)

    checkpoint = save_in_memory([Reports()], [tied()])
    assert checkpoint.written_names == ["embed"]


def test_ties_are_kept_by_a_planner_that_looks_at_the_items_of_its_local_plan() -> None:
    class Lists(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            self.names = [item.index.fqn for item in plan.items]
            return plan

    checkpoint = save_in_memory([Lists()], [tied()])
    assert checkpoint.written_names == ["embed"]


# The functions that custom planners build upon


def test_the_local_plan_of_a_function_offers_every_value_on_every_rank() -> None:
    state_dict = {"w": torch.ones(2, 3), "v": 1}
    for is_coordinator in (True, False):
        plan = create_default_local_save_plan(state_dict, is_coordinator)
        assert plan.items == [
            WriteItem(
                MetadataIndex("w", [0, 0]),
                WriteItemType.TENSOR,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3])),
                    TensorProperties(torch.float32),
                    torch.Size([2, 3]),
                ),
            ),
            WriteItem(MetadataIndex("v"), WriteItemType.BYTE_IO),
        ]


def shard(start: int, length: int, index: int | None = None) -> WriteItem:
    return WriteItem(
        MetadataIndex("w", [start], index),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size([start]), torch.Size([length])),
            TensorProperties(torch.float32),
            torch.Size([4]),
        ),
    )


def test_the_global_plan_of_a_function_lists_chunks_by_offset_and_numbers_the_items() -> None:
    plans, metadata = create_default_global_save_plan(
        [SavePlan([shard(2, 2)]), SavePlan([shard(0, 2)])]
    )
    assert metadata.state_dict_metadata == {
        "w": TensorStorageMetadata(
            TensorProperties(torch.float32),
            torch.Size([4]),
            [ChunkStorageMetadata(torch.Size([s]), torch.Size([2])) for s in (0, 2)],
        )
    }
    assert [plan.items[0].index.index for plan in plans] == [1, 0]


def test_the_global_plan_of_a_function_leaves_the_numbers_alone_if_told_to() -> None:
    local = [SavePlan([shard(2, 2, index=7)]), SavePlan([shard(0, 2)])]
    plans, _ = create_default_global_save_plan(local, rewrite_index_hints=False)
    assert [plan.items[0].index.index for plan in plans] == [7, None]


def test_local_metadata_is_that_of_a_save_by_one_rank() -> None:
    state_dict = {"w": torch.ones(2, 3), "v": 1}
    _, metadata = save_one(state_dict)
    described = _create_default_local_metadata(state_dict)
    assert described.state_dict_metadata == metadata.state_dict_metadata

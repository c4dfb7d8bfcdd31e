"""reshard.tensors.shards: what a rank holds of a DTensor, a ShardedTensor, a subclass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardMetadata
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner as torch_planner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from reshard.api import UnsupportedLayoutError
from reshard.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _create_default_local_metadata,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from reshard.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from reshard.planner import TensorWriteData, WriteItem, WriteItemType
from reshard.planner_helpers import _create_write_items
from reshard.tensors.shards import (
    DTensorReader,
    find_state_dict_object,
    local_shards,
    wanted_regions,
)
from reshard.utils import find_tensor_shard
from support.fake_ranks import as_rank, distributed, mesh_of, on_each_rank
from support.memory_storage import load_from_memory, save_in_memory

quiet_about_sharded_tensor = pytest.mark.filterwarnings("ignore::FutureWarning")
FULL = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)


def regions(value: torch.Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(shard.offsets, shard.sizes) for shard in local_shards("w", value)]


# DTensor


@pytest.mark.parametrize(
    "placements",
    [
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(0), Shard(0)),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (_StridedShard(1, split_factor=3), Replicate()),
    ],
    ids=str,
)
def test_shards_of_a_dtensor_are_the_slices_of_the_whole(placements: tuple[Any, ...]) -> None:
    def held(_: int) -> torch.Tensor:
        count = torch.zeros_like(FULL)
        tensor = distributed(FULL, mesh_of(2, 3), placements)
        for shard in local_shards("w", tensor):
            box = tuple(slice(o, o + s) for o, s in zip(shard.offsets, shard.sizes, strict=True))
            assert torch.equal(shard.tensor, FULL[box])
            assert shard.tensor.untyped_storage()._cdata == (
                tensor.to_local().untyped_storage()._cdata
            )
            count[box] += 1
        return count

    copies = 6
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, Replicate):
            copies //= (2, 3)[mesh_dim]
    assert (sum(on_each_rank(6, held)) == copies).all()


def test_the_last_ranks_of_an_uneven_dtensor_hold_little_or_nothing() -> None:
    found = on_each_rank(
        4, lambda _: regions(distributed(torch.arange(5.0), mesh_of(4), [Shard(0)]))
    )
    assert found == [[((0,), (2,))], [((2,), (2,))], [((4,), (1,))], [((5,), (0,))]]


def test_an_empty_shard_is_planned_but_leaves_no_chunk_of_its_own_data() -> None:
    def build(_: int) -> dict[str, Any]:
        return {"w": distributed(torch.arange(3.0), mesh_of(4), [Shard(0)])}

    state_dicts = on_each_rank(4, build)
    checkpoint = save_in_memory([DefaultSavePlanner() for _ in state_dicts], state_dicts)
    loaded = {"w": torch.zeros(3)}
    load_from_memory(checkpoint, [DefaultLoadPlanner()], [loaded])
    assert loaded["w"].tolist() == [0, 1, 2]


def test_a_dtensor_with_zero_elements_is_planned_on_every_rank() -> None:
    def build(_: int) -> list[Any]:
        return regions(distributed(torch.empty(0, 3), mesh_of(2), [Shard(0)]))

    assert on_each_rank(2, build) == [[((0, 0), (0, 3))]] * 2


def test_a_rank_outside_of_the_mesh_has_no_shards() -> None:
    with as_rank(3, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        assert regions(tensor) == []
        assert len(create_default_local_save_plan({"w": tensor}, False).items) == 0


def test_a_rank_outside_of_the_mesh_reads_nothing() -> None:
    checkpoint = save_in_memory([DefaultSavePlanner()], [{"w": torch.ones(4)}])
    with as_rank(3, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        plan = create_default_local_load_plan({"w": tensor}, checkpoint.metadata)
    assert len(plan.items) == 0


def partial(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Partial()], run_check=False)


def test_saving_a_partial_dtensor_is_refused_by_name() -> None:
    with as_rank(0, 4):
        with pytest.raises(UnsupportedLayoutError, match=r"Call redistribute\(\)") as raised:
            create_default_local_save_plan({"layer.grad": partial(mesh_of(2, 2))}, True)
        assert "'layer.grad' has the placement P" in str(raised.value)
        assert "mesh dimension 1" in str(raised.value)


def test_loading_into_a_partial_dtensor_is_refused_by_name() -> None:
    checkpoint = save_in_memory([DefaultSavePlanner()], [{"layer.grad": torch.ones(4, 2)}])
    with as_rank(0, 4), pytest.raises(UnsupportedLayoutError, match=r"'layer\.grad'"):
        create_default_local_load_plan({"layer.grad": partial(mesh_of(2, 2))}, checkpoint.metadata)


def test_a_local_shape_that_contradicts_the_placements_is_refused_with_both_shapes() -> None:
    with as_rank(1, 2):
        # Without `shape`, torch believes that all shards are as large as this one.
        tensor = DTensor.from_local(
            torch.ones(1, 4), mesh_of(2), [Shard(0)], run_check=False, shape=(6, 4), stride=(4, 1)
        )
        with pytest.raises(UnsupportedLayoutError) as raised:
            create_default_local_save_plan({"layer.weight": tensor}, False)
    message = str(raised.value)
    assert "'layer.weight': the local tensor has shape (1, 4)" in message
    assert "give this rank (3, 4) of (6, 4)" in message
    assert "Pass `shape` and `stride` to DTensor.from_local" in message


def test_the_shard_at_an_offset_is_found_in_a_dtensor() -> None:
    with as_rank(1, 2):
        tensor = distributed(torch.arange(8.0), mesh_of(2), [_StridedShard(0, split_factor=2)])
        found = [find_tensor_shard(tensor, MetadataIndex("w", [start])) for start in (2, 6)]
        assert [shard.tolist() for shard in found] == [[2, 3], [6, 7]]
        with pytest.raises(
            ValueError, match=r"Could not find shard of 'w' at \(3,\).*\(2,\), \(6,\)"
        ):
            find_tensor_shard(tensor, MetadataIndex("w", [3]))
        with pytest.raises(
            ValueError, match="DTensor with 2 shards here, and no offset was provided"
        ):
            find_tensor_shard(tensor, MetadataIndex("w"))


def test_the_only_shard_of_a_dtensor_is_found_without_an_offset() -> None:
    with as_rank(1, 2):
        tensor = distributed(torch.arange(8.0), mesh_of(2), [Shard(0)])
        assert find_tensor_shard(tensor, MetadataIndex("w")).tolist() == [4, 5, 6, 7]


# Plain values


def test_a_plain_tensor_is_one_shard_with_its_own_memory() -> None:
    (shard,) = local_shards("w", FULL)
    assert (shard.offsets, shard.sizes) == ((0, 0), (7, 5))
    assert shard.tensor is FULL


def test_objects_of_a_state_dict_are_found_by_index() -> None:
    state_dict = {"w": FULL, "v": [1]}
    assert find_state_dict_object(state_dict, MetadataIndex("w", [0, 0])) is FULL
    assert find_state_dict_object(state_dict, MetadataIndex("v")) is state_dict["v"]
    for index, message in [
        (MetadataIndex("x"), "there is no FQN 'x' in the state dict"),
        (
            MetadataIndex("w", [1, 0]),
            r"'w' is one whole tensor here, not a ShardedTensor .*no shard at \(1, 0\)",
        ),
        (MetadataIndex("v", [0]), r"'v' is a list, not a ShardedTensor .*no part at \(0,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            find_state_dict_object(state_dict, index)


# ShardedTensor


def over_ranks(world_size: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(world_size)])


def shard_at(offsets: list[int], tensor: torch.Tensor, rank: int = 0) -> LocalShard:
    return LocalShard(tensor, ShardMetadata(offsets, [*tensor.size()], f"rank:{rank}/cpu"))


@quiet_about_sharded_tensor
def test_each_rank_holds_its_shards_of_a_sharded_tensor() -> None:
    found = on_each_rank(2, lambda _: regions(sharded_tensor.ones(over_ranks(2), 5, 3)))
    assert found == [[((0, 0), (3, 3))], [((3, 0), (2, 3))]]


@quiet_about_sharded_tensor
def test_a_sharded_tensor_is_saved_by_all_and_loaded_by_one() -> None:
    def build(rank: int) -> dict[str, Any]:
        tensor = sharded_tensor.zeros(over_ranks(2), 5, 3)
        tensor.local_shards()[0].tensor.fill_(rank)
        return {"w": tensor}

    state_dicts = on_each_rank(2, build)
    checkpoint = save_in_memory([DefaultSavePlanner() for _ in range(2)], state_dicts)
    loaded = {"w": torch.full((5, 3), -1.0)}
    load_from_memory(checkpoint, [DefaultLoadPlanner()], [loaded])
    assert loaded["w"][:, 0].tolist() == [0, 0, 0, 1, 1]


@quiet_about_sharded_tensor
def test_a_rank_with_several_shards_of_a_sharded_tensor_fills_each() -> None:
    checkpoint = save_in_memory([DefaultSavePlanner()], [{"w": torch.arange(6.0)}])
    with as_rank(0, 1):
        shards = [shard_at([0], torch.zeros(2)), shard_at([2], torch.zeros(4))]
        state_dict = {"w": sharded_tensor.init_from_local_shards(shards, 6)}
        load_from_memory(checkpoint, [DefaultLoadPlanner()], [state_dict])
    assert [shard.tensor.tolist() for shard in shards] == [[0, 1], [2, 3, 4, 5]]


@quiet_about_sharded_tensor
def test_sharded_tensors_nested_in_one_another_are_resolved_to_their_memory() -> None:
    with as_rank(0, 1):
        memory = [torch.full((2, 2), 1.0), torch.full((2, 3), 2.0)]
        inner = sharded_tensor.init_from_local_shards(
            [shard_at([0, 0], memory[0]), shard_at([0, 2], memory[1])], 2, 5
        )
        first = shard_at([0, 0], torch.zeros(2, 5))
        outer = sharded_tensor.init_from_local_shards([first, shard_at([2, 0], inner)], 4, 5)
        shards = list(local_shards("w", outer))
        state_dict = {"w": outer}
        found = find_state_dict_object(state_dict, MetadataIndex("w", [2, 2]))
    assert [(shard.offsets, shard.sizes) for shard in shards] == [
        ((0, 0), (2, 5)),
        ((2, 0), (2, 2)),
        ((2, 2), (2, 3)),
    ]
    assert [shard.tensor.data_ptr() for shard in shards[1:]] == [m.data_ptr() for m in memory]
    assert found.data_ptr() == memory[1].data_ptr()


@quiet_about_sharded_tensor
def test_local_metadata_knows_the_shards_of_the_other_ranks() -> None:
    with as_rank(1, 2):
        metadata = _create_default_local_metadata({"w": sharded_tensor.ones(over_ranks(2), 5, 3)})
    chunks = metadata.state_dict_metadata["w"].chunks
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks] == [
        ((0, 0), (3, 3)),
        ((3, 0), (2, 3)),
    ]


@quiet_about_sharded_tensor
def test_a_sharded_tensor_without_local_shards_is_neither_written_nor_read() -> None:
    checkpoint = save_in_memory([DefaultSavePlanner()], [{"w": torch.ones(4)}])
    with as_rank(1, 2):
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
        tensor: ShardedTensor = sharded_tensor.ones(spec, 4)
        assert tensor.local_shards() == []
        assert len(create_default_local_save_plan({"w": tensor}, False).items) == 0
        assert len(create_default_local_load_plan({"w": tensor}, checkpoint.metadata).items) == 0


@quiet_about_sharded_tensor
def test_a_rank_without_shards_of_a_sharded_tensor_can_take_part_in_a_load() -> None:
    checkpoint = save_in_memory([DefaultSavePlanner()], [{"w": torch.ones(4)}])
    with as_rank(1, 2):
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
        state_dict = {"w": sharded_tensor.ones(spec, 4)}
        (plan,) = load_from_memory(checkpoint, [DefaultLoadPlanner()], [state_dict])
    assert len(plan.items) == 0


# Subclasses that describe themselves, in the words of torch's own classes


class Pieces(torch.Tensor):
    """A tensor of which this rank holds some pieces, by where they begin."""

    @staticmethod
    def __new__(cls, pieces: dict[int, torch.Tensor], length: int) -> Pieces:
        return torch.Tensor._make_wrapper_subclass(cls, (length,), dtype=torch.float32)

    def __init__(self, pieces: dict[int, torch.Tensor], length: int) -> None:
        self.pieces, self.length = pieces, length

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Just enough for DTensor.from_local, which takes a view.
        return cls(args[0].pieces, args[0].length)

    def __create_write_items__(self, fqn: str, object: Any) -> list[torch_planner.WriteItem]:
        return [
            torch_planner.WriteItem(
                torch_metadata.MetadataIndex(fqn, chunk.offsets),
                torch_planner.WriteItemType.SHARD,
                tensor_data=torch_planner.TensorWriteData(
                    chunk,
                    torch_metadata.TensorProperties(torch.float32, requires_grad=True),
                    object.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[torch_metadata.ChunkStorageMetadata]:
        return [
            torch_metadata.ChunkStorageMetadata(torch.Size([start]), piece.size())
            for start, piece in self.pieces.items()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.pieces[index.offset[0]]


def test_write_items_of_a_subclass_are_turned_into_ours() -> None:
    (item,) = _create_write_items("w", Pieces({2: torch.ones(2)}, 4))
    assert item == WriteItem(
        MetadataIndex("w", [2]),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size([2]), torch.Size([2])),
            TensorProperties(torch.float32, requires_grad=True),
            torch.Size([4]),
        ),
    )
    assert type(item.index) is MetadataIndex
    assert type(item.tensor_data.chunk) is ChunkStorageMetadata
    assert type(item.tensor_data.properties) is TensorProperties


def test_values_that_a_subclass_writes_are_turned_into_ours() -> None:
    class Opaque:
        def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
            return [
                torch_planner.WriteItem(
                    torch_metadata.MetadataIndex(fqn),
                    torch_planner.WriteItemType.BYTE_IO,
                    bytes_io_data=torch_planner.BytesIOWriteData(17),
                )
            ]

    (item,) = create_default_local_save_plan({"v": Opaque()}, True).items
    assert (item.type, item.bytes_io_data.nbytes) == (WriteItemType.BYTE_IO, 17)


def test_chunks_of_a_subclass_are_turned_into_ours() -> None:
    pieces = Pieces({0: torch.ones(1), 3: torch.ones(1)}, 4)
    assert wanted_regions("w", pieces, DTensorReader()) == [((0,), (1,)), ((3,), (1,))]


def test_a_subclass_is_saved_from_its_pieces_and_loaded_into_others() -> None:
    state_dicts = [
        {"w": Pieces({0: torch.tensor([0.0]), 3: torch.tensor([3.0])}, 4)},
        {"w": Pieces({1: torch.tensor([1.0, 2.0])}, 4)},
    ]
    checkpoint = save_in_memory([DefaultSavePlanner() for _ in state_dicts], state_dicts)
    wanted = {0: torch.zeros(2), 2: torch.zeros(2)}
    load_from_memory(checkpoint, [DefaultLoadPlanner()], [{"w": Pieces(wanted, 4)}])
    assert [piece.tolist() for piece in wanted.values()] == [[0, 1], [2, 3]]


def test_a_dtensor_over_such_a_subclass_lets_it_speak() -> None:
    def build(rank: int) -> dict[str, Any]:
        start = 2 * rank
        local = Pieces({start: torch.arange(start, start + 2.0)}, 2)
        return {"w": DTensor.from_local(local, mesh_of(2), [Shard(0)], run_check=False)}

    state_dicts = on_each_rank(2, build)
    checkpoint = save_in_memory([DefaultSavePlanner() for _ in range(2)], state_dicts)
    wanted = [{1: torch.zeros(2)}, {0: torch.zeros(1), 3: torch.zeros(1)}]

    def target(rank: int) -> dict[str, Any]:
        local = Pieces(wanted[rank], 2)
        return {"w": DTensor.from_local(local, mesh_of(2), [Shard(0)], run_check=False)}

    load_from_memory(checkpoint, [DefaultLoadPlanner() for _ in range(2)], on_each_rank(2, target))
    assert [[piece.tolist() for piece in pieces.values()] for pieces in wanted] == [
        [[1, 2]],
        [[0], [3]],
    ]


def test_a_partial_dtensor_over_such_a_subclass_is_refused_by_name() -> None:
    with as_rank(0, 2):
        local = Pieces({0: torch.ones(2)}, 2)
        tensor = DTensor.from_local(local, mesh_of(2), [Partial()], run_check=False)
        with pytest.raises(UnsupportedLayoutError, match=r"'layer\.grad'"):
            create_default_local_save_plan({"layer.grad": tensor}, True)


def test_a_rank_outside_of_the_mesh_does_not_ask_such_a_subclass() -> None:
    checkpoint = save_in_memory([DefaultSavePlanner()], [{"w": torch.ones(4)}])
    with as_rank(3, 4):
        local = Pieces({0: torch.ones(2)}, 2)
        tensor = DTensor.from_local(local, DeviceMesh("cpu", [0, 1]), [Shard(0)], run_check=False)
        written = create_default_local_save_plan({"w": tensor}, False).items
        read = create_default_local_load_plan({"w": tensor}, checkpoint.metadata).items
    assert (len(written), len(read)) == (0, 0)

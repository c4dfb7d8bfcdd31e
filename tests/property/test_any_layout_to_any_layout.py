"""Whatever the layouts of the save and of the load: every element, once, to its place."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from reshard.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _validate_global_plan,
    create_default_global_save_plan,
)
from reshard.metadata import ChunkStorageMetadata, Metadata
from reshard.planner import SavePlan
from reshard.planner_helpers import create_read_items_for_chunk_list
from reshard.planning.columns import SHARD
from reshard.plans.global_plan import dedup_save_plans
from reshard.plans.write_items import RowBuilder, WriteItems
from reshard.tensors.regions import local_regions
from reshard.tensors.shards import DTensorReader
from reshard.tensors.torch_versions import cuts_strided_shards_at_once
from support.fake_ranks import as_rank, distributed, mesh_of, on_each_rank
from support.layouts import Array, Layout, Split, layouts, meshes, shapes

Place = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A tensor, how it is laid out when it is saved, and how when it is loaded."""

    shape: tuple[int, ...]
    saved: Layout
    loaded: Layout

    @property
    def whole(self) -> Array:
        return np.arange(1, math.prod(self.shape) + 1, dtype=np.int64).reshape(self.shape)


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, Case]:
    """One to three tensors of different shapes, saved on one mesh and loaded on another."""
    save_mesh, load_mesh = draw(meshes()), draw(meshes())
    cases = {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(shapes())
        cases[f"layer.{number}"] = Case(
            shape, draw(layouts(shape, save_mesh)), draw(layouts(shape, load_mesh))
        )
    return cases


def box_of(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def shards_on(case: Case, layout: Layout, rank: int, local: Array) -> dict[tuple[int, ...], Array]:
    """The regions that the planner gives to `rank`, as views of its local memory."""
    regions = local_regions(case.shape, layout.cuts(rank))
    return {
        region.offsets: local[(*box_of(region.local_offsets, region.sizes), ...)]
        for region in regions
    }


def offer(cases: dict[str, Case], rank: int) -> SavePlan:
    """The local plan of one rank."""
    builder = RowBuilder()
    for fqn, case in cases.items():
        for region in local_regions(case.shape, case.saved.cuts(rank)):
            builder.add_region(fqn, SHARD, torch.int64, 0, case.shape, region.offsets, region.sizes)
    return SavePlan(WriteItems(builder.build()))


def carry_out_save(cases: dict[str, Case], plans: list[SavePlan]) -> dict[Place, Array]:
    """What storage holds after every rank wrote its items."""
    stored: dict[Place, Array] = {}
    for rank, plan in enumerate(plans):
        locals_ = {fqn: case.saved.local_part(case.whole, rank) for fqn, case in cases.items()}
        for item in plan.items:
            fqn, case = item.index.fqn, cases[item.index.fqn]
            shards = shards_on(case, case.saved, rank, locals_[fqn])
            data = shards[tuple(item.tensor_data.chunk.offsets)]
            assert data.shape == tuple(item.tensor_data.chunk.sizes)
            assert (fqn, tuple(item.index.offset)) not in stored
            stored[fqn, tuple(item.index.offset)] = data.copy()
    return stored


def carry_out_load(
    fqn: str, case: Case, rank: int, metadata: Metadata, stored: dict[Place, Array]
) -> tuple[Array, Array]:
    """The local tensor of one rank after its reads, and how often each element was filled."""
    entry = metadata.state_dict_metadata[fqn]
    shape = case.loaded.local_part(case.whole, rank).shape
    local, filled = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    values = shards_on(case, case.loaded, rank, local)
    counts = shards_on(case, case.loaded, rank, filled)
    wanted = [
        ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
        for region in local_regions(case.shape, case.loaded.cuts(rank))
    ]
    for item in create_read_items_for_chunk_list(fqn, entry, wanted):
        assert entry.chunks[item.storage_index.index].offsets == item.storage_index.offset
        source = stored[item.storage_index.fqn, tuple(item.storage_index.offset)]
        place = tuple(item.dest_index.offset)
        into = box_of(item.dest_offsets, item.lengths)
        assert counts[place][into].shape == tuple(item.lengths), "a read reaches outside"
        values[place][into] = source[box_of(item.storage_offsets, item.lengths)]
        counts[place][into] += 1
    return local, filled


FSDP_OVER_TP = Layout((3, 4), (Split(0, split_factor=4), Split(0)))
SCALAR = Case((), Layout((2, 2), (None, None)), Layout((3,), (None,)))
UNEVEN = Case((27, 2), FSDP_OVER_TP, Layout((2, 3), (Split(1), Split(0))))
NOTHING = Case((0, 5), Layout((2, 2), (Split(0), Split(1))), Layout((3,), (Split(1),)))


@settings(deadline=None, max_examples=250)
@given(cases=state_dicts(), to_lowest_rank=st.booleans(), pickled=st.booleans())
@example(cases={"scalar": SCALAR}, to_lowest_rank=False, pickled=False)
@example(cases={"uneven": UNEVEN}, to_lowest_rank=True, pickled=False)
@example(cases={"nothing": NOTHING}, to_lowest_rank=False, pickled=True)
def test_saving_with_any_layout_and_loading_with_any_other_copies_every_element_once(
    cases: dict[str, Case], to_lowest_rank: bool, pickled: bool
) -> None:
    some = next(iter(cases.values()))
    offers = [offer(cases, rank) for rank in range(some.saved.world_size)]
    if pickled:
        offers = pickle.loads(pickle.dumps(offers))
    plans, metadata = create_default_global_save_plan(dedup_save_plans(offers, to_lowest_rank))
    assert _validate_global_plan(plans, metadata) == []

    stored = carry_out_save(cases, plans)
    for fqn, case in cases.items():
        written = [data.ravel() for (name, _), data in stored.items() if name == fqn]
        assert sorted(np.concatenate(written).tolist()) == case.whole.ravel().tolist()
        for rank in range(case.loaded.world_size):
            local, filled = carry_out_load(fqn, case, rank, metadata, stored)
            assert (filled == 1).all()
            np.testing.assert_array_equal(local, case.loaded.local_part(case.whole, rank))


@settings(deadline=None, max_examples=150)
@given(data=st.data(), shape=shapes(), mesh=meshes())
def test_regions_say_where_each_local_element_lies_in_the_tensor(
    data: st.DataObject, shape: tuple[int, ...], mesh: tuple[int, ...]
) -> None:
    layout = data.draw(layouts(shape, mesh))
    whole = np.arange(math.prod(shape)).reshape(shape)
    for rank in range(layout.world_size):
        local = layout.local_part(whole, rank)
        regions = local_regions(shape, layout.cuts(rank))
        assert sum(math.prod(region.sizes) for region in regions) == local.size
        for region in regions:
            here = local[box_of(region.local_offsets, region.sizes)]
            np.testing.assert_array_equal(here, whole[box_of(region.offsets, region.sizes)])


def test_regions_of_tensor_parallelism_under_fsdp_follow_the_order_of_the_cuts() -> None:
    # TP cuts 27 rows into 7, 7, 7 and 6; FSDP cuts each of these again, into three.
    held = [local_regions((27,), FSDP_OVER_TP.cuts(rank), right_to_left=True) for rank in range(12)]
    found = {
        rank: [(*region.offsets, *region.sizes) for region in regions]
        for rank, regions in enumerate(held)
    }
    assert found[0] == [(0, 3)]
    assert found[4] == [(3, 3)]
    assert found[8] == [(6, 1)]
    assert found[10] == [(20, 1)]
    assert found[11] == [(25, 2)]


# Real DTensors


MESHES = [(1,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]
SHAPES = [(), (1,), (7,), (8, 4), (5, 6), (2, 1, 9), (0, 3), (3, 4, 5)]


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_regions_of_dtensors_are_those_that_torch_computes(mesh_shape: tuple[int, ...]) -> None:
    compared = 0
    for rank in range(math.prod(mesh_shape)):
        with as_rank(rank, math.prod(mesh_shape)):
            mesh, reader = mesh_of(*mesh_shape), DTensorReader()
            for shape in SHAPES:
                for number in range(4):
                    placements = [
                        Shard((number + dim) % len(shape)) if shape and number else Replicate()
                        for dim in range(len(mesh_shape))
                    ]
                    if number == 3:
                        # All mesh dimensions split the same dimension of the tensor.
                        placements = [
                            p if isinstance(p, Replicate) else Shard(0) for p in placements
                        ]
                    local_shape, offsets = compute_local_shape_and_global_offset(
                        shape, mesh, placements
                    )
                    full = torch.empty(shape)
                    tensor = DTensor.from_local(
                        torch.empty(local_shape),
                        mesh,
                        placements,
                        run_check=False,
                        shape=full.shape,
                        stride=full.stride(),
                    )
                    (region,) = reader.regions("w", tensor)
                    assert (region.offsets, region.sizes) == (offsets, local_shape)
                    compared += 1
    assert compared == math.prod(mesh_shape) * len(SHAPES) * 4


STRIDED_BY_FSDP = [
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 3), [_StridedShard(0, split_factor=3), Shard(0)]),
    ((2, 2, 2), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]),
]
STRIDED = [
    *STRIDED_BY_FSDP,
    ((3,), [_StridedShard(0, split_factor=2)]),
    ((2, 2), [_StridedShard(1, split_factor=3), Shard(0)]),
    ((2, 2, 2), [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2), [Shard(0), _StridedShard(0, split_factor=2)]),
]


@pytest.mark.parametrize("rows", [0, 1, 5, 8, 11, 12, 24], ids="{} rows".format)
@pytest.mark.parametrize(("mesh_shape", "placements"), STRIDED, ids=str)
def test_regions_of_strided_dtensors_match_the_data_that_torch_cuts(
    mesh_shape: tuple[int, ...], placements: list[Shard | Replicate], rows: int
) -> None:
    parts = math.prod(
        size for size, each in zip(mesh_shape, placements, strict=True) if each != Replicate()
    )
    is_fsdp = any(placements is each for _, each in STRIDED_BY_FSDP)
    if is_fsdp and rows % parts and cuts_strided_shards_at_once():
        pytest.skip(f"torch {torch.__version__} cuts uneven shards in another order than FSDP does")
    whole = torch.arange(rows * 3).reshape(rows, 3)
    for rank in range(math.prod(mesh_shape)):
        with as_rank(rank, math.prod(mesh_shape)):
            mesh = mesh_of(*mesh_shape)
            local = whole
            for placement, parts, index in zip(
                placements, mesh_shape, mesh.get_coordinate(), strict=True
            ):
                if not isinstance(placement, Replicate):
                    pieces, _ = placement._split_tensor(local, parts, with_padding=False)
                    local = pieces[index]
            tensor = DTensor.from_local(
                local,
                mesh,
                placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
            regions = DTensorReader().regions("w", tensor)
            assert sum(math.prod(region.sizes) for region in regions) == local.numel()
            for region in regions:
                here = local[box_of(region.local_offsets, region.sizes)]
                assert torch.equal(here, whole[box_of(region.offsets, region.sizes)])


PLACEMENTS = [
    ((4,), [Shard(0)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 3), [Replicate(), Shard(1)]),
    ((3, 2), [Shard(1), Shard(1)]),
    ((2, 2, 2), [Shard(2), Replicate(), Shard(0)]),
]


@pytest.mark.parametrize("loaded", PLACEMENTS, ids=str)
@pytest.mark.parametrize("saved", PLACEMENTS, ids=str)
def test_a_state_dict_of_dtensors_arrives_whole_on_another_mesh(saved, loaded) -> None:
    whole = torch.arange(7 * 5 * 3).reshape(7, 5, 3)
    planners = on_each_rank(math.prod(saved[0]), lambda rank: _plan_save(whole, *saved))
    plans, metadata = planners[0].create_global_plan([planner.plan for planner in planners])
    stored = {
        item.index: planner.resolve_data(item).clone()
        for planner, plan in zip(planners, plans, strict=True)
        for item in plan.items
    }
    assert sum(data.numel() for data in stored.values()) == whole.numel()

    for rank in range(math.prod(loaded[0])):
        with as_rank(rank, math.prod(loaded[0])):
            mesh = mesh_of(*loaded[0])
            expected = distributed(whole, mesh, loaded[1]).to_local()
            target = distributed(torch.full_like(whole, -1), mesh, loaded[1])
            planner = DefaultLoadPlanner()
            planner.set_up_planner({"block": {"w": target}}, metadata, rank == 0)
            for item in planner.create_local_plan().items:
                source = stored[item.storage_index][box_of(item.storage_offsets, item.lengths)]
                into = planner.resolve_tensor(item)
                assert (into == -1).all(), "an element is filled twice"
                into.copy_(source)
            assert torch.equal(target.to_local(), expected)


def _plan_save(
    whole: torch.Tensor, mesh_shape: tuple[int, ...], placements: list[Shard | Replicate]
) -> DefaultSavePlanner:
    planner = DefaultSavePlanner()
    state_dict = {"block": {"w": distributed(whole, mesh_of(*mesh_shape), placements)}}
    planner.set_up_planner(state_dict, None, is_coordinator=True)
    planner.create_local_plan()
    return planner

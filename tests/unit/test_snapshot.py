"""reshard.snapshots: copies of state dicts, down to who shares memory with whom."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardMetadata
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from reshard.api import StateDictError, UnsupportedLayoutError
from reshard.rank_values import PerRank, per_rank
from reshard.snapshots.rebuild import rebuild
from reshard.snapshots.survey import Layout, copy_moves, survey
from support.fake_ranks import as_rank, distributed, mesh_of
from support.mappings import View
from support.subclasses import Opaque, Scaled, Tagged

quiet_about_sharded_tensor = pytest.mark.filterwarnings("ignore::FutureWarning")
quiet_about_prototypes = pytest.mark.filterwarnings("ignore::UserWarning")


def snapshot(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of `state_dict` in memory of its own."""
    plan = survey(state_dict)
    layout = Layout(plan)
    layout.place(torch.full((layout.nbytes,), 255, dtype=torch.uint8), plan)
    copy_moves(layout.moves(plan))
    return rebuild(state_dict, plan, layout.copies)


def snapshot_of(value: Any) -> Any:
    return snapshot({"layer": {"w": value}})["layer"]["w"]


# Memory


def test_a_copy_does_not_change_with_the_original() -> None:
    original = torch.arange(6.0)
    copied = snapshot_of(original)
    original.zero_()
    assert copied.tolist() == [0, 1, 2, 3, 4, 5]


BASE = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "views",
    [
        lambda base: (base, base),
        lambda base: (base, base[1:]),
        lambda base: (base[:3], base[2:]),
        lambda base: (base, base.t()),
        lambda base: (base[:, ::2], base[:, ::4]),
        lambda base: (base[2], base[2].expand(3, 6)),
        lambda base: (base, base.view(torch.int32)),
        lambda base: (base.view(torch.uint8)[1:, 5:], base[1:]),
        lambda base: (base, torch._neg_view(base)),
        lambda base: (base[1:], base.as_strided((3, 3), (2, 1), 6)),
        lambda base: (base, torch.frombuffer(base.numpy(), dtype=torch.float64)),
        lambda base: (torch.view_as_complex(base.view(-1, 2)).conj(), base),
    ],
)
def test_a_write_to_a_tensor_is_seen_in_the_copy_of_those_that_overlap_with_it(views: Any) -> None:
    for writer in (0, 1):
        tensors = views(BASE.clone())
        twins = snapshot({"tensors": tensors})["tensors"]
        before = twins[1 - writer].clone()
        for pair in (tensors, twins):
            for end in (0, -1):
                pair[writer][(end,) * pair[writer].dim()].fill_(77)
        assert torch.equal(twins[0], tensors[0])
        assert torch.equal(twins[1], tensors[1])
        assert not torch.equal(twins[1 - writer], before)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BASE, BASE.clone()),
        (BASE[:2], BASE[2:]),
        (BASE[:, :3], BASE[:, 3:]),
        (BASE[:, ::2], BASE[:, 1::2]),
        (BASE[1:3, 2:4], BASE[1:3, 4:]),
    ],
)
def test_tensors_that_do_not_overlap_share_nothing_in_the_copy(
    first: torch.Tensor, second: torch.Tensor
) -> None:
    twins = snapshot({"first": first, "second": second})
    twins["first"].fill_(-1)
    assert torch.equal(twins["second"], second)


def test_tensors_that_only_a_third_connects_keep_their_distance() -> None:
    flat = torch.arange(30.0)
    twins = snapshot({"a": flat[:10], "c": flat[20:], "b": flat[5:25]})
    twins["b"].fill_(-1)
    assert twins["a"].tolist() == [0, 1, 2, 3, 4, -1, -1, -1, -1, -1]
    assert twins["c"].tolist() == [-1, -1, -1, -1, -1, 25, 26, 27, 28, 29]


def test_neighbours_are_not_taken_for_one() -> None:
    flat = torch.arange(8.0)
    assert survey({"a": flat[:4], "b": flat[4:], "empty": flat[2:2]}).groups == []
    assert survey({"a": flat[:5], "b": flat[4:], "empty": flat[2:2]}).groups == [(0, 1)]


def test_every_tensor_begins_where_its_elements_are_aligned() -> None:
    odd, block = torch.zeros(3, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    wide = block[16:].view(torch.complex128)
    twins = snapshot({"a": odd, "b": wide, "c": block[5:20], "d": wide + 1, "e": odd + 1})
    assert [t.data_ptr() % t.itemsize for t in twins.values()] == [0] * 5


def test_a_view_that_is_tied_to_no_other_is_copied_without_the_gaps() -> None:
    column = torch.arange(1000.0).reshape(100, 10)[:, 3]
    plan = survey({"column": column})
    assert Layout(plan).nbytes < 1000
    assert torch.equal(snapshot({"column": column})["column"], column)


def test_tied_tensors_at_odd_addresses_are_copied() -> None:
    data = bytearray(range(64))
    odd = torch.frombuffer(data, dtype=torch.float32, offset=1, count=8)
    twins = snapshot({"a": odd, "b": odd[2:]})
    assert torch.equal(twins["a"], odd)
    assert torch.equal(twins["b"], odd[2:])


def test_a_tensor_whose_memory_was_freed_is_refused_rather_than_read() -> None:
    # FSDP frees parameters like that. In a child, since it may not survive.
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        try:
            snapshot_of(freed)
        except UnsupportedLayoutError as error:
            os._exit(0 if "'layer.w'" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


# The form of a state dict


def test_state_dicts_have_one_form_if_shapes_types_and_ties_are_the_same() -> None:
    def form(*tensors: torch.Tensor) -> Any:
        return survey({"tensors": tensors, "step": len(tensors)}).form

    flat, other = torch.zeros(8), torch.ones(8, requires_grad=True)
    assert form(flat, torch.ones(3)) == form(other, torch.zeros(6)[::2])
    assert form(flat, flat[1:4]) == form(other, other[1:4])
    others = [
        form(flat, torch.ones(4)),
        form(flat, torch.ones(3, 1)),
        form(flat, torch.ones(3, dtype=torch.int32)),
        form(flat, flat[:3]),
        form(flat, flat[1:4]),
        form(flat, flat[:6:2]),
        form(flat),
    ]
    assert len({form(flat, torch.ones(3)), *others}) == 8


# Values that are not tensors


@dataclass
class Config:
    sizes: list[int]


Point = namedtuple("Point", "x y")


def test_containers_keep_their_types() -> None:
    value: Any = OrderedDict(
        counts=defaultdict(int, a=torch.ones(1)),
        pair=(torch.ones(1), [torch.ones(2), None]),
        point=Point(torch.ones(1), "y"),
        size=torch.Size([2, 3]),
        best=torch.arange(3.0).max(0),
    )
    twin = snapshot_of(value)
    assert type(twin) is OrderedDict
    assert list(twin) == list(value)
    assert twin["counts"].default_factory is int
    assert type(twin["pair"]) is tuple
    assert type(twin["pair"][1]) is list
    assert twin["point"] == Point(torch.ones(1), "y")
    assert type(twin["point"]) is Point
    assert type(twin["size"]) is torch.Size
    assert (type(twin["best"]), twin["best"].values.item()) == (torch.return_types.max, 2)
    assert all(twin[key] is not value[key] for key in value)


def test_a_container_in_several_places_is_copied_once() -> None:
    shared: Any = [torch.arange(3.0), [1]]
    for _ in range(60):
        shared = [shared, shared]
    state = {"deep": shared}
    plan = survey(state)
    assert len(plan.tensors) == 1
    copied = snapshot(state)["deep"]
    for _ in range(60):
        assert copied[0] is copied[1]
        copied = copied[0]
    assert copied[0].tolist() == [0, 1, 2]
    assert copied[0] is not plan.tensors[0]


def test_a_container_that_contains_itself_is_refused_by_its_path() -> None:
    loop: dict[str, Any] = {"w": torch.ones(1)}
    loop["again"] = loop
    with pytest.raises(StateDictError, match=r"at \['a'\]\['again'\] contains itself"):
        survey({"a": loop})


def test_a_mapping_that_cannot_be_refilled_becomes_a_dict() -> None:
    twin = snapshot_of(MappingProxyType({"w": torch.ones(2)}))
    assert type(twin) is dict
    assert twin["w"].tolist() == [1, 1]


def test_a_mapping_over_another_dict_is_copied_without_changing_that() -> None:
    weight = torch.ones(2)
    owner = {"w": weight}
    twin = snapshot_of(View(owner))
    assert owner["w"] is weight
    assert twin["w"].data_ptr() != weight.data_ptr()


class Named(list[Any]):
    """A list that is not made from its elements."""

    def __init__(self, name: str, elements: Any = ()) -> None:
        super().__init__(elements)
        self.name = name


class Twice(Point):
    """A named tuple that is not made from its fields."""

    def __new__(cls, x: Any) -> Twice:
        return super().__new__(cls, x, x)


def test_a_list_of_a_type_of_its_own_keeps_its_elements() -> None:
    assert [t.item() for t in snapshot_of(Named("n", [torch.ones(1), torch.zeros(1)]))] == [1, 0]


def test_a_named_tuple_with_a_constructor_of_its_own_is_copied() -> None:
    twin = snapshot_of(Twice(torch.ones(1)))
    assert (type(twin), twin.y.item()) == (Twice, 1)


def test_objects_are_copied_deeply() -> None:
    config = Config([1, 2])
    twin = snapshot_of(config)
    config.sizes.append(3)
    assert twin == Config([1, 2])


def test_an_object_that_cannot_be_copied_is_refused_by_its_path() -> None:
    with pytest.raises(UnsupportedLayoutError, match=r"'layer\.w\.1' is a lock that cannot be"):
        snapshot_of([1, threading.Lock()])


def test_a_mark_for_one_rank_stays_on_the_copy() -> None:
    inner = torch.ones(2)
    twin = snapshot_of(per_rank({"rng": inner}, "drop"))
    inner.zero_()
    assert type(twin) is PerRank
    assert (twin.on_resize, twin.value["rng"].tolist()) == ("drop", [1, 1])


# Kinds of tensors


def test_gradients_are_still_required_and_graphs_are_not_kept() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    (weight * 2).sum().backward()
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    for tensor, required in [(weight, True), (weight * 2, True), (frozen, False)]:
        twin = snapshot_of(tensor)
        assert (twin.requires_grad, twin.is_leaf, twin.grad) == (required, True, None)


def test_a_buffer_of_a_module_is_copied_as_a_tensor() -> None:
    twin = snapshot_of(torch.nn.Buffer(torch.ones(2)))
    assert (type(twin), twin.tolist()) == (torch.Tensor, [1, 1])


@pytest.mark.parametrize("kind", [torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer])
def test_a_tensor_without_a_shape_is_refused_by_its_path(kind: Any) -> None:
    with pytest.raises(UnsupportedLayoutError, match=r"'layer\.w' has no shape yet"):
        snapshot_of(kind())


def test_a_tensor_without_data_stays_one() -> None:
    twin = snapshot_of(torch.ones(2, 3, device="meta", dtype=torch.int16))
    assert (twin.device.type, twin.shape, twin.dtype) == ("meta", (2, 3), torch.int16)


@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse_coo,
        torch.Tensor.to_sparse_csr,
        lambda dense: torch.quantize_per_tensor(dense, 0.5, 1, torch.qint8),
    ],
)
@quiet_about_prototypes
def test_a_tensor_of_another_layout_is_copied_as_it_is(make: Any) -> None:
    original, zeros = make(torch.eye(3)), make(torch.zeros(3, 3))
    twin = snapshot_of(original)
    (original.copy_(zeros) if original.is_quantized else original.values().zero_())
    assert (twin.layout, twin.is_quantized) == (original.layout, original.is_quantized)
    for tensor, dense in [(twin, torch.eye(3)), (original, torch.zeros(3, 3))]:
        assert torch.equal(tensor.dequantize() if tensor.is_quantized else tensor.to_dense(), dense)


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.ones(2, device="meta")])
def test_gradients_are_still_required_of_tensors_without_plain_memory(tensor: Any) -> None:
    assert snapshot_of(tensor.detach().requires_grad_()).requires_grad


@quiet_about_prototypes
def test_a_jagged_tensor_is_copied() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    twin = snapshot_of(jagged)
    jagged.values().fill_(5)
    assert [part.tolist() for part in twin.unbind()] == [[1, 1], [0, 0, 0]]


@quiet_about_prototypes
def test_a_nested_tensor_of_the_old_kind_is_refused_by_its_path() -> None:
    with pytest.raises(UnsupportedLayoutError, match=r"layer\.w"):
        snapshot_of(torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]))


def test_a_tensor_that_is_still_being_gathered_is_waited_for() -> None:
    twin = snapshot_of(AsyncCollectiveTensor(torch.ones(3)))
    assert (type(twin), twin.tolist()) == (torch.Tensor, [1, 1, 1])


# Subclasses


def test_a_subclass_with_memory_keeps_its_type_and_its_attributes() -> None:
    tagged = torch.arange(3.0).as_subclass(Tagged)
    tagged.labels = ["a"]
    twin = snapshot_of(tagged)
    tagged.labels.append("b")
    tagged.zero_()
    assert type(twin) is Tagged
    assert (twin.tolist(), twin.labels) == ([0, 1, 2], ["a"])


def test_a_tensor_among_the_attributes_of_a_subclass_is_copied() -> None:
    tagged = torch.arange(3.0).as_subclass(Tagged)
    tagged.scale = torch.ones(1)
    twin = snapshot_of(tagged)
    tagged.scale.zero_()
    assert twin.scale.item() == 1


def test_the_copy_of_a_subclass_that_requires_gradients_is_a_leaf() -> None:
    twin = snapshot_of(torch.ones(3).as_subclass(Tagged).requires_grad_())
    assert twin.requires_grad
    assert twin.is_leaf


def test_a_subclass_that_says_what_it_consists_of_is_copied_part_by_part() -> None:
    inner, scale = torch.arange(6.0).reshape(2, 3), torch.ones(1)
    twins = snapshot({"w": Scaled(inner, scale, "kg"), "scale": scale})
    inner.zero_()
    assert type(twins["w"]) is Scaled
    assert twins["w"].inner.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (twins["w"].unit, twins["w"].shape) == ("kg", (2, 3))
    twins["scale"].fill_(7)
    assert twins["w"].scale.item() == 7


def test_a_subclass_whose_parts_begin_their_storages_is_copied() -> None:
    twin = snapshot_of(TwoTensor(torch.ones(2, 3), torch.zeros(2, 3)))
    assert type(twin) is TwoTensor
    assert (twin.a.sum().item(), twin.b.sum().item()) == (6, 0)


def test_gradients_are_still_required_of_a_subclass_that_was_taken_apart() -> None:
    parameter = torch.nn.Parameter(Scaled(torch.ones(2), torch.ones(1)))
    assert parameter.requires_grad
    assert snapshot_of(parameter).requires_grad


def test_a_subclass_has_the_strides_of_its_parts() -> None:
    twin = snapshot_of(Scaled(torch.ones(2, 3).t(), torch.ones(1)))
    assert twin.stride() == twin.inner.stride()


def test_a_subclass_that_does_not_say_what_it_consists_of_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedLayoutError, match=r"'layer\.w' is a Opaque, a tensor subclass"):
        snapshot_of(Opaque(torch.ones(2)))


# Sharded tensors


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_a_dtensor_is_copied_with_its_placement(placement: Any) -> None:
    with as_rank(0, 1):
        original = distributed(torch.arange(6.0).reshape(2, 3), mesh_of(1), [placement])
        tied = original.to_local()[1:]
        twins = snapshot({"w": torch.nn.Parameter(original), "tied": tied})
        twin = twins["w"]
        original.to_local().zero_()
        twins["tied"].fill_(9)
        assert type(twin) is DTensor
        assert twin.to_local().tolist() == [[0, 1, 2], [9, 9, 9]]
        assert (twin.placements, twin.device_mesh) == ((placement,), original.device_mesh)
        assert (twin.shape, twin.requires_grad, twin.is_leaf) == ((2, 3), True, True)


def test_a_dtensor_over_a_subclass_is_copied_part_by_part() -> None:
    with as_rank(0, 1):
        local = Scaled(torch.ones(2), torch.full((1,), 3.0), "kg")
        twin = snapshot_of(DTensor.from_local(local, mesh_of(1), [Shard(0)], run_check=False))
        local.scale.zero_()
        inner = twin._local_tensor
        assert (type(inner), inner.scale.item(), inner.unit) == (Scaled, 3, "kg")


def shard_at(offsets: list[int], tensor: torch.Tensor) -> LocalShard:
    return LocalShard(tensor, ShardMetadata(offsets, [*tensor.size()], "rank:0/cpu"))


@quiet_about_sharded_tensor
def test_a_sharded_tensor_is_copied_shard_by_shard() -> None:
    with as_rank(0, 1):
        shards = [shard_at([0], torch.ones(2)), shard_at([2], torch.arange(4.0))]
        twin = snapshot_of(sharded_tensor.init_from_local_shards(shards, 6))
        for shard in shards:
            shard.tensor.zero_()
        found = [(s.metadata.shard_offsets, s.tensor.tolist()) for s in twin.local_shards()]
        assert found == [([0], [1, 1]), ([2], [0, 1, 2, 3])]
        assert twin.size() == (6,)


@quiet_about_sharded_tensor
def test_a_sharded_tensor_without_shards_here_is_copied() -> None:
    with as_rank(1, 2):
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
        twin = snapshot_of(sharded_tensor.ones(spec, 4))
        assert (twin.local_shards(), twin.size()) == ([], (4,))


@quiet_about_sharded_tensor
def test_a_sharded_tensor_of_an_accelerator_is_copied() -> None:
    # In want of an accelerator, one that says that it is on one.
    with as_rank(0, 1):
        original = sharded_tensor.init_from_local_shards([shard_at([0], torch.ones(2))], 2)
        for metadata in [original.local_shards()[0].metadata, *original.metadata().shards_metadata]:
            metadata.placement._device = torch.device("cuda:0")
        (shard,) = snapshot_of(original).local_shards()
        assert (shard.tensor.tolist(), shard.tensor.device.type) == ([1, 1], "cpu")

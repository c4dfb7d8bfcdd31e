"""Tensor subclasses that consist of other tensors, such as optimizer state in 8 bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import reshard
from reshard.api import ShapeMismatchError, UnsupportedLayoutError
from reshard.state_dict_saver import AsyncCheckpointerType
from reshard.tensors.composites import KIND
from reshard.training import TrainState
from support.optimizers import Blockwise, Coded, like
from support.ranks import run_alone, run_ranks
from support.small_model import FORMS, losses, small_model
from support.subclasses import Blocks, Packed, Scaled
from support.whole import differences, stored


def even_model(seed: int) -> nn.Module:
    """A model of which every row is a whole number of blocks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 16, bias=False))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch = torch.linspace(-1, 1, 24).view(3, 8)
    for _ in range(2):
        (model(batch) - 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        momentum = optimizer.state[parameter]["momentum"]
        assert isinstance(momentum, DTensor) == isinstance(parameter, DTensor)
        if not isinstance(momentum, DTensor):
            assert isinstance(momentum, Blocks)
            found.append(momentum.values())
            continue
        local: Any = momentum.to_local()
        assert isinstance(local, Blocks)
        found.append(
            DTensor.from_local(
                local.values(),
                momentum.device_mesh,
                momentum.placements,
                run_check=False,
                shape=momentum.shape,
                stride=momentum.stride(),
            ).full_tensor()
        )
    return found


def save_in_blocks(box: Path, kind: type[Blocks] = Blocks) -> list[torch.Tensor]:
    model = even_model(0)
    optimizer = Blockwise(model.parameters(), kind=kind)
    train(model, optimizer)
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=box)
    return whole_momenta(model, optimizer)


def load_blocks(box: Path, fresh: bool, kind: type[Blocks] = Blocks) -> Any:
    """The momenta that were loaded, and whether training goes on from them."""
    model = even_model(1)
    optimizer = Blockwise(model.parameters(), kind=kind)
    if not fresh:
        train(model, optimizer)
    before = {p: optimizer.state[p].get("momentum") for p in model.parameters()}
    state = TrainState(model, optimizer)
    reshard.load({"train": state}, checkpoint_id=box)
    report = state.report.optimizer
    assert sorted(report.restored) == ["0.weight.momentum", "2.weight.momentum"]
    assert (report.missing, report.unexpected) == ([], [])
    if not fresh:
        assert all(optimizer.state[p]["momentum"] is before[p] for p in before), "not in place"
    found = whole_momenta(model, optimizer)
    train(model, optimizer)
    return found


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "in place"])
@pytest.mark.parametrize("saved_on", [1, 2, 4])
def test_state_in_8_bits_moves_between_layouts(saved_on: int, fresh: bool, tmp_path: Path) -> None:
    if saved_on == 1:
        saved = run_alone(save_in_blocks, tmp_path)
    else:
        saved = run_ranks(saved_on, save_in_blocks, tmp_path)[0]
    outcomes = [run_alone(load_blocks, tmp_path, fresh)]
    for loaded_on in (2, 4):
        outcomes += run_ranks(loaded_on, load_blocks, tmp_path, fresh)
    for loaded in outcomes:
        assert differences(loaded, saved) == []


def test_a_subclass_that_keeps_its_shape_moves_between_layouts(tmp_path: Path) -> None:
    saved = run_ranks(3, save_in_blocks, tmp_path, Packed)[0]
    for fresh in (True, False):
        for loaded in run_ranks(2, load_blocks, tmp_path, fresh, Packed):
            assert differences(loaded, saved) == []


SHAPES = {"w": (8, 4), "gate": (2, 16)}


def in_blocks_if_large(shape: tuple[int, ...], seed: float) -> DTensor:
    """A tensor cut by rows, whose shards are quantized where they are not too small for it."""
    values = torch.arange(math.prod(shape)).view(shape).sin() * seed
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = distribute_tensor(values, mesh, [Shard(0)])
    local = cut.to_local()
    made: Any = like(cut, Blocks.of(local) if local.numel() >= 16 else local)
    return made


def numbers_of(tensor: DTensor) -> list[Any]:
    """The kind of the shard of each rank, and all numbers."""
    local: Any = tensor.to_local()
    is_blocks = isinstance(local, Blocks)
    parts: list[Any] = [None] * dist.get_world_size()
    numbers = local.values() if is_blocks else local
    dist.all_gather_object(parts, (is_blocks, numbers.tolist()))
    return [[kind for kind, _ in parts], [row for _, rows in parts for row in rows]]


def save_or_load_by_size(box: Path, source: str) -> dict[str, Any]:
    seed = 0.0 if source else 1.0
    state = {name: in_blocks_if_large(shape, seed) for name, shape in SHAPES.items()}
    if source:
        reshard.load(state, checkpoint_id=box / source, strict="exact")
    else:
        reshard.save(state, checkpoint_id=box / str(dist.get_world_size()))
    return {name: numbers_of(tensor) for name, tensor in state.items()}


def test_shards_that_are_quantized_in_one_layout_only_move_between_layouts(tmp_path: Path) -> None:
    by_two = run_ranks(2, save_or_load_by_size, tmp_path, "")[0]
    by_four = run_ranks(4, save_or_load_by_size, tmp_path, "")[0]
    assert by_two["w"][0] == [True, True]
    assert by_four["w"][0] == [False] * 4
    assert by_four["gate"][0] == [True, True, False, False]
    on_four = run_ranks(4, save_or_load_by_size, tmp_path, "2")[0]
    assert on_four == {"w": [[False] * 4, by_two["w"][1]], "gate": by_four["gate"]}
    # What was saved plain is quantized as it would have been at once.
    assert run_ranks(2, save_or_load_by_size, tmp_path, "4")[0] == by_two
    read = reshard.read_state_dict(tmp_path / "4")
    assert read["gate"].keys() == {"0:1,0:16", "1:2,0:16", KIND}


def save_what_is_quantized_on_one_rank(box: Path) -> None:
    with pytest.raises(UnsupportedLayoutError, match="'w' consists of other tensors on some ranks"):
        reshard.save({"w": in_blocks_if_large((7, 4), 1.0)}, checkpoint_id=box / "refused")


def test_a_tensor_that_is_quantized_on_some_ranks_only_is_refused(tmp_path: Path) -> None:
    run_ranks(2, save_what_is_quantized_on_one_rank, tmp_path)


def coded(box: Path, form: str, source: str | None) -> Any:
    """A subclass around DTensors: its parts are sharded, not it."""
    model = FORMS[form](small_model(0 if source is None else 1))
    optimizer = Coded(model.parameters(), wrapped=True)
    state = {"train": TrainState(model, optimizer)}
    if source is None:
        losses(model, optimizer)
        reshard.save(state, checkpoint_id=box / form)
        return None
    reshard.load(state, checkpoint_id=box / source)
    assert type(optimizer.state[next(iter(model.parameters()))]["momentum"]) is Scaled
    reshard.save(state, checkpoint_id=box / f"{source} again")
    losses(model, optimizer)
    return differences(stored(box / source), stored(box / f"{source} again"))


def test_a_subclass_around_sharded_tensors_moves_between_meshes(tmp_path: Path) -> None:
    run_ranks(2, coded, tmp_path, "fsdp2", None)
    assert run_ranks(2, coded, tmp_path, "tp", "fsdp2") == [[], []]
    assert run_ranks(4, coded, tmp_path, "fsdp2", "fsdp2") == [[]] * 4


def save_in_background(box: Path) -> None:
    model = even_model(0)
    optimizer = Blockwise(model.parameters())
    train(model, optimizer)
    state = {"train": TrainState(model, optimizer)}
    mesh = init_device_mesh("cpu", (2,))
    inner = distribute_tensor(torch.arange(40.0).reshape(10, 4), mesh, [Shard(0)])
    state["around"] = Scaled(inner, torch.tensor(2.0), "u")  # type: ignore[assignment]
    reshard.save(state, checkpoint_id=box / "save")
    for kind in AsyncCheckpointerType:
        place = box / kind.value
        future = reshard.async_save(state, checkpoint_id=place, async_checkpointer_type=kind)
        future.result()


def test_shards_of_such_tensors_are_saved_in_the_background(tmp_path: Path) -> None:
    run_ranks(2, save_in_background, tmp_path)
    wanted = stored(tmp_path / "save")
    assert len(wanted["optimizer"]["state"]["0.weight"]["momentum"]) == 3
    for kind in AsyncCheckpointerType:
        assert differences(stored(tmp_path / kind.value), wanted) == []
        around = reshard.read_state_dict(tmp_path / kind.value, "around")["around"]
        assert around["0:10,0:4"]["inner"].flatten().tolist() == [*range(40)]


class Snapshots(torch.optim.SGD):
    """Keeps its parameters in 8 bits."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            self.state[parameter]["kept"] = like(parameter, Blocks.of(local.detach().clone()))


def save_in_columns(box: Path) -> None:
    model = nn.Linear(8, 8, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    optimizer = Snapshots(model.parameters())
    optimizer.step()
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=box)


def test_pieces_that_only_the_class_could_join_are_refused(tmp_path: Path) -> None:
    run_ranks(2, save_in_columns, tmp_path)
    model = nn.Linear(8, 8, bias=False)
    state = TrainState(model, Snapshots(model.parameters()), rng=False)
    with pytest.raises(reshard.CheckpointException, match=r"'weight\.kept', a .*Blocks, was saved"):
        reshard.load({"train": state}, checkpoint_id=tmp_path)
    reshard.load(
        {"train": state}, checkpoint_id=tmp_path, exclude=["*.kept", "*.rng.*"], strict="exact"
    )


def test_a_name_that_a_part_needs_must_be_free(tmp_path: Path) -> None:
    with pytest.raises(reshard.CheckpointException, match="which another value has: rename that"):
        reshard.save({"w": scaled(1.0), "w.__tensor__": 7}, checkpoint_id=tmp_path)


# In one process


def scaled(seed: float) -> Scaled:
    return Scaled(torch.full((2, 3), seed), torch.tensor(seed + 1), "m")


KINDS = [None, AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS]


@pytest.mark.parametrize("kind", KINDS, ids=["save", "thread", "process"])
def test_parts_are_stored_by_name_and_filled_in_place(
    kind: AsyncCheckpointerType | None, tmp_path: Path
) -> None:
    state = {"model": {"w": scaled(1.0), "plain": torch.ones(2)}}
    if kind is None:
        reshard.save(state, checkpoint_id=tmp_path)
    else:
        reshard.async_save(state, checkpoint_id=tmp_path, async_checkpointer_type=kind).result()
    read = reshard.read_state_dict(tmp_path)["model"]
    assert read["w"].keys() == {"0:2,0:3", KIND}
    target = scaled(5.0)
    inner = target.inner
    report = reshard.load({"model": {"w": target}}, checkpoint_id=tmp_path)
    assert target.inner is inner
    assert target.inner.tolist() == [[1.0] * 3] * 2
    assert (float(target.scale), target.unit) == (2.0, "m")
    assert (report.missing, report.unexpected) == ([], ["model.plain"])


def test_parts_may_have_parts(tmp_path: Path) -> None:
    def nested(seed: float) -> Scaled:
        return Scaled(scaled(seed), torch.tensor(seed))

    reshard.save({"w": nested(1.0)}, checkpoint_id=tmp_path)
    target = nested(7.0)
    reshard.load({"w": target}, checkpoint_id=tmp_path)
    inner: Any = target.inner
    assert inner.inner.tolist() == [[1.0] * 3] * 2
    assert (float(target.scale), float(inner.scale)) == (1.0, 2.0)


def test_another_kind_or_shape_is_refused_by_name(tmp_path: Path) -> None:
    reshard.save({"w": scaled(1.0), "p": torch.ones(2, 3)}, checkpoint_id=tmp_path)
    other = Scaled(torch.zeros(3, 3), torch.zeros(()))
    with pytest.raises(reshard.CheckpointException, match=r"'w' has shape \(3, 3\)"):
        reshard.load({"w": other}, checkpoint_id=tmp_path)
    with pytest.raises(reshard.CheckpointException, match="'p' was saved as one tensor, and a Sc"):
        reshard.load({"p": scaled(0.0)}, checkpoint_id=tmp_path)
    with pytest.raises(reshard.CheckpointException, match=r"'w' was saved as a .*Scaled, and a pl"):
        reshard.load({"w": torch.zeros(2, 3)}, checkpoint_id=tmp_path)


class Renamed(Scaled):
    """The same parts under the name of another class."""

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: str, size: Any, stride: Any) -> Renamed:
        return Renamed(parts["inner"], parts["scale"], context, stride)


def test_the_same_parts_of_another_class_are_refused(tmp_path: Path) -> None:
    reshard.save({"w": scaled(1.0), "z": torch.ones(2)}, checkpoint_id=tmp_path)
    target, plain = Renamed(torch.zeros(2, 3), torch.zeros(())), torch.zeros(2)
    with pytest.raises(reshard.CheckpointException, match=r"saved as a .*Scaled, but is a .*Re"):
        reshard.load({"w": target, "z": plain}, checkpoint_id=tmp_path)
    assert not target.inner.any()
    assert not plain.any()


def test_a_class_that_the_program_does_not_have_is_found_first(tmp_path: Path) -> None:
    model, other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    optimizer = Snapshots(model.parameters())
    optimizer.step()
    try:
        Blocks.__qualname__ = "Gone"
        reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    finally:
        Blocks.__qualname__ = "Blocks"
    before = other.weight.detach().clone()
    state = TrainState(other, Snapshots(other.parameters()))
    with pytest.raises(reshard.CheckpointException, match=r"is a .*Gone, a tensor subclass that"):
        reshard.load({"train": state}, checkpoint_id=tmp_path)
    assert torch.equal(other.weight, before)


def test_what_is_left_out_or_missing_stays_as_it_is(tmp_path: Path) -> None:
    reshard.save({"model": {"w": scaled(1.0)}}, checkpoint_id=tmp_path)
    state = {"model": {"w": scaled(5.0), "v": scaled(6.0)}}
    reshard.load(state, checkpoint_id=tmp_path, exclude=["*.w"], strict=False)
    assert float(state["model"]["w"].scale) == 6.0
    report = reshard.load(state, checkpoint_id=tmp_path, strict=False)
    assert report.missing == ["model.v"]
    assert [float(t.scale) for t in state["model"].values()] == [2.0, 7.0]
    with pytest.raises(reshard.CheckpointException, match=r"state_dict: model\.v"):
        reshard.load(state, checkpoint_id=tmp_path)


def load_what_cannot_be_copied(box: Path) -> str:
    """In another layout than it was saved in; why not, if nothing was changed."""
    mesh = init_device_mesh("cpu", (2,))
    local = Scaled(torch.zeros(1, 3), torch.zeros(()), "m")
    plain = torch.zeros(2)
    target = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size((2, 3)), stride=(3, 1)
    )
    with pytest.raises(reshard.CheckpointException) as caught:
        reshard.load({"w": target, "plain": plain}, checkpoint_id=box)
    assert not plain.any()
    assert not local.inner.any()
    reason, _ = caught.value.failures[dist.get_rank()]
    assert isinstance(reason, ShapeMismatchError)
    return str(reason)


def test_a_class_that_cannot_be_cut_is_refused_before_anything_changes(tmp_path: Path) -> None:
    reshard.save({"w": scaled(1.0), "plain": torch.ones(2)}, checkpoint_id=tmp_path)
    for reason in run_ranks(2, load_what_cannot_be_copied, tmp_path):
        assert "'w' was saved in another layout, and a Scaled cannot be cut for this one" in reason


def test_state_of_an_optimizer_may_have_keys_that_look_like_regions(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, fresh = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    kept = {"__tensor__": torch.ones(1), "0:4": {"x": torch.zeros(2)}, "all": 3}
    optimizer.state[model.bias]["kept"] = kept
    reshard.save({"train": TrainState(model, optimizer)}, checkpoint_id=tmp_path)
    reshard.load({"train": TrainState(other, fresh)}, checkpoint_id=tmp_path)
    assert differences(fresh.state[other.bias]["kept"], kept) == []

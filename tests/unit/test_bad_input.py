"""Bad input: the right class of error, the FQN, the ranks, and what to do about it."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

import reshard
from reshard.api import (
    CheckpointException,
    CoverageError,
    PlanError,
    ReplicaConflictError,
    StateDictError,
    UnsupportedLayoutError,
)
from reshard.default_planner import (
    DefaultSavePlanner,
    _validate_global_plan,
    create_default_global_save_plan,
)
from reshard.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from reshard.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from reshard.training import TrainState
from support.fake_ranks import as_rank, distributed, mesh_of, on_each_rank
from support.memory_storage import plan_save

FQN = "layers.3.weight"
VALUE = WriteItem(MetadataIndex(FQN), WriteItemType.BYTE_IO)


def shard(start: int, stop: int, total: int, dtype: torch.dtype = torch.float32) -> WriteItem:
    """Rows `start` to `stop` of a tensor of `total` rows."""
    chunk = ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([stop - start, 2]))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size([total, 2]))
    return WriteItem(MetadataIndex(FQN, [start, 0]), WriteItemType.SHARD, tensor_data=data)


def plan(*ranks: list[WriteItem]) -> Any:
    return DefaultSavePlanner().create_global_plan([SavePlan(items) for items in ranks])


@dataclass
class Case:
    ranks: list[list[WriteItem]]
    error: type[Exception]
    says: list[str]
    advice: str


# Rank 0 has nothing to do with it in each case: errors must name the ranks that have.
OTHER: list[WriteItem] = [WriteItem(MetadataIndex("other"), WriteItemType.BYTE_IO)]
CASES = {
    "out_of_bounds": Case(
        [OTHER, [shard(0, 2, 4)], [shard(2, 5, 4)]],
        CoverageError,
        ["rank 2 offers", "offsets [2, 0] with sizes [3, 2]", "outside of its shape [4, 2]"],
        "Correct the offsets",
    ),
    "negative_offset": Case(
        [OTHER, [shard(-1, 2, 4)], [shard(2, 4, 4)]],
        CoverageError,
        ["rank 1 offers", "offsets [-1, 0]"],
        "Correct the offsets",
    ),
    "other_shape": Case(
        [OTHER, [shard(0, 4, 4)], [shard(0, 5, 5)]],
        ReplicaConflictError,
        ["shape (4, 2) on rank 1", "shape (5, 2) on rank 2"],
        "a name of their own on each rank",
    ),
    "other_dtype": Case(
        [OTHER, [shard(0, 4, 4)], [shard(0, 4, 4, torch.float16)]],
        ReplicaConflictError,
        ["torch.float32 tensor of shape (4, 2) on rank 1", "torch.float16 tensor", "on rank 2"],
        "a name of their own on each rank",
    ),
    "value_and_tensor": Case(
        [OTHER, [VALUE], [shard(0, 4, 4)]],
        ReplicaConflictError,
        ["a value that is not a tensor on rank 1", "a torch.float32 tensor", "on rank 2"],
        "a name of their own on each rank",
    ),
    "other_size_at_one_place": Case(
        [OTHER, [shard(0, 3, 4)], [shard(0, 4, 4)]],
        ReplicaConflictError,
        ["start at [0, 0] with different sizes", "[3, 2] on rank 1", "[4, 2] on rank 2"],
        "the same placements on all ranks",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_global_plan_that_cannot_be_is_refused_with_name_ranks_and_advice(case: Case) -> None:
    with pytest.raises(CheckpointException) as raised:
        plan(*case.ranks)
    message = str(raised.value)
    assert type(raised.value) is case.error
    assert isinstance(raised.value, ValueError)
    assert f"{FQN!r}" in message
    assert [part for part in case.says if part not in message] == []
    assert case.advice in message


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        (
            [OTHER, [shard(0, 3, 4)], [shard(2, 4, 4)]],
            "chunks [0:3, 0:2] of rank 1 and [2:4, 0:2] of rank 2 overlap",
        ),
        (
            [[shard(0, 3, 4), shard(2, 4, 4)]],
            "chunks [0:3, 0:2] of rank 0 and [2:4, 0:2] of rank 0 overlap",
        ),
        ([OTHER, [shard(0, 1, 4)], [shard(2, 4, 4)]], "nobody holds [1:2, 0:2]"),
        ([[shard(0, 3, 4)], OTHER], "nobody holds [3:4, 0:2]"),
    ],
    ids=["overlap", "overlap_on_one_rank", "gap", "short"],
)
def test_chunks_that_do_not_make_a_whole_are_refused_with_name_and_ranges(
    ranks: list[list[WriteItem]], problem: str
) -> None:
    with pytest.raises(CoverageError) as raised:
        plan(*ranks)
    assert f"{FQN!r} of shape [4, 2]: {problem}" in str(raised.value)


def test_an_overlap_names_the_ranks_that_hold_the_chunks() -> None:
    with pytest.raises(CoverageError) as raised:
        plan(OTHER, [shard(0, 3, 4)], [shard(2, 4, 4)])
    assert set(re.findall(r"rank (\d)", str(raised.value))) == {"1", "2"}


@pytest.mark.parametrize("second", [shard(1, 4, 4), shard(3, 4, 4)], ids=["overlap", "gap"])
def test_chunks_that_do_not_make_a_whole_are_refused_with_advice(second: WriteItem) -> None:
    with pytest.raises(CoverageError) as raised:
        plan([shard(0, 2, 4)], [second])
    after = str(raised.value).partition("overlap")[2] or str(raised.value).partition("]. ")[2]
    assert len(after) > 20


def test_a_single_rank_may_hold_a_part_of_a_tensor() -> None:
    (answer,), metadata = plan([shard(0, 3, 4)])
    assert len(answer.items) == 1
    assert metadata.state_dict_metadata[FQN].size == torch.Size([4, 2])


def test_many_broken_tensors_are_counted_and_a_few_are_named() -> None:
    def item(name: str) -> WriteItem:
        return WriteItem(MetadataIndex(name, [0, 0]), WriteItemType.SHARD, None, data)

    data = shard(0, 3, 4).tensor_data
    with pytest.raises(CoverageError) as raised:
        plan([item(f"w{n}") for n in range(8)], OTHER)
    message = str(raised.value)
    assert [name for name in (f"'w{n}'" for n in range(8)) if name in message] == [
        f"'w{n}'" for n in range(5)
    ]
    assert "and 3 more tensors like these" in message


def test_one_item_on_two_ranks_is_refused_where_plans_should_be_deduplicated() -> None:
    plans = [SavePlan(OTHER), SavePlan([shard(0, 4, 4)]), SavePlan([shard(0, 4, 4)])]
    with pytest.raises(PlanError) as raised:
        create_default_global_save_plan(plans)
    assert f"rank 1 and rank 2 both plan to write {FQN!r} at [0, 0]" in str(raised.value)
    assert "Deduplicate the plans first" in str(raised.value)


def test_an_item_on_two_ranks_is_described_in_its_own_dimensions() -> None:
    narrow = DefaultSavePlanner()
    narrow.set_up_planner({"narrow": torch.ones(2), "wide": torch.ones(1, 1, 1, 1)})
    local = narrow.create_local_plan()
    with pytest.raises(PlanError, match=r"'narrow' at \[0\]\."):
        create_default_global_save_plan([local, local])


# Items that contradict themselves


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            WriteItem(MetadataIndex(FQN, [0, 0]), WriteItemType.SHARD),
            r"is a SHARD without a region: set tensor_data",
        ),
        (
            WriteItem(
                MetadataIndex(FQN, [1, 0]), WriteItemType.SHARD, None, shard(0, 4, 4).tensor_data
            ),
            r"indexed by offset \(1, 0\) but its chunk starts at \(0, 0\)",
        ),
        (
            WriteItem(
                MetadataIndex(FQN),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size([0]), torch.Size([4])),
                    TensorProperties(torch.float32),
                    torch.Size([4, 2]),
                ),
            ),
            r"offsets \(0,\) and sizes \(4,\), but the tensor has 2 dimensions",
        ),
    ],
    ids=["no_region", "other_offset", "other_dimensions"],
)
def test_an_item_that_contradicts_itself_is_refused_by_name(item: WriteItem, message: str) -> None:
    with pytest.raises(PlanError, match=message) as raised:
        plan([item])
    assert f"{FQN!r}" in str(raised.value)


# Metadata that somebody built


def metadata_of(*chunks: tuple[int, int]) -> Metadata:
    entry = TensorStorageMetadata(
        TensorProperties(torch.float32),
        torch.Size([4]),
        [ChunkStorageMetadata(torch.Size([a]), torch.Size([b - a])) for a, b in chunks],
    )
    return Metadata({FQN: entry})


@pytest.mark.parametrize(
    ("chunks", "problem"),
    [
        ([(0, 4)], None),
        ([(2, 4), (0, 2)], None),
        ([(0, 2)], "nobody holds [2:4]"),
        ([], "nobody holds [0:4]"),
        ([(0, 3), (2, 4)], "overlap"),
        ([(0, 3), (3, 5)], "reaches outside of its shape [4]"),
    ],
)
def test_validation_lists_what_is_wrong_with_metadata(chunks: Any, problem: str | None) -> None:
    errors = _validate_global_plan([SavePlan([]), SavePlan([])], metadata_of(*chunks))
    assert len(errors) == (0 if problem is None else 1)
    assert problem is None or (FQN in errors[0] and problem in errors[0])


# State dicts


def test_ranks_that_disagree_about_a_shape_are_named_in_a_whole_save() -> None:
    planners = [DefaultSavePlanner() for _ in range(3)]
    sizes = (2, 2, 3)
    with pytest.raises(ReplicaConflictError) as raised:
        plan_save(planners, [{"model": {"w": torch.ones(size)}} for size in sizes])
    assert "'model.w'" in str(raised.value)
    assert "on rank 0" in str(raised.value)
    assert "on rank 2" in str(raised.value)


def test_shards_of_two_different_layouts_are_refused() -> None:
    def build(rank: int) -> dict[str, Any]:
        dim = 0 if rank == 0 else 1
        return {"w": distributed(torch.ones(4, 4), mesh_of(2), [Shard(dim)])}

    with pytest.raises(CoverageError, match=r"'w' of shape \[4, 4\]"):
        plan_save([DefaultSavePlanner() for _ in range(2)], on_each_rank(2, build))


@dataclass(frozen=True)
class Ragged(Placement):
    """A placement of somebody's own."""


@pytest.mark.parametrize("placement", [Partial(), Ragged()], ids=["partial", "unknown"])
def test_a_placement_that_cannot_be_stored_is_refused_by_name(placement: Placement) -> None:
    with as_rank(0, 2):
        tensor = DTensor.from_local(torch.ones(2), mesh_of(2), [Shard(0)], run_check=False)
        tensor._spec.placements = (placement,)
        planner = DefaultSavePlanner()
        planner.set_up_planner({"layer": {"grad": tensor}})
        with pytest.raises(UnsupportedLayoutError) as raised:
            planner.create_local_plan()
    assert f"'layer.grad' has the placement {placement}" in str(raised.value)
    assert "Call redistribute() to Shard or Replicate" in str(raised.value)


@pytest.mark.parametrize(
    ("state_dict", "message"),
    [
        ({3: torch.ones(1)}, "has the key 3 of type int"),
        ({None: 1}, "has the key None of type NoneType"),
        ({"optim": {1.5: 1}}, "the dict at ['optim'] has the key 1.5 of type float"),
        ({"a": [{"b": {(1, 2): 1}}]}, "the dict at ['a'][0]['b'] has the key (1, 2)"),
    ],
)
def test_a_key_that_cannot_be_stored_is_refused_with_its_place(
    state_dict: dict[Any, Any], message: str
) -> None:
    with pytest.raises(TypeError) as raised:
        DefaultSavePlanner().set_up_planner(state_dict)
    assert message in str(raised.value)
    assert "Rename it" in str(raised.value)


def test_a_key_with_a_dot_that_collides_with_a_nested_one_is_refused_with_both() -> None:
    state_dict = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}
    with pytest.raises(StateDictError) as raised:
        DefaultSavePlanner().set_up_planner(state_dict)
    message = str(raised.value)
    assert "get the name 'a.b'" in message
    assert "['a']['b']" in message
    assert "['a.b']" in message
    assert "Rename a key" in message
    assert isinstance(raised.value, CheckpointException)
    assert isinstance(raised.value, ValueError)


class NoState:
    """Like torch's DataLoader: it cannot say where it is."""


BAD_CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "save(model)": (
        lambda p: reshard.save(torch.nn.Linear(1, 1), checkpoint_id=p),
        Exception,
        "save {'model': model}",
    ),
    "a number as place": (lambda p: reshard.save({}, checkpoint_id=5), TypeError, "is a path"),
    "strict": (
        lambda p: reshard.load({}, checkpoint_id=p, strict="exac"),
        ValueError,
        "True, False, 'exact' or 'receipt'",
    ),
    "a region that is no slice": (
        lambda p: reshard.read_tensor(p, "w", (1,)),
        TypeError,
        "a tuple of slices",
    ),
    "a key that names nothing": (
        lambda p: reshard.read_state_dict(p, {"w", "nope"}),
        reshard.CheckpointException,
        "state_dict: nope",
    ),
    "on_resize": (
        lambda p: TrainState(torch.nn.Linear(1, 1), on_resize="dorp"),
        ValueError,
        "'error', 'drop' or 'first'",
    ),
    "a dict of optimizers": (
        lambda p: TrainState(torch.nn.Linear(1, 1), {"a": None}),
        TypeError,
        "a list of optimizers",
    ),
    "a loader without state": (
        lambda p: TrainState(torch.nn.Linear(1, 1), dataloader=NoState()),
        TypeError,
        "which has no state_dict",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_says_what_to_do(name: str, tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    call, kind, text = BAD_CALLS[name]
    with pytest.raises(kind) as raised:
        call(tmp_path)
    assert text in str(raised.value)


def test_one_slice_is_a_region(tmp_path: Path) -> None:
    reshard.save({"w": torch.arange(4)}, checkpoint_id=tmp_path)
    assert reshard.read_tensor(tmp_path, "w", slice(1, 3)).tolist() == [1, 2]  # type: ignore[arg-type]


def test_what_a_load_asks_of_a_reader_and_a_planner_is_for_that_load_only(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(2), "v": [Fraction(1, 2)]}, checkpoint_id=tmp_path)
    reader, planner = reshard.FileSystemReader(tmp_path), reshard.DefaultLoadPlanner()
    state: dict[str, Any] = {"w": torch.zeros(2), "v": None, "more": 1}
    options: dict[str, Any] = {"storage_reader": reader, "planner": planner}
    reshard.load(state, **options, allow_pickle=True, strict=False, verify="off", exclude=["w"])
    assert (state["v"], state["w"].tolist()) == ([Fraction(1, 2)], [0, 0])
    with pytest.raises(reshard.CheckpointException, match="state_dict: more"):
        reshard.load(state, **options)
    del state["more"]
    with pytest.raises(reshard.CheckpointException, match="allow_pickle=True"):
        reshard.load(state, **options)
    reshard.load({"w": state["w"]}, **options)
    assert state["w"].tolist() == [1, 1]
    assert reader.verify.value == "chunks"


def test_a_checkpoint_that_is_not_there_is_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        reshard.read_tensor(tmp_path / "nowhere", "w")
    assert raised.value.errno == errno.ENOENT

"""Plain tensors that say which shards of a larger tensor they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import reshard
from reshard.metadata import MetadataIndex
from reshard.planner_helpers import _create_chunk_list, _create_read_items, _create_write_items
from reshard.protocol import (
    CheckpointableTensor,
    _copy_checkpointable_tensor_metadata,
    _get_checkpointable_tensor_chunks,
    _get_checkpointable_tensor_shard,
    _is_checkpointable_tensor,
)
from reshard.utils import find_tensor_shard
from support.ranks import run_ranks

WHOLE = torch.arange(24.0).reshape(6, 4)


def holding(
    tensor: torch.Tensor,
    global_shape: Any,
    global_offsets: Any,
    local_offsets: Any,
    local_sizes: Any,
) -> torch.Tensor:
    for name, value in list(locals().items())[1:]:
        setattr(tensor, name, value)
    return tensor


def outer_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Rows 0, 1 and 5 of the whole, with a row of padding in between."""
    return holding(tensor, (6, 4), ((0, 0), (5, 0)), ((0, 0), (3, 0)), ((2, 4), (1, 4)))


def inner_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Rows 2 to 4."""
    return holding(tensor, (6, 4), ((2, 0),), ((0, 0),), ((3, 4),))


def filled_outer() -> torch.Tensor:
    return outer_rows(torch.cat([WHOLE[:2], torch.full((1, 4), -1.0), WHOLE[5:]]))


def save_and_load(path: str, kind: str) -> None:
    rank = dist.get_rank()
    state = {"w": inner_rows(WHOLE[2:5].clone()) if rank else filled_outer(), "n": 1}
    if kind == "save":
        metadata = reshard.save(state, checkpoint_id=path)
    else:
        how = reshard.state_dict_saver.AsyncCheckpointerType(kind)
        saving: Any = reshard.async_save(state, checkpoint_id=path, async_checkpointer_type=how)
        state["w"].zero_()
        metadata = saving.result()
    assert metadata.state_dict_metadata["w"].size == (6, 4)
    assert len(metadata.state_dict_metadata["w"].chunks) == 3
    # Into the other layout, which leaves padding as it is.
    other = outer_rows(torch.full((4, 4), -1.0)) if rank else inner_rows(torch.zeros(3, 4))
    reshard.load({"w": other}, checkpoint_id=path)
    torch.testing.assert_close(other, filled_outer() if rank else WHOLE[2:5])
    mesh = init_device_mesh("cpu", (2,))
    columns = DTensor.from_local(torch.zeros(6, 2), mesh, [Shard(1)], run_check=False)
    reshard.load({"w": columns}, checkpoint_id=path)
    torch.testing.assert_close(columns.full_tensor(), WHOLE)


@pytest.mark.parametrize(
    "kind", ["save", "thread", pytest.param("process", marks=pytest.mark.slow)]
)
def test_shards_of_plain_tensors_are_saved_and_loaded_in_any_layout(
    kind: str, tmp_path: Path
) -> None:
    run_ranks(2, save_and_load, str(tmp_path / "c"), kind)
    torch.testing.assert_close(reshard.read_tensor(tmp_path / "c", "w"), WHOLE)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    reshard.save({"w": WHOLE}, checkpoint_id=tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_without_memory_keeps_its_shards_when_it_gets_some(
    device: str, assign: bool, checkpoint: Path
) -> None:
    state = {"w": outer_rows(torch.zeros(4, 4, device=device))}
    before = state["w"]
    reshard.load(state, checkpoint_id=checkpoint, assign=assign)
    assert _is_checkpointable_tensor(state["w"])
    assert state["w"] is not before or before._version, "autograd was told of the change"
    torch.testing.assert_close(state["w"][[0, 1, 3]], WHOLE[[0, 1, 5]])


def test_a_load_of_another_global_shape_is_refused(checkpoint: Path) -> None:
    wrong = inner_rows(torch.zeros(3, 4))
    wrong.global_shape = (7, 4)  # type: ignore[attr-defined]
    with pytest.raises(reshard.api.ShapeMismatchError, match=r"\(6, 4\) and current: \(7, 4\)"):
        reshard.load({"w": wrong}, checkpoint_id=checkpoint)


@pytest.mark.parametrize(
    "changed",
    [
        {"local_offsets": ((0, 0), (4, 0))},
        {"global_offsets": ((0, 0), (6, 0))},
        {"local_sizes": ((2, 4),)},
        {"local_sizes": ((2,), (1,))},
        {"global_offsets": ((-1, 0), (5, 0))},
        {"global_shape": (6, 4, 1)},
    ],
)
def test_attributes_that_contradict_each_other_are_refused_by_name(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    wrong = filled_outer()
    vars(wrong).update(changed)
    with pytest.raises(reshard.api.UnsupportedLayoutError, match="'w' describes itself"):
        reshard.save({"w": wrong}, checkpoint_id=tmp_path / "c")


def test_helpers_for_planners_see_the_shards() -> None:
    tensor = filled_outer()
    items = _create_write_items("w", tensor)
    assert [tuple(item.index.offset or ()) for item in items] == [(0, 0), (5, 0)]
    assert {item.tensor_data.size for item in items if item.tensor_data} == {torch.Size((6, 4))}
    assert _create_chunk_list(tensor) == _get_checkpointable_tensor_chunks(tensor)  # type: ignore[arg-type]
    found = find_tensor_shard(tensor, MetadataIndex("w", (5, 0)))
    torch.testing.assert_close(found, WHOLE[5:])
    assert found.data_ptr() == tensor[3:].data_ptr()


def test_reads_are_planned_for_the_shards_only(checkpoint: Path) -> None:
    stored = reshard.FileSystemReader(checkpoint).read_metadata().state_dict_metadata["w"]
    items = _create_read_items("w", stored, filled_outer())
    assert [tuple(item.lengths) for item in items] == [(2, 4), (1, 4)]


def test_a_shard_is_found_by_its_offset_or_by_being_the_only_one() -> None:
    both: Any = filled_outer()
    only: Any = inner_rows(WHOLE[2:5].clone())
    shard = _get_checkpointable_tensor_shard(both, MetadataIndex("w", (5, 0)))
    torch.testing.assert_close(shard, WHOLE[5:])
    whole = _get_checkpointable_tensor_shard(only, MetadataIndex("w"))
    torch.testing.assert_close(whole, WHOLE[2:5])
    for index in (MetadataIndex("w"), MetadataIndex("w", (3, 0))):
        with pytest.raises(ValueError, match="shard"):
            _get_checkpointable_tensor_shard(both, index)


def test_only_tensors_with_all_four_attributes_hold_shards() -> None:
    tensor = filled_outer()
    assert isinstance(tensor, CheckpointableTensor)
    assert _is_checkpointable_tensor(tensor)
    copied = torch.zeros(4, 4)
    assert not _is_checkpointable_tensor(copied)
    _copy_checkpointable_tensor_metadata(tensor, copied)
    assert _is_checkpointable_tensor(copied)
    del copied.local_sizes  # type: ignore[attr-defined]
    assert not _is_checkpointable_tensor(copied)


def test_an_attribute_called_global_shape_alone_means_nothing(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    tensor.global_shape = (4,)  # type: ignore[attr-defined]
    reshard.save({"w": tensor}, checkpoint_id=tmp_path / "c")
    assert reshard.read_tensor(tmp_path / "c", "w").shape == (2,)
    state = {"w": torch.zeros(2)}
    state["w"].global_shape = (4,)  # type: ignore[attr-defined]
    reshard.load(state, checkpoint_id=tmp_path / "c")
    torch.testing.assert_close(state["w"], torch.ones(2))

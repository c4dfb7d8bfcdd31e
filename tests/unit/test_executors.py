"""Executors and stagers, called as code written for DCP calls them."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard._async_executor import _AsyncCheckpointExecutor
from reshard._async_process_executor import _ProcessBasedAsyncCheckpointExecutor
from reshard._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor, save_wrapper
from reshard._state_dict_stager import StateDictStager
from reshard.metadata import Metadata, TensorProperties
from reshard.optimizer import _alloc_tensor, _get_state_dict_2d_layout, _ReaderWithOffset
from reshard.snapshots.pool import staging_pool

KINDS = [
    _ThreadBasedAsyncCheckpointExecutor,
    pytest.param(_ProcessBasedAsyncCheckpointExecutor, marks=pytest.mark.slow),
]


class Counter:
    def state_dict(self) -> dict[str, Any]:
        return {"n": 5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def staged_later() -> Future[dict[str, Any]]:
    staged: Future[dict[str, Any]] = Future()
    return staged


@pytest.mark.parametrize("kind", KINDS)
def test_an_executor_saves_what_is_staged(kind: type[Any], tmp_path: Path) -> None:
    executor: _AsyncCheckpointExecutor = kind()
    state = {"w": torch.ones(3), "c": Counter()}
    saving = executor.execute_save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    assert isinstance(saving.result(), Metadata)
    assert reshard.read_state_dict(tmp_path / "a")["c"] == {"n": 5}
    # Executors of DCP serve one save; these serve any number.
    writer = reshard.FileSystemWriter(tmp_path / "b")
    staged = staged_later()
    saving = executor.execute_save(
        staged, storage_writer=writer, planner=reshard.DefaultSavePlanner(), use_collectives=False
    )
    assert not saving.done()
    staged.set_result({"w": torch.full((3,), 2.0)})
    saving.result()
    torch.testing.assert_close(reshard.read_tensor(tmp_path / "b", "w"), torch.full((3,), 2.0))


def test_a_state_that_could_not_be_staged_fails_its_save(tmp_path: Path) -> None:
    staged = staged_later()
    saving = _ThreadBasedAsyncCheckpointExecutor().execute_save(staged, checkpoint_id=tmp_path)
    staged.set_exception(OSError("no memory"))
    with pytest.raises(reshard.CheckpointException, match="no memory"):
        saving.result()


def test_an_executor_must_say_how_it_saves() -> None:
    with pytest.raises(TypeError, match="execute_save"):
        _AsyncCheckpointExecutor()  # type: ignore[abstract]


def test_the_wrapper_waits_for_staging_and_saves(tmp_path: Path) -> None:
    staged = staged_later()
    staged.set_result({"w": torch.ones(2)})
    for number, state in enumerate((staged, {"w": torch.ones(2)})):
        metadata = save_wrapper(state, checkpoint_id=tmp_path / str(number))
        assert "w" in metadata.state_dict_metadata


def test_a_stager_copies_into_memory_that_it_uses_again(tmp_path: Path) -> None:
    stager = StateDictStager(share_memory=True)
    state = {"w": torch.ones(1000), "n": [1, {"m": torch.zeros(2)}]}
    first = stager.stage(state)
    state["w"].fill_(9)
    assert torch.equal(first["w"], torch.ones(1000))
    assert first["n"][1]["m"].data_ptr() != state["n"][1]["m"].data_ptr()
    second = stager.stage(state, non_blocking=True)
    assert torch.equal(first["w"], torch.ones(1000)), "somebody holds it"
    assert torch.equal(second["w"], torch.full((1000,), 9.0))
    reshard.save(second, checkpoint_id=tmp_path)
    place = second["w"].data_ptr()
    del first, second
    gc.collect()
    assert stager.stage(state)["w"].data_ptr() == place
    stager.close()
    assert staging_pool().nbytes


def test_pinning_without_a_gpu_is_said_to_do_nothing() -> None:
    with pytest.warns(UserWarning, match="CUDA"):
        assert not StateDictStager(pin_memory=True).pin_memory


# What is left of the optimizer's module


def test_the_layout_of_tensors_that_are_not_nested_is_all_of_them() -> None:
    layout, group = _get_state_dict_2d_layout({"w": torch.ones(2, 3)})
    assert layout == {"w": (None, torch.Size((2, 3)))}
    assert group is None


def test_memory_is_made_as_properties_say() -> None:
    properties = TensorProperties(torch.float16, requires_grad=True)
    made = _alloc_tensor(properties, (2, 3), "cpu")
    assert (made.dtype, made.shape, made.requires_grad) == (torch.float16, (2, 3), True)
    assert made.device.type == "cpu"


def test_a_part_of_a_stored_tensor_is_read_at_its_offset(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    reshard.save({"w": whole, "b": torch.ones(2)}, checkpoint_id=tmp_path)
    part = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    planner = _ReaderWithOffset({"w": (1, 0)})
    reshard.load(part, checkpoint_id=tmp_path, planner=planner)
    torch.testing.assert_close(part["w"], whole[1:3])
    torch.testing.assert_close(part["b"], torch.ones(2))

"""How long what was staged lasts, and what it is like."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from reshard.snapshots.pool import StagingPool
from reshard.staging import BlockingAsyncStager, DefaultStager, StagingOptions

SMALL = {"w": torch.arange(4.0)}
LARGE = {"w": torch.arange(1 << 20, dtype=torch.float32)}


def plus(state_dict: dict[str, Any], amount: float) -> dict[str, Any]:
    return {key: value + amount for key, value in state_dict.items()}


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "the dict": lambda staged: staged,
    "a tensor": lambda staged: staged["w"],
    "a view": lambda staged: staged["w"][2:].view(4, 1),
    "an array": lambda staged: staged["w"].numpy(),
    "a storage": lambda staged: staged["w"].untyped_storage(),
    "a tensor that shares memory": lambda staged: staged["part"],
    "a parameter": lambda staged: torch.nn.Parameter(staged["w"]),
}


@pytest.mark.parametrize("make", [BlockingAsyncStager, DefaultStager])
@pytest.mark.parametrize("what", HOLDERS)
def test_what_was_staged_stays_for_as_long_as_somebody_holds_it(
    what: str, make: Callable[[], Any], process_pool: StagingPool
) -> None:
    def stage(weight: torch.Tensor) -> Any:
        found = stager.stage({"w": weight, "part": weight[1:]})
        return found.result() if isinstance(found, Future) else found

    stager = make()
    held = HOLDERS[what](stage(torch.arange(6.0)))
    before = copy.deepcopy(held)
    for number in range(3):
        stage(torch.full((6,), float(number)))
    stager.close()
    stage(torch.full((6,), -1.0))
    assert str(held) == str(before)
    # What nobody holds is used again.
    assert len(process_pool.segment_numbers()) == 1


def test_a_dict_without_tensors_stays_as_well(process_pool: StagingPool) -> None:
    stager = BlockingAsyncStager()
    held = stager.stage({"step": 1, "meta": torch.empty(2, device="meta")})
    stager.stage({"step": 2})
    assert held["step"] == 1
    assert process_pool.nbytes <= 2


@pytest.mark.parametrize("in_thread", [False, True])
def test_stagers_that_nobody_closes_lose_no_memory(
    in_thread: bool, process_pool: StagingPool
) -> None:
    for _ in range(5):
        stager = DefaultStager(StagingOptions(use_async_staging=in_thread))
        found = stager.stage(LARGE)
        if isinstance(found, Future):
            found.result()
        del stager, found
        gc.collect()
    assert process_pool.nbytes <= LARGE["w"].nbytes


def test_memory_that_several_saves_keep_lasts_until_the_last_is_done(pool: StagingPool) -> None:
    staged = pool.stage(SMALL)
    staged.lease.keep()
    staged.lease.keep()
    staged.lease.release()
    staged.lease.end()
    other = pool.stage(plus(SMALL, 5))
    assert staged["w"].tolist() == [0, 1, 2, 3]
    staged.lease.release()
    assert (dict(staged), staged.lease.was_given_back) == ({}, True)
    assert other["w"].tolist() == [5, 6, 7, 8]
    assert pool.stage(SMALL).lease.buffer is staged.lease.buffer


def test_copies_that_torch_moved_to_another_memory_are_made_anew(pool: StagingPool) -> None:
    weight = torch.ones(4)
    for number in (1.0, 2.0, 3.0):
        weight.fill_(number)
        staged = pool.stage({"w": weight, "part": weight[1:]})
        assert [staged["w"].tolist(), staged["part"].tolist()] == [[number] * 4, [number] * 3]
        # As a queue of torch.multiprocessing does with what is put into it.
        staged["w"].share_memory_()
        staged.release()


def test_a_staged_dict_is_copied_and_pickled_as_a_dict(process_pool: StagingPool) -> None:
    staged = process_pool.stage({"w": torch.arange(3), "deep": {"x": 1}})
    for copied in (copy.deepcopy(staged), pickle.loads(pickle.dumps(staged)), copy.copy(staged)):
        assert type(copied) is dict
        assert str(copied) == str(staged)
    assert copy.deepcopy(staged)["w"].data_ptr() != staged["w"].data_ptr()


def test_tensors_that_share_a_storage_share_one_in_the_copy(process_pool: StagingPool) -> None:
    weight = torch.arange(16.0).view(4, 4)
    state = {
        "w": weight,
        "rows": weight[2:],
        "column": weight[:, 1],
        "bits": weight.view(torch.int32),
    }
    staged = process_pool.stage(state)
    for name, tensor in state.items():
        assert torch.equal(staged[name], tensor)
        assert staged[name].storage_offset() == tensor.storage_offset()
        assert staged[name].stride() == tensor.stride()
        storage = staged[name].untyped_storage()
        assert storage.data_ptr() == staged["w"].untyped_storage().data_ptr()
        assert storage.nbytes() == weight.nbytes


def test_marks_on_a_tensor_are_there_on_the_copy(process_pool: StagingPool) -> None:
    state = {"w": torch.ones(2), "p": torch.nn.Parameter(torch.ones(2))}
    for tensor in state.values():
        tensor.partition_dim = 1  # type: ignore[attr-defined]
    staged = process_pool.stage(state)
    assert [staged[name].partition_dim for name in state] == [1, 1]
    for tensor in state.values():
        del tensor.partition_dim  # type: ignore[attr-defined]
    staged.release()
    staged = process_pool.stage(state)
    assert not any(hasattr(tensor, "partition_dim") for tensor in staged.values())

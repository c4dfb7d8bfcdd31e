"""Saves in the background: what they store, whatever training does meanwhile."""

from __future__ import annotations

import copy
import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard.snapshots.pool import staging_pool
from reshard.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from reshard.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from support.background import (
    PROCESS,
    SECONDS,
    THREAD,
    Gate,
    GatedWriter,
    both_kinds,
    thread_of_two_process_of_one,
)
from support.mappings import View
from support.ranks import run_alone, run_ranks
from support.samples import same_bits

WHOLE = torch.arange(22.0).view(11, 2)


def sharded(full: torch.Tensor, placement: Any) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(full.clone(), mesh, [placement], src_data_rank=None)


def same(a: Any, b: Any) -> bool:
    """Whether two nested values are equal, tensors in every bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same_bits(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.array_equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


# What is stored is what was there when async_save was called


class Counter:
    """A `Stateful` that hands out its own insides."""

    def __init__(self, start: int) -> None:
        self.insides = {"count": start, "sums": torch.full((2,), float(start)), "log": [start]}

    def state_dict(self) -> dict[str, Any]:
        return self.insides

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.insides = state_dict


def every_sort_of_value() -> dict[str, Any]:
    rank = dist.get_rank()
    base, tied, rows = torch.arange(12.0), torch.rand(5), sharded(WHOLE, Shard(0))
    torch.manual_seed(0)
    return {
        "plain": torch.rand(7),
        "views": {
            "whole": base,
            "head": base[:4],
            "column": base.view(3, 4)[:, 1],
            "transposed": base.view(3, 4).t(),
        },
        "tied": [torch.ones(3), tied.fill_(4.0), tied],
        "scalar": torch.tensor(3.5),
        "strided": torch.arange(20).view(4, 5)[:, ::2],
        "parameter": torch.nn.Parameter(torch.rand(3)),
        "rows": rows,
        "tied_rows": rows,
        "list": [1, {"deep": [2, [3.0]]}, torch.ones(2), "text"],
        "nested": {"a": {"b": {"c": 1}}},
        "array": np.arange(4),
        "mine": reshard.per_rank({"rng": torch.full((2,), rank + 1.0), "position": [rank + 1]}),
        "object": Counter(1),
    }


def spoil(value: Any) -> Any:
    """Change a value in place, and all that is in it."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            (value.to_local() if isinstance(value, DTensor) else value).fill_(-1)
    elif isinstance(value, np.ndarray):
        value.fill(-1)
    elif isinstance(value, dict | list):
        places = list(value) if isinstance(value, dict) else range(len(value))
        for place in places:
            spoil(value[place])
            if isinstance(value[place], int | float | str):
                value[place] = -1
    elif hasattr(value, "insides"):
        spoil(value.insides)
    elif hasattr(value, "on_resize"):
        spoil(value.value)


def save_and_spoil(folder: str, kind: AsyncCheckpointerType) -> list[str]:
    """Names of values that are not as they were when `async_save` was called."""
    torch.manual_seed(dist.get_rank())
    state_dict = every_sort_of_value()
    reshard.save(state_dict, checkpoint_id=f"{folder}/wanted")
    gate = Gate(folder, f"gate-{dist.get_rank()}")
    future = reshard.async_save(
        state_dict,
        checkpoint_id=f"{folder}/found",
        storage_writer=GatedWriter(f"{folder}/found", gate, at="reset"),
        async_checkpointer_type=kind,
    )
    spoil(state_dict)
    # Only now does the save begin to look at anything.
    gate.open()
    future.result(SECONDS)
    wanted, found = (reshard.read_state_dict(f"{folder}/{name}") for name in ("wanted", "found"))
    wrong = [name for name in wanted if not same(wanted[name], found.get(name))]

    columns, everywhere = sharded(WHOLE * 0, Shard(1)), sharded(WHOLE * 0, Replicate())
    counter = Counter(-5)
    loaded = {
        "rows": columns,
        "tied_rows": everywhere,
        "object": counter,
        "mine": reshard.per_rank({"rng": torch.zeros(2), "position": [0]}),
    }
    reshard.load(loaded, checkpoint_id=f"{folder}/found")
    begin, end = (0, 1) if dist.get_rank() == 0 else (1, 2)
    rank = dist.get_rank() + 1
    checks = {
        "rows in columns": same(columns.to_local(), WHOLE[:, begin:end]),
        "tied rows everywhere": same(everywhere.to_local(), WHOLE),
        "loaded object": same(counter.insides, Counter(1).insides),
        "loaded value of this rank": same(
            loaded["mine"], {"rng": torch.full((2,), float(rank)), "position": [rank]}
        ),
    }
    return wrong + [name for name, holds in checks.items() if not holds]


@both_kinds
def test_what_training_changes_after_the_call_is_not_in_the_checkpoint(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    assert run_ranks(2, save_and_spoil, str(tmp_path), kind) == [[]] * 2
    # The comparison is worth something only if it was made against all values.
    assert len(reshard.read_state_dict(tmp_path / "wanted")) == 13


class Quantity(torch.Tensor):
    """A tensor that carries another one along."""


def test_a_mapping_of_the_trainers_keeps_its_own_tensors(tmp_path: Path) -> None:
    weight = torch.ones(3)
    registry = View({"weight": weight})

    reshard.async_save({"registry": registry}, checkpoint_id=tmp_path).result(SECONDS)

    assert registry["weight"] is weight
    assert torch.equal(reshard.read_state_dict(tmp_path)["registry"]["weight"], weight)


def test_a_tensor_subclass_may_have_a_tensor_as_an_attribute(tmp_path: Path) -> None:
    quantity = torch.ones(3).as_subclass(Quantity)
    quantity.scale = torch.ones(1)
    reshard.save({"quantity": quantity}, checkpoint_id=tmp_path / "sync")

    reshard.async_save({"quantity": quantity}, checkpoint_id=tmp_path / "async").result(SECONDS)


def save_under_inference_mode(folder: str) -> list[float]:
    with torch.inference_mode():
        reshard.async_save({"w": torch.ones(2)}, checkpoint_id=folder).result(SECONDS)
    reshard.async_save({"w": torch.full((2,), 2.0)}, checkpoint_id=folder).result(SECONDS)
    return reshard.read_state_dict(folder)["w"].tolist()


def test_a_save_under_inference_mode_does_not_spoil_those_after_it(tmp_path: Path) -> None:
    assert run_alone(save_under_inference_mode, str(tmp_path)) == [2.0, 2.0]


# Futures


def save_from_a_callback(folder: str, kind: AsyncCheckpointerType) -> Any:
    """A save whose end starts another one."""
    own = {f"of_rank_{dist.get_rank()}": torch.ones(3), "common": {"step": 1}}
    done = threading.Event()
    seen: list[Any] = []

    def note(future: Future[reshard.Metadata]) -> None:
        seen.append(future.result())
        done.set()

    def go_on(future: Future[reshard.Metadata]) -> None:
        seen.append(future.result())
        second = reshard.async_save(
            own, checkpoint_id=f"{folder}/second", async_checkpointer_type=kind
        )
        second.add_done_callback(note)

    first = reshard.async_save(own, checkpoint_id=f"{folder}/first", async_checkpointer_type=kind)
    first.add_done_callback(go_on)
    assert done.wait(SECONDS)
    seen.append(reshard.save(own, checkpoint_id=f"{folder}/third"))
    return [(sorted(m.state_dict_metadata), sorted(m.planner_data), type(m).__name__) for m in seen]


@thread_of_two_process_of_one
def test_a_callback_gets_the_metadata_that_save_returns_and_may_start_the_next_save(
    kind: AsyncCheckpointerType, ranks: int, tmp_path: Path
) -> None:
    names = ["common.step", *(f"of_rank_{rank}" for rank in range(ranks))]

    for first, second, of_save in run_ranks(ranks, save_from_a_callback, str(tmp_path), kind):
        assert of_save[0] == names
        assert of_save[2] == "Metadata"
        assert first == second == of_save
    for place in ("first", "second"):
        assert reshard.read_state_dict(tmp_path / place)["common"] == {"step": 1}


def close_in_a_callback(folder: str) -> bool:
    gate = Gate(folder)
    first, second = (
        reshard.async_save({"a": 1}, storage_writer=GatedWriter(f"{folder}/{name}", gate))
        for name in "ab"
    )
    first.add_done_callback(lambda _: reshard.close())
    gate.open()
    try:
        second.result(20)
    except TimeoutError:
        return False
    return True


def test_a_callback_that_closes_does_not_block_the_saves_behind_it(tmp_path: Path) -> None:
    assert run_alone(close_in_a_callback, str(tmp_path))


# Stagers


def reuse_a_default_stager(folder: str, kind: AsyncCheckpointerType) -> Any:
    """Saves with one stager, always two in flight; how much memory they took."""
    stager = DefaultStager(StagingOptions())
    gates = [Gate(folder, f"gate-{number}") for number in range(6)]
    weight = torch.zeros(1000)
    responses: list[AsyncSaveResponse] = []
    for number, gate in enumerate(gates):
        if number >= 2:
            gates[number - 2].open()
            responses[number - 2].upload_completion.result(SECONDS)
        weight.fill_(number)
        response = reshard.async_save(
            {"weight": weight, "number": number},
            storage_writer=GatedWriter(f"{folder}/{number}", gate),
            async_checkpointer_type=kind,
            async_stager=stager,
        )
        assert isinstance(response, AsyncSaveResponse)
        assert response.staging_completion.result(SECONDS) is None
        assert not response.upload_completion.done(), "it did not wait for its gate"
        responses.append(response)
    weight.fill_(-1)
    for gate in gates:
        gate.open()
    names = [sorted(r.upload_completion.result(SECONDS).state_dict_metadata) for r in responses]
    stager.close()
    return names, staging_pool().nbytes


@both_kinds
def test_the_default_stager_says_when_it_has_copied_and_serves_many_saves(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    names, nbytes = run_alone(reuse_a_default_stager, str(tmp_path), kind)

    assert names == [["number", "weight"]] * 6
    assert 2 * 4000 <= nbytes < 3 * 4000
    for number in range(6):
        found = reshard.read_state_dict(tmp_path / str(number))
        assert found["number"] == number
        assert torch.equal(found["weight"], torch.full((1000,), float(number)))


class NotingStager(AsyncStager):
    """A stager of a user's, which notes what it is asked."""

    def __init__(self, synchronize: bool, may_copy: threading.Event | None = None) -> None:
        self._synchronize_after_execute = synchronize
        self.may_copy = may_copy
        self.asked: list[str] = []
        self.threads: set[threading.Thread] = set()

    def stage(self, state_dict: dict[str, Any]) -> Any:
        self.asked.append("stage")
        self.threads.add(threading.current_thread())
        if self.may_copy is None:
            return copy.deepcopy(state_dict)
        promise: Future[dict[str, Any]] = Future()
        threading.Thread(target=self._keep, args=(promise, state_dict), daemon=True).start()
        return promise

    def _keep(self, promise: Future[dict[str, Any]], state_dict: dict[str, Any]) -> None:
        if self.may_copy is not None and self.may_copy.wait(SECONDS):
            promise.set_result(copy.deepcopy(state_dict))

    def synchronize_staging(self) -> None:
        self.asked.append("synchronize")
        self.threads.add(threading.current_thread())


def save_with_a_stager_of_our_own(
    folder: str, kind: AsyncCheckpointerType, synchronize: bool
) -> Any:
    stager = NotingStager(synchronize)
    weight, gate = torch.ones(3), Gate(folder)
    future = reshard.async_save(
        {"weight": weight},
        storage_writer=GatedWriter(f"{folder}/place", gate),
        async_checkpointer_type=kind,
        async_stager=stager,
    )
    asked = list(stager.asked)
    weight.zero_()
    gate.open()
    future.result(SECONDS)
    return asked, stager.asked == asked, stager.threads == {threading.main_thread()}


@pytest.mark.parametrize(
    ("kind", "synchronize"),
    [(THREAD, True), (THREAD, False), (PROCESS, True)],
    ids=["thread, synchronized", "thread, not synchronized", "process, synchronized"],
)
def test_a_stager_of_a_users_is_asked_in_order_before_the_call_returns(
    kind: AsyncCheckpointerType, synchronize: bool, tmp_path: Path
) -> None:
    outcome = run_alone(save_with_a_stager_of_our_own, str(tmp_path), kind, synchronize)

    assert outcome == (["stage", "synchronize"] if synchronize else ["stage"], True, True)
    assert reshard.read_state_dict(tmp_path / "place")["weight"].tolist() == [1.0] * 3


def save_with_a_stager_that_promises(folder: str) -> Any:
    may_copy = threading.Event()
    response = reshard.async_save(
        {"weight": torch.ones(3)},
        checkpoint_id=folder,
        async_stager=NotingStager(synchronize=False, may_copy=may_copy),
    )
    assert isinstance(response, AsyncSaveResponse)
    early = response.staging_completion.done(), response.upload_completion.done()
    may_copy.set()
    late = response.staging_completion.result(SECONDS)
    return early, late, sorted(response.upload_completion.result(SECONDS).state_dict_metadata)


def test_a_stager_that_promises_its_copy_gets_the_time_it_takes(tmp_path: Path) -> None:
    outcome = run_alone(save_with_a_stager_that_promises, str(tmp_path))

    assert outcome == ((False, False), None, ["weight"])
    assert reshard.read_state_dict(tmp_path)["weight"].tolist() == [1.0] * 3


class StagingWriter(reshard.FileSystemWriter):
    """A storage that copies the state itself."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.asked: list[str] = []

    @property
    def should_synchronize_after_execute(self) -> bool:
        return True

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.asked.append("stage")
        return copy.deepcopy(state_dict) | {"staged": True}

    def synchronize_staging(self) -> None:
        self.asked.append("synchronize")


def test_a_writer_that_is_a_stager_stages_unless_there_is_another(tmp_path: Path) -> None:
    writer = StagingWriter(tmp_path / "own")
    own = reshard.async_save({"a": 1}, storage_writer=writer)
    assert writer.asked == ["stage", "synchronize"]
    assert sorted(own.result(SECONDS).state_dict_metadata) == ["a", "staged"]

    other = reshard.async_save({"a": 1}, storage_writer=writer, async_stager=BlockingAsyncStager())
    assert not isinstance(other, AsyncSaveResponse)
    assert list(other.result(SECONDS).state_dict_metadata) == ["a"]
    assert writer.asked == ["stage", "synchronize"]


def test_the_blocking_stager_has_copied_when_the_call_returns(tmp_path: Path) -> None:
    weight, gate, stager = torch.ones(3), Gate(tmp_path), BlockingAsyncStager()
    futures = []
    for number in range(2):
        weight.fill_(number)
        writer = GatedWriter(tmp_path / str(number), gate)
        futures.append(
            reshard.async_save({"w": weight}, storage_writer=writer, async_stager=stager)
        )
    weight.fill_(-1)
    gate.open()

    for number, future in enumerate(futures):
        assert isinstance(future.result(SECONDS), reshard.Metadata)
        assert reshard.read_tensor(tmp_path / str(number), "w").tolist() == [float(number)] * 3


class ChoosyWriter(GatedWriter):
    """Leaves something out of what it stages."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in super().stage(state_dict).items() if key != "secret"}


def change_what_was_staged(folder: str) -> list[Any]:
    gate = Gate(folder)
    writer = ChoosyWriter(folder, gate)
    futures = [
        reshard.async_save(
            {"w": torch.full((3,), float(number)), "secret": 1},
            checkpoint_id=f"{folder}/{number}",
            storage_writer=writer,
        )
        for number in range(2)
    ]
    gate.open()
    return [list(future.result(SECONDS).state_dict_metadata) for future in futures]


def test_a_writer_may_change_what_it_staged_while_an_earlier_save_is_in_flight(
    tmp_path: Path,
) -> None:
    assert run_alone(change_what_was_staged, str(tmp_path)) == [["w"]] * 2
    for number in range(2):
        assert reshard.read_tensor(tmp_path / str(number), "w").tolist() == [float(number)] * 3


def reuse_a_writer(folder: str, kind: AsyncCheckpointerType) -> Any:
    gate, rank = Gate(folder), dist.get_rank()
    writer = GatedWriter(f"{folder}/nowhere", gate)
    futures = []
    for number in range(4):
        if number == 2:
            assert not any(future.done() for future in futures)
            gate.open()
        state_dict = {f"of_rank_{rank}": torch.full((2,), float(number)), "number": number}
        futures.append(
            reshard.async_save(
                state_dict,
                checkpoint_id=f"{folder}/{number}",
                storage_writer=writer,
                async_checkpointer_type=kind,
            )
        )
    return [str(future.result(SECONDS).storage_meta.checkpoint_id) for future in futures]


@thread_of_two_process_of_one
def test_one_writer_serves_several_saves_in_flight_to_different_places(
    kind: AsyncCheckpointerType, ranks: int, tmp_path: Path
) -> None:
    places = [str(tmp_path / str(number)) for number in range(4)]

    assert run_ranks(ranks, reuse_a_writer, str(tmp_path), kind) == [places] * ranks
    for number, place in enumerate(places):
        found = reshard.read_state_dict(place)
        assert found.pop("number") == number
        assert sorted(found) == [f"of_rank_{rank}" for rank in range(ranks)]
        assert all(value.tolist() == [float(number)] * 2 for value in found.values())
    assert not (tmp_path / "nowhere").exists()


class Meddled:
    """Notices, in the thread of a background save, that a save in front uses the same object."""

    def wait_for_meddling(self, look: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            return
        before, give_up = look(), time.monotonic() + 1.0
        # A save in front that waits for this one, as it should, changes nothing meanwhile.
        while look() is before and time.monotonic() < give_up:
            time.sleep(0.002)


class MeddledWriter(Meddled, reshard.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        self.wait_for_meddling(lambda: self.path)
        return super().write_data(plan, planner)


class MeddledPlanner(Meddled, reshard.DefaultSavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        self.wait_for_meddling(lambda: self.state_dict)
        return super().finish_plan(new_plan)


@pytest.mark.parametrize("shared", ["writer", "planner"])
def test_a_save_in_front_may_use_what_a_save_in_the_background_uses(
    shared: str, tmp_path: Path
) -> None:
    tools: dict[str, Any] = {"planner": MeddledPlanner()}
    if shared == "writer":
        tools = {"storage_writer": MeddledWriter(tmp_path)}
    future = reshard.async_save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "behind", **tools)
    reshard.save({"a": torch.zeros(2)}, checkpoint_id=tmp_path / "front", **tools)
    future.result(SECONDS)

    assert reshard.read_tensor(tmp_path / "behind", "a").tolist() == [1.0, 1.0]
    assert reshard.read_tensor(tmp_path / "front", "a").tolist() == [0.0, 0.0]

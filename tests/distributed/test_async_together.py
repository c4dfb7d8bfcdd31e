"""Saves in the background beside other work: training, other saves, loads, other ranks."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import reshard
from reshard.api import BusyError
from reshard.background.worker import worker_of_this_process
from reshard.snapshots.pool import staging_pool
from reshard.staging import DefaultStager, StagingOptions
from reshard.state_dict_saver import AsyncCheckpointerType
from support.background import (
    PROCESS,
    SECONDS,
    Gate,
    GatedWriter,
    ScalingPlanner,
    both_kinds,
    files_in_memory,
    is_running,
    thread_of_two_process_of_one,
    wait_until,
)
from support.ranks import run_alone, run_ranks
from support.samples import same_bits

WHOLE = torch.arange(22.0).view(11, 2)


def sharded(full: torch.Tensor) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(full.clone(), mesh, [Shard(0)], src_data_rank=None)


# Training


def save_beside_collectives(folder: str, kind: AsyncCheckpointerType) -> int:
    """How many rounds of collectives it took until two saves were done on all ranks."""
    gate = Gate(folder)
    futures = [
        reshard.async_save(
            {"rows": sharded(WHOLE + number), "number": number},
            storage_writer=GatedWriter(f"{folder}/{number}", gate),
            async_checkpointer_type=kind,
        )
        for number in range(2)
    ]
    rounds, done = 0, torch.zeros(1)
    while done.item() < dist.get_world_size():
        dist.barrier()
        done = torch.tensor([float(all(future.done() for future in futures))])
        dist.all_reduce(done)
        rounds += 1
        if rounds == 20:
            # Until now, the saves could not end.
            assert not any(future.done() for future in futures)
            gate.open()
    for future in futures:
        future.result(0)
    return rounds


@both_kinds
def test_saves_are_done_while_training_never_stops_using_the_default_group(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    rounds = run_ranks(2, save_beside_collectives, str(tmp_path), kind)

    assert rounds[0] == rounds[1] > 20
    for number in range(2):
        found = reshard.read_state_dict(tmp_path / str(number))
        assert found["number"] == number
        assert same_bits(found["rows"], WHOLE + number)


# More than one save


def save_to_one_place(folder: str) -> list[list[str] | str]:
    gate, rank = Gate(folder), dist.get_rank()
    futures = [
        reshard.async_save(
            {f"of_rank_{rank}": torch.full((3,), float(number)), name: number},
            storage_writer=GatedWriter(f"{folder}/place", gate),
        )
        for number, name in enumerate(["old", "new"])
    ]
    gate.open()
    saved = [future.result(SECONDS) for future in futures]
    found: list[list[str] | str] = []
    for metadata in saved:
        try:
            found.append(sorted(metadata.state_dict_metadata))
        except reshard.CheckpointException as error:
            found.append(str(error))
    return found


def test_of_two_saves_in_flight_to_one_place_the_second_stays(tmp_path: Path) -> None:
    own = ["of_rank_0", "of_rank_1"]

    here, there = run_ranks(2, save_to_one_place, str(tmp_path))
    assert here == [[*own, "old"], ["new", *own]]
    # Only the coordinator has the metadata itself; the others read it when they look at it.
    assert "was replaced" in there[0]
    assert there[1] == ["new", *own]
    found = reshard.read_state_dict(tmp_path / "place")
    assert found.pop("new") == 1
    assert {name: value.tolist() for name, value in found.items()} == dict.fromkeys(own, [1.0] * 3)


def refuse_a_third(folder: str) -> None:
    gate, own = Gate(folder, f"gate-{dist.get_rank()}"), f"of_rank_{dist.get_rank()}"

    def begin(name: str) -> Any:
        return reshard.async_save(
            {own: name},
            storage_writer=GatedWriter(f"{folder}/{name}", gate),
            when_busy="refuse",
        )

    futures = [begin("first"), begin("second")]
    with pytest.raises(BusyError, match=r"2 saves.*first.*second"):
        begin("third")
    gate.open()
    for future in futures:
        future.result(SECONDS)
    begin("fourth").result(SECONDS)


def test_a_third_save_in_flight_is_refused_if_asked_and_does_no_harm(tmp_path: Path) -> None:
    run_ranks(2, refuse_a_third, str(tmp_path))

    there = sorted(path.parent.name for path in tmp_path.glob("*/.metadata"))
    assert there == ["first", "fourth", "second"]
    for name in there:
        found = reshard.read_state_dict(tmp_path / name)
        assert found == {"of_rank_0": name, "of_rank_1": name}


def refuse_on_one_rank(folder: str) -> Any:
    """Rank 1 does not wait for room, rank 0 does."""
    gate, rank = Gate(folder), dist.get_rank()

    def begin(name: str, when_busy: Any = "wait") -> Any:
        return reshard.async_save(
            {f"of_rank_{rank}": name},
            storage_writer=GatedWriter(f"{folder}/{name}", gate),
            when_busy=when_busy,
        )

    futures = [begin("first"), begin("second")]
    if rank == 1:
        with pytest.raises(BusyError):
            begin("third", "refuse")
        gate.open()
        failures: Any = None
    else:
        error = begin("third").exception(SECONDS)
        assert isinstance(error, reshard.CheckpointException)
        failures = {who: str(reason) for who, (reason, _) in error.failures.items()}
    for future in futures:
        future.result(SECONDS)
    begin("fourth").result(SECONDS)
    return failures


def test_a_rank_that_refuses_alone_fails_that_save_and_no_other(tmp_path: Path) -> None:
    told, nothing = run_ranks(2, refuse_on_one_rank, str(tmp_path))

    assert nothing is None
    assert list(told) == [1]
    assert "2 saves are in flight" in told[1]
    there = sorted(path.parent.name for path in tmp_path.glob("*/.metadata"))
    assert there == ["first", "fourth", "second"]


# What saves take


def usage(pid: int) -> dict[str, int]:
    """What a process holds that could add up."""
    files = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            files.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # The one that lists the directory.
    mappings = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {
        "files": len(files),
        "shared files": sum("memfd:" in name for name in files),
        "shared mappings": sum("memfd:" in line for line in mappings),
        "named shared files": sum("/dev/shm/" in name for name in [*files, *mappings]),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


def until_no_save_runs() -> None:
    """The thread of the saves ends a moment after the last of them."""
    wait_until(lambda: not any(t.name == "reshard-save" for t in threading.enumerate()))


def save_often(folder: str, kind: AsyncCheckpointerType) -> Any:
    """Fifty saves of models of two sizes; what is held before and after them."""
    in_memory = files_in_memory()
    small, large = {"w": torch.ones(1000), "v": torch.ones(10)}, {"w": torch.ones(5000)}
    gate = Gate(folder)
    writer = GatedWriter(f"{folder}/place", gate)
    reshard.prewarm(large, async_checkpointer_type=kind)

    def begin(state_dict: dict[str, Any]) -> Any:
        return reshard.async_save(
            state_dict, storage_writer=writer, async_checkpointer_type=kind, no_dist=True
        )

    # Two at once, for as much as there can ever be.
    warm = [begin(large), begin(large)]
    gate.open()
    # Then ever larger ones, which no memory of those before is large enough for.
    warm += [begin({"w": torch.ones(size)}) for size in range(6000, 7200, 100)]
    large = {"w": torch.ones(7200)}
    warm += [begin(large), begin(large)]
    for future in warm:
        future.result(SECONDS)
    processes = [os.getpid()]
    if kind is PROCESS:
        processes.append(worker_of_this_process().start().pid)

    def held() -> list[dict[str, int]]:
        return [usage(pid) | {"staging memory": staging_pool().nbytes} for pid in processes]

    def more() -> list[str]:
        return [
            f"{name} went from {old[name]} to {new[name]}"
            for old, new in zip(before, held(), strict=True)
            for name in old
            if new[name] > old[name]
        ]

    until_no_save_runs()
    before, most = held(), 0
    for number in range(50):
        last = begin(small if number % 3 else large)
        most = max(most, staging_pool().nbytes)
    last.result(SECONDS)
    # Threads that have ended are listed a moment longer.
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not more(), 5)
    added, after = more(), held()
    # Other tests may have files there for a moment.
    wait_until(lambda: files_in_memory() <= in_memory, 10)
    writer.close()
    reshard.close()
    closed = usage(os.getpid()), staging_pool().nbytes
    return added, after, most, closed, [pid for pid in processes[1:] if is_running(pid)]


@both_kinds
def test_fifty_saves_take_no_more_than_the_first_ones(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    added, after, most, closed, running = run_alone(save_often, str(tmp_path), kind)

    assert added == []
    assert most < 3 * 4 * 7200
    for held in after:
        assert held["named shared files"] == 0
        assert held["shared files"] <= 8
        assert 1 <= held["shared mappings"] <= 8
    assert closed[0]["shared files"] == closed[0]["shared mappings"] == closed[1] == 0
    assert running == []
    assert reshard.read_tensor(tmp_path / "place", "w").shape == (1000,)


def close_while_the_stager_lives(folder: str, use_async_staging: bool) -> int:
    stager = DefaultStager(StagingOptions(use_async_staging=use_async_staging))
    begun = reshard.async_save({"w": torch.ones(10)}, checkpoint_id=folder, async_stager=stager)
    getattr(begun, "upload_completion", begun).result(SECONDS)
    until_no_save_runs()
    reshard.close()
    return usage(os.getpid())["shared mappings"]


@pytest.mark.parametrize("use_async_staging", [True, False], ids=["async", "blocking"])
def test_close_gives_the_staging_memory_back_while_a_stager_lives_on(
    use_async_staging: bool, tmp_path: Path
) -> None:
    assert run_alone(close_while_the_stager_lives, str(tmp_path), use_async_staging) == 0


class LocalPlanner(reshard.DefaultSavePlanner):
    """Lives in a module that ranks load under a name of their own, which no worker knows."""


def save_with_one_worker(folder: str) -> Any:
    """Saves of all sorts; the processes that did them, and what became of the one that failed."""
    reshard.prewarm({"w": torch.ones(3)}, async_checkpointer_type=PROCESS)
    pids = [worker_of_this_process().start().pid]
    for number in range(5):
        options = {
            "checkpoint_id": f"{folder}/{number}",
            "async_checkpointer_type": PROCESS,
        }
        state_dict = {"w": torch.full((3,), 2.0), "number": number}
        if number == 2:
            bad = reshard.async_save(state_dict, planner=LocalPlanner(), **options)
            error = bad.exception(SECONDS)
        planner = ScalingPlanner(float(number))
        reshard.async_save(state_dict, planner=planner, **options).result(SECONDS)
        pids.append(worker_of_this_process().start().pid)
    was_running = pids[0] != os.getpid() and is_running(pids[0])
    reshard.close()
    # Not even its shell is left.
    return len(set(pids)), was_running, Path(f"/proc/{pids[0]}").exists(), str(error)


def test_one_worker_does_all_saves_with_the_planners_it_is_given_until_it_is_closed(
    tmp_path: Path,
) -> None:
    *outcome, error = run_alone(save_with_one_worker, str(tmp_path))

    assert outcome == [1, True, False]
    assert "No module named '_of_ranks_test_async_together'" in error
    for number in range(5):
        found = reshard.read_state_dict(tmp_path / str(number))
        assert found["number"] == number
        assert found["w"].tolist() == [2.0 * number] * 3


def children() -> set[str]:
    threads = Path("/proc/self/task").iterdir()
    return {pid for thread in threads for pid in (thread / "children").read_text().split()}


def prewarm_behind_a_save(folder: str) -> int:
    before = children()
    reshard.async_save({"a": 1}, checkpoint_id=folder, async_checkpointer_type=PROCESS)
    reshard.prewarm({"a": 1}, async_checkpointer_type=PROCESS)
    return len(children() - before)


def test_a_save_and_prewarm_start_one_worker_between_them(tmp_path: Path) -> None:
    assert run_alone(prewarm_behind_a_save, str(tmp_path)) == 1


def save_with_cached_plans(folder: str) -> list[str]:
    """One planner for saves whose layout stays, changes on one rank, and changes back."""
    planner = reshard.DefaultSavePlanner(enable_plan_caching=True)
    futures = []
    extras = [0, 0, 3, 3, 0, 0]
    for step, extra in enumerate(extras):
        state_dict: dict[str, Any] = {"rows": sharded(WHOLE + step), "step": step}
        if extra and dist.get_rank() == 1:
            state_dict["extra"] = torch.full((extra,), float(step))
        futures.append(
            reshard.async_save(
                state_dict,
                checkpoint_id=f"{folder}/{step}",
                planner=planner,
                async_checkpointer_type=PROCESS,
            )
        )
    wrong = []
    for step, (future, extra) in enumerate(zip(futures, extras, strict=True)):
        future.result(SECONDS)
        found = reshard.read_state_dict(f"{folder}/{step}")
        if not (
            same_bits(found["rows"], WHOLE + step)
            and found["step"] == step
            and found.get("extra", torch.ones(0)).tolist() == [float(step)] * extra
        ):
            wrong.append(f"step {step}")
    return wrong


def test_a_planner_that_caches_its_plans_serves_many_saves_of_a_process(tmp_path: Path) -> None:
    assert run_ranks(2, save_with_cached_plans, str(tmp_path)) == [[]] * 2


# Loads


def load_what_is_being_saved(folder: str, kind: AsyncCheckpointerType) -> Any:
    for name in ("place", "other"):
        reshard.save({"rows": sharded(WHOLE), "step": 0}, checkpoint_id=f"{folder}/{name}")
    gate = Gate(folder)
    future = reshard.async_save(
        {"rows": sharded(WHOLE + 1), "step": 1},
        storage_writer=GatedWriter(f"{folder}/place", gate),
        async_checkpointer_type=kind,
    )
    other = {"rows": sharded(WHOLE * 0), "step": -1}
    reshard.load(other, checkpoint_id=f"{folder}/other")
    waited = future.done()
    # A load that does not wait is over long before this.
    timer = threading.Timer(0.3, gate.open)
    timer.start()
    loaded = {"rows": sharded(WHOLE * 0), "step": -1}
    reshard.load(loaded, checkpoint_id=f"{folder}/place")
    same = same_bits(loaded["rows"].full_tensor(), WHOLE + 1)
    return waited, other["step"], loaded["step"], same


@thread_of_two_process_of_one
def test_a_load_waits_for_the_save_of_the_same_place_and_for_no_other(
    kind: AsyncCheckpointerType, ranks: int, tmp_path: Path
) -> None:
    outcomes = run_ranks(ranks, load_what_is_being_saved, str(tmp_path), kind)

    assert outcomes == [(False, 0, 1, True)] * ranks


def load_by_another_name(folder: str, name: str) -> int:
    os.chdir(folder)
    os.makedirs("place")
    os.symlink("place", "link")
    reshard.save({"step": 0}, checkpoint_id="place")
    gate = Gate(folder)
    future = reshard.async_save({"step": 1}, storage_writer=GatedWriter(f"{folder}/place", gate))
    timer = threading.Timer(0.3, gate.open)
    timer.start()
    loaded = {"step": -1}
    reshard.load(loaded, checkpoint_id=name)
    future.result(SECONDS)
    return loaded["step"]


@pytest.mark.parametrize(
    "name",
    [
        "place/",
        "./place",
        "link",
    ],
    ids=["trailing slash", "relative", "symbolic link"],
)
def test_a_load_waits_whatever_the_place_is_called(name: str, tmp_path: Path) -> None:
    assert run_alone(load_by_another_name, str(tmp_path), name) == 1


# Who takes part


def save_with_some_ranks(folder: str, kind: AsyncCheckpointerType) -> Any:
    group = dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank == 0:
        # Were it needed, the others would wait for it.
        return None
    state_dict = {f"of_rank_{rank}": torch.full((2,), float(rank)), "common": 1}
    options = {
        "group": {"process_group": group},
        "parts": {"process_group": group, "use_collectives": False},
        f"alone-{rank}": {"no_dist": True},
    }
    futures = [
        reshard.async_save(
            state_dict, checkpoint_id=f"{folder}/{name}", async_checkpointer_type=kind, **chosen
        )
        for name, chosen in options.items()
    ]
    return [sorted(future.result(SECONDS).state_dict_metadata) for future in futures]


@both_kinds
def test_groups_single_ranks_and_ranks_without_each_other_save_in_the_background(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    nothing, *names = run_ranks(3, save_with_some_ranks, str(tmp_path), kind)

    assert nothing is None
    for rank, (of_group, of_parts, alone) in enumerate(names, start=1):
        assert of_group == ["common", "of_rank_1", "of_rank_2"]
        assert of_parts == alone == ["common", f"of_rank_{rank}"]
    for place in ("group", "parts"):
        found = reshard.read_state_dict(tmp_path / place)
        assert found.pop("common") == 1
        assert {k: v.tolist() for k, v in found.items()} == {
            "of_rank_1": [1.0, 1.0],
            "of_rank_2": [2.0, 2.0],
        }
    assert sorted(path.name[:16] for path in (tmp_path / "parts").glob(".metadata*")) == [
        ".metadata",
        ".metadata.0-of-2",
        ".metadata.1-of-2",
    ]
    assert sorted(reshard.read_state_dict(tmp_path / "alone-2")) == ["common", "of_rank_2"]


def change_folder_between_saves(folder: str, kind: AsyncCheckpointerType) -> list[str]:
    for name in ("first", "second"):
        os.makedirs(f"{folder}/{name}")
        os.chdir(f"{folder}/{name}")
        reshard.async_save({"name": name}, checkpoint_id="place", async_checkpointer_type=kind)
    reshard.close()
    return sorted(str(path.parent) for path in Path(folder).glob("*/place"))


@both_kinds
def test_a_relative_place_is_where_it_was_when_async_save_was_called(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    run_alone(change_folder_between_saves, str(tmp_path), kind)

    for name in ("first", "second"):
        assert reshard.read_state_dict(tmp_path / name / "place") == {"name": name}


def save_fifty_times_together(folder: str, kind: AsyncCheckpointerType) -> list[str]:
    """What ranks hold more of after fifty saves of 500 tensors than after the first ones."""
    state = {f"w{i}_of_{dist.get_rank()}": torch.full((10,), float(i)) for i in range(500)}

    def save(times: int) -> None:
        for _ in range(times):
            future = reshard.async_save(state, checkpoint_id=folder, async_checkpointer_type=kind)
        future.result(SECONDS)
        dist.barrier()
        until_no_save_runs()

    save(4)
    processes = [os.getpid()]
    if kind is PROCESS:
        processes.append(worker_of_this_process().start().pid)
    before = [usage(pid) for pid in processes]
    save(50)
    after = [usage(pid) for pid in processes]
    assert all(held["shared files"] <= 8 for held in after)
    return [
        f"{name} went from {old[name]} to {new[name]}"
        for old, new in zip(before, after, strict=True)
        for name in old
        # Connections to the other rank come and go.
        if new[name] > old[name] + 1
    ]


@both_kinds
def test_fifty_saves_of_many_tensors_on_two_ranks_take_no_more_than_the_first(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    assert run_ranks(2, save_fifty_times_together, str(tmp_path), kind, seconds=110) == [[], []]
    assert len(reshard.read_state_dict(tmp_path)) == 1000

"""Ranks that are at different operations: one fails, and the next works again."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

import reshard
from reshard.coordination import pairing
from reshard.state_dict_saver import AsyncCheckpointerType
from support.background import PROCESS, SECONDS, THREAD, wait_until
from support.ranks import run_ranks


def values(seed: float) -> dict[str, Any]:
    return {f"of_rank_{dist.get_rank()}": torch.full((3,), seed), "common": seed}


def outcome(call: Any) -> str:
    """What a call raises, or nothing."""
    try:
        call()
    except reshard.CheckpointException as error:
        return "; ".join(str(reason) for reason, _ in error.failures.values())
    return ""


def save(folder: str, name: str, **options: Any) -> str:
    seed = float(ord(name))
    return outcome(lambda: reshard.save(values(seed), checkpoint_id=f"{folder}/{name}", **options))


def is_whole(folder: str | Path, name: str, ranks: int) -> bool:
    found = reshard.read_state_dict(f"{folder}/{name}")
    expected = [float(ord(name))] * 3
    return all(found[f"of_rank_{rank}"].tolist() == expected for rank in range(ranks))


# One rank misses one


def miss_one(folder: str, absent: int) -> list[str]:
    told = [save(folder, "a")] if dist.get_rank() != absent else []
    return [*told, save(folder, "b"), save(folder, "c")]


@pytest.mark.parametrize("absent", [0, 3])
@pytest.mark.parametrize("store", ["file", "tcp"])
def test_a_rank_that_missed_a_save_is_named_and_the_next_save_works(
    absent: int, store: Any, tmp_path: Path
) -> None:
    for rank, told in enumerate(run_ranks(4, miss_one, str(tmp_path), absent, store=store)):
        assert told[-2:] == ["", ""]
        if rank != absent:
            assert told[0] == (
                f"rank {absent} did not take part in save to '{tmp_path}/a': it is at save to "
                f"'{tmp_path}/b'. All ranks must do the same, in the same order"
            )
    assert not (tmp_path / "a" / ".metadata").exists()
    assert is_whole(tmp_path, "b", 4)
    assert is_whole(tmp_path, "c", 4)


def miss_one_and_begin_anew(folder: str, absent: int) -> list[str]:
    """The group is made again over the same store before the absent rank saves at all."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    done = [f"{folder}/done-{other}" for other in range(world_size) if other != absent]
    told = []
    if rank != absent:
        told.append(save(folder, "a", timeout_seconds=1))
        Path(f"{folder}/done-{rank}").touch()
    wait_until(lambda: all(map(os.path.exists, done)))
    store = dist.distributed_c10d._get_default_store().underlying_store
    dist.destroy_process_group()
    # Gloo itself cannot meet twice in one store.
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    return [*told, save(folder, "b"), save(folder, "c")]


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 2])
def test_a_new_group_over_the_same_store_is_not_behind(absent: int, tmp_path: Path) -> None:
    for rank, told in enumerate(run_ranks(3, miss_one_and_begin_anew, str(tmp_path), absent)):
        assert told[-2:] == ["", ""]
        assert rank == absent or f"lost rank {absent}" in told[0]
    assert is_whole(tmp_path, "c", 3)


def miss_one_in_the_background(folder: str, kind: AsyncCheckpointerType, absent: int) -> list[str]:
    def begin(name: str) -> str:
        future = reshard.async_save(
            values(float(ord(name))), checkpoint_id=f"{folder}/{name}", async_checkpointer_type=kind
        )
        return outcome(lambda: future.result(SECONDS))

    told = [begin("a")] if dist.get_rank() != absent else []
    return [*told, begin("b"), begin("c")]


@pytest.mark.parametrize("absent", [0, 2])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(THREAD, id="thread"),
        pytest.param(PROCESS, id="process", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_missed_a_background_save_is_named_and_the_next_works(
    kind: AsyncCheckpointerType, absent: int, tmp_path: Path
) -> None:
    outcomes = run_ranks(3, miss_one_in_the_background, str(tmp_path), kind, absent)

    for rank, told in enumerate(outcomes):
        assert told[-2:] == ["", ""]
        if rank != absent:
            assert f"rank {absent} did not take part in async save" in told[0]
            assert "/b'. All ranks must" in told[0]
    assert is_whole(tmp_path, "b", 3)
    assert is_whole(tmp_path, "c", 3)


def miss_one_of_several_in_flight(folder: str) -> list[str]:
    """All ranks have two saves in flight when it turns out that rank 2 skipped the first."""

    def begin(name: str) -> Any:
        return reshard.async_save(values(float(ord(name))), checkpoint_id=f"{folder}/{name}")

    first, second, *rest = "bcd" if dist.get_rank() == 2 else "abcd"
    futures = [begin(first), begin(second)]
    told = []
    for name in [*rest, "e"]:
        told.append(outcome(lambda: futures.pop(0).result(SECONDS)))
        futures.append(begin(name))
    return told + [outcome(lambda f=future: f.result(SECONDS)) for future in futures]  # type: ignore[misc]


def test_saves_that_were_begun_meanwhile_move_along(tmp_path: Path) -> None:
    for rank, told in enumerate(run_ranks(3, miss_one_of_several_in_flight, str(tmp_path))):
        assert told[-4:] == [""] * 4
        assert rank == 2 or "rank 2 did not take part" in told[0]
    for name in "bcde":
        assert is_whole(tmp_path, name, 3)


# One rank comes late


def come_late(folder: str, late: int) -> tuple[str, float, str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == late:
        others = [f"{folder}/done-{other}" for other in range(world_size) if other != late]
        wait_until(lambda: all(map(os.path.exists, others)))
    began = time.monotonic()
    told = save(folder, "a", timeout_seconds=1)
    seconds = time.monotonic() - began
    Path(f"{folder}/done-{rank}").touch()
    return told, seconds, save(folder, "b")


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_comes_to_a_save_that_the_others_gave_up_is_told_at_once(
    late: int, tmp_path: Path
) -> None:
    for rank, (told, seconds, next_told) in enumerate(run_ranks(3, come_late, str(tmp_path), late)):
        assert next_told == ""
        if rank != late:
            assert f"lost rank {late}" in told
            assert "did not answer within 1 s" in told
        else:
            assert ("lost rank 2" if late == 2 else "it left with RankLostError") in told
            assert seconds < 4
    assert is_whole(tmp_path, "b", 3)


def stay_away_after_one(folder: str) -> str:
    told = save(folder, "a")
    if dist.get_rank() == 1:
        wait_until(lambda: os.path.exists(f"{folder}/done"))
        return told
    told += save(folder, "b", timeout_seconds=1)
    Path(f"{folder}/done").touch()
    return told


def test_a_rank_that_does_not_come_is_named_with_what_it_did_last(tmp_path: Path) -> None:
    told = run_ranks(2, stay_away_after_one, str(tmp_path))[0]

    assert f"lost rank 1 while getting ready, in the save to '{tmp_path}/b': " in told
    assert f"(its last was save to '{tmp_path}/a')" in told


def miss_one_of_the_same(folder: str, absent: int, how: str) -> list[str]:
    """All operations are to one place, and each begins when the one before is over everywhere."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    save(folder, "a")
    told = []
    for step in range(4):
        if rank == absent and step == 0:
            told.append("")
        elif how == "save":
            told.append(save(folder, "a", timeout_seconds=1))
        else:
            state = values(0.0)
            told.append(
                outcome(
                    lambda state=state: reshard.load(  # type: ignore[misc]
                        state, checkpoint_id=f"{folder}/a", timeout_seconds=1
                    )
                )
            )
        Path(f"{folder}/done-{step}-{rank}").touch()
        done = [f"{folder}/done-{step}-{other}" for other in range(world_size)]
        wait_until(lambda done=done: all(map(os.path.exists, done)))  # type: ignore[misc]
    return told


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 2])
@pytest.mark.parametrize("how", ["save", "load"])
def test_a_rank_that_missed_one_of_the_same_is_told_once_and_then_in_step(
    how: str, absent: int, tmp_path: Path
) -> None:
    outcomes = run_ranks(3, miss_one_of_the_same, str(tmp_path), absent, how)

    for rank, told in enumerate(outcomes):
        assert told[2:] == ["", ""]
        assert "lost rank" in told[1]
        assert rank == absent or f"lost rank {absent}" in told[0]


# Ranks that do different things


def do_different_things(folder: str, other: str) -> str:
    """Two ranks save, and are gone when they were told; the third does something else."""
    reshard.save(values(1.0), checkpoint_id=folder)
    if dist.get_rank() < 2:
        began = time.monotonic()
        told = outcome(lambda: reshard.save(values(2.0), checkpoint_id=folder))
        Path(f"{folder}-{dist.get_rank()}").write_text(f"{time.monotonic() - began:.0f} {told}")
        wait_until(lambda: all(os.path.exists(f"{folder}-{rank}") for rank in range(2)))
        os._exit(0)
    if other == "load":
        return outcome(lambda: reshard.load(values(2.0), checkpoint_id=folder))
    return outcome(lambda: reshard.save(values(2.0), checkpoint_id=folder, use_collectives=False))


@pytest.mark.parametrize("other", ["load", "save without collectives"])
def test_ranks_that_do_different_things_are_told_so(other: str, tmp_path: Path) -> None:
    folder = f"{tmp_path}/x"
    *_, left = run_ranks(3, do_different_things, folder, other, seconds=30, dying={0, 1})

    for rank in range(2):
        seconds, _, told = Path(f"{folder}-{rank}").read_text().partition(" ")
        assert int(seconds) < 10
        assert f"rank 2 did not take part in save to '{folder}': it is at {other}" in told
    assert "lost rank 0" in left
    assert "died" in left
    assert reshard.read_state_dict(folder)["common"] == 1.0


def save_to_different_places(folder: str) -> str:
    return save(folder, "abc"[dist.get_rank()])


def test_ranks_that_all_save_to_different_places_are_told_at_once(tmp_path: Path) -> None:
    for text in run_ranks(3, save_to_different_places, str(tmp_path), seconds=10):
        assert "ranks are at different operations" in text
        for rank, name in enumerate("abc"):
            assert f"rank {rank}: save to '{tmp_path}/{name}'" in text
    assert list(tmp_path.iterdir()) == []


def save_once_more_than_the_others(folder: str) -> list[str]:
    """Rank 0 alone calls save, once, and then all save again and again."""
    told = [save(folder, "x")] if dist.get_rank() == 0 else []
    return told + [save(folder, chr(ord("a") + step)) for step in range(2 * pairing.PATIENCE)]


def test_a_save_that_one_rank_alone_calls_fails_and_later_ones_work(tmp_path: Path) -> None:
    for rank, told in enumerate(run_ranks(3, save_once_more_than_the_others, str(tmp_path))):
        assert told[-1] == told[-2] == ""
        assert rank != 0 or "did not take part in save to" in told[0]


def load_where_the_others_save(folder: str) -> list[str]:
    told = [save(folder, "a")]
    if dist.get_rank() == 0:
        told.append(outcome(lambda: reshard.load(values(0.0), checkpoint_id=f"{folder}/a")))
    else:
        told.append(save(folder, "x"))
    return told + [save(folder, name) for name in "bc"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_load_in_place_of_a_save_costs_both_and_the_next_save_works(
    ranks: int, tmp_path: Path
) -> None:
    outcomes = run_ranks(ranks, load_where_the_others_save, str(tmp_path))

    for rank, (before, told, *after) in enumerate(outcomes):
        assert [before, *after] == [""] * 3
        own = f"save to '{tmp_path}/x'" if rank else f"load of '{tmp_path}/a'"
        assert f"did not take part in {own}: it is at" in told
    assert is_whole(tmp_path, "b", ranks)
    assert is_whole(tmp_path, "c", ranks)


# The store


def save_and_look_for_keys(folder: str) -> int:
    """How many rounds of saves, one of them missed by a rank, left no key behind."""
    store = dist.distributed_c10d._get_default_store()

    def keys_of_operations() -> list[str]:
        return [key for key in store.list_keys() if re.search(r"reshard/[^/]*/\d+/", key)]

    rounds = 0
    while rounds < 5:
        save(folder, "a")
        if dist.get_rank() != 2:
            assert "did not take part" in save(folder, "b")
        save(folder, "c")
        reshard.async_save(values(1.0), checkpoint_id=f"{folder}/d").result(SECONDS)
        dist.barrier()
        # Whoever leaves last cleans up, after it has its answer.
        wait_until(lambda: not keys_of_operations(), 10)
        dist.barrier()
        rounds += 1
    return rounds


@pytest.mark.skipif(
    not hasattr(dist.Store, "list_keys"),
    reason=f"torch {torch.__version__} cannot list the keys of a store",
)
def test_operations_that_are_over_leave_nothing_in_the_store(tmp_path: Path) -> None:
    assert run_ranks(3, save_and_look_for_keys, str(tmp_path), store="tcp") == [5] * 3


def disagree(folder: str, argument: str, value: Any, kind: AsyncCheckpointerType | None) -> str:
    reshard.save(values(0), checkpoint_id=f"{folder}/base", fingerprint=True)
    given = {argument: value.format(folder=folder) if isinstance(value, str) else value}
    options = given if dist.get_rank() else {}
    if argument == "verify":
        text = outcome(lambda: reshard.load(values(1), checkpoint_id=f"{folder}/base", **options))
    elif kind is None:
        text = save(folder, "a", **options)
    else:
        text = outcome(
            lambda: reshard.async_save(
                values(1), checkpoint_id=f"{folder}/a", async_checkpointer_type=kind, **options
            ).result()  # type: ignore[union-attr]
        )
    return text + save(folder, "b")


@pytest.mark.parametrize(
    ("argument", "value", "shown"),
    [
        ("base", "{folder}/base", "None on rank 0, '{folder}/base' on rank 1"),
        ("fingerprint", True, "False on rank 0, True on rank 1"),
        ("check_replicas", True, "False on rank 0, True on rank 1"),
        ("verify", "fingerprint", "something else on rank 0, 'fingerprint' on rank 1"),
    ],
)
def test_ranks_that_ask_for_different_things_are_told_what_differs(
    argument: str, value: Any, shown: str, tmp_path: Path
) -> None:
    texts = run_ranks(2, disagree, str(tmp_path), argument, value, None)

    wanted = f"ranks do not agree on {argument}: {shown.format(folder=tmp_path)}. Pass the same"
    assert all(wanted in text for text in texts), texts
    assert not (tmp_path / "a").exists()
    assert is_whole(tmp_path, "b", 2)


@pytest.mark.parametrize("kind", AsyncCheckpointerType)
def test_background_saves_that_differ_are_told_what_differs(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    texts = run_ranks(2, disagree, str(tmp_path), "check_replicas", True, kind)

    assert all("ranks do not agree on check_replicas: False on" in text for text in texts), texts
    assert is_whole(tmp_path, "b", 2)

"""Loads that are verified end to end, checkpoints compared, and replicas that have drifted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard.state_dict_saver import AsyncCheckpointerType
from reshard.training import TrainState
from support.optimizers import Blockwise
from support.ranks import run_ranks
from support.samples import SHAPES, SPREADS


def save_in_every_layout(folder: str) -> None:
    for number, spread in enumerate(SPREADS[dist.get_world_size()].values()):
        reshard.save(
            spread.state_dict(seed=0), checkpoint_id=f"{folder}/{number}", fingerprint=True
        )


def load_in_every_layout(folder: str, saved_on: int) -> set[int]:
    counts = set()
    for number in range(len(SPREADS[saved_on])):
        for spread in SPREADS[dist.get_world_size()].values():
            report = reshard.load(
                spread.state_dict(seed=None),
                checkpoint_id=f"{folder}/{number}",
                verify="fingerprint",
            )
            counts.add(report.verified)
    return counts


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (4, 2)])
def test_a_load_in_any_layout_is_verified_against_a_save_in_any_other(
    saved_on: int, loaded_on: int, tmp_path: Path
) -> None:
    run_ranks(saved_on, save_in_every_layout, str(tmp_path))

    counts = run_ranks(loaded_on, load_in_every_layout, str(tmp_path), saved_on)

    assert counts == [{len(SHAPES)}] * loaded_on


def test_checkpoints_in_any_two_layouts_are_the_same(tmp_path: Path) -> None:
    places = []
    for ranks in (2, 4):
        run_ranks(ranks, save_in_every_layout, str(tmp_path / str(ranks)))
        places += [tmp_path / str(ranks) / str(number) for number in range(len(SPREADS[ranks]))]
    assert len(places) > 6
    for place in places:
        assert reshard.same(places[0], place)


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(whole: torch.Tensor, dim: int) -> DTensor:
    return distribute_tensor(whole, mesh(), [Shard(dim)])


def refusal(attempt: Callable[[], Any]) -> str:
    """The class and text of what an attempt is refused with; empty if it is not."""
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 - handed to the test
        return f"{type(error).__name__}: {error}"
    return ""


def save_rows(place: str, kind: str) -> None:
    torch.manual_seed(0)
    state = {"w": sharded(torch.randn(64, 48), 0), "b": torch.randn(7), "n": 3}
    if kind == "alone":
        reshard.save(state, checkpoint_id=place, fingerprint=True, use_collectives=False)
    elif kind == "now":
        reshard.save(state, checkpoint_id=place, fingerprint=True)
    else:
        reshard.async_save(
            state,
            checkpoint_id=place,
            fingerprint=True,
            async_checkpointer_type=AsyncCheckpointerType(kind),
        ).result()
        reshard.close()


def load_columns(place: str) -> int:
    state = {"w": sharded(torch.zeros(64, 48), 1), "b": torch.zeros(7), "n": 0}
    return reshard.load(state, checkpoint_id=place, verify="fingerprint").verified


@pytest.mark.parametrize("kind", ["now", "alone", "thread", "process"])
def test_every_kind_of_save_keeps_fingerprints(kind: str, tmp_path: Path) -> None:
    run_ranks(2, save_rows, str(tmp_path), kind)
    assert run_ranks(2, load_columns, str(tmp_path)) == [2, 2]


def refused_columns(place: str) -> tuple[str, str]:
    state = {"w": sharded(torch.zeros(64, 48), 1), "b": torch.zeros(7), "n": 0}
    return (
        refusal(lambda: reshard.load(state, checkpoint_id=place, verify="fingerprint")),
        refusal(lambda: reshard.load(state, checkpoint_id=place)),
    )


def test_damage_that_no_checksum_covers_in_part_is_found_and_named(tmp_path: Path) -> None:
    run_ranks(2, save_rows, str(tmp_path), "now")
    file = next(tmp_path.glob("__1_*.safetensors"))
    content = bytearray(file.read_bytes())
    begin = reshard.FileSystemReader(tmp_path).read_metadata().storage_data
    where = next(
        info.offset
        for index, info in begin.items()
        if index.fqn == "w" and info.relative_path == file.name
    )
    content[where + 5] ^= 0x80
    file.write_bytes(content)

    for verified, plain in run_ranks(2, refused_columns, str(tmp_path)):
        assert verified.startswith(
            "CorruptCheckpointError: 1 tensor is not as saved, by fingerprint: 'w' (on ranks "
            "[0, 1])"
        )
        # Columns are parts of chunks, which are not checked by default.
        assert not plain


class _Spoiling(reshard.FileSystemReader):
    """Stands for memory, or a network, that is at fault on one rank."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        done = super().read_data(plan, planner)
        if dist.get_rank() == 1:
            planner.state_dict["b"][2] += 1
        return done


def load_with_a_fault(place: str) -> str:
    state = {"w": sharded(torch.zeros(64, 48), 1), "b": torch.zeros(7), "n": 0}
    reader = _Spoiling(place)
    return refusal(lambda: reshard.load(state, storage_reader=reader, verify="fingerprint"))


def test_a_rank_whose_replica_differs_after_the_load_is_named(tmp_path: Path) -> None:
    run_ranks(2, save_rows, str(tmp_path), "now")
    for told in run_ranks(2, load_with_a_fault, str(tmp_path)):
        assert told.startswith(
            "CorruptCheckpointError: ranks 0 and 1 have loaded different data for 'b' at [0] of "
            "sizes [7]"
        )


def load_oddly(place: str) -> list[int]:
    cast = {"w": sharded(torch.zeros(64, 48, dtype=torch.float64), 1), "b": torch.zeros(7)}
    alone = {"w": sharded(torch.zeros(64, 48), 1), "b": torch.zeros(7)}
    renamed = {"m": {"w": sharded(torch.zeros(64, 48), 1), "b": torch.zeros(7)}}
    plain = {"w": torch.zeros(64, 48)}
    options: dict[str, Any] = {"checkpoint_id": place, "verify": "fingerprint"}
    return [
        reshard.load(cast, **options).verified,
        reshard.load(alone, **options, no_dist=True).verified,
        reshard.load(renamed, **options, rename={"": "m"}).verified,
        reshard.load(alone, **options, exclude=["w"]).verified,
        reshard.load(plain, **options).verified,
    ]


def test_only_what_can_be_compared_counts_as_verified(tmp_path: Path) -> None:
    run_ranks(2, save_rows, str(tmp_path), "now")
    # Cast; a part of a tensor, on a rank that loads for itself; renamed; excluded; plain.
    assert run_ranks(2, load_oddly, str(tmp_path)) == [[1, 1, 2, 1, 1]] * 2


def load_without(place: str) -> tuple[str, bool]:
    state = {"w": sharded(torch.zeros(64, 48), 1), "b": torch.zeros(7), "n": 0}
    told = refusal(lambda: reshard.load(state, checkpoint_id=place, verify="fingerprint"))
    return told, bool(state["b"].any())


def save_without(place: str) -> None:
    state = {"w": sharded(torch.ones(64, 48), 0), "b": torch.ones(7), "n": 3}
    reshard.save(state, checkpoint_id=place)


def test_a_checkpoint_without_fingerprints_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    run_ranks(2, save_without, str(tmp_path))
    for told, was_changed in run_ranks(2, load_without, str(tmp_path)):
        assert f"the checkpoint at {str(tmp_path)!r} has no fingerprints" in told
        assert "fingerprint=True" in told
        assert not was_changed


# Training state


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 16, bias=False))
    fully_shard(model, mesh=mesh())
    optimizer = Blockwise(model.parameters()) if seed % 2 else torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.linspace(-1, 1, 24).view(3, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_training(place: str, seed: int) -> None:
    model, optimizer = trained(seed)
    extra = reshard.per_rank(torch.full((3,), float(dist.get_rank())))
    tied = torch.arange(12.0)
    state = {"train": TrainState(model, optimizer), "own": extra, "a": tied, "b": tied}
    reshard.save(state, checkpoint_id=place, fingerprint=True)


def load_training(place: str, seed: int) -> tuple[int, int]:
    model, optimizer = trained(seed + 2)
    state = {
        "train": TrainState(model, optimizer),
        "own": reshard.per_rank(torch.zeros(3)),
        "a": torch.zeros(12),
        "b": torch.zeros(12),
    }
    report = reshard.load(state, checkpoint_id=place, verify="fingerprint")
    entries = reshard.FileSystemReader(place).read_metadata().state_dict_metadata
    tensors = [entry for entry in entries.values() if hasattr(entry, "size")]
    return report.verified, len(tensors)


@pytest.mark.parametrize("seed", [0, 1])
def test_states_of_training_are_verified_with_ties_composites_and_values_per_rank(
    seed: int, tmp_path: Path
) -> None:
    run_ranks(2, save_training, str(tmp_path), seed)
    for verified, stored in run_ranks(2, load_training, str(tmp_path), seed):
        assert verified == stored > 6


# Replicas


def save_drifted(place: str, drift: str) -> str:
    torch.manual_seed(0)
    rank = dist.get_rank()
    local = torch.randn(6, 4)
    plain = torch.randn(5)
    own = torch.full((3,), float(rank))
    if drift == "replica" and rank == 2:
        local[3, 1] += 1e-3
    if drift == "plain" and rank in (0, 3):
        plain[1] = float(rank)
    state = {
        "w": DTensor.from_local(local, mesh(), [Replicate()], run_check=False),
        "s": sharded(torch.arange(16.0), 0),
        "b": plain,
        "own": reshard.per_rank(own),
        "empty": torch.zeros(0),
        "n": rank if drift == "none" else 0,
    }
    together = drift != "plain"
    return refusal(
        lambda: reshard.save(
            state, checkpoint_id=place, check_replicas=True, use_collectives=together
        )
    )


@pytest.mark.parametrize(
    ("drift", "expected"),
    [
        ("replica", "'w' at [0, 0] of sizes [6, 4]: rank 2 differs from ranks 0, 1, 3"),
        ("plain", "'b' at [0] of sizes [5]: rank 0 and rank 3 differ from ranks 1, 2"),
        ("none", ""),
    ],
)
def test_drifted_replicas_are_found_before_anything_is_written(
    drift: str, expected: str, tmp_path: Path
) -> None:
    place = tmp_path / "checkpoint"
    for told in run_ranks(4, save_drifted, str(place), drift):
        assert told.startswith("ReplicaConflictError" if expected else "")
        assert expected in told
        assert bool(told) == bool(expected)
    assert place.exists() == (not expected)


def save_twice_with_a_cache(place: str) -> list[str]:
    planner = reshard.DefaultSavePlanner(enable_plan_caching=True)
    refusals = []
    for step in range(3):
        weight = torch.ones(4)
        if step == 2 and dist.get_rank():
            weight[0] = 2
        refusals.append(
            refusal(
                lambda weight=weight, step=step: reshard.save(
                    {"w": weight},
                    checkpoint_id=f"{place}/{step}",
                    planner=planner,
                    check_replicas=True,
                )
            )
        )
    return refusals


def test_replicas_are_compared_when_the_plan_is_cached(tmp_path: Path) -> None:
    for first, second, third in run_ranks(2, save_twice_with_a_cache, str(tmp_path)):
        assert (first, second) == ("", "")
        assert third.startswith("ReplicaConflictError")


def save_frozen_replicas(folder: str) -> str:
    torch.manual_seed(0)
    frozen = torch.randn(300, 40)
    reshard.save({"frozen": frozen}, checkpoint_id=f"{folder}/base")
    if dist.get_rank():
        frozen[299, 39] += 1
    save = reshard.async_save(
        {"frozen": frozen},
        checkpoint_id=f"{folder}/next",
        base=f"{folder}/base",
        frozen=["frozen"],
        check_replicas=True,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    assert isinstance(save, Future)
    told = refusal(save.result)
    reshard.close()
    return told


def test_replicas_of_frozen_tensors_are_compared_in_a_later_save(tmp_path: Path) -> None:
    for told in run_ranks(2, save_frozen_replicas, str(tmp_path)):
        assert told.startswith("ReplicaConflictError")
        assert "'frozen' at [0, 0] of sizes [300, 40]: rank 1 differs from rank 0" in told

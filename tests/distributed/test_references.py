"""Saves with a base by several ranks, in the same layout and in others."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard.checkpoint import bases
from reshard.checkpoint.directory import read_manifest
from reshard.state_dict_saver import AsyncCheckpointerType
from reshard.stores.local import LocalStore
from support.errors import told
from support.ranks import run_ranks
from support.samples import same_bits

LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "rows": ((-1,), [Shard(0)]),
    "columns": ((-1,), [Shard(1)]),
    "replicas": ((-1,), [Replicate()]),
    "blocks": ((2, -1), [Shard(0), Shard(1)]),
    "hybrid": ((2, -1), [Replicate(), Shard(0)]),
}


def whole(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    frozen = torch.randn(24, 20, generator=generator)
    trained = torch.randn(24, 20, generator=generator) + step
    return {"frozen": frozen, "trained": trained, "odd": torch.arange(35.0).reshape(7, 5)}


def sharded(step: int, layout: str) -> dict[str, Any]:
    sizes, placements = LAYOUTS[layout]
    world = dist.get_world_size()
    sizes = tuple(world // (2 if len(sizes) == 2 else 1) if n == -1 else n for n in sizes)
    mesh = init_device_mesh("cpu", sizes)
    state = {
        name: distribute_tensor(tensor, mesh, placements) for name, tensor in whole(step).items()
    }
    return {**state, "step": step, f"of {dist.get_rank()}": torch.tensor(dist.get_rank())}


def referred_bytes(folder: str) -> dict[str, int]:
    """How much of each tensor lies elsewhere."""
    m = read_manifest(LocalStore(folder))
    found = dict.fromkeys(m.tensor_names, 0)
    for tensor, name in enumerate(m.tensor_names):
        for row in range(*m.chunk_starts[tensor : tensor + 2].tolist()):
            if m.origin_of(int(m.chunk_files[row])) is not None:
                found[name] += int(m.stored_nbytes[row])
    return found


def check_loads(folder: str, step: int, world: int) -> None:
    found = reshard.read_state_dict(folder)
    for name, tensor in whole(step).items():
        assert same_bits(found[name], tensor), name
    assert found["step"] == step
    for rank in range(world):
        assert found[f"of {rank}"] == rank


NBYTES = {name: tensor.nbytes for name, tensor in whole(0).items()}


def save_two(folder: str, layouts: list[str], together: list[bool]) -> int:
    """A base and a save with it; how many bytes this rank has written for the second."""
    base, place = f"{folder}/a", f"{folder}/b"
    reshard.save(sharded(0, layouts[0]), checkpoint_id=base, use_collectives=together[0])
    reshard.save(
        sharded(1, layouts[1]), checkpoint_id=place, base=base, use_collectives=together[1]
    )
    files = Path(place).glob(f"__{dist.get_rank()}_*.safetensors")
    return sum(path.stat().st_size for path in files)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("together", [[True, True], [False, False]], ids=["together", "alone"])
def test_in_the_same_layout_only_what_has_changed_is_written(
    layout: str, together: list[bool], tmp_path: Path
) -> None:
    written = run_ranks(4, save_two, str(tmp_path), [layout, layout], together)

    referred = referred_bytes(str(tmp_path / "b"))
    assert referred["frozen"] == NBYTES["frozen"]
    assert referred["odd"] == NBYTES["odd"]
    assert referred["trained"] == 0
    assert all(referred[f"of {rank}"] == 8 for rank in range(4))
    # A header of a page, the trained tensor or a part of it, and a value.
    assert sum(written) < 4 * 4096 + (4 if together[0] is False else 1) * NBYTES["trained"] + 1000
    check_loads(str(tmp_path / "b"), 1, 4)


@pytest.mark.parametrize("together", [[True, False], [False, True]])
def test_a_base_saved_together_or_alone_is_the_same_to_either(
    together: list[bool], tmp_path: Path
) -> None:
    run_ranks(2, save_two, str(tmp_path), ["rows", "rows"], together)

    assert referred_bytes(str(tmp_path / "b"))["frozen"] == NBYTES["frozen"]
    check_loads(str(tmp_path / "b"), 1, 2)


@pytest.mark.parametrize(
    ("layouts", "frozen"),
    [
        (["rows", "columns"], 0),
        (["rows", "replicas"], 0),
        (["blocks", "rows"], 0),
        (["hybrid", "hybrid"], 1),
        (["replicas", "replicas"], 1),
    ],
)
def test_a_base_in_another_layout_is_used_as_far_as_chunks_coincide(
    layouts: list[str], frozen: float, tmp_path: Path
) -> None:
    run_ranks(4, save_two, str(tmp_path), layouts, [True, True])

    referred = referred_bytes(str(tmp_path / "b"))
    assert referred["frozen"] == frozen * NBYTES["frozen"]
    # What is not sharded has not moved.
    assert all(referred[f"of {rank}"] == 8 for rank in range(4))
    check_loads(str(tmp_path / "b"), 1, 4)


def save_one(folder: str, step: int, layout: str, base: str | None, options: Any) -> None:
    reshard.save(sharded(step, layout), checkpoint_id=folder, base=base, **options)


def load_one(folder: str, step: int, layout: str) -> None:
    state = {name: value for name, value in sharded(99, layout).items() if name in NBYTES}
    for value in state.values():
        value.to_local().zero_()
    reshard.load(state, checkpoint_id=folder)
    for name, tensor in whole(step).items():
        assert same_bits(state[name].full_tensor(), tensor), name


@pytest.mark.parametrize("ranks", [(2, 4), (4, 2), (1, 4), (4, 1)])
def test_a_base_of_another_number_of_ranks_is_used_and_any_layout_reads_the_result(
    ranks: tuple[int, int], tmp_path: Path
) -> None:
    a, b, c = (str(tmp_path / name) for name in "abc")
    run_ranks(ranks[0], save_one, a, 0, "rows", None, {})
    run_ranks(ranks[1], save_one, b, 1, "rows", a, {})
    run_ranks(ranks[1], save_one, c, 2, "rows", b, {})

    # The chunks of one rank are those of no other number of ranks.
    assert referred_bytes(b)["of 0"] == 8
    assert referred_bytes(b)["frozen"] == 0
    assert referred_bytes(c)["frozen"] == NBYTES["frozen"]
    check_loads(c, 2, ranks[1])
    for layout in ("columns", "blocks"):
        run_ranks(4, load_one, c, 2, layout)


def test_rows_of_a_hugging_face_directory_are_referred_to_and_columns_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "hf").mkdir()
    held = {f"model.{name}": tensor for name, tensor in whole(0).items()}
    save_file(held, tmp_path / "hf" / "model.safetensors")
    for layout, frozen in (("rows", 1), ("columns", 0), ("replicas", 1)):
        place = str(tmp_path / layout)
        run_ranks(4, save_one, place, 1, layout, str(tmp_path / "hf"), {})

        referred = referred_bytes(place)
        assert referred["frozen"] == frozen * NBYTES["frozen"]
        assert referred["odd"] == frozen * NBYTES["odd"]
        assert referred["trained"] == 0
        check_loads(place, 1, 4)
        run_ranks(2, load_one, place, 1, "columns")


# In the background


def save_in_the_background(folder: str, kind: AsyncCheckpointerType, frozen: list[str]) -> None:
    state = sharded(0, "rows")
    reshard.save(state, checkpoint_id=f"{folder}/0")
    for step in (1, 2, 3):
        state["trained"].to_local().add_(1)
        state["step"] = step
        future = reshard.async_save(
            state,
            checkpoint_id=f"{folder}/{step}",
            base=f"{folder}/{step - 1}",
            frozen=frozen,
            async_checkpointer_type=kind,
        )
        # Training goes on at once.
        state["trained"].to_local().add_(1)
        future.result()
        state["trained"].to_local().sub_(1)
    reshard.close()


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
@pytest.mark.parametrize("frozen", [[], ["frozen", "odd", "of *"]], ids=["unmarked", "marked"])
def test_a_background_save_of_shards_refers_to_what_is_frozen(
    kind: AsyncCheckpointerType, frozen: list[str], tmp_path: Path
) -> None:
    run_ranks(2, save_in_the_background, str(tmp_path), kind, frozen)

    base = reshard.read_state_dict(tmp_path / "0")
    for step in (1, 2, 3):
        place = str(tmp_path / str(step))
        referred = referred_bytes(place)
        assert referred["frozen"] == NBYTES["frozen"]
        assert referred["odd"] == NBYTES["odd"]
        assert referred["trained"] == 0
        found = reshard.read_state_dict(place)
        assert same_bits(found["frozen"], base["frozen"])
        wanted = base["trained"]
        for _ in range(step):
            wanted = wanted + 1
        assert torch.allclose(found["trained"], wanted)
        assert found["step"] == step


def change_on_one_rank(folder: str, kind: AsyncCheckpointerType) -> Any:
    state = {"large": sharded_rows(torch.arange(80_000.0).reshape(400, 200))}
    reshard.save(state, checkpoint_id=f"{folder}/a")
    if dist.get_rank() == 1:
        state["large"].to_local().data[-1, -1] = -1
    options: dict[str, Any] = {
        "checkpoint_id": f"{folder}/b",
        "base": f"{folder}/a",
        "frozen": ["large"],
        "async_checkpointer_type": kind,
    }
    failed = told(lambda: reshard.async_save(state, **options).result())
    is_gone = not list(Path(folder).glob("b/*"))
    dist.barrier()
    reshard.async_save(state, **options).result()
    reshard.close()
    return failed.kind, failed.text, is_gone


def sharded_rows(tensor: torch.Tensor) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tensor, mesh, [Shard(0)])


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_a_rank_whose_frozen_tensor_has_changed_fails_all_and_the_next_save_copies_it(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    outcomes = run_ranks(2, change_on_one_rank, str(tmp_path), kind)

    for name, text, is_gone in outcomes:
        assert name == "BaseError", text
        assert "'large" in text
        assert "On rank 1" in text
        assert is_gone
    found = reshard.read_state_dict(tmp_path / "b")["large"]
    assert found[-1, -1] == -1
    assert same_bits(found[:-1], torch.arange(80_000.0).reshape(400, 200)[:-1])


# One rank alone has a problem


def save_with_a_base(folder: str, victim: int, in_background: bool, together: bool) -> Any:
    state = sharded(1, "rows")
    options: dict[str, Any] = {
        "checkpoint_id": f"{folder}/new",
        "base": f"{folder}/a",
        "use_collectives": together,
    }
    # As if the file system did not show the base to one rank.
    missing = LocalStore(f"{folder}/missing")
    unseen = mock.patch.object(
        bases, "read_manifest", side_effect=lambda there: read_manifest(missing)
    )
    with unseen if dist.get_rank() == victim else contextlib.nullcontext():
        if in_background:
            return told(lambda: reshard.async_save(state, **options).result())[:2]
        return told(lambda: reshard.save(state, **options))[:2]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("together", [True, False])
def test_a_rank_that_cannot_read_the_base_fails_all(
    victim: int, in_background: bool, together: bool, tmp_path: Path
) -> None:
    run_ranks(2, save_one, str(tmp_path / "a"), 0, "rows", None, {})

    outcomes = run_ranks(2, save_with_a_base, str(tmp_path), victim, in_background, together)

    for rank, (kind, text) in enumerate(outcomes):
        if in_background and rank == victim:
            # It is told at once.
            assert text.startswith("the base cannot be used: there is no checkpoint at"), text
            continue
        assert kind == "CheckpointNotFoundError", text
        assert text.startswith("the base cannot be used: there is no checkpoint at"), text
        assert f"On rank {victim}" in text
    assert not list(tmp_path.glob("new/*"))

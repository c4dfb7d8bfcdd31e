"""DTensors saved on one mesh of real ranks and loaded on another, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import reshard
from support.ranks import run_ranks
from support.samples import SHAPES, SPREADS, raw, same_bits, sample


def save_in_every_layout(folder: str) -> None:
    for number, spread in enumerate(SPREADS[dist.get_world_size()].values()):
        reshard.save(spread.state_dict(seed=number), checkpoint_id=f"{folder}/{number}")


def load_in_every_layout(folder: str, saved_on: int) -> list[str]:
    """What differs after the load, in words."""
    wrong = []
    rank = dist.get_rank()
    for number, saved in enumerate(SPREADS[saved_on]):
        for wanted, spread in SPREADS[dist.get_world_size()].items():
            state_dict = spread.state_dict(seed=None)
            reshard.load(state_dict, checkpoint_id=f"{folder}/{number}")
            wrong += [
                f"{name} from {saved!r} to {wanted!r} on rank {rank}"
                for name in SHAPES
                if not same_bits(
                    state_dict[name].to_local(), spread.local_part(sample(name, number), rank)
                )
            ]
    return wrong


@pytest.mark.parametrize("loaded_on", [2, 3, 4])
@pytest.mark.parametrize("saved_on", [2, 3, 4])
def test_what_one_mesh_saved_loads_bit_for_bit_on_every_other(
    saved_on: int, loaded_on: int, tmp_path: Path
) -> None:
    run_ranks(saved_on, save_in_every_layout, str(tmp_path))

    found = run_ranks(loaded_on, load_in_every_layout, str(tmp_path), saved_on)

    assert found == [[]] * loaded_on


def test_one_process_reads_whole_tensors_of_every_mesh(tmp_path: Path) -> None:
    for ranks, spreads in SPREADS.items():
        folder = tmp_path / str(ranks)
        run_ranks(ranks, save_in_every_layout, str(folder))
        for number, layout in enumerate(spreads):
            whole = reshard.read_state_dict(folder / str(number))
            assert list(whole) == list(SHAPES)
            for name in SHAPES:
                assert same_bits(whole[name], sample(name, number)), (ranks, layout, name)


def save_plainly(folder: str) -> int:
    """How many bytes of tensors this rank wrote."""
    metadata = reshard.save({name: sample(name) for name in SHAPES}, checkpoint_id=folder)
    mine = f"__{dist.get_rank()}_"
    return sum(
        info.length for info in metadata.storage_data.values() if info.relative_path[:4] == mine
    )


def load_plainly(folder: str) -> list[str]:
    state_dict = {name: torch.zeros_like(sample(name)) for name in SHAPES}
    reshard.load(state_dict, checkpoint_id=folder)
    return [name for name in SHAPES if not same_bits(state_dict[name], sample(name))]


def test_plain_replicas_are_written_once_and_loaded_by_all(tmp_path: Path) -> None:
    written = run_ranks(3, save_plainly, str(tmp_path / "plain"))

    assert sum(written) == sum(len(raw(sample(name))) for name in SHAPES)
    assert run_ranks(4, load_plainly, str(tmp_path / "plain")) == [[]] * 4


def load_plain_in_every_layout(folder: str) -> list[str]:
    wrong = []
    for layout, spread in SPREADS[dist.get_world_size()].items():
        state_dict = spread.state_dict(seed=None)
        reshard.load(state_dict, checkpoint_id=folder)
        for name in SHAPES:
            expected = spread.local_part(sample(name), dist.get_rank())
            if not same_bits(state_dict[name].to_local(), expected):
                wrong.append(f"{name} in {layout}")
    return wrong


def test_what_one_process_saved_loads_on_every_mesh(tmp_path: Path) -> None:
    reshard.save({name: sample(name) for name in SHAPES}, checkpoint_id=tmp_path)

    for ranks in SPREADS:
        assert run_ranks(ranks, load_plain_in_every_layout, str(tmp_path)) == [[]] * ranks

"""Loads that are verified by fingerprints, in one process; and what the coordinator makes of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.api import CheckpointException, CorruptCheckpointError
from reshard.engine import fingerprints
from reshard.engine.fingerprints import RegionInMemory, fingerprint_regions
from reshard.format import word_sums
from reshard.format.fingerprint import fingerprint
from reshard.format.tables import Manifest
from reshard.operations.verification import HeldRegions, count_verified
from reshard.planner import ReadItem
from reshard.state_dict_saver import AsyncCheckpointerType

WEIGHT = torch.arange(24.0).reshape(6, 4)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"w": WEIGHT, "b": torch.ones(5), "n": 3}
    reshard.save(state, checkpoint_id=tmp_path, fingerprint=True, no_dist=True)
    return tmp_path


@pytest.fixture
def manifest(checkpoint: Path) -> Manifest:
    found: Manifest = reshard.FileSystemReader(checkpoint).read_metadata().storage_data.manifest
    return found


def held(manifest: Manifest, *regions: tuple[str, torch.Tensor, tuple[int, ...]]) -> HeldRegions:
    """What a rank holds: names, elements and offsets."""
    table = manifest.table
    rows = [table.row_of[name] for name, _, _ in regions]
    offsets = np.zeros((len(rows), 2), dtype=np.int64)
    sizes = np.ones((len(rows), 2), dtype=np.int64)
    parts = np.zeros((len(rows), 2), dtype=np.uint64)
    for i, (_, data, at) in enumerate(regions):
        offsets[i, : len(at)], sizes[i, : len(at)] = at, data.shape
        parts[i] = fingerprint(data, table.shape_of(rows[i]), at)
    return HeldRegions(np.array(rows, dtype=np.int64), offsets, sizes, parts.view(np.int64))


def test_parts_of_several_ranks_add_up(manifest: Manifest) -> None:
    first = held(manifest, ("w", WEIGHT[:2], (0, 0)), ("b", torch.ones(5), (0,)))
    second = held(manifest, ("w", WEIGHT[2:], (2, 0)), ("b", torch.ones(5), (0,)))
    assert count_verified(manifest, [first, second]) == 2
    assert count_verified(manifest, [second, first]) == 2


def test_parts_that_leave_a_gap_are_not_counted(manifest: Manifest) -> None:
    assert count_verified(manifest, [held(manifest, ("w", WEIGHT[:2], (0, 0)))]) == 0
    assert count_verified(manifest, [held(manifest)]) == 0


def test_a_whole_tensor_beside_parts_is_counted_if_those_are_all_there(manifest: Manifest) -> None:
    whole = held(manifest, ("w", WEIGHT, (0, 0)))
    left = held(manifest, ("w", WEIGHT[:, :3], (0, 0)))
    right = held(manifest, ("w", WEIGHT[:, 3:], (0, 3)))
    assert count_verified(manifest, [whole, left, right]) == 1
    assert count_verified(manifest, [whole, left]) == 0


def test_overlapping_parts_of_the_right_volume_are_no_error(manifest: Manifest) -> None:
    first = held(manifest, ("w", WEIGHT[:3], (0, 0)))
    second = held(manifest, ("w", WEIGHT[2:5], (2, 0)))
    assert count_verified(manifest, [first, second]) == 0


@pytest.mark.parametrize("at", [(0, 0), (2, 1), (5, 3)])
def test_a_difference_anywhere_is_named(manifest: Manifest, at: tuple[int, int]) -> None:
    wrong = WEIGHT.clone()
    wrong[at] += 1
    parts = [held(manifest, ("w", wrong[:2], (0, 0))), held(manifest, ("w", wrong[2:], (2, 0)))]
    with pytest.raises(CorruptCheckpointError, match=r"^1 tensor is not as saved.*'w'"):
        count_verified(manifest, parts)
    with pytest.raises(CorruptCheckpointError, match=r"^1 tensor is not as saved.*'w'"):
        count_verified(manifest, [held(manifest, ("w", wrong, (0, 0)))])


def test_replicas_that_differ_are_named_with_their_ranks(manifest: Manifest) -> None:
    right = held(manifest, ("w", WEIGHT[:2], (0, 0)))
    wrong = held(manifest, ("w", WEIGHT[:2] + 1, (0, 0)))
    with pytest.raises(CorruptCheckpointError, match=r"^ranks 0 and 2 .* 'w' at \[0, 0\]"):
        count_verified(manifest, [right, right, wrong])


def test_nothing_is_compared_that_a_custom_planner_fills(checkpoint: Path) -> None:
    class Doubling(reshard.DefaultLoadPlanner):
        def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
            return super().transform_tensor(read_item, tensor)

    state = {"w": torch.zeros(6, 4), "b": torch.zeros(5)}
    options: dict[str, Any] = {"checkpoint_id": checkpoint, "verify": "fingerprint"}
    assert reshard.load(state, planner=Doubling(), **options).verified == 0
    assert reshard.load(state, **options).verified == 2


def test_what_a_planner_leaves_out_is_not_compared(checkpoint: Path) -> None:
    class Partly(reshard.DefaultLoadPlanner):
        def create_local_plan(self) -> reshard.LoadPlan:
            plan = super().create_local_plan()
            return reshard.LoadPlan([i for i in plan.items if i.dest_index.fqn != "w"])

    state = {"w": torch.zeros(6, 4), "b": torch.zeros(5)}
    report = reshard.load(
        state, checkpoint_id=checkpoint, planner=Partly(), verify="fingerprint", no_dist=True
    )
    assert report.verified == 1


def test_a_storage_may_be_told_to_verify_by_fingerprint(checkpoint: Path) -> None:
    reader = reshard.FileSystemReader(checkpoint, verify="fingerprint")
    assert reshard.load({"w": torch.zeros(6, 4)}, storage_reader=reader).verified == 1
    assert torch.equal(reshard.read_state_dict(checkpoint, verify="fingerprint")["w"], WEIGHT)


def test_damage_is_found_after_the_load_and_values_keep_their_checksums(checkpoint: Path) -> None:
    metadata = reshard.FileSystemReader(checkpoint).read_metadata()
    (file,) = checkpoint.glob("*.safetensors")
    sound = file.read_bytes()
    for name, message in (("b", "not as saved"), ("n", "stored bytes of 'n'")):
        where = next(i.offset for k, i in metadata.storage_data.items() if k.fqn == name)
        damaged = bytearray(sound)
        damaged[where + 2] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError, match=message):
            reshard.read_state_dict(checkpoint, verify="fingerprint")


def test_views_of_files_are_verified(checkpoint: Path) -> None:
    def load() -> int:
        state = {"w": torch.zeros(6, 4, device="meta"), "b": torch.zeros(5)}
        return reshard.load(
            state, checkpoint_id=checkpoint, verify="fingerprint", assign=True
        ).verified

    assert load() == 2
    assert torch.equal(
        reshard.read_state_dict(checkpoint, mmap=True, verify="fingerprint")["w"], WEIGHT
    )
    metadata = reshard.FileSystemReader(checkpoint).read_metadata()
    where = next(i.offset for k, i in metadata.storage_data.items() if k.fqn == "w")
    (file,) = checkpoint.glob("*.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[where] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        load()
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        reshard.read_state_dict(checkpoint, mmap=True, verify="fingerprint")


def test_a_region_cannot_be_verified_by_fingerprint(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="no fingerprint of its own"):
        reshard.read_tensor(checkpoint, "w", verify="fingerprint")  # type: ignore[arg-type]


def test_a_storage_that_keeps_no_fingerprints_is_refused(tmp_path: Path) -> None:
    reshard.save({"w": WEIGHT}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match="has no fingerprints"):
        reshard.load({"w": torch.zeros(6, 4)}, checkpoint_id=tmp_path, verify="fingerprint")


@pytest.mark.parametrize("kind", ["with fingerprints", "without", "plain files"])
@pytest.mark.parametrize("later", [None, "thread", "process"])
def test_chunks_that_are_referred_to_have_fingerprints_too(
    kind: str, later: str | None, tmp_path: Path
) -> None:
    frozen, base = torch.randn(300, 40), tmp_path / "base"
    if kind == "plain files":
        base.mkdir()
        save_file({"frozen": frozen}, base / "model.safetensors")
    else:
        state = {"frozen": frozen, "trained": torch.zeros(5)}
        reshard.save(state, checkpoint_id=base, fingerprint=kind == "with fingerprints")
    state, place = {"frozen": frozen, "trained": torch.ones(5)}, tmp_path / "next"
    options: dict[str, Any] = {"checkpoint_id": place, "base": base, "fingerprint": True}
    if later is None:
        reshard.save(state, **options)
    else:
        kind_of_save = AsyncCheckpointerType(later)
        reshard.async_save(
            state, **options, frozen=["frozen"], async_checkpointer_type=kind_of_save
        ).result()
        reshard.close()

    assert sum(file.stat().st_size for file in place.iterdir()) < frozen.nbytes
    template = {"frozen": torch.zeros(300, 40), "trained": torch.zeros(5)}
    assert reshard.load(template, checkpoint_id=place, verify="fingerprint").verified == 2
    reshard.save(state, checkpoint_id=tmp_path / "whole")
    assert reshard.same(place, tmp_path / "whole")


def test_large_regions_in_parts_and_small_ones_together_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fingerprints, "_TASK_BYTES", 1000)
    monkeypatch.setattr(fingerprints, "_SMALL_BYTES", 500)
    monkeypatch.setattr(fingerprints, "_MOST_TOGETHER", 3)
    tensors = [torch.randn(n, 7) for n in (0, 1, 2, 3, 30, 100, 200, 5)] + [torch.tensor(3.0)]
    regions = [RegionInMemory(t, (300, 9)[: t.dim()], (50, 1)[: t.dim()]) for t in tensors]
    found = fingerprint_regions(regions, 2)
    for region, sums in zip(regions, found, strict=True):
        assert sums.tolist() == fingerprint(*region).tolist()


def test_numba_is_not_imported_with_reshard_nor_for_little() -> None:
    code = (
        "import sys, torch, reshard\n"
        "from reshard.format.fingerprint import fingerprint\n"
        "fingerprint(torch.ones(1000), (1000,), (0,))\n"
        "sys.exit('numba' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numpy_takes_over_where_numba_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reshard.format.word_sums_numba", None)
    word_sums._numba_kernel.cache_clear()
    try:
        assert isinstance(word_sums.choose_summer(1 << 30), word_sums.NumpySummer)
    finally:
        word_sums._numba_kernel.cache_clear()

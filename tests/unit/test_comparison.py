"""Comparing checkpoints by their manifests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.api import CheckpointNotFoundError
from reshard.operations.comparison import compare_manifests
from reshard.tensors.shards import HeldShards, LocalShard

WEIGHT = torch.arange(24.0).reshape(6, 4)


def cut(whole: torch.Tensor, dim: int) -> HeldShards:
    """A tensor that is stored in two chunks."""
    first, second = whole.chunk(2, dim)
    offsets = [0, 0]
    offsets[dim] = first.shape[dim]
    return HeldShards(
        whole.dtype,
        tuple(whole.shape),
        False,
        (
            LocalShard((0, 0), tuple(first.shape), first.contiguous()),
            LocalShard(tuple(offsets), tuple(second.shape), second.contiguous()),
        ),
    )


def saved(place: Path, fingerprint: bool = True, **state: Any) -> Path:
    reshard.save(state, checkpoint_id=place, fingerprint=fingerprint, no_dist=True)
    return place


def test_equal_checkpoints_are_the_same(tmp_path: Path) -> None:
    first = saved(tmp_path / "a", w=WEIGHT, n=3)
    second = saved(tmp_path / "b", w=WEIGHT.clone(), n=3)
    assert reshard.same(first, second)
    assert reshard.same(first, first)


@pytest.mark.parametrize("dim", [0, 1])
def test_layouts_do_not_matter(dim: int, tmp_path: Path) -> None:
    first = saved(tmp_path / "a", w=WEIGHT)
    assert reshard.same(first, saved(tmp_path / "b", w=cut(WEIGHT, dim)))
    other = WEIGHT.clone()
    other[5, 3] = -other[5, 3]
    found = reshard.same(first, saved(tmp_path / "c", w=cut(other, dim)))
    assert not found
    assert found.tensors == ["w"]
    assert found.undecided == []


def test_without_fingerprints_equal_layouts_are_decided_by_checksums(tmp_path: Path) -> None:
    first = saved(tmp_path / "a", fingerprint=False, w=cut(WEIGHT, 0))
    assert reshard.same(first, saved(tmp_path / "b", fingerprint=False, w=cut(WEIGHT, 0)))
    assert reshard.same(first, saved(tmp_path / "c", w=cut(WEIGHT, 0)))
    differs = reshard.same(first, saved(tmp_path / "d", fingerprint=False, w=cut(WEIGHT + 1, 0)))
    assert differs.tensors == ["w"]
    unknown = reshard.same(first, saved(tmp_path / "e", w=cut(WEIGHT, 1)))
    assert not unknown
    assert (unknown.tensors, unknown.undecided) == ([], ["w"])


def test_what_differs_is_named(tmp_path: Path) -> None:
    shared = torch.ones(3)
    first = saved(
        tmp_path / "a", same=shared, bits=torch.zeros(2), shape=torch.ones(4), dtype=torch.zeros(2),
        n=1, kept="x", kind=torch.ones(2), here=1, mine=shared,
    )  # fmt: skip
    second = saved(
        tmp_path / "b", same=shared, bits=-torch.zeros(2), shape=torch.ones(2, 2),
        dtype=torch.zeros(2, dtype=torch.int32), n=2, kept="x", kind=5, there=torch.ones(1),
    )  # fmt: skip
    found = reshard.same(first, second)
    assert found.tensors == ["bits", "shape", "dtype", "kind"]
    assert found.values == ["n"]
    assert found.only_in_first == ["mine", "here"]
    assert found.only_in_second == ["there"]
    assert found.undecided == []


def test_names_of_one_memory_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    first = saved(tmp_path / "a", v=WEIGHT, w=WEIGHT)
    assert reshard.same(first, saved(tmp_path / "b", v=WEIGHT.clone(), w=cut(WEIGHT, 1)))
    assert reshard.same(first, saved(tmp_path / "c", v=WEIGHT, w=WEIGHT + 1)).tensors == ["w"]


def test_values_that_went_through_different_codecs_are_undecided(tmp_path: Path) -> None:
    reader = reshard.FileSystemReader(saved(tmp_path / "a", n=1))
    manifest = reader.read_metadata().storage_data.manifest
    coded = dataclasses.replace(
        manifest, value_codecs=manifest.value_files * 0 + 1, codec_names=["x"]
    )
    assert compare_manifests(manifest, coded).undecided == ["n"]
    assert compare_manifests(coded, coded)


def test_a_place_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        reshard.same(saved(tmp_path / "a", n=1), tmp_path / "b")

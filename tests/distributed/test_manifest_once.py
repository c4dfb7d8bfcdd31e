"""Ranks that save together: who makes the manifest, and who reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reshard
from support.manifests import counted_manifests
from support.ranks import run_ranks


def save_and_count(path: Path) -> tuple[dict[str, int], dict[str, int], list[str]]:
    rank = dist.get_rank()
    state: dict[str, Any] = {"shared": torch.ones(4), f"own{rank}": torch.ones(2), "step": 1}
    with counted_manifests() as counts:
        metadata = reshard.save(state, checkpoint_id=path)
        after_the_save = dict(counts)
        names = sorted(metadata.state_dict_metadata)
    return after_the_save, counts, names


def test_one_rank_encodes_the_manifest_once_and_nobody_decodes_it_unless_asked(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, save_and_count, tmp_path)
    once, never = {"encoded": 1, "decoded": 0}, {"encoded": 0, "decoded": 0}
    assert first == (once, once, ["own0", "own1", "shared", "step"])
    read_when_looked_at = {"encoded": 0, "decoded": 1}
    assert second == (never, read_when_looked_at, ["own0", "own1", "shared", "step"])

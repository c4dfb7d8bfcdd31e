"""reshard.checkpoint.to_manifest: what a save commits, and what it refuses to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reshard
from reshard.api import CorruptCheckpointError, UnsupportedFormatError
from reshard.checkpoint.directory import read_manifest
from reshard.checkpoint.to_manifest import check_readable
from reshard.format.manifest import decode_manifest, encode_manifest
from reshard.format.tables import Manifest
from reshard.planning.columns import DTYPE_CODES
from reshard.stores.local import LocalStore
from support.manifests import counted_manifests


def saved_manifest(path: Path) -> Manifest:
    reshard.save({"w": torch.zeros(2, 3), "step": 1}, checkpoint_id=path, no_dist=True)
    return read_manifest(LocalStore(path))


def wide(manifest: Manifest) -> dict[str, Any]:
    """More columns than dimensions can be counted in a byte."""
    names = ("shapes", "chunk_offsets", "chunk_sizes")
    fills = (1, 0, 1)
    return {
        name: np.pad(getattr(manifest, name), ((0, 0), (0, 300)), constant_values=fill)
        for name, fill in zip(names, fills, strict=True)
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {"tensor_names": [5]},
        lambda m: {"tensor_names": [b"w"]},
        lambda m: {"value_names": [None]},
        lambda m: {"value_names": ["w"]},
        lambda m: {"files": [7]},
        lambda m: {"files": ["../x"]},
        lambda m: {"dtypes": m.dtypes * 0 + DTYPE_CODES[torch.quint8]},
        lambda m: {"ndims": m.ndims + 256},
        lambda m: {"flags": m.flags + 256},
        lambda m: {"chunk_begins": m.chunk_begins - 10**6},
        lambda m: {"planner_data": b"N?"},
        wide,
    ],
)
def test_what_a_reader_refuses_is_refused_before_it_is_encoded(change: Any, tmp_path: Path) -> None:
    manifest = saved_manifest(tmp_path)
    check_readable(manifest, "here")
    broken = dataclasses.replace(manifest, **change(manifest))
    refusals = CorruptCheckpointError, UnsupportedFormatError, TypeError
    with pytest.raises(refusals):
        check_readable(broken, "here")


@pytest.mark.parametrize("name", ["names", "dtypes", "wide"])
def test_the_refusals_are_those_of_a_reader(name: str, tmp_path: Path) -> None:
    manifest = saved_manifest(tmp_path)
    changes: dict[str, Any] = {
        "names": {"value_names": [None]},
        "dtypes": {"dtypes": manifest.dtypes * 0 + DTYPE_CODES[torch.quint8]},
        "wide": wide(manifest),
    }
    broken = dataclasses.replace(manifest, **changes[name])
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError)):
        decode_manifest(encode_manifest(broken), "here")


@pytest.mark.parametrize("sync", [False, True])
def test_a_save_encodes_its_manifest_once_and_decodes_none(sync: bool, tmp_path: Path) -> None:
    writer = reshard.FileSystemWriter(tmp_path, sync_files=sync)
    with counted_manifests() as counts:
        metadata = reshard.save(
            {"w": torch.zeros(3), "step": 1}, storage_writer=writer, no_dist=True
        )
        assert list(metadata.state_dict_metadata) == ["w", "step"]
    assert counts == {"encoded": 1, "decoded": 0}

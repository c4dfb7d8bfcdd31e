"""Which files may be deleted, and what keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reshard
from reshard.api import UnsupportedFormatError


def save(folder: Path, step: int = 0, **options: object) -> None:
    state = {"frozen": torch.arange(5000.0), "step": step}
    reshard.save(state, checkpoint_id=folder, **options)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


# What is not ours


def test_a_checkpoint_of_dcp_is_not_deleted(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    before = contents(tmp_path)

    with pytest.raises(UnsupportedFormatError, match=r"a is not deleted: its \.metadata is no man"):
        reshard.delete(tmp_path / "a")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("content", [b"", b"my notes", b"\0" * 9000, b'12345678{"format": "pt"}'])
def test_a_folder_with_a_file_that_happens_to_have_the_name_is_not_deleted(
    content: bytes, tmp_path: Path
) -> None:
    save(tmp_path / "a")
    (tmp_path / "a" / ".metadata").write_bytes(content)
    before = contents(tmp_path)

    with pytest.raises(UnsupportedFormatError, match="remove the directory yourself"):
        reshard.delete(tmp_path / "a")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kept_bytes", [-1, 4000])
def test_a_damaged_checkpoint_is_deleted(kept_bytes: int, tmp_path: Path) -> None:
    save(tmp_path / "a")
    manifest = tmp_path / "a" / ".metadata"
    manifest.write_bytes(manifest.read_bytes()[:kept_bytes])

    reshard.delete(tmp_path / "a")

    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["latest", "latest/"])
def test_a_link_to_a_checkpoint_is_not_deleted(name: str, tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    (tmp_path / "latest").symlink_to("step-1")
    before = contents(tmp_path)

    with pytest.raises(ValueError, match=f"is a link to '{tmp_path / 'step-1'}': pass that"):
        reshard.delete(f"{tmp_path}/{name}")
    assert contents(tmp_path) == before


def test_a_checkpoint_below_a_link_is_deleted(tmp_path: Path) -> None:
    save(tmp_path / "real" / "step-1")
    (tmp_path / "runs").symlink_to("real")

    reshard.delete(tmp_path / "runs" / "step-1")

    assert not (tmp_path / "real" / "step-1").exists()

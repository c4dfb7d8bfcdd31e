"""Checkpoints as unpatched `torch.distributed.checkpoint` writes and reads them."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def is_for_dcp(folder: str | Path) -> bool:
    return (Path(folder) / ".metadata").read_bytes()[:1] == pickle.PROTO


def metadata_of(folder: str | Path) -> Metadata:
    return dcp.FileSystemReader(folder).read_metadata()


def read_with_dcp(folder: str | Path) -> dict[str, Any]:
    """All that a checkpoint holds, whole, as this process reads it on its own."""
    found: dict[str, Any] = {}
    _load_state_dict(
        found,
        storage_reader=dcp.FileSystemReader(folder),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return found


def load_with_dcp(state_dict: dict[str, Any], folder: str | Path, **options: Any) -> None:
    with warnings.catch_warnings():
        # It says so whenever there is no process group.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state_dict, checkpoint_id=folder, **options)

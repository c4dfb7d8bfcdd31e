"""Which torch the tests run with."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
PINNED = (2, 13)
"""The version in constraints.txt, which `make test` runs with."""

needs_hugging_face_shards = pytest.mark.skipif(
    find_spec("torch.distributed.checkpoint._consolidate_hf_safetensors") is None,
    reason=f"torch {torch.__version__} writes no shards of safetensors files",
)

HAS_MANIFESTS_OF_RANKS = hasattr(FileSystemWriter, "_get_metadata_path")
"""Whether DCP saves without collectives, as it does since 2.9."""
needs_manifests_of_ranks = pytest.mark.skipif(
    not HAS_MANIFESTS_OF_RANKS,
    reason=f"torch {torch.__version__} has no manifest of each rank",
)


def forget_strides(properties: Iterable[Any]) -> None:
    """Take out what torch since 2.15 notes of a tensor, and our plans and checkpoints do not."""
    for each in properties:
        if hasattr(each, "strides"):
            each.strides = None


def properties_in(metadata: Any) -> list[Any]:
    """Those of all tensors in metadata."""
    entries = metadata.state_dict_metadata.values()
    return [entry.properties for entry in entries if hasattr(entry, "properties")]

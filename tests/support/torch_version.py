"""Which torch the tests run with."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
PINNED = (2, 13)
"""The version in constraints.txt, which `make test` runs with."""

needs_hugging_face_shards = pytest.mark.skipif(
    find_spec("torch.distributed.checkpoint._consolidate_hf_safetensors") is None,
    reason=f"torch {torch.__version__} writes no shards of safetensors files",
)

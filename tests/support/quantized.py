"""Models with quantised tensors, and what torch makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

INDEX = "model.safetensors.index.json"
SHAPES = {"wide.weight": (300, 200), "small.weight": (5, 7), "experts_blocks": (3, 5, 128)}
"""Of what the quantised tensors stand for."""
TORCH_READS_THEM = hasattr(dcp, "QuantizedHuggingFaceStorageReader")
"""As torch does since 2.9."""


def write_model(directory: Path, block: int = 128) -> Path:
    """Matrices whose scales are in another file, MXFP4, and a plain tensor."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    weights, scales = {}, {}
    for name in ("wide.weight", "small.weight"):
        rows, columns = SHAPES[name]
        weights[name] = (torch.randn(rows, columns) * 50).to(torch.float8_e4m3fn)
        scales[f"{name}_scale_inv"] = torch.rand(-(-rows // block), -(-columns // block)) + 0.1
    weights["experts_blocks"] = torch.randint(0, 256, (3, 5, 4, 16), dtype=torch.uint8)
    # The exponents at both ends as well: too small to be normal, and infinite.
    exponents = torch.randint(0, 256, (3, 5, 4), dtype=torch.uint8)
    exponents[0, 0] = torch.tensor([0, 1, 254, 255], dtype=torch.uint8)
    weights["experts_scales"] = exponents
    weights["norm.weight"] = torch.randn(9)
    save_file(weights, directory / "model-00001-of-00002.safetensors")
    save_file(scales, directory / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(weights, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(scales, "model-00002-of-00002.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return directory


def torch_reads(
    directory: Path,
    name: str,
    offsets: list[int],
    lengths: list[int],
    dtype: torch.dtype,
    block: int = 128,
) -> torch.Tensor:
    """A region of a quantised tensor, as the reader of torch computes it.

    Not through `dcp.load`, which plans MXFP4 by the shape that is stored, and fills a part only.
    """
    if not TORCH_READS_THEM:
        pytest.skip(f"torch {torch.__version__} has no reader of quantised tensors")
    reader = dcp.QuantizedHuggingFaceStorageReader(str(directory), 1, dtype, block)
    reader.read_metadata()
    found = torch.empty(lengths, dtype=dtype)
    planner: Any = SimpleNamespace(
        resolve_tensor=lambda item: found, commit_tensor=lambda item, tensor: None
    )
    index, zeros = MetadataIndex(name, [0] * len(lengths)), torch.Size([0] * len(lengths))
    item = ReadItem(
        LoadItemType.TENSOR, index, zeros, index, torch.Size(offsets), torch.Size(lengths)
    )
    with safe_open(directory / "model-00001-of-00002.safetensors", framework="pt") as file:
        reader._process_read_request(file, item, planner)
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all elements are the same, signs of zeros included; any NaN is like another."""
    if a.dtype is not b.dtype or a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = (t.nan_to_num(0.0, torch.inf, -torch.inf) for t in (a, b))
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())

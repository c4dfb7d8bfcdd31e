"""Safetensors files written byte by byte, so that they can say anything."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8"}
INDEX = "model.safetensors.index.json"


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header: an object, or the text itself."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str] | None = None
) -> Path:
    """A sound file."""
    header: dict[str, Any] = {"__metadata__": dict(notes)} if notes else {}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        begin, data = len(data), data + raw
        header[name] = entry(list(tensor.shape), begin, len(data), NAMES[tensor.dtype])
    return write_raw(path, header, data)


def write_shard(path: Path, tensors: Mapping[str, tuple[list[int], torch.Tensor]]) -> Path:
    """A file with regions, each with where it begins, as DCP notes that."""
    regions = {name: {"saved_offsets": offsets} for name, (offsets, _) in tensors.items()}
    notes = {"DCP_SHARDING_INFO": json.dumps(regions), "DCP_VERSION": "1.0", "format": "pt"}
    return write_tensors(path, {name: tensor for name, (_, tensor) in tensors.items()}, notes)


def write_index(directory: Path, weight_map: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

"""What is in a checkpoint or a state dict, in a form that can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

import reshard
from support.samples import same_bits


def differences(a: Any, b: Any) -> list[str]:
    """The places at which two nested values are not the same; tensors are so in every bit."""
    return [*_differences(a, b, "")]


def _differences(a: Any, b: Any, place: str) -> Iterator[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in a.keys() | b.keys():
            if key in a and key in b:
                yield from _differences(a[key], b[key], f"{place}.{key}")
            else:
                yield f"{place}.{key} is in one of them only"
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for position, pair in enumerate(zip(a, b, strict=True)):
            yield from _differences(*pair, f"{place}[{position}]")
    elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        mine, theirs = _local(a), _local(b)
        if not same_bits(mine, theirs):
            yield f"{place}: {mine} and {theirs}"
    elif isinstance(a, np.ndarray):
        if not np.array_equal(a, b):
            yield f"{place}: {a} and {b}"
    elif type(a) is not type(b) or a != b:
        yield f"{place}: {a!r} and {b!r}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stored(checkpoint: Path, key: str = "train") -> dict[str, Any]:
    """Model and optimizer of a checkpoint, whole, to be compared with those of another."""
    found = reshard.read_state_dict(checkpoint)[key]
    return {part: found[part] for part in ("model", "optimizer") if part in found}


def stored_state(checkpoint: Path, key: str = "train") -> dict[str, Any]:
    """Optimizer state of a checkpoint by parameter."""
    return reshard.read_state_dict(checkpoint)[key]["optimizer"].get("state", {})

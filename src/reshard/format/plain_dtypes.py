"""Dtypes as safetensors files of others spell them: more names than our own files use.

Nothing of our own format depends on these: shard files store such dtypes as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from reshard.format.container import SAFETENSORS_DTYPES, Entry
from reshard.tensors.torch_versions import dtypes_here

_PAIRS = "F4"
"""4-bit floats. safetensors counts each, torch pairs of them: one byte is one element."""

PLAIN_DTYPES: Mapping[str, torch.dtype] = {
    **dtypes_here({"F8_E8M0": "float8_e8m0fnu", _PAIRS: "float4_e2m1fn_x2"}),
    **{name: dtype for dtype, name in SAFETENSORS_DTYPES.items()},
}
"""What torch has for the names of safetensors."""

PACKED_DTYPES = frozenset(dtypes_here({_PAIRS: "float4_e2m1fn_x2"}).values())
"""Dtypes of which an element is several numbers."""

_NAMES = {dtype: name for name, dtype in PLAIN_DTYPES.items()}


def why_not_plain(dtype: torch.dtype, ndims: int) -> str:
    """Why no safetensors file can hold such a tensor; empty if one can."""
    if dtype not in _NAMES:
        return f"has the dtype {dtype}"
    if _NAMES[dtype] == _PAIRS and not ndims:
        return f"is a scalar of {dtype}, two numbers without a dimension"
    return ""


def plain_entry(dtype: torch.dtype, shape: Sequence[int], begin: int, end: int) -> Entry:
    """How the header describes a tensor of which `why_not_plain` has nothing to say."""
    name = _NAMES[dtype]
    if name == _PAIRS:
        shape = (*shape[:-1], 2 * shape[-1])
    return Entry(name, tuple(shape), begin, end)


def torch_shape(entry: Entry) -> tuple[int, ...] | None:
    """The shape that torch gives to a tensor of a header; None if it cannot have one."""
    if entry.dtype != _PAIRS:
        return tuple(entry.shape)
    if not entry.shape or entry.shape[-1] % 2:
        return None
    return (*entry.shape[:-1], entry.shape[-1] // 2)

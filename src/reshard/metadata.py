"""What a checkpoint contains: tensors, their chunks, other values.

Plain data, no behaviour beyond looking things up. Names and fields are those that
DCP users know.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any, TypeAlias

import torch

__all__ = [
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
]


@dataclass
class ChunkStorageMetadata:
    """One region of a tensor as stored: where it starts and how large it is."""

    offsets: torch.Size
    sizes: torch.Size


class _MEM_FORMAT_ENCODING(Enum):  # noqa: N801 - DCP's name
    """Names of memory formats, which cannot be pickled themselves."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


_FORMATS = {
    torch.contiguous_format: _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT,
    torch.channels_last: _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST,
    torch.preserve_format: _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT,
}


@dataclass
class TensorProperties:
    """How a tensor was made. Only `dtype` matters to a load; the rest is a record.

    `strides` are those of the tensor in memory, where a plan says them. They are not stored, since
    what a checkpoint holds is contiguous, and properties that differ in nothing else are equal.
    """

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = field(default=torch.strided)
    requires_grad: bool = False
    memory_format: torch.memory_format = field(default=torch.contiguous_format)
    pin_memory: bool = False
    strides: tuple[int, ...] | None = field(default=None, compare=False)

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """The properties of `tensor`; the stored form is always contiguous."""
        # Values that stand for tensors, such as those of embedding tables, may have no strides.
        stride = getattr(tensor, "stride", None)
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            memory_format=torch.contiguous_format,
            pin_memory=tensor.is_pinned(),
            strides=tuple(stride()) if callable(stride) and _is_strided(tensor) else None,
        )

    def __getstate__(self) -> tuple[Any, ...]:
        # As DCP has it: five fields, and since torch 2.15 a sixth. Older ones take five only.
        about = self.dtype, self.layout, self.requires_grad
        encoded = _FORMATS.get(self.memory_format, str(self.memory_format))
        rest = self.pin_memory, self.strides
        return (*about, encoded, *rest[: 1 if self.strides is None else 2])

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if len(state) not in (5, 6):
            raise ValueError(f"the state of TensorProperties has 5 or 6 fields, not {len(state)}")
        self.dtype, self.layout, self.requires_grad, encoded, self.pin_memory, *strides = state
        self.strides = strides[0] if strides else None
        # By its name, which the enum of torch shares.
        name = str(getattr(encoded, "name", encoded)).lower()
        memory_format = getattr(torch, name.removeprefix("torch_").removeprefix("torch."), None)
        if not isinstance(memory_format, torch.memory_format):
            raise ValueError(f"{encoded!r} is not the name of a torch.memory_format")
        self.memory_format = memory_format


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


@dataclass
class TensorStorageMetadata:
    """A stored tensor: its global shape, its properties and the chunks that tile it.

    `alias_of` names the tensor whose chunks hold the data of this one as well: both
    names shared one memory when they were saved, so it was written once.
    """

    properties: TensorProperties
    size: torch.Size
    chunks: MutableSequence[ChunkStorageMetadata]
    alias_of: str | None = None


@dataclass
class BytesStorageMetadata:
    """A stored value that is not a tensor. `alias_of` is the name it is stored under."""

    alias_of: str | None = None


STORAGE_TYPES: TypeAlias = TensorStorageMetadata | BytesStorageMetadata
# The values are `Stateful` objects, tensors, nested containers or anything else.
STATE_DICT_TYPE: TypeAlias = dict[str, Any]


@dataclass
class StorageMeta:
    """What a storage tells the planner about the checkpoint at hand."""

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass
class Metadata:
    """The contents of a checkpoint, by FQN.

    `planner_data` belongs to the planner (the default one keeps there how the flat
    names nest), `storage_data` to the storage (where each chunk lies).
    """

    state_dict_metadata: dict[str, STORAGE_TYPES]
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: StorageMeta | None = None
    version: str | None = None

    def __repr__(self) -> str:
        entries = self.state_dict_metadata or {}
        tensors = [e for e in entries.values() if isinstance(e, TensorStorageMetadata)]
        nbytes = sum(
            math.prod(e.size) * e.properties.dtype.itemsize for e in tensors if e.alias_of is None
        )
        names = ", ".join([*map(repr, islice(entries, 3)), *(["..."] if len(entries) > 3 else [])])
        counts = f"{len(tensors)} tensors of {nbytes:,} bytes, {len(entries) - len(tensors)} values"
        return f"<Metadata: {counts}{names and f': {names}'}>"


@dataclass(frozen=True, init=False)
class MetadataIndex:
    """The name of one stored thing: an FQN and, for a chunk, where it starts.

    `index` is a hint: the position of the chunk in its tensor's list. It takes no
    part in comparisons.
    """

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(hash=False, compare=False, default=None)

    def __init__(
        self, fqn: str, offset: Sequence[int] | None = None, index: int | None = None
    ) -> None:
        # The dataclass is frozen, so attributes are set the long way round.
        object.__setattr__(self, "fqn", fqn)
        object.__setattr__(self, "offset", None if offset is None else torch.Size(offset))
        object.__setattr__(self, "index", index)

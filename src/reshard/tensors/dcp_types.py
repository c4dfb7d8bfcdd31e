"""Conversion of the classes of `torch.distributed.checkpoint` to ours.

Tensor subclasses that implement torch's checkpointable protocol use them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from reshard.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties


def to_chunk(chunk: Any) -> ChunkStorageMetadata:
    if isinstance(chunk, ChunkStorageMetadata):
        return chunk
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


def to_index(index: Any) -> MetadataIndex:
    if isinstance(index, MetadataIndex):
        return index
    return MetadataIndex(index.fqn, index.offset, index.index)


def default_extension_registry() -> Any:
    """The stream extensions that torch knows by itself."""
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    return ExtensionRegistry()


def to_properties(properties: Any) -> TensorProperties:
    if isinstance(properties, TensorProperties):
        return properties
    return TensorProperties(
        **{f.name: getattr(properties, f.name) for f in fields(TensorProperties)}
    )

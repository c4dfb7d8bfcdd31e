"""Rows of stored tensors and values as a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from reshard.api import CorruptCheckpointError
from reshard.format.checks import check_manifest
from reshard.format.checksum import DIGEST_BYTES
from reshard.format.tables import Manifest
from reshard.planning.columns import DTYPE_CODES, Ints, pad_rows


class ForeignChunk(NamedTuple):
    """A region of a tensor, and the bytes that hold it, encoded as `codec` says."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    file: int
    begin: int
    stored_nbytes: int
    codec: int = 0


class ForeignTensor(NamedTuple):
    """A tensor, or another name of one: then it has no chunks."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    chunks: Sequence[ForeignChunk]
    flags: int = 0
    alias_of: int = -1


class ForeignValue(NamedTuple):
    """A value that is not a tensor."""

    name: str
    file: int
    begin: int
    nbytes: int
    codec: int = 0
    is_pickled: bool = False


@dataclass
class ForeignTable:
    """What a checkpoint of others holds. Codecs are counted from 1."""

    kind: str
    files: Mapping[str, int]
    """Paths and sizes; chunks and values have their positions."""
    tensors: list[ForeignTensor] = field(default_factory=list)
    values: list[ForeignValue] = field(default_factory=list)
    codecs: Sequence[str] = ()
    planner_data: bytes = b""
    notes: dict[str, str] = field(default_factory=dict)

    def to_manifest(self, where: str, shared_bytes: bool = False) -> Manifest:
        """The same in columns, checked. Only with `shared_bytes` may records overlap."""
        try:
            manifest = self._columns()
        except OverflowError as error:
            raise CorruptCheckpointError(
                f"{where} has a number that no size or position could be: {error}"
            ) from error
        check_manifest(manifest, where, shared_bytes)
        return manifest

    def _columns(self) -> Manifest:
        chunks = [
            chunk
            for tensor in self.tensors
            for chunk in sorted(tensor.chunks, key=lambda chunk: tuple(chunk.offsets))
        ]
        ndims = [len(tensor.shape) for tensor in self.tensors]
        width = max(1, max(ndims, default=1))
        starts = np.zeros(len(ndims) + 1, dtype=np.int64)
        np.cumsum([len(tensor.chunks) for tensor in self.tensors], out=starts[1:])
        encoded = bool(self.codecs)
        return Manifest(
            kind=self.kind,
            files=list(self.files),
            file_sizes=_column(self.files.values()),
            header_sizes=np.zeros(len(self.files), dtype=np.int64),
            header_checksums=np.zeros(len(self.files), dtype=np.int64),
            tensor_names=[tensor.name for tensor in self.tensors],
            dtypes=_column(DTYPE_CODES[tensor.dtype] for tensor in self.tensors),
            flags=_column(tensor.flags for tensor in self.tensors),
            ndims=_column(ndims),
            shapes=pad_rows([tensor.shape for tensor in self.tensors], width, 1),
            aliases=_column(tensor.alias_of for tensor in self.tensors),
            chunk_starts=starts,
            chunk_offsets=pad_rows([chunk.offsets for chunk in chunks], width, 0),
            chunk_sizes=pad_rows([chunk.sizes for chunk in chunks], width, 1),
            chunk_files=_column(chunk.file for chunk in chunks),
            chunk_begins=_column(chunk.begin for chunk in chunks),
            chunk_digests=np.zeros((len(chunks), DIGEST_BYTES), dtype=np.uint8),
            chunk_probes=np.zeros(len(chunks), dtype=np.int64),
            chunk_codecs=_column(chunk.codec for chunk in chunks) if encoded else None,
            chunk_stored_nbytes=_column(c.stored_nbytes for c in chunks) if encoded else None,
            codec_names=self.codecs,
            value_names=[value.name for value in self.values],
            value_files=_column(value.file for value in self.values),
            value_begins=_column(value.begin for value in self.values),
            value_nbytes=_column(value.nbytes for value in self.values),
            value_checksums=np.zeros(len(self.values), dtype=np.int64),
            value_pickled=_column(int(value.is_pickled) for value in self.values),
            value_codecs=_column(value.codec for value in self.values) if encoded else None,
            planner_data=self.planner_data,
            notes=self.notes,
        )


def _column(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, dtype=np.int64)

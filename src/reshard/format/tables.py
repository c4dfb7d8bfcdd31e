"""The tables of a checkpoint: what a manifest says, in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from reshard.format.checksum import Digests
from reshard.planning.columns import DTYPE_ITEMSIZES, ChunkTable, Ints

PARTS, REFERENCES, CODECS = "parts", "references", "codecs"
FEATURES = frozenset({PARTS, REFERENCES, CODECS})
"""What a manifest may require of its reader; see docs/format.md."""


RESHARD, DCP, SAFETENSORS, TORCH = "reshard", "dcp", "safetensors", "torch"
"""Kinds of checkpoints that a manifest may describe. Only our own is stored as one."""


class Origin(NamedTuple):
    """Another place that holds files of a checkpoint.

    `location` is relative to the checkpoint; `save_id` is empty if the files are not of a save.
    """

    location: str
    save_id: str


@dataclass(frozen=True, eq=False)
class Manifest:
    """The tables of a checkpoint.

    Chunks of one tensor stand together, sorted by position: those of tensor `t` are rows
    `chunk_starts[t]` to `chunk_starts[t + 1]`. `aliases[t]` is the tensor that holds the
    data of tensor `t`, or -1. `checksums` are unsigned, kept as int64.

    `chunk_digests` stand for the content of chunks, `chunk_probes` for their first bytes.
    Columns that may be absent are None: `chunk_fingerprints`, the parts that chunks contribute
    to the fingerprints of their tensors; `chunk_codecs` and `value_codecs`, numbers of
    `codec_names` counted from 1, or 0 for what is stored as it is, and `chunk_stored_nbytes`;
    `file_origins`, rows of `origins`, or -1 for files of the checkpoint itself.

    Of checkpoints of another `kind`, checksums, digests and header sizes are 0 and mean nothing.
    """

    files: Sequence[str]
    file_sizes: Ints
    header_sizes: Ints
    header_checksums: Ints
    tensor_names: Sequence[str]
    dtypes: Ints
    flags: Ints
    ndims: Ints
    shapes: Ints
    aliases: Ints
    chunk_starts: Ints
    chunk_offsets: Ints
    chunk_sizes: Ints
    chunk_files: Ints
    chunk_begins: Ints
    chunk_digests: Digests
    chunk_probes: Ints
    value_names: Sequence[str]
    value_files: Ints
    value_begins: Ints
    value_nbytes: Ints
    value_checksums: Ints
    value_pickled: Ints
    planner_data: bytes = b""
    notes: Mapping[str, str] = field(default_factory=dict)
    chunk_fingerprints: Ints | None = None
    chunk_codecs: Ints | None = None
    chunk_stored_nbytes: Ints | None = None
    value_codecs: Ints | None = None
    codec_names: Sequence[str] = ()
    file_origins: Ints | None = None
    origins: Sequence[Origin] = ()
    kind: str = RESHARD

    @property
    def is_ours(self) -> bool:
        """Whether it has checksums, and files that say which save they are of."""
        return self.kind == RESHARD

    @property
    def features(self) -> list[str]:
        """What a reader must know to read this."""
        used = {
            PARTS: PARTS in self.notes,
            REFERENCES: bool(self.origins),
            CODECS: bool(self.codec_names),
        }
        return [feature for feature, is_used in used.items() if is_used]

    def origin_of(self, file: int) -> Origin | None:
        """Where a file lies, if not in the checkpoint itself."""
        origin = -1 if self.file_origins is None else int(self.file_origins[file])
        return None if origin < 0 else self.origins[origin]

    @property
    def chunk_nbytes(self) -> Ints:
        """The size of the content of each chunk."""
        itemsizes = DTYPE_ITEMSIZES[self.dtypes[self.table.owners]]
        return np.asarray(self.chunk_sizes.prod(axis=1) * itemsizes)

    @property
    def stored_nbytes(self) -> Ints:
        """How many bytes each chunk takes in its file."""
        stored = self.chunk_stored_nbytes
        return self.chunk_nbytes if stored is None else stored

    @cached_property
    def table(self) -> ChunkTable:
        """The tensors and their chunks, without where they are stored."""
        return ChunkTable(
            names=self.tensor_names,
            dtypes=self.dtypes,
            flags=self.flags,
            ndims=self.ndims,
            shapes=self.shapes,
            aliases=self.aliases,
            starts=self.chunk_starts,
            offsets=self.chunk_offsets,
            sizes=self.chunk_sizes,
        )

"""The tensors of a checkpoint of any kind, read region by region, without a plan."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from reshard.api import CoverageError
from reshard.checkpoint.shard_files import ShardFiles
from reshard.engine.memory import BounceBuffer, byte_view
from reshard.engine.reading import Request, Verify, compare, read_regions, too_short
from reshard.format.checksum import Digester
from reshard.format.tables import Manifest
from reshard.planning.columns import DTYPES
from reshard.stores.protocol import CutShortError, Reader, Store

_PIECE_BYTES = 2 << 20
"""Buffers of twice this size are memory that is mapped anew each time: exports took three times as
long with them, and half as long again with buffers of half the size."""
_WIDEST_ROW_BYTES = 64 << 20


class StoredTensors:
    """Reads tensors, which are numbered as in the manifest. Safe to use from several threads."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        verify: Verify = Verify.CHUNKS,
        registry: object = None,
        allow_pickle: bool = False,
        location: str = "",
    ) -> None:
        self.manifest = manifest
        self.location = location or store.location
        """What people call it, which for a single file is not the store that it is in."""
        self.folder = store.location
        self._files = ShardFiles(store, manifest, verify, registry, allow_pickle)
        self._lock = threading.Lock()

    def close(self) -> None:
        self._files.close()

    def dtype(self, tensor: int) -> torch.dtype:
        return DTYPES[int(self.manifest.dtypes[tensor])]

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self.manifest.table.shape_of(tensor)

    def open_chunk(self, row: int) -> tuple[str, int]:
        """A file to read a chunk from, and where it begins in there."""
        with self._lock:
            return self._files.open_chunk(row)

    def reader(self, file: str) -> Reader:
        """A file that `open_chunk` named."""
        return self._files.readers[file]

    def is_verified(self, row: int) -> bool:
        """Whether a chunk is to be compared with its digest."""
        is_suspect = self._files.is_suspect(int(self.manifest.chunk_files[row]))
        return self._files.verify is not Verify.OFF or is_suspect

    def read(
        self, tensor: int, offsets: Sequence[int], sizes: Sequence[int], into: torch.Tensor
    ) -> None:
        """Fill `into` with a region. Chunks that lie within it whole are verified."""
        requests = [
            self._request(tensor, row, begins, lengths, into[where])
            for row, begins, lengths, where in self._meeting(tensor, offsets, sizes)
        ]
        if sum(math.prod(request.lengths) for request in requests) != math.prod(sizes):
            raise CoverageError(
                f"{self.location} does not hold all of {self.manifest.tensor_names[tensor]!r}. "
                "Save it with all of its ranks, or leave it out"
            )
        read_regions(self._files.readers, requests, self._files.verify, 1, self.folder)

    def _meeting(
        self, tensor: int, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...], tuple[slice, ...]]]:
        """The chunks that meet a region: which of their elements, and where those go."""
        table = self.manifest.table
        source, dims = int(table.sources[tensor]), int(table.ndims[tensor])
        begins, lengths = (column[:, :dims] for column in table.of(source))
        wanted = np.array(offsets, dtype=np.int64)
        first = np.maximum(begins, wanted)
        last = np.minimum(begins + lengths, wanted + np.array(sizes, dtype=np.int64))
        for row in np.flatnonzero((first < last).all(axis=1)).tolist():
            inner = (last[row] - first[row]).tolist()
            targets = (first[row] - wanted).tolist()
            yield (
                int(table.starts[source]) + row,
                tuple((first[row] - begins[row]).tolist()),
                tuple(inner),
                tuple(slice(b, b + n) for b, n in zip(targets, inner, strict=True)),
            )

    def _request(
        self,
        tensor: int,
        row: int,
        offsets: tuple[int, ...],
        lengths: tuple[int, ...],
        target: torch.Tensor,
    ) -> Request:
        m = self.manifest
        name = m.tensor_names[tensor]
        file, begin = self.open_chunk(row)
        return Request(
            name,
            file,
            begin,
            tuple(m.chunk_sizes[row, : len(lengths)].tolist()),
            self.dtype(tensor),
            m.chunk_digests[row].tobytes(),
            offsets,
            lengths,
            target,
            name,
            suspect=self._files.is_suspect(int(m.chunk_files[row])),
        )

    def rows(self, tensor: int) -> range:
        """The chunks of a tensor."""
        table = self.manifest.table
        source = int(table.sources[tensor])
        return range(int(table.starts[source]), int(table.starts[source + 1]))

    def slabs(self, tensor: int) -> list[list[int]] | None:
        """The chunks of a tensor in groups that can be streamed, each some rows of it.

        None if they do not form such groups, or are not all of it, or if one row takes too much
        memory.
        """
        m, shape = self.manifest, self.shape(tensor)
        row_elements = math.prod(shape[1:])
        if not shape or row_elements * self.dtype(tensor).itemsize > _WIDEST_ROW_BYTES:
            return None
        groups: dict[tuple[int, int], list[int]] = {}
        for row in self.rows(tensor):
            if m.chunk_sizes[row].all():
                place = int(m.chunk_offsets[row, 0]), int(m.chunk_sizes[row, 0])
                groups.setdefault(place, []).append(row)
        for (_, count), rows in groups.items():
            # Chunks do not overlap, so that those with as many elements fill all columns.
            if int(m.chunk_sizes[rows].prod(axis=1).sum()) != count * row_elements:
                return None
        if sum(count for _, count in groups) != shape[0]:
            return None
        return [groups[place] for place in sorted(groups)]

    def stream(
        self, tensor: int, slab: Sequence[int], take: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Hand over a group of chunks, some rows after the other, with the first of each.

        They are valid until `take` returns. Chunks are verified as they go by: an error comes
        after the last rows.
        """
        parts = [_ChunkStream(self, tensor, row) for row in slab]
        shape, dtype = self.shape(tensor), self.dtype(tensor)
        first, count = parts[0].offsets[0], parts[0].sizes[0]
        row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
        step = max(1, _PIECE_BYTES // row_bytes)
        rows = torch.empty((min(step, count), *shape[1:]), dtype=dtype, device="cpu")
        for begin in range(0, count, step):
            some = rows[: min(step, count - begin)]
            for part in parts:
                part.next_into(some)
            take(first + begin, some)
        for part in parts:
            part.check_end()

    def check(self, tensor: int, row: int) -> None:
        """Read a chunk to compare it with its digest, if it has one."""
        part = _ChunkStream(self, tensor, row)
        if part.is_verified:
            part.skip()
            part.check_end()

    def value(self, row: int) -> bytes:
        """The stored bytes of a value."""
        with self._lock:
            return self._files.read_value(self.manifest.value_names[row], row)


class _ChunkStream:
    """One chunk, read from its beginning to its end."""

    def __init__(self, source: StoredTensors, tensor: int, row: int) -> None:
        m, dims = source.manifest, len(source.shape(tensor))
        self.offsets: list[int] = m.chunk_offsets[row, :dims].tolist()
        self.sizes: list[int] = m.chunk_sizes[row, :dims].tolist()
        self._dtype, self._name = source.dtype(tensor), m.tensor_names[tensor]
        self._digest = m.chunk_digests[row].tobytes()
        file, self._position = source.open_chunk(row)
        self._end = self._position + math.prod(self.sizes) * self._dtype.itemsize
        self._reader = source.reader(file)
        self._where = f"{file!r} of {source.folder}"
        self.is_verified = source.is_verified(row)
        self._digester = Digester()
        self._bounce = BounceBuffer(_PIECE_BYTES)

    def next_into(self, rows: torch.Tensor) -> None:
        """Fill the columns of the chunk in its next rows."""
        target = rows
        for dim in range(1, len(self.sizes)):
            target = target.narrow(dim, self.offsets[dim], self.sizes[dim])
        if target.is_contiguous():
            self._read(byte_view(target))
            return
        buffer = self._bounce.take(target.nbytes)
        self._read(byte_view(buffer))
        target.copy_(buffer.view(self._dtype).view(target.shape))

    def skip(self) -> None:
        """Read to the end, for the digest alone."""
        while self._position < self._end:
            nbytes = min(_PIECE_BYTES, self._end - self._position)
            self._read(byte_view(self._bounce.take(nbytes)))

    def _read(self, view: memoryview) -> None:
        try:
            self._reader.read_into(self._position, [view])
        except CutShortError as error:
            raise too_short(self._name, self._where, error) from error
        self._position += len(view)
        if self.is_verified:
            self._digester.update(view)

    def check_end(self) -> None:
        """Compare what was read with the digest of the chunk."""
        if self.is_verified:
            compare(self._digester.digest(), self._digest, self._name, self._where)

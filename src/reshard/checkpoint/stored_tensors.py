"""The tensors of a checkpoint of any kind, read region by region, without a plan."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from reshard.api import CoverageError
from reshard.checkpoint.shard_files import ShardFiles
from reshard.engine.reading import Request, Verify, compare, read_regions, too_short
from reshard.engine.runs import is_one_run, ravel
from reshard.format.checksum import Digester
from reshard.format.tables import Manifest
from reshard.planning.columns import DTYPES
from reshard.stores.protocol import CutShortError, Store

_PIECE_BYTES = 4 << 20


class StoredTensors:
    """Reads tensors, which are numbered as in the manifest. Safe to use from several threads."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        verify: Verify = Verify.CHUNKS,
        registry: object = None,
    ) -> None:
        self.manifest = manifest
        self.location = store.location
        self._files = ShardFiles(store, manifest, verify)
        self._lock = threading.Lock()

    def close(self) -> None:
        self._files.close()

    def dtype(self, tensor: int) -> torch.dtype:
        return DTYPES[int(self.manifest.dtypes[tensor])]

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self.manifest.table.shape_of(tensor)

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
        read_regions(self._files.readers, requests, self._files.verify, 1, self.location)

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
        with self._lock:
            file, begin = self._files.open_chunk(row)
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

    def runs(self, tensor: int) -> list[tuple[int, int, int]] | None:
        """The chunks of a tensor as runs of it: row, first element, number of elements.

        None if they are not contiguous in it, or are not all of it.
        """
        m, table = self.manifest, self.manifest.table
        dims, shape = int(table.ndims[tensor]), self.shape(tensor)
        found = []
        for row in self.rows(tensor):
            offsets = m.chunk_offsets[row, :dims].tolist()
            sizes = tuple(m.chunk_sizes[row, :dims].tolist())
            if not is_one_run(shape, sizes):
                return None
            if math.prod(sizes):
                found.append((row, ravel(shape, offsets), math.prod(sizes)))
        is_whole = sum(count for *_, count in found) == math.prod(shape)
        return sorted(found, key=lambda run: run[1]) if is_whole else None

    def rows(self, tensor: int) -> range:
        """The chunks of a tensor."""
        table = self.manifest.table
        source = int(table.sources[tensor])
        return range(int(table.starts[source]), int(table.starts[source + 1]))

    def check(self, tensor: int, row: int) -> None:
        """Read a chunk to compare it with its digest, if it has one."""
        if self._is_verified(row):
            self.stream(tensor, row, lambda position, piece: None)

    def _is_verified(self, row: int) -> bool:
        is_suspect = self._files.is_suspect(int(self.manifest.chunk_files[row]))
        return self._files.verify is not Verify.OFF or is_suspect

    def stream(self, tensor: int, row: int, take: Callable[[int, torch.Tensor], None]) -> None:
        """Hand over one chunk, a flat piece after the other, with the element it begins at.

        A piece is valid until `take` returns. The chunk is verified as it goes by: an error comes
        after the last piece.
        """
        m, name, dtype = self.manifest, self.manifest.tensor_names[tensor], self.dtype(tensor)
        with self._lock:
            file, begin = self._files.open_chunk(row)
        reader, nbytes = self._files.readers[file], int(m.chunk_sizes[row].prod()) * dtype.itemsize
        step = _PIECE_BYTES // dtype.itemsize * dtype.itemsize
        buffer = bytearray(min(step, nbytes))
        is_verified = self._is_verified(row)
        digester, place = Digester(), f"{file!r} of {self.location}"
        for position in range(0, nbytes, step):
            piece = memoryview(buffer)[: min(step, nbytes - position)]
            try:
                reader.read_into(begin + position, [piece])
            except CutShortError as error:
                raise too_short(name, place, error) from error
            if is_verified:
                digester.update(piece)
            take(position // dtype.itemsize, torch.frombuffer(piece, dtype=dtype))
        if is_verified:
            compare(digester.digest(), m.chunk_digests[row].tobytes(), name, place)

    def value(self, row: int) -> bytes:
        """The stored bytes of a value."""
        with self._lock:
            return self._files.read_value(self.manifest.value_names[row], row)

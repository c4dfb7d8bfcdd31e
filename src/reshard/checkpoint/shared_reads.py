"""The items of a load plan, read together with other ranks.

No file is opened before it is known which rank reads it.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.checkpoint.reads import (
    ReadOptions,
    collect,
    load_values,
    make_views,
    naming_absence,
)
from reshard.checkpoint.shard_files import ShardFiles
from reshard.checkpoint.to_metadata import StorageMap
from reshard.engine.progress import watched
from reshard.engine.reading import Request, Verify, read_regions, split_by_memory
from reshard.engine.sharing import (
    Block,
    Share,
    SharedTask,
    block_of,
    narrowed,
    read_and_share,
)
from reshard.engine.workers import default_threads
from reshard.planner import ReadItem
from reshard.planning.columns import DTYPE_ITEMSIZES, pad_rows, widen
from reshard.planning.sharing import SharedReads, StoredChunks, Wants, row_dims
from reshard.plans.traits import load_traits

_LEAST_DIVIDED_BYTES = 8 << 20
"""Encoded chunks that are smaller are read by one rank: others would decode the same frames."""


class SharedRead:
    """What one rank wants, and its part in reading what all ranks want.

    `wants` says what it wants, which the ranks turn into what each of them reads. Then `read`
    does that, or `read_directly` reads everything for this rank alone.
    """

    def __init__(
        self,
        items: Sequence[ReadItem],
        planner: Any,
        files: ShardFiles,
        storage: StorageMap,
        options: ReadOptions,
    ) -> None:
        self._planner = planner
        self._traits = load_traits(planner)
        self._files = files
        self._options = options
        self._stored = storage.manifest
        items = make_views(items, planner, files, options)
        found = collect(items, planner, self._traits, files, storage, opens_files=False)
        self._values = found.values
        self._requests = found.requests
        self._row_of = dict(zip(map(id, found.requests), found.rows, strict=True))
        # What shares its memory is read in the order of the plan, so that the last one stays.
        apart, self._left = split_by_memory(found.requests)
        self._wants = [request for request in apart if request.nbytes]
        self.nbytes = sum(request.nbytes for request in found.requests)
        """How many bytes this rank wants; with those of values once they are read."""
        self.bytes_received = 0

    @property
    def fingerprint(self) -> bytes:
        """The same on two ranks if their rows mean the same chunks."""
        m, found = self._stored, hashlib.blake2b(digest_size=16)
        found.update("\0".join(m.files).encode())
        for column in (m.chunk_files, m.chunk_begins, m.chunk_sizes, m.chunk_digests):
            found.update(column.tobytes())
        found.update(self._files.verify.value.encode())
        return found.digest()

    @property
    def wants(self) -> Wants:
        rows = np.array([self._row_of[id(request)] for request in self._wants], dtype=np.int64)
        width = self._width
        offsets = pad_rows([request.offsets for request in self._wants], width, 0)
        lengths = pad_rows([request.lengths for request in self._wants], width, 1)
        return Wants(rows, offsets, lengths)

    @property
    def _width(self) -> int:
        return max(1, int(self._stored.chunk_sizes.shape[1]))

    def chunks(self) -> StoredChunks:
        """The chunks of the checkpoint, for whoever decides which rank reads what."""
        m, verify = self._stored, self._files.verify
        sizes = widen(m.chunk_sizes, self._width, 1)
        itemsizes = DTYPE_ITEMSIZES[m.dtypes[m.table.owners]]
        suspect = np.array([self._files.is_suspect(i) for i in range(len(m.files))], dtype=bool)
        undivided = suspect[m.chunk_files] | (verify is Verify.FULL)
        if m.chunk_codecs is not None:
            is_small = sizes.prod(axis=1) * itemsizes < _LEAST_DIVIDED_BYTES
            undivided |= (m.chunk_codecs > 0) & is_small
        return StoredChunks(
            sizes,
            itemsizes,
            m.chunk_files,
            m.chunk_begins,
            undivided,
            whole_by_one=verify in (Verify.CHUNKS, Verify.FULL),
        )

    def read(self, rank: int, shared: SharedReads, links: Mapping[int, socket.socket]) -> None:
        """Read what this rank is to read, send it on, and receive the rest.

        Raises `PeerLost` if the connection to another rank breaks.
        """
        blocks, own = self._blocks(rank, shared), self._own(shared)
        self._open([*own, *self._left])
        incoming = dict(zip(shared.senders.tolist(), shared.sender_bytes.tolist(), strict=True))
        files, where, threads = self._files, self._files.store.location, self._threads
        values = [row for _, row in self._values]
        task = SharedTask(rank, self._wants, blocks, own, incoming)
        with (
            naming_absence(where),
            watched(f"loading {where}", self.nbytes, self._options.shows_progress) as progress,
        ):
            read_and_share(
                files.readers,
                task,
                links,
                files.verify,
                threads,
                where,
                files.fetching,
                progress.advance,
            )
            with files.fetching(self._left, values):
                read_regions(files.readers, self._left, files.verify, 1, where, progress.advance)
                self._load_values()
        self.bytes_received = sum(incoming.values())

    def read_directly(self) -> None:
        """Read everything that this rank wants."""
        self._open(self._requests)
        files, where, threads = self._files, self._files.store.location, self._threads
        requests, values = self._requests, [row for _, row in self._values]
        with (
            naming_absence(where),
            files.fetching(requests, values),
            watched(f"loading {where}", self.nbytes, self._options.shows_progress) as progress,
        ):
            read_regions(files.readers, requests, files.verify, threads, where, progress.advance)
            self._load_values()

    def _load_values(self) -> None:
        self.nbytes += load_values(
            self._values, self._planner, self._traits, self._files, self._options
        )

    @property
    def _threads(self) -> int:
        return self._options.thread_count or default_threads()

    def _open(self, requests: Sequence[Request]) -> None:
        for row in sorted({self._row_of[id(request)] for request in requests}):
            self._files.open_chunk(row)

    def _own(self, shared: SharedReads) -> list[Request]:
        """What this rank reads for itself alone."""
        dims = row_dims(widen(self._stored.chunk_sizes, self._width, 1))
        columns = (shared.own_wants, shared.own_firsts, shared.own_counts)
        own = []
        for want, first, count in zip(*(column.tolist() for column in columns), strict=True):
            request = self._wants[want]
            row = self._row_of[id(request)]
            dim = int(dims[row])
            if dim < len(request.lengths) and request.lengths[dim] != count:
                request = narrowed(request, dim, first, count)
                self._row_of[id(request)] = row
            own.append(request)
        return own

    def _blocks(self, rank: int, shared: SharedReads) -> list[Block]:
        """What this rank reads for several."""
        columns = (
            shared.part_blocks,
            shared.part_ranks,
            shared.part_wants,
            shared.part_offsets,
            shared.part_lengths,
        )
        sources: dict[int, Request] = {}
        mine = np.flatnonzero(shared.part_ranks == rank)
        for block, want in zip(
            shared.part_blocks[mine].tolist(), shared.part_wants[mine].tolist(), strict=True
        ):
            sources[block] = self._wants[want]
        shares: dict[int, list[Share]] = {}
        for block, reader, want, offsets, lengths in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            dims = len(sources[block].chunk_shape)
            share = Share(reader, want, tuple(offsets[:dims]), tuple(lengths[:dims]))
            shares.setdefault(block, []).append(share)
        self._open([*sources.values()])
        verify = self._files.verify
        return [block_of(sources[block], parts, verify) for block, parts in shares.items()]

"""Reading for several ranks: what they all want is read once, and sent on.

A block is a part of a stored chunk that this rank reads, for itself and for others. It is
read in pieces, straight into the memory of a tensor that wants them where that is possible, and
each piece is sent while the next one is read. What other ranks read arrives at the same time,
and so is what no other rank wants read.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import add, sub
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from reshard.engine.links import PIECE_BYTES, Extents, Inbox, LinkBroken, Outbox, Part
from reshard.engine.memory import BounceBuffer, byte_view, is_direct
from reshard.engine.reading import Request, Verify, compare, fill_region, read_regions, too_short
from reshard.engine.runs import is_one_run, ravel
from reshard.engine.workers import run_all
from reshard.format.checksum import Digester, digest
from reshard.stores.protocol import CutShortError, Reader

_PIECES = 8
"""How many pieces there may be in memory that are read and not sent to all yet."""
_SMALL_BYTES = 256 << 10
_BATCH_BLOCKS = 500
_WIDEST_GAP_BYTES = 64 << 10


class PeerLost(Exception):  # noqa: N818 - what happened, for the operation to explain
    """Another rank stopped sending or receiving: why is for that rank to say."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason


class Share(NamedTuple):
    """A region of a block, for want `want` of a rank."""

    rank: int
    want: int
    offsets: Extents
    lengths: Extents


class Block(NamedTuple):
    """What this rank reads of a chunk, and for whom. The target of the request is not used."""

    request: Request
    shares: Sequence[Share]


def block_of(source: Request, shares: Sequence[Share], verify: Verify) -> Block:
    """What is to be read for `shares`. `source` is any want of this rank in the same chunk.

    That is all of the chunk to verify it, or else what holds all that is wanted.
    """
    shape = source.chunk_shape
    begins, ends = shares[0].offsets, (0,) * len(shape)
    for share in shares:
        begins = tuple(map(min, begins, share.offsets))
        ends = tuple(map(max, ends, map(add, share.offsets, share.lengths)))
    if verify is Verify.FULL or source.suspect:
        begins, ends = (0,) * len(shape), shape
    return Block(_part_of(source, begins, tuple(map(sub, ends, begins)), source.target), shares)


class SharedTask(NamedTuple):
    """The part of one rank in a read that ranks share."""

    rank: int
    wants: Sequence[Request]
    blocks: Sequence[Block]
    own: Sequence[Request]
    """What it reads for itself alone."""
    incoming_bytes: Mapping[int, int]
    """What other ranks send."""


def read_and_share(
    readers: Mapping[str, Reader],
    task: SharedTask,
    links: Mapping[int, socket.socket],
    verify: Verify,
    threads: int,
    where: str,
    fetching: Callable[[Sequence[Request]], AbstractContextManager[None]],
    advance: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Read and send what is to be read here, and receive the rest.

    `links` are connections to all ranks that take part, which are of no use afterwards. Within
    `fetching`, requests are read that it was given. Raises `PeerLost` if a link breaks.
    """
    increment_version([request.target for request in task.wants])
    job = _Job(readers, task, links, verify, where, advance)
    job.start()
    try:
        with fetching([block.request for block in task.blocks]):
            run_all(job.read, _batches(task.blocks), threads)
        job.end_sending()
        with fetching(task.own):
            read_regions(readers, task.own, verify, threads, where, job.advance)
    except Exception as error:  # noqa: BLE001 - the first of several is raised below
        job.fail(error)
    except BaseException as interrupt:
        job.fail(interrupt)
        raise
    finally:
        job.join()
    job.check()


class _Job:
    def __init__(
        self,
        readers: Mapping[str, Reader],
        task: SharedTask,
        links: Mapping[int, socket.socket],
        verify: Verify,
        where: str,
        advance: Callable[[int], None],
    ) -> None:
        self._readers = readers
        self._task = task
        self._links = links
        self._verify = verify
        self._where = where
        self._advance = advance
        self._local = threading.local()
        self._pool = _Pool(_PIECES, PIECE_BYTES)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: list[Inbox] = []

    def start(self) -> None:
        for rank in {share.rank for block in self._task.blocks for share in block.shares}:
            if rank != self._task.rank:
                self._outboxes[rank] = Outbox(self._links[rank], self._noter(rank))
        for rank, nbytes in self._task.incoming_bytes.items():
            self._inboxes.append(
                Inbox(self._links[rank], nbytes, self._target_of, self._advance, self._noter(rank))
            )

    def _noter(self, rank: int) -> Callable[[BaseException], None]:
        def note(error: BaseException) -> None:
            is_broken = isinstance(error, LinkBroken)
            self.fail(PeerLost(rank, str(error)) if is_broken else error)

        return note

    def check(self) -> None:
        """Raise what went wrong first."""
        if self._error is not None:
            raise self._error

    def advance(self, nbytes: int) -> None:
        self.check()
        self._advance(nbytes)

    def end_sending(self) -> None:
        for outbox in self._outboxes.values():
            outbox.finish()

    def fail(self, error: BaseException) -> None:
        """Have all threads end, and the other ranks notice."""
        with self._lock:
            if self._error is None:
                self._error = error
        self._pool.close()
        for link in self._links.values():
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                # The other end was faster.
                continue
        self.end_sending()

    def join(self) -> None:
        for outbox in self._outboxes.values():
            outbox.join()
        for inbox in self._inboxes:
            inbox.join()

    def read(self, batch: Sequence[Block]) -> None:
        try:
            self.check()
            if len(batch) == 1:
                self._read_one(batch[0])
            else:
                self._read_neighbours(batch)
            for block in batch:
                if block.request.done is not None:
                    block.request.done()
        except BaseException as error:
            # Other threads may be waiting for memory that nobody sends any more.
            self.fail(error)
            raise

    def _read_one(self, block: Block) -> None:
        source = block.request
        hasher = Digester() if self._is_verified(source) else None
        for offsets, lengths in pieces(source.offsets, source.lengths, source.dtype.itemsize):
            self.check()
            landing, give_back = self._landing(block, offsets, lengths)
            piece = _part_of(source, offsets, lengths, landing)
            try:
                fill_region(self._readers[source.file], piece, self._bounce())
            except CutShortError as error:
                raise too_short(source.name, self._in(source), error) from error
            if hasher is not None:
                hasher.update(byte_view(landing))
            self._hand_out([(block, offsets, landing)], give_back)
        if hasher is not None:
            found, where = hasher.digest(), self._in(source)
            compare(found, source.digest, source.name, where, source.suspect)

    def _read_neighbours(self, batch: Sequence[Block]) -> None:
        """Small blocks that lie near each other, by one call."""
        spans = [_span(block.request) for block in batch]
        begin, end = spans[0][0], spans[-1][1]
        memory = self._pool.take()
        try:
            reader = self._readers[batch[0].request.file]
            reader.read_into(begin, [byte_view(memory[: end - begin])])
        except CutShortError as error:
            ends = (
                block.request
                for block, span in zip(batch, spans, strict=True)
                if span[1] > error.end
            )
            lost = next(ends, batch[-1].request)
            raise too_short(lost.name, self._in(lost), error) from error
        filled = []
        for block, (first, last) in zip(batch, spans, strict=True):
            source, content = block.request, memory[first - begin : last - begin]
            if self._is_verified(source):
                found, where = digest(byte_view(content)), self._in(source)
                compare(found, source.digest, source.name, where, source.suspect)
            elements = _as_elements(content, source.dtype).view(source.lengths)
            filled.append((block, source.offsets, elements))
        self._hand_out(filled, lambda: self._pool.give(memory))

    def _is_verified(self, request: Request) -> bool:
        asked = self._verify in (Verify.CHUNKS, Verify.FULL)
        return request.whole and (asked or request.suspect)

    def _landing(
        self, block: Block, offsets: Extents, lengths: Extents
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Memory for a piece, and what to call when nobody needs it to be as it is."""
        for share in block.shares:
            if share.rank == self._task.rank and _meet(share, offsets, lengths) == (
                offsets,
                lengths,
            ):
                target, dtype = self._target_of(share.want, offsets, lengths)
                if target.dtype is dtype and is_direct(target):
                    return target, lambda: None
        memory = self._pool.take()
        dtype = block.request.dtype
        used = memory[: math.prod(lengths) * dtype.itemsize]
        return used.view(dtype).view(lengths), lambda: self._pool.give(memory)

    def _target_of(
        self, want: int, offsets: Extents, lengths: Extents
    ) -> tuple[torch.Tensor, torch.dtype]:
        request = self._task.wants[want]
        target = request.target.detach()
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            target = target.narrow(dim, offset - request.offsets[dim], length)
        return target, request.dtype

    def _hand_out(
        self,
        filled: Sequence[tuple[Block, Extents, torch.Tensor]],
        give_back: Callable[[], None],
    ) -> None:
        """Give pieces of blocks to those that want some of them, this rank included."""
        messages: dict[int, list[Part]] = {}
        for block, offsets, piece in filled:
            for share in block.shares:
                met = _meet(share, offsets, tuple(piece.shape))
                if met is None:
                    continue
                content = piece
                for dim, (begin, length) in enumerate(zip(*met, strict=True)):
                    content = content.narrow(dim, begin - offsets[dim], length)
                if share.rank != self._task.rank:
                    messages.setdefault(share.rank, []).append(Part(share.want, *met, content))
                    continue
                target, _ = self._target_of(share.want, *met)
                if target.data_ptr() != content.data_ptr():
                    target.copy_(content)
                self._advance(content.nbytes)
        left = _Countdown(len(messages), give_back)
        for rank, parts in messages.items():
            self._outboxes[rank].put(parts, left.count_down)

    def _in(self, request: Request) -> str:
        return f"{request.file!r} of {self._where}"

    def _bounce(self) -> BounceBuffer:
        bounce: BounceBuffer | None = getattr(self._local, "bounce", None)
        if bounce is None:
            bounce = self._local.bounce = BounceBuffer(PIECE_BYTES)
        return bounce


class _Pool:
    """Reused memory for pieces. Whoever needs some waits until there is."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._nbytes = nbytes
        self._left = count
        self._free: list[torch.Tensor] = []
        self._changed = threading.Condition()
        self._is_closed = False

    def take(self) -> torch.Tensor:
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._left or self._is_closed)
            if self._is_closed:
                raise RuntimeError("reading has stopped")
            if self._free:
                return self._free.pop()
            self._left -= 1
        return torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")

    def give(self, memory: torch.Tensor) -> None:
        with self._changed:
            self._free.append(memory)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class _Countdown:
    """Calls `done` once it was counted down from `count`; at once if that is 0."""

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._left = count
        self._done = done
        self._lock = threading.Lock()
        if not count:
            done()

    def count_down(self) -> None:
        with self._lock:
            self._left -= 1
            is_done = not self._left
        if is_done:
            self._done()


def pieces(
    offsets: Extents, lengths: Extents, itemsize: int, most_bytes: int = PIECE_BYTES
) -> Iterator[tuple[Extents, Extents]]:
    """Cut a region into parts of at most `most_bytes` or one element, in row-major order."""
    nbytes = math.prod(lengths) * itemsize
    dim = next((dim for dim, length in enumerate(lengths) if length > 1), None)
    if nbytes <= most_bytes or dim is None:
        yield offsets, lengths
        return
    row_bytes = nbytes // lengths[dim]
    step = max(1, most_bytes // row_bytes)
    for begin in range(0, lengths[dim], step):
        count = min(step, lengths[dim] - begin)
        some = (*offsets[:dim], offsets[dim] + begin, *offsets[dim + 1 :])
        shape = (*lengths[:dim], count, *lengths[dim + 1 :])
        yield from pieces(some, shape, itemsize, most_bytes)


def _span(request: Request) -> tuple[int, int]:
    """From where to where in its file a request lies that is one run."""
    itemsize = request.dtype.itemsize
    begin = request.begin + ravel(request.chunk_shape, request.offsets) * itemsize
    return begin, begin + request.nbytes


def _meet(share: Share, offsets: Extents, lengths: Extents) -> tuple[Extents, Extents] | None:
    """What a share and a region have in common."""
    if share.offsets == offsets and share.lengths == lengths:
        return offsets, lengths
    begins = tuple(map(max, share.offsets, offsets))
    ends = map(min, map(add, share.offsets, share.lengths), map(add, offsets, lengths))
    extents = tuple(map(sub, ends, begins))
    return (begins, extents) if all(extent > 0 for extent in extents) else None


def _part_of(source: Request, offsets: Extents, lengths: Extents, target: torch.Tensor) -> Request:
    return Request(
        source.name,
        source.file,
        source.begin,
        source.chunk_shape,
        source.dtype,
        source.digest,
        offsets,
        lengths,
        target,
        source.into,
        suspect=source.suspect,
    )


def narrowed(request: Request, dim: int, first: int, count: int) -> Request:
    """The same request for some of its rows: `count` rows of the chunk from `first` on."""
    begin = first - request.offsets[dim]
    offsets = (*request.offsets[:dim], first, *request.offsets[dim + 1 :])
    lengths = (*request.lengths[:dim], count, *request.lengths[dim + 1 :])
    return _part_of(request, offsets, lengths, request.target.narrow(dim, begin, count))


def _as_elements(content: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as elements, which have to begin at a multiple of their size."""
    if content.storage_offset() % dtype.itemsize:
        content = content.clone()
    return content.view(dtype)


def _batches(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks in the order in which they lie in their files; small neighbours together."""
    keyed = sorted((b.request.file, *_span(b.request), n) for n, b in enumerate(blocks))
    batches: list[list[Block]] = []
    here, start, reached, may_grow = "", 0, 0, False
    for file, begin, end, number in keyed:
        block = blocks[number]
        is_run = is_one_run(block.request.chunk_shape, block.request.lengths)
        is_small = end - begin <= _SMALL_BYTES and is_run
        is_near = file == here and 0 <= begin - reached <= _WIDEST_GAP_BYTES
        fits = end - start <= PIECE_BYTES and bool(batches) and len(batches[-1]) < _BATCH_BLOCKS
        if may_grow and is_small and is_near and fits:
            batches[-1].append(block)
        else:
            batches.append([block])
            start = begin
        here, reached, may_grow = file, end, is_small
    return batches

"""Reading regions of stored chunks into tensors.

A region is read straight into the memory of its tensor where both are contiguous.
Otherwise whole rows go through a small buffer, since a gap that is skipped costs more
than a gap that is read, unless it is large. Chunks are verified on the way: those that are
read whole, or all of them if so asked; then what was not wanted of them is read as well.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from reshard.api import CorruptCheckpointError
from reshard.engine.collector import paused_collection
from reshard.engine.memory import BounceBuffer, byte_view, is_direct
from reshard.engine.runs import is_one_run, ravel
from reshard.engine.workers import run_all
from reshard.format.checksum import Digester, checksum, digest
from reshard.stores.protocol import CutShortError, Reader
from reshard.tensors.storages import elements_spanned

_PIECE_BYTES = 8 << 20
_HASHED_PIECE_BYTES = 512 << 10
"""Small enough to be hashed while it is still in the cache of the core that read it."""
_BOUNCE_BYTES = 4 << 20
_HASHED_ROWS_BYTES = 1 << 20
_SCATTERED_BYTES = 4 << 10
"""Parts of rows from this size on are read to their places by one call for many rows."""
_SCATTERED_ROWS = 500
_SMALL_BYTES = 256 << 10
_BATCH_BYTES = 8 << 20
_BATCH_ITEMS = 500
WIDEST_GAP_BYTES = 64 << 10
"""What lies between two contents is read along with them if it is no more than this."""


class Verify(Enum):
    """Which chunks are checked against their checksums while they are read.

    With `FINGERPRINT` none are: the tensors are compared once they are in memory.
    """

    OFF = "off"
    CHUNKS = "chunks"
    FULL = "full"
    FINGERPRINT = "fingerprint"


# There are as many as there are tensors, and none is part of a cycle: unknown to the garbage
# collector, they do not make it run.
class Request(msgspec.Struct, gc=False):
    """One region of one stored chunk, and the tensor to fill with it.

    The chunk begins at byte `begin` of the file; `offsets` count from its start. `into` is the
    name of what the target is a part of. If `suspect`, the chunk is verified whatever is asked for:
    nothing else tells whether it is the right one.
    """

    name: str
    file: str
    begin: int
    chunk_shape: tuple[int, ...]
    dtype: torch.dtype
    digest: bytes
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: torch.Tensor
    into: str
    done: Callable[[], None] | None = None
    suspect: bool = False
    whole: bool = False
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.whole = self.lengths == self.chunk_shape
        self.nbytes = math.prod(self.lengths) * self.dtype.itemsize


def read_regions(
    readers: Mapping[str, Reader],
    requests: Sequence[Request],
    verify: Verify,
    threads: int,
    where: str,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Carry out `requests`; the number of bytes that were wanted.

    `advance` is called with the bytes that were read, from several threads.
    """
    # Memory is filled past torch, and autograd must know: a graph that needs the old values
    # would compute wrong gradients.
    increment_version([request.target for request in requests])
    job = _Job(readers, verify, where, advance)
    with paused_collection():
        together, shared = _tasks(requests, verify)
    run_all(job.read, together, threads)
    # One after the other, as they were planned: the last one stays.
    run_all(job.read, [[request] for request in shared], 1)
    return sum(request.nbytes for request in requests)


def fill_region(reader: Reader, request: Request, bounce: BounceBuffer) -> None:
    """Carry out one request, without verifying anything."""
    _Filler(reader, request, bounce).fill(None)


def _tasks(
    requests: Sequence[Request], verify: Verify
) -> tuple[list[list[Request]], list[Request]]:
    """Batches that can be read at the same time, and requests that can not."""
    direct, other = [], []
    apart, shared = split_by_memory(requests)
    for request in apart:
        # Of many that are wanted in part, each has to be looked at by itself to be verified.
        is_part = (verify is Verify.FULL or request.suspect) and not request.whole
        small = 0 < request.nbytes <= _SMALL_BYTES
        if small and not is_part and _lands_directly(request):
            direct.append(request)
        else:
            other.append([request])
    # As they lie in the files: few of these have to be open at once, and disks like it.
    tasks = [*other, *_batches(direct)]
    tasks.sort(key=lambda batch: (batch[0].file, _position(batch[0])))
    return tasks, shared


def wanted_ranges(request: Request, verify: Verify) -> npt.NDArray[np.int64]:
    """From where to where a file is read for a request."""
    chunk_bytes = math.prod(request.chunk_shape) * request.dtype.itemsize
    if request.whole or verify is Verify.FULL or request.suspect:
        return np.array([[request.begin, request.begin + chunk_bytes]], dtype=np.int64)
    return request.begin + _Filler(None, request, None).ranges(request.offsets, request.lengths)


def split_by_memory(requests: Sequence[Request]) -> tuple[Sequence[Request], list[Request]]:
    """Requests that have their memory to themselves, and those that share it with another name.

    What is read into one memory under two names must not be read at the same time.
    """
    filled = [r for r in requests if r.nbytes and r.target.is_cpu]
    begins = np.fromiter((r.target.data_ptr() for r in filled), np.int64, len(filled))
    ends = begins + np.fromiter((_extent_bytes(r.target) for r in filled), np.int64, len(filled))
    order = np.argsort(begins, kind="stable")
    if (begins[order][1:] >= np.maximum.accumulate(ends[order])[:-1]).all():
        return requests, []
    spans: dict[str, tuple[int, int]] = {}
    for request, begin, end in zip(filled, begins.tolist(), ends.tolist(), strict=True):
        low, high = spans.get(request.into, (begin, end))
        spans[request.into] = (min(low, begin), max(high, end))
    sharing: set[str] = set()
    furthest, reach = "", 0
    for name, (low, high) in sorted(spans.items(), key=lambda span: span[1]):
        if low < reach:
            sharing |= {furthest, name}
        if high > reach:
            furthest, reach = name, high
    if not sharing:
        return requests, []
    apart = [request for request in requests if request.into not in sharing]
    return apart, [request for request in requests if request.into in sharing]


def _extent_bytes(tensor: torch.Tensor) -> int:
    """How many bytes lie between the first and the last element, that included."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return elements_spanned(tensor.shape, tensor.stride()) * tensor.itemsize


def read_bytes(
    reader: Reader, name: str, begin: int, nbytes: int, expected: int, verify: Verify, where: str
) -> bytes:
    """A stored value."""
    if begin + nbytes > reader.nbytes:
        raise CorruptCheckpointError(
            f"the stored bytes of {name!r} are not all there: they should be bytes {begin} to "
            f"{begin + nbytes} of {where}, which has {reader.nbytes}. Load another checkpoint"
        )
    buffer = bytearray(nbytes)
    if nbytes:
        try:
            reader.read_into(begin, [memoryview(buffer)])
        except CutShortError as error:
            raise too_short(name, where, error) from error
    if verify is not Verify.OFF:
        found = checksum(memoryview(buffer)).to_bytes(8, "big")
        compare(found, (expected & (1 << 64) - 1).to_bytes(8, "big"), name, where)
    return bytes(buffer)


def compare(
    found: bytes, expected: bytes, name: str, where: str, may_be_replaced: bool = False
) -> None:
    """Refuse bytes with another digest; those of a file of others may also have been replaced."""
    if found == expected:
        return
    what, then = "are damaged", "Load another checkpoint"
    if may_be_replaced:
        what = "are damaged, or the file was replaced since the checkpoint was saved"
        then = "Put the original file back, or load another checkpoint"
    raise CorruptCheckpointError(
        f"the stored bytes of {name!r} in {where} {what}: their checksum is {found.hex()}, it "
        f"should be {expected.hex()}. {then}"
    )


def too_short(name: str, where: str, error: CutShortError) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the stored bytes of {name!r} are not all there: {where} was cut short at byte "
        f"{error.end}. Load another checkpoint"
    )


def _hashed_piece_bytes(reader: Reader) -> int:
    """How much to read at once of what is hashed: whole frames, of what has some."""
    return getattr(reader, "frame_bytes", _HASHED_PIECE_BYTES)


def _lands_directly(request: Request) -> bool:
    return (
        request.target.dtype is request.dtype
        and is_direct(request.target)
        and is_one_run(request.chunk_shape, request.lengths)
    )


def _position(request: Request) -> int:
    if request.whole:
        return request.begin
    return request.begin + ravel(request.chunk_shape, request.offsets) * request.dtype.itemsize


def _batches(requests: list[Request]) -> list[list[Request]]:
    """Small neighbours in one file, to be read by one call each."""
    keyed = sorted(((r.file, _position(r), r) for r in requests), key=lambda entry: entry[:2])
    batches: list[list[Request]] = []
    end, file, size = 0, None, 0
    for its_file, begin, request in keyed:
        fits = size + request.nbytes <= _BATCH_BYTES and batches and len(batches[-1]) < _BATCH_ITEMS
        if its_file != file or not 0 <= begin - end <= WIDEST_GAP_BYTES or not fits:
            batches.append([])
            size = 0
        batches[-1].append(request)
        file, end, size = its_file, begin + request.nbytes, size + request.nbytes
    return batches


class _Job:
    def __init__(
        self,
        readers: Mapping[str, Reader],
        verify: Verify,
        where: str,
        advance: Callable[[int], None],
    ) -> None:
        self._advance = advance
        self._readers = readers
        self._verify = Verify.OFF if verify is Verify.FINGERPRINT else verify
        self._where = where
        self._local = threading.local()
        self._verified: set[tuple[str, int]] = set()

    def read(self, batch: Sequence[Request]) -> None:
        try:
            if len(batch) == 1:
                self._read_one(batch[0])
            else:
                self._read_neighbours(batch)
        except CutShortError as error:
            # Neighbours are in the order in which they lie in the file.
            ends = ((r, _position(r) + r.nbytes) for r in batch)
            lost = next((r for r, end in ends if end > error.end), batch[-1])
            raise too_short(lost.name, self._in(lost), error) from error
        for request in batch:
            if request.done is not None:
                request.done()
        self._advance(sum(request.nbytes for request in batch))

    def _read_neighbours(self, batch: Sequence[Request]) -> None:
        begin = end = _position(batch[0])
        views: list[memoryview] = []
        for request in batch:
            position = _position(request)
            if position > end:
                gap = self._bounce().take(WIDEST_GAP_BYTES)
                views.append(byte_view(gap)[: position - end])
            views.append(byte_view(request.target))
            end = position + request.nbytes
        self._readers[batch[0].file].read_into(begin, views)
        for request in batch:
            if request.whole and (self._verify is not Verify.OFF or request.suspect):
                found = digest(byte_view(request.target))
                compare(found, request.digest, request.name, self._in(request), request.suspect)

    def _read_one(self, request: Request) -> None:
        if not request.nbytes:
            # Nothing to read, but the callback must still run.
            return
        if self._is_to_be_verified(request):
            self._read_verified(request)
        else:
            self._filler(request).fill(None)

    def _filler(self, request: Request) -> _Filler:
        return _Filler(self._readers[request.file], request, self._bounce())

    def _is_to_be_verified(self, request: Request) -> bool:
        if request.whole:
            return self._verify is not Verify.OFF or request.suspect
        # Several parts of one chunk may be wanted, one by one.
        is_known = (request.file, request.begin) in self._verified
        return (self._verify is Verify.FULL or request.suspect) and not is_known

    def _read_verified(self, request: Request) -> None:
        """Fill the target, and hash all of the chunk: what lies before and after it, too."""
        hasher = Digester()
        filler = self._filler(request)
        span = filler.span()
        if span is None:
            filler.fill(None)
            end = 0
        else:
            begin, end = span
            self._hash(request, 0, begin, hasher)
            filler.fill(hasher)
        chunk_bytes = math.prod(request.chunk_shape) * request.dtype.itemsize
        self._hash(request, end, chunk_bytes, hasher)
        where = self._in(request)
        compare(hasher.digest(), request.digest, request.name, where, request.suspect)
        self._verified.add((request.file, request.begin))

    def _hash(self, request: Request, begin: int, end: int, hasher: Any) -> None:
        """Look at bytes of a chunk for its checksum alone."""
        reader = self._readers[request.file]
        position = begin
        while position < end:
            nbytes = min(_hashed_piece_bytes(reader), end - position)
            piece = byte_view(self._bounce().take(nbytes))
            reader.read_into(request.begin + position, [piece])
            hasher.update(piece)
            position += len(piece)

    def _in(self, request: Request) -> str:
        return f"{request.file!r} of {self._where}"

    def _bounce(self) -> BounceBuffer:
        bounce: BounceBuffer | None = getattr(self._local, "bounce", None)
        if bounce is None:
            bounce = self._local.bounce = BounceBuffer(_BOUNCE_BYTES)
        return bounce


class _Filler:
    """Fills the target of one request, cutting the region until a piece can be read.

    A hasher that it is given along is fed with the bytes of `span`, as they lie in the file.
    """

    def __init__(self, reader: Any, request: Request, bounce: Any) -> None:
        self._reader: Reader = reader
        self._request = request
        self._shape = tuple(request.chunk_shape)
        self._itemsize = request.dtype.itemsize
        self._hasher: Any = None
        self._bounce: BounceBuffer = bounce

    def fill(self, hasher: Any) -> None:
        self._hasher = hasher
        target = self._request.target.detach()
        self._fill(tuple(self._request.offsets), tuple(self._request.lengths), target)

    def span(self) -> tuple[int, int] | None:
        """From where to where the chunk is read, if that is done without leaving anything out."""
        offsets, lengths = tuple(self._request.offsets), tuple(self._request.lengths)
        if is_one_run(self._shape, lengths):
            begin = ravel(self._shape, offsets) * self._itemsize
            return begin, begin + self._request.nbytes
        dim, row_bytes = self._rows(lengths)
        if not self._reads_rows(row_bytes, dim, lengths):
            return None
        begin = self._first_row(dim, offsets)
        return begin, begin + lengths[dim] * row_bytes

    def ranges(self, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """From where to where of the chunk a region is read, for those who ask for it before."""
        if is_one_run(self._shape, lengths):
            begin = ravel(self._shape, offsets) * self._itemsize
            nbytes = math.prod(lengths) * self._itemsize
            return np.array([[begin, begin + nbytes]], dtype=np.int64)
        dim, row_bytes = self._rows(lengths)
        if self._reads_rows(row_bytes, dim, lengths):
            begin = self._first_row(dim, offsets)
            return np.array([[begin, begin + lengths[dim] * row_bytes]], dtype=np.int64)
        first = self.ranges(offsets, (*lengths[:dim], 1, *lengths[dim + 1 :]))
        steps = np.arange(lengths[dim], dtype=np.int64) * row_bytes
        return (first[None] + steps[:, None, None]).reshape(-1, 2)

    def _fill(
        self, offsets: tuple[int, ...], lengths: tuple[int, ...], target: torch.Tensor
    ) -> None:
        if is_one_run(self._shape, lengths):
            self._fill_run(offsets, lengths, target)
            return
        dim, row_bytes = self._rows(lengths)
        if self._reads_rows(row_bytes, dim, lengths):
            self._fill_rows(dim, row_bytes, offsets, lengths, target)
        else:
            self._split(dim, 1, offsets, lengths, target)

    def _rows(self, lengths: tuple[int, ...]) -> tuple[int, int]:
        """The dimension along which a region is a number of rows, and how long they are stored."""
        dim = next(dim for dim, length in enumerate(lengths) if length > 1)
        return dim, math.prod(self._shape[dim + 1 :]) * self._itemsize

    def _reads_rows(self, row_bytes: int, dim: int, lengths: tuple[int, ...]) -> bool:
        """Whether reading rows whole is cheaper than leaving out what is not wanted."""
        wanted_bytes = math.prod(lengths[dim + 1 :]) * self._itemsize
        return row_bytes <= _BOUNCE_BYTES and row_bytes - wanted_bytes <= WIDEST_GAP_BYTES

    def _first_row(self, dim: int, offsets: tuple[int, ...]) -> int:
        first = (*offsets[: dim + 1], *(0,) * (len(self._shape) - dim - 1))
        return ravel(self._shape, first) * self._itemsize

    def _split(
        self,
        dim: int,
        step: int,
        offsets: tuple[int, ...],
        lengths: tuple[int, ...],
        target: torch.Tensor,
    ) -> None:
        for begin in range(0, lengths[dim], step):
            count = min(step, lengths[dim] - begin)
            self._fill(
                (*offsets[:dim], offsets[dim] + begin, *offsets[dim + 1 :]),
                (*lengths[:dim], count, *lengths[dim + 1 :]),
                target.narrow(dim, begin, count),
            )

    def _fill_run(
        self, offsets: tuple[int, ...], lengths: tuple[int, ...], target: torch.Tensor
    ) -> None:
        """A region that is contiguous in the file."""
        begin = self._request.begin + ravel(self._shape, offsets) * self._itemsize
        nbytes = math.prod(lengths) * self._itemsize
        if target.dtype is self._request.dtype and is_direct(target):
            view = byte_view(target)
            step = _PIECE_BYTES if self._hasher is None else _hashed_piece_bytes(self._reader)
            for position in range(0, nbytes, step):
                piece = view[position : position + step]
                self._reader.read_into(begin + position, [piece])
                if self._hasher is not None:
                    self._hasher.update(piece)
        elif nbytes <= _BOUNCE_BYTES or nbytes == self._itemsize:
            target.copy_(self._stage(begin, nbytes).view(lengths))
        else:
            dim = next(dim for dim, length in enumerate(lengths) if length > 1)
            step = max(1, _BOUNCE_BYTES // (nbytes // lengths[dim]))
            self._split(dim, step, offsets, lengths, target)

    def _fill_rows(
        self,
        dim: int,
        row_bytes: int,
        offsets: tuple[int, ...],
        lengths: tuple[int, ...],
        target: torch.Tensor,
    ) -> None:
        """Rows of which a part is wanted: read whole, as many as fit the buffer."""
        begin = self._request.begin + self._first_row(dim, offsets)
        if self._can_scatter(dim, lengths, target):
            self._scatter_rows(begin, dim, row_bytes, offsets, lengths, target)
            return
        # What is hashed is copied out of the cache afterwards, so it has to fit.
        most_bytes = _BOUNCE_BYTES if self._hasher is None else _HASHED_ROWS_BYTES
        most = max(1, most_bytes // row_bytes)
        for row in range(0, lengths[dim], most):
            count = min(most, lengths[dim] - row)
            rows = self._stage(begin + row * row_bytes, count * row_bytes)
            self._copy_rows(dim, row, rows, offsets, lengths, target)

    def _can_scatter(self, dim: int, lengths: tuple[int, ...], target: torch.Tensor) -> bool:
        """Whether each row has one wanted part, long enough to be worth a buffer of its own."""
        wanted_bytes = math.prod(lengths[dim + 1 :]) * self._itemsize
        return (
            self._hasher is None
            and wanted_bytes >= _SCATTERED_BYTES
            and target.dtype is self._request.dtype
            and is_direct(target)
            and is_one_run(self._shape[dim + 1 :], lengths[dim + 1 :])
        )

    def _scatter_rows(
        self,
        begin: int,
        dim: int,
        row_bytes: int,
        offsets: tuple[int, ...],
        lengths: tuple[int, ...],
        target: torch.Tensor,
    ) -> None:
        """Read the wanted part of each row to its place, and what lies between to nowhere.

        The gaps share one small buffer that stays in the cache, so that only what is wanted
        is written to memory.
        """
        wanted_bytes = math.prod(lengths[dim + 1 :]) * self._itemsize
        lead = ravel(self._shape[dim + 1 :], offsets[dim + 1 :]) * self._itemsize
        gap_bytes = row_bytes - wanted_bytes
        gap = byte_view(self._bounce.take(gap_bytes))
        view = byte_view(target)
        most = max(1, min(_SCATTERED_ROWS, _PIECE_BYTES // row_bytes))
        for row in range(0, lengths[dim], most):
            count = min(most, lengths[dim] - row)
            buffers: list[memoryview] = []
            for position in range(row * wanted_bytes, (row + count) * wanted_bytes, wanted_bytes):
                buffers += (view[position : position + wanted_bytes], gap)
            self._reader.read_into(begin + row * row_bytes + lead, buffers[:-1])

    def _copy_rows(
        self,
        dim: int,
        row: int,
        rows: torch.Tensor,
        offsets: tuple[int, ...],
        lengths: tuple[int, ...],
        target: torch.Tensor,
    ) -> None:
        """Copy what is wanted of some rows."""
        rows = rows.view(*(1,) * dim, -1, *self._shape[dim + 1 :])
        count = rows.shape[dim]
        for inner in range(dim + 1, len(lengths)):
            if lengths[inner] != self._shape[inner]:
                rows = rows.narrow(inner, offsets[inner], lengths[inner])
        target.narrow(dim, row, count).copy_(rows)

    def _stage(self, begin: int, nbytes: int) -> torch.Tensor:
        """Bytes of the file in the buffer, as elements of the stored dtype."""
        buffer = self._bounce.take(nbytes)
        view = byte_view(buffer)
        self._reader.read_into(begin, [view])
        if self._hasher is not None:
            self._hasher.update(view)
        return buffer.view(self._request.dtype)

"""Writing one shard file: layout first, then bytes and checksums in one pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from reshard.engine.collector import paused_collection
from reshard.engine.memory import BounceBuffer, byte_view, is_direct, pieces
from reshard.engine.workers import run_all
from reshard.format.checksum import (
    DIGEST_BYTES,
    Digester,
    Digests,
    checksum,
    digest,
    join_digests,
    probe,
    signed,
)
from reshard.format.container import SAFETENSORS_DTYPES, Entry, build_header
from reshard.format.fingerprint import RegionFingerprint
from reshard.format.word_sums import expect
from reshard.planning.columns import Ints
from reshard.stores.protocol import Store, Writer

_PIECE_BYTES = 8 << 20
_SMALL_BYTES = 256 << 10
_BATCH_BYTES = 8 << 20
_BATCH_ITEMS = 1000
_NO_DIGEST = bytes(DIGEST_BYTES)
"""Of what is no chunk."""


# There are as many as there are tensors, and none is part of a cycle: unknown to the garbage
# collector, they do not make it run.
class Content(msgspec.Struct, gc=False):
    """One thing to write: its key in the file, its form, and its data or how to get it.

    A `source` that is a function is called once, when its turn comes, since it may allocate. A
    chunk lies at `offsets` of the tensor `name`, which has `tensor_shape`; of other contents these
    are None.
    """

    key: str
    dtype: torch.dtype
    shape: Sequence[int]
    nbytes: int
    source: torch.Tensor | memoryview | Callable[[], torch.Tensor | memoryview]
    name: str = ""
    offsets: Sequence[int] | None = None
    tensor_shape: Sequence[int] | None = None

    def resolve(self) -> torch.Tensor | memoryview:
        source = self.source
        return source if isinstance(source, torch.Tensor | memoryview) else source()

    def start_fingerprint(self) -> RegionFingerprint | None:
        """What takes the bytes of a chunk, one after the other; None for other contents."""
        if self.tensor_shape is None or self.offsets is None:
            return None
        return RegionFingerprint(self.dtype.itemsize, self.tensor_shape, self.offsets, self.shape)


class Hashed(NamedTuple):
    """What stands for a content: for its first bytes, and for all of it."""

    probe: int
    digest: bytes | None


def hash_content(content: Content, expected_probe: int | None, bounce: BounceBuffer) -> Hashed:
    """Hash a chunk that may not have to be written; no further than its first bytes if they differ
    from what is expected.
    """
    data = content.resolve()
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"{content.key!r} is not a tensor")
    digester, found = Digester(), None
    for piece in pieces(data, _PIECE_BYTES, bounce):
        if found is None:
            found = signed(probe(piece))
            if expected_probe is not None and found != expected_probe:
                return Hashed(found, None)
        digester.update(piece)
    return Hashed(signed(probe(b"")) if found is None else found, digester.digest())


@dataclass(frozen=True, slots=True)
class Written:
    """What became of the contents: where each begins in the file, its probe and its digest.

    A content that is no chunk has its checksum in place of the probe. Fingerprints are 0 for
    what has none.
    """

    file_bytes: int
    header_bytes: int
    header_checksum: int
    begins: Ints
    checksums: Ints
    digests: Digests
    fingerprints: Ints


def write_file(
    store: Store,
    key: str,
    contents: Sequence[Content],
    threads: int,
    durable: bool,
    advance: Callable[[int], None] = lambda nbytes: None,
    save_id: str = "",
    fingerprint: bool = False,
) -> Written:
    """Write `contents` as one safetensors file, which carries the id of its save.

    With `fingerprint`, the parts of chunks in the fingerprints of their tensors are computed on the
    way. `advance` is called with the bytes that were written, from several threads.
    """
    order = sorted(range(len(contents)), key=lambda i: -_alignment(contents[i].dtype))
    with paused_collection():
        header, begins = lay_out(contents, order, save_id)
    file_bytes = len(header) + sum(content.nbytes for content in contents)

    checksums, digests = np.zeros(len(contents), dtype=np.uint64), [_NO_DIGEST] * len(contents)
    fingerprints = np.zeros((len(contents), 2), dtype=np.uint64)
    if fingerprint:
        expect(file_bytes)
    writer = store.open_writer(key, file_bytes)
    try:
        writer.write(0, [memoryview(header)])
        job = _Job(writer, contents, begins, checksums, digests, durable, advance)
        if fingerprint:
            job.fingerprints = fingerprints
        run_all(job.write, _batches(contents, order), threads)
        if durable:
            writer.sync()
    finally:
        writer.close()
    return Written(
        file_bytes,
        len(header),
        signed(checksum(header)),
        begins,
        checksums.view(np.int64),
        join_digests(digests),
        fingerprints.view(np.int64),
    )


def lay_out(contents: Sequence[Content], order: Sequence[int], save_id: str) -> tuple[bytes, Ints]:
    """The header of the file, and where each content begins."""
    entries: dict[str, Entry] = {}
    begins = [0] * len(contents)
    position = 0
    for i in order:
        content = contents[i]
        begins[i] = position
        entries[content.key] = _entry(content, position)
        position += content.nbytes
    notes = {"format": "pt", "save_id": save_id} if save_id else {"format": "pt"}
    header = build_header(entries, notes)
    return header, np.array(begins, dtype=np.int64) + len(header)


def region_key(fqn: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The FQN, with the region appended when it is not the whole tensor."""
    if tuple(sizes) == tuple(shape):
        return fqn
    region = ",".join(
        f"{offset}:{offset + size}" for offset, size in zip(offsets, sizes, strict=True)
    )
    return f"{fqn}[{region}]"


def _alignment(dtype: torch.dtype) -> int:
    """Contents are ordered by element size, so that each begins at a multiple of its own."""
    return dtype.itemsize


def _entry(content: Content, begin: int) -> Entry:
    name = SAFETENSORS_DTYPES.get(content.dtype)
    shape = content.shape if name is not None else (content.nbytes,)
    return Entry(name or "U8", tuple(shape), begin, begin + content.nbytes)


def _batches(contents: Sequence[Content], order: Sequence[int]) -> list[list[int]]:
    """Large contents by themselves, small neighbours together."""
    batches: list[list[int]] = []
    small: list[int] = []
    small_bytes = 0
    for i in order:
        nbytes = contents[i].nbytes
        if nbytes > _SMALL_BYTES:
            batches.append([i])
            if small:
                batches.append(small)
            small, small_bytes = [], 0
            continue
        small.append(i)
        small_bytes += nbytes
        if small_bytes >= _BATCH_BYTES or len(small) >= _BATCH_ITEMS:
            batches.append(small)
            small, small_bytes = [], 0
    if small:
        batches.append(small)
    return batches


class _Job:
    def __init__(
        self,
        writer: Writer,
        contents: Sequence[Content],
        begins: Ints,
        checksums: npt.NDArray[np.uint64],
        digests: list[bytes],
        durable: bool,
        advance: Callable[[int], None],
    ) -> None:
        self._advance = advance
        self._writer = writer
        self._contents = contents
        self._begins = begins
        self._checksums = checksums
        self._digests = digests
        self.fingerprints: npt.NDArray[np.uint64] | None = None
        """Where they are to go, if they are to be computed."""
        self._durable = durable
        self._local = threading.local()

    def write(self, batch: Sequence[int]) -> None:
        if len(batch) == 1:
            self._write_one(batch[0])
            return
        views = []
        alive = []
        for i in batch:
            data = self._contents[i].resolve()
            if isinstance(data, torch.Tensor):
                if not is_direct(data):
                    data = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
                alive.append(data)
                data = byte_view(data)
                self._checksums[i], self._digests[i] = probe(data), digest(data)
                part = self._start_fingerprint(i)
                if part is not None:
                    part.update(data)
                self._end_fingerprint(i, part)
            else:
                self._checksums[i] = checksum(data)
            self._check(i, len(data))
            views.append(data)
        self._writer.write(int(self._begins[batch[0]]), [view for view in views if len(view)])
        self._advance(sum(map(len, views)))

    def _write_one(self, i: int) -> None:
        data = self._contents[i].resolve()
        if not isinstance(data, torch.Tensor):
            self._check(i, len(data))
            self._checksums[i] = checksum(data)
            self._write_piece(int(self._begins[i]), data)
            return
        self._check(i, data.nbytes)
        position = begin = int(self._begins[i])
        digester, part = Digester(), self._start_fingerprint(i)
        for piece in pieces(data, _PIECE_BYTES, self._bounce()):
            if position == begin:
                self._checksums[i] = probe(piece)
            digester.update(piece)
            if part is not None:
                part.update(piece)
            self._write_piece(position, piece)
            position += len(piece)
        self._digests[i] = digester.digest()
        self._end_fingerprint(i, part)

    def _start_fingerprint(self, i: int) -> RegionFingerprint | None:
        return None if self.fingerprints is None else self._contents[i].start_fingerprint()

    def _end_fingerprint(self, i: int, part: RegionFingerprint | None) -> None:
        if part is not None and self.fingerprints is not None:
            self.fingerprints[i] = part.sums()

    def _write_piece(self, position: int, piece: memoryview) -> None:
        self._writer.write(position, [piece])
        if self._durable:
            self._writer.start_sync(position, len(piece))
        self._advance(len(piece))

    def _bounce(self) -> BounceBuffer:
        bounce: BounceBuffer | None = getattr(self._local, "bounce", None)
        if bounce is None:
            bounce = self._local.bounce = BounceBuffer(_PIECE_BYTES)
        return bounce

    def _check(self, i: int, nbytes: int) -> None:
        content = self._contents[i]
        if nbytes != content.nbytes:
            raise ValueError(
                f"{content.key!r} was planned with {content.nbytes} bytes, but its data has "
                f"{nbytes}: the planner's resolve_data must return what its plan announced"
            )

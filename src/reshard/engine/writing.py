"""Writing one shard file: layout first, then bytes and checksums in one pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from reshard.engine.collector import paused_collection
from reshard.engine.memory import BounceBuffer, byte_view, is_direct, pieces
from reshard.engine.workers import run_all
from reshard.format.checksum import (
    DIGEST_BYTES,
    Digester,
    Digests,
    checksum,
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
    what has none. In a file that holds encoded contents, `encoded` says which ones, and
    `stored_nbytes` how long each is there.
    """

    file_bytes: int
    header_bytes: int
    header_checksum: int
    begins: Ints
    checksums: Ints
    digests: Digests
    fingerprints: Ints
    encoded: Ints | None = None
    stored_nbytes: Ints | None = None


def write_file(
    store: Store,
    key: str,
    contents: Sequence[Content],
    threads: int,
    durable: bool,
    advance: Callable[[int], None] = lambda nbytes: None,
    save_id: str = "",
    fingerprint: bool = False,
    notes: Mapping[str, str] | None = None,
    describe: Callable[[Content, int], Entry] | None = None,
) -> Written:
    """Write `contents` as one safetensors file, which carries the id of its save and `notes`.

    `describe` gives the entry of a content in the header, which otherwise is `stored_entry`.

    With `fingerprint`, the parts of chunks in the fingerprints of their tensors are computed on the
    way. `advance` is called with the bytes that were written, from several threads.
    """
    order = file_order(contents)
    with paused_collection():
        header, begins = lay_out(contents, order, save_id, notes, describe)
    file_bytes = len(header) + sum(content.nbytes for content in contents)

    sums = Sums(contents, fingerprint)
    writer = store.open_writer(key, file_bytes)
    try:
        writer.write(0, [memoryview(header)])
        job = _Job(writer, contents, begins, sums, durable, advance)
        batches = _batches(contents, order)
        if threads == 1:
            # Some files can only be written from their beginning to their end.
            batches.sort(key=lambda batch: int(begins[batch[0]]))
        run_all(job.write, batches, threads)
        if durable:
            writer.sync()
    finally:
        writer.close()
    return Written(
        file_bytes,
        len(header),
        signed(checksum(header)),
        begins,
        sums.checksums,
        sums.digests,
        sums.fingerprints,
    )


def lay_out(
    contents: Sequence[Content],
    order: Sequence[int],
    save_id: str,
    notes: Mapping[str, str] | None = None,
    describe: Callable[[Content, int], Entry] | None = None,
) -> tuple[bytes, Ints]:
    """The header of the file, and where each content begins."""
    describe = describe or stored_entry
    entries: dict[str, Entry] = {}
    begins = [0] * len(contents)
    position = 0
    for i in order:
        content = contents[i]
        begins[i] = position
        entries[content.key] = describe(content, position)
        position += content.nbytes
    own = {"format": "pt", "save_id": save_id} if save_id else {"format": "pt"}
    header = build_header(entries, own | dict(notes or {}))
    return header, np.array(begins, dtype=np.int64) + len(header)


def region_key(fqn: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The FQN, with the region appended when it is not the whole tensor."""
    if tuple(sizes) == tuple(shape):
        return fqn
    region = ",".join(
        f"{offset}:{offset + size}" for offset, size in zip(offsets, sizes, strict=True)
    )
    return f"{fqn}[{region}]"


def file_order(contents: Sequence[Content]) -> list[int]:
    """Contents by element size, so that each begins at a multiple of its own."""
    return sorted(range(len(contents)), key=lambda i: -contents[i].dtype.itemsize)


def stored_entry(content: Content, begin: int) -> Entry:
    """How the header describes a content that is stored as it is."""
    name = SAFETENSORS_DTYPES.get(content.dtype)
    shape = content.shape if name is not None else (content.nbytes,)
    return Entry(name or "U8", tuple(shape), begin, begin + content.nbytes)


def check_planned(content: Content, nbytes: int) -> None:
    """Refuse data of another size than was planned."""
    if nbytes != content.nbytes:
        raise ValueError(
            f"{content.key!r} was planned with {content.nbytes} bytes, but its data has "
            f"{nbytes}: the planner's resolve_data must return what its plan announced"
        )


class ChunkSums:
    """What stands for one chunk, of which the bytes are given in order."""

    def __init__(self, fingerprint: RegionFingerprint | None) -> None:
        self._digester = Digester()
        self._probe: int | None = None
        self._fingerprint = fingerprint

    def update(self, piece: memoryview) -> None:
        if self._probe is None:
            self._probe = probe(piece)
        self._digester.update(piece)
        if self._fingerprint is not None:
            self._fingerprint.update(piece)

    def probe(self) -> int:
        return probe(b"") if self._probe is None else self._probe

    def digest(self) -> bytes:
        return self._digester.digest()

    def fingerprint(self) -> Any:
        """Two sums, or 0."""
        return 0 if self._fingerprint is None else self._fingerprint.sums()


class Sums:
    """What stands for each of some contents, as far as it is known."""

    def __init__(self, contents: Sequence[Content], fingerprint: bool) -> None:
        self._contents = contents
        self._fingerprints_wanted = fingerprint
        self._checksums = np.zeros(len(contents), dtype=np.uint64)
        self._digests = [_NO_DIGEST] * len(contents)
        self._fingerprints = np.zeros((len(contents), 2), dtype=np.uint64)
        if fingerprint:
            expect(sum(content.nbytes for content in contents))

    def start_chunk(self, i: int) -> ChunkSums:
        wanted = self._fingerprints_wanted
        return ChunkSums(self._contents[i].start_fingerprint() if wanted else None)

    def end_chunk(self, i: int, chunk: ChunkSums) -> None:
        self._checksums[i], self._digests[i] = chunk.probe(), chunk.digest()
        self._fingerprints[i] = chunk.fingerprint()

    def note_checksum(self, i: int, checksum_of_stored: int) -> None:
        self._checksums[i] = checksum_of_stored

    @property
    def checksums(self) -> Ints:
        """Of chunks, the probes."""
        return self._checksums.view(np.int64)

    @property
    def digests(self) -> Digests:
        return join_digests(self._digests)

    @property
    def fingerprints(self) -> Ints:
        return self._fingerprints.view(np.int64)


class Gathered(NamedTuple):
    """The bytes of some contents, and the tensors that they are the memory of."""

    views: list[memoryview]
    owners: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.views))


def gather(contents: Sequence[Content], batch: Sequence[int], sums: Sums) -> Gathered:
    """The bytes of small contents, whose checksums are noted."""
    gathered = Gathered([], [])
    for i in batch:
        data = contents[i].resolve()
        if isinstance(data, torch.Tensor):
            if not is_direct(data):
                data = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
            gathered.owners.append(data)
            data = byte_view(data)
            chunk = sums.start_chunk(i)
            chunk.update(data)
            sums.end_chunk(i, chunk)
        else:
            sums.note_checksum(i, checksum(data))
        check_planned(contents[i], len(data))
        if len(data):
            gathered.views.append(data)
    return gathered


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
        sums: Sums,
        durable: bool,
        advance: Callable[[int], None],
    ) -> None:
        self._advance = advance
        self._writer = writer
        self._contents = contents
        self._begins = begins
        self._sums = sums
        self._durable = durable
        self._local = threading.local()

    def write(self, batch: Sequence[int]) -> None:
        if len(batch) == 1:
            self._write_one(batch[0])
            return
        gathered = gather(self._contents, batch, self._sums)
        self._writer.write(int(self._begins[batch[0]]), gathered.views)
        self._advance(gathered.nbytes)

    def _write_one(self, i: int) -> None:
        data = self._contents[i].resolve()
        if not isinstance(data, torch.Tensor):
            check_planned(self._contents[i], len(data))
            self._sums.note_checksum(i, checksum(data))
            self._write_piece(int(self._begins[i]), data)
            return
        check_planned(self._contents[i], data.nbytes)
        position = int(self._begins[i])
        chunk = self._sums.start_chunk(i)
        for piece in pieces(data, _PIECE_BYTES, self._bounce()):
            chunk.update(piece)
            self._write_piece(position, piece)
            position += len(piece)
        self._sums.end_chunk(i, chunk)

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

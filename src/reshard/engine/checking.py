"""Comparing stored chunks with their digests, without keeping what was read."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reshard.engine.reading import compare, too_short
from reshard.engine.workers import default_threads, run_all
from reshard.format.checksum import Digester
from reshard.stores.protocol import CutShortError, Reader

_PIECE_BYTES = 512 << 10
"""Small enough to be hashed while it is still in the cache of the core that read it."""


class StoredChunk(NamedTuple):
    """Where a chunk lies, and the digest that it should have."""

    name: str
    file: str
    begin: int
    nbytes: int
    digest: bytes
    suspect: bool = False
    """Whether the file may be another one than it was, with the same header."""


def check_chunks(chunks: Sequence[StoredChunk], readers: Mapping[str, Reader], where: str) -> None:
    """Read chunks, in threads; `CorruptCheckpointError` if one is damaged."""
    local = threading.local()

    def check(chunk: StoredChunk) -> None:
        buffer = getattr(local, "buffer", None)
        if buffer is None:
            buffer = local.buffer = memoryview(bytearray(_PIECE_BYTES))
        hasher, reader = Digester(), readers[chunk.file]
        place = f"{chunk.file!r} of {where}"
        try:
            for begin in range(0, chunk.nbytes, _PIECE_BYTES):
                piece = buffer[: min(_PIECE_BYTES, chunk.nbytes - begin)]
                reader.read_into(chunk.begin + begin, [piece])
                hasher.update(piece)
        except CutShortError as error:
            raise too_short(chunk.name, place, error) from error
        compare(hasher.digest(), chunk.digest, chunk.name, place, chunk.suspect)

    run_all(check, sorted(chunks, key=lambda chunk: chunk[1:3]), default_threads())

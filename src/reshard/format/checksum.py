"""Checksums of stored bytes: XXH3, in two widths.

64 bits find damage. 128 bits, the digest of a chunk, also stand for its content: chunks with equal
digests are taken for equal.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

ALGORITHM, DIGEST_ALGORITHM = "xxh3-64", "xxh3-128"
DIGEST_BYTES = 16
PROBE_BYTES = 4096
"""How many bytes of a chunk its probe covers."""

Hasher = xxhash.xxh3_64
"""`update(buffer)` and `intdigest()`; releases the GIL for large buffers."""
Digester = xxhash.xxh3_128
"""`update(buffer)` and `digest()`, likewise."""

Digests = npt.NDArray[np.uint8]
"""One row of 16 bytes for each chunk."""


def checksum(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


def digest(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def probe(data: bytes | memoryview) -> int:
    """The checksum of the first bytes of a chunk: chunks that differ mostly differ there."""
    return xxhash.xxh3_64_intdigest(data[:PROBE_BYTES])


def signed(number: int) -> int:
    """An unsigned checksum as columns keep it."""
    return number - (1 << 64) if number >= 1 << 63 else number


def join_digests(digests: Iterable[bytes]) -> Digests:
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES)


def split_digests(digests: Digests) -> list[bytes]:
    """The rows as bytes."""
    rows: list[bytes] = np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}").ravel().tolist()
    return rows

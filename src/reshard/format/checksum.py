"""The checksum of every stored chunk: XXH3, 64 bits."""

from __future__ import annotations

import xxhash

ALGORITHM = "xxh3-64"

Hasher = xxhash.xxh3_64
"""`update(buffer)` and `intdigest()`; releases the GIL for large buffers."""


def checksum(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)

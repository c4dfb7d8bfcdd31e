"""Safetensors containers: a header that names tensors, and their bytes.

Used for shard files and for the manifest. The writing side lays files out so that the
data begins on a 4096-byte boundary; the reading side trusts nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from reshard.api import CorruptCheckpointError

ALIGNMENT = 4096
_MOST_HEADER_BYTES = 1 << 31
MOST_PLAIN_HEADER_BYTES = 100 << 20
"""What the header of a safetensors file of others may take; safetensors itself reads no more."""

SAFETENSORS_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes that safetensors has a name for. Others are stored as bytes (U8)."""


class Entry(NamedTuple):
    """One tensor of a container; `begin` and `end` count from the start of its data."""

    dtype: str
    shape: Sequence[int]
    begin: int
    end: int


def build_header(
    entries: Mapping[str, Entry], notes: Mapping[str, str], least_bytes: int = 0
) -> bytes:
    """The first bytes of a container, up to where its data begins.

    Entries must follow one another without a gap, in order. `least_bytes` is a multiple of
    `ALIGNMENT`.
    """
    content: dict[str, Any] = {"__metadata__": notes} if notes else {}
    for name, (dtype, shape, begin, end) in entries.items():
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(content)
    padding = max(-(8 + len(text)) % ALIGNMENT, least_bytes - 8 - len(text))
    return struct.pack("<Q", len(text) + padding) + text + b" " * padding


def header_nbytes(head: bytes | bytearray | memoryview, nbytes: int, where: str) -> int:
    """Where the data of a container of `nbytes` bytes begins; `head` has its first bytes."""
    if nbytes < 8 or len(head) < 8:
        raise CorruptCheckpointError(f"{where} is {nbytes} bytes long, too short for a header")
    (length,) = struct.unpack("<Q", bytes(head[:8]))
    if length > min(nbytes - 8, _MOST_HEADER_BYTES):
        raise CorruptCheckpointError(
            f"{where} announces a header of {length} bytes but is {nbytes} bytes long"
        )
    return 8 + int(length)


def parse_header(
    head: bytes | bytearray | memoryview, nbytes: int, where: str
) -> tuple[dict[str, Entry], dict[str, str], int]:
    """Entries, notes, and where the data begins, of a container of `nbytes` bytes.

    `head` holds at least the header. Everything is checked against the size of the file.
    """
    length = header_nbytes(head, nbytes, where) - 8
    try:
        content = msgspec.json.decode(bytes(head[8 : 8 + length]))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{where} has a header that is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{where} has a header that is not an object")
    notes = content.pop("__metadata__", {})
    data_begin = 8 + length
    entries = {
        name: _entry(name, entry, nbytes - data_begin, where) for name, entry in content.items()
    }
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise CorruptCheckpointError(f"{where} has notes that are not texts")
    return entries, notes, data_begin


class Source(Protocol):
    """Where a container is read from."""

    @property
    def nbytes(self) -> int: ...

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None: ...


class BytesSource:
    """Bytes in memory, read like a file."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            buffer[:] = self.data[offset : offset + len(buffer)]
            offset += len(buffer)

    def close(self) -> None:
        """Nothing to release."""


def read_header(source: Source, where: str, limit_bytes: int) -> tuple[bytearray, int]:
    """The bytes of a header, `limit_bytes` at most, and where the data begins."""
    nbytes = source.nbytes
    start = bytearray(min(8, nbytes))
    source.read_into(0, [memoryview(start)] if start else [])
    length = header_nbytes(start, nbytes, where)
    if length > limit_bytes:
        raise CorruptCheckpointError(
            f"the header of {where} has {length} bytes, too many to be one"
        )
    head = bytearray(length)
    source.read_into(0, [memoryview(head)])
    return head, length


def _entry(name: str, entry: Any, available: int, where: str) -> Entry:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        sound = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in numbers)
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise CorruptCheckpointError(f"{where} has a malformed description of {name!r}")
    if not begin <= end <= available:
        raise CorruptCheckpointError(
            f"{where} places {name!r} at bytes {begin} to {end} of {available}"
        )
    return Entry(dtype, shape, begin, end)

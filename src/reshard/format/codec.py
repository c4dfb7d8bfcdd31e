"""Encoded chunks: byte planes, compressed where that pays, in frames that are read by themselves.

An encoded chunk is one run of bytes: an index, then frames. Each frame holds up to
`FRAME_BYTES` of the content, one plane after the other: plane `p` has byte `p` of every
element. The exponents of trained weights repeat and their mantissas do not, so that some
planes shrink to a third and others are kept as they are. `docs/design/codecs.md` has the
layout and the reasons. The decoding side trusts nothing.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from reshard.api import CorruptCheckpointError, UnsupportedFormatError
from reshard.format.checksum import Hasher, checksum

if TYPE_CHECKING:
    import zstandard

PLANES_ZSTD = "planes-zstd"
"""The name of the codec in a manifest."""
CODECS = {"zstd": PLANES_ZSTD}
"""What `compress` may be, and the codec that it chooses."""

FRAME_BYTES = 1 << 20
"""Content of a frame, as written. A frame of this size stays in the cache of one core."""
LEAST_FRAME_BYTES = 1 << 16
MOST_FRAME_BYTES = 1 << 22
ALIGNMENT = 8
"""Encoded chunks have a multiple of this length, so that what follows is aligned."""

_MAGIC = b"RSPL"
_VERSION = 1
_HEAD = struct.Struct("<4sBBHIIQQ")
HEAD_BYTES = _HEAD.size
_RAW, _ZSTD = 0, 1
_KIND_SHIFT = 24
_LEAST_GAIN = 32
"""A plane is kept as it is unless it shrinks by one part in so many; so is a chunk."""
_SAMPLE_BYTES = 16 << 10
_SAMPLES = 4

Bytes = npt.NDArray[np.uint8]


def check_compress(compress: str | None) -> None:
    """Refuse a `compress` that is unknown, or whose package is not installed."""
    if compress is None:
        return
    if compress not in CODECS:
        known = ", ".join(map(repr, CODECS))
        raise ValueError(f"compress={compress!r} is not known. Choose one of: {known}, None")
    _zstandard(f"compress={compress!r}")


def check_codec(name: str, where: str) -> None:
    """Refuse to read a codec whose package is not installed."""
    if name == PLANES_ZSTD:
        _zstandard(f"{where} was saved with compress='zstd', and")


def _zstandard(what: str) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(
            f"{what} needs the package zstandard: pip install 'reshard[compress]'",
            name="zstandard",
        ) from error
    return zstandard


# Layout


def plane_width(itemsize: int, nbytes: int) -> int:
    """How many planes to split elements of `itemsize` bytes into."""
    return next(width for width in (8, 4, 2, 1) if itemsize % width == 0 and nbytes % width == 0)


def _frame_count(nbytes: int, frame_nbytes: int) -> int:
    return -(-nbytes // frame_nbytes)


def _index_nbytes(nbytes: int, width: int, frame_nbytes: int) -> int:
    return HEAD_BYTES + _frame_count(nbytes, frame_nbytes) * _row_nbytes(width)


def _row_nbytes(width: int) -> int:
    return 16 + 4 * width


def _row_dtype(width: int) -> np.dtype[Any]:
    return np.dtype([("stored", "<u8"), ("content", "<u8"), ("planes", "<u4", (width,))])


@dataclass(frozen=True)
class Index:
    """Where the frames of an encoded chunk are, and how each plane is stored.

    `rows` has for each frame the checksum of what is stored, that of what it decodes to, and
    for each plane its stored size and kind.
    """

    width: int
    frame_nbytes: int
    content_nbytes: int
    rows: npt.NDArray[Any]

    @property
    def nbytes(self) -> int:
        """The size of the index itself."""
        return _index_nbytes(self.content_nbytes, self.width, self.frame_nbytes)

    @cached_property
    def begins(self) -> npt.NDArray[np.int64]:
        """Where each frame begins, counted from the start of the index, and where the last ends."""
        sizes = _sizes(self.rows["planes"]).sum(axis=1)
        return self.nbytes + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @property
    def padding(self) -> bytes:
        """The zeros that follow the last frame."""
        return bytes(-int(self.begins[-1]) % ALIGNMENT)

    @property
    def stored_nbytes(self) -> int:
        """The size of the encoded chunk: index, frames and padding."""
        return int(self.begins[-1]) + len(self.padding)

    def content_range(self, frame: int) -> tuple[int, int]:
        """Which bytes of the content a frame holds."""
        begin = frame * self.frame_nbytes
        return begin, min(begin + self.frame_nbytes, self.content_nbytes)

    def encode(self) -> bytes:
        head = self._head(0)[:-8]
        table = self.rows.tobytes()
        return self._head(checksum(head + table)) + table

    def _head(self, digest: int) -> bytes:
        return _HEAD.pack(
            _MAGIC, _VERSION, self.width, 0, self.frame_nbytes, len(self.rows),
            self.content_nbytes, digest,
        )  # fmt: skip


def _sizes(words: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return (words & ((1 << _KIND_SHIFT) - 1)).astype(np.int64)


def check_head(head: bytes, content_nbytes: int, stored_nbytes: int, where: str) -> int:
    """The size of the index that begins with `head`, once it can be believed.

    `content_nbytes` and `stored_nbytes` are what the manifest says of the chunk.
    """
    if len(head) < HEAD_BYTES or stored_nbytes < HEAD_BYTES:
        raise CorruptCheckpointError(f"{where} is too short for an encoded chunk")
    magic, version, width, reserved, frame_nbytes, frames, content, _ = _HEAD.unpack_from(head)
    if magic != _MAGIC:
        raise CorruptCheckpointError(f"{where} does not begin like an encoded chunk")
    if version != _VERSION:
        raise UnsupportedFormatError(
            f"{where} is encoded by version {version} of its codec; this release reads version "
            f"{_VERSION}. Install a newer release of reshard"
        )
    if content != content_nbytes:
        raise CorruptCheckpointError(
            f"{where} decodes to {content} bytes; the manifest says {content_nbytes}"
        )
    if width not in (1, 2, 4, 8) or reserved or content % width or frame_nbytes % width:
        raise CorruptCheckpointError(
            f"{where} has {width} planes for {content} bytes in frames of {frame_nbytes}"
        )
    if not LEAST_FRAME_BYTES <= frame_nbytes <= MOST_FRAME_BYTES:
        raise CorruptCheckpointError(
            f"{where} has frames of {frame_nbytes} bytes, outside of {LEAST_FRAME_BYTES} to "
            f"{MOST_FRAME_BYTES}"
        )
    if frames != _frame_count(content, frame_nbytes):
        raise CorruptCheckpointError(
            f"{where} has {frames} frames of {frame_nbytes} bytes for {content} bytes"
        )
    nbytes = _index_nbytes(content, width, frame_nbytes)
    if nbytes > stored_nbytes:
        raise CorruptCheckpointError(
            f"{where} announces an index of {nbytes} bytes but is {stored_nbytes} bytes long"
        )
    return nbytes


def decode_index(data: bytes, content_nbytes: int, stored_nbytes: int, where: str) -> Index:
    """The index in `data`, whose head was checked, once it agrees with itself."""
    nbytes = check_head(data, content_nbytes, stored_nbytes, where)
    _, _, width, _, frame_nbytes, frames, _, expected = _HEAD.unpack_from(data)
    if len(data) != nbytes:
        raise CorruptCheckpointError(f"{where} has an index of {len(data)} bytes, not {nbytes}")
    found = checksum(data[: HEAD_BYTES - 8] + data[HEAD_BYTES:])
    if found != expected:
        raise CorruptCheckpointError(
            f"the index of {where} is damaged: its checksum is {found:016x}, it should be "
            f"{expected:016x}. Load another checkpoint"
        )
    rows = np.frombuffer(data, _row_dtype(width), frames, HEAD_BYTES)
    index = Index(width, frame_nbytes, content_nbytes, rows)
    kinds, sizes = rows["planes"] >> _KIND_SHIFT, _sizes(rows["planes"])
    if (kinds > _ZSTD).any():
        raise CorruptCheckpointError(
            f"{where} has a plane of kind {int(kinds.max())}; {_RAW} and {_ZSTD} are known"
        )
    ends = np.minimum((np.arange(frames) + 1) * frame_nbytes, content_nbytes)
    plane_nbytes = (ends - np.arange(frames) * frame_nbytes)[:, None] // width
    if ((sizes > plane_nbytes) | ((kinds == _RAW) & (sizes != plane_nbytes))).any():
        raise CorruptCheckpointError(f"{where} has a plane that is longer than its content, or cut")
    if index.stored_nbytes != stored_nbytes:
        raise CorruptCheckpointError(
            f"{where} has frames up to byte {index.stored_nbytes}, but is {stored_nbytes} bytes "
            "long"
        )
    return index


# Frames


@dataclass(frozen=True)
class EncodedFrame:
    """A frame as stored. Its parts are valid until the thread encodes the next one."""

    parts: Sequence[memoryview]
    nbytes: int
    stored_checksum: int
    content_checksum: int
    planes: Sequence[int]

    def row(self) -> tuple[int, int, Sequence[int]]:
        """What the index says of it."""
        return self.stored_checksum, self.content_checksum, self.planes


def make_index(width: int, nbytes: int) -> Index:
    """An index whose rows are to be filled as the frames of a chunk are encoded."""
    rows = np.zeros(_frame_count(nbytes, FRAME_BYTES), _row_dtype(width))
    return Index(width, FRAME_BYTES, nbytes, rows)


def encode_frame(content: memoryview, width: int) -> EncodedFrame:
    """Encode up to `FRAME_BYTES` of content, a multiple of `width`. Works outside of the GIL."""
    tools = _tools()
    planes = tools.take(len(content)).reshape(width, -1)
    _split(content, planes)
    # While it is in the cache.
    content_checksum = checksum(content)
    parts, words, hasher = [], [], Hasher()
    for plane in planes:
        # Of a plane without structure, zstd finds that out in a tenth of the time.
        packed = tools.compressor.compress(plane.data)
        pays = len(packed) + len(plane) // _LEAST_GAIN < len(plane)
        part = memoryview(packed) if pays else plane.data
        hasher.update(part)
        parts.append(part)
        words.append(len(part) | (_ZSTD if pays else _RAW) << _KIND_SHIFT)
    nbytes = sum(map(len, parts))
    return EncodedFrame(parts, nbytes, hasher.intdigest(), content_checksum, words)


def saving_limit(nbytes: int) -> int:
    """A chunk of `nbytes` bytes is only stored encoded if that takes fewer bytes than this."""
    return nbytes - nbytes // _LEAST_GAIN


def sample_ranges(nbytes: int) -> list[tuple[int, int]]:
    """Which parts of a chunk to judge it by, spread over it."""
    if nbytes <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, nbytes)]
    step = (nbytes - _SAMPLE_BYTES) // (_SAMPLES - 1) // 16 * 16
    return [(i * step, i * step + _SAMPLE_BYTES) for i in range(_SAMPLES)]


def decode_frame(stored: memoryview, index: Index, frame: int, out: memoryview, where: str) -> None:
    """Decode a frame into `out`, which has the size of its content."""
    row = index.rows[frame]
    where = f"frame {frame} of {where}"
    try:
        _decode_planes(stored, row["planes"].tolist(), out, where)
    except CorruptCheckpointError as error:
        # Of what is stored, the checksum only tells what is wrong: that of the content covers it.
        _compare(checksum(stored), int(row["stored"]), f"{where} is damaged: its checksum", error)
        raise
    found, expected = checksum(out), int(row["content"])
    if found != expected:
        _compare(checksum(stored), int(row["stored"]), f"{where} is damaged: its checksum")
        _compare(found, expected, f"{where} decodes to other bytes: their checksum")


def _decode_planes(stored: memoryview, words: Sequence[int], out: memoryview, where: str) -> None:
    tools = _tools()
    planes, begin, nbytes = [], 0, len(out) // len(words)
    for word in words:
        size, kind = word & ((1 << _KIND_SHIFT) - 1), word >> _KIND_SHIFT
        part = stored[begin : begin + size]
        begin += size
        plane = tools.decompress(part, nbytes, where) if kind == _ZSTD else part
        planes.append(np.frombuffer(plane, np.uint8))
    _merge(planes, out)


def _compare(found: int, expected: int, what: str, cause: Exception | None = None) -> None:
    if found != expected:
        raise CorruptCheckpointError(
            f"{what} is {found:016x}, it should be {expected:016x}. Load another checkpoint"
        ) from cause


def _split(content: memoryview, planes: Bytes) -> None:
    """Byte `p` of every element to plane `p`. Shifts are vectorised, strided copies are not."""
    width = len(planes)
    elements = np.frombuffer(content, f"<u{width}")
    np.copyto(planes[0], elements, casting="unsafe")
    for p, plane in enumerate(planes[1:], 1):
        np.right_shift(elements, elements.dtype.type(8 * p), out=plane, casting="unsafe")


def _merge(planes: Sequence[Bytes], out: memoryview) -> None:
    width = len(planes)
    if width == 8:
        whole = np.frombuffer(out, np.uint8)
        for p, plane in enumerate(planes):
            whole[p::width] = plane
        return
    elements = np.frombuffer(out, f"<u{width}")
    np.copyto(elements, planes[-1])
    for plane in planes[-2::-1]:
        np.left_shift(elements, 8, out=elements)
        np.bitwise_or(elements, plane, out=elements)


class _Tools(threading.local):
    """What a thread uses again and again: contexts of zstd, and memory for planes."""

    def __init__(self) -> None:
        self._zstandard = _zstandard("the codec")
        self._buffer = np.empty(0, np.uint8)

    @cached_property
    def compressor(self) -> zstandard.ZstdCompressor:
        z = self._zstandard
        # Entropy coding and hardly any search for repetitions: weights have few, and each
        # that is found by chance costs more bytes than it saves.
        parameters = z.ZstdCompressionParameters(
            window_log=20, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0,
            strategy=z.STRATEGY_FAST, write_content_size=1,
        )  # fmt: skip
        return z.ZstdCompressor(compression_params=parameters)  # type: ignore[no-any-return]

    @cached_property
    def _decompressor(self) -> zstandard.ZstdDecompressor:
        return self._zstandard.ZstdDecompressor()  # type: ignore[no-any-return]

    def take(self, nbytes: int) -> Bytes:
        if len(self._buffer) < nbytes:
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer[:nbytes]

    def decompress(self, part: memoryview, nbytes: int, name: str) -> bytes:
        """Exactly `nbytes` bytes. A frame that announces another size is refused before."""
        z = self._zstandard
        try:
            announced = z.get_frame_parameters(part)
            if announced.content_size != nbytes or announced.window_size > MOST_FRAME_BYTES:
                raise CorruptCheckpointError(
                    f"{name} has a plane of {announced.content_size} bytes (window "
                    f"{announced.window_size}); it should have {nbytes}"
                )
            data: bytes = self._decompressor.decompress(
                part, nbytes, read_across_frames=False, allow_extra_data=False
            )
        except z.ZstdError as error:
            raise CorruptCheckpointError(f"{name} cannot be decoded: {error}") from error
        if len(data) != nbytes:
            raise CorruptCheckpointError(
                f"{name} has a plane of {len(data)} bytes; it should have {nbytes}"
            )
        return data


@cache
def _tools() -> _Tools:
    """Made when first needed, since it needs an optional package."""
    return _Tools()

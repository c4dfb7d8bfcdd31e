"""Encoded chunks that were damaged, cut, swapped or made to explode."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
import zstandard

import reshard
from reshard.api import CorruptCheckpointError, UnsupportedFormatError
from reshard.format import codec
from support.encoded import decode, encode, read, reader_of
from support.hostile import OpenManifest, check_refused, memory_limit
from support.samples import raw

HEAD = struct.Struct("<4sBBHIIQQ")


def content_of(count: int) -> bytes:
    generator = torch.Generator().manual_seed(0)
    return raw((torch.randn(count, generator=generator) * 0.02).bfloat16())


def forge(blob: bytes, **changes: int) -> bytes:
    """The same chunk with another head, whose checksum is right."""
    names = ("magic", "version", "width", "reserved", "frame", "frames", "content", "digest")
    fields = dict(zip(names, HEAD.unpack_from(blob), strict=True)) | changes
    return sealed(HEAD.pack(*fields.values()) + blob[HEAD.size :])


def sealed(blob: bytes) -> bytes:
    """The same chunk with the right checksum of its index."""
    width, frames = blob[5], struct.unpack_from("<I", blob, 12)[0]
    end = HEAD.size + frames * (16 + 4 * width)
    digest = xxhash.xxh3_64_intdigest(blob[:24] + blob[32:end])
    return blob[:24] + struct.pack("<Q", digest) + blob[32:]


def with_planes(
    content_nbytes: int, planes: list[tuple[int, bytes]], content: bytes = b""
) -> bytes:
    """A chunk of one frame whose planes are stored in this way."""
    stored = b"".join(data for _, data in planes)
    words = [len(data) | kind << 24 for kind, data in planes]
    head = HEAD.pack(b"RSPL", 1, len(planes), 0, 1 << 20, 1, content_nbytes, 0)
    digests = xxhash.xxh3_64_intdigest(stored), xxhash.xxh3_64_intdigest(content)
    row = struct.pack(f"<QQ{len(words)}I", *digests, *words)
    blob = sealed(head + row + stored)
    return blob + b"\0" * (-len(blob) % 8)


def test_every_flipped_bit_of_a_small_chunk_is_found_or_is_padding() -> None:
    content = content_of(300)
    blob = encode(content, 2)
    unnoticed = []
    for bit in range(8 * len(blob)):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found = decode(bytes(damaged), len(content))
        except (CorruptCheckpointError, UnsupportedFormatError):
            continue
        assert found == content
        unnoticed.append(bit)

    assert len(unnoticed) < 8 * codec.ALIGNMENT


def test_a_chunk_that_is_cut_anywhere_is_refused() -> None:
    content = content_of(300)
    blob = encode(content, 2)
    for length in range(len(blob)):
        with pytest.raises(CorruptCheckpointError):
            decode(blob[:length], len(content))


def test_a_chunk_that_is_longer_than_its_frames_is_refused() -> None:
    content = content_of(300)
    with pytest.raises(CorruptCheckpointError, match="but is"):
        decode(encode(content, 2) + bytes(8), len(content))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2 of its codec"),
        ({"width": 3}, "3 planes"),
        ({"width": 16}, "16 planes"),
        ({"width": 0}, "0 planes"),
        ({"reserved": 1}, "planes for"),
        ({"frame": 0}, "frames of 0 bytes"),
        ({"frame": 8 << 20}, f"frames of {8 << 20} bytes"),
        ({"frame": (1 << 20) + 1}, "planes for"),
        ({"frames": 2}, "2 frames"),
        ({"frames": 0}, "0 frames"),
        ({"content": 602}, "decodes to 602 bytes; the manifest says 600"),
    ],
)
def test_a_head_that_is_malformed_is_refused_by_name(changes: dict[str, int], message: str) -> None:
    blob = forge(encode(content_of(300), 2), **changes)
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError), match=message):
        decode(blob, 600)


def test_an_unknown_kind_of_plane_is_refused_by_name() -> None:
    with pytest.raises(CorruptCheckpointError, match="plane of kind 7"):
        decode(with_planes(100, [(0, bytes(50)), (7, bytes(50))]), 100)


@pytest.mark.parametrize("sizes", [(50, 49), (51, 49), (50, 51), (0, 100)])
def test_a_raw_plane_of_another_size_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(CorruptCheckpointError, match="plane that is longer than its content"):
        decode(with_planes(100, [(0, bytes(size)) for size in sizes]), 100)


def test_an_index_larger_than_its_chunk_costs_no_memory() -> None:
    huge = 1 << 50
    blob = forge(encode(content_of(300), 2), content=huge, frames=huge >> 20 & 0xFFFFFFFF)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="announces an index of"):
            read(reader_of(blob, huge), 0, 10)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("announces", [True, False])
def test_a_plane_that_would_explode_is_refused_before_memory_is_taken(announces: bool) -> None:
    options = {"write_content_size": announces}
    bomb = zstandard.ZstdCompressor(**options).compress(bytes(1 << 28))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="it should have 100000"):
            decode(with_planes(100_000, [(1, bomb)]), 100_000)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_plane_with_a_huge_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=True)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=100_000)
    frame = bytearray(stream.compress(bytes(100_000)) + stream.flush())
    if zstandard.get_frame_parameters(bytes(frame)).window_size <= 4 << 20:
        # Not a single segment: a byte for the window follows, of 128 MiB here.
        frame[4] &= ~0x20
        frame.insert(5, 17 << 3)
    with pytest.raises(CorruptCheckpointError, match="window"):
        decode(with_planes(100_000, [(1, bytes(frame))]), 100_000)


@pytest.mark.parametrize("actual", [99_999, 100_001, 50])
def test_a_plane_that_decodes_to_another_size_than_it_announces_is_refused(actual: int) -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(actual)))
    honest = bytearray(zstandard.ZstdCompressor().compress(bytes(100_000)))
    lie = bytes(honest[:9]) + bytes(frame[9 if actual > 65_791 else 6 :])
    with pytest.raises(CorruptCheckpointError, match=r"cannot be decoded|it should have 100000"):
        decode(with_planes(100_000, [(1, lie)], bytes(100_000)), 100_000)


def test_bytes_after_a_compressed_plane_are_refused() -> None:
    content = bytes(100_000)
    frame = zstandard.ZstdCompressor().compress(content)
    assert decode(with_planes(100_000, [(1, frame)], content), 100_000) == content
    for extra in (b"x", frame):
        with pytest.raises(CorruptCheckpointError, match="cannot be decoded"):
            decode(with_planes(100_000, [(1, frame + extra)], content), 100_000)


def test_swapped_frames_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "FRAME_BYTES", codec.LEAST_FRAME_BYTES)
    noise = np.random.default_rng(0).bytes(2 << 16)
    blob = encode(noise, 1)
    begin = len(blob) - len(noise)
    swapped = blob[:begin] + blob[begin + (1 << 16) :] + blob[begin : begin + (1 << 16)]
    with pytest.raises(CorruptCheckpointError, match="frame 0 of 'w' is damaged"):
        decode(swapped, len(noise))


def test_a_frame_that_decodes_to_other_bytes_is_found() -> None:
    blob = with_planes(100, [(0, bytes(100))])
    with pytest.raises(CorruptCheckpointError, match="decodes to other bytes"):
        decode(blob, 100)


# In a checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(2, 50_000, generator=generator) * 0.02).bfloat16()
    reshard.save({"a": weights[0], "b": weights[1]}, checkpoint_id=tmp_path, compress="zstd")
    return tmp_path


def read_a(folder: Path) -> torch.Tensor:
    return reshard.read_tensor(folder, "a")


@pytest.mark.parametrize("change", [-8, 8, -1])
def test_a_manifest_with_another_stored_size_is_refused(change: int, checkpoint: Path) -> None:
    manifest = OpenManifest(checkpoint)
    row = manifest.chunk_row("b")
    manifest.change(
        "chunks.stored_nbytes", row, manifest.ints("chunks.stored_nbytes")[row] + change
    )
    manifest.write()
    check_refused(lambda: reshard.read_tensor(checkpoint, "b"), "bytes long", "that file has")


@pytest.mark.parametrize(
    ("count", "reason"), [(60_000, "the manifest says 120000"), (1 << 40, "in too few bytes")]
)
def test_a_manifest_with_another_content_size_is_refused(
    count: int, reason: str, checkpoint: Path
) -> None:
    manifest = OpenManifest(checkpoint)
    manifest.change("tensors.shapes", manifest.tensor_row("a"), count)
    manifest.change("chunks.sizes", manifest.chunk_row("a"), count)
    manifest.write()
    with memory_limit():
        check_refused(lambda: read_a(checkpoint), reason)


def test_a_codec_that_nobody_knows_is_refused_by_name(checkpoint: Path) -> None:
    manifest = OpenManifest(checkpoint)
    manifest.set_texts("codecs.names", ["secret-sauce/9"])
    manifest.write()
    check_refused(lambda: read_a(checkpoint), "'secret-sauce/9'")


def test_a_codec_that_is_not_listed_is_refused(checkpoint: Path) -> None:
    manifest = OpenManifest(checkpoint)
    manifest.change("chunks.codecs", manifest.chunk_row("a"), 2)
    manifest.write()
    check_refused(lambda: read_a(checkpoint), "a codec that it does not list")


def test_the_chunk_of_another_tensor_is_found_by_its_digest(checkpoint: Path) -> None:
    manifest = OpenManifest(checkpoint)
    for column in ("chunks.begins", "chunks.stored_nbytes"):
        manifest.set_ints(column, manifest.ints(column)[::-1])
    manifest.write()
    check_refused(lambda: read_a(checkpoint), "damaged")


@pytest.mark.parametrize("verify", ["off", "chunks", "full"])
def test_a_damaged_frame_is_found_however_it_is_read(verify: str, checkpoint: Path) -> None:
    manifest = OpenManifest(checkpoint)
    begin = manifest.ints("chunks.begins")[manifest.chunk_row("a")]
    (shard,) = checkpoint.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[begin + 30_000] ^= 1
    shard.write_bytes(data)

    def read_some() -> torch.Tensor:
        return reshard.read_tensor(checkpoint, "a", (slice(3, 9),), verify=verify)  # type: ignore[arg-type]

    check_refused(read_some, "frame 0 of")

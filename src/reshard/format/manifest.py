"""The manifest: the one file that says what a checkpoint contains.

A safetensors container whose tensors are the columns of three tables: tensors, chunks
and values. It is opened without decoding more than the names, and everything in it is
checked against itself before anybody relies on it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from reshard.api import CorruptCheckpointError, UnsupportedFormatError
from reshard.format.checks import DTYPE_BY_NAME, check_dtypes, check_manifest, dtype_name
from reshard.format.checksum import (
    ALGORITHM,
    DIGEST_ALGORITHM,
    DIGEST_BYTES,
    checksum,
)
from reshard.format.container import Entry, Source, build_header, header_nbytes, parse_header
from reshard.format.tables import FEATURES, Manifest, Origin
from reshard.planning.columns import (
    DTYPE_CODES,
    MOST_DIMS,
    Ints,
)

FORMAT = "reshard"
VERSION = 1

_MOST_HEADER_BYTES = 1 << 26
_PICKLE = b"\x80"
_LOOK_BYTES = 1 << 16
_MARK = re.compile(rb'"format"\s*:\s*"%b"' % FORMAT.encode())

MANIFEST_LIMIT_BYTES = 1 << 30
"""The default limit on the size of a manifest."""


_COLUMNS = (
    ("tensors.dtypes", "dtypes", "U8"),
    ("tensors.flags", "flags", "U8"),
    ("tensors.ndims", "ndims", "U8"),
    ("tensors.shapes", "shapes", "I64"),
    ("tensors.aliases", "aliases", "I64"),
    ("tensors.chunk_starts", "chunk_starts", "I64"),
    ("chunks.offsets", "chunk_offsets", "I64"),
    ("chunks.sizes", "chunk_sizes", "I64"),
    ("chunks.files", "chunk_files", "I64"),
    ("chunks.begins", "chunk_begins", "I64"),
    ("chunks.digests", "chunk_digests", "U8"),
    ("chunks.probes", "chunk_probes", "I64"),
    ("values.files", "value_files", "I64"),
    ("values.begins", "value_begins", "I64"),
    ("values.nbytes", "value_nbytes", "I64"),
    ("values.checksums", "value_checksums", "I64"),
    ("values.pickled", "value_pickled", "U8"),
    ("files.nbytes", "file_sizes", "I64"),
    ("files.header_nbytes", "header_sizes", "I64"),
    ("files.header_checksums", "header_checksums", "I64"),
)
_OPTIONAL_COLUMNS = (
    ("chunks.fingerprints", "chunk_fingerprints", "I64"),
    ("chunks.codecs", "chunk_codecs", "U8"),
    ("chunks.stored_nbytes", "chunk_stored_nbytes", "I64"),
    ("values.codecs", "value_codecs", "U8"),
    ("files.origins", "file_origins", "I64"),
)
_TEXTS = (
    ("files.paths", "files"),
    ("tensors.names", "tensor_names"),
    ("values.names", "value_names"),
)
_NUMPY: dict[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "I64": np.dtype("<i8")}
_WIDTHS = {
    "tensors.shapes": MOST_DIMS,
    "chunks.offsets": MOST_DIMS,
    "chunks.sizes": MOST_DIMS,
    "chunks.digests": DIGEST_BYTES,
    "chunks.fingerprints": 2,
}
"""Columns that are tables, and how wide they may be."""
_CHECKSUM = "checksum"


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of the manifest file, its own checksum at the end."""
    used = sorted(set(manifest.dtypes.tolist()))
    dtype_names = [dtype_name(code) for code in used]
    parts: list[tuple[str, str, Sequence[int], bytes]] = []
    for name, attribute, kind in (*_COLUMNS, *_OPTIONAL_COLUMNS):
        column = getattr(manifest, attribute)
        if column is None:
            continue
        if attribute == "dtypes":
            # Codes are numbers of this process; the file has its own list of dtypes.
            column = np.searchsorted(used, column)
        data = np.ascontiguousarray(column, dtype=_NUMPY[kind]).tobytes()
        parts.append((name, kind, column.shape, data))
    texts = [(name, list(getattr(manifest, attribute))) for name, attribute in _TEXTS]
    if manifest.codec_names:
        texts.append(("codecs.names", list(manifest.codec_names)))
    if manifest.origins:
        texts.append(("origins.locations", [origin.location for origin in manifest.origins]))
        texts.append(("origins.save_ids", [origin.save_id for origin in manifest.origins]))
    for name, content in [*texts, ("tensors.dtype_names", dtype_names)]:
        data = msgspec.msgpack.encode(content)
        parts.append((name, "U8", (len(data),), data))
    parts.append(("planner_data", "U8", (len(manifest.planner_data),), manifest.planner_data))
    # Wide columns first, so that each begins at a multiple of its element size.
    parts.sort(key=lambda part: part[1] != "I64")
    parts.append((_CHECKSUM, "U8", (8,), b"\0" * 8))

    entries, position = {}, 0
    for name, kind, shape, data in parts:
        entries[name] = Entry(kind, shape, position, position + len(data))
        position += len(data)
    notes = {
        **{note: text for note, text in manifest.notes.items() if note != "requires"},
        "format": FORMAT,
        "version": str(VERSION),
        "checksum": ALGORITHM,
        "digest": DIGEST_ALGORITHM,
    }
    if manifest.features:
        notes["requires"] = " ".join(manifest.features)
    body = b"".join([build_header(entries, notes), *(data for *_, data in parts[:-1])])
    return body + struct.pack("<Q", checksum(body))


def read_manifest_bytes(
    source: Source, where: str, limit_bytes: int = MANIFEST_LIMIT_BYTES
) -> memoryview:
    """The bytes of a manifest, once its header says that they are all of one.

    Nothing that the file claims is allocated before: a sparse file of any size costs no
    more than its header.
    """
    nbytes = source.nbytes
    head = _read_head(source, where, limit_bytes)
    _parse(head, nbytes, where)
    length = len(head)
    data = bytearray(nbytes)
    data[:length] = head
    rest = memoryview(data)[length:]
    source.read_into(length, [rest] if rest else [])
    return memoryview(data)


def read_requirements(source: Source, where: str) -> set[str]:
    """What a manifest requires of its readers, whether or not this one knows it."""
    _, notes, _ = parse_header(_read_head(source, where), source.nbytes, where)
    return set(notes.get("requires", "").split())


def looks_like_manifest(source: Source) -> bool:
    """Whether a file was meant to be a manifest, also if it is damaged or of a later version."""
    start = bytearray(min(_LOOK_BYTES, source.nbytes))
    source.read_into(0, [memoryview(start)] if start else [])
    return start[8:9] == b"{" and _MARK.search(start) is not None


def _read_head(source: Source, where: str, limit_bytes: int = MANIFEST_LIMIT_BYTES) -> bytearray:
    nbytes = source.nbytes
    start = bytearray(min(8, nbytes))
    source.read_into(0, [memoryview(start)] if start else [])
    if start[:1] == _PICKLE:
        raise UnsupportedFormatError(
            f"{where} was written by torch.distributed.checkpoint; load it, and save it with "
            "reshard"
        )
    if nbytes > limit_bytes:
        raise UnsupportedFormatError(
            f"{where} is {nbytes} bytes long, and the limit is {limit_bytes}. If you trust where "
            f"it comes from, pass a storage_reader with manifest_limit_bytes={nbytes} or more"
        )
    length = header_nbytes(start, nbytes, where)
    if length > _MOST_HEADER_BYTES:
        raise CorruptCheckpointError(
            f"{where} announces a header of {length} bytes, which no manifest has"
        )
    head = bytearray(length)
    source.read_into(0, [memoryview(head)])
    return head


def _parse(
    head: bytes | bytearray | memoryview, nbytes: int, where: str
) -> tuple[dict[str, Entry], dict[str, str], int]:
    """Entries, notes and where the data begins, of what is known to be a manifest."""
    entries, notes, begin = parse_header(head, nbytes, where)
    if notes.get("format") != FORMAT:
        raise UnsupportedFormatError(f"{where} is a safetensors file, but not a Reshard manifest")
    version = notes.get("version", "")
    if version != str(VERSION):
        raise UnsupportedFormatError(
            f"{where} has format version {version!r}; this release reads version {VERSION}. "
            "Install a newer release of reshard"
        )
    unknown = set(notes.get("requires", "").split()) - FEATURES
    if unknown:
        raise UnsupportedFormatError(
            f"{where} makes use of {', '.join(sorted(unknown))}, which this release does not know. "
            "Install a newer release of reshard"
        )
    stored = entries.get(_CHECKSUM)
    if stored is None or stored.end - stored.begin != 8 or begin + stored.end != nbytes:
        raise CorruptCheckpointError(f"{where} is cut short, or has no checksum at its end")
    return entries, notes, begin


def decode_manifest(data: bytes | memoryview, where: str) -> Manifest:
    """The manifest in `data`, which may be a memory map, once it is known to be sound."""
    data = memoryview(data)
    entries, notes, begin = _parse(data, len(data), where)
    expected = struct.unpack("<Q", data[-8:])[0]
    found = checksum(data[:-8])
    if expected != found:
        raise CorruptCheckpointError(
            f"{where} is damaged: its checksum is {found:016x}, it should be {expected:016x}"
        )
    fields: dict[str, Any] = {}
    for name, attribute, kind in _COLUMNS:
        fields[attribute] = _column(entries, name, kind, data[begin:], where)
    for name, attribute, kind in _OPTIONAL_COLUMNS:
        if name in entries:
            fields[attribute] = _column(entries, name, kind, data[begin:], where)
    for name, attribute in _TEXTS:
        fields[attribute] = _texts(entries, name, data[begin:], where)
    if "codecs.names" in entries:
        fields["codec_names"] = _texts(entries, "codecs.names", data[begin:], where)
    fields["origins"] = _origins(entries, data[begin:], where)
    dtype_names = _texts(entries, "tensors.dtype_names", data[begin:], where)
    fields["dtypes"] = _dtype_codes(fields["dtypes"], dtype_names, where)
    packed = entries.get("planner_data", Entry("U8", (0,), 0, 0))
    manifest = Manifest(
        **fields,
        planner_data=bytes(data[begin + packed.begin : begin + packed.end]),
        notes=notes,
    )
    # Whoever only looks at the header must see it, such as before a deletion.
    unsaid = set(manifest.features) - set(notes.get("requires", "").split())
    if unsaid:
        raise CorruptCheckpointError(
            f"{where} makes use of {', '.join(sorted(unsaid))} without saying that it requires that"
        )
    check_manifest(manifest, where)
    return manifest


def _column(
    entries: Mapping[str, Entry], name: str, kind: str, data: memoryview, where: str
) -> Ints:
    entry = entries.get(name)
    most_wide = _WIDTHS.get(name)
    if (
        entry is None
        or entry.dtype != kind
        or len(entry.shape) != (1 if most_wide is None else 2)
        or max(entry.shape) > len(data) + MOST_DIMS
        or (most_wide is not None and entry.shape[1] > most_wide)
    ):
        raise CorruptCheckpointError(
            f"{where} lacks the column {name!r}, or has it in another form"
        )
    dtype = _NUMPY[kind]
    rows, width = entry.shape[0], (entry.shape[1] if len(entry.shape) == 2 else 1)
    if rows * width * dtype.itemsize != entry.end - entry.begin:
        raise CorruptCheckpointError(
            f"{where}: the column {name!r} has another size than its shape"
        )
    column = np.frombuffer(data[entry.begin : entry.end], dtype=dtype).reshape(entry.shape)
    return np.asarray(column.astype(np.int64) if kind == "U8" and most_wide is None else column)


def _origins(entries: Mapping[str, Entry], data: memoryview, where: str) -> list[Origin]:
    if "origins.locations" not in entries:
        return []
    locations = _texts(entries, "origins.locations", data, where)
    save_ids = _texts(entries, "origins.save_ids", data, where)
    if len(locations) != len(save_ids):
        raise CorruptCheckpointError(f"{where} has origins without their save ids")
    return list(map(Origin, locations, save_ids))


def _texts(entries: Mapping[str, Entry], name: str, data: memoryview, where: str) -> list[str]:
    entry = entries.get(name)
    if entry is None:
        raise CorruptCheckpointError(f"{where} lacks the list {name!r}")
    try:
        return msgspec.msgpack.decode(data[entry.begin : entry.end], type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{where}: the list {name!r} is damaged: {error}") from error


def _dtype_codes(codes: Ints, names: Sequence[str], where: str) -> Ints:
    check_dtypes(names, where)
    if len(codes) and codes.max() >= len(names):
        raise CorruptCheckpointError(f"{where} refers to a dtype that it does not list")
    table = np.array([DTYPE_CODES[DTYPE_BY_NAME[name]] for name in names], dtype=np.int64)
    return table[codes] if len(codes) else codes

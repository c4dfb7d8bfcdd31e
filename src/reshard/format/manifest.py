"""The manifest: the one file that says what a checkpoint contains.

A safetensors container whose tensors are the columns of three tables: tensors, chunks
and values. It is opened without decoding more than the names, and everything in it is
checked against itself before anybody relies on it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import msgspec
import numpy as np

from reshard.api import CorruptCheckpointError, UnsupportedFormatError
from reshard.format.checksum import ALGORITHM, checksum
from reshard.format.container import Entry, build_header, header_nbytes, parse_header
from reshard.planning.columns import (
    DTYPE_CODES,
    DTYPE_ITEMSIZES,
    DTYPES,
    MOST_DIMS,
    Bools,
    ChunkTable,
    Ints,
)
from reshard.planning.coverage import bounds_and_cuts, find_overlapped, find_untiled

FORMAT = "reshard"
VERSION = 1

_DTYPE_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_SAFE_PATH = re.compile(r"[^/\\\x00:][^\\\x00:]*")
_MOST_HEADER_BYTES = 1 << 26
_PICKLE = b"\x80"

MANIFEST_LIMIT_BYTES = 1 << 30
"""The default limit on the size of a manifest."""


@dataclass(frozen=True, eq=False)
class Manifest:
    """The tables of a checkpoint.

    Chunks of one tensor stand together, sorted by position: those of tensor `t` are rows
    `chunk_starts[t]` to `chunk_starts[t + 1]`. `aliases[t]` is the tensor that holds the
    data of tensor `t`, or -1. `checksums` are unsigned, kept as int64.
    """

    files: Sequence[str]
    file_sizes: Ints
    header_sizes: Ints
    header_checksums: Ints
    tensor_names: Sequence[str]
    dtypes: Ints
    flags: Ints
    ndims: Ints
    shapes: Ints
    aliases: Ints
    chunk_starts: Ints
    chunk_offsets: Ints
    chunk_sizes: Ints
    chunk_files: Ints
    chunk_begins: Ints
    chunk_checksums: Ints
    value_names: Sequence[str]
    value_files: Ints
    value_begins: Ints
    value_nbytes: Ints
    value_checksums: Ints
    value_pickled: Ints
    planner_data: bytes = b""
    notes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def table(self) -> ChunkTable:
        """The tensors and their chunks, without where they are stored."""
        return ChunkTable(
            names=self.tensor_names,
            dtypes=self.dtypes,
            flags=self.flags,
            ndims=self.ndims,
            shapes=self.shapes,
            aliases=self.aliases,
            starts=self.chunk_starts,
            offsets=self.chunk_offsets,
            sizes=self.chunk_sizes,
        )


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
    ("chunks.checksums", "chunk_checksums", "I64"),
    ("values.files", "value_files", "I64"),
    ("values.begins", "value_begins", "I64"),
    ("values.nbytes", "value_nbytes", "I64"),
    ("values.checksums", "value_checksums", "I64"),
    ("values.pickled", "value_pickled", "U8"),
    ("files.nbytes", "file_sizes", "I64"),
    ("files.header_nbytes", "header_sizes", "I64"),
    ("files.header_checksums", "header_checksums", "I64"),
)
_TEXTS = (
    ("files.paths", "files"),
    ("tensors.names", "tensor_names"),
    ("values.names", "value_names"),
)
_NUMPY: dict[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "I64": np.dtype("<i8")}
_TABLES = ("tensors.shapes", "chunks.offsets", "chunks.sizes")
_CHECKSUM = "checksum"


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of the manifest file, its own checksum at the end."""
    used = sorted(set(manifest.dtypes.tolist()))
    dtype_names = [_dtype_name(code) for code in used]
    parts: list[tuple[str, str, Sequence[int], bytes]] = []
    for name, attribute, kind in _COLUMNS:
        column = getattr(manifest, attribute)
        if attribute == "dtypes":
            # Codes are numbers of this process; the file has its own list of dtypes.
            column = np.searchsorted(used, column)
        data = np.ascontiguousarray(column, dtype=_NUMPY[kind]).tobytes()
        parts.append((name, kind, column.shape, data))
    texts = [(name, list(getattr(manifest, attribute))) for name, attribute in _TEXTS]
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
        **manifest.notes,
        "format": FORMAT,
        "version": str(VERSION),
        "checksum": ALGORITHM,
    }
    body = b"".join([build_header(entries, notes), *(data for *_, data in parts[:-1])])
    return body + struct.pack("<Q", checksum(body))


class Source(Protocol):
    """Where a manifest is read from."""

    @property
    def nbytes(self) -> int: ...

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None: ...


def read_manifest_bytes(
    source: Source, where: str, limit_bytes: int = MANIFEST_LIMIT_BYTES
) -> memoryview:
    """The bytes of a manifest, once its header says that they are all of one.

    Nothing that the file claims is allocated before: a sparse file of any size costs no
    more than its header.
    """
    nbytes = source.nbytes
    start = bytearray(min(8, nbytes))
    source.read_into(0, [memoryview(start)] if start else [])
    if start[:1] == _PICKLE:
        raise UnsupportedFormatError(
            f"{where} was written by torch.distributed.checkpoint; load it with that, and save it "
            "with reshard"
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
    _parse(head, nbytes, where)
    data = bytearray(nbytes)
    data[:length] = head
    rest = memoryview(data)[length:]
    source.read_into(length, [rest] if rest else [])
    return memoryview(data)


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
    for name, attribute in _TEXTS:
        fields[attribute] = _texts(entries, name, data[begin:], where)
    dtype_names = _texts(entries, "tensors.dtype_names", data[begin:], where)
    fields["dtypes"] = _dtype_codes(fields["dtypes"], dtype_names, where)
    packed = entries.get("planner_data", Entry("U8", (0,), 0, 0))
    manifest = Manifest(
        **fields,
        planner_data=bytes(data[begin + packed.begin : begin + packed.end]),
        notes=notes,
    )
    check_manifest(manifest, where)
    return manifest


def _column(
    entries: Mapping[str, Entry], name: str, kind: str, data: memoryview, where: str
) -> Ints:
    entry = entries.get(name)
    dims = 2 if name in _TABLES else 1
    if (
        entry is None
        or entry.dtype != kind
        or len(entry.shape) != dims
        or max(entry.shape) > len(data) + MOST_DIMS
        or (dims == 2 and entry.shape[1] > MOST_DIMS)
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
    return np.asarray(column if kind == "I64" else column.astype(np.int64))


def _texts(entries: Mapping[str, Entry], name: str, data: memoryview, where: str) -> list[str]:
    entry = entries.get(name)
    if entry is None:
        raise CorruptCheckpointError(f"{where} lacks the list {name!r}")
    try:
        return msgspec.msgpack.decode(data[entry.begin : entry.end], type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{where}: the list {name!r} is damaged: {error}") from error


def _dtype_codes(codes: Ints, names: Sequence[str], where: str) -> Ints:
    _check_dtypes(names, where)
    if len(codes) and codes.max() >= len(names):
        raise CorruptCheckpointError(f"{where} refers to a dtype that it does not list")
    table = np.array([DTYPE_CODES[_DTYPE_BY_NAME[name]] for name in names], dtype=np.int64)
    return table[codes] if len(codes) else codes


def _check_dtypes(names: Sequence[str], where: str) -> None:
    for name in names:
        if name not in _DTYPE_BY_NAME or name.startswith(("qint", "quint")):
            raise UnsupportedFormatError(
                f"{where} holds tensors of dtype {name!r}, which this torch does not have"
            )


def check_encodable(m: Manifest, where: str) -> None:
    """Refuse a manifest that would not be the same, or not be accepted, when it is decoded.

    Together with `check_manifest`, that is all that `decode_manifest` refuses.
    """
    for name in (*m.files, *m.tensor_names, *m.value_names):
        if not isinstance(name, str):
            raise CorruptCheckpointError(f"{where} has the name {name!r}, which is not text")
    codes = [m.dtypes, m.flags, m.ndims, m.value_pickled]
    if m.shapes.shape[1] > MOST_DIMS or any(
        len(c) and not 0 <= c.min() <= c.max() < 256 for c in codes
    ):
        raise CorruptCheckpointError(f"{where} has dimensions or codes that do not fit its format")
    _check_dtypes([_dtype_name(code) for code in set(m.dtypes.tolist())], where)


def _dtype_name(code: int) -> str:
    return str(DTYPES[code]).removeprefix("torch.")


def check_manifest(m: Manifest, where: str, shared_bytes: bool = False) -> None:
    """Refuse a manifest that contradicts itself, before anything is made from it."""
    n_tensors, n_chunks, n_values = len(m.tensor_names), len(m.chunk_files), len(m.value_names)
    wide = m.shapes.shape[1] if m.shapes.ndim == 2 else 0
    problems = {
        "lists of different lengths": not (
            m.shapes.ndim == m.chunk_offsets.ndim == m.chunk_sizes.ndim == 2
            and m.chunk_offsets.shape == m.chunk_sizes.shape == (n_chunks, wide)
            and {n_tensors} == {len(c) for c in (m.dtypes, m.flags, m.ndims, m.shapes, m.aliases)}
            and len(m.chunk_starts) == n_tensors + 1
            and {n_chunks} == {len(m.chunk_begins), len(m.chunk_checksums)}
            and {n_values}
            == {
                len(c)
                for c in (m.value_files, m.value_begins, m.value_nbytes, m.value_checksums)
            }
            == {len(m.value_pickled)}
            and {len(m.files)}
            == {len(m.file_sizes), len(m.header_sizes), len(m.header_checksums)}
        )
    }  # fmt: skip
    _raise_first(problems, where)
    all_names = [*m.tensor_names, *m.value_names]
    problems = {
        "the same name twice": len(set(all_names)) != len(all_names),
        "the same file twice": len(set(m.files)) != len(m.files),
        "a header longer than its file": bool(
            (m.header_sizes < 0).any() or (m.header_sizes > m.file_sizes).any()
        ),
        "more dimensions than columns": bool((m.ndims > min(wide, MOST_DIMS)).any()),
        "chunks that belong to nobody": bool(
            m.chunk_starts[0] != 0
            or m.chunk_starts[-1] != n_chunks
            or (np.diff(m.chunk_starts) < 0).any()
        ),
        "a file that it does not list": _outside(m.chunk_files, len(m.files))
        or _outside(m.value_files, len(m.files)),
        "an alias of a tensor that is not there": bool(
            (m.aliases < -1).any() or (m.aliases >= n_tensors).any()
        ),
        "a negative size": bool((m.shapes < 0).any() or (m.file_sizes < 0).any()),
    }
    _raise_first(problems, where)
    for path in m.files:
        if not _SAFE_PATH.fullmatch(path) or any(
            part in ("", ".", "..") for part in path.split("/")
        ):
            raise CorruptCheckpointError(
                f"{where} refers to the file {path!r}, which is not inside the checkpoint"
            )
    if (m.aliases >= 0).any():
        targets = m.aliases[m.aliases >= 0]
        own = np.flatnonzero(m.aliases >= 0)
        if (m.aliases[targets] >= 0).any() or (
            (m.shapes[own] != m.shapes[targets]).any()
            or (m.dtypes[own] != m.dtypes[targets]).any()
            or (m.ndims[own] != m.ndims[targets]).any()
        ):
            raise CorruptCheckpointError(f"{where} has an alias that differs from its tensor")
    _check_places(m, where, shared_bytes)


def _outside(ids: Ints, count: int) -> bool:
    return bool(len(ids) and (ids.min() < 0 or ids.max() >= count))


def _raise_first(problems: Mapping[str, bool], where: str) -> None:
    for problem, present in problems.items():
        if present:
            raise CorruptCheckpointError(f"{where} contradicts itself: it has {problem}")


def _check_places(m: Manifest, where: str, shared_bytes: bool) -> None:
    """Chunks lie within their tensors, bytes within their files, and nothing overlaps."""
    unused = np.arange(m.shapes.shape[1]) >= m.ndims[:, None]
    if (m.shapes[unused] != 1).any():
        raise CorruptCheckpointError(f"{where} has a shape with more extents than dimensions")
    volumes = m.shapes.astype(np.float64).prod(axis=1) * DTYPE_ITEMSIZES[m.dtypes]
    if (volumes >= 2.0**62).any():
        name = m.tensor_names[int(volumes.argmax())]
        raise CorruptCheckpointError(f"{where} gives {name!r} a size that no memory could hold")
    owners = m.table.owners
    outside, cut_dims = bounds_and_cuts(m.shapes, m.chunk_offsets, m.chunk_sizes, owners)
    if outside.any():
        name = m.tensor_names[int(owners[outside.argmax()])]
        raise CorruptCheckpointError(f"{where} has a chunk of {name!r} outside of its shape")
    _check_chunks(m, owners, cut_dims, where)

    files = np.concatenate([m.chunk_files, m.value_files])
    begins = np.concatenate([m.chunk_begins, m.value_begins])
    nbytes = m.chunk_sizes.prod(axis=1) * DTYPE_ITEMSIZES[m.dtypes[owners]]
    lengths = np.concatenate([nbytes, m.value_nbytes])
    sizes = m.file_sizes[files] if len(files) else files
    wrong = (begins < 0) | (lengths < 0) | (begins > sizes) | (lengths > sizes - begins)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise CorruptCheckpointError(
            f"{where} places {_name_of(m, owners, row)!r} at byte {begins[row]} of "
            f"{m.files[files[row]]!r}, {lengths[row]} bytes long, but that file has {sizes[row]}"
        )
    real = np.flatnonzero(lengths > 0)
    order = real[np.lexsort((begins[real], files[real]))]
    same_file = files[order][1:] == files[order][:-1]
    meets = same_file & (begins[order][1:] < (begins + lengths)[order][:-1])
    if meets.any() and not shared_bytes:
        at = int(np.flatnonzero(meets)[0])
        one, other = (_name_of(m, owners, int(order[row])) for row in (at, at + 1))
        raise CorruptCheckpointError(
            f"{where} gives the same bytes of {m.files[files[order[at]]]!r} to {one!r}, {other!r}"
        )


def _check_chunks(m: Manifest, owners: Ints, cut_dims: Bools, where: str) -> None:
    """Chunks of one tensor do not overlap; that they leave a gap may be."""
    unused = np.arange(m.shapes.shape[1]) >= m.ndims[owners, None]
    if (m.chunk_sizes[unused] != 1).any():
        raise CorruptCheckpointError(f"{where} has a chunk with more sizes than dimensions")
    overlapped, undecided = find_overlapped(m.table, find_untiled(m.table, cut_dims))
    for tensor in overlapped.tolist():
        raise CorruptCheckpointError(
            f"{where} has chunks of {m.tensor_names[tensor]!r} that overlap"
        )
    for tensor in undecided.tolist():
        raise CorruptCheckpointError(
            f"{where} has chunks of {m.tensor_names[tensor]!r} that leave gaps, so many and so "
            "entangled that it would take too long to see whether they overlap"
        )


def _name_of(m: Manifest, owners: Ints, row: int) -> str:
    if row < len(owners):
        return m.tensor_names[int(owners[row])]
    return m.value_names[row - len(owners)]

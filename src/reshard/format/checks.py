"""What is refused of a manifest that contradicts itself, before anything is made from it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from reshard.api import CorruptCheckpointError, UnsupportedFormatError
from reshard.format.checksum import DIGEST_BYTES
from reshard.format.tables import Manifest, Origin
from reshard.planning.columns import DTYPE_ITEMSIZES, DTYPES, MOST_DIMS, Bools, Ints
from reshard.planning.coverage import bounds_and_cuts, find_overlapped, find_untiled

DTYPE_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_MOST_EXPANSION_BITS = 16
"""Codecs shrink data to no less than one part in 2**16; zstd to one in 2**15."""
_SAFE_PATH = re.compile(r"[^/\\\x00:][^\\\x00:]*")
_LOCATION = re.compile(r"(?:\.\./)+([^/\\\x00-\x1f][^\\\x00-\x1f]*)")


def check_dtypes(names: Sequence[str], where: str) -> None:
    for name in names:
        if name not in DTYPE_BY_NAME or name.startswith(("qint", "quint")):
            raise UnsupportedFormatError(
                f"{where} holds tensors of dtype {name!r}, which torch {torch.__version__} cannot "
                "load: use the torch that it was saved with, or save it there in another dtype"
            )


def check_encodable(m: Manifest, where: str) -> None:
    """Refuse a manifest that would not be the same, or not be accepted, when it is decoded.

    Together with `check_manifest`, that is all that `decode_manifest` refuses.
    """
    for name in (*m.files, *m.tensor_names, *m.value_names, *m.codec_names):
        if not isinstance(name, str):
            raise CorruptCheckpointError(f"{where} has the name {name!r}, which is not text")
    codes = [m.dtypes, m.flags, m.ndims, m.value_pickled]
    if m.shapes.shape[1] > MOST_DIMS or any(
        len(c) and not 0 <= c.min() <= c.max() < 256 for c in codes
    ):
        raise CorruptCheckpointError(f"{where} has dimensions or codes that do not fit its format")
    check_dtypes([dtype_name(code) for code in set(m.dtypes.tolist())], where)


def dtype_name(code: int) -> str:
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
            and {n_chunks} == {len(m.chunk_begins), len(m.chunk_probes)}
            and m.chunk_digests.shape == (n_chunks, DIGEST_BYTES)
            and (m.chunk_fingerprints is None or m.chunk_fingerprints.shape == (n_chunks, 2))
            and (m.chunk_codecs is None or len(m.chunk_codecs) == n_chunks)
            and (m.chunk_stored_nbytes is None or len(m.chunk_stored_nbytes) == n_chunks)
            and (m.value_codecs is None or len(m.value_codecs) == n_values)
            and (m.file_origins is None or len(m.file_origins) == len(m.files))
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
        "the same file twice": _has_twins(m),
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
        "an origin that it does not list": m.file_origins is not None
        and _outside(m.file_origins + 1, len(m.origins) + 1),
        "a codec that it does not list": any(
            codes is not None and _outside(codes, len(m.codec_names) + 1)
            for codes in (m.chunk_codecs, m.value_codecs)
        ),
        "encoded chunks without their sizes": (m.chunk_codecs is None)
        != (m.chunk_stored_nbytes is None),
    }
    _raise_first(problems, where)
    check_origins(m.origins, where)
    for path in m.files:
        if not is_plain_path(path):
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


def check_origins(origins: Sequence[Origin], where: str) -> None:
    """Refuse locations that are not a plain relative path to another directory."""
    if len(set(origins)) != len(origins):
        raise CorruptCheckpointError(f"{where} contradicts itself: it has the same origin twice")
    for location, _ in origins:
        if not is_plain_location(location):
            raise CorruptCheckpointError(
                f"{where} refers to the checkpoint {location!r}, which is not a plain relative path"
            )


def is_plain_path(path: str) -> bool:
    """Whether a path leads to a file within a directory, on every system."""
    return bool(_SAFE_PATH.fullmatch(path)) and _has_plain_parts(path)


def is_plain_location(location: str) -> bool:
    """Whether a location leads up some directories and down to another one."""
    match = _LOCATION.fullmatch(location)
    return match is not None and _has_plain_parts(match[1])


def _has_plain_parts(path: str) -> bool:
    # Surrogates stand for bytes that are not UTF-8.
    is_text = not any("\ud800" <= letter <= "\udfff" for letter in path)
    return is_text and not {"", ".", ".."}.intersection(path.split("/"))


def _has_twins(m: Manifest) -> bool:
    origins = [-1] * len(m.files) if m.file_origins is None else m.file_origins.tolist()
    return len(set(zip(origins, m.files, strict=True))) != len(m.files)


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
    if m.chunk_codecs is not None:
        plain = m.chunk_codecs == 0
        if (m.chunk_nbytes[plain] != m.stored_nbytes[plain]).any():
            raise CorruptCheckpointError(
                f"{where} contradicts itself: it has a chunk without a codec in another size"
            )
    lengths = np.concatenate([m.stored_nbytes, m.value_nbytes])
    sizes = m.file_sizes[files] if len(files) else files
    wrong = (begins < 0) | (lengths < 0) | (begins > sizes) | (lengths > sizes - begins)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise CorruptCheckpointError(
            f"{where} places {_name_of(m, owners, row)!r} at byte {begins[row]} of "
            f"{m.files[files[row]]!r}, {lengths[row]} bytes long, but that file has {sizes[row]}"
        )
    if (m.chunk_nbytes >> _MOST_EXPANSION_BITS > m.stored_nbytes).any():
        raise CorruptCheckpointError(
            f"{where} contradicts itself: it has a chunk that is encoded in too few bytes"
        )
    # Several chunks may refer to the same bytes of another checkpoint.
    own = np.ones(len(files), dtype=bool) if m.file_origins is None else m.file_origins[files] < 0
    real = np.flatnonzero((lengths > 0) & own)
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

"""Several manifests as one: the parts that ranks wrote without each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.api import CorruptCheckpointError
from reshard.format.tables import Manifest, Origin
from reshard.planning.columns import Ints, widen
from reshard.planning.keys import rank_points


def merge_manifests(parts: Sequence[Manifest], where: str) -> Manifest:
    """What all parts hold together. Of a chunk that several hold, the first one counts."""
    names: dict[str, int] = {}
    ids = [_number(part.tensor_names, names) for part in parts]
    width = max(part.shapes.shape[1] for part in parts)
    dtypes, flags, ndims, shapes = _agree(parts, ids, list(names), width, where)
    aliases = _agreed_aliases(parts, ids, len(names))

    sources = [
        _chunk_sources(part, own, aliases, where) for part, own in zip(parts, ids, strict=True)
    ]
    owners = np.concatenate([owner for owner, _ in sources])
    rows_before = np.cumsum([0, *(len(part.chunk_files) for part in parts)])
    rows = np.concatenate([r + b for (_, r), b in zip(sources, rows_before, strict=False)])
    offsets = np.concatenate([widen(part.chunk_offsets, width, 0) for part in parts])[rows]
    sizes = np.concatenate([widen(part.chunk_sizes, width, 1) for part in parts])[rows]
    first = _first_of_each(owners, offsets, sizes, shapes, list(names), where)
    owners, offsets, sizes, rows = owners[first], offsets[first], sizes[first], rows[first]

    value_names: dict[str, int] = {}
    value_ids = np.concatenate([_number(part.value_names, value_names) for part in parts])
    _, first_value = np.unique(value_ids, return_index=True)
    for name in names.keys() & value_names.keys():
        raise CorruptCheckpointError(
            f"the ranks that saved {where} without collectives disagree about {name!r}: a tensor "
            "on one, another value on another"
        )

    def chunks(attribute: str) -> Any:
        return np.asarray(np.concatenate([getattr(part, attribute) for part in parts])[rows])

    def values(attribute: str) -> Ints:
        return np.asarray(np.concatenate([getattr(part, attribute) for part in parts])[first_value])

    def renumbered(attribute: str, numbers: Sequence[Ints]) -> Ints:
        columns = zip(parts, numbers, strict=True)
        return np.concatenate([own[getattr(part, attribute)] for part, own in columns])

    file_columns, file_numbers = _merge_files(parts, where)
    codec_names, codecs = _merge_codecs(parts)
    fingerprinted = all(part.chunk_fingerprints is not None for part in parts)
    return Manifest(
        **file_columns,
        tensor_names=list(names),
        dtypes=dtypes,
        flags=flags,
        ndims=ndims,
        shapes=shapes,
        aliases=aliases,
        chunk_starts=np.searchsorted(owners, np.arange(len(names) + 1)),
        chunk_offsets=offsets,
        chunk_sizes=sizes,
        chunk_files=renumbered("chunk_files", file_numbers)[rows],
        chunk_begins=chunks("chunk_begins"),
        chunk_digests=chunks("chunk_digests"),
        chunk_probes=chunks("chunk_probes"),
        chunk_fingerprints=chunks("chunk_fingerprints") if fingerprinted else None,
        chunk_codecs=codecs[0][rows] if codec_names else None,
        chunk_stored_nbytes=chunks("stored_nbytes") if codec_names else None,
        codec_names=codec_names,
        value_names=list(value_names),
        value_files=renumbered("value_files", file_numbers)[first_value],
        value_begins=values("value_begins"),
        value_nbytes=values("value_nbytes"),
        value_checksums=values("value_checksums"),
        value_pickled=values("value_pickled"),
        value_codecs=codecs[1][first_value] if codec_names else None,
        planner_data=b"",
        notes=parts[0].notes,
    )


def _merge_files(parts: Sequence[Manifest], where: str) -> tuple[dict[str, Any], list[Ints]]:
    """The file columns of all parts, and for each part the new numbers of its files.

    Several parts may refer to one file of another checkpoint.
    """
    origins: dict[Origin, int] = {}
    files: dict[Any, int] = {}
    rows: list[tuple[str, int, int, int, int]] = []
    numbers = []
    for index, part in enumerate(parts):
        own = []
        columns = np.column_stack([part.file_sizes, part.header_sizes, part.header_checksums])
        for file, (path, about) in enumerate(zip(part.files, columns.tolist(), strict=True)):
            origin = part.origin_of(file)
            place = -1 if origin is None else origins.setdefault(origin, len(origins))
            number = files.setdefault((index if origin is None else origin, path), len(files))
            row = (path, *about, place)
            if number == len(rows):
                rows.append(row)
            elif rows[number] != row:
                raise CorruptCheckpointError(
                    f"the ranks that saved {where} without collectives disagree about {path!r} of "
                    f"the checkpoint that they refer to"
                )
            own.append(number)
        numbers.append(np.array(own, dtype=np.int64))
    table = np.array([row[1:] for row in rows], dtype=np.int64).reshape(len(rows), 4)
    columns_of = {
        "files": [row[0] for row in rows],
        "file_sizes": table[:, 0],
        "header_sizes": table[:, 1],
        "header_checksums": table[:, 2],
        "file_origins": table[:, 3] if origins else None,
        "origins": list(origins),
    }
    return columns_of, numbers


def _merge_codecs(parts: Sequence[Manifest]) -> tuple[list[str], tuple[Ints, Ints]]:
    """The names of all codecs, and the codecs of all chunks and of all values."""
    names: dict[str, int] = {}
    chunks: list[Ints] = []
    values: list[Ints] = []
    for part in parts:
        codes = np.array([0, *(_number(part.codec_names, names) + 1)], dtype=np.int64)
        for column, count, merged in (
            (part.chunk_codecs, len(part.chunk_files), chunks),
            (part.value_codecs, len(part.value_files), values),
        ):
            merged.append(np.zeros(count, dtype=np.int64) if column is None else codes[column])
    return list(names), (np.concatenate(chunks), np.concatenate(values))


def _number(own: Sequence[str], names: dict[str, int]) -> Ints:
    return np.fromiter((names.setdefault(name, len(names)) for name in own), np.int64, len(own))


def _agree(
    parts: Sequence[Manifest], ids: Sequence[Ints], names: Sequence[str], width: int, where: str
) -> tuple[Ints, Ints, Ints, Ints]:
    """What the parts say about each tensor, which must be the same."""
    known_rows = np.full((len(names), 3 + width), -2, dtype=np.int64)
    for own, part in zip(ids, parts, strict=True):
        shapes = widen(part.shapes, width, 1)
        own_rows = np.column_stack([part.dtypes, part.flags, part.ndims, shapes])
        is_known = known_rows[own, 0] != -2
        # How a tensor was made may differ (flags); what it is may not.
        differs = (known_rows[own] != own_rows)[:, [0, *range(2, 3 + width)]].any(axis=1) & is_known
        if differs.any():
            name = names[int(own[np.flatnonzero(differs)[0]])]
            raise CorruptCheckpointError(
                f"the ranks that saved {where} without collectives disagree about the shape or "
                f"dtype of {name!r}"
            )
        known_rows[own[~is_known]] = own_rows[~is_known]
    dtypes, flags, ndims = (known_rows[:, column] for column in range(3))
    return dtypes, flags, ndims, known_rows[:, 3:]


def _agreed_aliases(parts: Sequence[Manifest], ids: Sequence[Ints], n_names: int) -> Ints:
    """The tensor whose data each name shares, if all parts that hold some of it say so."""
    aliases = np.full(n_names, -1, dtype=np.int64)
    refused = np.zeros(n_names, dtype=bool)
    for own, part in zip(ids, parts, strict=True):
        owners = np.repeat(np.arange(len(own)), np.diff(part.chunk_starts))
        holds = np.zeros(len(own), dtype=bool)
        holds[owners[(part.chunk_sizes > 0).all(axis=1)]] = True
        for row in np.flatnonzero(part.aliases >= 0).tolist():
            target = int(own[part.aliases[row]])
            refused[own[row]] |= aliases[own[row]] not in (-1, target)
            aliases[own[row]] = target
        refused[own[holds]] = True
    aliases[refused] = -1
    aliases[aliases[aliases] >= 0] = -1
    return aliases


_ROWS_PER_ROW, _ROWS_AT_LEAST = 64, 1 << 20


def _chunk_sources(part: Manifest, own: Ints, aliases: Ints, where: str) -> tuple[Ints, Ints]:
    """Which tensor each chunk of a part belongs to, and the row of the chunk.

    A name that shares the data of another here, but not everywhere, has its chunks too.
    """
    counts = np.diff(part.chunk_starts)
    owners, rows = [np.repeat(own, counts)], [np.arange(len(part.chunk_files))]
    shared_rows = np.flatnonzero((part.aliases >= 0) & (aliases[own] < 0))
    targets = part.aliases[shared_rows]
    if counts[targets].sum() > _ROWS_PER_ROW * (len(own) + len(rows[0])) + _ROWS_AT_LEAST:
        raise CorruptCheckpointError(
            f"{where} has too many names that share the data of one tensor in one part only"
        )
    for row, target in zip(shared_rows.tolist(), targets.tolist(), strict=True):
        shared = np.arange(part.chunk_starts[target], part.chunk_starts[target + 1])
        owners.append(np.full(len(shared), own[row]))
        rows.append(shared)
    return np.concatenate(owners), np.concatenate(rows)


def _first_of_each(
    owners: Ints, offsets: Ints, sizes: Ints, shapes: Ints, names: Sequence[str], where: str
) -> Ints:
    """One row for each chunk, sorted by tensor and position; empty ones only if alone."""
    empty = (sizes == 0).any(axis=1)
    keys = rank_points(owners, offsets, shapes)
    order = np.lexsort((empty, keys))
    new = np.diff(keys[order], prepend=keys[order[0]] - 1 if len(order) else 0) != 0
    leaders = np.repeat(order[new], np.diff(np.append(np.flatnonzero(new), len(order))))
    differs = (sizes[order] != sizes[leaders]).any(axis=1) & ~empty[order]
    if differs.any():
        name = names[int(owners[order[np.flatnonzero(differs)[0]]])]
        raise CorruptCheckpointError(
            f"the ranks that saved {where} without collectives hold different chunks of {name!r} "
            "that start at the same place"
        )
    return np.asarray(order[new])

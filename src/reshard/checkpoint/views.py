"""Tensors that view shard files, in place of copies of what is in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from reshard.checkpoint.shard_files import ShardFiles
from reshard.engine.checking import StoredChunk, check_chunks
from reshard.engine.memory import tensor_in
from reshard.engine.reading import Verify
from reshard.format.checksum import split_digests
from reshard.format.tables import Manifest
from reshard.planning.columns import (
    DTYPE_CODES,
    DTYPE_ITEMSIZES,
    Bools,
    Ints,
    pad_rows,
    widen,
)
from reshard.plans.read_items import ReadColumns
from reshard.tensors.blanks import blank_layout

_WIDEST_ALIGNMENT = 8
"""No element has to begin at a multiple of more bytes, however large it is."""


def view_items(
    columns: ReadColumns, blanks: Mapping[str, torch.Tensor], files: ShardFiles, verify: Verify
) -> tuple[dict[str, torch.Tensor], ReadColumns]:
    """Views for those of `blanks` that lie in one file as in memory; what is left to read.

    Their bytes are read only if they are to be verified. Blanks under several names are one
    tensor. Different blanks never share memory, even if their stored bytes are the same.
    """
    runs = _find_runs(columns, blanks, files.manifest)
    wanted = [columns.names[i] for i in np.unique(columns.dest_names).tolist()]
    found = _in_maps(_unshared(runs, blanks, wanted), files)
    if not found:
        return {}, columns
    is_viewed = np.fromiter((name in found for name in columns.names), bool, len(columns.names))
    is_viewed = is_viewed[columns.dest_names]
    _verify(columns.select(is_viewed), files, verify)
    return found, columns.select(~is_viewed)


class _Run(NamedTuple):
    """Where the bytes of one tensor lie, one after the other."""

    name: str
    file_id: int
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _find_runs(columns: ReadColumns, blanks: Mapping[str, torch.Tensor], m: Manifest) -> list[_Run]:
    """The blanks whose stored bytes are one aligned run, of one chunk or of several.

    For each region, the place in the file where its tensor would have to begin is the same.
    """
    names, dest = columns.names, columns.dest_names
    layouts = [blank_layout(blanks[name]) if name in blanks else None for name in names]
    rows = columns.rows_in(m.table)
    width = max(columns.regions.shape[2], m.chunk_sizes.shape[1])
    shapes = pad_rows([layout[1] if layout else () for layout in layouts], width, 1)
    codes = np.array([DTYPE_CODES[layout[0]] if layout else -1 for layout in layouts])
    known = np.maximum(rows, 0)
    if not len(m.chunk_files):
        return []
    chunk_shapes, lengths = widen(m.chunk_sizes, width, 1)[known], _padded(columns, 4, width, 1)
    wholes, stored = shapes[dest], m.dtypes[m.table.owners[known]]
    itemsizes = DTYPE_ITEMSIZES[stored]
    begins = m.chunk_begins[known] + itemsizes * (
        _ravel(chunk_shapes, _padded(columns, 3, width, 0))
        - _ravel(wholes, _padded(columns, 1, width, 0))
    )
    fits = (
        (rows >= 0)
        & (columns.is_value == 0)
        # Of a tensor with several local regions, it is not known how they lie in memory.
        & (columns.dest_hints <= 0)
        & (stored == codes[dest])
        & _are_stored_plainly(m)[known]
        & _is_one_run(chunk_shapes, lengths)
        & _is_one_run(wholes, lengths)
        & (begins % np.minimum(itemsizes, _WIDEST_ALIGNMENT) == 0)
    )
    first = np.zeros(len(names), dtype=np.int64)
    first[dest[::-1]] = np.arange(len(dest))[::-1]
    file_ids = m.chunk_files[known]
    fits &= (begins == begins[first[dest]]) & (file_ids == file_ids[first[dest]])
    covered = np.zeros(len(names), dtype=np.int64)
    np.add.at(covered, dest, lengths.prod(axis=1))
    is_run = (codes >= 0) & (covered > 0) & (covered == shapes.prod(axis=1))
    is_run[dest[~fits]] = False
    found = np.flatnonzero(is_run)
    places = file_ids[first[found]].tolist(), begins[first[found]].tolist()
    return [
        _Run(names[i], file_id, begin, *layout)
        for i, file_id, begin in zip(found.tolist(), *places, strict=True)
        if (layout := layouts[i]) is not None
    ]


def _padded(columns: ReadColumns, point: int, width: int, fill: int) -> Ints:
    """One of the points of all regions, with as many columns as wanted."""
    return widen(columns.regions[:, point], width, fill)


def _are_stored_plainly(m: Manifest) -> Bools:
    """Which chunks are in the file as they are in memory."""
    if m.chunk_codecs is None:
        return np.ones(len(m.chunk_files), dtype=bool)
    return np.asarray(m.chunk_codecs == 0)


def _ravel(shapes: Ints, offsets: Ints) -> Ints:
    """How many elements lie before an element, in each row."""
    position = np.zeros(len(shapes), dtype=np.int64)
    for dim in range(shapes.shape[1]):
        position = position * shapes[:, dim] + offsets[:, dim]
    return position


def _is_one_run(shapes: Ints, lengths: Ints) -> Bools:
    """Whether the elements of each region lie one after the other in what it is a part of."""
    lead = np.cumprod(lengths, axis=1)
    lead = np.concatenate((np.ones_like(lead[:, :1]), lead[:, :-1]), axis=1)
    return ((lengths == shapes) | (lead == 1)).all(axis=1)  # type: ignore[no-any-return]


def _unshared(
    runs: list[_Run], blanks: Mapping[str, torch.Tensor], wanted: Sequence[str]
) -> Iterator[_Run]:
    """Those runs that no other blank has a part of, and that all names of their blank stand for."""
    places: dict[int, tuple[int, int]] = {}
    viewable = {run.name for run in runs}
    refused = {id(blanks[name]) for name in wanted if name in blanks and name not in viewable}
    file_id, end, holder = -1, 0, 0
    for run in sorted(runs, key=lambda run: (run.file_id, run.begin)):
        place, blank = (run.file_id, run.begin), id(blanks[run.name])
        overlaps = run.file_id == file_id and run.begin < end and blank != holder
        if overlaps or places.setdefault(blank, place) != place:
            refused.add(blank)
        elif blank not in refused:
            nbytes = math.prod(run.shape) * run.dtype.itemsize
            file_id, end, holder = run.file_id, run.begin + nbytes, blank
    return (run for run in runs if id(blanks[run.name]) not in refused)


def _in_maps(runs: Iterator[_Run], files: ShardFiles) -> dict[str, torch.Tensor]:
    """The tensors of runs, as far as their files can be mapped: each file once."""
    maps: dict[int, memoryview | None] = {}
    made: dict[tuple[int, int], torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, file_id, begin, dtype, shape in runs:
        if file_id not in maps:
            maps[file_id] = files.map(file_id)
        memory = maps[file_id]
        if memory is None:
            continue
        tensor = made.get((file_id, begin))
        if tensor is None:
            tensor = made[file_id, begin] = tensor_in(memory, begin, dtype, shape)
        found[name] = tensor
    return found


def _verify(columns: ReadColumns, files: ShardFiles, verify: Verify) -> None:
    """Read the chunks that views lie in, as far as asked for, and compare their digests.

    Those of files that nothing else identifies are always read.
    """
    m = files.manifest
    if verify is Verify.OFF and m.file_origins is None:
        return
    rows = columns.rows_in(m.table)
    is_checked = np.full(len(rows), verify is Verify.FULL)
    if verify is Verify.CHUNKS:
        width = columns.regions.shape[2]
        is_checked = (columns.regions[:, 4] == m.chunk_sizes[rows, :width]).all(axis=1)
    suspects = [file_id for file_id in range(len(m.files)) if files.is_suspect(file_id)]
    rows = np.unique(rows[is_checked | np.isin(m.chunk_files[rows], suspects)])
    owners = m.table.owners[rows]
    check_chunks(
        [
            StoredChunk(m.tensor_names[owner], files.open(file), begin, n, digest, file in suspects)
            for file, owner, begin, n, digest in zip(
                m.chunk_files[rows].tolist(),
                owners.tolist(),
                m.chunk_begins[rows].tolist(),
                m.chunk_nbytes[rows].tolist(),
                split_digests(m.chunk_digests[rows]),
                strict=True,
            )
        ],
        files.readers,
        files.store.location,
    )

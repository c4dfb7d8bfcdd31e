"""Comparing two checkpoints by their manifests; no stored tensor or value is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.background.queue import save_queue
from reshard.checkpoint.directory import read_manifest
from reshard.format.tables import Manifest
from reshard.operations.targets import Place, comparable_place, open_reader
from reshard.operations.verification import tensor_fingerprints
from reshard.planning.columns import DTYPES, Ints
from reshard.stores.urls import scheme_of


@dataclass(frozen=True)
class Comparison:
    """What differs between two checkpoints; true if it is certain that nothing does.

    `tensors` and `values` are names of what both have, but not the same; `undecided` are names of
    what cannot be compared: tensors that are cut in different ways, at least one of them without
    a fingerprint, and values that went through different codecs.
    """

    tensors: Sequence[str]
    values: Sequence[str]
    only_in_first: Sequence[str]
    only_in_second: Sequence[str]
    undecided: Sequence[str]

    def __bool__(self) -> bool:
        return not (
            self.tensors
            or self.values
            or self.only_in_first
            or self.only_in_second
            or self.undecided
        )


def compare(
    first: Place, second: Place, storage_options: Mapping[str, Any] | None = None
) -> Comparison:
    """Compare two checkpoints by what their manifests say."""
    return compare_manifests(_read(first, storage_options), _read(second, storage_options))


def _read(place: Place, storage_options: Mapping[str, Any] | None) -> Manifest:
    save_queue().settle(comparable_place(place))
    options = storage_options if scheme_of(place) else None
    return read_manifest(open_reader(place, options).open_store())


def compare_manifests(first: Manifest, second: Manifest) -> Comparison:
    """The same for manifests that were read."""
    names = [{*m.tensor_names, *m.value_names} for m in (first, second)]
    tensors: list[str] = []
    values: list[str] = []
    undecided: list[str] = []
    both = _Tensors(first, second)
    others = second.table.row_of
    for row, name in enumerate(first.tensor_names):
        other = others.get(name)
        if other is None:
            if name in names[1]:
                tensors.append(name)
            continue
        same = both.are_same(row, other)
        if same is None:
            undecided.append(name)
        elif not same:
            tensors.append(name)
    value_rows = {name: row for row, name in enumerate(second.value_names)}
    for row, name in enumerate(first.value_names):
        other = value_rows.get(name)
        if other is None:
            if name in names[1]:
                values.append(name)
        elif _codec(first, row) != _codec(second, other):
            undecided.append(name)
        elif _stored(first, row) != _stored(second, other):
            values.append(name)
    return Comparison(
        tensors,
        values,
        [name for name in (*first.tensor_names, *first.value_names) if name not in names[1]],
        [name for name in (*second.tensor_names, *second.value_names) if name not in names[0]],
        undecided,
    )


def _codec(manifest: Manifest, value: int) -> str:
    codes = manifest.value_codecs
    number = 0 if codes is None else int(codes[value])
    return manifest.codec_names[number - 1] if number else ""


def _stored(manifest: Manifest, value: int) -> tuple[int, int]:
    return int(manifest.value_nbytes[value]), int(manifest.value_checksums[value])


class _Tensors:
    """The tensors of two manifests."""

    def __init__(self, first: Manifest, second: Manifest) -> None:
        self._manifests = first, second
        self._fingerprints = [
            None if m.chunk_fingerprints is None else tensor_fingerprints(m)
            for m in self._manifests
        ]

    def are_same(self, row: int, other: int) -> bool | None:
        """Whether two tensors are equal; None if that cannot be told."""
        (first, a), (second, b) = zip(self._manifests, (row, other), strict=True)
        if DTYPES[first.dtypes[a]] is not DTYPES[second.dtypes[b]]:
            return False
        if first.table.shape_of(a) != second.table.shape_of(b):
            return False
        here, there = _chunks(first, a), _chunks(second, b)
        dims = int(first.ndims[a])
        if _are_equal(first.chunk_offsets, here, second.chunk_offsets, there, dims) and _are_equal(
            first.chunk_sizes, here, second.chunk_sizes, there, dims
        ):
            return np.array_equal(first.chunk_digests[here], second.chunk_digests[there])
        sizes = first.chunk_sizes[here], second.chunk_sizes[there]
        volume = int(first.shapes[a].prod())
        if any(int(each.prod(axis=1).sum()) != volume for each in sizes):
            # Saved by one rank that holds a part of it.
            return None
        mine, theirs = self._fingerprints
        if mine is None or theirs is None:
            return None
        return np.array_equal(mine[a], theirs[b])


def _chunks(manifest: Manifest, tensor: int) -> slice:
    source = int(manifest.table.sources[tensor])
    return slice(int(manifest.chunk_starts[source]), int(manifest.chunk_starts[source + 1]))


def _are_equal(first: Ints, rows: slice, second: Ints, other_rows: slice, dims: int) -> bool:
    return np.array_equal(first[rows, :dims], second[other_rows, :dims])

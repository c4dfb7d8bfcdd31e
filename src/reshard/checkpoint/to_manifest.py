"""From metadata and write results to the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.api import CheckpointException
from reshard.checkpoint.planner_data import pack_planner_data, unpack_planner_data
from reshard.format.checks import check_encodable, check_manifest
from reshard.format.tables import Manifest, Origin
from reshard.metadata import Metadata
from reshard.plans.entries import chunk_table, values_of
from reshard.plans.results import ResultRows, WrittenColumns, WrittenFile, written_columns
from reshard.storage import WriteResult


def to_manifest(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], notes: Mapping[str, str]
) -> Manifest:
    """The manifest of a checkpoint whose ranks wrote `results`."""
    table, values = chunk_table(metadata), values_of(metadata)
    rows = ResultRows(table, values)
    # One row for each chunk and then each value, without a file if it was not written.
    n_chunks = len(table.offsets)
    n_rows = n_chunks + len(values)
    all_written = WrittenColumns.of([0] * n_rows, [False] * n_rows)
    all_written.file_ids[:] = -1
    files: dict[WrittenFile, int] = {}
    codecs: dict[str, int] = {}
    for result in results:
        own, written = rows.find(result), written_columns(result)
        all_written.numbers[own] = written.numbers
        all_written.digests[own] = written.digests
        # Several ranks may refer to one file of another checkpoint.
        numbers = [files.setdefault(file, len(files)) for file in written.files]
        if len(own):
            all_written.file_ids[own] = np.array(numbers, dtype=np.int64)[written.file_ids]
            codes = [0, *(codecs.setdefault(name, len(codecs) + 1) for name in written.codecs)]
            all_written.codec_ids[own] = np.array(codes, dtype=np.int64)[written.codec_ids]
    unwritten = np.flatnonzero(all_written.file_ids < 0)
    if len(unwritten):
        raise CheckpointException(
            f"no rank wrote all of {rows.name_of(int(unwritten[0]))!r}, although it was planned: "
            "the planner's finish_plan or the storage left items out"
        )
    all_written.codecs = list(codecs)
    all_written.has_fingerprints = bool(results) and all(
        written_columns(result).has_fingerprints for result in results if len(result)
    )
    return Manifest(
        tensor_names=table.names,
        dtypes=table.dtypes,
        flags=table.flags,
        ndims=table.ndims,
        shapes=table.shapes,
        aliases=table.aliases,
        chunk_starts=table.starts,
        chunk_offsets=table.offsets,
        chunk_sizes=table.sizes,
        value_names=values,
        planner_data=pack_planner_data(metadata.planner_data),
        notes=notes,
        **_file_columns(list(files)),
        **_written_columns(all_written, n_chunks),
    )


def _file_columns(files: Sequence[WrittenFile]) -> dict[str, Any]:
    numbers = np.array([file[1:4] for file in files], dtype=np.int64).reshape(len(files), 3)
    origins: dict[Origin, int] = {}
    own = [
        origins.setdefault(Origin(location, save_id), len(origins)) if location else -1
        for *_, location, save_id in files
    ]
    return {
        "files": [file.path for file in files],
        "file_sizes": numbers[:, 0],
        "header_sizes": numbers[:, 1],
        "header_checksums": numbers[:, 2],
        "file_origins": np.array(own, dtype=np.int64) if origins else None,
        "origins": list(origins),
    }


def _written_columns(written: WrittenColumns, n_chunks: int) -> dict[str, Any]:
    """Where chunks and values are; chunks come first."""
    chunks, values = slice(0, n_chunks), slice(n_chunks, None)
    encoded = written.codec_ids.any()
    return {
        "chunk_files": written.file_ids[chunks],
        "chunk_begins": written.begins[chunks],
        "chunk_digests": written.digests[chunks],
        "chunk_probes": written.checksums[chunks],
        "chunk_fingerprints": written.fingerprints[chunks] if written.has_fingerprints else None,
        "chunk_codecs": written.codec_ids[chunks] if encoded else None,
        "chunk_stored_nbytes": written.stored_nbytes[chunks] if encoded else None,
        "codec_names": written.codecs,
        "value_files": written.file_ids[values],
        "value_begins": written.begins[values],
        "value_nbytes": written.stored_nbytes[values],
        "value_checksums": written.checksums[values],
        "value_pickled": written.pickled[values],
        "value_codecs": written.codec_ids[values] if written.codec_ids[values].any() else None,
    }


def check_readable(manifest: Manifest, where: str) -> None:
    """Raise what a reader of the manifest would: for a save, before it commits."""
    check_encodable(manifest, where)
    check_manifest(manifest, where)
    unpack_planner_data(manifest.planner_data, where, allow_pickle=False)

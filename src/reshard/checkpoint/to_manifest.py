"""From metadata and write results to the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from reshard.api import CheckpointException
from reshard.checkpoint.planner_data import pack_planner_data, unpack_planner_data
from reshard.format.manifest import Manifest, check_encodable, check_manifest
from reshard.metadata import Metadata
from reshard.plans.entries import chunk_table, values_of
from reshard.plans.results import ResultRows, WrittenFile, written_columns
from reshard.storage import WriteResult


def to_manifest(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], notes: Mapping[str, str]
) -> Manifest:
    """The manifest of a checkpoint whose ranks wrote `results`."""
    table, values = chunk_table(metadata), values_of(metadata)
    rows = ResultRows(table, values)
    # One row for each chunk and then each value; -1 if it was not written.
    n_chunks = len(table.offsets)
    places = np.full((5, n_chunks + len(values)), -1, dtype=np.int64)
    files: list[WrittenFile] = []
    for result in results:
        own, written = rows.find(result), written_columns(result)
        places[0, own] = written.file_ids + len(files)
        places[1, own] = written.begins
        places[2, own] = written.nbytes
        places[3, own] = written.checksums
        places[4, own] = written.pickled
        files.extend(written.files)
    file_ids, begins, nbytes, checksums, pickled = places
    unwritten = np.flatnonzero(file_ids < 0)
    if len(unwritten):
        raise CheckpointException(
            f"no rank wrote all of {rows.name_of(int(unwritten[0]))!r}, although it was planned: "
            "the planner's finish_plan or the storage left items out"
        )
    numbers = np.array([file[1:] for file in files], dtype=np.int64).reshape(len(files), 3)
    return Manifest(
        files=[file.path for file in files],
        file_sizes=numbers[:, 0],
        header_sizes=numbers[:, 1],
        header_checksums=numbers[:, 2],
        tensor_names=table.names,
        dtypes=table.dtypes,
        flags=table.flags,
        ndims=table.ndims,
        shapes=table.shapes,
        aliases=table.aliases,
        chunk_starts=table.starts,
        chunk_offsets=table.offsets,
        chunk_sizes=table.sizes,
        chunk_files=file_ids[:n_chunks],
        chunk_begins=begins[:n_chunks],
        chunk_checksums=checksums[:n_chunks],
        value_names=values,
        value_files=file_ids[n_chunks:],
        value_begins=begins[n_chunks:],
        value_nbytes=nbytes[n_chunks:],
        value_checksums=checksums[n_chunks:],
        value_pickled=pickled[n_chunks:],
        planner_data=pack_planner_data(metadata.planner_data),
        notes=notes,
    )


def check_readable(manifest: Manifest, where: str) -> None:
    """Raise what a reader of the manifest would: for a save, before it commits."""
    check_encodable(manifest, where)
    check_manifest(manifest, where)
    unpack_planner_data(manifest.planner_data, where, allow_pickle=False)

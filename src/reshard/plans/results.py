"""What became of the items of a plan, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reshard.api import CheckpointException
from reshard.planner import SavePlan, WriteItem
from reshard.planning.columns import ChunkTable, Ints, Schema
from reshard.plans.lazy_list import LazyList
from reshard.plans.write_items import untouched_items, write_columns
from reshard.storage import StorageInfo, WriteResult


class WrittenFile(NamedTuple):
    """A shard file: its path, its size, and the size and checksum of its header."""

    path: str
    nbytes: int
    header_nbytes: int
    header_checksum: int


@dataclass
class WrittenColumns:
    """Where the items of one rank's plan were written, in the order of the plan."""

    files: list[WrittenFile]
    file_ids: Ints
    begins: Ints
    nbytes: Ints
    checksums: Ints
    pickled: Ints


@dataclass(frozen=True)
class StoredResult(WriteResult):
    """What became of one item, with all that the manifest says of it."""

    file: WrittenFile
    checksum: int
    pickled: int


class WriteResults(LazyList[WriteResult]):
    """What became of the items of a plan, kept as columns."""

    def __init__(self, items: Sequence[WriteItem], written: WrittenColumns) -> None:
        super().__init__()
        self.items = items
        self.written = written

    def _column_length(self) -> int:
        return len(self.written.begins)

    def _make_one(self, position: int) -> WriteResult:
        written = self.written
        nbytes = int(written.nbytes[position])
        file = written.files[int(written.file_ids[position])]
        info = StorageInfo(file.path, int(written.begins[position]), nbytes)
        items = self.items
        item = items.look_at(position) if isinstance(items, LazyList) else items[position]
        return StoredResult(
            item.index,
            nbytes,
            info,
            file,
            int(written.checksums[position]),
            int(written.pickled[position]),
        )


def are_results_of(results: Sequence[WriteResult], plan: SavePlan) -> bool:
    """Whether `results` are those of the items of `plan`, as columns."""
    items = getattr(results, "items", None)
    return items is plan.items and untouched_items(plan.items) is not None


def written_columns(results: Sequence[WriteResult]) -> WrittenColumns:
    """Where things were written, according to results of any kind."""
    if isinstance(results, WriteResults) and results.untouched:
        return results.written
    stored = [result for result in results if isinstance(result, StoredResult)]
    if len(stored) != len(results):
        raise CheckpointException(
            "finish() got results that this storage did not make. A subclass that overrides "
            "write_data must hand on what the base class returned"
        )
    files = list(dict.fromkeys(result.file for result in stored))
    number = {file: position for position, file in enumerate(files)}
    columns = [
        (number[r.file], r.storage_data.offset, r.storage_data.length, r.checksum, r.pickled)
        for r in stored
    ]
    return WrittenColumns(files, *np.array(columns, dtype=np.int64).reshape(len(stored), 5).T)


class ResultRows:
    """Finds the rows of results among all chunks of a table, followed by all values."""

    def __init__(self, table: ChunkTable, values: Sequence[str]) -> None:
        self._table = table
        self._names = [*table.names, *values]
        self._ids = {name: position for position, name in enumerate(self._names)}
        n_chunks = len(table.offsets)
        self._firsts = np.concatenate([table.starts[:-1], n_chunks + np.arange(len(values))])
        self._ids_of_schemas: dict[int, Ints] = {}

    def find(self, results: Sequence[WriteResult]) -> Ints:
        if not isinstance(results, WriteResults) or not results.untouched:
            return np.array([self._find_one(result) for result in results], dtype=np.int64)
        items = untouched_items(results.items)
        if items is None:
            columns = write_columns(results.items)
            ids = [self._ids[name] for name in columns.schema.names]
            return self._rows(np.array(ids, dtype=np.int64), columns.hints)
        hints = items.base.hints if items.hints is None else items.hints
        ids_of_items = self._ids_of(items.base.schema)
        if items.rows is not None:
            ids_of_items = ids_of_items[items.rows]
            hints = hints if items.hints is not None else hints[items.rows]
        return self._rows(ids_of_items, hints)

    def _ids_of(self, schema: Schema) -> Ints:
        # Most ranks have the same schema.
        found = self._ids_of_schemas.get(id(schema))
        if found is None:
            ids = (self._ids.get(name, -1) for name in schema.names)
            found = np.fromiter(ids, np.int64, len(schema))
            self._ids_of_schemas[id(schema)] = found
        return found

    def _rows(self, ids: Ints, hints: Ints) -> Ints:
        return np.asarray(self._firsts[ids] + np.maximum(hints, 0))

    def _find_one(self, result: WriteResult) -> int:
        name, offset = result.index.fqn, result.index.offset
        position = self._ids[name]
        first = int(self._firsts[position])
        if position >= len(self._table.names):
            return first
        offsets, _ = self._table.of(position)
        dims = int(self._table.ndims[position])
        matches = (offsets[:, :dims] == tuple(offset or (0,) * dims)).all(axis=1)
        if not matches.any():
            raise KeyError(result.index)
        return first + int(matches.argmax())

    def name_of(self, row: int) -> str:
        """The tensor or value that a row belongs to."""
        return self._names[int(np.searchsorted(self._firsts, row, side="right")) - 1]

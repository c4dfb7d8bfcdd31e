"""What became of the items of a plan, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reshard.api import CheckpointException
from reshard.format.checksum import DIGEST_BYTES, Digests, join_digests
from reshard.planner import SavePlan, WriteItem
from reshard.planning.columns import ChunkTable, Ints, Schema
from reshard.plans.lazy_list import LazyList
from reshard.plans.write_items import untouched_items, write_columns
from reshard.storage import StorageInfo, WriteResult


class WrittenFile(NamedTuple):
    """A shard file: its path, its size, and the size and checksum of its header.

    `location` and `save_id` say which checkpoint the file is of, if not of this one.
    """

    path: str
    nbytes: int
    header_nbytes: int
    header_checksum: int
    location: str = ""
    save_id: str = ""


_FILE, _BEGIN, _NBYTES, _STORED, _CODEC, _PICKLED, _CHECKSUM, _FINGERPRINT = range(8)
_COLUMNS = 9


@dataclass
class WrittenColumns:
    """Where the items of one rank's plan were written, in the order of the plan.

    Each has a row in `numbers`, and in `digests` if it is a chunk; the properties name the columns.
    `codecs` are the names of codecs, counted from 1.
    """

    files: list[WrittenFile]
    numbers: Ints
    digests: Digests
    codecs: list[str]
    has_fingerprints: bool = False

    @classmethod
    def of(cls, nbytes: Sequence[int], pickled: Sequence[bool]) -> WrittenColumns:
        """Columns for items of known sizes, of which nothing else is known yet."""
        columns = cls(
            files=[],
            numbers=np.zeros((len(nbytes), _COLUMNS), dtype=np.int64),
            digests=np.zeros((len(nbytes), DIGEST_BYTES), dtype=np.uint8),
            codecs=[],
        )
        columns.nbytes[:] = columns.stored_nbytes[:] = nbytes
        columns.pickled[:] = pickled
        return columns

    @property
    def file_ids(self) -> Ints:
        return self.numbers[:, _FILE]

    @property
    def begins(self) -> Ints:
        return self.numbers[:, _BEGIN]

    @property
    def nbytes(self) -> Ints:
        """The size of the content."""
        return self.numbers[:, _NBYTES]

    @property
    def stored_nbytes(self) -> Ints:
        """How many bytes that takes in the file."""
        return self.numbers[:, _STORED]

    @property
    def codec_ids(self) -> Ints:
        """The codec that the content went through; 0 for none."""
        return self.numbers[:, _CODEC]

    @property
    def pickled(self) -> Ints:
        return self.numbers[:, _PICKLED]

    @property
    def checksums(self) -> Ints:
        """Of a value, the checksum of what is stored; of a chunk, that of its first bytes."""
        return self.numbers[:, _CHECKSUM]

    @property
    def fingerprints(self) -> Ints:
        """What each chunk adds to the fingerprint of its tensor; two numbers."""
        return self.numbers[:, _FINGERPRINT:]


@dataclass(frozen=True)
class StoredResult(WriteResult):
    """What became of one item, with all that the manifest says of it."""

    file: WrittenFile
    numbers: tuple[int, ...]
    digest: bytes
    codec: str
    has_fingerprint: bool


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
        numbers = written.numbers[position].tolist()
        file, codec = written.files[numbers[_FILE]], numbers[_CODEC]
        items = self.items
        item = items.look_at(position) if isinstance(items, LazyList) else items[position]
        return StoredResult(
            item.index,
            numbers[_NBYTES],
            StorageInfo(file.path, numbers[_BEGIN], numbers[_STORED]),
            file,
            tuple(numbers),
            written.digests[position].tobytes(),
            written.codecs[codec - 1] if codec else "",
            written.has_fingerprints,
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
    codecs = list(dict.fromkeys(result.codec for result in stored if result.codec))
    numbers = np.array([r.numbers for r in stored], dtype=np.int64).reshape(-1, _COLUMNS)
    # A subclass may have moved what it wrote.
    number_of = {file: number for number, file in enumerate(files)}
    numbers[:, _FILE] = [number_of[r.file] for r in stored]
    numbers[:, _BEGIN] = [r.storage_data.offset for r in stored]
    numbers[:, _STORED] = [r.storage_data.length for r in stored]
    numbers[:, _CODEC] = [codecs.index(r.codec) + 1 if r.codec else 0 for r in stored]
    return WrittenColumns(
        files,
        numbers,
        join_digests(r.digest for r in stored),
        codecs,
        has_fingerprints=all(r.has_fingerprint for r in stored),
    )


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

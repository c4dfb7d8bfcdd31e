"""From the items of a load plan to what the engine reads.

Columns of the default planner are taken as they are; a custom planner is asked for each
item.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.autograd.graph import increment_version

from reshard.api import CorruptCheckpointError, PlanError, _note_on_error
from reshard.checkpoint.shard_files import ShardFiles
from reshard.checkpoint.to_metadata import StorageMap
from reshard.checkpoint.views import view_items
from reshard.engine.collector import paused_collection
from reshard.engine.progress import watched
from reshard.engine.reading import Request, Verify, read_regions
from reshard.engine.workers import default_threads
from reshard.format.checksum import split_digests
from reshard.format.torch_files import decode_stored, to_torch_file
from reshard.planner import LoadItemType, LoadPlanner, ReadItem
from reshard.planning.columns import DTYPES
from reshard.plans.read_items import ReadItems, read_columns, untouched_reads
from reshard.plans.traits import LoadTraits, load_traits
from reshard.tensors.shards import check_allocated, is_plain, whole_local_tensor


@dataclass(frozen=True)
class ReadOptions:
    """How shard files are read. A `thread_count` of 0 means to choose one."""

    thread_count: int
    allow_pickle: bool
    shows_progress: bool
    verify_views: Verify = Verify.OFF


_Values: TypeAlias = list[tuple[ReadItem, int]]
"""Values to read: each with its row in the manifest."""


def read_items(
    items: Sequence[ReadItem],
    planner: Any,
    files: ShardFiles,
    storage: StorageMap,
    options: ReadOptions,
) -> int:
    """Read the items of a plan; the number of bytes that were wanted."""
    traits = load_traits(planner)
    items = make_views(items, planner, files, options)
    if not traits.fills_by_itself:
        # One after the other, in this thread: a custom planner may make the memory of a tensor
        # when it is its turn, and need not be thread-safe.
        return sum(_read([item], planner, traits, files, storage, options) for item in items)
    return _read(items, planner, traits, files, storage, options)


def make_views(
    items: Sequence[ReadItem], planner: Any, files: ShardFiles, options: ReadOptions
) -> Sequence[ReadItem]:
    """Make the tensors that can be views of files; the items that are left to read."""
    if not files.manifest.is_ours:
        files.look_into(read_columns(items).rows_in(files.manifest.table))
    if not getattr(planner, "blanks", None):
        return items
    views, left = view_items(read_columns(items), planner.blanks, files, options.verify_views)
    planner.fill_blanks(views)
    return ReadItems(left)


def _read(
    items: Sequence[ReadItem],
    planner: Any,
    traits: LoadTraits,
    files: ShardFiles,
    storage: StorageMap,
    options: ReadOptions,
) -> int:
    found = collect(items, planner, traits, files, storage)
    requests = found.requests
    wanted_bytes = sum(request.nbytes for request in requests)
    where = files.store.location
    threads = (options.thread_count or default_threads()) if traits.fills_by_itself else 1
    # A custom planner is asked for one item after the other, each of them a load of its own.
    shows_progress = options.shows_progress and traits.fills_by_itself
    with naming_absence(where), files.fetching(requests, [row for _, row in found.values]):
        with watched(f"loading {where}", wanted_bytes, shows_progress) as progress:
            read_regions(files.readers, requests, files.verify, threads, where, progress.advance)
        wanted_bytes += load_values(found.values, planner, traits, files, options)
    return wanted_bytes


def load_values(
    values: _Values, planner: Any, traits: LoadTraits, files: ShardFiles, options: ReadOptions
) -> int:
    """Hand values to the planner; the number of their bytes."""
    nbytes = 0
    for item, row in values:
        name = item.storage_index.fqn
        data = files.read_value(name, row)
        if not traits.decodes_values:
            data = to_torch_file(name, data, options.allow_pickle)
        with _note_on_error(f"loading {name!r}"):
            planner.load_bytes(item, io.BytesIO(data))
        nbytes += int(files.manifest.value_nbytes[row])
    return nbytes


@contextmanager
def naming_absence(where: str) -> Iterator[None]:
    """A remote file is opened when it is read, and is found to be gone only then."""
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"the checkpoint at {where} lacks its file {error.filename!r}. If it was overwritten "
            "meanwhile, load it again"
        ) from error


def read_values(names: Sequence[str], files: ShardFiles, storage: StorageMap) -> dict[str, bytes]:
    """The stored bytes of some values."""
    rows, found = storage.value_rows, {}
    for name in names:
        files.open(int(storage.manifest.value_files[rows[name]]))
        found[name] = files.read_value(name, rows[name])
    return found


def refuse_pickles(items: Sequence[ReadItem], files: ShardFiles, storage: StorageMap) -> None:
    """Raise before anything is loaded, not when the turn of the value comes."""
    m = storage.manifest
    # What others have stored is not known before it is looked at.
    suspect = m.value_pickled if m.is_ours else np.ones_like(m.value_pickled)
    pickled = {m.value_names[row] for row in np.flatnonzero(suspect).tolist()}
    if not pickled:
        return
    columns = read_columns(items)
    for row in np.flatnonzero(columns.is_value).tolist():
        name = columns.names[columns.storage_names[row]]
        if name in pickled:
            decode_stored(name, read_values([name], files, storage)[name], allow_pickle=False)


class Found(NamedTuple):
    """What to read for the items of a plan: regions, each with the row of its chunk; and values."""

    requests: list[Request]
    rows: list[int]
    values: _Values


def collect(
    items: Sequence[ReadItem],
    planner: Any,
    traits: LoadTraits,
    files: ShardFiles,
    storage: StorageMap,
    opens_files: bool = True,
) -> Found:
    """What to read for each item; all files that are needed are checked, if they are opened."""
    with paused_collection():
        found = _Collector(planner, files, storage, traits.fills_in_place, opens_files)
        columns = untouched_reads(items)
        if columns is not None and traits.fills_by_itself:
            found.add_rows(columns, planner.state_dict)
        else:
            for item in items:
                found.add(item)
        if traits.is_default:
            count_changes({request.into for request in found.requests}, planner)
    return Found(found.requests, found.rows, found.values)


def count_changes(names: Collection[str], planner: Any) -> None:
    """Tell autograd about DTensors and the like, whose local tensors are what is filled."""
    state_dict = getattr(planner, "state_dict", {})
    values = (state_dict.get(name) for name in names)
    increment_version(
        [value for value in values if isinstance(value, torch.Tensor) and not is_plain(value)]
    )


class _Collector:
    def __init__(
        self,
        planner: LoadPlanner,
        files: ShardFiles,
        storage: StorageMap,
        in_place: bool,
        opens_files: bool,
    ) -> None:
        self.requests: list[Request] = []
        self.rows: list[int] = []
        self.values: _Values = []
        self._planner = planner
        self._files = files
        self._storage = storage
        self._manifest = files.manifest
        self._in_place = in_place
        self._file = files.open if opens_files else files.key_of
        self._chunk = files.open_chunk if opens_files else files.place_of

    def add(self, item: ReadItem) -> None:
        name, m = item.storage_index.fqn, self._manifest
        if item.type is LoadItemType.BYTE_IO:
            row = self._storage.value_rows[name]
            self._file(int(m.value_files[row]))
            self.values.append((item, row))
            return
        row = self._storage.chunk_row(item.storage_index)
        chunk = tuple(m.chunk_sizes[row, : int(m.ndims[m.table.row_of[name]])].tolist())
        _check_bounds(item, chunk)
        with _note_on_error(f"loading {item.dest_index.fqn!r}"):
            tensor = self._planner.resolve_tensor(item)
        if tensor.shape != item.lengths:
            raise ValueError(
                f"resolve_tensor returned a tensor of shape {tuple(tensor.shape)} for "
                f"{item.dest_index.fqn!r}, to be filled with {tuple(item.lengths)}"
            )
        check_allocated(item.dest_index.fqn, tensor)
        file, begin = self._chunk(row)
        self.rows.append(row)
        self.requests.append(
            Request(
                name=name,
                file=file,
                begin=begin,
                chunk_shape=chunk,
                dtype=DTYPES[m.dtypes[m.table.row_of[name]]],
                digest=m.chunk_digests[row].tobytes(),
                offsets=item.storage_offsets,
                lengths=item.lengths,
                target=tensor.detach(),
                into=item.dest_index.fqn,
                done=None if self._in_place else partial(_commit, self._planner, item, tensor),
                suspect=self._files.is_suspect(int(m.chunk_files[row])),
            )
        )

    def add_rows(self, items: ReadItems, state_dict: Mapping[str, Any]) -> None:
        """The same for many items at once, of which most fill a whole local tensor."""
        base, m, names = items.base, self._manifest, items.base.names
        rows = base.rows_in(m.table)
        if (rows < 0).all():
            for i in range(len(rows)):
                self.add(items.look_at(i))
            return
        # Where the row is not known, that of any chunk, which is not used.
        chunks = np.maximum(rows, 0)
        columns = zip(
            range(len(rows)),
            rows.tolist(),
            base.dest_names.tolist(),
            base.storage_names.tolist(),
            base.ndims.tolist(),
            base.regions[:, 3].tolist(),
            base.regions[:, 4].tolist(),
            m.dtypes[m.table.owners[chunks]].tolist(),
            m.chunk_files[chunks].tolist(),
            m.chunk_begins[chunks].tolist(),
            split_digests(m.chunk_digests[chunks]),
            m.chunk_sizes[chunks].tolist(),
            strict=True,
        )
        encoded = None if m.chunk_codecs is None else m.chunk_codecs.tolist()
        paths: dict[int, tuple[str, bool]] = {}
        for (
            i,
            row,
            dest,
            stored,
            dims,
            offsets,
            lengths,
            code,
            file,
            begin,
            digest,
            sizes,
        ) in columns:
            here = tuple(lengths[:dims])
            target = None if row < 0 else whole_local_tensor(state_dict[names[dest]], here)
            if target is None:
                self.add(items.look_at(i))
                continue
            check_allocated(names[dest], target)
            if file not in paths:
                paths[file] = self._file(file), self._files.is_suspect(file)
            path, is_suspect = paths[file]
            if encoded is not None and encoded[row]:
                path, begin = self._chunk(row)
            shape = tuple(sizes[:dims])
            self.rows.append(row)
            self.requests.append(
                Request(
                    names[stored],
                    path,
                    begin,
                    here if shape == here else shape,
                    DTYPES[code],
                    digest,
                    tuple(offsets[:dims]),
                    here,
                    target,
                    names[dest],
                    None,
                    is_suspect,
                )
            )


def _check_bounds(item: ReadItem, chunk: Sequence[int]) -> None:
    """Refuse to read what lies beside a chunk, for an item that somebody has edited."""
    begins, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    fits = len(begins) == len(lengths) == len(chunk) and all(
        begin >= 0 and length >= 0 and begin + length <= extent
        for begin, length, extent in zip(begins, lengths, chunk, strict=True)
    )
    if not fits:
        raise PlanError(
            f"the read item of {item.dest_index.fqn!r} reaches out of its chunk: it asks for "
            f"lengths {lengths} at {begins} of a chunk of shape {tuple(chunk)}. Correct "
            "storage_offsets and lengths in the load plan"
        )


def _commit(planner: LoadPlanner, item: ReadItem, tensor: torch.Tensor) -> None:
    with _note_on_error(f"loading {item.dest_index.fqn!r}"):
        planner.commit_tensor(item, tensor)

"""From the items of a save plan to what the engine writes.

Columns of the default planner are taken as they are; a custom planner is asked for each
item.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from reshard.api import PlanError, UnsupportedLayoutError, _note_on_error
from reshard.checkpoint.bases import Base
from reshard.checkpoint.directory import shard_name
from reshard.checkpoint.open_save import OpenSave
from reshard.checkpoint.references import References
from reshard.checkpoint.to_dcp import RECORD
from reshard.engine.collector import paused_collection
from reshard.engine.encoding import write_encoded_file
from reshard.engine.fingerprints import Fingerprints, fingerprint_contents
from reshard.engine.progress import watched
from reshard.engine.streams import StreamExtension, stream_codec, write_streamed_file
from reshard.engine.torch_writing import is_savable, write_torch_records
from reshard.engine.workers import default_threads
from reshard.engine.writing import Content, Written, region_key, write_file
from reshard.format.codec import CODECS
from reshard.format.torch_files import to_torch_file
from reshard.format.values import is_pickled
from reshard.planner import SavePlanner, WriteItem, WriteItemType
from reshard.planning.columns import Ints
from reshard.plans.results import WriteResults, WrittenColumns, WrittenFile
from reshard.plans.traits import save_traits
from reshard.plans.write_items import WriteItems, untouched_items
from reshard.stores.protocol import Store
from reshard.tensors.shards import check_allocated, whole_local_tensor

logger = logging.getLogger(__name__)

_ENCODED_FILE_BYTES = 256 << 20
"""About how much of a state goes into one encoded object."""


@dataclass(frozen=True)
class WriteOptions:
    """How shard files are written. A `thread_count` of 0 means to choose one."""

    single_file: bool
    durable: bool
    thread_count: int
    shows_progress: bool
    unchanged: Mapping[str, bytes] | None = None
    """The digests of tensors that are known to be as they were in the base."""
    fingerprint: bool = False
    compress: str | None = None
    extensions: Sequence[StreamExtension] = ()
    for_dcp: bool = False
    """Whether contents become torch.save files, which is what DCP reads."""

    @property
    def codec(self) -> str:
        """The name of the codec that contents go through; empty without one."""
        if self.for_dcp:
            return ",".join([RECORD, *filter(None, [stream_codec(self.extensions)])])
        if self.extensions:
            return stream_codec(self.extensions)
        return CODECS[self.compress] if self.compress else ""


def write_items(
    items: Sequence[WriteItem],
    planner: Any,
    save: OpenSave,
    rank: int | str,
    first: int,
    options: WriteOptions,
    base: Base | None = None,
) -> WriteResults:
    """Write the items of a plan into shard files, numbered from `first` on.

    Chunks that the base holds are referred to instead.
    """
    keeps_values = save_traits(planner).keeps_values
    unchanged = options.unchanged or ()
    contents, pickled = collect_contents(items, planner, keeps_values, unchanged, options.for_dcp)
    store = save.store
    if any(pickled):
        _warn_of_pickles([c.key for c, p in zip(contents, pickled, strict=True) if p], store)
    written = WrittenColumns.of([content.nbytes for content in contents], pickled)
    written.has_fingerprints = options.fingerprint
    # At least two threads: while one waits for the disk, the other copies and hashes. But a
    # custom planner need not be thread-safe.
    threads = options.thread_count or (max(2, default_threads()) if keeps_values else 1)
    if options.compress and threads > 1 and not options.thread_count:
        # Those that wait for the store do not encode, and all wait for the one whose turn it is.
        threads *= 4
    rows = list(range(len(contents)))
    if base is not None:
        references = References(base, options.unchanged)
        references.find(contents, threads)
        references.record(written)
        if options.fingerprint:
            lacking = references.without_fingerprints(contents)
            found = fingerprint_contents([contents[row] for row in lacking], threads)
            written.fingerprints[lacking] = found.view(np.int64)
        rows = [row for row in rows if row not in references]
    groups = [rows] if options.single_file else [[row] for row in rows]
    if options.single_file and options.compress and store.remote is not None:
        groups = _groups_of(rows, written.nbytes)
    total_bytes = int(written.nbytes[rows].sum())
    with watched(f"saving {store.location}", total_bytes, options.shows_progress) as progress:
        for number, group in enumerate(groups if rows else []):
            suffix = ".distcp" if options.for_dcp else ".safetensors"
            key = shard_name(rank, first + number, save.save_id, suffix)
            save.written.append(key)
            try:
                chosen = [contents[row] for row in group]
                file = _write_file(save, key, chosen, threads, options, progress.advance)
            except FileNotFoundError as error:
                if store.list():
                    raise
                raise save.removed() from error
            written.files.append(
                WrittenFile(key, file.file_bytes, file.header_bytes, file.header_checksum)
            )
            written.file_ids[group] = len(written.files) - 1
            written.begins[group] = file.begins
            written.checksums[group] = file.checksums
            written.digests[group] = file.digests
            written.fingerprints[group] = file.fingerprints
            if file.encoded is not None and file.stored_nbytes is not None:
                codec = _number_codec(written.codecs, options.codec if file.encoded.any() else "")
                written.codec_ids[group] = file.encoded * codec
                written.stored_nbytes[group] = file.stored_nbytes
    return WriteResults(items, written)


def _groups_of(rows: Sequence[int], nbytes: Ints) -> list[list[int]]:
    """Rows for one file each. What is encoded must fit the memory before it can be sent."""
    groups: list[list[int]] = [[]]
    size = 0
    for row in rows:
        if groups[-1] and size + int(nbytes[row]) > _ENCODED_FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(row)
        size += int(nbytes[row])
    return groups


def check_savable(items: Sequence[WriteItem]) -> None:
    """Refuse tensors that torch.save cannot write."""
    columns = untouched_items(items)
    if columns is not None:
        dtypes = ((name, dtype) for name, dtype, *_ in columns.tensor_rows() if dtype is not None)
    else:
        planned = ((item.index.fqn, item.tensor_data) for item in items)
        dtypes = ((name, data.properties.dtype) for name, data in planned if data is not None)
    for name, dtype in dtypes:
        if not is_savable(dtype):
            raise UnsupportedLayoutError(
                f"{name!r} has the dtype {dtype}, which torch.save cannot write, and so no "
                "checkpoint of DCP can hold. Save it with format='reshard', or as bytes"
            )


def _number_codec(codecs: list[str], name: str) -> int:
    """The number of a codec among those that a save uses; 0 without one."""
    if name and name not in codecs:
        codecs.append(name)
    return codecs.index(name) + 1 if name else 0


def _write_file(
    save: OpenSave,
    key: str,
    contents: Sequence[Content],
    threads: int,
    options: WriteOptions,
    advance: Callable[[int], None],
) -> Written:
    store, durable, fingerprint = save.store, options.durable, options.fingerprint
    if options.for_dcp:
        return write_torch_records(store, key, contents, options.extensions, durable, advance)
    if options.extensions:
        return write_streamed_file(
            store, key, contents, options.extensions, durable, advance, save.save_id, fingerprint
        )
    write = write_encoded_file if options.compress else write_file
    return write(store, key, contents, threads, durable, advance, save.save_id, fingerprint)


def fingerprint_items(items: Sequence[WriteItem], positions: Ints, planner: Any) -> Fingerprints:
    """The fingerprints of some items of a plan, which are chunks."""
    keeps_values = save_traits(planner).keeps_values
    chosen: Sequence[WriteItem]
    columns = untouched_items(items)
    if columns is not None and columns.rows is None:
        chosen = WriteItems(columns.base, positions)
    else:
        chosen = [items[position] for position in positions.tolist()]
    contents, _ = collect_contents(chosen, planner, keeps_values, ())
    return fingerprint_contents(contents, default_threads() if keeps_values else 1)


def _warn_of_pickles(keys: Sequence[str], store: Store) -> None:
    logger.warning(
        "%s at %s %s (load with allow_pickle=True): %s",
        "1 value" if len(keys) == 1 else f"{len(keys)} values",
        store.location,
        "is stored as a pickle" if len(keys) == 1 else "are stored as pickles",
        ", ".join(map(repr, keys[:5])),
    )


def collect_contents(
    items: Sequence[WriteItem],
    planner: Any,
    keeps_values: bool,
    unchanged: Collection[str],
    for_dcp: bool = False,
) -> tuple[list[Content], list[bool]]:
    """What to write for each item, and whether it is a pickle."""
    with paused_collection():
        found = _Collector(planner, unchanged, for_dcp)
        columns = untouched_items(items)
        if columns is not None and keeps_values:
            found.add_rows(columns, planner.state_dict)
        else:
            for item in items:
                found.add(item)
    return found.contents, found.pickled


class _Collector:
    """Collects contents, and whether each is a pickle."""

    def __init__(self, planner: SavePlanner, unchanged: Collection[str], for_dcp: bool) -> None:
        self._for_dcp = for_dcp
        self._unchanged = unchanged
        self.contents: list[Content] = []
        self.pickled: list[bool] = []
        self._planner = planner
        self._keys: set[str] = {"__metadata__"}

    def add(self, item: WriteItem) -> None:
        data = item.tensor_data
        if item.type is WriteItemType.BYTE_IO:
            view = _value_bytes(self._planner, item)
            is_pickle = is_pickled(view) and not self._for_dcp
            if self._for_dcp:
                converted = to_torch_file(item.index.fqn, bytes(view), allow_pickle=True)
                view = memoryview(converted)
            self._append(item.index.fqn, torch.uint8, (len(view),), len(view), view)
            self.pickled[-1] = is_pickle
            return
        if data is None:
            raise PlanError(f"the write item of {item.index.fqn!r} has no tensor_data")
        chunk, dtype = data.chunk, data.properties.dtype
        key = region_key(item.index.fqn, data.size, chunk.offsets, chunk.sizes)
        nbytes = math.prod(chunk.sizes) * dtype.itemsize
        source = partial(_resolve, self._planner, item)
        place = item.index.fqn, chunk.offsets, data.size
        self._append(key, dtype, chunk.sizes, nbytes, source, *place)

    def add_rows(self, items: WriteItems, state_dict: Mapping[str, Any]) -> None:
        """The same for many items at once, most of which are a whole local tensor."""
        for position, (name, dtype, shape, offsets, sizes) in enumerate(items.tensor_rows()):
            here = tuple(sizes)
            local = None if dtype is None else whole_local_tensor(state_dict[name], here)
            if local is None or local.dtype is not dtype:
                self.add(items.look_at(position))
                continue
            if name not in self._unchanged:
                check_allocated(name, local)
            key = region_key(name, shape, offsets, here)
            nbytes = math.prod(here) * dtype.itemsize
            self._append(key, dtype, here, nbytes, local, name, offsets, shape)

    def _append(
        self,
        key: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        nbytes: int,
        source: torch.Tensor | memoryview | Callable[[], torch.Tensor | memoryview],
        name: str = "",
        offsets: Sequence[int] | None = None,
        tensor_shape: Sequence[int] | None = None,
    ) -> None:
        # The manifest does not rely on keys, so any that is not taken will do.
        while key in self._keys:
            key += "#"
        self._keys.add(key)
        self.contents.append(
            Content(key, dtype, shape, nbytes, source, name, offsets, tensor_shape)
        )
        self.pickled.append(False)


def _value_bytes(planner: SavePlanner, item: WriteItem) -> memoryview:
    with _note_on_error(f"saving {item.index.fqn!r}"):
        data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise TypeError(
            f"resolve_data returned a {type(data).__name__} for {item.index.fqn!r}, which is "
            "planned as a value: return a BytesIO"
        )
    return data.getbuffer()


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """The tensor of an item, as its plan announced it."""
    with _note_on_error(f"saving {item.index.fqn!r}"):
        tensor = planner.resolve_data(item)
    data = item.tensor_data
    if not isinstance(tensor, torch.Tensor) or data is None:
        raise TypeError(
            f"resolve_data returned a {type(tensor).__name__} for {item.index.fqn!r}, which is "
            "planned as a tensor"
        )
    if tuple(tensor.shape) != tuple(data.chunk.sizes):
        raise ValueError(
            f"resolve_data returned a tensor of shape {tuple(tensor.shape)} for "
            f"{item.index.fqn!r}, which is planned with {tuple(data.chunk.sizes)}"
        )
    tensor = tensor.detach()
    check_allocated(item.index.fqn, tensor)
    return tensor if tensor.dtype is data.properties.dtype else tensor.to(data.properties.dtype)

"""From the items of a plan to what the engine moves: contents to write, regions to read.

Items of the default planners are taken from their columns, without making an object for
each; where a planner of the user's has a say, it is asked item by item.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from reshard.api import CorruptCheckpointError, PlanError, _note_on_error
from reshard.checkpoint.contents import StorageTable
from reshard.engine.collector import paused_collection
from reshard.engine.open_files import OpenFiles, most_open_files
from reshard.engine.reading import Request, Verify, read_bytes
from reshard.engine.writing import Content
from reshard.format.checksum import Hasher
from reshard.format.container import parse_header
from reshard.format.manifest import Manifest
from reshard.format.values import is_pickled
from reshard.planner import (
    LoadItemType,
    LoadPlanner,
    ReadItem,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from reshard.planning.columns import BYTES, DTYPES
from reshard.plans.read_items import ReadItems
from reshard.plans.traits import load_traits, save_traits
from reshard.plans.write_items import WriteItems
from reshard.stores.protocol import Reader, Store
from reshard.tensors.shards import check_allocated, is_plain, whole_local_tensor

__all__ = ["ShardFiles", "contents_of", "requests_of"]

_HEADER_PIECE_BYTES = 1 << 20
_MOST_EXPLAINED_BYTES = 64 << 20
"""Longer headers that are damaged are not looked into for the reason."""


# Writing


def contents_of(
    items: Sequence[WriteItem], planner: SavePlanner
) -> tuple[list[Content], list[bool]]:
    """What to write for each item, and whether it is a pickle."""
    with paused_collection():
        found = _Contents(planner)
        if save_traits(planner).keeps_values and isinstance(items, WriteItems) and items.untouched:
            found.add_rows(items, planner)
        else:
            for item in items:
                found.add(item)
    return found.contents, found.pickled


class _Contents:
    def __init__(self, planner: SavePlanner) -> None:
        self.contents: list[Content] = []
        self.pickled: list[bool] = []
        self._planner = planner
        self._keys: set[str] = {"__metadata__"}

    def add(self, item: WriteItem) -> None:
        data = item.tensor_data
        if item.type is WriteItemType.BYTE_IO:
            view = _value_bytes(self._planner, item)
            self._append(item.index.fqn, torch.uint8, (len(view),), len(view), view)
            self.pickled[-1] = is_pickled(view)
            return
        if data is None:
            raise PlanError(f"the write item of {item.index.fqn!r} has no tensor_data")
        chunk, dtype = data.chunk, data.properties.dtype
        key = _region_key(item.index.fqn, data.size, chunk.offsets, chunk.sizes)
        nbytes = math.prod(chunk.sizes) * dtype.itemsize
        self._append(key, dtype, chunk.sizes, nbytes, partial(_resolve, self._planner, item))

    def add_rows(self, items: WriteItems, planner: Any) -> None:
        base, schema = items.base, items.base.schema
        rows = np.arange(len(base)) if items.rows is None else items.rows
        columns = zip(
            range(len(rows)),
            rows.tolist(),
            schema.kinds[rows].tolist(),
            schema.dtypes[rows].tolist(),
            schema.ndims[rows].tolist(),
            schema.shapes[rows].tolist(),
            base.offsets[rows].tolist(),
            base.sizes[rows].tolist(),
            strict=True,
        )
        for position, row, kind, code, dims, shape, offsets, sizes in columns:
            name, dtype = schema.names[row], DTYPES[code]
            here = tuple(sizes[:dims])
            local = None if kind == BYTES else whole_local_tensor(planner.state_dict[name], here)
            if local is None or local.dtype is not dtype:
                self.add(items.make(position))
                continue
            check_allocated(name, local)
            key = _region_key(name, shape[:dims], offsets[:dims], here)
            nbytes = math.prod(here) * dtype.itemsize
            self._append(key, dtype, here, nbytes, local)

    def _append(
        self,
        key: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        nbytes: int,
        source: torch.Tensor | memoryview | Callable[[], torch.Tensor | memoryview],
    ) -> None:
        # The manifest does not rely on keys, so any that is not taken will do.
        while key in self._keys:
            key += "#"
        self._keys.add(key)
        self.contents.append(Content(key, dtype, shape, nbytes, source))
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


def _region_key(
    fqn: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> str:
    """The FQN, with the region appended when it is not the whole tensor."""
    if tuple(sizes) == tuple(shape):
        return fqn
    region = ",".join(
        f"{offset}:{offset + size}" for offset, size in zip(offsets, sizes, strict=True)
    )
    return f"{fqn}[{region}]"


# Reading


class ShardFiles:
    """The shard files of a checkpoint, opened as they are needed, and not too many at once."""

    def __init__(self, store: Store, manifest: Manifest, verify: Verify) -> None:
        self.store = store
        self.manifest = manifest
        self.verify = verify
        self.readers: dict[str, Reader] = {}
        self._sizes: dict[str, int] = {}
        self._files = OpenFiles(self._open, most_open_files())

    def open(self, file_id: int) -> str:
        """Make sure, once, that a file is the one that was written; from then on it can be read."""
        path = self.manifest.files[file_id]
        if path not in self.readers:
            self._sizes[path] = int(self.manifest.file_sizes[file_id])
            reader = self._files.reader(path)
            self._check_header(file_id, path, reader)
            self.readers[path] = reader
        return path

    def _open(self, path: str) -> Reader:
        where = self.store.location
        try:
            reader = self.store.open_reader(path)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                f"the checkpoint at {where} lacks its file {path!r}. If it was overwritten "
                "meanwhile, load it again"
            ) from error
        except OSError as error:
            raise CorruptCheckpointError(
                f"the file {path!r} of the checkpoint at {where} cannot be opened: {error}"
            ) from error
        found, expected = reader.nbytes, self._sizes[path]
        if found != expected:
            reader.close()
            raise CorruptCheckpointError(
                f"{path!r} of the checkpoint at {where} has {found} bytes; {expected} were written"
            )
        return reader

    def _check_header(self, file_id: int, path: str, reader: Reader) -> None:
        """Compare the header with its checksum, whatever is verified of the data.

        It tells the file of this save from one of another save that has the same layout.
        """
        nbytes = int(self.manifest.header_sizes[file_id])
        hasher = Hasher()
        for begin in range(0, nbytes, _HEADER_PIECE_BYTES):
            piece = bytearray(min(_HEADER_PIECE_BYTES, nbytes - begin))
            reader.read_into(begin, [memoryview(piece)])
            hasher.update(piece)
        found = hasher.intdigest()
        expected = int(self.manifest.header_checksums[file_id]) & (1 << 64) - 1
        if found == expected:
            return
        where = f"{path!r} of the checkpoint at {self.store.location}"
        ours, theirs = self.manifest.notes.get("save_id"), self._save_id_in(reader, nbytes)
        if ours and theirs and ours != theirs:
            raise CorruptCheckpointError(
                f"{where} belongs to another save (id {theirs} instead of {ours}): it was copied "
                "in from another checkpoint. Put the original file back, or load another "
                "checkpoint"
            )
        raise CorruptCheckpointError(
            f"the header of {where} is damaged: its checksum is {found:016x}, it should be "
            f"{expected:016x}. Load another checkpoint"
        )

    def _save_id_in(self, reader: Reader, nbytes: int) -> str | None:
        """Which save a shard file says that it is of, if its header is sound."""
        if nbytes > _MOST_EXPLAINED_BYTES:
            return None
        head = bytearray(nbytes)
        reader.read_into(0, [memoryview(head)] if nbytes else [])
        try:
            _, notes, _ = parse_header(memoryview(head), reader.nbytes, "the file")
        except CorruptCheckpointError:
            return None
        return notes.get("save_id")

    def read_value(self, name: str, row: int) -> bytes:
        """A stored value, whose file was opened."""
        m = self.manifest
        path = m.files[int(m.value_files[row])]
        return read_bytes(
            self.readers[path],
            name,
            int(m.value_begins[row]),
            int(m.value_nbytes[row]),
            int(m.value_checksums[row]),
            self.verify,
            f"{path!r} of {self.store.location}",
        )

    def close(self) -> None:
        self._files.close()


def _commit(planner: LoadPlanner, item: ReadItem, tensor: torch.Tensor) -> None:
    with _note_on_error(f"loading {item.dest_index.fqn!r}"):
        planner.commit_tensor(item, tensor)


Values = list[tuple[ReadItem, int]]
"""Values to read: each with its row in the manifest."""


def requests_of(
    items: Sequence[ReadItem], planner: LoadPlanner, files: ShardFiles, table: StorageTable
) -> tuple[list[Request], Values]:
    """What to read for each item; all files that are needed are checked afterwards."""
    with paused_collection():
        found = _Requests(planner, files, table)
        traits = load_traits(planner)
        if traits.fills_by_itself and isinstance(items, ReadItems) and items.untouched:
            found.add_rows(items, planner)
        else:
            for item in items:
                found.add(item)
        if traits.is_default:
            _count_changes(found.requests, planner)
    return found.requests, found.values


def _count_changes(requests: Sequence[Request], planner: Any) -> None:
    """Tell autograd about DTensors and the like, whose local tensors are what is filled."""
    state_dict = getattr(planner, "state_dict", {})
    values = (state_dict.get(name) for name in {request.into for request in requests})
    increment_version(
        [value for value in values if isinstance(value, torch.Tensor) and not is_plain(value)]
    )


class _Requests:
    def __init__(self, planner: LoadPlanner, files: ShardFiles, table: StorageTable) -> None:
        self.requests: list[Request] = []
        self.values: Values = []
        self._planner = planner
        self._files = files
        self._table = table
        self._plain = load_traits(planner).fills_in_place

    def add(self, item: ReadItem) -> None:
        name, m = item.storage_index.fqn, self._table.manifest
        if item.type is LoadItemType.BYTE_IO:
            row = self._table.value_rows[name]
            self._files.open(int(m.value_files[row]))
            self.values.append((item, row))
            return
        row = self._table.chunk_row(item.storage_index)
        with _note_on_error(f"loading {item.dest_index.fqn!r}"):
            tensor = self._planner.resolve_tensor(item)
        if tensor.shape != item.lengths:
            raise ValueError(
                f"resolve_tensor returned a tensor of shape {tuple(tensor.shape)} for "
                f"{item.dest_index.fqn!r}, to be filled with {tuple(item.lengths)}"
            )
        check_allocated(item.dest_index.fqn, tensor)
        self.requests.append(
            Request(
                name=name,
                file=self._files.open(int(m.chunk_files[row])),
                begin=int(m.chunk_begins[row]),
                chunk_shape=tuple(m.chunk_sizes[row, : len(item.lengths)].tolist()),
                dtype=self._table.dtype_of(name),
                checksum=int(m.chunk_checksums[row]),
                offsets=item.storage_offsets,
                lengths=item.lengths,
                target=tensor.detach(),
                into=item.dest_index.fqn,
                done=None if self._plain else partial(_commit, self._planner, item, tensor),
            )
        )

    def add_rows(self, items: ReadItems, planner: Any) -> None:
        """The same for many items at once, of which most fill a whole local tensor."""
        base, table, m = items.base, self._table, self._table.manifest
        firsts = np.array([table.first_chunk(name) for name in base.names], dtype=np.int64)
        rows = firsts[base.storage_names] + base.storage_hints
        rows[base.is_value > 0] = 0
        width = min(base.regions.shape[2], m.chunk_offsets.shape[1])
        sound = (rows >= 0) & (rows < len(m.chunk_offsets)) & (base.storage_hints >= 0)
        rows = np.where(sound, rows, 0)
        if len(m.chunk_offsets):
            # The row is only a hint until the offsets agree.
            sound &= (m.chunk_offsets[rows, :width] == base.regions[:, 2, :width]).all(axis=1)
            chunks = m.chunk_files[rows], m.chunk_begins[rows], m.chunk_checksums[rows]
            shapes = m.chunk_sizes[rows]
        else:
            chunks, shapes = (rows, rows, rows), rows[:, None]
        paths: dict[int, str] = {}
        columns = zip(
            range(len(rows)),
            sound.tolist(),
            base.dest_names.tolist(),
            base.storage_names.tolist(),
            base.ndims.tolist(),
            base.regions[:, 3].tolist(),
            base.regions[:, 4].tolist(),
            *(column.tolist() for column in chunks),
            shapes.tolist(),
            strict=True,
        )
        for i, known, dest, stored, dims, offsets, lengths, file, begin, digest, shape in columns:
            here = tuple(lengths[:dims])
            target = None
            if known:
                target = whole_local_tensor(planner.state_dict[base.names[dest]], here)
            if target is None:
                self.add(items.make(i))
                continue
            check_allocated(base.names[dest], target)
            if file not in paths:
                paths[file] = self._files.open(file)
            name, chunk = base.names[stored], tuple(shape[:dims])
            self.requests.append(
                Request(
                    name,
                    paths[file],
                    begin,
                    here if chunk == here else chunk,
                    table.dtype_of(name),
                    digest,
                    tuple(offsets[:dims]),
                    here,
                    target,
                    base.names[dest],
                )
            )

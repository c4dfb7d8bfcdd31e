"""Checkpoints in a directory: shard files, and a manifest whose appearance is the commit."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import logging
import math
import os
import platform
import re
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.futures import Future

from reshard.api import (
    CheckpointException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PlanError,
    UnsupportedFormatError,
)
from reshard.columnar import read_columns
from reshard.contents import (
    Placement,
    StorageTable,
    WriteResults,
    WrittenFile,
    merge_planner_data,
    to_manifest,
    to_metadata,
)
from reshard.default_planner import DefaultLoadPlanner
from reshard.engine.reading import Request, Verify, read_bytes, read_regions
from reshard.engine.workers import default_threads
from reshard.engine.writing import Content, write_file
from reshard.format.manifest import (
    VERSION,
    Manifest,
    check_manifest,
    decode_manifest,
    encode_manifest,
)
from reshard.format.merging import merge_manifests
from reshard.format.values import MAGIC, decode_value, is_pickled
from reshard.metadata import Metadata, StorageMeta
from reshard.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from reshard.storage import StorageInfo, StorageReader, StorageWriter, WriteResult
from reshard.stores.local import LocalStore
from reshard.stores.protocol import Reader, Store

__all__ = ["FileSystemReader", "FileSystemWriter", "StorageInfo"]

logger = logging.getLogger(__name__)

MANIFEST = ".metadata"
_SHARD_FILE = re.compile(r"__(\d+)_(\d+)\.safetensors")
_PART = re.compile(r"\.metadata\.(\d{1,9})-of-(\d{1,9})\.(\d{1,9})")
_DRAFT = re.compile(r"\.metadata(\.\d+-of-\d+\.\d+)?\.\d+\.draft")
_UNSEEN_SECONDS = 10.0

_StorageInfo = StorageInfo


class FileSystemWriter(StorageWriter):
    """Writes a checkpoint into a directory.

    Each rank writes its own shard files; `finish` publishes the manifest. An older
    checkpoint in the same directory stays whole and visible until then. With
    `sync_files`, everything is durable before it becomes visible.

    `thread_count` 0 chooses by the number of cores. `per_thread_copy_ahead` and
    `serialization_format` are accepted and have no effect.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 0,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
    ) -> None:
        if _extensions:
            raise ValueError("stream extensions are not supported: the format has its own layout")
        self.path = Path(path)
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.cache_staged_state_dict = cache_staged_state_dict
        self.overwrite = overwrite
        self.serialization_format = serialization_format
        self.is_coordinator = False
        self.rank = 0
        self.world_size = 1
        self.use_collectives = True
        self.save_id = str(uuid.uuid4())
        self._unclaimed: list[str] = []

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is written to."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_local(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator
        self.rank = kwargs.get("rank") or 0
        self.world_size = kwargs.get("world_size") or 1
        self.use_collectives = kwargs.get("use_collectives", True)

    def open_store(self) -> Store:
        """Where the bytes go. Made to be overridden."""
        return LocalStore(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        store = self.open_store()
        store.create()
        if not self.overwrite and MANIFEST in store.list():
            raise CheckpointException(
                f"there is a checkpoint at {store.location} already, and overwrite=False"
            )
        if not self.use_collectives:
            return dataclasses.replace(plan, storage_data=self._file_prefix(store, self.rank))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not self.use_collectives:
            return plans
        prefix = self._file_prefix(self.open_store(), None)
        return [
            dataclasses.replace(plan, storage_data=prefix.format(rank=rank))
            for rank, plan in enumerate(plans)
        ]

    def _file_prefix(self, store: Store, rank: int | None) -> str:
        """The beginning of new file names: none that an older checkpoint here may use."""
        taken = [
            int(match[2])
            for match in map(_SHARD_FILE.fullmatch, store.list())
            if match and rank in (None, int(match[1]))
        ]
        first = max(taken, default=-1) + 1
        return f"__{{rank}}_{first}" if rank is None else f"__{rank}_{first}"

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[Any] = Future()
        future.set_result(self._write(plan, planner))
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> WriteResults:
        store = self.open_store()
        self._unclaimed = []
        items = plan.items
        prefix, _, first = str(plan.storage_data or f"__{self.rank}_0").rpartition("_")
        contents, pickled = _contents(items, planner)
        groups = [list(range(len(contents)))]
        if not self.single_file_per_rank:
            groups = [[i] for i in range(len(contents))]
        placement = Placement(
            files=[],
            file_ids=np.zeros(len(contents), dtype=np.int64),
            begins=np.zeros(len(contents), dtype=np.int64),
            nbytes=np.array([content.nbytes for content in contents], dtype=np.int64),
            checksums=np.zeros(len(contents), dtype=np.int64),
            pickled=np.array(pickled, dtype=np.int64),
        )
        # At least two: while one waits for the disk, the other copies and hashes.
        threads = self.thread_count or max(2, default_threads())
        for number, group in enumerate(groups if contents else []):
            key = f"{prefix}_{int(first) + number}.safetensors"
            self._unclaimed.append(key)
            written = write_file(
                store, key, [contents[i] for i in group], threads, durable=self.sync_files
            )
            placement.files.append(
                WrittenFile(key, written.file_bytes, written.header_bytes, written.header_checksum)
            )
            placement.file_ids[group] = number
            placement.begins[group] = written.begins
            placement.checksums[group] = written.checksums
        return WriteResults(items, placement)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        store = self.open_store()
        notes = {
            "writer": f"reshard, torch {torch.__version__}, python {platform.python_version()}",
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "save_id": self.save_id,
            "world_size": str(self.world_size if not self.use_collectives else len(results)),
        }
        manifest = to_manifest(metadata, results, notes)
        encoded = encode_manifest(manifest)
        self._check_visible(store, manifest)
        before = store.list()
        if self.sync_files:
            store.sync()
        if self.use_collectives:
            store.commit(MANIFEST, encoded)
            _remove_debris(store, before, manifest)
        else:
            generation = _newest_generation(store) + 1
            store.commit(f"{MANIFEST}.{self.rank}-of-{self.world_size}.{generation}", encoded)
        metadata.storage_data = StorageTable(manifest)
        metadata.storage_meta = self.storage_meta()
        metadata.version = str(VERSION)

    def retire_older(self) -> None:
        """Remove an older checkpoint, now that the parts of all ranks are there."""
        store = self.open_store()
        parts = _complete_parts(store)
        used = {path for part in parts for path in _read_one_manifest(store, part).files}
        # This is the commit: as long as there is a manifest, it counts.
        store.delete(MANIFEST)
        _delete_quietly(
            store,
            [key for key in store.list() if key not in used and key not in parts and _is_ours(key)],
        )

    def discard(self) -> None:
        """Remove the shard files of a save that failed, unless it was committed all the same."""
        store = self.open_store()
        if not self._unclaimed:
            return
        try:
            claimed = set(read_manifest(store).files)
        except CheckpointNotFoundError:
            claimed = set()
        _delete_quietly(store, [key for key in self._unclaimed if key not in claimed])
        self._unclaimed = []

    def _check_visible(self, store: Store, manifest: Manifest) -> None:
        """Files that another rank wrote must be here too, or the place is not shared."""
        give_up = time.monotonic() + _UNSEEN_SECONDS
        for path, size in zip(manifest.files, manifest.file_sizes.tolist(), strict=True):
            while True:
                try:
                    reader = store.open_reader(path)
                    break
                except FileNotFoundError as error:
                    # A network file system may take a moment to show a new name.
                    if time.monotonic() > give_up:
                        raise CheckpointException(
                            f"{path!r} was written by another rank, but is not at "
                            f"{store.location} as rank {self.rank} sees it: all ranks must write "
                            "to a file system that they share"
                        ) from error
                    time.sleep(0.1)
            found = reader.nbytes
            reader.close()
            if found != size:
                raise CorruptCheckpointError(
                    f"{path!r} at {store.location} has {found} bytes, although {size} were written"
                )


def _remove_debris(store: Store, before: Sequence[str], manifest: Manifest) -> None:
    """Delete shard files and drafts that no manifest refers to, now that the new one is there."""
    used = {MANIFEST, *manifest.files}
    _delete_quietly(store, [key for key in before if key not in used and _is_ours(key)])


def _is_ours(key: str) -> bool:
    return any(pattern.fullmatch(key) for pattern in (_SHARD_FILE, _DRAFT, _PART))


def _delete_quietly(store: Store, keys: Sequence[str]) -> None:
    """Delete what nobody needs. That it cannot be done is no reason for a save to fail."""
    for key in keys:
        try:
            store.delete(key)
        except OSError as error:
            logger.warning("could not remove %r from %s: %s", key, store.location, error)


def _contents(items: Sequence[WriteItem], planner: SavePlanner) -> tuple[list[Content], list[bool]]:
    """What to write for each item, and whether it is a pickle."""
    contents, pickled = [], []
    keys: set[str] = {"__metadata__"}
    for item in items:
        if item.type is WriteItemType.BYTE_IO:
            view = _value_bytes(planner, item)
            key, nbytes = _unique(item.index.fqn, keys), len(view)
            contents.append(Content(key, torch.uint8, (nbytes,), nbytes, partial(_same, view)))
            pickled.append(is_pickled(view))
            continue
        if item.tensor_data is None:
            raise PlanError(f"the write item of {item.index.fqn!r} has no tensor_data")
        chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
        key = _unique(_region_key(item), keys)
        nbytes = math.prod(chunk.sizes) * dtype.itemsize
        contents.append(Content(key, dtype, chunk.sizes, nbytes, partial(_resolve, planner, item)))
        pickled.append(False)
    return contents, pickled


def _value_bytes(planner: SavePlanner, item: WriteItem) -> memoryview:
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise TypeError(
            f"resolve_data returned a {type(data).__name__} for {item.index.fqn!r}, which is "
            "planned as a value: return a BytesIO"
        )
    return data.getbuffer()


def _same(view: memoryview) -> memoryview:
    return view


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """The tensor of an item, as its plan announced it."""
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
    return tensor if tensor.dtype is data.properties.dtype else tensor.to(data.properties.dtype)


def _region_key(item: WriteItem) -> str:
    """The FQN, with the region appended when it is not the whole tensor."""
    data = item.tensor_data
    if data is None or tuple(data.chunk.sizes) == tuple(data.size):
        return item.index.fqn
    region = ",".join(
        f"{offset}:{offset + size}"
        for offset, size in zip(data.chunk.offsets, data.chunk.sizes, strict=True)
    )
    return f"{item.index.fqn}[{region}]"


def _unique(key: str, keys: set[str]) -> str:
    """A key that the file does not have yet. The manifest does not rely on keys."""
    while key in keys:
        key += "#"
    keys.add(key)
    return key


class FileSystemReader(StorageReader):
    """Reads a checkpoint from a directory.

    `verify` says which chunks are checked against their checksums: `"chunks"` those that
    are read whole, `"full"` all that are touched, `"off"` none.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        verify: str = "chunks",
        allow_pickle: bool = False,
        thread_count: int = 0,
    ) -> None:
        self.path = Path(path)
        self.verify = Verify(verify)
        self.allow_pickle = allow_pickle
        self.thread_count = thread_count
        self.storage_data: Any = None
        self.load_id = str(uuid.uuid4())
        self.bytes_read = 0

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is read from."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_local(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.storage_data = None
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def open_store(self) -> Store:
        """Where the bytes come from. Made to be overridden."""
        return LocalStore(self.path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        store = self.open_store()
        manifest = read_manifest(store)
        metadata = to_metadata(manifest, store.location, self.allow_pickle)
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id,
            save_id=manifest.notes.get("save_id"),
            load_id=self.load_id,
        )
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self.storage_data = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        if not self.allow_pickle and isinstance(self.storage_data, StorageTable):
            self._refuse_pickles(plan)
        return plan

    def _refuse_pickles(self, plan: LoadPlan) -> None:
        """Say so before anything is loaded, not when the turn of the value comes."""
        m = self.storage_data.manifest
        pickled = {m.value_names[row] for row in np.flatnonzero(m.value_pickled).tolist()}
        if not pickled:
            return
        columns = read_columns(plan.items)
        for row in np.flatnonzero(columns.is_value).tolist():
            name = columns.names[columns.storage_names[row]]
            if name in pickled:
                with contextlib.closing(_Files(self.open_store(), m, self.verify)) as files:
                    files.open(int(m.value_files[self.storage_data.value_rows[name]]))
                    data = self._read_value(name, self.storage_data.value_rows[name], files)
                decode_value(data, name, allow_pickle=False)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._read(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        files = _Files(self.open_store(), self.storage_data.manifest, self.verify)
        try:
            requests, values = self._requests(plan.items, planner, files)
            threads = self.thread_count or default_threads()
            where = files.store.location
            self.bytes_read += read_regions(files.readers, requests, self.verify, threads, where)
            for item, row in values:
                data = self._read_value(item.storage_index.fqn, row, files)
                planner.load_bytes(item, self._as_expected(planner, item.storage_index.fqn, data))
                self.bytes_read += len(data)
        finally:
            files.close()

    def _requests(
        self, items: Sequence[ReadItem], planner: LoadPlanner, files: _Files
    ) -> tuple[list[Request], list[tuple[ReadItem, int]]]:
        """What to read for each item; all files that are needed are open afterwards."""
        table: StorageTable = self.storage_data
        m = table.manifest
        plain = isinstance(planner, DefaultLoadPlanner) and planner.fills_in_place()
        requests: list[Request] = []
        values: list[tuple[ReadItem, int]] = []
        for item in items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                row = table.value_rows[name]
                files.open(int(m.value_files[row]))
                values.append((item, row))
                continue
            row = table.chunk_row(item.storage_index)
            tensor = planner.resolve_tensor(item)
            if tensor.shape != item.lengths:
                raise ValueError(
                    f"resolve_tensor returned a tensor of shape {tuple(tensor.shape)} for "
                    f"{item.dest_index.fqn!r}, to be filled with {tuple(item.lengths)}"
                )
            requests.append(
                Request(
                    name=name,
                    file=files.open(int(m.chunk_files[row])),
                    begin=int(m.chunk_begins[row]),
                    chunk_shape=tuple(m.chunk_sizes[row, : len(item.lengths)].tolist()),
                    dtype=table.dtype_of(name),
                    checksum=int(m.chunk_checksums[row]),
                    offsets=item.storage_offsets,
                    lengths=item.lengths,
                    target=tensor.detach(),
                    done=None if plain else partial(planner.commit_tensor, item, tensor),
                )
            )
        return requests, values

    def _read_value(self, name: str, row: int, files: _Files) -> bytes:
        m = files.manifest
        path = m.files[int(m.value_files[row])]
        return read_bytes(
            files.readers[path],
            name,
            int(m.value_begins[row]),
            int(m.value_nbytes[row]),
            int(m.value_checksums[row]),
            self.verify,
            f"{path!r} of {files.store.location}",
        )

    def _as_expected(self, planner: LoadPlanner, fqn: str, data: bytes) -> io.BytesIO:
        """A stored value for `load_bytes`, which planners in use take for a torch.save file."""
        own = getattr(type(planner), "load_bytes", None) is DefaultLoadPlanner.load_bytes
        if own or data[: len(MAGIC)] != MAGIC:
            return io.BytesIO(data)
        translated = io.BytesIO()
        torch.save(decode_value(data, fqn, self.allow_pickle), translated)
        translated.seek(0)
        return translated


class _Files:
    """The shard files of a checkpoint, opened as they are needed."""

    def __init__(self, store: Store, manifest: Manifest, verify: Verify) -> None:
        self.store = store
        self.manifest = manifest
        self.verify = verify
        self.readers: dict[str, Reader] = {}

    def open(self, file_id: int) -> str:
        """Open a file, once, and make sure that it is the one that was written."""
        path = self.manifest.files[file_id]
        if path in self.readers:
            return path
        where = self.store.location
        try:
            self.readers[path] = self.store.open_reader(path)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                f"the checkpoint at {where} lacks its file {path!r}"
            ) from error
        except OSError as error:
            raise CorruptCheckpointError(
                f"the file {path!r} of the checkpoint at {where} cannot be opened: {error}"
            ) from error
        found, expected = self.readers[path].nbytes, int(self.manifest.file_sizes[file_id])
        if found != expected:
            raise CorruptCheckpointError(
                f"{path!r} of the checkpoint at {where} has {found} bytes; {expected} were written"
            )
        if self.verify is not Verify.OFF:
            read_bytes(
                self.readers[path],
                "the header",
                0,
                int(self.manifest.header_sizes[file_id]),
                int(self.manifest.header_checksums[file_id]),
                self.verify,
                f"{path!r} of {where}",
            )
        return path

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()


def read_manifest(store: Store) -> Manifest:
    """The manifest of the checkpoint in `store`, or that of all its parts."""
    try:
        return _read_one_manifest(store, MANIFEST)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            raise CheckpointNotFoundError(
                f"the manifest at {store.location} cannot be read: {error}"
            ) from error
        parts = _complete_parts(store)
        if not parts:
            raise CheckpointNotFoundError(_describe_absence(store)) from error
    manifests = [_read_one_manifest(store, part) for part in parts]
    merged = merge_manifests(manifests, store.location)
    paths = merge_planner_data([part.planner_data for part in manifests], store.location)
    merged = dataclasses.replace(merged, planner_data=paths)
    # Names that share memory on some ranks only have the same bytes there.
    check_manifest(merged, store.location, shared_bytes=True)
    return merged


def _part_sets(store: Store) -> dict[tuple[int, int], dict[int, str]]:
    """The parts that ranks wrote without each other, by generation and number of ranks."""
    found: dict[tuple[int, int], dict[int, str]] = {}
    for key in store.list():
        match = _PART.fullmatch(key)
        if match and int(match[1]) < int(match[2]):
            found.setdefault((int(match[3]), int(match[2])), {})[int(match[1])] = key
    return found


def _newest_generation(store: Store) -> int:
    """The newest generation of which all parts are there; -1 if there is none.

    Ranks find it for themselves. A generation is only complete with the part of the rank
    that asks, so all of them find the same, whoever is faster.
    """
    complete = [g for (g, world), parts in _part_sets(store).items() if len(parts) == world]
    return max(complete, default=-1)


def _complete_parts(store: Store) -> list[str]:
    """The parts of the newest generation, if all of one are there."""
    sets = _part_sets(store)
    complete = [kind for kind, parts in sets.items() if len(parts) == kind[1]]
    if complete:
        newest = max(complete)
        if sum(generation == newest[0] for generation, _ in complete) > 1:
            raise CorruptCheckpointError(
                f"{store.location} holds two checkpoints of one generation that were saved without "
                "collectives, by different numbers of ranks; delete the parts of one"
            )
        return [sets[newest][rank] for rank in range(newest[1])]
    if sets:
        (_, world), parts = max(sets.items())
        missing = next(rank for rank in itertools.count() if rank not in parts)
        raise CheckpointNotFoundError(
            f"the checkpoint at {store.location} is not complete: of {world} ranks, "
            f"{world - len(parts)} did not finish, rank {missing} among them"
        )
    return []


def _read_one_manifest(store: Store, key: str) -> Manifest:
    reader = store.open_reader(key)
    try:
        data = bytearray(reader.nbytes)
        reader.read_into(0, [memoryview(data)] if data else [])
    finally:
        reader.close()
    if data[:1] == b"\x80":
        raise UnsupportedFormatError(
            f"the checkpoint at {store.location} was written by torch.distributed.checkpoint; "
            "load it with that, and save it with reshard"
        )
    return decode_manifest(memoryview(data), f"{key} of {store.location}")


def _describe_absence(store: Store) -> str:
    keys = store.list()
    if not keys:
        return f"there is no checkpoint at {store.location}"
    if any(_SHARD_FILE.fullmatch(key) for key in keys):
        return (
            f"the checkpoint at {store.location} was never committed: it has shard files but no "
            f"{MANIFEST}. A save that was cut off leaves these; load an older checkpoint"
        )
    return f"there is no checkpoint at {store.location}: it has no {MANIFEST}"


def _is_local(checkpoint_id: str | os.PathLike[str]) -> bool:
    return isinstance(checkpoint_id, os.PathLike) or "://" not in checkpoint_id

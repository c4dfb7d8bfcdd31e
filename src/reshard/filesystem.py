"""Checkpoints in a directory: shard files, and a manifest whose appearance is the commit."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.futures import Future

from reshard.api import (
    CheckpointException,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    _noting,
)
from reshard.checkpoint_files import (
    MANIFEST,
    complete_parts,
    delete_quietly,
    file_prefix,
    has_checkpoint,
    is_ours,
    next_generation,
    read_manifest,
    read_one_manifest,
    remove_debris,
)
from reshard.columnar.reads import read_columns
from reshard.contents import (
    Placement,
    StorageTable,
    WriteResults,
    WrittenFile,
    to_manifest,
    to_metadata,
)
from reshard.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from reshard.engine.collector import paused_collection
from reshard.engine.reading import Request, Verify, read_regions
from reshard.engine.workers import default_threads
from reshard.engine.writing import write_file
from reshard.format.manifest import (
    VERSION,
    Manifest,
    encode_manifest,
)
from reshard.format.values import MAGIC, decode_value
from reshard.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from reshard.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from reshard.progress import watched
from reshard.staging import BlockingAsyncStager
from reshard.storage import StorageInfo, StorageReader, StorageWriter, WriteResult
from reshard.stores.local import LocalStore
from reshard.stores.protocol import Store
from reshard.transfers import ShardFiles, Values, contents_of, fills_by_itself, requests_of

__all__ = ["FileSystemReader", "FileSystemWriter", "StorageInfo"]

logger = logging.getLogger(__name__)

_UNSEEN_SECONDS = 10.0

CURRENT_DCP_VERSION = str(VERSION)
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
        self.generation: int | None = None
        """Of a save without collectives: what all ranks number their parts with."""
        self._unclaimed: list[str] = []
        self._stager = BlockingAsyncStager(cache_staged_state_dict)

    _synchronize_after_execute = False

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process stages nothing.
        stager = BlockingAsyncStager(self.cache_staged_state_dict)
        return vars(self) | {"_stager": stager}

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
        self.generation = None

    def next_generation(self) -> int:
        """What the parts of the next save without collectives may be numbered with."""
        store = self.open_store()
        store.create()
        return next_generation(store)

    def open_store(self) -> Store:
        """Where the bytes go. Made to be overridden."""
        return LocalStore(self.path)

    # As a stager: what `async_save` asks if it is given no other.

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """A copy of `state_dict` in the staging memory of the process."""
        return self._stager.stage(state_dict)  # type: ignore[return-value]

    def synchronize_staging(self) -> None:
        """Nothing to do: `stage` copies before it returns."""

    def close(self) -> None:
        """Let go of what was staged last."""
        self._stager.close()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        store = self.open_store()
        store.create()
        if not self.overwrite and has_checkpoint(store):
            raise CheckpointExistsError(
                f"Checkpoint already exists at {store.location}, and overwrite=False"
            )
        if not self.use_collectives:
            return dataclasses.replace(plan, storage_data=file_prefix(store, self.rank))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not self.use_collectives:
            return plans
        prefix = file_prefix(self.open_store(), None)
        return [
            dataclasses.replace(plan, storage_data=prefix.format(rank=rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[Any] = Future()
        future.set_result(self._write(plan, planner))
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> WriteResults:
        store = self.open_store()
        self._unclaimed = []
        items = plan.items
        prefix, _, first = str(plan.storage_data or f"__{self.rank}_0").rpartition("_")
        contents, pickled = contents_of(items, planner)
        if any(pickled):
            keys = [
                content.key for content, is_one in zip(contents, pickled, strict=True) if is_one
            ]
            logger.warning(
                "%d values at %s can only be stored as pickles, which a load reads with "
                "allow_pickle=True: %s",
                len(keys),
                store.location,
                ", ".join(keys[:5]),
            )
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
        # At least two: while one waits for the disk, the other copies and hashes. But a planner
        # of the user's need not know about threads.
        own = isinstance(planner, DefaultSavePlanner) and planner.keeps_values()
        threads = self.thread_count or (max(2, default_threads()) if own else 1)
        total_bytes = int(placement.nbytes.sum())
        with watched(f"saving {store.location}", total_bytes, self.is_coordinator) as progress:
            for number, group in enumerate(groups if contents else []):
                key = f"{prefix}_{int(first) + number}.safetensors"
                self._unclaimed.append(key)
                some = [contents[i] for i in group]
                written = write_file(store, key, some, threads, self.sync_files, progress.advance)
                placement.files.append(
                    WrittenFile(
                        key, written.file_bytes, written.header_bytes, written.header_checksum
                    )
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
        with paused_collection():
            manifest = to_manifest(metadata, results, notes)
        encoded = encode_manifest(manifest)
        self._check_visible(store, manifest)
        before = store.list()
        if self.sync_files:
            store.sync()
        if self.use_collectives:
            store.commit(MANIFEST, encoded)
            remove_debris(store, before, manifest)
        else:
            generation = next_generation(store) if self.generation is None else self.generation
            part = f"{MANIFEST}.{self.rank}-of-{self.world_size}.{generation}"
            store.commit(part, encoded)
            self._unclaimed.append(part)
        metadata.storage_data = StorageTable(manifest)
        metadata.storage_meta = self.storage_meta()
        metadata.version = CURRENT_DCP_VERSION

    def retire_older(self) -> None:
        """Remove an older checkpoint, now that the parts of all ranks are there."""
        store = self.open_store()
        parts = complete_parts(store)
        used = {path for part in parts for path in read_one_manifest(store, part).files}
        # This is the commit: as long as there is a manifest, it counts.
        store.delete(MANIFEST)
        delete_quietly(
            store,
            [key for key in store.list() if key not in used and key not in parts and is_ours(key)],
        )

    def discard(self) -> None:
        """Remove the shard files of a save that failed, unless it was committed all the same."""
        store = self.open_store()
        if not self._unclaimed:
            return
        claimed: set[str] = set()
        # Without a checkpoint, there is nothing that could claim them.
        with contextlib.suppress(CheckpointNotFoundError):
            claimed |= set(read_manifest(store).files)
        with contextlib.suppress(CheckpointNotFoundError):
            claimed |= set(complete_parts(store))
        delete_quietly(store, [key for key in self._unclaimed if key not in claimed])
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
        self._table: StorageTable | None = None
        self.is_coordinator = False
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
        with paused_collection():
            metadata = to_metadata(manifest, store.location, self.allow_pickle)
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id,
            save_id=manifest.notes.get("save_id"),
            load_id=self.load_id,
        )
        self._table = metadata.storage_data
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        given, own = metadata.storage_data, self._table
        if not isinstance(given, StorageTable) and given is not None:
            if own is None or dict(own) != dict(given):
                raise CheckpointException(
                    f"{type(self).__name__} got storage_data that it did not make: hand on what "
                    "read_metadata of the base class returned. To load under other names, pass "
                    "rename to load"
                )
            given = own
        self.storage_data = given
        self.is_coordinator = is_coordinator

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
                decode_value(self.read_values([name])[name], name, allow_pickle=False)

    def read_values(self, names: Sequence[str]) -> dict[str, bytes]:
        """Stored values, which are to be looked at before the load."""
        manifest, rows = self.storage_data.manifest, self.storage_data.value_rows
        found = {}
        with contextlib.closing(ShardFiles(self.open_store(), manifest, self.verify)) as files:
            for name in names:
                files.open(int(manifest.value_files[rows[name]]))
                found[name] = files.read_value(name, rows[name])
        return found

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._read(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        files = ShardFiles(self.open_store(), self.storage_data.manifest, self.verify)
        with contextlib.closing(files):
            if not fills_by_itself(planner):
                # One after the other, in this thread: a planner of the user's may make the memory
                # of a tensor when it is its turn, and need not know about threads.
                for item in plan.items:
                    requests, values = requests_of([item], planner, files, self.storage_data)
                    self._read_tensors(requests, files, 1)
                    self._read_values(values, planner, files)
                return
            requests, values = requests_of(plan.items, planner, files, self.storage_data)
            wanted_bytes = sum(request.nbytes for request in requests)
            what = f"loading {files.store.location}"
            with watched(what, wanted_bytes, self.is_coordinator) as progress:
                threads = self.thread_count or default_threads()
                self._read_tensors(requests, files, threads, progress.advance)
            self._read_values(values, planner, files)

    def _read_tensors(
        self,
        requests: Sequence[Request],
        files: ShardFiles,
        threads: int,
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        where = files.store.location
        self.bytes_read += read_regions(
            files.readers, requests, self.verify, threads, where, advance
        )

    def _read_values(self, values: Values, planner: LoadPlanner, files: ShardFiles) -> None:
        for item, row in values:
            name = item.storage_index.fqn
            data = files.read_value(name, row)
            with _noting(f"loading {name!r}"):
                planner.load_bytes(item, self._as_expected(planner, name, data))
            self.bytes_read += len(data)

    def _as_expected(self, planner: LoadPlanner, fqn: str, data: bytes) -> io.BytesIO:
        """A stored value for `load_bytes`, which planners in use take for a torch.save file."""
        own = getattr(type(planner), "load_bytes", None) is DefaultLoadPlanner.load_bytes
        if own or data[: len(MAGIC)] != MAGIC:
            return io.BytesIO(data)
        translated = io.BytesIO()
        torch.save(decode_value(data, fqn, self.allow_pickle), translated)
        translated.seek(0)
        return translated


def _is_local(checkpoint_id: str | os.PathLike[str]) -> bool:
    if not isinstance(checkpoint_id, str | os.PathLike):
        raise TypeError(
            f"a checkpoint_id is a path, as text or a pathlib.Path, not {checkpoint_id!r}"
        )
    return isinstance(checkpoint_id, os.PathLike) or "://" not in checkpoint_id

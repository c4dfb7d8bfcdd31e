"""Checkpoints in a directory: shard files, and a manifest whose appearance is the commit."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import platform
import re
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.futures import Future

from reshard.api import (
    CheckpointException,
    CheckpointExistsError,
    CommitConflictError,
    CorruptCheckpointError,
    UnsupportedFormatError,
    _note_on_error,
)
from reshard.checkpoint.contents import (
    StorageTable,
    check_readable,
    to_manifest,
    to_metadata,
)
from reshard.checkpoint.directory import (
    MANIFEST,
    check_parts,
    claim_name,
    delete_quietly,
    has_checkpoint,
    index_of_parts,
    part_name,
    put_new,
    read_manifest,
    read_one_manifest,
    remove_debris,
    shard_name,
)
from reshard.checkpoint.stored_metadata import can_be_read_back, refer_to
from reshard.checkpoint.transfers import (
    ShardFiles,
    Values,
    contents_of,
    requests_of,
)
from reshard.engine.collector import paused_collection
from reshard.engine.progress import watched
from reshard.engine.reading import Request, Verify, read_regions
from reshard.engine.workers import default_threads
from reshard.engine.writing import write_file
from reshard.format.manifest import (
    MANIFEST_LIMIT_BYTES,
    VERSION,
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
from reshard.plans.read_items import read_columns
from reshard.plans.results import Placement, WriteResults, WrittenFile
from reshard.plans.traits import default_step, load_traits, save_traits
from reshard.staging import BlockingAsyncStager
from reshard.storage import StorageInfo, StorageReader, StorageWriter, WriteResult
from reshard.stores.local import LocalStore
from reshard.stores.protocol import Store, VersionConflict

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
        self._claim: str | None = None
        """The file that says that this process is saving; only the coordinator has one."""
        self._replaces: str | None = None
        """The version of the manifest that was there when the save began."""
        self._written: list[str] = []
        self._id_is_used = False
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
        self._renew()

    def _renew(self) -> None:
        self.save_id = str(uuid.uuid4())
        self._claim, self._written, self._id_is_used = None, [], False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator
        self.rank = kwargs.get("rank") or 0
        self.world_size = kwargs.get("world_size") or 1
        self.use_collectives = kwargs.get("use_collectives", True)
        if self._id_is_used:
            # The writer has saved before, and nobody has reset it since.
            self._renew()

    def begin_save(self) -> str:
        """Claim the place for a save, before any file of it is written; the id of the save.

        For the coordinator. Nothing that is there is touched.
        """
        store = self.open_store()
        store.create()
        if self._claim is None:
            self._replaces = store.version(MANIFEST)
            self._check_may_write(store)
            self._id_is_used = True
            self._claim = claim_name(self.save_id)
            # For people who wonder; after a crash of the machine nobody needs it.
            who = f"{socket.gethostname()}, process {os.getpid()}, is saving here\n"
            put_new(store, self._claim, who.encode(), durable=False)
        return self.save_id

    def join_save(self, save_id: str, rank: int) -> None:
        """Take part, as a rank, in a save that the coordinator has begun."""
        self.save_id, self.rank = save_id, rank

    def _check_may_write(self, store: Store) -> None:
        if not self.overwrite and has_checkpoint(store):
            raise CheckpointExistsError(
                f"Checkpoint already exists at {store.location}, and overwrite=False"
            )

    def open_store(self) -> Store:
        """Where the bytes go. Made to be overridden."""
        return LocalStore(self.path)

    def shared_place(self, checkpoint_id: str | os.PathLike[str] | None = None) -> str | None:
        chosen = self.path if checkpoint_id is None else checkpoint_id
        return os.path.abspath(chosen) if chosen and _is_local(chosen) else None

    def reference_to(self, metadata: Metadata) -> str:
        return self.save_id if can_be_read_back(metadata) else ""

    def referenced_metadata(self, reference: str) -> Metadata:
        return refer_to(self.open_store(), reference, self.storage_meta())

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
        self._check_may_write(store)
        if not self.use_collectives:
            return dataclasses.replace(plan, storage_data=_ticket(self.rank, self.save_id))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not self.use_collectives:
            return plans
        save_id = self.begin_save()
        return [
            dataclasses.replace(plan, storage_data=_ticket(rank, save_id))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[Any] = Future()
        future.set_result(self._write(plan, planner))
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> WriteResults:
        store = self.open_store()
        items = plan.items
        # A subclass may have put something else there.
        ticket = _TICKET.fullmatch(str(plan.storage_data))
        rank, save_id, first = ticket.groups() if ticket else (str(self.rank), self.save_id, "0")
        self.save_id, self._id_is_used = save_id, True
        contents, pickled = contents_of(items, planner)
        if any(pickled):
            keys = [
                content.key for content, is_one in zip(contents, pickled, strict=True) if is_one
            ]
            logger.warning(
                "%s at %s stored as %s (load with allow_pickle=True): %s",
                "1 value" if len(keys) == 1 else f"{len(keys)} values",
                f"{store.location} {'is' if len(keys) == 1 else 'are'}",
                "a pickle" if len(keys) == 1 else "pickles",
                ", ".join(map(repr, keys[:5])),
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
        own = save_traits(planner).keeps_values
        threads = self.thread_count or (max(2, default_threads()) if own else 1)
        total_bytes = int(placement.nbytes.sum())
        with watched(f"saving {store.location}", total_bytes, self.is_coordinator) as progress:
            for number, group in enumerate(groups if contents else []):
                key = shard_name(rank, int(first) + number, save_id)
                self._written.append(key)
                some = [contents[i] for i in group]
                try:
                    written = write_file(
                        store, key, some, threads, self.sync_files, progress.advance, save_id
                    )
                except FileNotFoundError as error:
                    if store.list():
                        raise
                    raise _removed(store) from error
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
        if self.use_collectives:
            self.begin_save()
        ranks = len(results) if self.use_collectives else self.world_size
        with paused_collection():
            manifest = to_manifest(metadata, results, self._notes(ranks))
        encoded = encode_manifest(manifest)
        check_readable(encoded, f"the manifest of {store.location}")
        self._check_visible(store, dict(zip(manifest.files, manifest.file_sizes, strict=True)))
        if self.sync_files:
            store.sync()
        if self.use_collectives:
            self._commit(store, encoded, set(manifest.files))
        else:
            part = part_name(self.rank, self.world_size, self.save_id)
            self._written.append(part)
            put_new(store, part, encoded, self.sync_files)
            if self.sync_files:
                store.sync()
        metadata.storage_data = StorageTable(manifest)
        metadata.storage_meta = self.storage_meta()
        metadata.version = CURRENT_DCP_VERSION

    def finish_parts(self) -> None:
        """Commit what all ranks have saved without collectives. For the coordinator."""
        store = self.open_store()
        parts = [part_name(rank, self.world_size, self.save_id) for rank in range(self.world_size)]
        self._check_visible(store, dict.fromkeys(parts))
        index = index_of_parts(self.world_size, self._notes(self.world_size))
        # Ranks that did not plan together may contradict each other.
        check_parts(store, index)
        self._commit(store, encode_manifest(index), set())

    def _notes(self, ranks: int) -> dict[str, str]:
        return {
            "writer": f"reshard, torch {torch.__version__}, python {platform.python_version()}",
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "save_id": self.save_id,
            "world_size": str(ranks),
        }

    def _commit(self, store: Store, manifest: bytes, used: set[str]) -> None:
        """Publish the manifest, and clear up behind it."""
        if self._claim is None:
            raise CheckpointException(f"the save to {store.location} was never begun")
        try:
            version = store.commit(self._claim, MANIFEST, manifest, self._replaces)
        except VersionConflict as conflict:
            raise CommitConflictError(
                f"another save was committed at {store.location} while this one was written. "
                "Nothing of this one is visible; give each job a place of its own"
            ) from conflict
        except FileNotFoundError as error:
            raise _removed(store) from error
        self._claim, self._written = None, []
        remove_debris(store, version, self.save_id, used)

    def discard_save(self) -> None:
        """Remove the files of a save that failed, unless it was committed all the same."""
        # The claim first: without it nothing can be committed any more.
        unneeded = [*([self._claim] if self._claim else []), *self._written]
        self._claim, self._written = None, []
        if unneeded:
            store = self.open_store()
            if not self._is_committed(store):
                delete_quietly(store, unneeded)

    def _is_committed(self, store: Store) -> bool:
        if self.is_coordinator and store.version(MANIFEST) == self._replaces:
            return False
        try:
            return read_one_manifest(store, MANIFEST).notes.get("save_id") == self.save_id
        except (FileNotFoundError, UnsupportedFormatError):
            return False

    def _check_visible(self, store: Store, files: Mapping[str, int | None]) -> None:
        """Files that another rank wrote must be here too, or the place is not shared."""
        give_up = time.monotonic() + _UNSEEN_SECONDS
        for path, size in files.items():
            while True:
                try:
                    reader = store.open_reader(path)
                    break
                except FileNotFoundError as error:
                    if path in self._written or (
                        self._claim is not None and store.version(self._claim) is None
                    ):
                        raise _removed(store) from error
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
            if size is not None and found != size:
                raise CorruptCheckpointError(
                    f"{path!r} at {store.location} has {found} bytes, although {size} were written"
                )


_TICKET = re.compile(r"__(\d+)_([0-9a-f-]+)_(\d+)")


def _ticket(rank: int, save_id: str) -> str:
    """What a rank names its files with, and the number of the first: travels with its plan."""
    return f"__{rank}_{save_id}_0"


def _removed(store: Store) -> CheckpointException:
    return CheckpointException(
        f"files of this save were removed from {store.location} while it was written, or the "
        "whole directory was. Nothing of the save is visible; save again, and find out what "
        "deletes files there"
    )


class FileSystemReader(StorageReader):
    """Reads a checkpoint from a directory.

    `verify` says which chunks are checked against their checksums: `"chunks"` those that
    are read whole, `"full"` all that are touched, `"off"` none. A manifest larger than
    `manifest_limit_bytes` is refused before it is read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        verify: str = "chunks",
        allow_pickle: bool = False,
        thread_count: int = 0,
        manifest_limit_bytes: int = MANIFEST_LIMIT_BYTES,
    ) -> None:
        self.path = Path(path)
        self.manifest_limit_bytes = manifest_limit_bytes
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
        manifest = read_manifest(store, self.manifest_limit_bytes)
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

    @default_step
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
            if not load_traits(planner).fills_by_itself:
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
            with _note_on_error(f"loading {name!r}"):
                planner.load_bytes(item, self._as_expected(planner, name, data))
            self.bytes_read += len(data)

    def _as_expected(self, planner: LoadPlanner, fqn: str, data: bytes) -> io.BytesIO:
        """A stored value for `load_bytes`, which planners in use take for a torch.save file."""
        if load_traits(planner).decodes_values or data[: len(MAGIC)] != MAGIC:
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

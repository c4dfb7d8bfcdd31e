"""Checkpoints in a directory: shard files, and a manifest whose appearance is the commit."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.futures import Future

from reshard.api import CheckpointException
from reshard.checkpoint.bases import Base, base_location, open_base, warn_of_unguarded
from reshard.checkpoint.directory import (
    MANIFEST,
    index_of_parts,
    own_files,
    part_name,
)
from reshard.checkpoint.open_save import OpenSave
from reshard.checkpoint.reads import ReadOptions, read_items, read_values, refuse_pickles
from reshard.checkpoint.shard_files import ShardFiles
from reshard.checkpoint.shared_reads import SharedRead
from reshard.checkpoint.stored_metadata import can_be_read_back, refer_to
from reshard.checkpoint.stream_items import (  # noqa: F401 - DCP users import them from here
    DEFAULT_SUFFIX,
    SerializationFormat,
    StreamSlice,
    _item_size,
    _split_by_size_and_type,
    _StoragePrefix,
    _StorageReaderTransforms,
    _StorageWriterTransforms,
    _write_item,
    narrow_tensor_by_index,
)
from reshard.checkpoint.to_dcp import DCP_VERSION, check_formats, encode_dcp_metadata
from reshard.checkpoint.to_manifest import check_readable, to_manifest
from reshard.checkpoint.to_metadata import StorageMap, to_metadata
from reshard.checkpoint.writes import WriteOptions, check_savable, write_items
from reshard.engine.collector import paused_collection
from reshard.engine.reading import Verify
from reshard.foreign.dcp import replaceable_files
from reshard.foreign.opening import open_manifest
from reshard.format.codec import check_compress
from reshard.format.manifest import MANIFEST_LIMIT_BYTES, VERSION, encode_manifest
from reshard.format.tables import Manifest
from reshard.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from reshard.planner import (  # noqa: F401 - as above
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from reshard.plans.traits import default_step
from reshard.staging import BlockingAsyncStager
from reshard.storage import StorageInfo, StorageReader, StorageWriter, WriteResult
from reshard.stores.file_systems import FileSystem, FileSystemBase
from reshard.stores.local import LocalStore
from reshard.stores.protocol import Store
from reshard.stores.stream_store import StreamStore
from reshard.stores.urls import check_is_path

__all__ = [
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "SerializationFormat",
    "StorageInfo",
]

CURRENT_DCP_VERSION = str(VERSION)
_StorageInfo = StorageInfo
_metadata_fn = MANIFEST


class FileSystemWriter(StorageWriter):
    """Writes a checkpoint into a directory.

    Each rank writes its own shard files; `finish` publishes the manifest. An older
    checkpoint in the same directory stays whole and visible until then. With
    `sync_files`, everything is durable before it becomes visible.

    All that is stored goes through `_extensions`, if there are any. It can then only be read
    from the beginning, in one thread; `save(compress="zstd")` has neither of these limits.

    `thread_count` 0 chooses by the number of cores. `per_thread_copy_ahead` and
    `serialization_format` are accepted and have no effect.

    A subclass may set `self.fs` to a `FileSystemBase` of its own, and `self.path` to what its
    `init_path` returns. All bytes then go through its streams, one thread for each file.
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
        self.fs: FileSystemBase = FileSystem()
        self.path: str | os.PathLike[str] = self.fs.init_path(path)
        self.transforms = _StorageWriterTransforms(_extensions)
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
        self._save: OpenSave | None = None
        self._id_is_used = False
        self.base: str | os.PathLike[str] | None = None
        self.unchanged: Mapping[str, bytes] | None = None
        self._base: Base | None = None
        self.compress: str | None = None
        self.fingerprint = False
        self.format = "reshard"
        self._stager = BlockingAsyncStager(cache_staged_state_dict)

    @property
    def extensions(self) -> tuple[Any, ...]:
        """What the stored bytes go through."""
        return tuple(self.transforms.extensions)

    _synchronize_after_execute = False
    call_settings: tuple[str, ...] = ("base", "unchanged", "compress", "fingerprint", "format")

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process stages nothing, and has begun nothing.
        stager = BlockingAsyncStager(self.cache_staged_state_dict)
        return vars(self) | {"_stager": stager, "_save": None, "_base": None}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is written to."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return FileSystem.validate_checkpoint_id(checkpoint_id)

    @property
    def _is_for_dcp(self) -> bool:
        return self.format == "dcp"

    @property
    def is_on_disk(self) -> bool:
        """Whether the place is a directory that this process can write to by itself."""
        return _is_local(self.fs)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = self.fs.init_path(checkpoint_id)
        self._renew()

    def _renew(self) -> None:
        self.save_id = str(uuid.uuid4())
        self._save, self._base, self._id_is_used = None, None, False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator
        self.rank = kwargs.get("rank") or 0
        self.world_size = kwargs.get("world_size") or 1
        self.use_collectives = kwargs.get("use_collectives", True)
        self._save = self._base = None
        if self._id_is_used:
            # The writer was used before, and not reset since.
            self._renew()

    def begin_save(self) -> str:
        """Claim the place for a save, before any file of it is written; the id of the save.

        For the coordinator. Nothing that is there is touched.
        """
        base = self._open_base()
        is_new = self._open_save().begin(self.overwrite, base.locations if base else ())
        if base is not None and is_new:
            # After the claim: whoever replaces or deletes the base from now on sees it.
            base.check_unchanged()
            warn_of_unguarded(self._open_save().store, base)
        self._id_is_used = True
        return self.save_id

    def _open_base(self) -> Base | None:
        """What chunks may be referred to, opened once for a save."""
        if self.base is not None and self._base is None:
            store = self._open_save().store
            self._base = open_base(store, base_location(store, self.base))
        return self._base

    def _open_save(self) -> OpenSave:
        if self._save is None:
            self._save = OpenSave(self.open_store(), self.save_id)
        self._save.save_id = self.save_id
        return self._save

    def join_save(self, save_id: str, rank: int) -> None:
        """Take part, as a rank, in a save that the coordinator has begun."""
        self.save_id, self.rank = save_id, rank

    def open_store(self) -> Store:
        """Where the bytes go. Made to be overridden."""
        return _store_in(self.fs, self.path)

    def _get_metadata_path(self, rank: int | None = None) -> Any:
        """Where the manifest is; with a rank, where DCP has that of a rank on its own."""
        return _metadata_path(self.fs, self.path, rank)

    def shared_place(self, checkpoint_id: str | os.PathLike[str] | None = None) -> str | None:
        chosen = self.path if checkpoint_id is None else checkpoint_id
        if not chosen or not _is_local(self.fs) or not self.validate_checkpoint_id(chosen):
            return None
        check_is_path(chosen)
        return os.path.realpath(chosen)

    def reference_to(self, metadata: Metadata) -> str:
        is_readable = can_be_read_back(metadata) and not self._is_for_dcp
        return self.save_id if is_readable else ""

    def referenced_metadata(self, reference: str) -> Metadata:
        return refer_to(self.open_store(), reference, self.storage_meta())

    # As a stager: what `async_save` asks if it is given no other.

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: STATE_DICT_TYPE, **kwargs: Any) -> STATE_DICT_TYPE:
        """A copy of `state_dict` in the staging memory of the process."""
        return self._stager.stage(state_dict, **kwargs)  # type: ignore[return-value]

    def synchronize_staging(self) -> None:
        """Nothing to do: `stage` copies before it returns."""

    def close(self) -> None:
        """Let go of what was staged last."""
        self._stager.close()

    def _check_codec(self) -> None:
        check_compress(self.compress)
        if self.compress and self.extensions:
            raise ValueError(
                f"compress={self.compress!r} and stream extensions exclude each other: leave one "
                "of them out"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._check_codec()
        if self._is_for_dcp:
            check_savable(plan.items)
        save = self._open_save()
        self._open_base()
        save.create_place()
        save.check_may_write(self.overwrite)
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

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Sequence[WriteResult]:
        # A subclass may have put something else there.
        ticket = _TICKET.fullmatch(str(plan.storage_data))
        rank, save_id, first = ticket.groups() if ticket else (str(self.rank), self.save_id, "0")
        self.save_id, self._id_is_used = save_id, True
        save, base = self._open_save(), self._open_base()
        # A stream or an object is written in order, by one thread.
        in_order = save.store.remote is not None or not self.is_on_disk
        options = WriteOptions(
            self.single_file_per_rank,
            self.sync_files,
            1 if in_order and not self.compress else self.thread_count,
            self.is_coordinator,
            self.unchanged,
            self.fingerprint,
            self.compress,
            self.extensions,
            self._is_for_dcp,
        )
        return write_items(plan.items, planner, save, rank, int(first), options, base)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self.use_collectives:
            self.begin_save()
        save = self._open_save()
        ranks = len(results) if self.use_collectives else self.world_size
        with paused_collection():
            manifest = to_manifest(metadata, results, self._notes(ranks))
        check_formats(manifest, self._is_for_dcp)
        check_readable(manifest, f"the manifest of {save.store.location}")
        own = own_files(manifest)
        save.check_visible(own, self.rank)
        save.check_referred(manifest)
        if self.sync_files:
            save.sync()
        if self._is_for_dcp:
            encoded = encode_dcp_metadata(metadata, manifest, self.storage_meta())
        else:
            encoded = encode_manifest(manifest)
        if self.use_collectives:
            save.commit(encoded, own, replaceable_files(save.store, MANIFEST_LIMIT_BYTES))
        else:
            part = part_name(self.rank, self.world_size, self.save_id)
            save.put(part, encoded, self.sync_files)
            if self.sync_files:
                save.sync()
        metadata.storage_data = StorageMap(manifest)
        metadata.storage_meta = self.storage_meta()
        metadata.version = DCP_VERSION if self._is_for_dcp else CURRENT_DCP_VERSION

    def finish_parts(self) -> None:
        """Commit what all ranks have saved without collectives. For the coordinator."""
        save = self._open_save()
        parts = [part_name(rank, self.world_size, self.save_id) for rank in range(self.world_size)]
        save.check_visible(dict.fromkeys(parts), self.rank)
        index = index_of_parts(save.store, self.world_size, self._notes(self.world_size))
        replaced = replaceable_files(save.store, MANIFEST_LIMIT_BYTES)
        save.commit(encode_manifest(index), (), replaced)

    def discard_save(self) -> None:
        """Remove the files of a save that failed, unless it was committed all the same."""
        if self._save is not None:
            self._save.discard(self.is_coordinator)

    def _notes(self, ranks: int) -> dict[str, str]:
        return {
            "writer": f"reshard, torch {torch.__version__}, python {platform.python_version()}",
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "save_id": self.save_id,
            "world_size": str(ranks),
        }


_TICKET = re.compile(r"__(\d+)_([0-9a-f-]+)_(\d+)")


def _ticket(rank: int, save_id: str) -> str:
    """The name that a rank gives its files, and the number of the first; sent with its plan."""
    return f"__{rank}_{save_id}_0"


class FileSystemReader(StorageReader):
    """Reads a checkpoint from a directory.

    `verify` says which chunks are checked against their checksums: `"chunks"` those that
    are read whole, `"full"` all that are touched, `"off"` none. Stream extensions that were used
    to save are looked up in `_extension_registry`, by default torch's own. A manifest larger than
    `manifest_limit_bytes` is refused before it is read.
    """

    call_settings = ("verify", "verify_views", "allow_pickle")
    verify_views: Verify | None = None
    """Which chunks are checked that are mapped and not read. None: none, or all if `verify`
    is `"full"`."""

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
        self.fs: FileSystemBase = FileSystem()
        self.path: str | os.PathLike[str] = self.fs.init_path(path)
        self.extension_registry = _extension_registry
        self.transforms = _StorageReaderTransforms(_extension_registry)
        self.manifest_limit_bytes = manifest_limit_bytes
        self.verify = Verify(verify)
        self.allow_pickle = allow_pickle
        self.thread_count = thread_count
        self.storage_data: Any = None
        self._own: StorageMap | None = None
        self.is_coordinator = False
        self.load_id = str(uuid.uuid4())
        self.bytes_read = 0
        """How much was wanted, in all loads so far."""
        self.bytes_from_store = 0
        """How much of shard files was read for that."""

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is read from."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return FileSystem.validate_checkpoint_id(checkpoint_id)

    @property
    def requests_made(self) -> int:
        """How many requests were made so far to a store that is remote."""
        return 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.storage_data = None
        if checkpoint_id is not None:
            self.path = self.fs.init_path(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def open_store(self) -> Store:
        """Where the bytes come from. Made to be overridden."""
        return _store_in(self.fs, self.path)

    def _get_metadata_path(self, rank: int | None = None) -> Any:
        """Where the manifest is; with a rank, where DCP has that of a rank on its own."""
        return _metadata_path(self.fs, self.path, rank)

    def _slice_file(self, file: Any, sinfo: StorageInfo) -> Any:
        """The part of an open file that a chunk is stored in, as a file of its own.

        For subclasses that read by themselves; it is not called here.
        """
        return StreamSlice.buffered(file, sinfo.offset, sinfo.length)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        store, manifest = self._open_manifest()
        if self.verify is Verify.FULL and not manifest.is_ours:
            raise CheckpointException(
                f"{store.location} has no checksums to verify: it was not written by reshard. Load "
                "it with verify='chunks' or 'off', or save it with reshard first"
            )
        with paused_collection():
            metadata = to_metadata(manifest, store.location, self.allow_pickle)
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id,
            save_id=manifest.notes.get("save_id"),
            load_id=self.load_id,
        )
        self._own = metadata.storage_data
        return metadata

    def _open_manifest(self) -> tuple[Store, Manifest]:
        return open_manifest(self.open_store(), self.manifest_limit_bytes)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        given, own = metadata.storage_data, self._own
        if not isinstance(given, StorageMap) and given is not None:
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
        if not self.allow_pickle and isinstance(self.storage_data, StorageMap):
            with self._open_files() as files:
                refuse_pickles(plan.items, files, self.storage_data)
        return plan

    def read_values(self, names: Sequence[str]) -> dict[str, bytes]:
        """Stored values, which are to be looked at before the load."""
        with self._open_files() as files:
            return read_values(names, files, self.storage_data)

    @contextlib.contextmanager
    def _open_files(self) -> Iterator[ShardFiles]:
        store, manifest = self.open_store(), self.storage_data.manifest
        if not manifest.is_ours and (file := store.as_file()) is not None:
            store, _ = file
        files = ShardFiles(store, manifest, self.verify, self.extension_registry, self.allow_pickle)
        with contextlib.closing(files):
            try:
                yield files
            finally:
                self.bytes_from_store += files.bytes_read

    @default_step
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def _threads(self) -> int:
        """How many threads read; 0 means to choose."""
        return self.thread_count

    @default_step
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        options = self._read_options()
        with self._open_files() as files:
            self.bytes_read += read_items(plan.items, planner, files, self.storage_data, options)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @contextlib.contextmanager
    def open_shared_read(self, plan: LoadPlan, planner: LoadPlanner) -> Iterator[SharedRead]:
        """What `read_data` reads, for ranks that read it together."""
        with self._open_files() as files:
            read = SharedRead(plan.items, planner, files, self.storage_data, self._read_options())
            yield read
            self.bytes_read += read.nbytes

    def _read_options(self) -> ReadOptions:
        verify_views = self.verify_views
        if verify_views is None or not self.storage_data.manifest.is_ours:
            verify_views = Verify.FULL if self.verify is Verify.FULL else Verify.OFF
        return ReadOptions(self._threads(), self.allow_pickle, self.is_coordinator, verify_views)


def _is_local(fs: FileSystemBase) -> bool:
    # A subclass may have other streams.
    return type(fs) is FileSystem


def _store_in(fs: FileSystemBase, path: str | os.PathLike[str]) -> Store:
    if not _is_local(fs):
        return StreamStore(fs, path, probed=(MANIFEST,))
    check_is_path(path)
    return LocalStore(path)


def _metadata_path(fs: FileSystemBase, path: str | os.PathLike[str], rank: int | None) -> Any:
    return fs.concat_path(path, MANIFEST if rank is None else f"__{rank}{MANIFEST}")

"""Directories of safetensors files, as Hugging Face lays them out."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.futures import Future

from reshard._hf_utils import CUSTOM_METADATA_KEY as CUSTOM_METADATA_KEY
from reshard._hf_utils import SAVED_OFFSETS_KEY as SAVED_OFFSETS_KEY
from reshard._hf_utils import SHARDED_DIR_NAME, _HFStorageInfo, _metadata_fn
from reshard._hf_utils import SUFFIX as SUFFIX
from reshard.api import PlanError, _note_on_error
from reshard.checkpoint.directory import delete_quietly
from reshard.checkpoint.to_metadata import StorageMap
from reshard.checkpoint.writes import WriteOptions
from reshard.convert.consolidation import consolidate, files_by_name
from reshard.convert.drafts import remove_dead_drafts
from reshard.convert.plain_saves import (
    PlainLayout,
    check_place,
    make_index,
    publish_save,
    write_plain_files,
)
from reshard.coordination.channel import SoloChannel
from reshard.filesystem import FileSystemReader, FileSystemWriter
from reshard.foreign.opening import open_safetensors
from reshard.format.tables import Manifest
from reshard.metadata import Metadata, MetadataIndex
from reshard.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from reshard.planning.columns import DTYPES
from reshard.plans.results import written_columns
from reshard.plans.traits import default_step, reads_item_by_item
from reshard.storage import WriteResult
from reshard.stores.local import LocalStore
from reshard.stores.protocol import Store

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]


class HuggingFaceStorageWriter(FileSystemWriter):
    """Writes tensors as safetensors files that Hugging Face libraries load.

    By default for one rank that holds everything: files `model-00001-of-00002.safetensors` and so
    on, and an index. `fqn_to_index_mapping` says which file each tensor goes to, counted from 1;
    without it there is one file.

    With `save_distributed` every rank writes what it holds, as `shard-00001-model-00001-of-...`.
    With `enable_consolidation` as well, those go to `sharded/`, and whole tensors are put together
    from them at `path`, with `thread_count_consolidation` threads.

    Files get their names, and the index its place, when everything is written; a save that fails
    leaves nothing. What the directory held before is replaced. Names that share one memory are
    stored under the first of them. Values that are no tensors are refused.

    More threads than one may be asked for; otherwise it is as many as there are cores, up to a few.
    """

    call_settings = ()

    def __init__(
        self,
        path: str | os.PathLike[str],
        fqn_to_index_mapping: dict[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
    ) -> None:
        super().__init__(path, thread_count=thread_count)
        self.fqn_to_index_mapping = fqn_to_index_mapping
        self.save_distributed = save_distributed
        self.enable_consolidation = enable_consolidation
        self.thread_count_consolidation = thread_count_consolidation
        self.consolidated_output_path: str | None = None
        self._made_output = False
        self._go_to(path)

    def _go_to(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.save_distributed and self.enable_consolidation:
            self.consolidated_output_path = str(self.path)
            self.path /= SHARDED_DIR_NAME

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the save goes, also if shards go below it first."""
        output = self.consolidated_output_path
        return self.path if output is None else Path(output)

    @property
    def metadata_path(self) -> str:
        """The name of the index."""
        return _metadata_fn

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id is not None:
            self._go_to(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._made_output = False
        if not self.use_collectives:
            raise ValueError(
                f"{type(self).__name__} needs use_collectives=True: the ranks write one set of "
                "files together"
            )

    def _layout(self) -> PlainLayout:
        return PlainLayout(self.fqn_to_index_mapping, self.save_distributed)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._layout().check_local(plan)
        return plan

    def _create_place(self) -> None:
        if self.consolidated_output_path is not None:
            self._made_output |= LocalStore(self.consolidated_output_path).create()
        self._open_save().create_place()

    def begin_save(self) -> str:
        self._id_is_used = True
        self._create_place()
        store = self._open_save().store
        check_place(store, self.save_distributed)
        remove_dead_drafts(store)
        return self.save_id

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._layout().check_global(plans)
        made = f"{self._made_output:d}{self._open_save().made_place:d}"
        return [dataclasses.replace(plan, storage_data=made) for plan in plans]

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Sequence[WriteResult]:
        self._id_is_used = True
        options = WriteOptions(
            single_file=False,
            durable=self.sync_files,
            thread_count=more_than_one(self.thread_count),
            shows_progress=self.is_coordinator,
        )
        save = self._open_save()
        # If the save fails, the last rank that removes its files removes what was made for them.
        made = str(plan.storage_data)
        self._made_output, save.made_place = made[:1] == "1", made[1:] == "1"
        ranks = self.rank, self.world_size
        return write_plain_files(plan.items, planner, save, self._layout(), options, *ranks)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save = self._open_save()
        files = [file for result in results for file in written_columns(result).files]
        save.check_visible({file.path: file.nbytes for file in files}, self.rank)
        index = None if self.save_distributed else make_index(results)
        names = publish_save(save, [file.path for file in files], index, self.save_distributed)
        metadata.storage_meta = self.storage_meta()
        if self.consolidated_output_path is not None:
            try:
                self._consolidate(metadata, self.consolidated_output_path)
            except BaseException:
                delete_quietly(save.store, names)
                raise

    def _consolidate(self, metadata: Metadata, output: str) -> None:
        numbers = self.fqn_to_index_mapping
        if numbers is None:
            numbers = dict.fromkeys(metadata.state_dict_metadata, 1)
        files, threads = files_by_name(numbers), more_than_one(self.thread_count_consolidation)
        consolidate(self.path, output, files, SoloChannel(), threads)

    def discard_save(self) -> None:
        super().discard_save()
        if self._made_output and self.consolidated_output_path is not None:
            LocalStore(self.consolidated_output_path).remove()


class HuggingFaceStorageReader(FileSystemReader):
    """Reads a directory of safetensors files, each rank only the bytes that it needs.

    Tensors may lie in the files whole, as Hugging Face stores them, or in the regions that a
    `HuggingFaceStorageWriter` with `save_distributed` wrote. More threads than one may be asked
    for; otherwise it is as many as there are cores, up to a few.

    A subclass may override `read_metadata`, and `_process_read_request`, which then fills the
    tensor of one item from the file that it is given, opened by `safetensors.safe_open`.
    """

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1) -> None:
        super().__init__(path, thread_count=thread_count)

    def _threads(self) -> int:
        return more_than_one(self.thread_count)

    def _open_manifest(self) -> tuple[Store, Manifest]:
        return open_safetensors(self.open_store(), self.manifest_limit_bytes)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = super().read_metadata(*args, **kwargs)
        self._own = _StoragePlaces(metadata.storage_data.manifest, Path(self.path))
        metadata.storage_data = self._own
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        given = metadata.storage_data
        if isinstance(given, StorageMap) or not reads_item_by_item(self):
            super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
            return
        self.storage_data, self.is_coordinator = given, is_coordinator

    @default_step
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if not reads_item_by_item(self):
            return super().read_data(plan, planner)
        if getattr(planner, "blanks", None):
            planner.fill_blanks({})  # type: ignore[attr-defined]
        self._read_item_by_item(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_item_by_item(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        from safetensors import safe_open

        items_in: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            place = self.storage_data[item.storage_index].relative_path
            items_in[os.path.join(self.path, place)].append(item)
        for path, items in items_in.items():
            with safe_open(path, framework="pt") as file:
                for item in items:
                    with _note_on_error(f"loading {item.dest_index.fqn!r}"):
                        self._process_read_request(file, item, planner)

    @default_step
    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        """Fill the tensor of one item from an open file. Made to be overridden."""
        begins = zip(req.storage_offsets, req.lengths, strict=True)
        region = tuple(slice(begin, begin + length) for begin, length in begins)
        stored = f.get_slice(req.storage_index.fqn)[region]
        target = planner.resolve_tensor(req).detach()
        if target.shape != stored.shape:
            raise PlanError(
                f"resolve_tensor returned a tensor of shape {tuple(target.shape)} for "
                f"{req.dest_index.fqn!r}, to be filled with {tuple(stored.shape)}"
            )
        target.copy_(stored)
        planner.commit_tensor(req, target)


class _StoragePlaces(StorageMap):
    """Where each chunk lies, in the words of DCP's reader: the path of a file, shape and dtype."""

    def __init__(self, manifest: Manifest, path: Path) -> None:
        super().__init__(manifest)
        self._path = path

    def __getitem__(self, index: MetadataIndex) -> Any:
        m, row = self.manifest, self.chunk_row(index)
        tensor = m.table.row_of[index.fqn]
        sizes = m.chunk_sizes[row, : int(m.ndims[tensor])].tolist()
        # Of a single file, it is the path itself.
        place = self._path if self._path.is_file() else self._path / m.files[m.chunk_files[row]]
        return _HFStorageInfo(str(place), torch.Size(sizes), DTYPES[int(m.dtypes[tensor])])


def more_than_one(threads: int) -> int:
    """A number of threads that somebody asked for; 0, to choose, for the default of DCP."""
    return threads if threads > 1 else 0

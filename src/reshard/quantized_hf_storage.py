"""Directories of safetensors files with quantised tensors, which are loaded as what they mean."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.futures import Future

from reshard.api import UnsupportedFormatError, _note_on_error
from reshard.checkpoint.reads import count_changes
from reshard.checkpoint.stored_tensors import StoredTensors
from reshard.engine.reading import Verify
from reshard.engine.workers import default_threads, run_all
from reshard.foreign.quantized import Dequantizer, Quantized, as_loaded, find_quantized
from reshard.format.tables import Manifest
from reshard.hf_storage import HuggingFaceStorageReader
from reshard.planner import LoadPlan, LoadPlanner, ReadItem
from reshard.plans.read_items import ReadItems, read_columns
from reshard.plans.traits import default_step, reads_item_by_item
from reshard.stores.protocol import Store
from reshard.tensors.shards import check_allocated

__all__ = ["QuantizedHuggingFaceStorageReader"]


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """Reads tensors that are stored quantised as tensors of `target_dtype`.

    Known are matrices with a scale for each block of `block_size` rows and columns (`name.weight`
    with `name.weight_scale_inv`), and MXFP4 (`name_blocks` with `name_scales`, loaded as one
    tensor `name_blocks`). Everything else is read as it is stored, scales included. Each rank reads
    the bytes and scales of its own shards, and works on a few megabytes at a time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = 128,
    ) -> None:
        super().__init__(path, thread_count)
        if block_size < 1:
            raise ValueError(f"block_size is a number of rows and columns, not {block_size!r}")
        self.target_dtype = target_dtype
        self.block_size = block_size
        self._stored: Manifest | None = None
        self._quantized: dict[str, Quantized] = {}

    def _open_manifest(self) -> tuple[Store, Manifest]:
        store, self._stored = super()._open_manifest()
        self._quantized = find_quantized(self._stored, self.block_size)
        return store, as_loaded(self._stored, self._quantized, self.target_dtype)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        columns = read_columns(plan.items)
        for number in np.unique(columns.storage_names).tolist():
            name = columns.names[number]
            if name in self._quantized and self._quantized[name].problem:
                raise UnsupportedFormatError(
                    f"{name!r} in {self.path} is quantised in a way that this reader does not "
                    f"know: it {self._quantized[name].problem}"
                )
        return super().prepare_local_plan(plan)

    @default_step
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if reads_item_by_item(self):
            return super().read_data(plan, planner)
        columns = read_columns(plan.items)
        names = columns.names
        known = np.fromiter((name in self._quantized for name in names), bool, len(names))
        is_quantized = known[columns.storage_names]
        plain = dataclasses.replace(plan, items=ReadItems(columns.select(~is_quantized)))
        # First: it makes memory for tensors that have none.
        done = super().read_data(plain, planner)
        items = ReadItems(columns.select(is_quantized))
        with self._dequantizer() as dequantizer:
            for item in items:
                self._fill(item, planner, dequantizer)
        count_changes({item.dest_index.fqn for item in items}, planner)
        return done

    @default_step
    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        if self._stored is None:
            # A subclass that makes the metadata itself has not looked for what is quantised.
            self._open_manifest()
        if req.storage_index.fqn not in self._quantized:
            super()._process_read_request(f, req, planner)
            return
        with self._dequantizer() as dequantizer:
            self._fill(req, planner, dequantizer)

    @contextlib.contextmanager
    def _dequantizer(self) -> Iterator[Dequantizer]:
        store, manifest = self.open_store(), self._stored
        if manifest is None:
            raise RuntimeError("read_metadata was not called")
        if (file := store.as_file()) is not None:
            store, _ = file
        with contextlib.closing(StoredTensors(store, manifest, Verify.OFF)) as source:
            yield Dequantizer(source, self.target_dtype, self.block_size)

    def _fill(self, item: ReadItem, planner: LoadPlanner, dequantizer: Dequantizer) -> None:
        quantized, name = self._quantized[item.storage_index.fqn], item.dest_index.fqn
        chunk = item.storage_index.offset or (0,) * len(item.lengths)
        begins = [at + begin for at, begin in zip(chunk, item.storage_offsets, strict=True)]
        with _note_on_error(f"loading {name!r}"):
            tensor = planner.resolve_tensor(item)
        if tensor.shape != item.lengths:
            raise ValueError(
                f"resolve_tensor returned a tensor of shape {tuple(tensor.shape)} for {name!r}, to "
                f"be filled with {tuple(item.lengths)}"
            )
        check_allocated(name, tensor)
        tiles = dequantizer.tiles(item.lengths)
        fill_tile = partial(_fill_tile, dequantizer, quantized, begins, tensor.detach())
        run_all(fill_tile, tiles, self._threads() or default_threads())
        with _note_on_error(f"loading {name!r}"):
            planner.commit_tensor(item, tensor)
        self.bytes_read += tensor.numel() // (2 if quantized.is_packed else 1)


def _fill_tile(
    dequantizer: Dequantizer,
    quantized: Quantized,
    begins: list[int],
    target: torch.Tensor,
    tile: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    offsets, sizes = tile
    where = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    stored = [begin + offset for begin, offset in zip(begins, offsets, strict=True)]
    target[where].copy_(dequantizer.read(quantized, stored, sizes))

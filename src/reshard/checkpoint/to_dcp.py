"""From the manifest to the `.metadata` of `torch.distributed.checkpoint`: a pickle of its classes.

They are written by name, so that they need not be there: see `PickleWriter`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from reshard.api import CheckpointException
from reshard.checkpoint.planner_data import without_own_types
from reshard.format.pickle_writer import PickleWriter
from reshard.format.tables import Manifest
from reshard.metadata import Metadata, StorageMeta
from reshard.planning.columns import DTYPES, Ints
from reshard.plans.write_items import properties_from

DCP_VERSION = "1.0.0"
RECORD = "torch.save"
"""The codec of contents that are torch.save files. Those of stream extensions may follow."""

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.channels_last: 1, torch.preserve_format: 2}
_PLANNER_DATA = ("planner_data",)


def encode_dcp_metadata(metadata: Metadata, manifest: Manifest, storage_meta: StorageMeta) -> bytes:
    """What DCP reads of a checkpoint that consists of torch.save files.

    `manifest` says where they are; see `check_formats`. The id of the save stands at the end, so
    that the last bytes tell a checkpoint from another.
    """
    return _MetadataWriter(manifest).write(metadata, storage_meta)


def check_formats(manifest: Manifest, is_for_dcp: bool) -> None:
    """Refuse a save of which some ranks wrote torch.save files, and others did not."""
    columns = (
        (manifest.chunk_codecs, len(manifest.chunk_files)),
        (manifest.value_codecs, len(manifest.value_files)),
    )
    is_record = np.array([False, *(_codecs(name)[0] == RECORD for name in manifest.codec_names)])
    for codes, count in columns:
        found = np.zeros(count, dtype=bool) if codes is None else is_record[codes]
        if (found != is_for_dcp).any():
            raise CheckpointException(
                "ranks have written files of different formats: pass the same format to save on "
                "all of them. A storage that overrides write_data must hand on what the base class "
                "returned"
            )


def _codecs(name: str) -> list[str]:
    return name.split(",")


class _MetadataWriter:
    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._table = manifest.table
        self._value_rows = {name: row for row, name in enumerate(manifest.value_names)}
        self._out = PickleWriter()

    def write(self, metadata: Metadata, storage_meta: StorageMeta) -> bytes:
        out, names = self._out, list(metadata.state_dict_metadata)
        planner_data = without_own_types(metadata.planner_data)
        is_nesting = _is_nesting(planner_data)
        if not is_nesting:
            out.keep(_PLANNER_DATA, planner_data)
        out.begin_object(_METADATA, "Metadata")
        out.text("state_dict_metadata")
        out.begin_dict()
        for name in names:
            out.text(name)
            self._write_entry(name)
        out.end_dict()
        out.text("planner_data")
        if is_nesting:
            self._write_paths(planner_data)
        else:
            out.recall(_PLANNER_DATA)
        out.text("storage_data")
        out.begin_dict()
        for name in names:
            self._write_places(name)
        out.end_dict()
        out.text("version")
        out.text(DCP_VERSION)
        out.text("storage_meta")
        self._write_storage_meta(storage_meta)
        out.end_object()
        return out.finish()

    def _write_entry(self, name: str) -> None:
        """What is stored under a name."""
        out, table = self._out, self._table
        if name in self._value_rows:
            out.new(_METADATA, "BytesStorageMetadata")
            return
        tensor = table.row_of[name]
        out.begin_object(_METADATA, "TensorStorageMetadata")
        out.text("properties")
        self._write_properties(int(table.dtypes[tensor]), int(table.flags[tensor]))
        out.text("size")
        self._write_size(table.shape_of(tensor))
        out.text("chunks")
        out.begin_list()
        for _, offsets, sizes in self._chunks(tensor):
            out.begin_object(_METADATA, "ChunkStorageMetadata")
            out.text("offsets")
            self._write_size(offsets)
            out.text("sizes")
            self._write_size(sizes)
            out.end_object()
        out.end_list()
        out.end_object()

    def _chunks(self, tensor: int) -> Iterator[tuple[int, list[int], list[int]]]:
        """The chunks that hold the data of a tensor: their rows, offsets and sizes."""
        table = self._table
        source, dims = int(table.sources[tensor]), int(table.ndims[tensor])
        offsets, sizes = table.of(source)
        rows = range(int(table.starts[source]), int(table.starts[source + 1]))
        return zip(rows, offsets[:, :dims].tolist(), sizes[:, :dims].tolist(), strict=True)

    def _write_properties(self, dtype: int, flags: int) -> None:
        out, properties = self._out, properties_from(DTYPES[dtype], flags)
        out.new(_METADATA, "TensorProperties")
        out.begin_tuple()
        out.name("torch", str(properties.dtype).removeprefix("torch."))
        out.name("torch.serialization", "_get_layout")
        out.begin_tuple()
        out.text(str(properties.layout))
        out.end_tuple()
        out.call()
        out.boolean(properties.requires_grad)
        out.name(_METADATA, "_MEM_FORMAT_ENCODING")
        # A record of how the tensor was; it has no names for all formats.
        out.integers([_MEMORY_FORMATS.get(properties.memory_format, 0)])
        out.call()
        out.boolean(properties.pin_memory)
        out.end_tuple()
        out.build()

    def _write_size(self, extents: Sequence[int]) -> None:
        out = self._out
        out.name("torch", "Size")
        out.begin_tuple()
        out.integers(extents)
        out.end_tuple()
        out.call()

    def _write_paths(self, paths: dict[str, tuple[str | int, ...]]) -> None:
        out = self._out
        out.begin_dict()
        for name, path in paths.items():
            out.text(name)
            out.begin_tuple()
            for key in path:
                if isinstance(key, str):
                    out.text(key)
                else:
                    out.integer(key)
            out.end_tuple()
        out.end_dict()

    def _write_places(self, name: str) -> None:
        """Where the chunks of a tensor, or a value, are stored."""
        m = self._manifest
        row = self._value_rows.get(name)
        if row is not None:
            self._write_index(name, None, None)
            file, begin = int(m.value_files[row]), int(m.value_begins[row])
            self._write_place(file, begin, int(m.value_nbytes[row]), m.value_codecs, row)
            return
        chunks = self._chunks(self._table.row_of[name])
        for hint, (chunk, offsets, _) in enumerate(chunks):
            self._write_index(name, offsets, hint)
            file, begin = int(m.chunk_files[chunk]), int(m.chunk_begins[chunk])
            nbytes = int(m.stored_nbytes[chunk])
            self._write_place(file, begin, nbytes, m.chunk_codecs, chunk)

    def _write_index(self, name: str, offsets: Sequence[int] | None, hint: int | None) -> None:
        out = self._out
        out.begin_object(_METADATA, "MetadataIndex")
        out.text("fqn")
        out.text(name)
        out.text("index")
        out.none() if hint is None else out.integer(hint)
        if offsets is not None:
            out.text("offset")
            self._write_size(offsets)
        out.end_object()

    def _write_place(
        self, file: int, begin: int, nbytes: int, codecs: Ints | None, row: int
    ) -> None:
        out, m = self._out, self._manifest
        descriptors = [] if codecs is None else _codecs(m.codec_names[int(codecs[row]) - 1])[1:]
        out.begin_object(_FILESYSTEM, "_StorageInfo")
        out.text("relative_path")
        out.text(m.files[file])
        out.text("offset")
        out.integer(begin)
        out.text("length")
        out.integer(nbytes)
        if descriptors:
            out.text("transform_descriptors")
            out.begin_list()
            for descriptor in descriptors:
                out.text(descriptor)
            out.end_list()
        out.end_object()

    def _write_storage_meta(self, meta: StorageMeta) -> None:
        out = self._out
        out.begin_object(_METADATA, "StorageMeta")
        out.text("checkpoint_id")
        out.text(str(meta.checkpoint_id))
        out.text("load_id")
        out.none()
        out.text("modules")
        out.begin_list()
        for module in meta.modules:
            out.text(module)
        out.end_list()
        out.text("save_id")
        out.text(str(meta.save_id), once=True)
        out.end_object()


def _is_nesting(planner_data: Any) -> bool:
    """Whether planner data is how names nest, as the default planner keeps it."""
    return type(planner_data) is dict and all(
        type(name) is str and type(path) is tuple and all(type(key) in (str, int) for key in path)
        for name, path in planner_data.items()
    )

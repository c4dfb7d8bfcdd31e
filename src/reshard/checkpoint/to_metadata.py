"""From the manifest to metadata, as users see it: views that make objects on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from reshard.checkpoint.planner_data import unpack_planner_data
from reshard.format.tables import Manifest
from reshard.metadata import Metadata, MetadataIndex
from reshard.planning.columns import DTYPES
from reshard.plans.entries import make_entries
from reshard.storage import StorageInfo
from reshard.tensors.paths import PathMap


def to_metadata(manifest: Manifest, where: str, allow_pickle: bool = False) -> Metadata:
    """What a stored checkpoint contains."""
    planner_data = unpack_planner_data(manifest.planner_data, where, allow_pickle)
    # Names in the order in which they were saved.
    order = planner_data if isinstance(planner_data, PathMap) else ()
    return Metadata(
        make_entries(manifest.table, manifest.value_names, order),
        planner_data=planner_data,
        storage_data=StorageMap(manifest),
        version=manifest.notes.get("version"),
    )


class StorageMap(Mapping[MetadataIndex, StorageInfo]):
    """Where each chunk and value lies: a view of the manifest, looked up on demand."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    @cached_property
    def value_rows(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.manifest.value_names)}

    def chunk_row(self, index: MetadataIndex) -> int:
        """The row of a chunk in the manifest; KeyError if there is none."""
        table = self.manifest.table
        tensor = int(table.sources[table.row_of[index.fqn]])
        begin, (offsets, _), dims = table.starts[tensor], table.of(tensor), table.ndims[tensor]
        wanted = (0,) * dims if index.offset is None else tuple(index.offset)
        if len(wanted) == dims:
            hint = -1 if index.index is None else index.index
            if 0 <= hint < len(offsets) and tuple(offsets[hint, :dims].tolist()) == wanted:
                return int(begin + hint)
            found = np.flatnonzero((offsets[:, :dims] == wanted).all(axis=1))
            if len(found):
                return int(begin + found[0])
        raise KeyError(index)

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        m = self.manifest
        value = self.value_rows.get(index.fqn)
        if value is not None:
            path = m.files[int(m.value_files[value])]
            return StorageInfo(path, int(m.value_begins[value]), int(m.value_nbytes[value]))
        row = self.chunk_row(index)
        itemsize = DTYPES[m.dtypes[m.table.row_of[index.fqn]]].itemsize
        nbytes = int(m.chunk_sizes[row].prod()) * itemsize
        if m.chunk_stored_nbytes is not None:
            nbytes = int(m.chunk_stored_nbytes[row])
        return StorageInfo(m.files[int(m.chunk_files[row])], int(m.chunk_begins[row]), nbytes)

    def __iter__(self) -> Iterator[MetadataIndex]:
        m = self.manifest
        for tensor, name in enumerate(m.tensor_names):
            begin, end, dims = m.chunk_starts[tensor], m.chunk_starts[tensor + 1], m.ndims[tensor]
            for hint, offsets in enumerate(m.chunk_offsets[begin:end, :dims].tolist()):
                yield MetadataIndex(name, offsets, hint)
        for name in m.value_names:
            yield MetadataIndex(name)

    def __len__(self) -> int:
        return len(self.manifest.chunk_files) + len(self.manifest.value_names)

    def __repr__(self) -> str:
        m = self.manifest
        counts = f"{len(m.chunk_files)} chunks and {len(m.value_names)} values"
        return f"<StorageMap of {counts} in {len(m.files)} files>"

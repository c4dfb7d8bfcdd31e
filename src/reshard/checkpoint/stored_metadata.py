"""Metadata that is read from the checkpoint on demand.

Most callers drop what a save returns. So ranks are not sent the metadata, which may be
large, but a reference to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from reshard.api import CheckpointException, CheckpointNotFoundError
from reshard.checkpoint.directory import read_manifest
from reshard.checkpoint.to_metadata import StorageMap, to_metadata
from reshard.metadata import Metadata, StorageMeta
from reshard.plans.lazy_record import become_plain, lazy_fields
from reshard.stores.local import LocalStore
from reshard.stores.protocol import Store
from reshard.tensors.paths import PathMap


class _Source(NamedTuple):
    open_store: Callable[[], Store]
    save_id: str
    storage_meta: StorageMeta | None


@lazy_fields("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
class StoredMetadata(Metadata):
    """The metadata of a save. Becomes a plain `Metadata` when it is first looked at.

    Raises a `CheckpointException` then if there is another checkpoint at that place by now.
    """

    def __init__(self, source: _Source) -> None:
        vars(self)["_source"] = source

    def make(self) -> Metadata:
        """Read it now."""
        source: _Source = vars(self)["_source"]
        store = source.open_store()
        try:
            manifest = read_manifest(store)
        except CheckpointNotFoundError as error:
            raise CheckpointException(
                f"the checkpoint at {store.location} is gone, and its metadata with it. Look at "
                "the metadata of a save before the checkpoint is removed"
            ) from error
        found = manifest.notes.get("save_id")
        if found != source.save_id:
            raise CheckpointException(
                f"the checkpoint at {store.location} was replaced: it is of save {found}, and this "
                f"metadata of save {source.save_id}. Look at the metadata of a save before the "
                "next one to the same place"
            )
        metadata = to_metadata(manifest, store.location)
        metadata.storage_meta = source.storage_meta
        return metadata

    def __repr__(self) -> str:
        source: _Source = vars(self)["_source"]
        where = source.open_store().location
        return f"<Metadata of save {source.save_id} at {where!r}, not read yet>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        source: _Source = vars(self)["_source"]
        if isinstance(source.open_store, partial):
            return StoredMetadata, (source,)
        become_plain(self)
        return self.__reduce_ex__(protocol)


def can_be_read_back(metadata: Metadata | None) -> bool:
    """Whether the checkpoint says all that the metadata of its save does."""
    return (
        metadata is not None
        and isinstance(metadata.storage_data, StorageMap)
        and metadata.storage_meta is not None
        and bool(metadata.storage_meta.save_id)
        # Custom planner_data may need a pickle to be read.
        and (metadata.planner_data is None or type(metadata.planner_data) is PathMap)
    )


def refer_to(store: Store, save_id: str, storage_meta: StorageMeta | None) -> Metadata:
    """The metadata of the checkpoint of `save_id`, which was just committed in `store`."""
    open_store: Callable[[], Store] = lambda: store  # noqa: E731
    if type(store) is LocalStore:
        open_store = partial(LocalStore, os.path.abspath(store.location))
    return StoredMetadata(_Source(open_store, save_id, storage_meta))

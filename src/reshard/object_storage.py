"""Checkpoints on S3, Google Cloud, Azure, and servers that speak the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from reshard.filesystem import FileSystemReader, FileSystemWriter
from reshard.stores.objects import Connection, is_object_url
from reshard.stores.protocol import Store
from reshard.stores.urls import without_secrets

__all__ = ["ObjectStoreReader", "ObjectStoreWriter"]


class _AtUrl:
    """What a writer and a reader of object stores have in common: a URL, and a connection."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        storage_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, *args, **kwargs)  # type: ignore[call-arg]
        self.path: str | os.PathLike[str] = os.fspath(path)
        self._connection = Connection(storage_options)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_object_url(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)  # type: ignore[misc]
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    def open_store(self) -> Store:
        return self._connection.open(os.fspath(self.path))

    def _get_metadata_path(self, rank: int | None = None) -> str:
        name = os.path.basename(super()._get_metadata_path(rank))  # type: ignore[misc]
        return f"{os.fspath(self.path)}/{name}"


class ObjectStoreWriter(_AtUrl, FileSystemWriter):
    """Writes a checkpoint under a URL such as `s3://bucket/run/step-100`.

    Nothing goes to a local disk. Shard files are uploaded in parallel parts from the memory of the
    tensors; the manifest comes last, by a request that fails if somebody else was faster.

    `storage_options` has the names of obstore's settings (`endpoint`, `region`, `access_key_id`,
    ...); what it does not say comes from the environment (`AWS_...`, `GOOGLE_...`, `AZURE_...`).
    Besides: `store`, an obstore store of the bucket that is ready to use; `retry_seconds`, how long
    a request that fails is tried again; `concurrency`, how many are made at once. Other arguments
    are those of `FileSystemWriter`.
    """

    def shared_place(self, checkpoint_id: str | os.PathLike[str] | None = None) -> str | None:
        chosen = os.fspath(self.path if checkpoint_id is None else checkpoint_id)
        return without_secrets(chosen) if is_object_url(chosen) else None


class ObjectStoreReader(_AtUrl, FileSystemReader):
    """Reads a checkpoint from a URL such as `s3://bucket/run/step-100`.

    Only the bytes that are wanted are asked for, and gaps that cost less than a request of their
    own; several requests at a time. Arguments are those of `FileSystemReader` and, as for
    `ObjectStoreWriter`, `storage_options`.
    """

    @property
    def requests_made(self) -> int:
        return self._connection.requests

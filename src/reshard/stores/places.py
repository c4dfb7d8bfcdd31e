"""Which store a place belongs to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from reshard.stores.fsspec_store import Connection, file_system
from reshard.stores.local import LocalStore
from reshard.stores.objects import ObjectStore
from reshard.stores.objects import is_object_url as is_object_url
from reshard.stores.protocol import Store
from reshard.stores.urls import check_is_path, path_of


def open_place(
    place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Store:
    """The store at a place: a path of this machine, or a URL."""
    if is_object_url(place):
        return ObjectStore(os.fspath(place), storage_options)
    path = path_of(place)
    if "://" in path:
        fs, path_there = file_system(path, storage_options or {})
        return Connection(fs).open(path_there, path)
    check_is_path(path)
    return LocalStore(path)

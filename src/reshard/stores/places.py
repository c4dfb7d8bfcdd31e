"""Which store a place belongs to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from reshard.stores.local import LocalStore
from reshard.stores.objects import ObjectStore
from reshard.stores.objects import is_object_url as is_object_url
from reshard.stores.protocol import Store


def open_place(
    place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Store:
    """The store at a place: a path of this machine, or a URL."""
    if is_object_url(place):
        return ObjectStore(os.fspath(place), storage_options)
    return LocalStore(place)

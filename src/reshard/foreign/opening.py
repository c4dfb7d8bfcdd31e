"""What kind of checkpoint lies at a place, and its manifest."""

from __future__ import annotations

import contextlib
from contextlib import closing

from reshard.api import CheckpointNotFoundError, UnsupportedFormatError
from reshard.checkpoint.directory import (
    MANIFEST,
    is_shard_name,
    read_manifest,
    read_manifest_there,
)
from reshard.foreign import dcp, safetensors, torch_save
from reshard.format.manifest import MANIFEST_LIMIT_BYTES
from reshard.format.tables import Manifest
from reshard.format.torch_zip import ZIP_MAGIC
from reshard.stores.protocol import Store
from reshard.tensors.flatten import Rules

_PICKLE = b"\x80"
"""How the metadata of torch.distributed.checkpoint begins."""


def open_manifest(
    place: Store, limit_bytes: int = MANIFEST_LIMIT_BYTES, rules: Rules = Rules.CURRENT
) -> tuple[Store, Manifest]:
    """The manifest of whatever checkpoint is at a place, and the store that its files are in.

    A place is a directory, or a single file. What is not flat yet is flattened by `rules`.
    """
    if place.remote is not None:
        # Its first request should be the last.
        with contextlib.suppress(FileNotFoundError, UnsupportedFormatError):
            return place, read_manifest_there(place, limit_bytes)
    file = place.as_file()
    if file is not None:
        return file[0], _open_file(*file, rules)
    start = _first_bytes(place, MANIFEST)
    if start is not None and start[:1] == _PICKLE:
        return place, dcp.read(place, MANIFEST, limit_bytes)
    if start is None:
        if parts := dcp.part_keys(place.list()):
            return place, dcp.read_parts(place, parts, limit_bytes)
        if (plain := _read_plain(place)) is not None:
            return place, plain
    return place, read_manifest(place, limit_bytes)


def open_safetensors(
    place: Store, limit_bytes: int = MANIFEST_LIMIT_BYTES
) -> tuple[Store, Manifest]:
    """The same for plain safetensors files, even if there is a checkpoint beside them."""
    if place.as_file() is None and (plain := _read_plain(place)) is not None:
        return place, plain
    return open_manifest(place, limit_bytes)


def _read_plain(place: Store) -> Manifest | None:
    """The safetensors files at a place that are not shard files of ours; None if there are none."""
    keys = [key for key in place.list() if not is_shard_name(key)]
    if not any(key.endswith(safetensors.SUFFIX) for key in keys):
        return None
    return safetensors.read_directory(place, keys)


def _open_file(store: Store, key: str, rules: Rules) -> Manifest:
    if key.endswith(safetensors.SUFFIX):
        return safetensors.read_file(store, key)
    if _first_bytes(store, key) == ZIP_MAGIC[:2]:
        return torch_save.read_file(store, key, rules)
    raise CheckpointNotFoundError(
        f"{store.location}/{key} is not a checkpoint: neither a directory, nor a file of "
        "safetensors or of torch.save since torch 1.6. Read it with what wrote it"
    )


def _first_bytes(store: Store, key: str) -> bytes | None:
    """How a file begins; None if it cannot be opened."""
    try:
        reader = store.open_reader(key)
    except OSError:
        # Whoever needs it says why.
        return None
    with closing(reader):
        start = bytearray(min(2, reader.nbytes))
        reader.read_into(0, [memoryview(start)] if start else [])
        return bytes(start)

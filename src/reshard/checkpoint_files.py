"""Which files make up a checkpoint: names, manifests and their parts, debris."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from collections.abc import Sequence

from reshard.api import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from reshard.contents import merge_planner_data
from reshard.format.manifest import Manifest, check_manifest, decode_manifest
from reshard.format.merging import merge_manifests
from reshard.stores.protocol import Store

__all__ = [
    "MANIFEST",
    "complete_parts",
    "delete_quietly",
    "file_prefix",
    "has_checkpoint",
    "is_ours",
    "next_generation",
    "read_manifest",
    "read_one_manifest",
    "remove_debris",
]

logger = logging.getLogger(__name__)

MANIFEST = ".metadata"
_SHARD_FILE = re.compile(r"__(\d+)_(\d+)\.safetensors")
_PART = re.compile(r"\.metadata\.(\d{1,9})-of-(\d{1,9})\.(\d{1,9})")
_DRAFT = re.compile(r"\.metadata(\.\d+-of-\d+\.\d+)?\.\d+\.draft")


def file_prefix(store: Store, rank: int | None) -> str:
    """The beginning of new file names: none that an older checkpoint here may use."""
    taken = [
        int(match[2])
        for match in map(_SHARD_FILE.fullmatch, store.list())
        if match and rank in (None, int(match[1]))
    ]
    first = max(taken, default=-1) + 1
    return f"__{{rank}}_{first}" if rank is None else f"__{rank}_{first}"


def read_manifest(store: Store) -> Manifest:
    """The manifest of the checkpoint in `store`, or that of all its parts."""
    try:
        return read_one_manifest(store, MANIFEST)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            raise CheckpointNotFoundError(
                f"the manifest at {store.location} cannot be read: {error}"
            ) from error
        parts = complete_parts(store)
        if not parts:
            raise CheckpointNotFoundError(_describe_absence(store)) from error
    manifests = [read_one_manifest(store, part) for part in parts]
    merged = merge_manifests(manifests, store.location)
    paths = merge_planner_data([part.planner_data for part in manifests], store.location)
    merged = dataclasses.replace(merged, planner_data=paths)
    # Names that share memory on some ranks only have the same bytes there.
    check_manifest(merged, store.location, shared_bytes=True)
    return merged


def _part_sets(store: Store) -> dict[tuple[int, int], dict[int, str]]:
    """The parts that ranks wrote without each other, by generation and number of ranks."""
    found: dict[tuple[int, int], dict[int, str]] = {}
    for key in store.list():
        match = _PART.fullmatch(key)
        if match and int(match[1]) < int(match[2]):
            found.setdefault((int(match[3]), int(match[2])), {})[int(match[1])] = key
    return found


def next_generation(store: Store) -> int:
    """One past every generation of which there is a part, be it complete or not."""
    return max((generation for generation, _ in _part_sets(store)), default=-1) + 1


def has_checkpoint(store: Store) -> bool:
    """Whether a whole checkpoint is there, in whatever form."""
    sets = _part_sets(store)
    return MANIFEST in store.list() or any(len(parts) == kind[1] for kind, parts in sets.items())


def complete_parts(store: Store) -> list[str]:
    """The parts of the newest generation, if all of one are there."""
    sets = _part_sets(store)
    complete = [kind for kind, parts in sets.items() if len(parts) == kind[1]]
    if complete:
        newest = max(complete)
        if sum(generation == newest[0] for generation, _ in complete) > 1:
            raise CorruptCheckpointError(
                f"{store.location} holds two checkpoints of one generation that were saved without "
                "collectives, by different numbers of ranks; delete the parts of one"
            )
        return [sets[newest][rank] for rank in range(newest[1])]
    if sets:
        (_, world), parts = max(sets.items())
        missing = next(rank for rank in itertools.count() if rank not in parts)
        raise CheckpointNotFoundError(
            f"the checkpoint at {store.location} is not complete: of {world} ranks, "
            f"{world - len(parts)} did not finish, rank {missing} among them"
        )
    return []


def read_one_manifest(store: Store, key: str) -> Manifest:
    reader = store.open_reader(key)
    try:
        data = bytearray(reader.nbytes)
        reader.read_into(0, [memoryview(data)] if data else [])
    finally:
        reader.close()
    if data[:1] == b"\x80":
        raise UnsupportedFormatError(
            f"the checkpoint at {store.location} was written by torch.distributed.checkpoint; "
            "load it with that, and save it with reshard"
        )
    return decode_manifest(memoryview(data), f"{key} of {store.location}")


def _describe_absence(store: Store) -> str:
    keys = store.list()
    if not keys:
        return f"there is no checkpoint at {store.location}"
    if any(_SHARD_FILE.fullmatch(key) for key in keys):
        return (
            f"the checkpoint at {store.location} was never committed: it has shard files but no "
            f"{MANIFEST}. A save that was cut off leaves these; load an older checkpoint"
        )
    return f"there is no checkpoint at {store.location}: it has no {MANIFEST}"


def remove_debris(store: Store, before: Sequence[str], manifest: Manifest) -> None:
    """Delete shard files and drafts that no manifest refers to, now that the new one is there."""
    used = {MANIFEST, *manifest.files}
    delete_quietly(store, [key for key in before if key not in used and is_ours(key)])


def is_ours(key: str) -> bool:
    return any(pattern.fullmatch(key) for pattern in (_SHARD_FILE, _DRAFT, _PART))


def delete_quietly(store: Store, keys: Sequence[str]) -> None:
    """Delete what nobody needs. That it cannot be done is no reason for a save to fail."""
    for key in keys:
        try:
            store.delete(key)
        except OSError as error:
            logger.warning("could not remove %r from %s: %s", key, store.location, error)

"""Which files make up a checkpoint: names, manifests and their parts, claims, debris.

`docs/design/commit.md` says who may write and delete which name.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from reshard.api import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from reshard.checkpoint.planner_data import merge_planner_data
from reshard.checkpoint.to_manifest import to_manifest
from reshard.checkpoint.to_metadata import to_metadata
from reshard.format.checks import check_manifest
from reshard.format.manifest import (
    MANIFEST_LIMIT_BYTES,
    decode_manifest,
    looks_like_manifest,
    read_manifest_bytes,
    read_requirements,
)
from reshard.format.merging import merge_manifests
from reshard.format.tables import PARTS, Manifest
from reshard.metadata import Metadata
from reshard.stores.owners import OWNER, owner_tag
from reshard.stores.protocol import Reader, Store

logger = logging.getLogger(__name__)

MANIFEST = ".metadata"
_ID = r"[0-9a-f]{16}"
SHARD_FILE = re.compile(rf"__\d+_\d+_({_ID})\.(?:safetensors|distcp)")
PART = re.compile(rf"\.metadata\.\d{{1,9}}-of-\d{{1,9}}\.({_ID})")
CLAIM = re.compile(rf"\.metadata\.({_ID})\.({OWNER})\.draft")
_TAIL_BYTES = 64
_AHEAD_BYTES = 16 << 20
"""Enough for most manifests."""
DELETION = re.compile(rf"\.metadata\.({OWNER})\.deleting")
READING = re.compile(rf"\.metadata\.({OWNER})\.reading")
PIN = ".metadata.pinned"
"""A checkpoint with this file is not deleted."""


# Names


def token_of(save_id: str) -> str:
    """The part of a save's id that is in the names of its files."""
    return save_id.replace("-", "")[:16]


def shard_name(rank: int | str, number: int, save_id: str, suffix: str = ".safetensors") -> str:
    return f"__{rank}_{number}_{token_of(save_id)}{suffix}"


def part_name(rank: int, world_size: int, save_id: str) -> str:
    return f"{MANIFEST}.{rank}-of-{world_size}.{token_of(save_id)}"


def is_shard_name(key: str) -> bool:
    return SHARD_FILE.fullmatch(key) is not None


def deletion_name() -> str:
    """The file that says that this process is deleting the checkpoint."""
    return f"{MANIFEST}.{owner_tag()}.deleting"


def reading_name() -> str:
    """The file that says that this process is reading the checkpoint, which must stay."""
    return f"{MANIFEST}.{owner_tag()}.reading"


def claim_name(save_id: str) -> str:
    """The file that says that this process is saving, and becomes the manifest."""
    return f"{MANIFEST}.{token_of(save_id)}.{owner_tag()}.draft"


_SAVING, _REFERS_TO = "is saving here", "refers to "


def deletion_text() -> bytes:
    """What the announcement of a deletion says to a person who looks."""
    return f"{socket.gethostname()}, process {os.getpid()}, is deleting this\n".encode()


def reading_text() -> bytes:
    """What the announcement of a reader says to a person who looks."""
    return f"{socket.gethostname()}, process {os.getpid()}, is reading this\n".encode()


def pin_text() -> bytes:
    return f"{socket.gethostname()}, process {os.getpid()}, is keeping this\n".encode()


def claim_text(refers_to: Sequence[str]) -> bytes:
    """What a claim says: to a person who looks, and to whoever deletes what it may refer to."""
    who = f"{socket.gethostname()}, process {os.getpid()}, {_SAVING}"
    return "\n".join([who, *(f"{_REFERS_TO}{location}" for location in refers_to), ""]).encode()


def locations_in_claim(text: bytes) -> list[str] | None:
    """What a claim says that the save may refer to; None if it does not say all of it.

    It is empty for a moment when it is made, and the draft of a manifest before it becomes that.
    """
    if not text.endswith(b"\n") or _SAVING.encode() not in text.partition(b"\n")[0]:
        return None
    lines = text.decode(errors="replace").split("\n")
    return [line.removeprefix(_REFERS_TO) for line in lines if line.startswith(_REFERS_TO)]


# Reading


def read_manifest(store: Store, limit_bytes: int = MANIFEST_LIMIT_BYTES) -> Manifest:
    """The manifest of the checkpoint in `store`, or that of all its parts."""
    try:
        return read_manifest_there(store, limit_bytes)
    except FileNotFoundError:
        raise CheckpointNotFoundError(_describe_absence(store)) from None
    except NotADirectoryError:
        raise CheckpointNotFoundError(
            f"{store.location} is not a checkpoint, which is a directory. If torch.save made that "
            "file, read it with torch.load"
        ) from None
    except OSError as error:
        raise CheckpointNotFoundError(
            f"the manifest at {store.location} cannot be read: {error}"
        ) from None


def read_manifest_there(store: Store, limit_bytes: int = MANIFEST_LIMIT_BYTES) -> Manifest:
    """The same for a place that has one; FileNotFoundError if it does not."""
    manifest = read_one_manifest(store, MANIFEST, limit_bytes)
    if PARTS in manifest.notes:
        manifest = _merge(_read_parts(store, manifest.notes, limit_bytes), store)
    return manifest


def index_of_parts(store: Store, world_size: int, notes: Mapping[str, str]) -> Manifest:
    """A manifest that holds nothing itself: all is in the parts of the ranks.

    Raises what a reader of the parts would: ranks that did not plan together may contradict each
    other.
    """
    index = to_manifest(Metadata({}), [], {**notes, PARTS: str(world_size)})
    merged = _merge(_read_parts(store, index.notes, MANIFEST_LIMIT_BYTES), store)
    to_metadata(merged, store.location)
    # So that one look tells what a checkpoint refers to.
    return dataclasses.replace(index, origins=merged.origins)


def own_files(manifest: Manifest) -> dict[str, int]:
    """The files that lie in the checkpoint itself, with their sizes."""
    return {
        path: size
        for file, (path, size) in enumerate(
            zip(manifest.files, manifest.file_sizes.tolist(), strict=True)
        )
        if manifest.origin_of(file) is None
    }


def _read_parts(store: Store, notes: Mapping[str, str], limit_bytes: int) -> list[Manifest]:
    manifests = []
    count, save_id = notes[PARTS], notes.get("save_id", "")
    if not re.fullmatch(r"[1-9]\d{0,8}", count):
        raise CorruptCheckpointError(f"the manifest at {store.location} has {count!r} parts")
    world_size = int(count)
    for rank in range(world_size):
        key = part_name(rank, world_size, save_id)
        try:
            part = read_one_manifest(store, key, limit_bytes)
        except OSError as error:
            raise CorruptCheckpointError(
                f"the checkpoint at {store.location} lacks {key!r}, what rank {rank} of "
                f"{world_size} saved: {error}. If it was overwritten meanwhile, load it again"
            ) from error
        if part.notes.get("save_id") != save_id:
            raise CorruptCheckpointError(
                f"{key!r} of {store.location} belongs to another save: its id is "
                f"{part.notes.get('save_id')}, not {save_id}"
            )
        manifests.append(part)
    return manifests


def _merge(manifests: Sequence[Manifest], store: Store) -> Manifest:
    merged = merge_manifests(manifests, store.location)
    paths = merge_planner_data([part.planner_data for part in manifests], store.location)
    merged = dataclasses.replace(merged, planner_data=paths)
    # Names that share memory on some ranks only have the same bytes there.
    check_manifest(merged, store.location, shared_bytes=True)
    return merged


def read_one_manifest(store: Store, key: str, limit_bytes: int = MANIFEST_LIMIT_BYTES) -> Manifest:
    where = f"{key} of {store.location}"
    reader = store.open_reader(key, _AHEAD_BYTES)
    try:
        data = read_manifest_bytes(reader, where, limit_bytes)
    finally:
        reader.close()
    return decode_manifest(data, where)


def is_committed(store: Store, save_id: str) -> bool:
    """Whether the manifest in `store` is that of a save, in whatever format it was written."""
    try:
        reader = store.open_reader(MANIFEST, _AHEAD_BYTES)
    except FileNotFoundError:
        return False
    try:
        # A save in DCP's format has its id here.
        tail = _last_bytes(reader)
    finally:
        reader.close()
    if save_id.encode() in tail:
        return True
    try:
        return read_one_manifest(store, MANIFEST).notes.get("save_id") == save_id
    except (FileNotFoundError, UnsupportedFormatError):
        return False


def _last_bytes(reader: Reader) -> bytes:
    tail = bytearray(min(_TAIL_BYTES, reader.nbytes))
    reader.read_into(reader.nbytes - len(tail), [memoryview(tail)] if tail else [])
    return bytes(tail)


def requirements(store: Store) -> set[str]:
    """What the checkpoint in `store` requires of its readers, by a look at its header only."""
    reader = store.open_reader(MANIFEST, _AHEAD_BYTES)
    try:
        return read_requirements(reader, f"{MANIFEST} of {store.location}")
    finally:
        reader.close()


def has_foreign_manifest(store: Store) -> bool:
    """Whether the file with the name of the manifest is something else, such as DCP's.

    What a save wrote in DCP's format is not: its id is in the names of the files beside it.
    """
    try:
        reader = store.open_reader(MANIFEST, _AHEAD_BYTES)
    except FileNotFoundError:
        return False
    try:
        if looks_like_manifest(reader):
            return False
        tail = _last_bytes(reader).replace(b"-", b"")
    finally:
        reader.close()
    tokens = {match[1] for match in map(SHARD_FILE.fullmatch, store.list()) if match}
    return not any(token.encode() in tail for token in tokens)


def is_same_place(store: Store, other: Store) -> bool:
    """Whether two stores are one, by whatever links they are reached."""
    try:
        return store.relative(other.location) == "."
    except ValueError:
        # It lies within.
        return False


def has_checkpoint(store: Store) -> bool:
    """Whether a whole checkpoint is there."""
    return MANIFEST in store.list()


def _describe_absence(store: Store) -> str:
    keys = store.list()
    if not keys:
        return f"there is no checkpoint at {store.location}: nothing is there. Check the path"
    if any(SHARD_FILE.fullmatch(key) for key in keys):
        return (
            f"the checkpoint at {store.location} was never committed: it has shard files but no "
            f"{MANIFEST}. A save that was cut off leaves these; use an older checkpoint"
        )
    shown = ", ".join([*map(repr, keys[:3]), *(["..."] if len(keys) > 3 else [])])
    return (
        f"there is no checkpoint at {store.location}: it has no {MANIFEST}, only {shown}. If the "
        "checkpoint is one of these, pass its path"
    )


# Writing


def file_above(path: Path) -> Path | None:
    """The file that stands where a path needs a directory, if there is one."""
    return next((each for each in path.parents if each.exists() and not each.is_dir()), None)


def check_may_be_made(location: str) -> None:
    """Refuse a place where no directory can be."""
    path = Path(location)
    above = path if os.path.lexists(path) and not path.is_dir() else file_above(path)
    if above is not None:
        raise CheckpointExistsError(
            f"{str(above)!r} is a file, and a directory is needed for the checkpoint. Choose "
            "another place, or move the file away"
        )


def put_new(store: Store, key: str, data: bytes, durable: bool) -> None:
    """A new file with `data`."""
    writer = store.open_writer(key, len(data))
    try:
        writer.write(0, [memoryview(data)])
        if durable:
            writer.sync()
    finally:
        writer.close()


def delete_quietly(store: Store, keys: Sequence[str]) -> None:
    """Delete unneeded files. Best effort: failures are logged."""
    for key in keys:
        try:
            store.delete(key)
        except OSError as error:
            logger.warning("could not remove %r from %s: %s", key, store.location, error)

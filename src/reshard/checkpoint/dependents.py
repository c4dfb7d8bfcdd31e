"""Which checkpoints refer to one, found from the manifests and claims beside it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from reshard.api import (
    CheckpointException,
    CheckpointInUseError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from reshard.checkpoint.directory import CLAIM, REFERS_TO, read_manifest, requirements
from reshard.format.tables import REFERENCES, Manifest
from reshard.stores.owners import is_alive
from reshard.stores.protocol import Store

logger = logging.getLogger(__name__)

_MOST_CLAIM_BYTES = 1 << 20


def dependents_of(store: Store) -> list[Store]:
    """The places beside `store` that refer to it: checkpoints, and saves that are under way."""
    return [
        neighbour
        for neighbour in _neighbours(store)
        if _is_named_by_a_claim(store, neighbour) or _referred_files(store, neighbour)
    ]


def files_in_use(store: Store) -> set[str] | None:
    """The files in `store` that checkpoints beside it refer to; None if that cannot be told."""
    files: set[str] = set()
    try:
        for neighbour in _neighbours(store):
            if _is_named_by_a_claim(store, neighbour):
                return None
            files |= _referred_files(store, neighbour)
    except (CheckpointInUseError, OSError) as error:
        logger.warning("files of %s are kept, in case they are in use: %s", store.location, error)
        return None
    return files


def claims_in(store: Store) -> Iterator[str]:
    """The claims of saves that may be alive."""
    for key in store.list():
        match = CLAIM.fullmatch(key)
        if match and is_alive(match[2]) is not False:
            yield key


def _neighbours(store: Store) -> Iterator[Store]:
    for location in store.neighbours():
        neighbour = store.at(location)
        if store.relative(neighbour.location) != ".":
            yield neighbour


def _is_named_by_a_claim(store: Store, neighbour: Store) -> bool:
    """Whether a save to `neighbour` that is under way may refer to `store`."""
    for claim in claims_in(neighbour):
        try:
            reader = neighbour.open_reader(claim)
        except FileNotFoundError:
            # It has just ended: its manifest tells.
            continue
        try:
            text = bytearray(min(reader.nbytes, _MOST_CLAIM_BYTES))
            reader.read_into(0, [memoryview(text)] if text else [])
        finally:
            reader.close()
        for line in text.decode(errors="replace").splitlines():
            if line.startswith(REFERS_TO) and _leads_to(
                neighbour, line.removeprefix(REFERS_TO), store
            ):
                return True
    return False


def _referred_files(store: Store, neighbour: Store) -> set[str]:
    """The files of `store` that the checkpoint at `neighbour` refers to."""
    manifest = _manifest_with_references(neighbour)
    if manifest is None:
        return set()
    return {
        path
        for file, path in enumerate(manifest.files)
        if (origin := manifest.origin_of(file)) is not None
        and _leads_to(neighbour, origin.location, store)
    }


def _manifest_with_references(neighbour: Store) -> Manifest | None:
    """The manifest of a checkpoint, if there is one and it refers to others."""
    try:
        if REFERENCES not in requirements(neighbour):
            return None
    except (FileNotFoundError, NotADirectoryError, UnsupportedFormatError):
        # No checkpoint, or none of ours.
        return None
    except CorruptCheckpointError:
        # Not even a header, as of a file that happens to have the name.
        return None
    try:
        return read_manifest(neighbour)
    except CheckpointNotFoundError:
        return None
    except CheckpointException as error:
        raise CheckpointInUseError(
            f"what {neighbour.location} refers to cannot be told, since its manifest cannot be "
            f"read: {error}. Remove or repair it first"
        ) from error


def _leads_to(origin: Store, location: str, store: Store) -> bool:
    return store.relative(origin.at(location).location) == "."

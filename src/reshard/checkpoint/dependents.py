"""Which checkpoints refer to one, found from the manifests and claims beside it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from reshard.api import (
    CheckpointException,
    CheckpointInUseError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from reshard.checkpoint.announcements import claims_in
from reshard.checkpoint.directory import (
    is_same_place,
    locations_in_claim,
    read_manifest,
    read_one_manifest,
    requirements,
)
from reshard.engine.process_wide import ProcessWide
from reshard.format.tables import REFERENCES, Manifest
from reshard.stores.protocol import CutShortError, Store

logger = logging.getLogger(__name__)

_MOST_CLAIM_BYTES = 1 << 20
_UNDECIDED_SECONDS = 2.0
"""How long a claim may take to be written, or to become a manifest."""
_PAUSE_SECONDS = 0.01


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


def _neighbours(store: Store) -> Iterator[Store]:
    for location in store.neighbours():
        neighbour = store.at(location)
        if not is_same_place(store, neighbour) and _may_be_listed(neighbour):
            yield neighbour


def _may_be_listed(neighbour: Store) -> bool:
    """Whether this user may look into a place. Others, such as lost+found, are passed over."""
    try:
        neighbour.list()
    except PermissionError as error:
        if neighbour.location not in _passed_over():
            _passed_over().add(neighbour.location)
            logger.warning(
                "%s is taken not to refer to its neighbours, since it may not be listed: %s",
                neighbour.location,
                error,
            )
        return False
    except OSError as error:
        raise _untold(neighbour, error) from error
    return True


_passed_over: ProcessWide[set[str]] = ProcessWide(set)
"""Places that a warning was logged for."""


def _is_named_by_a_claim(store: Store, neighbour: Store) -> bool:
    """Whether a save to `neighbour` that is under way may refer to `store`."""
    for claim in claims_in(neighbour):
        locations = _locations_of(neighbour, claim)
        if locations is None or any(_leads_to(neighbour, each, store) for each in locations):
            return True
    return False


def _locations_of(neighbour: Store, claim: str) -> list[str] | None:
    """What a save that is under way may refer to; None if that cannot be told."""
    give_up = time.monotonic() + _UNDECIDED_SECONDS
    while True:
        try:
            locations = locations_in_claim(_read_claim(neighbour, claim))
            if locations is not None:
                return locations
            # A save that is just committing has written its manifest there.
            return [origin.location for origin in read_one_manifest(neighbour, claim).origins]
        except FileNotFoundError:
            # It has just ended: its manifest tells.
            return []
        except (CheckpointException, CutShortError):
            # Not all of it is written.
            if time.monotonic() > give_up:
                return None
            time.sleep(_PAUSE_SECONDS)


def _read_claim(neighbour: Store, claim: str) -> bytes:
    reader = neighbour.open_reader(claim)
    try:
        text = bytearray(min(reader.nbytes, _MOST_CLAIM_BYTES))
        reader.read_into(0, [memoryview(text)] if text else [])
    finally:
        reader.close()
    return bytes(text)


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
    except OSError as error:
        raise _untold(neighbour, error) from error
    try:
        return read_manifest(neighbour)
    except CheckpointNotFoundError:
        return None
    except CheckpointException as error:
        raise _untold(neighbour, error) from error


def _untold(neighbour: Store, error: Exception) -> CheckpointInUseError:
    return CheckpointInUseError(
        f"what {neighbour.location} refers to cannot be told, since it cannot be read: {error}. "
        "Remove or repair it first"
    )


def _leads_to(origin: Store, location: str, store: Store) -> bool:
    return is_same_place(store, origin.at(location))

"""Keeping a checkpoint from being deleted: while it is read, and for good.

Both leave a file beside the manifest, and then look whether it is being deleted. Whoever deletes
announces that first, and then looks for these files. So one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from reshard.api import CheckpointInUseError, CheckpointNotFoundError
from reshard.checkpoint.announcements import announcer, deletions_in
from reshard.checkpoint.directory import (
    PIN,
    delete_quietly,
    has_checkpoint,
    pin_text,
    put_new,
    reading_name,
    reading_text,
)
from reshard.stores.protocol import Store

logger = logging.getLogger(__name__)


def pin(store: Store) -> None:
    """Keep a checkpoint until it is unpinned. Nothing happens if it is already."""
    with contextlib.suppress(FileExistsError):
        _mark(store, PIN, pin_text())


def unpin(store: Store) -> bool:
    """Let a checkpoint be deleted again; whether it was pinned."""
    return store.delete(PIN)


def is_pinned(store: Store) -> bool:
    return PIN in store.list()


@contextlib.contextmanager
def being_read(store: Store) -> Iterator[None]:
    """Keep a checkpoint from being deleted while the block runs.

    Best effort where this process may not write: that is logged.
    """
    key = reading_name()
    try:
        _mark(store, key, reading_text())
    except FileExistsError:
        # This process reads it already, and so keeps it.
        yield
        return
    except OSError as error:
        if isinstance(error, CheckpointNotFoundError):
            raise
        logger.info("%s is read without saying so there: %s", store.location, error)
        yield
        return
    try:
        yield
    finally:
        delete_quietly(store, [key])


def _mark(store: Store, key: str, text: bytes) -> None:
    if not has_checkpoint(store):
        raise CheckpointNotFoundError(f"there is no checkpoint at {store.location}")
    put_new(store, key, text, durable=True)
    try:
        for deletion in deletions_in(store):
            who, if_gone = announcer(store, deletion)
            raise CheckpointInUseError(
                f"{store.location} is being deleted ({who}). Use another checkpoint. {if_gone}"
            )
        if not has_checkpoint(store):
            raise CheckpointNotFoundError(f"the checkpoint at {store.location} was just deleted")
    except BaseException:
        store.delete(key)
        store.remove()
        raise

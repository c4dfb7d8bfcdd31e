"""Where a save goes and a load comes from, as callers say it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reshard.coordination.pairing import LOAD, UNKNOWN, Intent
from reshard.engine.reading import Verify
from reshard.filesystem import FileSystemReader, FileSystemWriter
from reshard.operations.user_calls import with_defaults
from reshard.storage import StorageReader, StorageWriter

Place = str | os.PathLike[str]


def comparable_place(checkpoint_id: Any) -> str | None:
    """A place in a form that can be compared; None if it is none."""
    text = os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else checkpoint_id
    if not isinstance(text, str):
        return None
    return text if "://" in text else os.path.realpath(text)


def _storage_setup(
    storage: StorageReader | StorageWriter | None,
    checkpoint_id: Place | None,
    reader: bool = False,
) -> Any:
    """The storage to use, ready for a new checkpoint or a new load.

    Without one, the first that accepts the place is made; nothing has to be there yet.
    """
    if storage is not None:
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)
        return storage
    argument = "storage_reader" if reader else "storage_writer"
    if not checkpoint_id:
        what = "what to load" if reader else "where to save"
        raise RuntimeError(f"`checkpoint_id` must be specified if `{argument}` is None: say {what}")
    for kind in _READERS if reader else _WRITERS:
        if kind.validate_checkpoint_id(checkpoint_id):
            made = kind(checkpoint_id)
            made.reset(checkpoint_id)
            return made
    raise _unknown_place(checkpoint_id, argument)


# What is asked for each place, in this order.
_WRITERS = (FileSystemWriter,)
_READERS = (FileSystemReader,)


def _unknown_place(place: object, argument: str) -> RuntimeError:
    """For a place that is not a directory; `argument` takes the storage for others."""
    why = f"is a {type(place).__name__}, and not a place that reshard knows. Pass a directory"
    if isinstance(place, str) and "://" in place:
        why = (
            "is a URL, and this release of reshard has storages for directories only. Pass a "
            "directory (such as one where that is mounted)"
        )
    return RuntimeError(f"{place!r} {why}, or your own storage with {argument}=...")


@dataclass(frozen=True)
class SaveTarget:
    """A storage to write to, a place, or a place in a storage."""

    writer: StorageWriter | None
    checkpoint_id: Place | None

    def choose_writer(self) -> StorageWriter:
        """The storage, ready for a new checkpoint."""
        writer: StorageWriter = _storage_setup(self.writer, self.checkpoint_id)
        return writer

    @cached_property
    def place(self) -> str | None:
        """Where the save goes. The writer is not touched: it may be busy with an earlier save."""
        if self.checkpoint_id is None:
            return comparable_place(getattr(self.writer, "checkpoint_id", None))
        return comparable_place(self.checkpoint_id)

    def intent(
        self, what: str, use_collectives: bool, settings: Sequence[tuple[str, str]] = ()
    ) -> Intent:
        """What a call is about to do, in the same words on all ranks."""
        if not use_collectives:
            what += " without collectives"
        # What is wrong with the arguments of this rank is told to all when they are used.
        try:
            if self.writer is None:
                place = self.place if self.checkpoint_id else None
            else:
                place = self._shared_place()
        except Exception:  # noqa: BLE001 - raised again when the target is used
            return UNKNOWN
        if place is not None:
            what += f" to {place!r}"
        elif self.writer is None:
            return UNKNOWN
        return Intent(what, what, settings)

    def absolute(self) -> SaveTarget:
        """The same for later, or for another process: relative paths are taken from here."""
        chosen = self.checkpoint_id
        if self.writer is not None:
            if self._shared_place() is None:
                return self
            chosen = chosen or getattr(self.writer, "checkpoint_id", None)
        if not chosen or "://" in str(chosen):
            return self
        return SaveTarget(self.writer, os.path.abspath(chosen))

    def _shared_place(self) -> str | None:
        return with_defaults(self.writer, StorageWriter).shared_place(self.checkpoint_id)  # type: ignore[union-attr]


@dataclass(frozen=True)
class LoadSource:
    """A storage to read from, a place, or a place in a storage."""

    reader: StorageReader | None
    checkpoint_id: Place | None

    def choose_reader(self) -> StorageReader:
        """The storage, ready for a new load."""
        reader: StorageReader = _storage_setup(self.reader, self.checkpoint_id, reader=True)
        return reader

    def intent(self, verify: object = None) -> Intent:
        """What a call is about to do. Ranks may have a copy each, at places of their own."""
        try:
            chosen = self.checkpoint_id
            if chosen is None:
                chosen = getattr(self.reader, "checkpoint_id", None)
            place = comparable_place(chosen)
        except Exception:  # noqa: BLE001 - raised again when the source is used
            place = None
        asked = (verify, getattr(self.reader, "verify", None))
        # Ranks compare fingerprints together; of other checks each does its own.
        together = Verify.FINGERPRINT in asked or Verify.FINGERPRINT.value in asked
        settings = [("verify", "'fingerprint'" if together else "something else")]
        return Intent(LOAD, f"load of {place!r}" if place else "load", settings)

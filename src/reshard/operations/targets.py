"""Where a save goes and a load comes from, as callers say it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from reshard.coordination.pairing import LOAD, UNKNOWN, Intent
from reshard.engine.reading import Verify
from reshard.filesystem import FileSystemReader, FileSystemWriter
from reshard.fsspec_filesystem import FsspecReader, FsspecWriter
from reshard.object_storage import ObjectStoreReader, ObjectStoreWriter
from reshard.operations.user_calls import with_defaults
from reshard.storage import StorageReader, StorageWriter
from reshard.stores.places import is_object_url
from reshard.stores.urls import check_is_path, object_url, path_of, without_secrets

Place = str | os.PathLike[str]


def comparable_place(checkpoint_id: Any) -> str | None:
    """A place in a form that can be compared; None if it is none."""
    text = os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else checkpoint_id
    if not isinstance(text, str):
        return None
    text = path_of(text)
    if is_object_url(text):
        # What is wrong with it is said when it is used.
        with contextlib.suppress(ValueError):
            return object_url(text)
    return without_secrets(text).rstrip("/") if "://" in text else os.path.realpath(text)


def _storage_setup(
    storage: StorageReader | StorageWriter | None,
    checkpoint_id: Place | None,
    reader: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """The storage to use, ready for a new checkpoint or a new load.

    Without one, the first that accepts the place is made; nothing has to be there yet.
    """
    if storage is not None:
        if storage_options:
            raise ValueError(
                "storage_options are for the storage that a URL picks: give them to the storage "
                "that is passed, or pass none"
            )
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)
        return storage
    argument = "storage_reader" if reader else "storage_writer"
    if not checkpoint_id:
        what = "what to load" if reader else "where to save"
        raise RuntimeError(f"`checkpoint_id` must be specified if `{argument}` is None: say {what}")
    for kind in _READERS if reader else _WRITERS:
        if kind.validate_checkpoint_id(checkpoint_id):
            made = _make(kind, checkpoint_id, storage_options or {})
            made.reset(checkpoint_id)
            return made
    raise _unknown_place(checkpoint_id, argument)


# What is asked for each place, in this order.
_WRITERS: tuple[Any, ...] = (FileSystemWriter, ObjectStoreWriter, FsspecWriter)
_READERS: tuple[Any, ...] = (FileSystemReader, ObjectStoreReader, FsspecReader)


def _make(kind: Any, place: Place, storage_options: Mapping[str, Any]) -> Any:
    if kind in (FsspecReader, FsspecWriter):
        return kind(place, **storage_options)
    if kind in (ObjectStoreReader, ObjectStoreWriter):
        return kind(place, storage_options=storage_options)
    if storage_options:
        raise ValueError(f"storage_options are for URLs, and {place!r} is a path: leave them out")
    return kind(place)


def _unknown_place(place: object, argument: str) -> RuntimeError:
    """For a place that is not a directory; `argument` takes the storage for others."""
    why = f"is a {type(place).__name__}, and not a place that reshard knows. Pass a directory"
    if isinstance(place, str) and "://" in place:
        why = (
            "is a URL of a kind that reshard does not know. It knows s3, gs, az and those of "
            "fsspec. Pass one of these or a directory"
        )
        place = without_secrets(place)
    return RuntimeError(f"{place!r} {why}, or your own storage with {argument}=...")


@dataclass(frozen=True)
class SaveTarget:
    """A storage to write to, a place, or a place in a storage."""

    writer: StorageWriter | None
    checkpoint_id: Place | None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def choose_writer(self) -> StorageWriter:
        """The storage, ready for a new checkpoint."""
        writer: StorageWriter = _storage_setup(
            self.writer, self.checkpoint_id, storage_options=self.storage_options
        )
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
        check_is_path(chosen)
        return SaveTarget(self.writer, os.path.abspath(chosen), self.storage_options)

    def _shared_place(self) -> str | None:
        return with_defaults(self.writer, StorageWriter).shared_place(self.checkpoint_id)  # type: ignore[union-attr]


@dataclass(frozen=True)
class LoadSource:
    """A storage to read from, a place, or a place in a storage."""

    reader: StorageReader | None
    checkpoint_id: Place | None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def choose_reader(self) -> StorageReader:
        """The storage, ready for a new load."""
        reader: StorageReader = _storage_setup(
            self.reader, self.checkpoint_id, reader=True, storage_options=self.storage_options
        )
        return reader

    def intent(self, verify: object = None, shared: Sequence[tuple[str, str]] = ()) -> Intent:
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
        settings = [("verify", "'fingerprint'" if together else "something else"), *shared]
        return Intent(LOAD, f"load of {place!r}" if place else "load", settings)


def open_reader(place: Place, storage_options: Mapping[str, Any] | None = None) -> FileSystemReader:
    """A reader of the checkpoint at a place, for a process on its own."""
    reader: FileSystemReader = LoadSource(None, place, storage_options).choose_reader()  # type: ignore[assignment]
    return reader

"""A save that is being written: its claim, its files, its commit.

`docs/design/commit.md` says why each step is there.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence

from reshard.api import (
    CheckpointException,
    CheckpointExistsError,
    CheckpointInUseError,
    CommitConflictError,
    CorruptCheckpointError,
)
from reshard.checkpoint.announcements import announcer, deletions_in
from reshard.checkpoint.debris import remove_debris
from reshard.checkpoint.directory import (
    MANIFEST,
    check_may_be_made,
    claim_name,
    claim_text,
    delete_quietly,
    has_checkpoint,
    is_committed,
    put_new,
)
from reshard.checkpoint.shard_files import ShardFiles
from reshard.engine.reading import Verify
from reshard.engine.workers import run_uninterrupted
from reshard.format.tables import Manifest
from reshard.stores.protocol import Store, VersionConflict

logger = logging.getLogger(__name__)

_UNSEEN_SECONDS = 10.0
"""How long a network file system may take to show a file of another rank."""


class OpenSave:
    """One save, as one process writes it.

    Only the coordinator claims and commits; every rank lists what it writes in `written`.
    """

    def __init__(self, store: Store, save_id: str) -> None:
        self.store = store
        self.save_id = save_id
        self.written: list[str] = []
        self._claim: str | None = None
        self._replaces: str | None = None
        self.made_place = False
        """Whether the place is to be removed if the save fails, by the last rank that has files."""

    def begin(self, overwrite: bool, refers_to: Sequence[str] = ()) -> bool:
        """Claim the place before any file of the save is written; False if that was done before.

        Nothing that is there is touched. Whoever deletes a checkpoint looks for claims to its
        place, and for those that refer to it.
        """
        if self._claim is not None:
            return False
        self.create_place()
        self._replaces = self.store.version(MANIFEST)
        self.check_may_write(overwrite)
        self._claim = claim_name(self.save_id)
        # Not needed after a crash of the machine.
        put_new(self.store, self._claim, claim_text(refers_to), durable=False)
        # After the claim: whoever begins to delete from now on sees it.
        for deletion in deletions_in(self.store):
            who, if_gone = announcer(self.store, deletion)
            raise CheckpointInUseError(
                f"{self.store.location} is being deleted ({who}). Save again when that is done, or "
                f"to another place. {if_gone}"
            )
        return True

    def create_place(self) -> None:
        """Make the place; it is removed again if the save fails."""
        try:
            if self.made_place or self.store.list():
                # Was there before, and so is never removed.
                self.store.create()
            else:
                run_uninterrupted(self._create_place)
        except (FileExistsError, NotADirectoryError):
            check_may_be_made(self.store.location)
            raise

    def _create_place(self) -> None:
        self.made_place |= self.store.create()

    def check_may_write(self, overwrite: bool) -> None:
        if not overwrite and has_checkpoint(self.store):
            raise CheckpointExistsError(
                f"Checkpoint already exists at {self.store.location}, and overwrite=False"
            )

    def put(self, key: str, data: bytes, durable: bool) -> None:
        """Write a small new file."""
        self.written.append(key)
        put_new(self.store, key, data, durable)

    def check_referred(self, manifest: Manifest) -> None:
        """Check that all files of other checkpoints are still there, before the commit."""
        files = ShardFiles(self.store, manifest, Verify.OFF)
        try:
            for file, path in enumerate(manifest.files):
                origin = manifest.origin_of(file)
                if origin is None:
                    continue
                try:
                    files.check(file)
                except CorruptCheckpointError as error:
                    raise CorruptCheckpointError(
                        f"{path!r} of {self.store.at(origin.location).location}, which the new "
                        "checkpoint was to refer to, is gone or was replaced. Nothing was saved; "
                        "save with another base, or without one"
                    ) from error
        finally:
            files.close()

    def check_visible(self, files: Mapping[str, int | None], rank: int) -> None:
        """Check that all files are there, with the bytes that were written.

        Those of another rank are not if the place is not shared.
        """
        if self.store.remote is not None and len(files) > 1:
            # One request for all. What it does not show is looked for below.
            found_there = self.store.sizes()
            files = {
                path: size
                for path, size in files.items()
                if path not in found_there or size not in (None, found_there[path])
            }
        give_up = time.monotonic() + _UNSEEN_SECONDS
        own = set(self.written)
        for path, size in files.items():
            found = self._wait_for(path, -math.inf if path in own else give_up, rank)
            if size is not None and found != size:
                raise CorruptCheckpointError(
                    f"{path!r} at {self.store.location} has {found} bytes, although {size} were "
                    "written"
                )

    def _wait_for(self, path: str, give_up: float, rank: int) -> int:
        """The size of a file, which a network file system may take a moment to show."""
        while True:
            try:
                # Opened, since a network file system may answer other questions from its cache.
                reader = self.store.open_reader(path)
            except FileNotFoundError as error:
                withdrawn = self._claim is not None and self.store.version(self._claim) is None
                if withdrawn or give_up == -math.inf:
                    raise self.removed() from error
                if time.monotonic() > give_up:
                    raise CheckpointException(
                        f"{path!r} was written by another rank, but is not at "
                        f"{self.store.location} as rank {rank} sees it: all ranks must write "
                        "to a file system that they share"
                    ) from error
                time.sleep(0.1)
            else:
                reader.close()
                return reader.nbytes

    def sync(self) -> None:
        """Make the names of all files durable."""
        try:
            self.store.sync()
        except FileNotFoundError as error:
            raise self.removed() from error

    def commit(
        self, manifest: bytes, used: Collection[str], replaced: Collection[str] = ()
    ) -> None:
        """Publish the manifest, and clear up behind it. An interrupt comes before or after.

        `replaced` are files of a checkpoint that was here, and is not one of ours.
        """
        run_uninterrupted(lambda: self._commit(manifest, used, replaced))

    def _commit(self, manifest: bytes, used: Collection[str], replaced: Collection[str]) -> None:
        store = self.store
        if self._claim is None:
            raise CheckpointException(f"the save to {store.location} was never begun")
        try:
            version = store.commit(self._claim, MANIFEST, manifest, self._replaces)
        except VersionConflict as conflict:
            raise CommitConflictError(
                f"another save was committed at {store.location} while this one was written. "
                "Nothing of this one is visible; give each job a place of its own"
            ) from conflict
        except FileNotFoundError as error:
            raise self.removed() from error
        self._claim, self.written = None, []
        try:
            remove_debris(store, version, self.save_id, used, replaced)
        except OSError as error:
            # The save is committed, and the next one clears up.
            logger.warning("%s may hold files that nobody needs: %s", store.location, error)

    def discard(self, is_coordinator: bool) -> None:
        """Remove the files of a save that failed, unless it was committed all the same."""
        run_uninterrupted(lambda: self._discard(is_coordinator))

    def _discard(self, is_coordinator: bool) -> None:
        # The claim first: without it nothing can be committed any more.
        unneeded = [*([self._claim] if self._claim else []), *self.written]
        self._claim, self.written = None, []
        if unneeded and not self._is_committed(is_coordinator):
            delete_quietly(self.store, unneeded)
        if self.made_place:
            with contextlib.suppress(OSError):
                self.store.remove()

    def _is_committed(self, is_coordinator: bool) -> bool:
        if is_coordinator and self.store.version(MANIFEST) == self._replaces:
            return False
        return is_committed(self.store, self.save_id)

    def removed(self) -> CheckpointException:
        """The error for files that vanish while they are needed."""
        return CheckpointException(
            f"files of this save were removed from {self.store.location} while it was written, or "
            "the whole directory was. Nothing of the save is visible; save again, and find out "
            "what deletes files there"
        )

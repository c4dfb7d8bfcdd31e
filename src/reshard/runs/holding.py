"""Who holds the root of a run: one job at a time, named in a file that it renews.

A holder on this machine is looked up. One elsewhere counts as gone when it has not renewed the
file for two minutes, by the clock of the store.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid

import msgspec

from reshard.api import CheckpointInUseError
from reshard.checkpoint.directory import delete_quietly
from reshard.runs.small_files import make_draft, read_small, with_draft
from reshard.stores.owners import is_alive, owner_tag
from reshard.stores.protocol import Store, VersionConflict

logger = logging.getLogger(__name__)

HOLDER = "holder.json"
BEAT_SECONDS = 15.0
SILENT_SECONDS = 120.0


class Holder(msgspec.Struct, frozen=True):
    """What the file says."""

    host: str
    pid: int
    owner: str
    since: float
    beat: float
    # Last: some stores tell versions apart by the last bytes.
    token: str

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.host}, process {self.pid}, since {since}"


class Hold:
    """A root that this process holds."""

    def __init__(self, store: Store, since: float, version: str, token: str) -> None:
        self._store = store
        self._since = since
        self._version = version
        self._token = token
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost_to: str | None = None
        """Who has taken over, if somebody has."""

    def keep_renewing(self, seconds: float = BEAT_SECONDS) -> None:
        """Renew the file in the background from now on."""

        def renew() -> None:
            while not self._stop.wait(seconds):
                self.renew()

        self._thread = threading.Thread(target=renew, name="reshard-hold", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Say that this process is still there. Best effort: failures are logged."""
        if self.lost_to is not None:
            return
        data, token = _file_of_this_process(self._since)
        try:
            self._version = with_draft(self._store, HOLDER, data, self._version)
            self._token = token
        except VersionConflict:
            self.lost_to = str(_read(self._store) or "somebody who removed the file")
            logger.error("%s was taken over by %s", self._store.location, self.lost_to)
        except OSError as error:
            logger.warning("could not renew %s of %s: %s", HOLDER, self._store.location, error)

    def check(self) -> None:
        """Raise if somebody else has taken over."""
        if self.lost_to is not None:
            raise CheckpointInUseError(
                f"{self._store.location} was taken over by {self.lost_to}, so this job saves "
                "nothing more to it. End one of the two, or give each a root of its own"
            )

    def release(self) -> None:
        """Let others hold the root."""
        self._stop.set()
        if self._pid != os.getpid():
            # A forked child does not hold what its parent does.
            return
        if self._thread is not None:
            self._thread.join()
        found = _read(self._store)
        if found is not None and found.token == self._token:
            delete_quietly(self._store, [HOLDER])


def hold(store: Store, take_over: bool = False) -> Hold:
    """Hold a root; `CheckpointInUseError` if another process does, unless that is gone.

    With `take_over` it does not matter whether it is.
    """
    draft = make_draft(store, HOLDER)
    try:
        version = store.version(HOLDER)
        found = _read(store)
        if found is not None and not take_over and _may_be_alive(store, found, draft):
            raise _held(store, found)
        if found is not None:
            logger.warning("taking %s over from %s", store.location, found)
        since = time.time()
        data, token = _file_of_this_process(since)
        try:
            return Hold(store, since, store.commit(draft, HOLDER, data, version), token)
        except VersionConflict:
            raise _held(store, _read(store)) from None
    except BaseException:
        delete_quietly(store, [draft])
        raise


def _file_of_this_process(since: float) -> tuple[bytes, str]:
    token = uuid.uuid4().hex
    holder = Holder(socket.gethostname(), os.getpid(), owner_tag(), since, time.time(), token)
    return msgspec.json.encode(holder), token


def _read(store: Store) -> Holder | None:
    content = read_small(store, HOLDER)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=Holder)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        logger.warning("%s of %s is damaged, and ignored: %s", HOLDER, store.location, error)
        return None


def _may_be_alive(store: Store, found: Holder, draft: str) -> bool:
    living = is_alive(found.owner)
    if living is not None:
        return living
    # The draft was made just now: both times are of one clock.
    now, beat = store.modified(draft), store.modified(HOLDER)
    age = time.time() - found.beat if now is None or beat is None else now - beat
    return age < SILENT_SECONDS


def _held(store: Store, found: Holder | None) -> CheckpointInUseError:
    who = str(found) if found is not None else "another process, since just now"
    return CheckpointInUseError(
        f"{store.location} is held by another job ({who}). Give this one a root of its own, or end "
        f"the other. If it is gone and was on another machine, wait {SILENT_SECONDS:.0f} s or pass "
        "take_over=True; to only read, pass read_only=True"
    )

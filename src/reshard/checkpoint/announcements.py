"""Who has announced to save to a place, to read it or to delete it, and whether that may still be
going on.

Processes of this machine are looked up. Of others nothing is known but when they announced it:
after a day they are taken for dead.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from reshard.checkpoint.directory import CLAIM, DELETION, READING
from reshard.stores.owners import is_alive
from reshard.stores.protocol import CutShortError, Store

FORGOTTEN_SECONDS = 24 * 3600.0
"""How long a process on another machine, of which nothing else is known, may be alive."""
_MOST_SHOWN_BYTES = 200
_WHO = re.compile(rb"([^\x00-\x1f]+, process \d+), is ")


def claims_in(store: Store) -> Iterator[str]:
    """The claims of saves to a place that may be alive."""
    for key in store.list():
        match = CLAIM.fullmatch(key)
        if match and may_be_alive(store, key, match[2]):
            yield key


def deletions_in(store: Store) -> Iterator[str]:
    """The announcements of deletions of a place that may be going on."""
    for key in store.list():
        match = DELETION.fullmatch(key)
        if match and may_be_alive(store, key, match[1]):
            yield key


def readings_in(store: Store) -> Iterator[str]:
    """The announcements of readers of a place that may be at it."""
    for key in store.list():
        match = READING.fullmatch(key)
        if match and may_be_alive(store, key, match[1]):
            yield key


def may_be_alive(store: Store, key: str, owner: str, now: float | None = None) -> bool:
    """Whether the process that announced something with a file may be alive.

    `now` is the time by the clock of the store, if that is known.
    """
    living = is_alive(owner)
    if living is not None:
        return living
    made = store.modified(key)
    return made is None or (now or time.time()) - made < FORGOTTEN_SECONDS


class Announcer(NamedTuple):
    """Who announced something and when, and what to do if it is not true any more; for people."""

    who: str
    if_gone: str


def announcer(store: Store, key: str) -> Announcer:
    made = store.modified(key)
    since = "" if made is None else time.strftime(", since %Y-%m-%d %H:%M", time.localtime(made))
    return Announcer(
        f"{_who(store, key)}{since}",
        f"If that process is gone, remove {key!r} from {store.location}; after a day it does not "
        "count any more",
    )


def _who(store: Store, key: str) -> str:
    try:
        reader = store.open_reader(key)
    except OSError:
        return "another process"
    try:
        text = bytearray(min(reader.nbytes, _MOST_SHOWN_BYTES))
        reader.read_into(0, [memoryview(text)] if text else [])
    except CutShortError:
        text = bytearray()
    finally:
        reader.close()
    # The claim of a save that is just committing holds its manifest.
    line = _WHO.match(text)
    return line[1].decode(errors="replace") if line else "another process"

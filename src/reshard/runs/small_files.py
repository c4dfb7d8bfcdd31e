"""Small files of a run, in whatever store: read whole, and replaced atomically."""

from __future__ import annotations

import re
import uuid

from reshard.checkpoint.directory import delete_quietly, put_new
from reshard.stores.owners import OWNER, is_alive, owner_tag
from reshard.stores.protocol import CutShortError, Store, VersionConflict

DRAFT = re.compile(rf"\..+\.({OWNER})\.[0-9a-f]{{8}}\.draft")
_ATTEMPTS = 5


def read_small(store: Store, key: str) -> bytes | None:
    """The content of a file; None if there is no such file."""
    for attempt in range(_ATTEMPTS):
        try:
            reader = store.open_reader(key)
        except FileNotFoundError:
            return None
        try:
            content = bytearray(reader.nbytes)
            reader.read_into(0, [memoryview(content)] if content else [])
            return bytes(content)
        except CutShortError:
            # It was replaced meanwhile, where that is not one step.
            if attempt + 1 == _ATTEMPTS:
                raise
        finally:
            reader.close()
    return None


def replace_small(store: Store, key: str, data: bytes) -> None:
    """Write a file, in place of one that has the name; readers see the one or the other."""
    for attempt in range(_ATTEMPTS):
        try:
            with_draft(store, key, data, store.version(key))
            return
        except VersionConflict:
            if attempt + 1 == _ATTEMPTS:
                raise


def with_draft(store: Store, key: str, data: bytes, expected: str | None) -> str:
    """Write a file in place of version `expected`; VersionConflict if another is there."""
    draft = make_draft(store, key)
    try:
        return store.commit(draft, key, data, expected)
    except BaseException:
        delete_quietly(store, [draft])
        raise


def make_draft(store: Store, key: str) -> str:
    """A file that only this call writes."""
    draft = f".{key}.{owner_tag()}.{uuid.uuid4().hex[:8]}.draft"
    put_new(store, draft, b"", durable=False)
    return draft


def remove_dead_drafts(store: Store) -> None:
    """Delete drafts of processes that are gone."""
    drafts = [(key, match[1]) for key in store.list() if (match := DRAFT.fullmatch(key))]
    delete_quietly(store, [key for key, owner in drafts if is_alive(owner) is False])

"""Files that are written under temporary names, and get their own when all are complete."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

from reshard.checkpoint.directory import delete_quietly
from reshard.engine.workers import run_uninterrupted
from reshard.foreign.safetensors import INDEX
from reshard.stores.owners import OWNER, is_alive, owner_tag
from reshard.stores.protocol import Store

_DRAFT = re.compile(rf"\.[0-9a-f]{{8}}\.({OWNER})\.(.*)\.partial")


def new_token(unique: str = "") -> str:
    """What is in the temporary names of one process: who writes, so that others know if it died."""
    return f"{(unique or uuid.uuid4().hex)[:8]}.{owner_tag()}"


def draft_name(token: str, name: str) -> str:
    """What a file is called until all are complete."""
    return f".{token}.{name}.partial"


def final_name(draft: str) -> str:
    """The name that a file will have."""
    match = _DRAFT.fullmatch(draft)
    return draft if match is None else match[2]


def remove_dead_drafts(store: Store) -> None:
    """Delete what processes of this machine left that ended too early."""
    drafts = ((key, _DRAFT.fullmatch(key)) for key in store.list())
    dead = [key for key, match in drafts if match and is_alive(match[1]) is False]
    delete_quietly(store, dead)


def publish(store: Store, names: Mapping[str, str], older: set[str]) -> None:
    """Give each draft its name, in order, so that an index comes last; or leave none of them.

    `older` files are replaced or removed: their index first, so that nobody finds a mixture. An
    interrupt comes before or after.
    """
    run_uninterrupted(lambda: _publish(store, names, older))


def _publish(store: Store, names: Mapping[str, str], older: set[str]) -> None:
    store.sync()
    if INDEX in older:
        store.delete(INDEX)
    published: list[str] = []
    try:
        for draft, name in names.items():
            store.rename(draft, name)
            published.append(name)
        delete_quietly(store, sorted(older - set(published)))
        store.sync()
    except BaseException:
        delete_quietly(store, published)
        raise

"""What no checkpoint needs any more: files of saves that failed or were replaced, and checkpoints
that are deleted.

`docs/design/commit.md` says who may delete what, and `docs/design/references.md` why that is safe
for checkpoints that refer to each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from reshard.api import CheckpointInUseError, CheckpointNotFoundError, UnsupportedFormatError
from reshard.checkpoint.announcements import (
    announcer,
    claims_in,
    deletions_in,
    may_be_alive,
    readings_in,
)
from reshard.checkpoint.dependents import dependents_of, files_in_use
from reshard.checkpoint.directory import (
    CLAIM,
    DELETION,
    MANIFEST,
    PART,
    PIN,
    READING,
    SHARD_FILE,
    delete_quietly,
    deletion_name,
    deletion_text,
    has_checkpoint,
    has_foreign_manifest,
    put_new,
    token_of,
)
from reshard.stores.protocol import Store

logger = logging.getLogger(__name__)


def remove_debris(
    store: Store,
    committed: str | None,
    save_id: str,
    used: Collection[str],
    replaced: Collection[str] = (),
) -> None:
    """Delete what no save needs any more, after version `committed` became the manifest.

    `save_id` is the save of that manifest; besides its own files it uses `used`. Files that are
    `replaced` have names that do not say whose they are, and belonged to the manifest before.
    What a save that may be alive has written stays, whatever happens at the same time:
    - A save makes its claim before its first file. So a process that sees a file and
      then lists the claims sees the claim, unless it was withdrawn or has become the manifest.
    - If it has become the manifest since, `committed` is no longer there.
    - Of two that clear up after a dead save, the one that removes the claim does it. A save
      that was thought dead finds its claim gone, and commits nothing.
    Files that other checkpoints refer to stay, too.
    """
    files = [key for key in store.list() if key not in used and key != MANIFEST]
    if not files:
        return
    claims = {match[1]: key for key in store.list() if (match := CLAIM.fullmatch(key))}
    if store.version(MANIFEST) != committed:
        # Whoever replaced it clears up.
        return
    alive = {token for token, claim in claims.items() if not _withdraw_dead(store, claim)}
    alive.add(token_of(save_id))
    unneeded = [key for key in files if key in replaced]
    for key in files:
        match = SHARD_FILE.fullmatch(key) or PART.fullmatch(key)
        if match and match[1] not in alive:
            unneeded.append(key)
    if unneeded:
        in_use = files_in_use(store)
        delete_quietly(store, [key for key in unneeded if in_use is not None and key not in in_use])


def _withdraw_dead(store: Store, claim: str) -> bool:
    """Remove the claim of a save that is dead; whether it was, and this did it."""
    match = CLAIM.fullmatch(claim)
    # The manifest was made just now.
    now = store.modified(MANIFEST)
    if match is None or now is None or may_be_alive(store, claim, match[2], now):
        return False
    try:
        return store.delete(claim)
    except OSError as error:
        logger.warning("could not remove %r from %s: %s", claim, store.location, error)
        return False


def check_deletable(store: Store) -> None:
    """Refuse to delete a checkpoint that is in use, pinned, or that others refer to."""
    _check_free(store)
    if dependents := dependents_of(store):
        raise CheckpointInUseError(_describe(store, dependents))


def delete_checkpoint(store: Store, make_whole: Callable[[Store], object] | None) -> None:
    """Delete a checkpoint, and what failed saves have left in its place.

    Those that refer to it are first given copies by `make_whole`, or without it are an error. The
    deletion is announced before they are looked for: a save that refers to the checkpoint makes its
    claim first, and then looks for announcements. So one of the two sees the other.
    """
    try:
        is_there = any(_is_of_a_checkpoint(store, key) for key in store.list())
    except NotADirectoryError:
        is_there = False
    if not is_there:
        raise CheckpointNotFoundError(f"there is no checkpoint at {store.location} to delete")
    if has_foreign_manifest(store):
        raise UnsupportedFormatError(
            f"{store.location} is not deleted: its {MANIFEST} is no manifest of reshard, but of "
            "torch.distributed.checkpoint or of something else. If nobody needs what is there, "
            "remove the directory yourself"
        )
    announcement = deletion_name()
    for other in deletions_in(store):
        who, if_gone = announcer(store, other)
        raise CheckpointInUseError(f"{store.location} is being deleted already ({who}). {if_gone}")
    try:
        put_new(store, announcement, deletion_text(), durable=False)
    except FileExistsError:
        raise CheckpointInUseError(
            f"{store.location} is being deleted already, by another thread"
        ) from None
    try:
        _check_free(store)
        dependents = dependents_of(store)
        if dependents and make_whole is not None:
            for dependent in dependents:
                if has_checkpoint(dependent) and not any(claims_in(dependent)):
                    make_whole(dependent)
            dependents = dependents_of(store)
        if dependents:
            raise CheckpointInUseError(_describe(store, dependents))
    except BaseException:
        store.delete(announcement)
        raise
    # From here on it does not exist. Without its manifest the rest is debris.
    store.delete(MANIFEST)
    store.sync()
    # The announcement last: what is there without one is found by whoever deletes again.
    for key in store.list():
        if key != announcement and _is_of_a_checkpoint(store, key):
            store.delete(key)
    store.delete(announcement)
    store.remove()


def _is_of_a_checkpoint(store: Store, key: str) -> bool:
    """Whether a file is of a checkpoint, of a save, or of a deletion or a reader that is gone."""
    announced = DELETION.fullmatch(key) or READING.fullmatch(key)
    if announced:
        return not may_be_alive(store, key, announced[1])
    return key == MANIFEST or any(each.fullmatch(key) for each in (SHARD_FILE, PART, CLAIM))


def _check_free(store: Store) -> None:
    for claim in claims_in(store):
        who, if_gone = announcer(store, claim)
        raise CheckpointInUseError(
            f"a save to {store.location} is under way ({who}). Wait for it to end. {if_gone}"
        )
    for reading in readings_in(store):
        who, if_gone = announcer(store, reading)
        raise CheckpointInUseError(
            f"{store.location} is being read ({who}). Wait for that to end. {if_gone}"
        )
    if store.version(PIN) is not None:
        who, _ = announcer(store, PIN)
        raise CheckpointInUseError(
            f"{store.location} is pinned ({who}). Unpin it first, with CheckpointManager.unpin or "
            f"by removing {PIN!r} from it"
        )


def _describe(store: Store, dependents: Collection[Store]) -> str:
    shown = ", ".join(dependent.location for dependent in [*dependents][:5])
    more = f" and {len(dependents) - 5} more" if len(dependents) > 5 else ""
    for dependent in dependents:
        for claim in claims_in(dependent):
            who, if_gone = announcer(dependent, claim)
            return (
                f"{store.location} holds data that a save to {dependent.location} may refer to, "
                f"which is under way ({who}). Wait for it to end. {if_gone}"
            )
    return (
        f"{store.location} holds data that other checkpoints refer to: {shown}{more}. Delete those "
        "first, make them whole with reshard.materialise, or pass materialise=True"
    )

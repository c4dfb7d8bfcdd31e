"""What of a run is deleted: checkpoints that no policy keeps, and what dead saves have left."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from reshard.api import CheckpointException, CheckpointInUseError, CheckpointNotFoundError
from reshard.checkpoint.directory import has_checkpoint
from reshard.checkpoint.keeping import is_pinned
from reshard.operations.upkeep import delete
from reshard.runs.root import Root
from reshard.runs.small_files import remove_dead_drafts

logger = logging.getLogger(__name__)


def delete_unkept(root: Root, keep: Any, now: float, damaged: Collection[int] = ()) -> list[int]:
    """Delete the checkpoints that `keep` does not keep; the steps that are gone.

    The newest stays in any case, as do those that are pinned, being read, or referred to, and those
    that are not ours. `damaged` ones are neither counted nor deleted. What cannot be deleted now
    is logged: whoever calls this again tries again.
    """
    good = [step for step in root.committed() if step not in damaged]
    if not good:
        return []
    newest = good[-1]
    deleted = []
    if keep is not None:
        kept = {*keep.kept(root.saved(good), now), newest}
        deleted = [step for step in good if step not in kept and _delete(root, step)]
    here = {*root.committed(), *damaged}
    for step in root.steps_with_metrics():
        # A step that is being saved has its metrics already, but is newer.
        if step < newest and step not in here:
            root.delete_metrics(step)
    return deleted


def _delete(root: Root, step: int) -> bool:
    place = root.open(step)
    if is_pinned(place):
        return False
    try:
        delete(root.place_of(step), False, root.storage_options)
    except (CheckpointException, OSError, ValueError) as error:
        logger.warning("%s is not deleted, although no policy keeps it: %s", place.location, error)
        return False
    root.delete_metrics(step)
    return True


def clear_debris(root: Root) -> None:
    """Delete what saves have left that were cut off, their metrics, and drafts of small files.

    Only what belongs to processes that are gone, as far as that can be told; the folders of
    checkpoints are left alone.
    """
    remove_dead_drafts(root.store)
    for step in root.folders():
        place = root.open(step)
        if has_checkpoint(place):
            continue
        try:
            delete(root.place_of(step), False, root.storage_options)
            logger.info("%s was left by a save that was cut off, and is removed", place.location)
        except CheckpointNotFoundError:
            # Nothing of a save is in it.
            place.remove()
        except CheckpointInUseError as error:
            logger.info("%s is not cleared: %s", place.location, error)
        except (CheckpointException, OSError, ValueError) as error:
            logger.warning("%s could not be cleared: %s", place.location, error)
    here = {*root.folders()}
    for step in root.steps_with_metrics():
        if step not in here:
            root.delete_metrics(step)

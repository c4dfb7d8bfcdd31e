"""Stored checkpoints as wholes: make one whole, delete one, compare two. One process does it."""

from __future__ import annotations

import os

from reshard.operations.comparison import Comparison, compare
from reshard.operations.upkeep import delete as _delete
from reshard.operations.upkeep import make_whole

__all__ = ["Comparison", "delete", "materialise", "same"]


def materialise(
    checkpoint_id: str | os.PathLike[str], destination: str | os.PathLike[str] | None = None
) -> bool:
    """Make a checkpoint whole again: copy what it refers to in other checkpoints.

    In place, or as a new checkpoint at `destination`, where there must be none. Data is streamed
    and checked on the way. Atomic as a save is; readers see the checkpoint before or after.
    Returns whether there was anything to copy.
    """
    return make_whole(checkpoint_id, destination)


def delete(checkpoint_id: str | os.PathLike[str], *, materialise: bool = False) -> None:
    """Delete a checkpoint, unless another one refers to it.

    Looked at are all checkpoints in the same folder, and saves to it that are under way. With
    `materialise`, those that refer to it are made whole first; otherwise a `CheckpointInUseError`
    names them. What is not of a checkpoint stays.
    """
    _delete(checkpoint_id, materialise)


def same(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Comparison:
    """Whether two checkpoints hold the same data, whatever their layouts.

    Only the manifests are read. Tensors that are cut in the same way on both sides are compared
    by the digests of their chunks, others by their fingerprints (`save(..., fingerprint=True)`),
    values by their checksums. The result is true if everything is there on both sides and equal,
    and names what is not.
    """
    return compare(first, second)

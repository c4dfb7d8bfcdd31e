"""Work on stored checkpoints, by one process: making them whole, and deleting them."""

from __future__ import annotations

import os

from reshard.background.queue import save_queue
from reshard.checkpoint.debris import delete_checkpoint
from reshard.checkpoint.materialising import materialise
from reshard.operations.targets import Place, comparable_place
from reshard.stores.local import LocalStore
from reshard.stores.protocol import Store


def make_whole(checkpoint: Place, target: Place | None) -> bool:
    """Copy what a checkpoint refers to; whether there was anything to copy."""
    source = _open(checkpoint)
    if target is None:
        return materialise(source, source, in_place=True)
    other = _open(target)
    if source.relative(other.location) == ".":
        raise ValueError(
            f"{os.fspath(target)!r} is the checkpoint itself: leave the destination out to make it "
            "whole in place"
        )
    return materialise(source, other, in_place=False)


def delete(checkpoint: Place, make_dependents_whole: bool) -> None:
    """Delete a checkpoint that no other refers to."""

    def make_one_whole(dependent: Store) -> None:
        materialise(dependent, dependent, in_place=True)

    store = _open(checkpoint)
    if os.path.islink(store.location):
        raise ValueError(
            f"{os.fspath(checkpoint)!r} is a link to {os.path.realpath(checkpoint)!r}: pass that "
            "to delete the checkpoint, or remove the link yourself"
        )
    delete_checkpoint(store, make_one_whole if make_dependents_whole else None)


def _open(place: Place) -> Store:
    save_queue().settle(comparable_place(place))
    return LocalStore(place)

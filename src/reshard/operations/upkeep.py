"""Work on stored checkpoints, by one process: making them whole, and deleting them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from reshard.background.queue import save_queue
from reshard.checkpoint.debris import delete_checkpoint
from reshard.checkpoint.directory import is_same_place
from reshard.checkpoint.materialising import materialise
from reshard.operations.targets import Place, comparable_place
from reshard.stores.places import open_place
from reshard.stores.protocol import Store


def make_whole(
    checkpoint: Place, target: Place | None, storage_options: Mapping[str, Any] | None = None
) -> bool:
    """Copy what a checkpoint refers to; whether there was anything to copy."""
    source = _open(checkpoint, storage_options)
    if target is None:
        return materialise(source, source, in_place=True)
    other = _open(target, storage_options)
    if is_same_place(source, other):
        raise ValueError(
            f"{os.fspath(target)!r} is the checkpoint itself: leave the destination out to make it "
            "whole in place"
        )
    return materialise(source, other, in_place=False)


def delete(
    checkpoint: Place,
    make_dependents_whole: bool,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Delete a checkpoint that no other refers to."""

    def make_one_whole(dependent: Store) -> None:
        materialise(dependent, dependent, in_place=True)

    store = _open(checkpoint, storage_options)
    if store.remote is None and os.path.islink(store.location):
        raise ValueError(
            f"{os.fspath(checkpoint)!r} is a link to {os.path.realpath(checkpoint)!r}: pass that "
            "to delete the checkpoint, or remove the link yourself"
        )
    delete_checkpoint(store, make_one_whole if make_dependents_whole else None)


def _open(place: Place, storage_options: Mapping[str, Any] | None) -> Store:
    save_queue().settle(comparable_place(place))
    return open_place(place, storage_options)

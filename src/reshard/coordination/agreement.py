"""Making sure that all ranks load the same checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reshard.api import CheckpointException
from reshard.coordination.channel import agree
from reshard.metadata import StorageMeta

__all__ = ["agree_on_checkpoint", "announce_load"]

_OPENED = re.compile(r"load the save (\S+) at (.*)", re.DOTALL)
_MOST_SHOWN = 4


def announce_load(opened: StorageMeta | None) -> bytes:
    """What a rank is about to load. Storages of users need not know which save that is."""
    if opened is None or not opened.save_id:
        return b"load"
    return f"load the save {opened.save_id} at {str(opened.checkpoint_id)!r}".encode()


def agree_on_checkpoint(messages: Sequence[bytes]) -> Sequence[bytes]:
    """Check that all ranks announced a load, and of the same save."""
    intents = [message.decode() for message in messages]
    agree([b"load" if intent.startswith("load ") else intent.encode() for intent in intents])
    first: dict[str, str] = {}
    for rank, intent in enumerate(intents):
        if opened := _OPENED.fullmatch(intent):
            first.setdefault(opened[1], f"rank {rank} the save {opened[1]} at {opened[2]}")
    if len(first) > 1:
        raise CheckpointException(
            f"ranks opened different checkpoints: {', '.join([*first.values()][:_MOST_SHOWN])}. "
            "Pass the same place on all ranks; if it is the same, the checkpoint was replaced "
            "while it was opened: load again"
        )
    return messages

"""Making sure that all ranks load the same checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.api import CheckpointException
from reshard.metadata import StorageMeta

_MOST_SHOWN = 4


def announce_load(opened: StorageMeta | None) -> str:
    """Which save a rank has opened, and where. Storages of users need not know that."""
    if opened is None or not opened.save_id:
        return ""
    return f"{opened.save_id} at {str(opened.checkpoint_id)!r}"


def agree_on_checkpoint(messages: Sequence[str]) -> Sequence[str]:
    """Check that all ranks have opened the same save."""
    first: dict[str, str] = {}
    for rank, message in enumerate(messages):
        save_id, _, place = message.partition(" at ")
        if save_id:
            first.setdefault(save_id, f"rank {rank} the save {save_id} at {place}")
    if len(first) > 1:
        raise CheckpointException(
            f"ranks opened different checkpoints: {', '.join([*first.values()][:_MOST_SHOWN])}. "
            "Pass the same place on all ranks; if it is the same, the checkpoint was replaced "
            "while it was opened: load again"
        )
    return [""] * len(messages)

"""What a run resumes from, and which failures of a load mean that it has to go further back."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.api import CheckpointException, CheckpointNotFoundError, CorruptCheckpointError
from reshard.operations.load_report import LoadReport


class Restored(int):
    """The step that was restored, and how.

    `skipped` are newer checkpoints that could not be loaded, by their steps, with the reasons.
    """

    skipped: Mapping[int, str]
    report: LoadReport


def is_damage(error: CheckpointException) -> bool:
    """Whether a load failed for what is stored, and not for what was asked for.

    The same on all ranks: they have the same failures.
    """
    damage = (CorruptCheckpointError, CheckpointNotFoundError, OSError)
    if isinstance(error, damage):
        return True
    return any(isinstance(reason, damage) for reason, _ in error.failures.values())

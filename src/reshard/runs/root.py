"""What lies in the root of a run: a folder for each step that was saved, and its metrics."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from reshard.api import CheckpointExistsError
from reshard.checkpoint.directory import MANIFEST, check_may_be_made, has_checkpoint
from reshard.policies import Saved
from reshard.runs.small_files import read_small, replace_small
from reshard.stores.places import open_place
from reshard.stores.protocol import Store
from reshard.stores.urls import path_of

logger = logging.getLogger(__name__)

_NUMBER = r"0|[1-9]\d{0,17}"
_STEP = re.compile(rf"step-({_NUMBER})")
_METRICS = re.compile(rf"step-({_NUMBER})\.metrics\.json")


class Root:
    """The folder of a run, on any store."""

    def __init__(
        self, place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> None:
        path = path_of(place)
        # The working directory may change during the run.
        self.place = path.rstrip("/") if "://" in path else os.path.abspath(path)
        self.storage_options = storage_options
        self.store = open_place(self.place, storage_options)

    @property
    def location(self) -> str:
        """How to name it to a person."""
        return self.store.location

    def create(self) -> None:
        """Make the folder, if it is not there; an error if something else is."""
        if self.store.as_file() is not None:
            raise CheckpointExistsError(
                f"{self.location!r} is a file, and a folder is needed for the checkpoints of a "
                "run. Choose another root, or move the file away"
            )
        try:
            self.store.create()
        except (FileExistsError, NotADirectoryError):
            check_may_be_made(self.location)
            raise

    # Steps

    def place_of(self, step: int) -> str:
        """Where the checkpoint of a step is, as `save` and `load` take it."""
        return f"{self.place}/step-{step}"

    def open(self, step: int) -> Store:
        return self.store.at(f"step-{step}")

    def folders(self) -> list[int]:
        """All steps that have a folder, whatever is in it."""
        return _numbers(_STEP, self.store.folders())

    def committed(self) -> list[int]:
        """The steps that have a whole checkpoint."""
        return [step for step in self.folders() if has_checkpoint(self.open(step))]

    # Metrics

    def put_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        # JSON has no NaN, and no infinity.
        texts = {k: v if math.isfinite(v) else str(v) for k, v in metrics.items()}
        replace_small(self.store, _metrics_name(step), json.dumps(texts).encode())

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of a step; none if it was saved without."""
        content = read_small(self.store, _metrics_name(step))
        if content is None:
            return {}
        try:
            return {str(name): float(value) for name, value in json.loads(content).items()}
        except (ValueError, TypeError, AttributeError) as error:
            logger.warning(
                "the metrics of step %d at %s are damaged: %s", step, self.location, error
            )
            return {}

    def delete_metrics(self, step: int) -> None:
        self.store.delete(_metrics_name(step))

    def steps_with_metrics(self) -> list[int]:
        return _numbers(_METRICS, self.store.list())

    def saved(self, steps: Iterable[int]) -> list[Saved]:
        """What policies decide by. Where a store has no times, all are as new as can be."""
        times = {step: self.open(step).modified(MANIFEST) for step in steps}
        return [
            Saved(step, math.inf if time is None else time, self.metrics(step))
            for step, time in times.items()
        ]


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> list[int]:
    return sorted(int(match[1]) for match in map(pattern.fullmatch, names) if match)


def _metrics_name(step: int) -> str:
    return f"step-{step}.metrics.json"

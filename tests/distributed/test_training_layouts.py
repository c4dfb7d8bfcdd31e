"""Train in one layout, save, load into another, go on: as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reshard
from reshard.training import TrainState
from support.ranks import run_ranks
from support.training import LAYOUTS, single

STEPS = 3
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
"""Sums are cut differently in different layouts; AdamW divides small numbers by small ones."""


def file_name(layout: str) -> str:
    return layout.replace(" ", "_")


def train_and_save(layout: str, box: Path) -> list[float]:
    run = LAYOUTS[layout][1]()
    losses = [run.step(number) for number in range(STEPS)]
    state = {"train": TrainState(run.model, run.optimizer)}
    reshard.save(state, checkpoint_id=box / file_name(layout))
    return losses


def load_and_train(layout: str, box: Path, sources: list[str]) -> dict[str, list[float]]:
    """Go on from each checkpoint; losses, of which the first tells what was loaded."""
    losses = {}
    for source in sources:
        run = LAYOUTS[layout][1]()
        with torch.no_grad():
            for model in run.model if isinstance(run.model, list) else [run.model]:
                for parameter in model.parameters():
                    parameter.zero_()
        state = TrainState(run.model, run.optimizer)
        reshard.load({"train": state}, checkpoint_id=box / file_name(source))
        assert state.report.optimizer.missing == []
        losses[source] = [run.step(number) for number in range(STEPS, 2 * STEPS)]
    return losses


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    run = single()
    return [run.step(number) for number in range(2 * STEPS)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, uninterrupted: list[float]) -> Path:
    box = tmp_path_factory.mktemp("layouts")
    for layout, (ranks, _) in LAYOUTS.items():
        for losses in run_ranks(ranks, train_and_save, layout, box):
            assert losses == pytest.approx(uninterrupted[:STEPS], rel=1e-4)
    return box


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_in_another_layout_as_if_it_had_not_stopped(
    layout: str, checkpoints: Path, uninterrupted: list[float]
) -> None:
    ranks = LAYOUTS[layout][0]
    for by_source in run_ranks(ranks, load_and_train, layout, checkpoints, list(LAYOUTS)):
        for source, losses in by_source.items():
            assert losses == pytest.approx(uninterrupted[STEPS:], rel=1e-4), source

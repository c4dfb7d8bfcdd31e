"""Train in one layout, save, load into another, go on: as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import reshard
from reshard._nested_dict import flatten_state_dict
from reshard.training import TrainState
from support.ranks import run_ranks
from support.training import LAYOUTS, Run, single

# One worker: the checkpoints are made once.
pytestmark = [pytest.mark.xdist_group("training layouts"), pytest.mark.timeout(600)]

STEPS = 3
TOLERANCE = 1e-4
"""Of losses in different layouts, relative: sums are cut differently, and AdamW divides small
numbers by small ones. What is loaded is exact."""
PARAMETER_TOLERANCE = 1e-5
"""Of parameters in different layouts, absolute, after steps of a hundredth each."""


def file_name(layout: str) -> str:
    return layout.replace(" ", "_")


def train_and_save(layout: str, box: Path) -> list[float]:
    """Losses of a run that is saved half-way and goes on."""
    run = LAYOUTS[layout][1]()
    losses = [run.step(number) for number in range(STEPS)]
    state = {"train": TrainState(run.model, run.optimizer)}
    reshard.save(state, checkpoint_id=box / file_name(layout))
    losses += [run.step(number) for number in range(STEPS, 2 * STEPS)]
    save_end(run, box / file_name(layout))
    return losses


def save_end(run: Run, path: Path) -> None:
    """Keep the parameters that a run ends with."""
    state = {"train": TrainState(run.model, rng=False)}
    reshard.save(state, checkpoint_id=path.with_name(f"{path.name}-end"))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of the model and the optimizer's state, by name."""
    names = {
        name
        for name in reshard.FileSystemReader(path).read_metadata().state_dict_metadata
        if name.startswith(("train.model.", "train.optimizer.state."))
    }
    flat, _ = flatten_state_dict(reshard.read_state_dict(path, names))
    assert flat.keys() == names
    return flat


def load_and_train(layout: str, box: Path, sources: list[str]) -> dict[str, list[float]]:
    """Go on from each checkpoint, and save what was loaded once more."""
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
        again = box / f"{file_name(source)}-in-{file_name(layout)}"
        reshard.save({"train": state}, checkpoint_id=again)
        losses[source] = [run.step(number) for number in range(STEPS, 2 * STEPS)]
        save_end(run, again)
    return losses


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    run = single()
    return [run.step(number) for number in range(2 * STEPS)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, uninterrupted: list[float]) -> Path:
    box = tmp_path_factory.mktemp("layouts")
    for layout, (ranks, _) in LAYOUTS.items():
        every_rank = run_ranks(ranks, train_and_save, layout, box)
        assert all(losses == every_rank[0] for losses in every_rank)
        assert every_rank[0] == pytest.approx(uninterrupted, rel=TOLERANCE)
        (box / f"{file_name(layout)}.json").write_text(json.dumps(every_rank[0][STEPS:]))
    return box


def covering(layout: str) -> list[str]:
    """The layout itself and two others, so that every one is also loaded from."""
    names = list(LAYOUTS)
    place = names.index(layout)
    return [names[(place + apart) % len(names)] for apart in (0, 3, 7)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_in_some_other_layouts_as_if_it_had_not_stopped(
    layout: str, checkpoints: Path, uninterrupted: list[float]
) -> None:
    check(layout, covering(layout), checkpoints, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_in_every_other_layout_as_if_it_had_not_stopped(
    layout: str, checkpoints: Path, uninterrupted: list[float]
) -> None:
    check(layout, list(LAYOUTS), checkpoints, uninterrupted)


def check(layout: str, sources: list[str], checkpoints: Path, uninterrupted: list[float]) -> None:
    ranks = LAYOUTS[layout][0]
    for by_source in run_ranks(ranks, load_and_train, layout, checkpoints, sources):
        for source, losses in by_source.items():
            assert losses == pytest.approx(uninterrupted[STEPS:], rel=TOLERANCE), source
        same_layout = json.loads((checkpoints / f"{file_name(layout)}.json").read_text())
        assert by_source[layout] == same_layout
    for source in sources:
        saved = tensors_of(checkpoints / file_name(source))
        loaded = tensors_of(checkpoints / f"{file_name(source)}-in-{file_name(layout)}")
        assert saved.keys() == loaded.keys()
        different = [name for name in saved if not torch.equal(saved[name], loaded[name])]
        assert different == [], source
        end = tensors_of(checkpoints / f"{file_name(source)}-in-{file_name(layout)}-end")
        compare_ends(end, checkpoints, layout, exactly=source == layout)


def compare_ends(
    end: dict[str, torch.Tensor], checkpoints: Path, layout: str, exactly: bool
) -> None:
    """The parameters in the end are those of a run that was not interrupted."""
    wanted = tensors_of(checkpoints / f"{file_name(layout if exactly else 'single')}-end")
    assert end.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if exactly:
            assert torch.equal(end[name], tensor), name
        elif not name.endswith(".key.bias"):
            # A softmax does not change with that, so its gradient is what rounding leaves.
            apart = float((end[name] - tensor).abs().max())
            assert apart <= PARAMETER_TOLERANCE, name

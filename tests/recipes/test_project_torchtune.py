"""torchtune's DistributedCheckpointer and CheckpointClient, under `reshard.patch()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import reshard
from support.ranks import run_ranks
from support.recipes import LONG, fingerprint, is_of_reshard, spoiled, trained
from support.training import Run, fsdp2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LONG)]
pytest.importorskip(
    "torchtune.training",
    reason="torchtune is not installed, or with a torchao that is too new for it",
    exc_type=ImportError,
)


def saves(box: Path) -> dict[str, Any]:
    reshard.patch()
    from torchtune.training.checkpointing import DistributedCheckpointer

    run = trained(fsdp2())
    checkpointer = DistributedCheckpointer(str(box), str(box))
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "epoch": 1}
    checkpointer.save_checkpoint(state, epoch=0)
    checkpointer.save_checkpoint(state, epoch=1, save_async=True)
    # Waits for the one before.
    checkpointer.save_checkpoint(state, epoch=2, save_async=True)
    saved = fingerprint(run)
    trained(run)
    checkpointer._checkpoint_future.result()
    return saved


def loads(box: Path) -> list[dict[str, Any]]:
    reshard.patch()
    from torchtune.training.checkpointing import DistributedCheckpointer

    found = []
    for path in (None, *(str(box / f"dist_epoch_{epoch}") for epoch in (0, 1))):
        run = spoiled(trained(fsdp2(), 1))
        state = {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "epoch": 0,
        }
        checkpointer = DistributedCheckpointer(str(box), str(box))
        state = checkpointer.load_checkpoint(state, path)
        assert state["epoch"] == 1
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        found.append(fingerprint(run))
    return found


def test_the_distributed_checkpointer_saves_and_finds_the_latest(tmp_path: Path) -> None:
    saved = run_ranks(2, saves, tmp_path, seconds=LONG)[0]
    assert all(is_of_reshard(tmp_path / f"dist_epoch_{epoch}") for epoch in range(3))
    assert run_ranks(3, loads, tmp_path, seconds=LONG) == [[saved] * 3] * 3


def client(box: Path) -> Any:
    """A client that saves in the background, as recipes configure it."""
    from omegaconf import OmegaConf
    from torchtune.training.checkpointing._checkpoint_client import CheckpointClient

    checkpointer = {
        "_component_": "torchtune.training.checkpointing.DistributedCheckpointer",
        "checkpoint_dir": str(box),
        "output_dir": str(box),
    }
    settings = {
        "device": "cpu",
        "enable_async_checkpointing": True,
        "resume_from_checkpoint": True,
        "checkpointer": checkpointer,
    }
    made = CheckpointClient(OmegaConf.create(settings))
    # The checkpointer that a client wants besides is one that reads files of a model.
    from torchtune.training.checkpointing import DistributedCheckpointer

    made._checkpointer = DistributedCheckpointer(str(box), str(box))
    return made


def progress() -> Any:
    from torchtune.training.checkpointing._checkpoint_client import TrainingProgress

    return TrainingProgress(seed=3, epochs_run=1, total_epochs=4, max_steps_per_epoch=5)


def saves_as_a_client(box: Path) -> dict[str, Any]:
    reshard.patch()
    run = trained(fsdp2())
    used = client(box)
    used.save_checkpoint(run.model, run.optimizer, progress(), epoch=1)
    used._get_dcp_checkpointer()._checkpoint_future.result()
    return fingerprint(run)


def loads_as_a_client(box: Path) -> tuple[dict[str, Any], int]:
    reshard.patch()
    run: Run = spoiled(fsdp2())
    state = client(box).load_distributed_checkpoint(run.model, run.optimizer)
    return fingerprint(run), state["seed"]


def test_a_recipe_resumes_from_what_was_saved_in_the_background(tmp_path: Path) -> None:
    saved = run_ranks(2, saves_as_a_client, tmp_path, seconds=LONG)[0]
    assert run_ranks(2, loads_as_a_client, tmp_path, seconds=LONG) == [(saved, 3)] * 2

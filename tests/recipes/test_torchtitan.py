"""How torchtitan calls DCP, with nothing changed but the import.

`Checkpointer` does what its manager does, in our words. It runs with either library.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import re
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR

from reshard.stateful import Stateful
from support.ranks import run_alone, run_ranks
from support.recipes import DCP, bits, fingerprint, part, spoiled, with_either_library
from support.training import Run, fsdp2

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
MODEL, OPTIMIZER, SCHEDULE, DATA, PROGRESS = (
    "model",
    "optimizer",
    "lr_scheduler",
    "dataloader",
    "train_state",
)


class ModelState(Stateful):
    """Hands out the same tensors each time, so that staging memory can be used again."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.cached = model.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self.cached

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Not strict: the other states are in the same dict.
        self.model.load_state_dict(state_dict, strict=False)
        self.cached = self.model.state_dict()


class OptimizerState(Stateful):
    def __init__(self, run: Run) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.run.model, self.run.optimizer, options=FLAT)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(
            self.run.model, self.run.optimizer, optim_state_dict=state_dict, options=FLAT
        )


class Data(Stateful):
    """Every rank has a key of its own, with a pickle under it."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        own = pickle.dumps({"position": self.position, "rank": self.rank})
        return {f"dp_rank_{self.rank}": own, "world_size": self.ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["world_size"] == self.ranks
        own = pickle.loads(state_dict[f"dp_rank_{self.rank}"])
        assert own["rank"] == self.rank
        self.position = own["position"]


class Progress(Stateful):
    def __init__(self) -> None:
        self.step = self.ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": torch.tensor(self.step, dtype=torch.int32),
            "ntokens_seen": self.ntokens_seen,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"].item()
        self.ntokens_seen = state_dict["ntokens_seen"]


def warmup(steps: int, step: int) -> float:
    return min(1.0, (step + 1) / steps)


class Checkpointer:
    def __init__(self, library: str, folder: str, run: Run, mode: str = "disabled") -> None:
        self.dcp = part(library)
        self.saver, self.staging = part(library, "state_dict_saver"), part(library, "staging")
        self.folder, self.run, self.mode = folder, run, mode
        self.group = None if mode == "disabled" else dist.new_group(backend="gloo")
        self.schedule = LambdaLR(run.optimizer, functools.partial(warmup, 4))
        self.data, self.progress = Data(), Progress()
        self.states: dict[str, Any] = {
            PROGRESS: self.progress,
            MODEL: ModelState(run.model),
            OPTIMIZER: OptimizerState(run),
            DATA: self.data,
            SCHEDULE: self.schedule,
        }
        self.stager: Any = None
        self.staged: Future[None] | None = None
        self.saved: Future[Any] | None = None

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.wait_for_staging()
            self.run.step(self.progress.step)
            self.schedule.step()
            self.progress.step += 1
            self.progress.ntokens_seen += 100
            self.data.position += 1 + dist.get_rank()

    def facts(self) -> dict[str, Any]:
        """All that a checkpoint has to bring back."""
        return fingerprint(self.run) | {
            "epoch": self.schedule.last_epoch,
            "rates": self.schedule.get_last_lr(),
            "position": self.data.position,
            "step": self.progress.step,
            "ntokens_seen": self.progress.ntokens_seen,
        }

    def place(self, step: int) -> str:
        return os.path.join(self.folder, f"step-{step}")

    def flat(self, states: dict[str, Any]) -> dict[str, Any]:
        """The model at the top, beside the other states."""
        flat = {key: state for key, state in states.items() if key != MODEL}
        return flat | states[MODEL].state_dict()

    @torch.no_grad()
    def save(self) -> None:
        self.wait_for_saving()
        states, place = self.flat(self.states), self.place(self.progress.step)
        if self.mode == "async_with_pinned_mem":
            if self.stager is None:
                self.stager = self.staging.DefaultStager(
                    self.staging.StagingOptions(
                        use_pinned_memory=True,
                        use_shared_memory=True,
                        use_async_staging=True,
                        use_non_blocking_copy=True,
                    )
                )
            result = self.dcp.async_save(
                states,
                storage_writer=None,
                checkpoint_id=place,
                process_group=self.group,
                async_checkpointer_type=self.saver.AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
            assert isinstance(result, self.saver.AsyncSaveResponse)
            self.staged, self.saved = result.staging_completion, result.upload_completion
        elif self.mode == "async":
            result = self.dcp.async_save(
                states, storage_writer=None, checkpoint_id=place, process_group=self.group
            )
            assert isinstance(result, Future)
            self.saved = result
        else:
            self.dcp.save(states, storage_writer=None, checkpoint_id=place)

    @torch.no_grad()
    def save_model(self, dtype: torch.dtype) -> None:
        states = {name: t.to(dtype) for name, t in self.states[MODEL].state_dict().items()}
        self.dcp.save(states, storage_writer=None, checkpoint_id=self.place(self.progress.step))

    @torch.no_grad()
    def load(self, exclude_from_loading: Collection[str] = (), model_only: bool = False) -> int:
        step = self.latest()
        if model_only:
            states = self.states[MODEL].state_dict()
        else:
            wanted = {k: v for k, v in self.states.items() if k not in exclude_from_loading}
            states = self.flat(wanted)
        self.dcp.load(states, checkpoint_id=self.place(step))
        self.states[MODEL].load_state_dict(states)
        return step

    def latest(self) -> int:
        steps = [-1]
        for name in os.listdir(self.folder):
            match = re.fullmatch(r"step-(\d+)", name)
            if match and os.path.isfile(os.path.join(self.folder, name, ".metadata")):
                steps.append(int(match[1]))
        return max(steps)

    def wait_for_staging(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def wait_for_saving(self) -> None:
        if self.saved is not None:
            saved, self.saved = self.saved, None
            saved.result()

    def close(self) -> None:
        self.wait_for_staging()
        self.wait_for_saving()
        if self.stager is not None:
            self.stager.close()


def trains_and_saves(library: str, folder: str, mode: str) -> dict[str, Any]:
    """Two saves, of which the second is the latest, and training that goes on after both."""
    manager = Checkpointer(library, folder, fsdp2(), mode)
    for _ in range(2):
        manager.train(1)
        facts = manager.facts()
        manager.save()
    manager.train(1)
    manager.close()
    # A save that was interrupted leaves a folder, but no metadata.
    if dist.get_rank() == 0:
        os.makedirs(manager.place(9))
    dist.barrier()
    assert manager.latest() == 2
    return facts


def resumes(library: str, folder: str, exclude_from_loading: list[str]) -> dict[str, Any]:
    manager = Checkpointer(library, folder, spoiled(fsdp2()))
    assert manager.load(exclude_from_loading) == 2
    return manager.facts()


@pytest.mark.parametrize(
    ("library", "mode"),
    [
        ("reshard", "disabled"),
        ("reshard", "async"),
        ("reshard", "async_with_pinned_mem"),
        pytest.param(DCP, "disabled", marks=pytest.mark.slow),
        pytest.param(DCP, "async", marks=pytest.mark.slow),
    ],
)
def test_torchtitan_resumes_from_what_each_mode_has_saved(
    library: str, mode: str, tmp_path: Path
) -> None:
    saved = run_ranks(2, trains_and_saves, library, str(tmp_path), mode)
    assert [facts["position"] for facts in saved] == [2, 4]
    assert run_ranks(2, resumes, library, str(tmp_path), []) == saved


@with_either_library
def test_torchtitan_resumes_on_more_ranks_without_the_keys_it_leaves_out(
    library: str, tmp_path: Path
) -> None:
    saved = run_ranks(2, trains_and_saves, library, str(tmp_path), "disabled")[0]
    for facts in run_ranks(3, resumes, library, str(tmp_path), [DATA]):
        assert facts == saved | {"position": 0}


def exports_model(library: str, folder: str) -> dict[str, Any]:
    manager = Checkpointer(library, folder, fsdp2())
    manager.train(2)
    manager.save_model(torch.bfloat16)
    whole = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(manager.run.model, options=whole)
    return {name: bits(weight.bfloat16().float()) for name, weight in weights.items()}


def starts_from_model(library: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is there before the model alone is loaded, and after."""
    manager = Checkpointer(library, folder, spoiled(fsdp2()))
    manager.train(1)
    before = manager.facts()
    manager.load(model_only=True)
    return before, manager.facts()


@with_either_library
def test_torchtitan_exports_a_model_and_starts_from_it(library: str, tmp_path: Path) -> None:
    exported = run_ranks(2, exports_model, library, str(tmp_path))[0]
    for before, after in run_ranks(1, starts_from_model, library, str(tmp_path)):
        assert before.keys() > exported.keys()
        assert after == before | exported


class OlderProgress(Stateful):
    """Until early 2025, lists were put into a buffer first."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def state_dict(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save(self.losses, buffer)
        return {"global_avg_losses": buffer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        buffer = state_dict["global_avg_losses"]
        buffer.seek(0)
        self.losses = torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "library",
    [
        DCP,
        pytest.param("reshard"),
    ],
)
def test_an_older_torchtitan_saves_and_loads_buffers(library: str, tmp_path: Path) -> None:
    run_alone(older_torchtitan, library, str(tmp_path))


def older_torchtitan(library: str, folder: str) -> None:
    dcp = part(library)
    dcp.save({PROGRESS: OlderProgress([0.5, 0.25])}, checkpoint_id=folder)
    resumed = OlderProgress([])
    dcp.load({PROGRESS: resumed}, checkpoint_id=folder)
    assert resumed.losses == [0.5, 0.25]

"""torchtitan's CheckpointManager, optimizers and schedulers, under `reshard.patch()`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard
from support.ranks import run_ranks
from support.recipes import LONG, bits, is_of_reshard
from support.training import batch, loss_of, seeded_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LONG)]
pytest.importorskip("torchtitan.components.checkpoint", reason="torchtitan is not installed")
MODES = ["disabled", "async", "async_with_pinned_mem"]


class Titan:
    """A training of torchtitan's parts; the model is ours, since its own need GPUs."""

    def __init__(self, folder: Path, assets: Path | None = None, **settings: Any) -> None:
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.optimizer import (
            LRSchedulersContainer,
            OptimizersContainer,
            default_adamw,
        )

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = seeded_model()
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        settings_of_optimizer = default_adamw(lr=1e-2)
        settings_of_optimizer.implementation = "for-loop"
        self.optimizers = OptimizersContainer(settings_of_optimizer, model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=10
        )
        self.data = ParallelAwareDataloader(
            Numbers(),
            dp_rank=dist.get_rank(),
            dp_world_size=dist.get_world_size(),
            batch_size=2,
        )
        self.progress = Progress()
        config = CheckpointManager.Config(
            enable=True, folder="checkpoints", interval=1, keep_latest_k=0, **settings
        )
        self.manager = CheckpointManager(
            config,
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress},
            sd_adapter=adapter(assets),
            base_folder=str(folder),
        )

    def train(self, steps: int) -> None:
        numbers = iter(self.data)
        for _ in range(steps):
            self.manager.maybe_wait_for_staging()
            next(numbers)
            words, target = batch(self.progress.step)
            loss_of(self.model(words), target).backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedulers.step()
            self.progress.step += 1

    def spoil(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(-1.0)

    def facts(self) -> dict[str, Any]:
        state = self.model.state_dict() | self.optimizers.state_dict()
        found = {
            name: bits(t.full_tensor() if hasattr(t, "full_tensor") else t)
            for name, t in state.items()
        }
        rates = [group["lr"] for each in self.optimizers for group in each.param_groups]
        return found | {"step": self.progress.step, "rates": rates}

    def weights(self) -> dict[str, Any]:
        return {name: bits(t.full_tensor()) for name, t in self.model.state_dict().items()}

    def close(self) -> None:
        self.manager.maybe_wait_for_staging()
        self.manager.maybe_wait_for_saving()
        self.manager.close()


class Numbers(torch.utils.data.IterableDataset[int]):
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        while True:
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Progress:
    """Like the `Trainer` of torchtitan, which is a state itself."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def adapter(assets: Path | None) -> Any:
    from torchtitan.protocols.state_dict_adapter import StateDictAdapter

    class Adapter(StateDictAdapter):
        """Renames, as those of torchtitan's models do."""

        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            return {f"model.{name}": value for name, value in state_dict.items()}

        def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
            return {n.removeprefix("model."): value for n, value in hf_state_dict.items()}

    return Adapter(None, None if assets is None else str(assets))


# Its own checkpoints


def saves(mode: str, box: Path) -> dict[str, Any]:
    reshard.patch()
    titan = Titan(box, async_mode=mode)
    for _ in range(2):
        titan.train(1)
        facts = titan.facts()
        assert titan.manager.save(titan.progress.step)
    titan.train(1)
    titan.close()
    return facts


def loads(mode: str, box: Path) -> dict[str, Any]:
    reshard.patch()
    # The state of the data belongs to a rank of a world of that size.
    same = dist.get_world_size() == 2
    titan = Titan(box, async_mode=mode, exclude_from_loading=[] if same else ["dataloader"])
    titan.train(1)
    titan.spoil()
    assert titan.manager.load()
    facts = titan.facts()
    assert not same or titan.data.state_dict()
    titan.close()
    return facts


@pytest.mark.parametrize("mode", MODES)
def test_the_checkpoint_manager_saves_and_loads(mode: str, tmp_path: Path) -> None:
    saved = run_ranks(2, saves, mode, tmp_path, seconds=LONG)[0]
    assert is_of_reshard(tmp_path / "checkpoints" / "step-2")
    for ranks in (2, 3):
        assert run_ranks(ranks, loads, mode, tmp_path, seconds=LONG) == [saved] * ranks


# Hugging Face


def index_of(names: Any, folder: Path) -> None:
    """An index as it comes with a model of two files."""
    folder.mkdir()
    places = {
        f"model.{name}": f"model-0000{1 + number % 2}-of-00002.safetensors"
        for number, name in enumerate(names)
    }
    text = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(text)


def exports(box: Path, assets: Path | None) -> dict[str, Any]:
    reshard.patch()
    titan = Titan(box, assets, last_save_in_hf=True, export_dtype="float32")
    titan.train(2)
    assert titan.manager.save(2, last_step=True)
    titan.close()
    return titan.weights()


def begins_with(box: Path, source: Path) -> dict[str, Any]:
    reshard.patch()
    titan = Titan(box, initial_load_in_hf=True, initial_load_path=str(source))
    titan.spoil()
    assert titan.manager.load()
    titan.close()
    return titan.weights()


@pytest.mark.parametrize("files", [1, 2])
def test_the_last_step_is_exported_for_hugging_face(files: int, tmp_path: Path) -> None:
    assets = None if files == 1 else tmp_path / "assets"
    if assets is not None:
        index_of(seeded_model().state_dict(), assets)
    saved = run_ranks(2, exports, tmp_path, assets, seconds=LONG)[0]
    folder = tmp_path / "checkpoints" / "step-2"
    found = sorted(folder.glob("model-*.safetensors"))
    assert len(found) == files
    whole = {n: bits(t) for path in found for n, t in load_file(path).items()}
    assert whole == {f"model.{name}": value for name, value in saved.items()}
    assert run_ranks(3, begins_with, tmp_path / "other", folder, seconds=LONG) == [saved] * 3


def test_a_model_of_hugging_face_is_where_a_training_begins(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    weights = {f"model.{n}": t.clone() for n, t in seeded_model().state_dict().items()}
    save_file(weights, source / "model.safetensors")
    wanted = {n.removeprefix("model."): bits(t) for n, t in weights.items()}
    assert run_ranks(2, begins_with, tmp_path / "other", source, seconds=LONG) == [wanted] * 2

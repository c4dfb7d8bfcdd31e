"""Lightning itself, under `reshard.patch()`: Fabric and the Trainer, with FSDP1 and DTensors."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, TensorDataset

import reshard
from support.ranks import run_alone, run_ranks
from support.recipes import LONG, bits, fingerprint, is_of_reshard, spoiled, trained
from support.training import Block, Run, adamw, batch, loss_of, seeded_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LONG)]
pytest.importorskip("lightning", reason="lightning is not installed")
with_each_strategy = pytest.mark.parametrize("strategy", ["fsdp", "model_parallel"])


def settings(strategy: str, package: str) -> dict[str, Any]:
    """How Fabric or the Trainer is told of ranks on CPUs that are there already."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    from lightning.fabric.plugins.environments import LightningEnvironment

    common = {"accelerator": "cpu", "devices": dist.get_world_size()}
    common["plugins"] = [LightningEnvironment()]
    return common | {"strategy": made_strategy(strategy, package)}


def made_strategy(strategy: str, package: str) -> Any:
    if package == "fabric":
        from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
    else:
        from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
    sizes = {"data_parallel_size": dist.get_world_size(), "tensor_parallel_size": 1}
    if strategy == "model_parallel":
        how = {"parallelize_fn": cut} if package == "fabric" else {}
        return ModelParallelStrategy(**sizes, **how)

    class OnCPUs(FSDPStrategy):
        """Wraps the model as FSDP can on CPUs; the strategy itself asks for GPUs, but only here."""

        def setup_module(self, module: Any) -> Any:
            return FSDP1(
                module,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )

        _setup_model = setup_module

    return OnCPUs(state_dict_type="sharded")


def cut(model: Any, mesh: Any) -> Any:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


# Fabric


def fabric_run(strategy: str) -> tuple[Any, Run, dict[str, Any]]:
    """Fabric, a run that trains with it, and what it saves and loads."""
    from lightning.fabric import Fabric

    fabric = Fabric(**settings(strategy, "fabric"))
    fabric.launch()
    model = fabric.setup_module(seeded_model())
    optimizer = fabric.setup_optimizers(adamw(model.parameters()))

    def step(number: int) -> float:
        words, target = batch(number)
        loss = loss_of(model(words), target)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    run = Run(model._forward_module, optimizer.optimizer, step)
    return fabric, run, {"model": model, "optimizer": optimizer}


def saves_with_fabric(strategy: str, box: Path) -> dict[str, Any]:
    reshard.patch()
    fabric, run, state = fabric_run(strategy)
    trained(run)
    fabric.save(box / "saved", state | {"step": 2})
    return fingerprint(run)


def loads_with_fabric(strategy: str, box: Path) -> tuple[dict[str, Any], int]:
    reshard.patch()
    fabric, run, state = fabric_run(strategy)
    spoiled(run)
    state["step"] = 0
    rest = fabric.load(box / "saved", state)
    assert rest == {}
    return fingerprint(run), state["step"]


def consolidates(package: str, box: Path) -> None:
    reshard.patch()
    sys.argv = ["consolidate", str(box / "saved"), "--output_file", str(box / "whole")]
    runpy.run_module(f"lightning.{package}.utilities.consolidate_checkpoint", run_name="__main__")


@with_each_strategy
def test_fabric_saves_loads_and_consolidates(strategy: str, tmp_path: Path) -> None:
    saved = run_ranks(2, saves_with_fabric, strategy, tmp_path, seconds=LONG)[0]
    assert is_of_reshard(tmp_path / "saved")
    outcomes = run_ranks(3, loads_with_fabric, strategy, tmp_path, seconds=LONG)
    assert outcomes == [(saved, 2)] * 3
    run_alone(consolidates, "fabric", tmp_path, seconds=LONG)
    whole = torch.load(tmp_path / "whole", weights_only=True)
    assert whole["step"] == 2
    assert {name: bits(t) for name, t in whole["model"].items()} == {
        name: saved[name] for name in seeded_model().state_dict()
    }
    state = whole["optimizer"]["state"]
    assert bits(state["head.weight"]["exp_avg"]) == saved["state.head.weight.exp_avg"]


# The Trainer


def module_for(strategy: str) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = seeded_model()

        def configure_model(self) -> None:
            if strategy == "model_parallel" and not any(
                hasattr(p, "device_mesh") for p in self.parameters()
            ):
                cut(self.model, self.device_mesh)

        def training_step(self, data: Any, index: int) -> torch.Tensor:
            words, target = data
            return loss_of(self.model(words), target)

        def configure_optimizers(self) -> Any:
            return adamw(self.parameters())

    return Module()


def fit(strategy: str, steps: int, resume: Path | None = None) -> Any:
    """A Trainer that has trained up to a number of steps, from the start or from a checkpoint."""
    import lightning

    trainer = lightning.Trainer(
        **settings(strategy, "pytorch"),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    # The same batch again and again: a plain DataLoader does not resume.
    words, targets = batch(0)
    data = DataLoader(TensorDataset(words.repeat(8, 1), targets.repeat(8, 1)), batch_size=4)
    trainer.fit(module_for(strategy), data, ckpt_path=resume)
    assert trainer.global_step == steps
    return trainer


def found_in(trainer: Any) -> dict[str, Any]:
    return fingerprint(Run(trainer.strategy.model, trainer.optimizers[0], lambda _: 0.0))


def trains_and_resumes(strategy: str, folder: Path) -> bool:
    """Whether a run that was resumed ends as one that was not interrupted."""
    reshard.patch()
    wanted = found_in(fit(strategy, 4))
    fit(strategy, 2).save_checkpoint(folder)
    return found_in(fit(strategy, 4, resume=folder)) == wanted


@with_each_strategy
def test_the_trainer_resumes_from_what_it_saved(strategy: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    assert run_ranks(2, trains_and_resumes, strategy, folder, seconds=LONG) == [True, True]
    assert is_of_reshard(folder)
    if strategy == "fsdp":
        # Lightning's own tool knows the names of this strategy only.
        run_alone(consolidates, "pytorch", tmp_path, seconds=LONG)
        whole = torch.load(tmp_path / "whole", weights_only=False)
        assert whole["global_step"] == 2
        assert whole["state_dict"]["model.head.weight"].shape == (11, 8)

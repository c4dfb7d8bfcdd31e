"""The installed accelerate itself, under `reshard.patch()`: its code knows nothing of Reshard."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import reshard
from support.ranks import run_alone, run_ranks
from support.recipes import bits, fingerprint, spoiled, trained
from support.training import Block, Run, adamw, fsdp1, plain_run, seeded_model

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
"""The folders that accelerate makes."""


def accelerator_for(version: int) -> Any:
    """An `Accelerator` of ranks on CPUs that uses FSDP, as it would on GPUs."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True)
    # Without a GPU it does not let one ask for FSDP, but what it does then needs none.
    PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[Block.__name__],
        cpu_ram_efficient_loading=False,
    )
    assert accelerator.is_fsdp2 is (version == 2)
    return accelerator


def run_with(accelerator: Any) -> Run:
    """FSDP2 as `Accelerator.prepare` makes it, or FSDP1 as people make it."""
    if not accelerator.is_fsdp2:
        return fsdp1()
    run = plain_run(seeded_model(), adamw)
    run.model, run.optimizer = accelerator.prepare(run.model, run.optimizer)
    return run


def save_with(accelerator: Any, run: Run, folder: Path) -> None:
    """All at once where accelerate knows the model, else part by part."""
    from accelerate.utils import fsdp_utils

    if accelerator.is_fsdp2:
        accelerator.save_state(str(folder))
        return
    plugin = accelerator.state.fsdp_plugin
    fsdp_utils.save_fsdp_model(plugin, accelerator, run.model, str(folder))
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, run.optimizer, run.model, str(folder))


def load_with(accelerator: Any, run: Run, folder: Path) -> None:
    from accelerate.utils import fsdp_utils

    if accelerator.is_fsdp2:
        accelerator.load_state(str(folder))
        return
    plugin = accelerator.state.fsdp_plugin
    fsdp_utils.load_fsdp_model(plugin, accelerator, run.model, str(folder))
    fsdp_utils.load_fsdp_optimizer(plugin, accelerator, run.optimizer, run.model, str(folder))


def saves_under_a_patch_and_without(version: int, box: Path) -> dict[str, Any]:
    accelerator = accelerator_for(version)
    run = trained(run_with(accelerator))
    saved = fingerprint(run)
    with reshard.patch():
        save_with(accelerator, run, box / "patched")
    save_with(accelerator, run, box / "undone")
    load_with(accelerator, spoiled(run), box / "undone")
    assert fingerprint(run) == saved
    return saved


def loads_under_a_patch(version: int, box: Path) -> dict[str, Any]:
    reshard.patch()
    # Imported for the first time under the patch, and not before it as where it was saved.
    accelerator = accelerator_for(version)
    run = run_with(accelerator)
    if version == 1:
        # What is loaded is what the optimizer has; accelerate leaves it to the caller to step it.
        run.step(5)
    load_with(accelerator, spoiled(run), box / "patched")
    return fingerprint(run)


def merges_under_a_patch(box: Path) -> None:
    from accelerate.utils import merge_fsdp_weights

    with reshard.patch():
        merge_fsdp_weights(str(box / "patched" / MODEL), str(box / "merged"))


Checkpoint = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module", params=[1, 2], ids=["fsdp1", "fsdp2"])
def version(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(version: int, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Where two ranks have saved, and what."""
    box = tmp_path_factory.mktemp("accelerate")
    return box, run_ranks(2, saves_under_a_patch_and_without, version, box)[0]


def files(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


@pytest.mark.parametrize("part", [MODEL, OPTIMIZER])
def test_what_accelerate_saves_under_a_patch_is_a_checkpoint_of_reshard(
    part: str, checkpoint: Checkpoint
) -> None:
    folder = checkpoint[0] / "patched" / part
    shards = files(folder, "__*")
    assert [name[:5] for name in shards] == ["__0_0", "__1_0"]
    assert all(name.endswith(".safetensors") for name in shards)
    assert all(load_file(folder / name) for name in shards)
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads((folder / ".metadata").read_bytes())
    assert [*reshard.read_state_dict(folder)] == [{MODEL: "model", OPTIMIZER: "optimizer"}[part]]


@pytest.mark.parametrize("part", [MODEL, OPTIMIZER])
def test_what_accelerate_saves_after_the_patch_is_a_checkpoint_of_dcp(
    part: str, checkpoint: Checkpoint
) -> None:
    folder = checkpoint[0] / "undone" / part
    assert files(folder, "__*") == ["__0_0.distcp", "__1_0.distcp"]
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    assert type(metadata) is dcp.Metadata


@pytest.mark.parametrize("ranks", [2, 3])
def test_accelerate_loads_every_bit_back_on_any_number_of_ranks(
    ranks: int, version: int, checkpoint: Checkpoint
) -> None:
    box, saved = checkpoint
    assert run_ranks(ranks, loads_under_a_patch, version, box) == [saved] * ranks


def test_accelerate_merges_what_it_has_saved_into_one_file(checkpoint: Checkpoint) -> None:
    box, saved = checkpoint
    run_alone(merges_under_a_patch, box)
    merged = load_file(box / "merged" / "model.safetensors")
    assert merged.keys() == seeded_model().state_dict().keys()
    assert {name: bits(tensor) for name, tensor in merged.items()} == {
        name: saved[name] for name in merged
    }

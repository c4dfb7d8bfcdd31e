"""transformers and accelerate, under `reshard.patch()`: the Trainer, and save_pretrained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import reshard
from support.ranks import run_ranks
from support.recipes import LONG, bits, fingerprint, is_of_reshard
from support.training import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LONG)]
pytest.importorskip("transformers", reason="transformers is not installed")


def announce_ranks() -> None:
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1"}


def small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes, **heads))


# The Trainer


def trained_by(folder: Path, version: int, resume: Path | None = None) -> Any:
    """A Trainer that has trained four steps, and saved after two, or resumed from there."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        fsdp=True,
        fsdp_config={
            "version": version,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            # Accelerate looks for a GPU to send them with.
            "sync_module_states": False,
        },
    )
    assert arguments.device.type == "cpu"
    # Without a GPU accelerate does not let one ask for FSDP, but what it does then needs none.
    PartialState().distributed_type = DistributedType.MULTI_GPU
    words = torch.randint(32, (16, 6), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row} for row in words]
    trainer = Trainer(small_llama(), arguments, train_dataset=data)
    assert trainer.is_fsdp_enabled
    # CPUs have no numbers, and FSDP1 does not take one.
    trainer.accelerator.state.device = torch.device("cpu")
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert trainer.state.global_step == 4
    return trainer


def found_in(trainer: Any) -> dict[str, Any]:
    inner = trainer.optimizer.optimizer
    return fingerprint(Run(trainer.model, inner, lambda _: 0.0))


def trains_and_resumes(version: int, box: Path, patched: bool = True) -> list[dict[str, Any]]:
    """What a run ends with, and one that was resumed in its middle."""
    if patched:
        reshard.patch()
    announce_ranks()
    straight = found_in(trained_by(box / "straight", version))
    resumed = trained_by(box / "again", version, box / "straight" / "checkpoint-2")
    return [straight, found_in(resumed)]


def saved_by_the_trainer(box: Path) -> bool:
    folders = [box / "straight" / f"checkpoint-{step}" for step in (2, 4)]
    parts = [
        folder / part for folder in folders for part in ("pytorch_model_fsdp_0", "optimizer_0")
    ]
    return all(map(is_of_reshard, parts))


def test_the_trainer_resumes_from_what_it_saved_with_fsdp2(tmp_path: Path) -> None:
    straight, resumed = run_ranks(2, trains_and_resumes, 2, tmp_path, seconds=LONG)[0]
    assert resumed == straight
    assert saved_by_the_trainer(tmp_path)


def test_the_trainer_does_with_fsdp1_what_it_does_with_dcp(tmp_path: Path) -> None:
    """accelerate asks for the state of an optimizer that has none yet, and so resumes without."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    outcomes = run_ranks(2, trains_and_resumes, 1, ours, seconds=LONG)
    assert outcomes == run_ranks(2, trains_and_resumes, 1, theirs, False, seconds=LONG)
    assert saved_by_the_trainer(ours)


# Distributed models of its own


def distributed(source: Path, **sizes: int) -> Any:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    return LlamaForCausalLM.from_pretrained(
        source, distributed_config=DistributedConfig(**sizes), device_map="cpu"
    )


def whole(model: Any) -> dict[str, Any]:
    return {
        name: bits(t.full_tensor() if hasattr(t, "full_tensor") else t)
        for name, t in model.state_dict().items()
    }


def saves_pretrained(box: Path) -> dict[str, Any]:
    reshard.patch()
    announce_ranks()
    from transformers.distributed.checkpoint import (
        load_optimizer_distributed,
        save_optimizer_distributed,
    )

    if dist.get_rank() == 0:
        small_llama().save_pretrained(box / "plain")
    dist.barrier()
    model = distributed(box / "plain", fsdp_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words = torch.arange(12).view(2, 6)
    model(input_ids=words, labels=words).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.save_pretrained(box / "sharded", distributed_checkpoint=True)
    save_optimizer_distributed(model, optimizer, str(box / "optimizer"))
    saved = fingerprint(Run(model, optimizer, lambda _: 0.0))
    again = distributed(box / "sharded", fsdp_size=2)
    fresh = torch.optim.AdamW(again.parameters(), lr=1.0)
    load_optimizer_distributed(again, fresh, str(box / "optimizer"))
    assert fingerprint(Run(again, fresh, lambda _: 0.0)) == saved
    return whole(model)


def consolidates(box: Path) -> dict[str, Any]:
    reshard.patch()
    from transformers import LlamaForCausalLM
    from transformers.distributed import consolidate_distributed_checkpoint

    consolidate_distributed_checkpoint(box / "sharded", box / "whole")
    small_llama().config.save_pretrained(box / "whole")
    return whole(LlamaForCausalLM.from_pretrained(box / "whole"))


def test_distributed_models_are_saved_loaded_and_consolidated(tmp_path: Path) -> None:
    saved = run_ranks(2, saves_pretrained, tmp_path, seconds=LONG)[0]
    shards = [*(tmp_path / "sharded").glob("shard-*.safetensors")]
    assert len(shards) == 2
    assert all(map(load_file, shards))
    assert is_of_reshard(tmp_path / "optimizer")
    assert run_ranks(1, consolidates, tmp_path, seconds=LONG, store="none")[0] == saved

"""Models of transformers: what it saves is loaded here, and what is saved here it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard._consolidate_hf_safetensors import consolidate_safetensors_files

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")


def tiny_model(seed: int, is_tied: bool) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=is_tied,
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config)


def agree(ours: Any, theirs: Any) -> bool:
    """Whether two models have the same weights, and say the same."""
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        answers = [model.eval()(tokens).logits for model in (ours, theirs)]
    weights = theirs.state_dict()
    return torch.equal(*answers) and all(
        torch.equal(tensor, weights[name]) for name, tensor in ours.state_dict().items()
    )


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("shard_size", ["5GB", "5KB"])
def test_a_model_that_transformers_saved_is_loaded(
    shard_size: str, is_tied: bool, tmp_path: Path
) -> None:
    theirs, ours = tiny_model(0, is_tied), tiny_model(1, is_tied)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    report = reshard.load(ours.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    assert (report.missing, report.unexpected) == ([], [])
    assert agree(ours, theirs)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_model_that_is_saved_here_is_loaded_by_transformers(
    is_sharded: bool, is_tied: bool, tmp_path: Path
) -> None:
    ours = tiny_model(0, is_tied)
    numbers = {name: 1 + position % 2 for position, name in enumerate(ours.state_dict())}
    writer = reshard.HuggingFaceStorageWriter(
        tmp_path, numbers, save_distributed=is_sharded, enable_consolidation=is_sharded
    )
    reshard.save(ours.state_dict(), storage_writer=writer, no_dist=True)
    ours.config.save_pretrained(tmp_path)
    theirs, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert agree(ours, theirs)


def test_shards_are_put_together_for_transformers(tmp_path: Path) -> None:
    ours = tiny_model(0, is_tied=True)
    writer = reshard.HuggingFaceStorageWriter(tmp_path / "shards", save_distributed=True)
    reshard.save(ours.state_dict(), storage_writer=writer, no_dist=True)
    # With the names of both, as frameworks make the mapping of a model.
    numbers = dict.fromkeys(ours.state_dict(), 1)
    consolidate_safetensors_files(str(tmp_path / "shards"), str(tmp_path / "model"), numbers)
    ours.config.save_pretrained(tmp_path / "model")
    assert agree(ours, transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model"))

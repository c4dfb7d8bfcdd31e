"""What the recipes of other frameworks need: a library by its name, and the state of a run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import reshard
from support.samples import raw
from support.training import Run

DCP = "torch.distributed.checkpoint"
LONG = 300.0
"""Seconds for ranks that import a project: some take half a minute for that alone."""
with_either_library = pytest.mark.parametrize(
    "library", ["reshard", pytest.param(DCP, marks=pytest.mark.slow)], ids=["reshard", "dcp"]
)
"""That a recipe works with DCP shows that it is one of DCP's, and not bent to fit Reshard."""


def part(library: str, module: str = "") -> Any:
    """The library itself, or a module of it: what a recipe imports."""
    return importlib.import_module(f"{library}.{module}".rstrip("."))


def fingerprint(run: Run) -> dict[str, Any]:
    """All there is in a model and its optimizer, down to the bit, whatever the layout.

    Called by all ranks.
    """
    # Without cpu_offload: FSDP1 would hand out memory that it frees, where all is on the CPU.
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
    return {name: bits(value) for name, value in (model | optimizer).items()}


def bits(value: Any) -> Any:
    """A value that can be compared with `==`: of a tensor its dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), raw(value)
    return value


def trained(run: Run, steps: int = 2) -> Run:
    for number in range(steps):
        run.step(number)
    return run


def spoiled(run: Run) -> Run:
    """A run with other weights and other settings, so that what is not loaded shows."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(-1.0)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.5
    return run


def is_of_reshard(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of ours, and not one of DCP's."""
    shards = sorted(path.name for path in folder.glob("__*"))
    assert shards
    assert all(name.endswith(".safetensors") for name in shards)
    return bool(reshard.read_state_dict(folder, allow_pickle=True))

"""The steps of optimizers: whether something can be called before them, and what they change."""

from __future__ import annotations

from typing import Any

import torch


def _hooked_code() -> Any:
    """The code that torch wraps steps in, which calls the hooks."""

    def step(optimizer: torch.optim.Optimizer) -> None:
        """Never called."""

    return torch.optim.Optimizer.profile_hook_step(step).__code__


def calls_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every change of an optimizer's parameters is preceded by its step hooks."""
    if getattr(optimizer, "_overlap_with_ddp", False):
        # A ZeroRedundancyOptimizer that receives parameters from other ranks before it steps.
        return False
    # Torch wraps the step of a class when the first object of it is made; a class that replaced
    # its step since then, or does not call the constructor of torch, has no hooks.
    code = getattr(type(optimizer).step, "__code__", None)
    return code is _hooked_code() and hasattr(optimizer, "_optimizer_step_pre_hooks")


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows with each change in place that torch knows of."""
    return 0 if tensor.is_inference() else tensor._version

"""The random state of a process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of the generators of Python, numpy, torch, and this rank's CUDA device.

    CUDA is included only if it is in use (not tested: no device was available).
    """
    state: dict[str, Any] = {
        "python": (random.getstate(),),
        "numpy": (np.random.get_state(),),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned."""
    version, numbers, gauss = state["python"][0]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"][0]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

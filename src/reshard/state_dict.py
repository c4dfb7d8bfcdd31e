"""The state dicts of models and optimizers, by name: torch's own functions, unchanged.

They know FSDP, DDP and tensor parallelism; they are here so that the import that DCP users have
goes on to work. Names that torch does not list are handed on as well.
"""

from typing import Any

from torch.distributed.checkpoint import state_dict as _of_torch
from torch.distributed.checkpoint.state_dict import *  # noqa: F403

__all__ = _of_torch.__all__


def __getattr__(name: str) -> Any:
    return getattr(_of_torch, name)

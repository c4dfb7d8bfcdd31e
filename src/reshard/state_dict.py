"""The state dicts of models and optimizers, by name: torch's own functions, unchanged.

`get_model_state_dict` and its family know FSDP, DDP and tensor parallelism, and belong to
torch; they are here so that the import that DCP users have goes on to work. Names of that module
that it does not list are handed on as well.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import state_dict as _of_torch
from torch.distributed.checkpoint.state_dict import (
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    StateDictOptions,
    ValueType,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]


def __getattr__(name: str) -> Any:
    return getattr(_of_torch, name)

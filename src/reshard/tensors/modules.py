"""The state of modules, and FSDP1 optimizers, under names without wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp import ShardedOptimStateDictConfig as OptimConfig
from torch.distributed.fsdp import ShardedStateDictConfig as ModelConfig
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def clean_name(model: nn.Module, name: str) -> str:
    """The name of a parameter without the prefixes of torch.compile, FSDP, DDP and others."""
    kept = []
    module: Any = model
    for part in name.split("."):
        wraps = part in _WRAPPERS or (part == "module" and _is_data_parallel(module))
        if not wraps:
            kept.append(part)
        module = getattr(module, part, None)
    return ".".join(kept)


def _is_data_parallel(module: Any) -> bool:
    return isinstance(module, DistributedDataParallel | nn.DataParallel)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """The clean name of each parameter: the first one for tied parameters."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, clean_name(model, name))
    return names


def is_fsdp1(model: nn.Module) -> bool:
    """Whether FSDP1 manages some of the parameters."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def model_state(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers by clean name. A collective with FSDP1."""
    return get_model_state_dict(model)


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Apply a state that has the form of `model_state`, and may share its memory."""
    if is_fsdp1(model):
        # Missing keys were handled before the load.
        set_model_state_dict(model, dict(state), options=StateDictOptions(strict=False))
        return
    actual = {clean_name(model, name): name for name in model.state_dict()}
    tensors = {clean_name(model, name): tensor for name, tensor in _tensors(model)}
    left: dict[str, Any] = {}
    for name, value in state.items():
        own = tensors.get(name)
        if isinstance(value, torch.Tensor) and own is not None and own.is_meta:
            _replace(own, value)
        elif not isinstance(value, torch.Tensor) or own is None or not _same_memory(own, value):
            left[actual.get(name, name)] = value
    # Even with nothing left: FSDP refreshes its parameters afterwards.
    model.load_state_dict(left, strict=False)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _replace(own: torch.Tensor, loaded: torch.Tensor) -> None:
    """Give memory to a meta tensor. It stays the same object, for optimizers and ties."""
    twin = loaded.detach()
    if isinstance(own, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=own.requires_grad)
    torch.utils.swap_tensors(own, twin)  # type: ignore[no-untyped-call]


def _same_memory(own: torch.Tensor, value: torch.Tensor) -> bool:
    mine, theirs = getattr(own, "_local_tensor", own), getattr(value, "_local_tensor", value)
    return bool(
        mine.data_ptr() == theirs.data_ptr()
        and mine.shape == theirs.shape
        and mine.stride() == theirs.stride()
        and mine.dtype is theirs.dtype
    )


def _sharded(model: nn.Module) -> Any:
    return FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ModelConfig(), OptimConfig()
    )


def fsdp1_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State and parameter groups by clean name. A collective."""
    with _sharded(model):
        found: dict[str, Any] = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    return found


def load_fsdp1_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Apply a state that has the form of `fsdp1_optimizer_state`. A collective."""
    with _sharded(model):
        flat = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
    optimizer.load_state_dict(flat)
    _undo_casts(optimizer, flat)


def _undo_casts(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    """Restore the precision of loaded state, which torch cast to that of the parameter."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    keys = (key for group in loaded["param_groups"] for key in group["params"])
    for parameter, key in zip(parameters, keys, strict=True):
        state = optimizer.state.get(parameter, {})
        for name, value in loaded["state"].get(key, {}).items():
            cast = state.get(name)
            if isinstance(value, torch.Tensor) and cast.dtype is not value.dtype:
                state[name] = value.to(cast.device)

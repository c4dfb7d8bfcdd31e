"""Optimizers whose state is not a tensor like the parameter, for plain parameters and DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from support.subclasses import Blocks, Scaled


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor without sums that are yet to be taken; other tensors as they are."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in tensor.placements]
    )


def mean(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The mean over a dimension. torch 2.8 averages the means of shards, also of uneven ones."""
    return settled(tensor.sum(dim)) / tensor.size(dim)


class _ByParameter(torch.optim.Optimizer):
    """Takes its step for one parameter after the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, self.state[parameter], group)

    def _step(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Factored(_ByParameter):
    """Like Adafactor: of a matrix it keeps the means of squares of each row and column."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr, "decay": 0.8})

    def _step(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        squares = parameter.grad.square() + 1e-8
        state["step"] = state.get("step", 0) + 1
        if parameter.dim() < 2:
            means = self._mixed(state, "means", squares, group["decay"])
        else:
            rows = self._mixed(state, "rows", mean(squares, 1), group["decay"])
            columns = self._mixed(state, "columns", mean(squares, 0), group["decay"])
            means = rows.unsqueeze(1) * columns.unsqueeze(0) / mean(rows, 0)
        change = group["lr"] * parameter.grad / means.sqrt()
        if isinstance(parameter, DTensor):
            change = change.redistribute(placements=parameter.placements)
        parameter.sub_(change)

    @staticmethod
    def _mixed(state: dict[str, Any], name: str, new: torch.Tensor, decay: float) -> torch.Tensor:
        old = state.get(name)
        state[name] = new if old is None else decay * old + (1 - decay) * new
        return state[name]


class Coded(_ByParameter):
    """Like optimizers in 8 bits: momentum as small integers, with what they are to be times."""

    def __init__(self, parameters: Any, lr: float = 1e-2, wrapped: bool = False) -> None:
        """With `wrapped`, codes and scale are one tensor without memory of its own."""
        super().__init__(parameters, {"lr": lr})
        self.wrapped = wrapped

    def _step(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["momentum"] = self._coded(parameter.grad + 0.9 * self._decoded(state))
        parameter.sub_(group["lr"] * self._decoded(state))

    def _decoded(self, state: dict[str, Any]) -> Any:
        if not state:
            return 0.0
        momentum = state["momentum"]
        if self.wrapped:
            return momentum.inner.float() * momentum.scale
        return momentum["codes"].float() * momentum["scale"]

    def _coded(self, momentum: torch.Tensor) -> Any:
        # No element is larger than the norm.
        scale = settled(momentum.square().sum()).sqrt() / 127
        codes = (momentum / scale).round().to(torch.int8)
        return Scaled(codes, scale, "code") if self.wrapped else {"codes": codes, "scale": scale}


class Blockwise(_ByParameter):
    """Momentum in 8 bits, a shard of each sharded parameter at a time."""

    def __init__(self, parameters: Any, lr: float = 1e-2, kind: type[Blocks] = Blocks) -> None:
        super().__init__(parameters, {"lr": lr})
        self.kind = kind

    def _step(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        own, gradient = (
            t.to_local() if isinstance(t, DTensor) else t for t in (parameter, parameter.grad)
        )
        if "momentum" not in state:
            state["momentum"] = like(parameter, self.kind.of(torch.zeros_like(own)))
        local = _local(state["momentum"])
        local.copy_(self.kind.of(gradient + 0.9 * local.values()))
        own.sub_(group["lr"] * local.values())


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor around `local` if the parameter is one."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

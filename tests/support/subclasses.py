"""Tensor subclasses of the kinds that are met in state dicts; importable, so that they pickle."""

from __future__ import annotations

from typing import Any

import torch


class Tagged(torch.Tensor):
    """Has memory like any tensor, and Python attributes besides."""


class Scaled(torch.Tensor):
    """Has no memory of its own, but says what it consists of. `unit` is not a tensor."""

    inner: torch.Tensor
    scale: torch.Tensor
    unit: str

    @staticmethod
    def __new__(
        cls,
        inner: torch.Tensor,
        scale: torch.Tensor,
        unit: str = "",
        stride: tuple[int, ...] | None = None,
    ) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=stride or inner.stride(), dtype=inner.dtype
        )

    def __init__(
        self,
        inner: torch.Tensor,
        scale: torch.Tensor,
        unit: str = "",
        stride: tuple[int, ...] | None = None,
    ) -> None:
        self.inner, self.scale, self.unit = inner, scale, unit

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["inner", "scale"], self.unit

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: str, size: Any, stride: Any) -> Scaled:
        return Scaled(parts["inner"], parts["scale"], context, stride)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Just enough for nn.Parameter and for views: what is done is done to the inner tensor.
        first: Scaled = args[0]
        return cls(func(first.inner, *args[1:]), first.scale, first.unit)


class Opaque(torch.Tensor):
    """Has no memory of its own, and does not say what it consists of."""

    @staticmethod
    def __new__(cls, secret: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, secret.shape, dtype=secret.dtype)

    def __init__(self, secret: torch.Tensor) -> None:
        self.secret = secret

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)

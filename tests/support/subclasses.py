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
        if func is torch.ops.aten.copy_.default:
            raise NotImplementedError(func)
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


class Blocks(torch.Tensor):
    """Numbers in 8 bits, with a factor for each block of four, like state of optimizers is.

    `table` belongs to all of it, whatever is cut from it.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor
    BLOCK = 4

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> Blocks:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> None:
        self.codes, self.scale, self.table = codes, scale, table

    @classmethod
    def of(cls, values: torch.Tensor) -> Blocks:
        blocks = values.reshape(-1, cls.BLOCK)
        scale = blocks.abs().amax(1).clamp(min=1e-9) / 127
        codes = (blocks / scale[:, None]).round().to(torch.int8).view(values.shape)
        return cls(codes, scale, torch.arange(-127, 128, dtype=torch.float32))

    def values(self) -> torch.Tensor:
        numbers = self.table[self.codes.long() + 127].view(-1, self.BLOCK)
        return (numbers * self.scale[:, None]).view(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale", "table"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: None, size: Any, stride: Any) -> Blocks:
        return cls(parts["codes"], parts["scale"], parts["table"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        first: Any = args[0]
        if func is aten.detach.default:
            return cls(first.codes, first.scale, first.table)
        if func is aten.view.default:
            return cls(first.codes.view(args[1]), first.scale, first.table)
        if func is aten.copy_.default:
            if not isinstance(first, Blocks):
                return first.copy_(args[1].values())
            source = args[1] if isinstance(args[1], Blocks) else cls.of(args[1])
            first.codes.copy_(source.codes)
            first.scale.copy_(source.scale)
            return first
        if func is aten.slice.Tensor:
            _, dim, begin, end = args
            width = first.shape[1:].numel()
            if dim != 0 or begin * width % cls.BLOCK or end * width % cls.BLOCK:
                raise ValueError("only whole blocks can be cut")
            blocks = slice(begin * width // cls.BLOCK, end * width // cls.BLOCK)
            return cls(first.codes[begin:end], first.scale[blocks], first.table.clone())
        raise NotImplementedError(func)


class Packed(Blocks):
    """Keeps its codes in one row, so that only its context has the shape."""

    size_of_all: tuple[int, ...]

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, shape: Any
    ) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, shape: Any
    ) -> None:
        super().__init__(codes, scale, table)
        self.size_of_all = tuple(shape)

    @classmethod
    def of(cls, values: torch.Tensor) -> Packed:
        blocks = Blocks.of(values)
        return cls(blocks.codes.flatten(), blocks.scale, blocks.table, values.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "table"], [True, self.size_of_all, {"block": (4,)}]

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Packed:
        return cls(parts["codes"], parts["scale"], parts["table"], context[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        first: Any = args[0]
        if func is aten.detach.default or func is aten.view.default:
            # It is viewed in its own shape only.
            return cls(first.codes, first.scale, first.table, first.shape)
        if func is not aten.slice.Tensor:
            return super().__torch_dispatch__(func, types, args, kwargs)
        rows = Blocks(first.codes.view(first.shape), first.scale, first.table)
        cut: Any = func(rows, *args[1:])
        return cls(cut.codes.view(-1), cut.scale, cut.table, cut.shape)

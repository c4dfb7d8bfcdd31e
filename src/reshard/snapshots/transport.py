"""State dicts from one rank to others, over a process group."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from reshard.api import CheckpointException, ShapeMismatchError
from reshard.format.values import decode_value, encode_value
from reshard.snapshots.rebuild import refill
from reshard.tensors.descriptions import (
    Description,
    describe,
    local_parts,
    parts_of,
    restore,
)
from reshard.tensors.nesting import PLAIN, Walk, spell_path

_LENGTH_TAG, _DESCRIPTION_TAG, _FIRST_TAG = 1, 2, 3


class PGTransport:
    """Sends a state dict to other ranks, such as those that take the place of failed ones.

    Tensors are sent as they are: of a DTensor or a ShardedTensor what this rank holds. Other values
    travel in the typed encoding of checkpoints. Those that it has no form for are pickled; with
    `allow_pickle=False` a receiver refuses them.

    `device` is what the group can send from. `state_dict` is a function that returns one: tensors
    are received into those at the same path, which must have the same shape and dtype. Others are
    new tensors on the CPU. No wait is longer than `timeout`.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        timeout: timedelta,
        device: torch.device,
        state_dict: Callable[[], object] | None = None,
        *,
        allow_pickle: bool = True,
    ) -> None:
        self._pg = pg
        self._timeout = timeout
        self._device = torch.device(device)
        self._state_dict = state_dict
        self._allow_pickle = allow_pickle

    def send_checkpoint(self, dst_ranks: Sequence[int], state_dict: object) -> None:
        """Send `state_dict` to some ranks of the group, each of which receives it.

        Returns when all of it is sent; what it holds must not change meanwhile.
        """
        taken = _Taking()
        tree = taken.run(state_dict)
        message = encode_value(
            {"token": taken.token, "tree": encode_value(tree), "tensors": taken.descriptions}
        )
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)
        length = torch.tensor([len(message)], dtype=torch.int64, device=self._device)
        self._send(length, dst_ranks, _LENGTH_TAG)
        self._send(content, dst_ranks, _DESCRIPTION_TAG)
        for number, part in enumerate(taken.parts):
            if part.numel():
                # One after the other: a copy on the device is dropped before the next is made.
                data = _bytes_of(part.detach().to(self._device))
                self._send(data, dst_ranks, _FIRST_TAG + number)

    def recv_checkpoint(self, src_rank: int) -> object:
        """What a rank sends, in containers of the same kinds."""
        into = _Targets()
        if self._state_dict is not None:
            into.run(self._state_dict())
        where = f"the state of rank {src_rank}"
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._receive(length, src_rank, _LENGTH_TAG)
        content = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        self._receive(content, src_rank, _DESCRIPTION_TAG)
        message = decode_value(content.cpu().numpy().tobytes(), where)
        tree = decode_value(message["tree"], where, self._allow_pickle)
        found = _Finding(message["token"])
        found.run(tree)
        number = _FIRST_TAG
        tensors: list[torch.Tensor] = []
        for about, path in zip(message["tensors"], found.in_order(), strict=True):
            target = into.tensors.get(path)
            parts = _memory_for(about, target, path)
            for part in parts:
                if part.numel():
                    self._receive_part(part, src_rank, number)
                number += 1
            if target is None:
                tensors.append(restore(about, parts))
                continue
            # Bytes were written through other tensors; autograd must know.
            increment_version([*parts, *([target] if isinstance(target, DTensor) else [])])
            tensors.append(target)
        return _Putting(message["token"], tensors).run(tree)

    def _receive_part(self, part: torch.Tensor, src_rank: int, tag: int) -> None:
        lies_as_sent = part.is_contiguous() and not part.is_conj() and not part.is_neg()
        if lies_as_sent and part.device.type == self._device.type:
            self._receive(_bytes_of(part), src_rank, tag)
            return
        buffer = torch.empty(part.shape, dtype=part.dtype, device=self._device)
        self._receive(_bytes_of(buffer), src_rank, tag)
        part.copy_(buffer)

    def _send(self, data: torch.Tensor, ranks: Sequence[int], tag: int) -> None:
        works = [self._pg.send([data], rank, tag) for rank in ranks]
        for work, rank in zip(works, ranks, strict=True):
            self._wait(work, f"send to rank {rank}")

    def _receive(self, data: torch.Tensor, rank: int, tag: int) -> None:
        self._wait(self._pg.recv([data], rank, tag), f"receive from rank {rank}")

    def _wait(self, work: Any, what: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise CheckpointException(
                f"could not {what} within {self._timeout}, or it is gone: {error}"
            ) from error


def _memory_for(
    about: Description, target: torch.Tensor | None, path: tuple[Any, ...]
) -> list[torch.Tensor]:
    """The memory to receive the parts of a tensor into: new, or that of the target."""
    sent = parts_of(about)
    if target is None:
        return [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape in sent]
    parts = [part.detach() for part in local_parts(target)]
    held = [(part.dtype, tuple(part.shape)) for part in parts]
    if sent != held:
        raise ShapeMismatchError(
            f"the state dict has {held} at {spell_path(path)}, but {sent} was sent there: return "
            "a state dict of the layout that is sent"
        )
    return parts


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, of one dimension; its own memory if that is contiguous."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)


# What stands for a tensor in a tree of values: a namespace with the token of the message, which no
# value of the user's has.


def _stand_in(token: str, number: int) -> argparse.Namespace:
    return argparse.Namespace(tensor_of=token, number=number)


def _number(value: Any, token: str) -> int | None:
    if type(value) is argparse.Namespace and vars(value).get("tensor_of") == token:
        return int(value.number)
    return None


class _Taking(Walk):
    """Takes the tensors out of a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.token = uuid.uuid4().hex
        self.descriptions: list[Description] = []
        self.parts: list[torch.Tensor] = []

    def leaf(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        about, parts = describe(spell_path(self.path), value)
        self.descriptions.append(about)
        self.parts += parts
        return _stand_in(self.token, len(self.descriptions) - 1)

    def leave(self, container: Any, changed: dict[Any, Any]) -> Any:
        return refill(container, changed) if changed else container


class _Finding(Walk):
    """Finds where the tensors of a message are."""

    skipped = PLAIN

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token
        self._paths: dict[int, tuple[Any, ...]] = {}

    def leaf(self, value: Any) -> Any:
        number = _number(value, self._token)
        if number is not None:
            self._paths.setdefault(number, tuple(self.path))
        return value

    def in_order(self) -> list[tuple[Any, ...]]:
        return [self._paths[number] for number in range(len(self._paths))]


class _Putting(Walk):
    """Puts tensors in the place of what stands for them."""

    def __init__(self, token: str, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._token = token
        self._tensors = tensors

    def leaf(self, value: Any) -> Any:
        number = _number(value, self._token)
        return value if number is None else self._tensors[number]

    def leave(self, container: Any, changed: dict[Any, Any]) -> Any:
        return refill(container, changed) if changed else container


class _Targets(Walk):
    """The tensors of a state dict by their paths."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[tuple[Any, ...], torch.Tensor] = {}

    def leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors[tuple(self.path)] = value
        return value

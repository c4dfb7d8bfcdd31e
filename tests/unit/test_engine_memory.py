"""Tensors as bytes: in order, in pieces, without a copy where that can be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.engine import memory
from reshard.engine.memory import BounceBuffer, byte_view, is_direct, pieces


def plain_bytes(tensor: torch.Tensor) -> bytes:
    dense = torch.empty(tensor.shape, dtype=tensor.dtype)
    dense.copy_(tensor.detach())
    return bytes(dense.reshape(-1).view(torch.uint8).numpy()) if dense.numel() else b""


def test_the_bytes_of_a_direct_tensor_are_its_own_memory() -> None:
    tensor = torch.arange(4, dtype=torch.int32)
    view = byte_view(tensor)
    view[0:4] = (99).to_bytes(4, "little")
    assert tensor.tolist() == [99, 1, 2, 3]
    [piece] = pieces(tensor, 1 << 20, BounceBuffer(8))
    piece[4:8] = (98).to_bytes(4, "little")
    assert tensor.tolist() == [99, 98, 2, 3]


def test_an_empty_tensor_has_no_bytes_and_no_pieces() -> None:
    assert len(byte_view(torch.empty(0, 3))) == 0
    assert list(pieces(torch.empty(0, 3), 8, BounceBuffer(8))) == []
    assert list(pieces(torch.empty(3, 0).t(), 8, BounceBuffer(8))) == []


COMPLEX = torch.tensor([1 + 2j, 3 - 4j])


@pytest.mark.parametrize(
    ("tensor", "direct"),
    [
        (torch.ones(3), True),
        (torch.ones(3, 1).t(), True),
        (torch.ones(4)[::2], False),
        (torch.ones(2, 3).t(), False),
        (torch.ones(1).expand(3), False),
        (COMPLEX, True),
        (COMPLEX.conj(), False),
        (COMPLEX.conj().imag, False),
        (torch._neg_view(torch.ones(2)), False),
        (torch.ones(2, device="meta"), False),
    ],
)
def test_only_memory_that_is_stored_as_it_lies_is_direct(
    tensor: torch.Tensor, direct: bool
) -> None:
    assert is_direct(tensor) is direct


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(shapes, st.data())
def test_pieces_of_any_tensor_are_its_bytes_in_order_and_bounded(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from([torch.float64, torch.bfloat16, torch.bool, torch.complex64]))
    tensor = (torch.arange(math.prod(shape)) * 7 % 13).reshape(shape).to(dtype)
    if shape:
        tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    if shape and data.draw(st.booleans()):
        tensor = tensor[:: data.draw(st.sampled_from([1, 2]))]
    if dtype.is_complex and data.draw(st.booleans()):
        tensor = (tensor * 1j).conj()
    most = data.draw(st.integers(1, 64))
    found = []
    for piece in pieces(tensor, most, BounceBuffer(most)):
        assert len(piece) <= max(most, dtype.itemsize)
        found.append(bytes(piece))
    assert b"".join(found) == plain_bytes(tensor)


def test_a_bounce_buffer_is_allocated_once_and_reused() -> None:
    bounce = BounceBuffer(1000)
    first = bounce.take(100)
    assert first.nbytes == 100
    assert bounce.take(50).data_ptr() == first.data_ptr()
    assert bounce.take(900).data_ptr() == first.data_ptr()


def test_a_stand_in_for_a_device_goes_through_a_bounded_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No accelerator is here: a CPU tensor that says that it cannot be written as it lies."""
    monkeypatch.setattr(memory, "is_direct", lambda tensor: False)
    tensor = torch.arange(1 << 20, dtype=torch.int32).reshape(64, -1)
    taken: list[int] = []
    bounce = BounceBuffer(1 << 16)
    take = bounce.take
    monkeypatch.setattr(bounce, "take", lambda nbytes: taken.append(nbytes) or take(nbytes))
    addresses = set()
    found = []
    for piece in pieces(tensor, 1 << 16, bounce):
        addresses.add(memory.ctypes.addressof(memory.ctypes.c_ubyte.from_buffer(piece)))
        found.append(bytes(piece))
    assert b"".join(found) == plain_bytes(tensor)
    assert max(taken) <= 1 << 16
    assert len(taken) == 64
    assert len(addresses) == 1
    assert tensor.data_ptr() not in addresses

"""However a tensor is cut into chunks: a view of it, or a copy, has the same elements."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard.tensors.shards import HeldShards, LocalShard
from support.boxes import Tiled, tilings
from support.maps import is_mapped

DTYPES = (torch.uint8, torch.int16, torch.float32, torch.complex128)


def in_pieces(tensor: Tiled, dtype: torch.dtype) -> tuple[torch.Tensor, HeldShards]:
    """A tensor with a value of its own in each place, and the same as shards."""
    whole = torch.arange(math.prod(tensor.shape)).to(dtype).view(tensor.shape)
    shards = [
        LocalShard(box.low, box.sizes, whole[box.slices].contiguous())
        for box in tensor.boxes
        if box.volume
    ]
    return whole, HeldShards(dtype, tensor.shape, False, tuple(shards))


def lies_as_in_memory(tensor: Tiled) -> bool:
    """Whether the chunks, written in their order, are the bytes of the whole tensor."""
    positions = torch.arange(math.prod(tensor.shape)).view(tensor.shape)
    written = [positions[box.slices].reshape(-1) for box in tensor.boxes if box.volume]
    return torch.equal(torch.cat(written), positions.reshape(-1))


@settings(deadline=None, max_examples=150)
@given(tensors=st.lists(st.tuples(tilings(), st.sampled_from(DTYPES)), min_size=1, max_size=4))
def test_views_and_copies_have_the_elements_that_were_saved(
    tensors: list[tuple[Tiled, torch.dtype]],
) -> None:
    wholes, pieces = {}, {}
    for number, (tensor, dtype) in enumerate(tensors):
        wholes[str(number)], pieces[str(number)] = in_pieces(tensor, dtype)
    with tempfile.TemporaryDirectory() as folder:
        reshard.save(pieces, checkpoint_id=folder)

        loaded = reshard.read_state_dict(folder, mmap=True)
        template = {name: torch.empty_like(whole, device="meta") for name, whole in wholes.items()}
        reshard.load(template, checkpoint_id=folder, assign=True)

        for name, whole in wholes.items():
            assert torch.equal(loaded[name], whole)
            assert torch.equal(template[name], whole)
            assert is_mapped(loaded[name], Path(folder)) == is_mapped(template[name], Path(folder))
        for number, (tensor, _) in enumerate(tensors):
            if lies_as_in_memory(tensor):
                assert is_mapped(loaded[str(number)], Path(folder))

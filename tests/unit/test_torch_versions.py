"""reshard.tensors.torch_versions: what differs between versions of torch."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor.placement_types import _StridedShard

from reshard.tensors.regions import Cut, local_regions
from reshard.tensors.torch_versions import cuts_strided_shards_at_once, dtypes_here


@pytest.mark.parametrize("rows", range(14))
def test_a_strided_cut_holds_the_rows_that_this_torch_deals_out(rows: int) -> None:
    whole = torch.arange(rows)
    pieces, _ = _StridedShard(0, split_factor=2)._split_tensor(whole, 3, with_padding=False)
    for index, piece in enumerate(pieces):
        cut = Cut(0, 3, index, 2, cuts_strided_shards_at_once())
        held = [
            row
            for region in local_regions((rows,), (cut,))
            for row in range(region.offsets[0], region.offsets[0] + region.sizes[0])
        ]
        assert held == piece.tolist()


def test_the_question_is_answered_whatever_the_default_device_and_dtype_are() -> None:
    expected = cuts_strided_shards_at_once()
    cuts_strided_shards_at_once.cache_clear()
    with torch.device("meta"), torch.inference_mode():
        assert cuts_strided_shards_at_once() == expected


def test_dtypes_that_this_torch_does_not_have_are_left_out() -> None:
    names = {"F32": "float32", "F1": "float1_of_the_future", "ADD": "add"}
    assert dtypes_here(names) == {"F32": torch.float32}

"""What differs between the versions of torch that we run on.

Asked of the installed torch where that is possible: builds and backports make the number of a
version a poor answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch.distributed.tensor.placement_types import _StridedShard


@cache
def cuts_strided_shards_at_once() -> bool:
    """Whether a strided placement cuts a dimension into all of its pieces in one step.

    Older torch does. Newer torch first cuts it into as many as the split factor says, then each
    of them for the ranks. Only where the sizes are uneven do the two differ.
    """
    rows = torch.empty(8, device="meta")
    pieces, _ = _StridedShard(0, split_factor=2)._split_tensor(rows, 3, with_padding=False)
    # In two steps: 2, 2 and 0 rows of both halves. At once: pieces of 2 rows, the last two empty.
    return pieces[1].numel() == 2


def dtypes_here(names: Mapping[str, str]) -> dict[str, torch.dtype]:
    """The dtypes that this torch has, of those that are named, by key."""
    found = {key: getattr(torch, name, None) for key, name in names.items()}
    return {key: dtype for key, dtype in found.items() if isinstance(dtype, torch.dtype)}

"""What a load tells its caller."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from reshard.operations.receipts import LoadReceipt, ReceiptLine, make_receipt
from reshard.rank_values import without_rank


@dataclass
class LoadReport:
    """What a load did on this rank.

    `missing` are keys of the state dict that the checkpoint does not have and that were
    left as they were, those of a `TrainState` included; `unexpected` are keys of the checkpoint
    that nobody asked for; `excluded` are those that the caller did not want. `dropped` are values
    that differ by rank and were left as they were, since the number of ranks has changed. `casts`
    are tensors that were filled from another dtype, with the stored one and their own. They do not
    include tensors that consist of others, such as quantised ones, which their class converts; and
    are unknown, and empty, with planners that fill tensors in a way of their own. `verified` is the
    number of tensors that all ranks together hold as they were saved, by their fingerprints.
    `requests` is how many were made to a remote store.

    `nbytes` is what this rank wanted; `bytes_read` what it took from the shard files in the
    store, for itself and for other ranks; `bytes_received` what other ranks read for it.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    casts: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0
    verified: int = 0
    requests: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    groups: list[str] = field(default_factory=list, repr=False)
    """What the values of a receipt are grouped by: dotted prefixes of their names."""
    _of_all_ranks: LoadReceipt | None = field(default=None, repr=False, compare=False)

    def receipt(self) -> LoadReceipt:
        """What became of each value: on all ranks, if `load` was called with `receipt=True` or
        `strict="receipt"`; otherwise on this one.
        """
        if self._of_all_ranks is not None:
            return self._of_all_ranks
        lines = {name: ReceiptLine("excluded") for name in map(without_rank, self.excluded)}
        for name, (stored, own) in self.casts.items():
            lines[without_rank(name)] = ReceiptLine("cast", _spell(stored), _spell(own))
        lines |= {name: ReceiptLine("dropped") for name in map(without_rank, self.dropped)}
        lines |= {name: ReceiptLine("missing") for name in map(without_rank, self.missing)}
        restored = list(map(without_rank, self.loaded))
        return make_receipt(restored, lines, self.unexpected, self.groups)


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

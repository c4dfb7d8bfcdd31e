"""Who takes part in an operation."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from reshard.coordination.channel import Channel, open_channel
from reshard.coordination.pairing import Intent
from reshard.coordination.store_channel import DEFAULT_TIMEOUT_SECONDS


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group, which of them coordinates, and how long they wait for each other."""

    group: dist.ProcessGroup | None = None
    no_dist: bool = False
    coordinator: int = 0
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS

    def open_channel(self, intent: Intent) -> Channel:
        """The channel between them, for one operation; in one process without a group, none."""
        use_dist = not self.no_dist and dist.is_available() and dist.is_initialized()
        return open_channel(self.group, use_dist, self.coordinator, self.timeout_seconds, intent)

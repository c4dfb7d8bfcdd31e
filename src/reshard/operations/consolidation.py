"""Putting together what ranks have written as safetensors files, as an operation of all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.background.queue import save_queue
from reshard.convert.consolidation import consolidate, files_by_name
from reshard.coordination.pairing import Intent
from reshard.operations.ranks import Ranks
from reshard.operations.targets import Place, comparable_place


def consolidate_together(
    source: Place, target: Place, numbers: Mapping[str, int], threads: int, ranks: Ranks
) -> None:
    """Write each tensor, whole, to the file with its number. Called by all ranks."""
    intent = Intent("consolidate", f"consolidate to {comparable_place(target)!r}")
    with ranks.open_channel(intent) as channel:
        channel.do_together("wait", lambda: save_queue().settle(comparable_place(source)))
        consolidate(source, target, files_by_name(numbers), channel, threads)


def consolidate_alone(
    source: Place, target: Place, file_of: Mapping[str, str], threads: int, is_all: bool
) -> None:
    """Write each tensor, whole, to its file. Called by one process."""
    with Ranks(no_dist=True).open_channel(Intent("consolidate", "consolidate")) as channel:
        consolidate(source, target, file_of, channel, threads, is_all)

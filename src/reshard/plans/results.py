"""What became of the items of a plan, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.planner import SavePlan, WriteItem
from reshard.planning.columns import Ints
from reshard.plans.lazy_list import LazyList
from reshard.plans.write_items import WriteItems
from reshard.storage import StorageInfo, WriteResult

__all__ = ["PlacedResult", "Placement", "WriteResults", "WrittenFile", "are_results_of"]


class WrittenFile(NamedTuple):
    """A shard file: its path, its size, and the size and checksum of its header."""

    path: str
    nbytes: int
    header_nbytes: int
    header_checksum: int


@dataclass
class Placement:
    """Where the items of one rank's plan were written, in the order of the plan."""

    files: list[WrittenFile]
    file_ids: Ints
    begins: Ints
    nbytes: Ints
    checksums: Ints
    pickled: Ints


@dataclass(frozen=True)
class PlacedResult(WriteResult):
    """What became of one item, with all that the manifest says of it."""

    file: WrittenFile
    checksum: int
    pickled: int


class WriteResults(LazyList[WriteResult]):
    """What became of the items of a plan, kept as columns."""

    def __init__(self, items: Sequence[WriteItem], placement: Placement) -> None:
        super().__init__()
        self.items = items
        self.placement = placement

    def _column_length(self) -> int:
        return len(self.placement.begins)

    def _make_one(self, position: int) -> WriteResult:
        placement = self.placement
        nbytes = int(placement.nbytes[position])
        file = placement.files[int(placement.file_ids[position])]
        info = StorageInfo(file.path, int(placement.begins[position]), nbytes)
        return PlacedResult(
            self.items[position].index,
            nbytes,
            info,
            file,
            int(placement.checksums[position]),
            int(placement.pickled[position]),
        )


def are_results_of(results: Sequence[WriteResult], plan: SavePlan) -> bool:
    """Whether `results` are of the very items of `plan`, which nobody has looked at since."""
    items = getattr(results, "items", None)
    return items is plan.items and isinstance(items, WriteItems) and items.untouched

"""Comparing what a load left in memory with what was saved, end to end, by fingerprints.

Each rank tells which regions of which tensors it holds, and their fingerprints; the coordinator
adds them up. Tensors that were cast, or that ranks hold only a part of, cannot be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from reshard.api import CheckpointException, CorruptCheckpointError
from reshard.checkpoint.to_metadata import StorageMap
from reshard.coordination.exchange import Exchange
from reshard.engine.fingerprints import RegionInMemory, fingerprint_regions
from reshard.engine.workers import default_threads
from reshard.format.tables import Manifest
from reshard.metadata import Metadata
from reshard.planner import LoadPlan
from reshard.planning.columns import DTYPES, Bools, ChunkTable, Ints, pad_rows
from reshard.planning.coverage import find_overlapping
from reshard.planning.packing import pack_array, unpack_array
from reshard.plans.read_items import read_columns
from reshard.plans.traits import load_traits
from reshard.tensors.shards import DTensorReader, loaded_shards

_MOST_NAMED = 5


@dataclass(frozen=True)
class HeldRegions:
    """The regions that a rank has loaded, one in each row.

    `tensors` are rows of the manifest. `fingerprints` are unsigned, kept as int64.
    """

    tensors: Ints
    offsets: Ints
    sizes: Ints
    fingerprints: Ints


class FingerprintExchange(Exchange[HeldRegions, int]):
    """Loaded regions of ranks for the number of tensors that are as they were saved."""

    phase = "verify"

    def encode(self, message: HeldRegions) -> bytes:
        columns = message.tensors, message.offsets, message.sizes, message.fingerprints
        packed = [pack_array(column) for column in columns]
        return msgspec.msgpack.encode((len(message.tensors), packed))

    def decode(self, messages: Sequence[bytes]) -> list[HeldRegions]:
        decoded = []
        for message in messages:
            count, (tensors, *others) = msgspec.msgpack.decode(message)
            columns = (unpack_array(packed, count) for packed in others)
            decoded.append(HeldRegions(unpack_array(tensors, count, True), *columns))
        return decoded

    def encode_answers(
        self, answers: Sequence[int], messages: Sequence[HeldRegions]
    ) -> list[bytes]:
        return [msgspec.msgpack.encode(answer) for answer in answers]

    def decode_answer(self, answer: bytes, sent: HeldRegions) -> int:
        return msgspec.msgpack.decode(answer, type=int)


def manifest_with_fingerprints(metadata: Metadata, place: object) -> Manifest:
    """What the fingerprints of a checkpoint are in; an error if it has none."""
    stored = metadata.storage_data
    if not isinstance(stored, StorageMap) or stored.manifest.chunk_fingerprints is None:
        raise CheckpointException(
            f"the checkpoint at {str(place)!r} has no fingerprints to verify a load with: save it "
            "with fingerprint=True, or load it with verify='full'"
        )
    return stored.manifest


def find_held_regions(
    plan: LoadPlan, planner: Any, stored_names: Mapping[str, str], manifest: Manifest
) -> HeldRegions:
    """What this rank has loaded as it is stored. `stored_names` are by those of the state dict."""
    table = manifest.table
    tensors: list[int] = []
    regions: list[RegionInMemory] = []
    reader = DTensorReader()
    planned = _planned_elements(plan)
    state_dict = planner.state_dict if load_traits(planner).fills_by_itself else {}
    for name, value in state_dict.items():
        tensor = table.row_of.get(stored_names.get(name, ""), -1)
        if tensor < 0:
            continue
        shape, dtype = table.shape_of(tensor), DTYPES[manifest.dtypes[tensor]]
        shards = loaded_shards(name, value, reader)
        count = sum(shard.tensor.numel() for shard in shards)
        # What a planner left out, even in part, is not as it was saved.
        if count == planned.get(name, 0) and all(s.tensor.dtype is dtype for s in shards):
            tensors += [tensor] * len(shards)
            regions += [RegionInMemory(s.tensor.detach(), shape, s.offsets) for s in shards]
    width = table.shapes.shape[1]
    return HeldRegions(
        np.array(tensors, dtype=np.int64),
        pad_rows([region.offsets for region in regions], width, 0),
        pad_rows([region.tensor.shape for region in regions], width, 1),
        fingerprint_regions(regions, default_threads()).view(np.int64),
    )


def _planned_elements(plan: LoadPlan) -> dict[str, int]:
    """How many elements of each tensor are read."""
    columns = read_columns(plan.items)
    counts = np.zeros(len(columns.names), dtype=np.int64)
    np.add.at(counts, columns.dest_names, columns.regions[:, 4].prod(axis=1))
    return dict(zip(columns.names, counts.tolist(), strict=True))


def tensor_fingerprints(manifest: Manifest) -> npt.NDArray[np.uint64]:
    """The fingerprint of each tensor of a manifest that has them."""
    parts = manifest.chunk_fingerprints
    if parts is None:
        raise ValueError("the manifest has no fingerprints")
    # Sums may wrap around: differences of them are right all the same.
    ends = np.zeros((len(parts) + 1, 2), dtype=np.uint64)
    np.cumsum(parts.view(np.uint64), axis=0, out=ends[1:])
    starts = manifest.chunk_starts
    sums: npt.NDArray[np.uint64] = ends[starts[1:]] - ends[starts[:-1]]
    return sums[manifest.table.sources]


def count_verified(manifest: Manifest, held: Sequence[HeldRegions]) -> int:
    """How many tensors are as they were saved, on all ranks together; an error if one is not.

    Regions that several ranks hold count once, and must be equal.
    """
    table = manifest.table
    tensors, ranks, boxes, parts = _distinct_regions(table, held)
    shapes = table.shapes
    full = shapes.prod(axis=1)
    width = shapes.shape[1]
    is_whole = (boxes[:, width:] == shapes[tensors]).all(axis=1)
    expected = tensor_fingerprints(manifest)
    wrong: set[int] = set(tensors[is_whole][(parts != expected[tensors]).any(axis=1)[is_whole]])

    # What is not whole on one rank must add up.
    cut = ~is_whole
    volumes = np.zeros(len(shapes), dtype=np.int64)
    np.add.at(volumes, tensors[cut], boxes[cut, width:].prod(axis=1))
    sums = np.zeros_like(expected)
    np.add.at(sums, tensors[cut], parts[cut])
    complete = volumes == full
    for tensor in np.flatnonzero(complete & (sums != expected).any(axis=1)).tolist():
        own = cut & (tensors == tensor)
        # Of ranks with layouts of their own, regions may overlap and have that volume by chance.
        if own.any() and not find_overlapping(boxes[own, :width], boxes[own, width:], 1):
            wrong.add(tensor)
        complete[tensor] = False
    if wrong:
        raise _not_as_saved(table, sorted(wrong), tensors, ranks)
    seen = np.unique(np.concatenate([each.tensors for each in held]))
    has_whole = np.isin(seen, tensors[is_whole])
    return int((complete[seen] | (has_whole & (volumes[seen] == 0))).sum())


def _distinct_regions(
    table: ChunkTable, held: Sequence[HeldRegions]
) -> tuple[Ints, Ints, Ints, npt.NDArray[np.uint64]]:
    """Regions that have elements, each once: tensor, rank, offsets and sizes, fingerprint."""
    tensors = np.concatenate([each.tensors for each in held])
    ranks = np.repeat(np.arange(len(held)), [len(each.tensors) for each in held])
    boxes = np.concatenate([np.hstack((each.offsets, each.sizes)) for each in held])
    parts = np.concatenate([each.fingerprints for each in held]).view(np.uint64)
    order = np.lexsort((ranks, *boxes.T[::-1], tensors))
    order = order[boxes[order, table.shapes.shape[1] :].all(axis=1)]
    tensors, ranks, boxes, parts = tensors[order], ranks[order], boxes[order], parts[order]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (tensors[1:] != tensors[:-1]) | (boxes[1:] != boxes[:-1]).any(axis=1)
    _check_replicas(table, tensors, ranks, boxes, parts, is_first)
    return tensors[is_first], ranks[is_first], boxes[is_first], parts[is_first]


def _check_replicas(
    table: ChunkTable,
    tensors: Ints,
    ranks: Ints,
    boxes: Ints,
    parts: npt.NDArray[np.uint64],
    is_first: Bools,
) -> None:
    leaders = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    differs = np.flatnonzero((parts != parts[leaders]).any(axis=1))
    if not len(differs):
        return
    row = int(differs[0])
    tensor, width = int(tensors[row]), table.shapes.shape[1]
    dims = int(table.ndims[tensor])
    raise CorruptCheckpointError(
        f"ranks {ranks[leaders[row]]} and {ranks[row]} have loaded different data for "
        f"{table.names[tensor]!r} at {boxes[row, :dims].tolist()} of sizes "
        f"{boxes[row, width : width + dims].tolist()}. Load it again; if it happens again, a "
        "machine or the storage of one of them is at fault"
    )


def _not_as_saved(
    table: ChunkTable, wrong: Sequence[int], tensors: Ints, ranks: Ints
) -> CorruptCheckpointError:
    shown = ", ".join(
        f"{table.names[tensor]!r} (on ranks {np.unique(ranks[tensors == tensor]).tolist()})"
        for tensor in wrong[:_MOST_NAMED]
    )
    count = "1 tensor is" if len(wrong) == 1 else f"{len(wrong)} tensors are"
    return CorruptCheckpointError(
        f"{count} not as saved, by fingerprint: {shown}. Load with verify='full' to find out "
        "whether the stored bytes are damaged, or load another checkpoint"
    )

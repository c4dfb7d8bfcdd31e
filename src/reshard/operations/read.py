"""Reading without a template: a checkpoint, some of its keys, or one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from reshard.api import CoverageError, MissingKeyError
from reshard.background.queue import save_queue
from reshard.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from reshard.engine.reading import Verify
from reshard.filesystem import FileSystemReader
from reshard.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from reshard.operations.adapters import adapt_for_load
from reshard.operations.load import Load
from reshard.operations.ranks import Ranks
from reshard.operations.targets import LoadSource, comparable_place
from reshard.operations.user_calls import overridden
from reshard.planner import LoadPlan
from reshard.plans.local_load_plan import create_read_items_for_chunk_list
from reshard.plans.mismatches import describe_missing
from reshard.storage import StorageReader
from reshard.tensors.paths import PathMap, keys_above


def read_keys(keys: set[str] | str | None, source: LoadSource, ranks: Ranks) -> dict[str, Any]:
    """What lies at or below `keys`, or everything, as whole CPU tensors on every rank."""
    return _read(keys, source.choose_reader(), ranks)[0]


def read_all_keys(
    keys: set[str] | str | None, reader: StorageReader, mmap: bool = False
) -> dict[str, Any]:
    """The same in this process alone; a key that names nothing is an error.

    With `mmap`, as views of files where possible.
    """
    state_dict, found = _read(keys, reader, Ranks(no_dist=True), mmap)
    missing = {keys} if isinstance(keys, str) else set(keys or ())
    if missing:
        longest = max(map(len, missing))
        missing -= found.keys()
        for path in (*found.values(), *found.empties):
            missing -= set(keys_above(path, missing, longest))
    if missing:
        stored = list(reader.read_metadata().state_dict_metadata)
        raise MissingKeyError(describe_missing(sorted(missing), stored))
    return state_dict


def _read(
    keys: set[str] | str | None, reader: StorageReader, ranks: Ranks, mmap: bool = False
) -> tuple[dict[str, Any], PathMap]:
    """What lies at or below `keys`, and the paths of all that was found there."""
    state_dict: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(keys={keys} if isinstance(keys, str) else keys)
    reader, _ = adapt_for_load(reader, planner)
    with (
        overridden(
            planner,
            allow_pickle=getattr(reader, "allow_pickle", None),
            keeps_blanks=mmap or None,
        ),
        ranks.open_channel(LoadSource(reader, None).intent()) as channel,
    ):
        Load(state_dict, reader, planner, channel).run()
    return state_dict, PathMap(planner.mappings, getattr(planner.mappings, "empties", ()))


def read_region(reader: FileSystemReader, fqn: str, region: Sequence[slice]) -> torch.Tensor:
    """One tensor of a checkpoint, or a region of it; only those bytes are read."""
    if reader.verify is Verify.FINGERPRINT:
        raise ValueError(
            "a region has no fingerprint of its own: read it with verify='chunks' or 'full'"
        )
    save_queue().settle(comparable_place(reader.checkpoint_id))
    metadata = reader.read_metadata()
    entry = metadata.state_dict_metadata.get(fqn)
    if not isinstance(entry, TensorStorageMetadata):
        names = [n for n, e in metadata.state_dict_metadata.items() if hasattr(e, "size")]
        raise MissingKeyError(describe_missing([fqn], names))
    offsets, sizes = _bounds(fqn, tuple(entry.size), region)
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    items = create_read_items_for_chunk_list(fqn, entry, [chunk])
    if sum(item.lengths.numel() for item in items) != math.prod(sizes):
        raise CoverageError(f"the checkpoint does not hold all of {fqn!r} in that region")
    tensor = torch.empty(sizes, dtype=entry.properties.dtype, device="cpu")
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(LoadPlan(items), _OneTensorPlanner(tensor)).wait()
    return tensor


def _bounds(
    fqn: str, shape: tuple[int, ...], region: Sequence[slice]
) -> tuple[list[int], list[int]]:
    if isinstance(region, slice):
        region = (region,)
    if any(not isinstance(part, slice) for part in region):
        raise TypeError(f"a region of {fqn!r} is a tuple of slices, not {region!r}")
    if len(region) > len(shape) or any(part.step not in (None, 1) for part in region):
        raise ValueError(
            f"a region of {fqn!r} has at most {len(shape)} slices, of step 1; got {region}"
        )
    whole = [*region, *[slice(None)] * (len(shape) - len(region))]
    bounds = [part.indices(extent)[:2] for part, extent in zip(whole, shape, strict=True)]
    return [begin for begin, _ in bounds], [max(end - begin, 0) for begin, end in bounds]


class _OneTensorPlanner(DefaultLoadPlanner):
    """Fills a tensor that is in no state dict."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._tensor

"""The story of a load."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from reshard.api import CheckpointException, CoverageError, MissingKeyError, _noting
from reshard.background.backlog import backlog, place_of
from reshard.coordination.agreement import agree_on_checkpoint, announce_load
from reshard.coordination.channel import (
    DEFAULT_TIMEOUT_SECONDS,
    Channel,
    Intent,
    open_channel,
    telling_others,
)
from reshard.coordination.pairing import LOAD
from reshard.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from reshard.engine.collector import paused_collection, paused_in_front
from reshard.engine.reading import Verify
from reshard.filesystem import FileSystemReader
from reshard.format.values import decode_value
from reshard.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from reshard.operations.user_calls import _api_bc_check, refuse_dcp
from reshard.planner import LoadPlan, LoadPlanner
from reshard.planning.columns import Bools
from reshard.plans.building import create_read_items_for_chunk_list, describe_missing
from reshard.plans.wire import decode_load_plan, encode_load_plan
from reshard.rank_values import choose_rank_values, restore_rank_values
from reshard.stateful import Stateful as Stateful
from reshard.stateful import is_stateful
from reshard.storage import StorageReader, takes_any_keyword
from reshard.tensors.composites import KIND, stored_shards
from reshard.tensors.flatten import PathMap, keys_above

__all__ = ["LoadReport", "load", "load_state_dict", "read_state_dict", "read_tensor"]

Rename = Mapping[str, str] | Callable[[str], str]


@dataclass
class LoadReport:
    """What a load did on this rank.

    `missing` are keys of the state dict that the checkpoint does not have and that were
    left as they were; `unexpected` are keys of the checkpoint that nobody asked for;
    `excluded` are those that the caller did not want.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0


@_api_bc_check
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    strict: bool | Literal["exact"] = True,
    rename: Rename | None = None,
    exclude: Sequence[str] = (),
    verify: Literal["off", "chunks", "full"] | None = None,
    allow_pickle: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> LoadReport:
    """Load a checkpoint into `state_dict`, in place, whatever mesh it was saved on.

    Called by all ranks of `process_group` (of the default group if there is one; without
    one, or with `no_dist`, this process loads on its own). Everything that can be wrong
    with the request is found on all ranks before the first byte changes. If any rank
    fails, every rank raises a `CheckpointException` with the reasons.

    Tensors are filled where they are, other values are replaced, `Stateful` values are
    given their state. `strict=False` leaves keys that the checkpoint does not have as
    they are; `strict="exact"` also refuses keys of the checkpoint that nobody asked for.
    Keys that match a pattern of `exclude` (`*` and `?` as in a shell) stay as they are.
    `rename` maps names of the checkpoint, or their dotted prefixes, to names of the state
    dict. `verify` says which chunks are checked against their checksums: those read whole
    (`"chunks"`, the default), all that are touched (`"full"`), or none (`"off"`). A rank
    that does not answer for `timeout_seconds` counts as failed; 0 means to wait for ever.
    """
    began = time.perf_counter()
    source = (
        storage_reader if checkpoint_id is None else SimpleNamespace(checkpoint_id=checkpoint_id)
    )
    channel = _open_channel(process_group, no_dist, 0, timeout_seconds, source)
    with telling_others(channel), contextlib.ExitStack() as undo:
        if strict not in (True, False, "exact"):
            raise ValueError(f"strict is True, False or 'exact', not {strict!r}")
        reader = _choose_reader(storage_reader, checkpoint_id)
        chosen = planner if planner is not None else DefaultLoadPlanner()
        if exclude and not isinstance(chosen, DefaultLoadPlanner):
            raise ValueError(
                f"exclude needs a planner that derives from DefaultLoadPlanner, not "
                f"{type(chosen).__name__}: leave the keys out of the state dict"
            )
        if isinstance(reader, FileSystemReader):
            undo.enter_context(_settings(reader))
            if verify is not None:
                reader.verify = Verify(verify)
            reader.allow_pickle = reader.allow_pickle or allow_pickle
        if isinstance(chosen, DefaultLoadPlanner):
            undo.enter_context(_settings(chosen))
            chosen.exclude = tuple([exclude] if isinstance(exclude, str) else exclude)
            chosen.allow_pickle = chosen.allow_pickle or allow_pickle
            chosen.allow_partial_load = chosen.allow_partial_load or not strict
        later = undo.pop_all()
    with later, channel:
        report = _Load(state_dict, reader, chosen, channel, strict == "exact", rename).run()
    report.seconds = time.perf_counter() - began
    return report


@contextlib.contextmanager
def _settings(used: FileSystemReader | DefaultLoadPlanner) -> Iterator[None]:
    """What a call asks of an object that was passed to it is for this call only."""
    names = ("verify", "allow_pickle", "exclude", "allow_partial_load")
    before = {name: getattr(used, name) for name in names if hasattr(used, name)}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(used, name, value)


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Deprecated; use `load`."""
    warnings.warn("load_state_dict is deprecated; use load", FutureWarning, stacklevel=2)
    storage_reader.reset()
    _load_state_dict(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)


def _load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Load into a state dict without `Stateful` values, as tools of other projects do."""
    chosen = planner if planner is not None else DefaultLoadPlanner()
    with _open_channel(process_group, no_dist, coordinator_rank, source=storage_reader) as channel:
        _Load(state_dict, storage_reader, chosen, channel).run()


def read_state_dict(
    checkpoint_id: str | os.PathLike[str],
    keys: set[str] | str | None = None,
    *,
    verify: Literal["off", "chunks", "full"] = "chunks",
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """A checkpoint, or what lies at or below `keys` in it, as whole CPU tensors.

    Needs no template and no process group; each process that calls it reads for itself.
    Names that shared one memory when they were saved, such as tied weights, share it again.
    """
    reader = FileSystemReader(checkpoint_id, verify=verify, allow_pickle=allow_pickle)
    try:
        state_dict, found = _read_keys(keys, reader, None, True, allow_pickle)
        _check_found(keys, found, reader)
        return state_dict
    except CheckpointException as error:
        failed = error
    # Alone, there is one reason, which says more than that something failed. Raised out here,
    # since within the block it would refer to the error that refers to it.
    for reason, _ in failed.failures.values():
        raise reason
    raise failed


def _check_found(keys: set[str] | str | None, found: PathMap, reader: StorageReader) -> None:
    """Raise if a key names nothing."""
    missing = {keys} if isinstance(keys, str) else set(keys or ())
    if missing:
        longest = max(map(len, missing))
        missing -= found.keys()
        for path in (*found.values(), *found.empties):
            missing -= set(keys_above(path, missing, longest))
    if missing:
        stored = list(reader.read_metadata().state_dict_metadata)
        raise MissingKeyError(describe_missing(sorted(missing), stored))


def read_tensor(
    checkpoint_id: str | os.PathLike[str],
    fqn: str,
    region: Sequence[slice] | None = None,
    *,
    verify: Literal["off", "chunks", "full"] = "chunks",
) -> torch.Tensor:
    """One tensor of a checkpoint, or a region of it; only those bytes are read.

    `region` has a slice of step 1 for each dimension, or for the first few.
    """
    reader = FileSystemReader(checkpoint_id, verify=verify)
    backlog().settle(place_of(reader))
    metadata = reader.read_metadata()
    entry = metadata.state_dict_metadata.get(fqn)
    if not isinstance(entry, TensorStorageMetadata):
        names = [n for n, e in metadata.state_dict_metadata.items() if hasattr(e, "size")]
        raise MissingKeyError(describe_missing([fqn], names))
    offsets, sizes = _region(fqn, tuple(entry.size), region or ())
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    items = create_read_items_for_chunk_list(fqn, entry, [chunk])
    if sum(item.lengths.numel() for item in items) != math.prod(sizes):
        raise CoverageError(f"the checkpoint does not hold all of {fqn!r} in that region")
    tensor = torch.empty(sizes, dtype=entry.properties.dtype, device="cpu")
    planner = _OneTensorPlanner(tensor)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(LoadPlan(items), planner).wait()
    return tensor


def _region(
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


def _load_state_dict_from_keys(
    keys: set[str] | str | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """What lies at or below `keys`, or everything, as whole CPU tensors on every rank."""
    reader = _choose_reader(storage_reader, checkpoint_id)
    state_dict, _ = _read_keys(keys, reader, process_group, False, False)
    return state_dict


def _read_keys(
    keys: set[str] | str | None,
    reader: StorageReader,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    allow_pickle: bool,
) -> tuple[dict[str, Any], PathMap]:
    """What lies at or below `keys`, and the paths of all that was found there."""
    state_dict: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(keys={keys} if isinstance(keys, str) else keys)
    planner.allow_pickle = allow_pickle
    with _open_channel(process_group, no_dist, source=reader) as channel:
        _Load(state_dict, reader, planner, channel).run()
    return state_dict, PathMap(planner.mappings, getattr(planner.mappings, "empties", ()))


def _choose_reader(
    storage_reader: StorageReader | None, checkpoint_id: str | os.PathLike[str] | None
) -> StorageReader:
    if storage_reader is not None:
        if checkpoint_id is not None:
            storage_reader.reset(checkpoint_id)
        return storage_reader
    if not checkpoint_id:
        raise RuntimeError(
            "`checkpoint_id` must be specified if `storage_reader` is None: say what to load"
        )
    if not FileSystemReader.validate_checkpoint_id(checkpoint_id):
        raise RuntimeError(
            f"Cannot detect which storage {checkpoint_id!r} is in: pass a directory, or a "
            "storage_reader"
        )
    reader = FileSystemReader(checkpoint_id)
    reader.reset(checkpoint_id)
    return reader


def _open_channel(
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    coordinator_rank: int = 0,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    source: object = None,
) -> Channel:
    use_dist = not no_dist and dist.is_available() and dist.is_initialized()
    place = None
    with contextlib.suppress(OSError, ValueError):
        place = place_of(source)
    # Ranks may have a copy each, at places of their own.
    intent = Intent(LOAD, f"load of {place!r}" if place else "load")
    return open_channel(process_group, use_dist, coordinator_rank, timeout_seconds, intent)


class _Load:
    """One load, as one rank sees it."""

    def __init__(
        self,
        state_dict: dict[str, Any],
        reader: StorageReader,
        planner: LoadPlanner,
        channel: Channel,
        exact: bool = False,
        rename: Rename | None = None,
    ) -> None:
        self.original = state_dict
        self.reader = reader
        self.planner = planner
        self.channel = channel
        self.exact = exact
        self.rename = rename
        self.report = LoadReport()
        self._quiet = contextlib.ExitStack()
        self.excluded: list[str] = []
        self.plan: LoadPlan

    def run(self) -> LoadReport:
        with contextlib.ExitStack() as undo:
            if isinstance(self.planner, DefaultLoadPlanner):
                undo.enter_context(_settings(self.planner))
                if isinstance(self.reader, FileSystemReader):
                    self.planner.allow_pickle |= self.reader.allow_pickle
            return self._run()

    def _run(self) -> LoadReport:
        # States are asked for, and given back, only when no rank can fail for another reason:
        # both may communicate, and would wait for the rank that failed.
        self.channel.gather_scatter("open", self.open, agree_on_checkpoint)
        with self._quiet:
            self._plan_and_read()
        self.channel.gather_scatter("give back", self.give_back, lambda messages: messages)
        return self.report

    def _plan_and_read(self) -> None:
        reply = self.channel.gather_scatter("plan", self.plan_locally, self.plan_globally)
        unexpected, plan = msgspec.msgpack.decode(reply)
        self.report.unexpected = self._name_unexpected(unexpected)
        if plan:
            self.plan = decode_load_plan(plan)
        self.channel.gather_scatter("read", self.read, lambda messages: messages)

    def open(self) -> bytes:
        refuse_dcp(self.planner, self.reader)
        backlog().settle(place_of(self.reader))
        self.metadata, is_common = self._read_metadata()
        return announce_load(self.metadata.storage_meta if is_common else None)

    def _read_metadata(self) -> tuple[Metadata, bool]:
        """The metadata, and whether it is common to all ranks or that of this rank only."""
        reader = self.reader
        try:
            return reader.read_metadata(), True
        except Exception:
            own = type(reader).read_metadata
            if isinstance(reader, FileSystemReader) or not takes_any_keyword(own):
                raise
        return reader.read_metadata(rank=self.channel.rank), False

    def plan_locally(self) -> bytes:
        channel, reader, planner, metadata = self.channel, self.reader, self.planner, self.metadata
        self.state_dict = self._ask_stateful()
        seen = _renamed(metadata, self.rename)
        self._ask_for_templates(seen)
        # From here on nobody is asked for a state, which may take memory and make cycles.
        self._quiet.enter_context(paused_in_front())
        empties = getattr(metadata.planner_data, "empties", ())
        names = [*seen.state_dict_metadata, *(".".join(map(str, path)) for path in empties)]
        template, self.rank_values = choose_rank_values(
            self.state_dict, channel.rank, channel.world_size, names
        )
        self.template = template
        with paused_collection():
            planner.set_up_planner(template, seen, channel.is_coordinator)
        if takes_any_keyword(reader.set_up_storage_reader):
            reader.set_up_storage_reader(
                metadata, channel.is_coordinator, rank=channel.rank, use_collectives=True
            )
        else:
            reader.set_up_storage_reader(metadata, channel.is_coordinator)
        with paused_collection():
            plan = planner.create_local_plan()
        self.plan = reader.prepare_local_plan(plan)
        self._check_composites(seen)
        unexpected = self._compare_keys(seen)
        encoded = b"" if self._plans_alone() else encode_load_plan(self.plan)
        return msgspec.msgpack.encode((np.packbits(unexpected).tobytes(), encoded))

    def _check_composites(self, metadata: Metadata) -> None:
        """Look at what composite tensors are before anything is loaded into them."""
        planner, reader = self.planner, self.reader
        if not isinstance(planner, DefaultLoadPlanner) or not isinstance(reader, FileSystemReader):
            return
        wanted = [name for name in planner.state_dict if name.endswith(f".{KIND}")]
        composites = stored_shards(metadata) if wanted else {}
        entries = metadata.state_dict_metadata
        stored_as = {
            name: entries[name].alias_of or name
            for name in wanted
            if name.removesuffix(f".{KIND}") in composites and not planner.excludes(name)
        }
        for name, data in reader.read_values(list(stored_as.values())).items():
            for its_name in (n for n, stored in stored_as.items() if stored == name):
                planner.composites.check(its_name, decode_value(data, its_name))

    def _ask_stateful(self) -> dict[str, Any]:
        """The states to fill: of `Stateful` values theirs, of others the value itself."""
        if not any(map(is_stateful, self.original.values())):
            return self.original
        # In the same order on all ranks, since state_dict() may communicate.
        states = {}
        for key, value in sorted(self.original.items()):
            with _noting(f"asking {key!r} for its state"):
                asked = is_stateful(value) and not _gives_template(value)
                states[key] = value.state_dict() if asked else value
        return states

    def _ask_for_templates(self, metadata: Metadata) -> None:
        """Ask those that decide by the checkpoint what they want of it."""
        rank, world_size = self.channel.rank, self.channel.world_size
        for key, value in self.state_dict.items():
            if _gives_template(value):
                template = value.template_for(metadata, key, rank, world_size)
                # Made from the checkpoint: what nobody wants of it must not be there at all.
                excludes = getattr(self.planner, "excludes", lambda name: False)
                self.state_dict[key], left_out = value.pruned(template, key, excludes)
                self.excluded += left_out

    def _give_back(self) -> None:
        """Hand loaded states to their owners, and put other values in their place."""
        if self.state_dict is not self.original:
            for key, value in sorted(self.original.items()):
                if _gives_template(value):
                    # Where the checkpoint has nothing, there may be memory that nothing filled.
                    missing = set(self.report.missing)
                    loaded, _ = value.pruned(self.state_dict[key], key, missing.__contains__)
                    with _noting(f"giving {key!r} its state"):
                        value.load_state_dict(loaded)
                elif is_stateful(value):
                    with _noting(f"giving {key!r} its state"):
                        value.load_state_dict(self.state_dict[key])
                else:
                    self.original[key] = self.state_dict[key]

    def _compare_keys(self, metadata: Metadata) -> Bools:
        """Which stored keys this rank does not ask for."""
        self.stored = list(metadata.state_dict_metadata)
        stored = metadata.state_dict_metadata
        wanted = getattr(self.planner, "state_dict", self.template)
        excluded = getattr(self.planner, "excludes", lambda name: False)
        self.report.loaded = [n for n in wanted if n in stored and not excluded(n)]
        self.report.missing = [n for n in wanted if n not in stored and not excluded(n)]
        self.report.excluded = [*self.excluded, *(n for n in wanted if excluded(n))]
        # What other ranks stored of a value that differs by rank is not for this one.
        known = tuple(".".join(map(str, path)) + ".rank-" for path in self.rank_values)
        if isinstance(self.planner, DefaultLoadPlanner):
            known += self.planner.composites.covers
        known += tuple(f"{name}." for name in self.excluded)
        unexpected = (
            name not in wanted and not name.startswith(known) and not excluded(name)
            for name in self.stored
        )
        return np.fromiter(unexpected, dtype=bool, count=len(self.stored))

    def _name_unexpected(self, bits: bytes) -> list[str]:
        flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(self.stored))
        return [self.stored[row] for row in np.flatnonzero(flags).tolist()]

    def _plans_alone(self) -> bool:
        """Whether the global step changes nothing, so that plans need not travel."""
        return (
            getattr(type(self.planner), "create_global_plan", None)
            is DefaultLoadPlanner.create_global_plan
            and type(self.reader).prepare_global_plan is FileSystemReader.prepare_global_plan
        )

    def plan_globally(self, messages: Sequence[bytes]) -> Sequence[bytes]:
        masks, encoded = zip(*map(msgspec.msgpack.decode, messages), strict=True)
        # A key that any rank asks for is expected: stages of a pipeline ask for their own.
        bits = np.bitwise_and.reduce([np.frombuffer(mask, dtype=np.uint8) for mask in masks])
        nobody_wants = self._name_unexpected(bits.tobytes())
        if self.exact and nobody_wants:
            shown = ", ".join(map(repr, nobody_wants[:5]))
            raise MissingKeyError(
                f"the checkpoint has {len(nobody_wants)} keys that no state dict asks for, such as "
                f"{shown}. Add them, or load with strict=True"
            )
        answers = list(encoded)
        if any(encoded):
            plans = self.planner.create_global_plan([decode_load_plan(plan) for plan in encoded])
            answers = [encode_load_plan(plan) for plan in self.reader.prepare_global_plan(plans)]
        return [msgspec.msgpack.encode((bits.tobytes(), answer)) for answer in answers]

    def read(self) -> bytes:
        final = self.planner.finish_plan(self.plan)
        before = getattr(self.reader, "bytes_read", 0)
        self.reader.read_data(final, self.planner).wait()
        self.report.nbytes = getattr(self.reader, "bytes_read", 0) - before
        if isinstance(self.planner, DefaultLoadPlanner):
            self.planner.finish_load()
        return b""

    def give_back(self) -> bytes:
        self._unwrap()
        self._give_back()
        return b""

    def _unwrap(self) -> None:
        """Give marked values back without the mark, under their own name."""
        if self.template is not self.state_dict:
            restore_rank_values(self.state_dict, self.template, self.rank_values)


def _gives_template(value: Any) -> bool:
    return is_stateful(value) and hasattr(type(value), "template_for")


def _renamed(metadata: Metadata, rename: Rename | None) -> Metadata:
    """Metadata with the names of the state dict; data stays under the stored names."""
    if rename is None:
        return metadata
    change = rename if callable(rename) else _prefix_rename(rename)
    entries: dict[str, STORAGE_TYPES] = {}
    for name, entry in metadata.state_dict_metadata.items():
        new = change(name)
        if new in entries:
            raise ValueError(f"rename gives two keys of the checkpoint the name {new!r}")
        entries[new] = (
            entry if new == name else dataclasses.replace(entry, alias_of=entry.alias_of or name)
        )
    return dataclasses.replace(metadata, state_dict_metadata=entries)


def _prefix_rename(rename: Mapping[str, str]) -> Callable[[str], str]:
    def change(name: str) -> str:
        parts = name.split(".")
        for depth in range(len(parts), 0, -1):
            prefix = ".".join(parts[:depth])
            if prefix in rename:
                return ".".join([rename[prefix], *parts[depth:]])
        return name

    return change

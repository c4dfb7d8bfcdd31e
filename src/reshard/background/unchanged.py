"""Tensors that need not be copied for a save, because its base holds them.

Such a tensor is in memory as it was when the base was saved: its version counter says so, or the
user (`frozen`). Neither is proof: `tensor.data` is changed behind the counter's back. So the first
bytes are compared at once, and all of them in the background, while the save goes on.
"""

from __future__ import annotations

import fnmatch
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from reshard.api import BaseError
from reshard.background.queue import save_queue
from reshard.checkpoint.bases import Base, base_location, open_base
from reshard.checkpoint.directory import MANIFEST
from reshard.engine.memory import BounceBuffer, byte_view, is_direct
from reshard.engine.process_wide import ProcessWide
from reshard.engine.writing import Content, hash_content
from reshard.format.checksum import probe, signed
from reshard.operations.save import SaveSettings
from reshard.planner import SavePlanner
from reshard.plans.traits import save_traits
from reshard.snapshots.survey import addresses_in
from reshard.stores.local import LocalStore
from reshard.tensors.flatten import flatten_state_dict
from reshard.tensors.shards import DTensorReader, is_dense, is_plain, plain_local_tensor
from reshard.tensors.storages import Stamp, stamp_of

_BOUNCE_BYTES = 4 << 20
_MOST_REMEMBERED = 4


class _Kept(NamedTuple):
    """A tensor that is not copied, and what its bytes must be."""

    content: Content
    tensor: torch.Tensor
    digest: bytes
    trusted: Stamp | None


@dataclass
class Unchanged:
    """What a save leaves where it is."""

    kept: list[_Kept] = field(default_factory=list)
    stamps: dict[str, Stamp] = field(default_factory=dict)
    """Of all tensors, as they are when the state is copied."""

    @property
    def digests(self) -> dict[str, bytes]:
        """What the tensors hold, by name."""
        return {each.content.name: each.digest for each in self.kept}

    @property
    def tensors(self) -> frozenset[int]:
        """The ids of the tensors."""
        return frozenset(id(each.tensor) for each in self.kept)

    @property
    def addresses(self) -> frozenset[int]:
        """Where the tensors begin in memory."""
        return frozenset(each.tensor.data_ptr() for each in self.kept)

    def verify(self) -> None:
        """Make sure that the tensors have the bytes that the base holds. Reads all of them."""
        bounce = BounceBuffer(_BOUNCE_BYTES)
        for content, tensor, digest, trusted in self.kept:
            if not tensor.is_cpu:
                # Reading it back would cost the training more than it is worth.
                continue
            if hash_content(content, None, bounce).digest == digest:
                continue
            if trusted is not None and stamp_of(tensor) != trusted:
                # It has changed since the save was asked for, and before that it had not.
                continue
            _history().distrusted.add(content.name)
            raise BaseError(
                f"{content.key!r} was not copied for the save, because it is frozen or its version "
                "counter says that it has not changed since the base was saved, but its bytes are "
                "others. It was changed through .data, or is not frozen. Nothing was saved; the "
                "next save copies it"
            )

    def remember(self, place: str | None) -> None:
        """Keep the stamps for a save whose base is the checkpoint that is now at `place`."""
        version = None if place is None else LocalStore(place).version(MANIFEST)
        if place is not None and version is not None and self.stamps:
            _history().remember(place, version, self.stamps)


class _History:
    """The stamps of the last saves, and names whose stamps were found to be wrong."""

    def __init__(self) -> None:
        self.distrusted: set[str] = set()
        self._stamps: OrderedDict[tuple[str, str], dict[str, Stamp]] = OrderedDict()

    def remember(self, place: str, version: str, stamps: dict[str, Stamp]) -> None:
        self._stamps[place, version] = stamps
        while len(self._stamps) > _MOST_REMEMBERED:
            self._stamps.popitem(last=False)

    def stamps_of(self, place: str) -> Mapping[str, Stamp]:
        version = LocalStore(place).version(MANIFEST)
        return self._stamps.get((place, version or ""), {})


_history = ProcessWide(_History)


def find_unchanged(
    state_dict: Mapping[str, Any],
    place: str | None,
    settings: SaveSettings,
    planner: SavePlanner | None,
) -> Unchanged:
    """The tensors that a save to `place` need not copy."""
    if settings.base is None or place is None or "://" in place:
        return Unchanged()
    if save_queue().is_busy_with(os.path.realpath(settings.base)):
        # What will be there when the turn of this save comes is not there yet.
        return Unchanged()
    store = LocalStore(place)
    base = open_base(store, base_location(store, settings.base))
    found = Unchanged()
    if planner is not None and not _takes_tensors_as_they_are(planner):
        return found
    before = _history().stamps_of(os.path.realpath(settings.base))
    patterns = [settings.frozen] if isinstance(settings.frozen, str) else [*settings.frozen]
    for content, tensor in _contents(state_dict):
        stamp = stamp_of(tensor)
        found.stamps[content.name] = stamp
        trusted = stamp if before.get(content.name) == stamp else None
        is_frozen = any(fnmatch.fnmatchcase(content.name, pattern) for pattern in patterns)
        if not is_frozen and (trusted is None or tensor.requires_grad or not tensor.is_cpu):
            # Counters of tensors on a device are not trusted: the background cannot check them, and
            # kernels that get raw pointers move no counter.
            continue
        if settings.check_replicas:
            # Replicas are compared by what was copied.
            continue
        digest = _digest_in_base(base, content, tensor, settings.fingerprint)
        if digest is not None:
            found.kept.append(_Kept(content, tensor, digest, trusted))
    if found.kept:
        # A tensor that is left where it is, is left so under all of its names.
        everywhere = Counter(addresses_in(state_dict))
        here = Counter(each.tensor.data_ptr() for each in found.kept)
        found.kept = [
            each
            for each in found.kept
            if here[each.tensor.data_ptr()] == everywhere[each.tensor.data_ptr()]
        ]
    return found


def _takes_tensors_as_they_are(planner: SavePlanner) -> bool:
    traits = save_traits(planner)
    return (
        traits.is_default
        and traits.keeps_values
        and traits.keeps_local_plan
        and bool(getattr(planner, "flatten_state_dict", False))
    )


def _contents(state_dict: Mapping[str, Any]) -> Iterator[tuple[Content, torch.Tensor]]:
    """The tensors of which this rank holds one region, and their memory."""
    reader = DTensorReader()
    flat, _ = flatten_state_dict(dict(state_dict))
    for name, value in flat.items():
        if is_plain(value) and is_dense(value) and not value.is_meta:
            tensor, shape, offsets = value, tuple(value.shape), (0,) * value.dim()
        else:
            local = plain_local_tensor(value)
            regions = () if local is None else reader.regions(name, value)
            if local is None or len(regions) != 1 or local.is_meta:
                continue
            tensor, shape, offsets = local, tuple(value.shape), regions[0].offsets
        if tensor.numel():
            sizes = tuple(tensor.shape)
            yield (
                Content(name, tensor.dtype, sizes, tensor.nbytes, tensor, name, offsets, shape),
                tensor,
            )


def _digest_in_base(
    base: Base, content: Content, tensor: torch.Tensor, fingerprint: bool
) -> bytes | None:
    """The digest of what the base holds, unless the first bytes differ already.

    With `fingerprint`, the base must have that as well: without a copy it cannot be computed.
    """
    candidate = base.find(content)
    if candidate is None or content.name in _history().distrusted:
        return None
    if fingerprint and candidate.fingerprint is None:
        return None
    first = signed(probe(byte_view(tensor))) if is_direct(tensor) else None
    stored = base.hash(candidate, first)
    return stored.digest if first in (None, stored.probe) else None

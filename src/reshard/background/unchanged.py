"""Tensors that need not be copied for a save, because its base holds them.

A tensor is left where it is only if it is known to have the bytes that the base holds:

- All of them are compared at the call, which takes less than half as long as a copy. Whatever
  becomes of the tensor then, the base has what was to be saved.
- The names that the user calls `frozen` are believed at the call, and compared in the background.

Version counters tell nothing for sure: `tensor.data` and arrays are changed behind their backs.
"""

from __future__ import annotations

import fnmatch
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from reshard.api import BaseError
from reshard.background.queue import save_queue
from reshard.checkpoint.bases import Base, Candidate, base_location, open_base
from reshard.engine.memory import BounceBuffer, byte_view, is_direct
from reshard.engine.process_wide import ProcessWide
from reshard.engine.workers import default_threads, run_all
from reshard.engine.writing import Content, hash_content
from reshard.format.checksum import probe, signed
from reshard.operations.save import SaveSettings
from reshard.planner import SavePlanner
from reshard.plans.traits import save_traits
from reshard.snapshots.survey import addresses_in
from reshard.stores.local import LocalStore
from reshard.stores.urls import path_of
from reshard.tensors.flatten import flatten_state_dict
from reshard.tensors.shards import DTensorReader, is_dense, is_plain, plain_local_tensor

_BOUNCE_BYTES = 4 << 20
_MOST_NAMED = 5


class _Kept(NamedTuple):
    """A tensor that is not copied, and what the base may hold of it.

    `digest` is what its bytes were found to be, or None if that has yet to be found out.
    """

    content: Content
    tensor: torch.Tensor
    candidate: Candidate
    digest: bytes | None


@dataclass
class Unchanged:
    """What a save leaves where it is."""

    base: Base | None = None
    kept: list[_Kept] = field(default_factory=list)

    @property
    def tensors(self) -> frozenset[int]:
        """The ids of the tensors."""
        return frozenset(id(each.tensor) for each in self.kept)

    @property
    def addresses(self) -> frozenset[int]:
        """Where the tensors begin in memory."""
        return frozenset(each.tensor.data_ptr() for each in self.kept)

    def verify(self) -> dict[str, bytes]:
        """The digests of the tensors, by name, as the base has them.

        Compares frozen tensors, all bytes of them; raises if one is not what the base holds. The
        next save copies it.
        """
        bounce = BounceBuffer(_BOUNCE_BYTES)
        digests, others = {}, []
        for content, tensor, candidate, digest in self.kept:
            stored = digest or _stored_digest(self.base, candidate)
            # Reading back what is on a device would cost the training more than it is worth.
            if digest is None and tensor.is_cpu:
                digest = hash_content(content, None, bounce).digest
                if digest != stored:
                    others.append(content.name)
            digests[content.name] = stored
        if others:
            # All at once, so that no more than one save is lost.
            _not_frozen().update(others)
            raise BaseError(_describe(others))
        return digests


_not_frozen: ProcessWide[set[str]] = ProcessWide(set)
"""Names that were called frozen, and found changed."""


def find_unchanged(
    state_dict: Mapping[str, Any],
    place: str | None,
    settings: SaveSettings,
    planner: SavePlanner | None,
) -> Unchanged:
    """The tensors that a save to `place` need not copy."""
    if settings.base is None or place is None or "://" in place:
        return Unchanged()
    if save_queue().is_busy_with(os.path.realpath(path_of(settings.base))):
        # What will be there when the turn of this save comes is not there yet.
        return Unchanged()
    store = LocalStore(place)
    base = open_base(store, base_location(store, settings.base))
    found = Unchanged(base)
    if settings.check_replicas or not _takes_tensors_as_they_are(planner):
        # Replicas are compared by what was copied.
        return found
    patterns = [settings.frozen] if isinstance(settings.frozen, str) else [*settings.frozen]
    compared: deque[_Kept] = deque()
    for content, tensor in _contents(state_dict):
        candidate = base.find(content)
        if candidate is None or (settings.fingerprint and candidate.fingerprint is None):
            # Without a copy a fingerprint cannot be computed, so the base must have it.
            continue
        stored = base.known_hash(candidate) if is_direct(tensor) else None
        if stored is not None and signed(probe(byte_view(tensor))) != stored.probe:
            # As of most tensors that have changed.
            continue
        is_frozen = any(fnmatch.fnmatchcase(content.name, pattern) for pattern in patterns)
        if is_frozen and content.name not in _not_frozen():
            found.kept.append(_Kept(content, tensor, candidate, None))
        elif stored is not None and stored.digest and not tensor.requires_grad:
            # What is trained changes, and what has to be rearranged is as fast copied.
            compared.append(_Kept(content, tensor, candidate, stored.digest))
    found.kept += _compare(compared)
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


def _takes_tensors_as_they_are(planner: SavePlanner | None) -> bool:
    if planner is None:
        return True
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


def _compare(candidates: deque[_Kept]) -> list[_Kept]:
    """Those whose bytes have the digest, found out in threads."""
    same: list[_Kept] = []

    def work(_: int) -> None:
        bounce = BounceBuffer(_BOUNCE_BYTES)
        while candidates:
            try:
                each = candidates.popleft()
            except IndexError:
                # Another thread took the last one.
                return
            if hash_content(each.content, None, bounce).digest == each.digest:
                same.append(each)

    threads = default_threads() if len(candidates) > 1 else 1
    run_all(work, range(threads), threads)
    return same


def _stored_digest(base: Base | None, candidate: Candidate) -> bytes:
    digest = None if base is None else base.hash(candidate, None).digest
    if digest is None:
        raise ValueError("the candidate is of another base")
    return digest


def _describe(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_MOST_NAMED]))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (
        f"the base does not hold the bytes of {shown}{more}, which were not copied for the save "
        "because they are named in frozen: they were changed since the base was saved, or while "
        "this save was waiting. Nothing was saved. The next saves of this process do not take them "
        "for frozen; leave them out of the patterns"
    )

"""Staging beside the next forward and backward pass.

Between two steps of an optimizer nobody changes its parameters and its state. So they are copied
in a thread, and a hook before the next step waits for what is left. All else that a state dict
holds is copied at once.
"""

from __future__ import annotations

import logging
import threading
import weakref
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from reshard.api import CheckpointException
from reshard.engine.process_wide import ProcessWide
from reshard.metadata import STATE_DICT_TYPE
from reshard.snapshots.pool import Filling, Staged, staging_pool, wait_for_devices
from reshard.snapshots.survey import Move, copy_moves, tensors_in
from reshard.staging import AsyncStager
from reshard.tensors.steps import calls_hooks, version_of
from reshard.tensors.storages import bytes_spanned

logger = logging.getLogger(__name__)

_Storage: TypeAlias = tuple[torch.device, int]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BATCH_BYTES = 64 * 2**20
"""A step that needs other memory first waits for no more than one batch."""


def find_optimizers(
    state_dict: Mapping[str, Any], given: Sequence[torch.optim.Optimizer] | None
) -> list[torch.optim.Optimizer]:
    """The optimizers that were passed, and those of a state dict whose values say which they have.

    Those are optimizers themselves, and values with `optimizers`, such as a `TrainState`.
    """
    found: dict[int, torch.optim.Optimizer] = {}
    for value in (given or (), *state_dict.values()):
        several = getattr(value, "optimizers", value)
        for each in several if isinstance(several, list | tuple) else [several]:
            if isinstance(each, torch.optim.Optimizer):
                found[id(each)] = each
    if not found:
        raise ValueError(
            "staging='overlap' copies what optimizers change until they step, and the state dict "
            "does not say which they are: pass optimizers=[...], or put a TrainState with its "
            "optimizers into the state dict"
        )
    return list(found.values())


class OverlapStager(AsyncStager):
    """Copies what some optimizers change in the background, until they step, and the rest at once.

    For one save.
    """

    _synchronize_after_execute = False

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def stage(self, state_dict: STATE_DICT_TYPE, **kwargs: Any) -> Future[STATE_DICT_TYPE]:
        kept: Collection[int] = kwargs.get("kept", ())
        copies = late_copies()
        copies.finish()
        owners = [Owner(each) for each in self._optimizers if copies.can_hook(each)]
        filling = staging_pool().begin(state_dict, torch.cuda.is_available(), kept)
        try:
            batches, at_once = _split(filling, owners)
            # What devices still compute belongs to the state of now.
            wait_for_devices(filling.plan.tensors)
            copy_moves(at_once)
            staged = filling.staged()
        except BaseException:
            filling.give_up()
            raise
        copy = LateCopy(staged, owners, batches)
        # The save takes the copy over before this stager ends.
        staged.lease.keep()
        weakref.finalize(self, staged.lease.release).atexit = False
        copies.start(copy)
        return copy.staged

    def synchronize_staging(self) -> None:
        """Block until all is copied."""
        late_copies().finish()

    def close(self) -> None:
        """Nothing to release: memory is returned when the save is done."""


class Owner:
    """An optimizer, and the memory that nobody but its steps changes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        held = [each for group in optimizer.param_groups for each in group["params"]]
        for state in optimizer.state.values():
            held += state.values() if isinstance(state, dict) else [state]
        # Most are plain, and looking into them would double the time that the call takes.
        plain = [each for each in held if type(each) in _PLAIN and each.layout is torch.strided]
        others, parts = tensors_in([each for each in held if type(each) not in _PLAIN])
        self._tensors = plain + others
        plain = plain + parts
        self._versions = list(map(version_of, self._tensors))
        # A tensor with gaps may have others between its elements.
        self.spans = [_span(each) for each in plain if bytes_spanned(each) == each.nbytes]

    def forget(self, storages: Collection[_Storage]) -> None:
        """Allow for changes of tensors in some storages, which were copied at once."""
        if storages:
            watched = [
                (tensor, before)
                for tensor, before in zip(self._tensors, self._versions, strict=True)
                if isinstance(tensor, DTensor) or _storage(tensor) not in storages
            ]
            self._tensors = [tensor for tensor, _ in watched]
            self._versions = [before for _, before in watched]

    def check_unchanged(self) -> None:
        """Raise if something was changed before the step that was to be waited for."""
        changed = [
            tensor
            for tensor, before in zip(self._tensors, self._versions, strict=True)
            if version_of(tensor) != before
        ]
        if changed:
            raise CheckpointException(
                f"{len(changed)} tensors of {type(self.optimizer).__name__} were changed while a "
                f"save with staging='overlap' copied them, the first of shape "
                f"{tuple(changed[0].shape)}, so nothing was saved: call reshard.finish_staging() "
                "before changing parameters or optimizer state outside of a step"
            )


@dataclass(frozen=True)
class Batch:
    """What is copied in one call, and the owners (by number) that must not step before."""

    moves: list[Move]
    owners: frozenset[int]


class LateCopy:
    """What is left to copy of a state dict. A failure opens the way for all steps."""

    def __init__(self, staged: Staged, owners: Sequence[Owner], batches: list[Batch]) -> None:
        self.staged: Future[STATE_DICT_TYPE] = Future()
        self._copy: Staged | None = staged
        staged.lease.keep()
        self._owners = list(owners)
        self._changed = threading.Condition()
        self._batches = batches
        self._unfinished = [
            sum(number in batch.owners for batch in batches) for number in range(len(owners))
        ]
        self._wanted: list[int] = []
        self._is_over = False

    def wait(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Block until what an optimizer changes is copied; without one, until all is."""
        with self._changed:
            if optimizer is None:
                self._changed.wait_for(lambda: self._is_over)
                return
            for number, owner in enumerate(self._owners):
                if owner.optimizer is optimizer and not self._is_copied(number):
                    self._wanted.append(number)
                    self._changed.wait_for(lambda: self._is_copied(number))  # noqa: B023
                    return

    def _is_copied(self, number: int) -> bool:
        return self._is_over or not self._unfinished[number]

    def run(self) -> None:
        """Copy, first what somebody waits for."""
        failure: BaseException | None = None
        try:
            self._check(number for number, left in enumerate(self._unfinished) if not left)
            while (batch := self._next()) is not None:
                copy_moves(batch.moves)
                self._finish(batch)
        except BaseException as error:  # noqa: BLE001 - raised by the save
            failure = error
        self._end(failure)

    def _next(self) -> Batch | None:
        with self._changed:
            for number in self._wanted:
                for place, batch in enumerate(self._batches):
                    if number in batch.owners:
                        return self._batches.pop(place)
            return self._batches.pop(0) if self._batches else None

    def _finish(self, batch: Batch) -> None:
        self._check(number for number in batch.owners if self._unfinished[number] == 1)
        with self._changed:
            for number in batch.owners:
                self._unfinished[number] -= 1
            self._changed.notify_all()

    def _check(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._owners[number].check_unchanged()

    def _end(self, failure: BaseException | None) -> None:
        late_copies().ended(self)
        staged, self._copy = self._copy, None
        with self._changed:
            self._is_over = True
            # The tensors of the training are not needed any more.
            self._batches, self._owners = [], []
            self._changed.notify_all()
        if staged is None:
            return
        # Callbacks of this future keep the memory for the save.
        if failure is not None:
            self.staged.set_exception(failure)
        else:
            self.staged.set_result(staged)
        staged.lease.release()


class LateCopies:
    """The copies of this process that go on, and the hooks that wait for them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[LateCopy] = []
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Hook]
        self._hooks = weakref.WeakKeyDictionary()
        self._refused: set[str] = set()

    def can_hook(self, optimizer: torch.optim.Optimizer) -> bool:
        """Make sure that the steps of an optimizer wait; False if that is not possible."""
        if not calls_hooks(optimizer):
            name = type(optimizer).__name__
            if name not in self._refused:
                self._refused.add(name)
                logger.warning("%s calls no hooks, so its state is copied at once", name)
            return False
        with self._lock:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = _Hook(optimizer)
        return True

    def start(self, copy: LateCopy) -> None:
        """Run a copy in a thread."""
        with self._lock:
            self._running.append(copy)
        try:
            threading.Thread(target=copy.run, name="reshard-staging", daemon=True).start()
        except RuntimeError:
            # No more threads. The caller waits, which is no reason to lose the save.
            copy.run()

    def ended(self, copy: LateCopy) -> None:
        with self._lock:
            self._running.remove(copy)

    def finish(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Block until all that an optimizer changes is copied; without one, all of everything."""
        if not self._running:
            return
        with self._lock:
            running = list(self._running)
        for copy in running:
            copy.wait(optimizer)

    def close(self) -> None:
        """Wait for the copies, and remove the hooks."""
        self.finish()
        with self._lock:
            for optimizer, hook in list(self._hooks.items()):
                if hook.remove():
                    del self._hooks[optimizer]


class _Hook:
    """Waits before the steps of an optimizer.

    It stays for later saves: a hook must not be removed while torch goes through the hooks, which
    is when it has waited, and nobody can tell when that is over.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._thread: int | None = None
        self._handle = optimizer.register_step_pre_hook(self)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._thread = threading.get_ident()
        # In a forked child nothing is left to wait for.
        late_copies().finish(optimizer)

    def remove(self) -> bool:
        """Remove the hook, unless another thread steps, which may be going through the hooks."""
        is_safe = self._thread in (None, threading.get_ident())
        if is_safe:
            self._handle.remove()
        return is_safe


late_copies = ProcessWide(LateCopies, LateCopies.close)
"""The copies of this process that go on beside training."""


def _split(filling: Filling, owners: Sequence[Owner]) -> tuple[list[Batch], list[Move]]:
    """What can be copied until the owners step, and what has to be copied at once."""
    plan = filling.plan
    memory = _OwnedMemory(owners)
    owned: list[tuple[Move, frozenset[int]]] = []
    at_once: list[Move] = []
    for move in filling.moves:
        found = [
            memory.owners_of(plan.tensors[i]) if plan.direct[i] else frozenset()
            for i in move.members
        ]
        if all(found):
            owned.append((move, frozenset().union(*found)))
        else:
            at_once.append(move)
    # Torch counts the changes of all tensors in a storage together, so a change of one that nobody
    # waits for cannot be told from one of the others.
    shared = {_storage(plan.tensors[i]) for move in at_once for i in move.members}
    late: dict[frozenset[int], list[Move]] = {}
    for move, numbers in owned:
        if shared.isdisjoint(_storage(plan.tensors[i]) for i in move.members):
            late.setdefault(numbers, []).append(move)
        else:
            at_once.append(move)
    for owner in owners:
        owner.forget(shared)
    batches = [
        Batch(moves, numbers) for numbers, own in late.items() for moves in _cut(own, _BATCH_BYTES)
    ]
    return batches, at_once


def _cut(moves: Sequence[Move], nbytes: int) -> Iterable[list[Move]]:
    """`moves` in batches of about `nbytes`."""
    batch: list[Move] = []
    filled = 0
    for move in moves:
        batch.append(move)
        filled += move.source.nbytes
        if filled >= nbytes:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


class _OwnedMemory:
    """Whose memory a tensor is in."""

    def __init__(self, owners: Sequence[Owner]) -> None:
        self._spans: dict[torch.device, list[tuple[int, int, frozenset[int]]]] = {}
        for number, owner in enumerate(owners):
            for device, begin, end in owner.spans:
                if begin < end:
                    mine = self._spans.setdefault(device, [])
                    mine.append((begin, end, frozenset({number})))
        for device, spans in self._spans.items():
            self._spans[device] = _merged(sorted(spans, key=lambda span: span[:2]))
        self._begins = {d: [span[0] for span in spans] for d, spans in self._spans.items()}

    def owners_of(self, tensor: torch.Tensor) -> frozenset[int]:
        """The numbers of the owners of a tensor; none if not all of its memory is owned."""
        device, begin, end = _span(tensor)
        place = bisect_right(self._begins.get(device, []), begin) - 1
        if place < 0 or begin == end or end > self._spans[device][place][1]:
            return frozenset()
        return self._spans[device][place][2]


def _merged(
    spans: Iterable[tuple[int, int, frozenset[int]]],
) -> list[tuple[int, int, frozenset[int]]]:
    """Sorted spans, with one in the place of several that overlap."""
    merged: list[tuple[int, int, frozenset[int]]] = []
    for begin, end, owners in spans:
        if merged and begin < merged[-1][1]:
            first, last, others = merged[-1]
            merged[-1] = first, max(last, end), owners | others
        else:
            merged.append((begin, end, owners))
    return merged


def _storage(tensor: torch.Tensor) -> _Storage:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _span(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    begin = tensor.data_ptr()
    return tensor.device, begin, begin + bytes_spanned(tensor)

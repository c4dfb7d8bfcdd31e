"""Objects between the ranks of a group, for storages and frameworks that coordinate by collectives.

Reshard itself uses a `Channel` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from reshard.api import (
    WRAPPED_EXCEPTION,
    CheckpointException,
    _is_wrapped_exception,
    _portable_exception,
)
from reshard.coordination.failures import join_failures

T = TypeVar("T")
R = TypeVar("R")


def _get_failure_dict(results: Sequence[Any]) -> dict[int, WRAPPED_EXCEPTION]:
    """Of the results of all ranks, those that are failures."""
    return {rank: found for rank, found in enumerate(results) if _is_wrapped_exception(found)}


class _DistWrapper:
    """Objects between the ranks of a group, for storages and frameworks that coordinate by it.

    Where a function is to be called, a failure on any rank is raised on all of them. Without
    `use_dist` there is one rank. Reshard itself uses `coordination` instead, which does not
    take the group away from the training, and gives up on a rank that died.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, use_dist: bool, coordinator_rank: int
    ) -> None:
        self.group = group
        self.use_dist = use_dist
        self.coordinator_rank = coordinator_rank
        self.rank = dist.get_rank(group) if use_dist else 0
        self.is_coordinator = not use_dist or self.rank == coordinator_rank
        self.global_coordinator_rank = coordinator_rank if use_dist else 0
        if use_dist and group is not None:
            self.global_coordinator_rank = dist.get_global_rank(group, coordinator_rank)

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return dist.get_world_size(self.group) if self.use_dist else 1

    def barrier(self) -> None:
        if self.use_dist:
            dist.barrier(group=self.group)

    def broadcast_object(self, object: T | None) -> T:
        """What the coordinator has, on every rank."""
        box: list[Any] = [object]
        if self.use_dist:
            dist.broadcast_object_list(box, src=self.global_coordinator_rank, group=self.group)
        return box[0]  # type: ignore[no-any-return]

    def gather_object(self, object: T) -> list[T] | None:
        """What all ranks have, on the coordinator."""
        if not self.use_dist:
            return [object]
        found: list[Any] | None = [None] * self.get_world_size() if self.is_coordinator else None
        dist.gather_object(object, found, dst=self.global_coordinator_rank, group=self.group)
        return found

    def all_gather_object(self, object: T) -> list[T]:
        """What all ranks have, on every rank."""
        found: list[Any] = [object] * self.get_world_size()
        if self.use_dist:
            dist.all_gather_object(found, object, group=self.group)
        return found

    def scatter_object(self, object_list: list[T] | None) -> T:
        """To each rank its element of the coordinator's list."""
        if not self.use_dist:
            if object_list is None:
                raise ValueError("there is nothing to scatter: the coordinator must pass a list")
            return object_list[0]
        box: list[Any] = [None]
        there = object_list if self.is_coordinator else None
        dist.scatter_object_list(box, there, src=self.global_coordinator_rank, group=self.group)
        return box[0]  # type: ignore[no-any-return]

    def reduce_scatter(
        self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], list[R]]
    ) -> R:
        """To each rank its part of what the coordinator makes of the results of all ranks."""
        reduced, error = self._reduce(step, map_fun, reduce_fun)
        parts: list[Any] | None = reduced
        if error is not None:
            parts = [error] * self.get_world_size()
        result: R = _result(self.scatter_object(parts))
        return result

    def all_reduce(
        self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], R]
    ) -> R:
        """To every rank what the coordinator makes of the results of all ranks."""
        reduced, error = self._reduce(step, map_fun, reduce_fun)
        result: R = _result(self.broadcast_object(reduced if error is None else error))
        return result

    def all_gather(self, step: str, map_fun: Callable[[], T]) -> list[T]:
        """The results of all ranks."""
        results = self.all_gather_object(_attempt(map_fun))
        failures = _get_failure_dict(results)
        if failures:
            raise join_failures(failures, step)
        return results

    def broadcast(self, step: str, map_fun: Callable[[], T]) -> T:
        """What the coordinator makes, on every rank."""
        made: Any = _attempt(map_fun) if self.is_coordinator else None
        if _is_wrapped_exception(made):
            made = join_failures({self.rank: made}, step)
        result: T = _result(self.broadcast_object(made))
        return result

    def _reduce(
        self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], Any]
    ) -> tuple[Any, CheckpointException | None]:
        """On the coordinator the reduced result, or why there is none."""
        results = self.gather_object(_attempt(map_fun))
        if results is None:
            return None, None
        failures = _get_failure_dict(results)
        if failures:
            return None, join_failures(failures, step)
        reduced = _attempt(lambda: reduce_fun(results))
        if _is_wrapped_exception(reduced):
            return None, join_failures({self.rank: reduced}, step)
        return reduced, None


def _attempt(work: Callable[[], Any]) -> Any:
    """The result of `work`, or its failure in a form that travels."""
    try:
        return work()
    except BaseException as error:  # noqa: BLE001 - raised on all ranks
        return _portable_exception(error)


def _result(received: Any) -> Any:
    if isinstance(received, CheckpointException):
        raise received
    return received

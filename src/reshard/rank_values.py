"""Values that differ from rank to rank, such as random states and dataloader positions."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reshard.api import CheckpointException, MissingKeyError
from reshard.metadata import STATE_DICT_TYPE
from reshard.tensors.flatten import SplitDict
from reshard.tensors.nesting import Walk, put_elements

__all__ = [
    "OnResize",
    "PerRank",
    "choose_rank_values",
    "name_rank_values",
    "per_rank",
    "restore_rank_values",
    "without_rank",
]

OnResize = Literal["error", "drop", "first"]


@dataclass(frozen=True)
class PerRank:
    """A value of this rank alone; see `per_rank`."""

    value: Any
    on_resize: OnResize = "error"

    def __replace_value__(self, value: Any) -> PerRank:
        """The same mark on another value, such as a copy of this one."""
        return PerRank(value, self.on_resize)


def per_rank(value: Any, on_resize: OnResize = "error") -> PerRank:
    """Mark a value of a state dict that differs by rank, so that each rank's value is stored.

    It may lie in dicts, other mappings, lists, tuples and named tuples.

    To load it, mark the value in the state dict in the same way; it is replaced by the value
    that this rank saved, without the mark. `on_resize` is for checkpoints that were saved by
    another number of ranks: `"error"` raises, `"drop"` leaves the value as it is, `"first"`
    takes the value of rank 0.
    """
    if on_resize not in ("error", "drop", "first"):
        raise ValueError(f"on_resize is 'error', 'drop' or 'first', not {on_resize!r}")
    return PerRank(value, on_resize)


def _key(rank: int, world_size: int) -> str:
    return f"rank-{rank}-of-{world_size}"


_RANK_KEY = re.compile(r"\.rank-\d+-of-\d+(?=\.|$)")


def without_rank(name: str) -> str:
    """The name of a value in the state dict, given the one that a rank stores it under."""
    return _RANK_KEY.sub("", name) if ".rank-" in name else name


def name_rank_values(state_dict: STATE_DICT_TYPE, rank: int, world_size: int) -> STATE_DICT_TYPE:
    """`state_dict` with each marked value under a key of this rank."""
    key = _key(rank, world_size)
    named: STATE_DICT_TYPE = _Marks(lambda path, mark: SplitDict({key: mark.value})).run(state_dict)
    return named


def choose_rank_values(
    state_dict: STATE_DICT_TYPE, rank: int, world_size: int, stored: Iterable[str]
) -> tuple[STATE_DICT_TYPE, dict[tuple[Any, ...], str | None]]:
    """`state_dict` with each marked value under the key it is stored under.

    Also the key that was chosen at each path, to find the loaded values again; None for
    values that are dropped. `stored` are the names in the checkpoint.
    """
    chosen: dict[tuple[Any, ...], str | None] = {}
    names: list[str] = []

    def choose(path: tuple[Any, ...], mark: PerRank) -> Any:
        if not names:
            names.extend(sorted(stored))
        prefix = ".".join(map(str, path))
        for key in (_key(rank, world_size), *_first_keys(mark, prefix, names)):
            below = f"{prefix}.{key}"
            if _first_from(names, below) == below or _first_from(names, f"{below}."):
                chosen[path] = key
                return SplitDict({key: mark.value})
        if mark.on_resize == "drop":
            chosen[path] = None
            return SplitDict()
        raise _not_stored(prefix, world_size, names)

    return _Marks(choose).run(state_dict), chosen


def _not_stored(name: str, world_size: int, names: list[str]) -> CheckpointException:
    leave = "Mark it with per_rank(..., on_resize='drop') to leave it as it is"
    first = _first_from(names, f"{name}.rank-0-of-")
    if first:
        saved_by = first[len(name) :].split(".")[1].rpartition("-")[2]
        return CheckpointException(
            f"{name!r} differs by rank: saved by {saved_by} ranks, loaded by {world_size}. "
            f"{leave}, or with 'first' to take that of rank 0"
        )
    if _first_from(names, name) == name or _first_from(names, f"{name}."):
        return CheckpointException(
            f"{name!r} is not stored as a per-rank value. Load it without per_rank(...)"
        )
    return MissingKeyError(f"Missing key in checkpoint state_dict: {name}. {leave}")


def _first_from(names: list[str], beginning: str) -> str | None:
    """The first of the sorted `names` with this beginning."""
    place = bisect.bisect_left(names, beginning)
    found = place < len(names) and names[place].startswith(beginning)
    return names[place] if found else None


def _first_keys(mark: PerRank, prefix: str, names: list[str]) -> list[str]:
    """The key of rank 0's value, for any number of ranks."""
    first = _first_from(names, f"{prefix}.rank-0-of-") if mark.on_resize == "first" else None
    return [first[len(prefix) + 1 :].split(".")[0]] if first else []


def restore_rank_values(
    state_dict: STATE_DICT_TYPE,
    loaded: STATE_DICT_TYPE,
    chosen: Mapping[tuple[Any, ...], str | None],
) -> None:
    """Replace the marks in `state_dict` by the values that were loaded for them.

    `loaded` is what `choose_rank_values` returned for `state_dict`. Immutable containers are
    replaced.
    """

    def restore(path: tuple[Any, ...], mark: PerRank) -> Any:
        key = chosen[path]
        return mark.value if key is None else _at(loaded, path)[key]

    def put(path: list[Any], container: Any, changed: dict[Any, Any]) -> Any:
        # Values beside a mark were loaded into a copy of the container.
        filled = _at(loaded, path)
        keys = container if isinstance(container, Mapping) else range(len(container))
        return put_elements(container, {key: filled[key] for key in keys} | changed)

    _Marks(restore, put).run(state_dict)


def _at(state_dict: Any, path: Iterable[Any]) -> Any:
    for key in path:
        state_dict = state_dict[key]
    return state_dict


class _Marks(Walk):
    """Replaces values that are marked with `per_rank`, and the containers around them."""

    def __init__(
        self,
        change: Callable[[tuple[Any, ...], PerRank], Any],
        combine: Callable[[list[Any], Any, dict[Any, Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self._change = change
        self._combine = combine

    def enter(self, container: Any) -> Iterable[tuple[Any, Any]] | None:
        is_mark = not isinstance(container, Mapping | list | tuple)
        return None if is_mark else super().enter(container)

    def leaf(self, value: Any) -> Any:
        return self._change(tuple(self.path), value) if isinstance(value, PerRank) else value

    def leave(self, container: Any, changed: dict[Any, Any]) -> Any:
        if changed and self._combine is not None:
            return self._combine(self.path, container, changed)
        return super().leave(container, changed)

    def cycle(self, container: Any) -> Any:
        return container

"""Values that are meant to differ from rank to rank: random state, dataloader positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reshard.api import CheckpointException
from reshard.metadata import STATE_DICT_TYPE

__all__ = ["OnResize", "PerRank", "choose_rank_values", "name_rank_values", "per_rank"]

OnResize = Literal["error", "drop", "first"]


@dataclass(frozen=True)
class PerRank:
    """A value of this rank alone; see `per_rank`."""

    value: Any
    on_resize: OnResize = "error"

    def __replace_value__(self, value: Any) -> PerRank:
        """The same mark on another value: on the staged copy of this one."""
        return PerRank(value, self.on_resize)


def per_rank(value: Any, on_resize: OnResize = "error") -> PerRank:
    """Mark a value of a state dict that differs by rank, so that each rank's is stored.

    In a load, mark the value in the state dict likewise; it is replaced by what this rank
    saved, without the mark. If the checkpoint was saved by another number of ranks,
    `on_resize` says what happens: `"error"` raises, `"drop"` leaves the value as it is,
    `"first"` takes that of rank 0.
    """
    if on_resize not in ("error", "drop", "first"):
        raise ValueError(f"on_resize is 'error', 'drop' or 'first', not {on_resize!r}")
    return PerRank(value, on_resize)


def _key(rank: int, world_size: int) -> str:
    return f"rank-{rank}-of-{world_size}"


def name_rank_values(state_dict: STATE_DICT_TYPE, rank: int, world_size: int) -> STATE_DICT_TYPE:
    """`state_dict` with each marked value under the name of this rank."""
    key = _key(rank, world_size)
    named: STATE_DICT_TYPE = _replace(state_dict, (), lambda path, mark: {key: mark.value})
    return named


def choose_rank_values(
    state_dict: STATE_DICT_TYPE, rank: int, world_size: int, stored: Mapping[str, Any]
) -> tuple[STATE_DICT_TYPE, dict[tuple[Any, ...], str | None]]:
    """`state_dict` with each marked value under the name it is stored by.

    Also which name was chosen at which path, to find the loaded values again: None for
    values that are dropped, which are left out.
    """
    chosen: dict[tuple[Any, ...], str | None] = {}

    def choose(path: tuple[Any, ...], mark: PerRank) -> Any:
        prefix = ".".join(map(str, path))
        for key in (_key(rank, world_size), *_first_keys(mark, prefix, stored)):
            below = f"{prefix}.{key}"
            if any(name == below or name.startswith(below + ".") for name in stored):
                chosen[path] = key
                return {key: mark.value}
        if mark.on_resize == "drop":
            chosen[path] = None
            return {}
        raise CheckpointException(
            f"{prefix!r} differs by rank, and the checkpoint was not saved by {world_size} ranks. "
            "Mark it with on_resize='drop' or 'first' to load it all the same"
        )

    return _replace(state_dict, (), choose), chosen


def _first_keys(mark: PerRank, prefix: str, stored: Mapping[str, Any]) -> list[str]:
    """The name of rank 0's value, whatever the number of ranks was."""
    if mark.on_resize != "first":
        return []
    begin = f"{prefix}.rank-0-of-"
    return [name[len(prefix) + 1 :].split(".")[0] for name in stored if name.startswith(begin)]


def _replace(value: Any, path: tuple[Any, ...], change: Any) -> Any:
    """A copy of nested dicts and lists with marks replaced; the same objects otherwise."""
    if isinstance(value, PerRank):
        return change(path, value)
    if isinstance(value, dict):
        changed = {key: _replace(inner, (*path, key), change) for key, inner in value.items()}
        same = all(changed[key] is value[key] for key in value)
        return value if same else changed
    if type(value) is list:
        items = [_replace(inner, (*path, i), change) for i, inner in enumerate(value)]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    return value

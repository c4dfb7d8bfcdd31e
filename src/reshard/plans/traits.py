"""Which steps of a planner are the default ones, and what follows from that.

Nothing outside of this room compares methods of planners, or asks whether a planner is one of
ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def default_step(method: F) -> F:
    """Mark a method of a default planner. A subclass that overrides it has one without the mark.

    The mark is the method itself, which stays true when a decorator copies its attributes.
    """
    method._default_step = method  # type: ignore[attr-defined]
    return method


def _has_default(used: object, *steps: str) -> bool:
    # Of the object, not of its class: a hook may be set on it alone.
    methods = (getattr(used, step, None) for step in steps)
    functions = (getattr(method, "__func__", method) for method in methods)
    return all(f is not None and getattr(f, "_default_step", None) is f for f in functions)


@dataclass(frozen=True)
class SaveTraits:
    """What is known of a save planner."""

    is_default: bool
    """Derives from the default planner, so that it has a plan cache."""
    keeps_values: bool
    """Writes values as they are: equal memory is equal data, and no user code runs in threads."""
    keeps_local_plan: bool
    """Plans with the same fingerprint are the same plan."""
    keeps_answers: bool
    """What a rank writes is what the coordinator answered."""


def save_traits(planner: object) -> SaveTraits:
    """The traits of any save planner."""
    return SaveTraits(
        is_default=getattr(planner, "_is_default_planner", False),
        keeps_values=_has_default(planner, "resolve_data", "lookup_object", "transform_object"),
        keeps_local_plan=_has_default(planner, "create_local_plan"),
        keeps_answers=_has_default(planner, "finish_plan", "create_global_plan"),
    )


@dataclass(frozen=True)
class LoadTraits:
    """What is known of a load planner."""

    is_default: bool
    """Derives from the default planner, so that it has its settings, and composite tensors."""
    fills_in_place: bool
    """Tensors need no further step once they are filled."""
    fills_by_itself: bool
    """The tensors of the state dict are filled as they are: no user code runs for them."""
    decodes_values: bool
    """Stored values are read by our own code, not by a planner written for DCP."""


def load_traits(planner: object) -> LoadTraits:
    """The traits of any load planner."""
    in_place = _has_default(planner, "commit_tensor")
    return LoadTraits(
        is_default=getattr(planner, "_is_default_planner", False),
        fills_in_place=in_place,
        fills_by_itself=in_place
        and _has_default(planner, "resolve_tensor", "lookup_tensor", "transform_tensor"),
        decodes_values=_has_default(planner, "load_bytes"),
    )


def plans_alone(planner: object, reader: object) -> bool:
    """Whether the global step of a load changes nothing, so that plans need not travel."""
    return _has_default(planner, "create_global_plan") and _has_default(
        reader, "prepare_global_plan"
    )


def fills_blanks(planner: object) -> bool:
    """Whether a planner can plan for tensors that have no memory yet."""
    return load_traits(planner).fills_by_itself and _has_default(
        planner, "set_up_planner", "create_local_plan", "fill_blanks"
    )


def knows_casts(planner: object) -> bool:
    """Whether it is known, before anything is loaded, which tensors a planner casts."""
    return load_traits(planner).fills_by_itself and _has_default(planner, "create_local_plan")


def reads_item_by_item(reader: object) -> bool:
    """Whether a Hugging Face storage has a way of its own to read an item."""
    return not _has_default(reader, "_process_read_request")


def views_files(reader: object) -> bool:
    """Whether a storage finds or makes the memory of blanks itself."""
    return _has_default(reader, "read_data")


def can_share_reads(reader: object, planner: object) -> bool:
    """Whether ranks can read for each other: no code of users sees what is read."""
    return (
        views_files(reader)
        and hasattr(reader, "open_shared_read")
        and load_traits(planner).fills_by_itself
    )

"""What to tell users whose state dict and checkpoint do not fit."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from reshard.api import DtypeMismatchError, MissingKeyError, ShapeMismatchError
from reshard.plans.read_items import Casts
from reshard.tensors.shards import HeldShards, describes_itself, global_shape

_SHOWN = 5
_SAMPLE = 20
_MOST_COMPARED = 10_000
_PER_RANK = re.compile(r"\.rank-\d+-of-(\d+)(?=\.|$)")
Advice = tuple[str, str]
"""How the keys differ, and what to do."""
_WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch puts into the names of a module that it wraps."""


# Keys


def missing_keys(wanted: Collection[str], stored: Collection[str]) -> MissingKeyError:
    """For a load of keys of which a checkpoint lacks some."""
    missing = [key for key in wanted if key not in stored]
    none_match = len(missing) == len(wanted) > 1
    found = _find_rank_values(missing, stored) or _find_rename(missing, wanted, stored)
    if found is not None:
        difference, advice = found
        reason = f"None of the {len(wanted)} keys match: {difference}."
        if not none_match:
            reason = f"{_name_missing(missing)}\n{difference[0].upper()}{difference[1:]}."
        return MissingKeyError(f"{reason}\n{advice}.")
    reason = describe_missing(missing, stored)
    if none_match:
        reason = f"None of the {len(wanted)} keys match.\n{_name_missing(missing)}"
        reason += f"\nThe checkpoint has {_listed([*stored])}."
    return MissingKeyError(
        f"{reason}\nLoad with strict=False (or a planner with allow_partial_load=True) to leave "
        "missing keys as they are."
    )


def describe_missing(missing: Sequence[str], stored: Collection[str]) -> str:
    """Which keys are missing, and which are like the first of them."""
    close = difflib.get_close_matches(missing[0], [*stored][:_MOST_COMPARED], n=3)
    has = f"\nThe checkpoint has {_listed(close)}." if close else ""
    return f"{_name_missing(missing)}{has}"


def _name_missing(missing: Sequence[str]) -> str:
    text = f"Missing key in checkpoint state_dict: {missing[0]}."
    if len(missing) > 1:
        shown = _listed(missing[1 : _SHOWN + 1])
        text += f" {len(missing) - 1} more keys are missing, such as {shown}."
    return text


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys[:_SHOWN])) + (", ..." if len(keys) > _SHOWN else "")


def _find_rank_values(missing: Sequence[str], stored: Collection[str]) -> Advice | None:
    """For a key that is stored once for each rank."""
    ranks = {
        _PER_RANK.sub("", key): match[1]
        for key in stored
        if ".rank-" in key and (match := _PER_RANK.search(key))
    }
    for key in missing:
        if key in ranks:
            ours = f"{ranks[key]} rank{'s' if ranks[key] != '1' else ''}"
            return (
                f"the checkpoint holds {key!r} as a per-rank value, saved by {ours}",
                "Put reshard.per_rank(...) around the value in the state dict",
            )
    return None


def _find_rename(
    missing: Sequence[str], wanted: Collection[str], stored: Collection[str]
) -> Advice | None:
    """For missing keys that are there under names that differ in one regular way."""
    unused = [key for key in stored if key not in wanted]
    if len(missing) < 2 or not unused:
        return None
    names = set(unused)
    matched = [key for key in wanted if key in stored]
    for theirs, ours in _likely_prefixes(missing, unused):
        broken = [key for key in matched if _swap_prefix(key, theirs, ours)]
        if len(broken) < _SHOWN and all(_swap_prefix(k, ours, theirs) in names for k in missing):
            rename = {theirs: ours} | {key: key for key in broken}
            return _compare_prefixes(theirs, ours), f"Pass rename={rename!r}"
    return _find_wrappers(missing, names)


def _likely_prefixes(missing: Sequence[str], unused: Sequence[str]) -> list[tuple[str, str]]:
    """Dotted prefixes of stored and of missing keys that differ by nothing else."""
    by_end: dict[str, list[str]] = {}
    for key in unused:
        by_end.setdefault(key.rpartition(".")[2], []).append(key)
    votes: Counter[tuple[str, str]] = Counter()
    for key in missing[:_SAMPLE]:
        for other in by_end.get(key.rpartition(".")[2], ())[: _MOST_COMPARED // _SAMPLE]:
            votes[_split_off_common_end(other, key)] += 1
    return sorted(votes, key=lambda pair: (-votes[pair], sum(map(len, pair))))[:_SAMPLE]


def _compare_prefixes(theirs: str, ours: str) -> str:
    if not ours:
        return f"those of the checkpoint have the prefix '{theirs}.'"
    if not theirs:
        return f"those of the checkpoint lack the prefix '{ours}.'"
    return f"those of the checkpoint begin with '{theirs}.' in place of '{ours}.'"


def _split_off_common_end(one: str, other: str) -> tuple[str, str]:
    """The prefixes that are left of two dotted names without their common last parts."""
    ones, others = one.split("."), other.split(".")
    while ones and others and ones[-1] == others[-1]:
        ones.pop()
        others.pop()
    return ".".join(ones), ".".join(others)


def _swap_prefix(key: str, old: str, new: str) -> str | None:
    """`key` with the dotted prefix `new` in place of `old`; None if it does not begin so."""
    rest = key if not old else key[len(old) + 1 :] if key.startswith(f"{old}.") else None
    return rest and (f"{new}.{rest}" if new else rest)


def _find_wrappers(missing: Sequence[str], unused: AbstractSet[str]) -> Advice | None:
    """For modules that were wrapped at several depths, on one side only."""
    for wrapper in _WRAPPERS:
        if {key.replace(wrapper, "") for key in unused}.issuperset(missing):
            return (
                f"those of the checkpoint have {wrapper!r} in them",
                f"Pass rename=lambda name: name.replace({wrapper!r}, '')",
            )
        if unused >= {key.replace(wrapper, "") for key in missing}:
            return (
                f"those of the checkpoint lack {wrapper!r}",
                "Load into the state dict of the module that is not wrapped, such as "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict makes it",
            )
    return None


# Shapes


def matches(shape: tuple[int, ...], value: Any) -> bool:
    """Whether a stored tensor can be loaded into `value`, as far as kind and shape go."""
    is_tensor = isinstance(value, torch.Tensor | HeldShards)
    if not is_tensor and not describes_itself(value, "__create_chunk_list__"):
        return False
    return not callable(getattr(value, "size", None)) or global_shape(value) == shape


def shape_mismatch(
    state_dict: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...] | None]
) -> ShapeMismatchError:
    """Why values of `state_dict` cannot be filled with tensors of `shapes`, if any of them cannot.

    A shape of None is that of a value that is not a tensor.
    """
    wrong = [
        fqn
        for fqn, shape in shapes.items()
        if shape is not None and not matches(shape, state_dict[fqn])
    ]
    fqn = wrong[0]
    value, saved = state_dict[fqn], shapes[fqn] or ()
    others = f"\n{len(wrong) - 1} more do not fit: {_listed(wrong[1:])}." if wrong[1:] else ""
    if not callable(getattr(value, "size", None)):
        return ShapeMismatchError(
            f"{fqn!r} is stored as a tensor of shape {saved}, but the state dict has a "
            f"{type(value).__name__} in its place.{others}\nPut a tensor of that shape there."
        )
    current = global_shape(value)
    turned = "\nOne looks like the transpose of the other."
    return ShapeMismatchError(
        f"Size mismatch between saved {saved} and current: {current} for {fqn!r}."
        f"{turned if len(saved) > 1 and current == saved[::-1] else ''}{others}\nBuild the model "
        f"with the shape that was saved, or pass exclude=[{_listed(wrong)}] to leave "
        f"{'these' if others else 'it'} as {'they are' if others else 'it is'}."
    )


# Dtypes


def dtype_mismatch(casts: Casts) -> DtypeMismatchError:
    """For a load that would cast tensors and may not."""
    shown = [
        f"{name!r} is stored as {stored} and would be loaded into {own}"
        for name, (stored, own) in list(casts.items())[:_SHOWN]
    ]
    others = f"\n{len(casts) - _SHOWN} more would be cast." if len(casts) > _SHOWN else ""
    return DtypeMismatchError(
        ".\n".join(shown) + f".{others}\nMake the tensors with the dtypes that were saved, load "
        'with dtype="cast" to convert them, or leave them as they are with exclude=[...].'
    )

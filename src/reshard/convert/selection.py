"""What of a checkpoint is converted, under which names and in which dtype."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from reshard.api import MissingKeyError, StateDictError, UnsupportedFormatError
from reshard.checkpoint.planner_data import unpack_planner_data
from reshard.checkpoint.stored_tensors import StoredTensors
from reshard.engine.torch_writing import is_savable
from reshard.format.plain_dtypes import PACKED_DTYPES
from reshard.plans.mismatches import describe_missing
from reshard.tensors.composites import KIND


@dataclass(frozen=True)
class Picked:
    """A tensor to convert: its row in the manifest, and what it becomes."""

    name: str
    tensor: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Selection:
    """What to convert.

    `keys` are names, or what names begin with up to a dot; None stands for all. Names that match
    a pattern of `exclude` are left out. `rename` gives a name its new one; `dtype` is what
    floating-point tensors are converted to, except for packed ones: torch converts none.
    """

    keys: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    rename: Callable[[str], str] | None = None
    dtype: torch.dtype | None = None

    def names(self, source: StoredTensors) -> dict[str, str]:
        """The new name of each stored name that is wanted."""
        stored = [*source.manifest.tensor_names, *source.manifest.value_names]
        wanted = [name for name in stored if self.is_wanted(name)]
        known = (*stored, *_names_of_empty_dicts(source)) if self.keys else ()
        for key in self.keys or ():
            if not any(name == key or name.startswith(f"{key}.") for name in known):
                raise MissingKeyError(f"{source.location}: {describe_missing([key], stored)}")
        new: dict[str, str] = {}
        owners: dict[str, str] = {}
        for name in wanted:
            new[name] = self.new_name(name)
            other = owners.setdefault(new[name], name)
            if other != name:
                raise StateDictError(
                    f"rename gives {other!r} and {name!r} the same name {new[name]!r}, and "
                    f"{source.location} has both: one of them would be lost. Choose other names"
                )
        if self.rename is not None:
            _check_nesting(owners)
        return new

    def new_name(self, name: str) -> str:
        """What a stored name becomes."""
        new = name if self.rename is None else self.rename(name)
        if not isinstance(new, str):
            raise StateDictError(f"rename gives {name!r} the name {new!r}: return a text")
        return new

    def is_wanted(self, name: str) -> bool:
        is_named = self.keys is None or any(
            name == key or name.startswith(f"{key}.") for key in self.keys
        )
        return is_named and not any(fnmatch.fnmatchcase(name, each) for each in self.exclude)

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """What a tensor of `dtype` becomes."""
        if self.dtype is None or not dtype.is_floating_point or dtype in PACKED_DTYPES:
            return dtype
        return self.dtype


def _names_of_empty_dicts(source: StoredTensors) -> list[str]:
    data = source.manifest.planner_data
    paths = unpack_planner_data(data, source.location, allow_pickle=False)
    return [".".join(map(str, path)) for path in getattr(paths, "empties", ())]


def _check_nesting(owners: Mapping[str, str]) -> None:
    """Refuse a name below another one, which would be a value and a container at once."""
    for name, stored in owners.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            above = ".".join(parts[:depth])
            if above in owners and not stored.startswith(f"{owners[above]}."):
                raise StateDictError(
                    f"rename puts {stored!r} at {name!r}, below {above!r}, where {owners[above]!r} "
                    "is: one of them would be lost. Choose other names"
                )


def check_plain(names: Iterable[str], where: str, target: str) -> None:
    """Refuse composite tensors, which are stored as parts that only their class understands."""
    for name in names:
        if name.endswith(f".{KIND}"):
            whose = name.removesuffix(KIND)
            raise UnsupportedFormatError(
                f"{whose[:-1]!r} of {where} consists of other tensors, and {target} has no place "
                f"for its parts. Leave it out with exclude={f'{whose}*'!r}, or load it and save "
                "plain tensors, such as what it dequantizes to"
            )


def check_savable(tensors: Iterable[Picked], where: str) -> None:
    """Refuse tensors that torch.save cannot write, which is what DCP stores as well."""
    for tensor in tensors:
        if not is_savable(tensor.dtype):
            raise UnsupportedFormatError(
                f"torch.save cannot write {tensor.name!r} of {where}, whose dtype is "
                f"{tensor.dtype}. Leave it out with exclude"
            )


def pick_tensors(
    source: StoredTensors, names: Mapping[str, str], selection: Selection
) -> tuple[list[Picked], dict[str, str]]:
    """The tensors among `names`, each once; and of those that share memory, the other names.

    `names` are new names by stored ones.
    """
    table = source.manifest.table
    picked: dict[int, Picked] = {}
    others: dict[str, str] = {}
    for stored, name in names.items():
        tensor = table.row_of.get(stored)
        if tensor is None:
            continue
        owner = int(table.sources[tensor])
        if owner in picked:
            others[name] = picked[owner].name
            continue
        dtype = selection.dtype_for(source.dtype(tensor))
        picked[owner] = Picked(name, tensor, dtype, source.shape(tensor))
    return list(picked.values()), others

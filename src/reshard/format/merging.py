"""Several manifests as one: the parts that ranks wrote without each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.api import CorruptCheckpointError
from reshard.format.manifest import Manifest
from reshard.planning.columns import Ints, widen
from reshard.planning.keys import rank_points

__all__ = ["merge_manifests"]


def merge_manifests(parts: Sequence[Manifest], where: str) -> Manifest:
    """What all parts hold together. Of a chunk that several hold, the first one counts."""
    names: dict[str, int] = {}
    ids = [_number(part.tensor_names, names) for part in parts]
    width = max(part.shapes.shape[1] for part in parts)
    dtypes, flags, ndims, aliases, shapes = _agree(parts, ids, list(names), width, where)

    owners = np.concatenate(
        [np.repeat(own, np.diff(part.chunk_starts)) for own, part in zip(ids, parts, strict=True)]
    )
    offsets = np.concatenate([widen(part.chunk_offsets, width, 0) for part in parts])
    sizes = np.concatenate([widen(part.chunk_sizes, width, 1) for part in parts])
    _, first = np.unique(rank_points(owners, offsets, shapes), return_index=True)
    owners = owners[first]

    first_file = np.cumsum([0, *(len(part.files) for part in parts)])
    value_names: dict[str, int] = {}
    value_ids = np.concatenate([_number(part.value_names, value_names) for part in parts])
    _, first_value = np.unique(value_ids, return_index=True)

    def chunks(attribute: str) -> Ints:
        return np.asarray(np.concatenate([getattr(part, attribute) for part in parts])[first])

    def values(attribute: str) -> Ints:
        return np.asarray(np.concatenate([getattr(part, attribute) for part in parts])[first_value])

    def files(attribute: str) -> Ints:
        columns = [getattr(p, attribute) + f for p, f in zip(parts, first_file, strict=False)]
        return np.asarray(np.concatenate(columns))

    return Manifest(
        files=[path for part in parts for path in part.files],
        file_sizes=np.concatenate([part.file_sizes for part in parts]),
        tensor_names=list(names),
        dtypes=dtypes,
        flags=flags,
        ndims=ndims,
        shapes=shapes,
        aliases=aliases,
        chunk_starts=np.searchsorted(owners, np.arange(len(names) + 1)),
        chunk_offsets=offsets[first],
        chunk_sizes=sizes[first],
        chunk_files=files("chunk_files")[first],
        chunk_begins=chunks("chunk_begins"),
        chunk_checksums=chunks("chunk_checksums"),
        value_names=list(value_names),
        value_files=files("value_files")[first_value],
        value_begins=values("value_begins"),
        value_nbytes=values("value_nbytes"),
        value_checksums=values("value_checksums"),
        value_pickled=values("value_pickled"),
        planner_data=b"",
        notes=parts[0].notes,
    )


def _number(own: Sequence[str], names: dict[str, int]) -> Ints:
    return np.fromiter((names.setdefault(name, len(names)) for name in own), np.int64, len(own))


def _agree(
    parts: Sequence[Manifest], ids: Sequence[Ints], names: Sequence[str], width: int, where: str
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """What the parts say about each tensor, which must be the same."""
    told = np.full((len(names), 4 + width), -2, dtype=np.int64)
    for own, part in zip(ids, parts, strict=True):
        aliases = np.where(part.aliases >= 0, own[part.aliases] if len(own) else -1, -1)
        said = np.column_stack(
            [part.dtypes, part.flags, part.ndims, aliases, widen(part.shapes, width, 1)]
        )
        known = told[own, 0] != -2
        # How a tensor was made may differ (flags); what it is may not.
        differs = (told[own] != said)[:, [0, 2, *range(4, 4 + width)]].any(axis=1) & known
        if differs.any():
            name = names[int(own[np.flatnonzero(differs)[0]])]
            raise CorruptCheckpointError(
                f"the ranks that saved {where} without collectives disagree about the shape or "
                f"dtype of {name!r}"
            )
        told[own[~known]] = said[~known]
    dtypes, flags, ndims, aliases = (told[:, column] for column in range(4))
    return dtypes, flags, ndims, aliases, told[:, 4:]

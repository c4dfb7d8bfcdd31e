"""Random layouts of tensors over meshes, and what each rank holds under them.

What a rank holds is found by cutting real data with `torch.chunk`, as DTensor does, and
not with the arithmetic of `reshard.tensors.regions`, so the two can be held against each
other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from reshard.tensors.regions import Cut

Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """One mesh dimension shards the tensor dimension `dim`; strided if the factor is above 1."""

    dim: int
    split_factor: int = 1


@dataclass(frozen=True)
class Layout:
    """A mesh and, for each of its dimensions, a split or None for replication."""

    mesh: tuple[int, ...]
    splits: tuple[Split | None, ...]

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh)

    def cuts(self, rank: int) -> tuple[Cut, ...]:
        coordinate = np.unravel_index(rank, self.mesh)
        return tuple(
            Cut(split.dim, parts, int(index), split.split_factor)
            for split, parts, index in zip(self.splits, self.mesh, coordinate, strict=True)
            if split is not None
        )

    def local_part(self, whole: Array, rank: int) -> Array:
        """What `rank` holds of `whole`: cut by one mesh dimension after the other."""
        local = torch.from_numpy(whole)
        for cut in self.cuts(rank):
            pieces = _chunks(local, cut.split_factor, cut.dim)
            mine = [_chunks(piece, cut.parts, cut.dim)[cut.index] for piece in pieces]
            local = torch.cat(mine, dim=cut.dim)
        return local.numpy().copy()


def _chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """`torch.chunk`, with empty chunks at the end where it gives too few."""
    chunks = list(torch.chunk(tensor, count, dim))
    return chunks + [tensor.narrow(dim, 0, 0)] * (count - len(chunks))


MOST_ELEMENTS = 1500


def shapes(min_dims: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to 5 dimensions; extents of 0 and 1 are as likely as larger ones."""
    extents = st.one_of(st.just(1), st.integers(0, 9), st.integers(2, 16))
    return (
        st.lists(extents, min_size=min_dims, max_size=5)
        .map(tuple)
        .filter(lambda shape: math.prod(shape) <= MOST_ELEMENTS)
    )


def meshes(most_ranks: int = 12) -> st.SearchStrategy[tuple[int, ...]]:
    """Meshes of one to three dimensions."""
    return (
        st.lists(st.integers(1, 5), min_size=1, max_size=3)
        .map(tuple)
        .filter(lambda mesh: math.prod(mesh) <= most_ranks)
    )


@st.composite
def layouts(
    draw: st.DrawFn, shape: tuple[int, ...], mesh: tuple[int, ...], strided: bool = True
) -> Layout:
    """A layout of a tensor of `shape`; several mesh dimensions may split the same dimension."""
    if not shape:
        return Layout(mesh, (None,) * len(mesh))
    factors = st.sampled_from([1, 1, 2, 3, 4]) if strided else st.just(1)
    splits = st.builds(Split, st.integers(0, len(shape) - 1), factors)
    return Layout(mesh, tuple(draw(st.one_of(st.none(), splits, splits)) for _ in mesh))

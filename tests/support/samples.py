"""Tensors with awkward shapes, dtypes and bits, and what each rank holds of them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from support.layouts import Layout, Split

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((8, 16), torch.float32),
    "uneven": ((7, 5), torch.float64),
    "fewer_rows_than_ranks": ((2, 3), torch.bfloat16),
    "three_dims": ((5, 6, 3), torch.int64),
    "half": ((9, 4), torch.float16),
    "flags": ((6, 6), torch.bool),
    "complex": ((4, 7), torch.complex64),
    "float8": ((6, 8), torch.float8_e4m3fn),
    "vector": ((11,), torch.int8),
    "one": ((1,), torch.float32),
    "scalar": ((), torch.float32),
    "no_rows": ((0, 4), torch.float32),
    "large": ((300, 257), torch.float32),
}


@functools.cache
def sample(name: str, seed: int = 0) -> torch.Tensor:
    """The tensor of a name: random bits, so that NaNs with payloads are among them."""
    shape, dtype = SHAPES[name]
    generator = torch.Generator().manual_seed(1000 * seed + sorted(SHAPES).index(name))
    nbytes = math.prod(shape) * dtype.itemsize
    noise = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        noise %= 2
    return noise.view(dtype).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit."""
    return a.shape == b.shape and a.dtype is b.dtype and raw(a) == raw(b)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@functools.cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


@dataclass(frozen=True)
class Spread:
    """How tensors lie on a mesh: which tensor dimension each mesh dimension splits.

    A dimension that a tensor does not have is not split.
    """

    mesh: tuple[int, ...]
    splits: tuple[Split | None, ...]

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh)

    def state_dict(self, seed: int | None) -> dict[str, torch.Tensor]:
        """The samples as this rank holds them; without a seed, memory yet to be filled."""
        mesh = _mesh(self.mesh)
        rank = mesh.get_rank()
        state_dict = {}
        for name in SHAPES:
            whole = sample(name, seed or 0)
            local = self.local_part(whole, rank)
            if seed is None:
                local = torch.zeros_like(local)
            placements = [self._placement(split, whole.dim()) for split in self.splits]
            state_dict[name] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
        return state_dict

    @functools.cache  # noqa: B019 - lives as long as a rank does
    def local_part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What `rank` holds, cut out without the help of DTensor or Reshard."""
        splits = tuple(s if s is not None and s.dim < whole.dim() else None for s in self.splits)
        positions = torch.arange(whole.numel()).view(whole.shape).numpy()
        mine = torch.from_numpy(Layout(self.mesh, splits).local_part(positions, rank))
        # As bytes: not every torch can index every dtype.
        elements = whole.reshape(-1, 1).view(torch.uint8)
        return elements[mine.reshape(-1)].view(whole.dtype).view(mine.shape)

    @staticmethod
    def _placement(split: Split | None, dims: int) -> Placement:
        if split is None or split.dim >= dims:
            return Replicate()
        if split.split_factor > 1:
            return _StridedShard(split.dim, split_factor=split.split_factor)
        return Shard(split.dim)


ROWS, COLUMNS = Split(0), Split(1)

SPREADS: dict[int, dict[str, Spread]] = {
    **{
        ranks: {
            "replicated": Spread((ranks,), (None,)),
            "rows": Spread((ranks,), (ROWS,)),
            "columns": Spread((ranks,), (COLUMNS,)),
        }
        for ranks in (2, 3)
    },
    4: {
        "replicated": Spread((4,), (None,)),
        "rows": Spread((4,), (ROWS,)),
        "columns": Spread((4,), (COLUMNS,)),
        "rows, then columns": Spread((2, 2), (ROWS, COLUMNS)),
        "columns, then rows": Spread((2, 2), (COLUMNS, ROWS)),
        "rows, then rows": Spread((2, 2), (ROWS, ROWS)),
        "replicas of rows": Spread((2, 2), (None, ROWS)),
        "rows of replicas": Spread((2, 2), (ROWS, None)),
        "strided rows, then rows": Spread((2, 2), (Split(0, 2), ROWS)),
        "strided columns, then columns": Spread((2, 2), (Split(1, 2), COLUMNS)),
    },
}

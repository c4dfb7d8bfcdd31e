"""Writes the golden checkpoints of format version 1: `python tests/golden/make_v1.py`.

They were written once and stay as they are: a later release has to read them. Run this
into another directory (`make_v1.py PATH`) to compare. Ranks are simulated in one process.

- `v1`: four ranks on a 2 x 2 mesh, saved with collectives.
- `v1-parts`: two ranks, saved without; one value in it is a pickle.
- `v1-references`: `step` refers to `base`, both of two ranks; `tuned` to the file in `model`, which
  no save made; `tuned-parts` to both, saved without collectives.
- `v1-codecs`: two ranks, compressed.
- `v1-fingerprints`: four ranks, with fingerprints.
"""

from __future__ import annotations

import datetime
import decimal
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate, Shard

SAVE_ID = "01234567-89ab-4cde-8f01-23456789abcd"
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import reshard  # noqa: E402
from reshard.rank_values import name_rank_values  # noqa: E402
from support.fake_ranks import as_rank, distributed, mesh_of  # noqa: E402

DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    *("complex32", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    "bool",
)


def of_dtype(name: str) -> torch.Tensor:
    """Six elements of a dtype, each with a different pattern of bits."""
    dtype = getattr(torch, name)
    if dtype is torch.bool:
        return torch.tensor([True, False, True, True, False, False]).reshape(2, 3)
    count = 6 * dtype.itemsize
    pattern = (torch.arange(count, dtype=torch.int64) * 37 + 11) % 251 % 120
    return pattern.to(torch.uint8).view(dtype).reshape(2, 3)


def values() -> dict[str, Any]:
    """One of each type that the tagged encoding has."""
    return {
        "none": None,
        "true": True,
        "false": False,
        "int": -42,
        "largest": 2**64 - 1,
        "smallest": -(2**63),
        "big": 2**100,
        "float": 0.1,
        "infinity": float("inf"),
        "text": "zażółć ☃ 🜁",
        "bytes": b"\x00\xff",
        "list": [1, "two", [3.0]],
        "tuple": (1, (2, "x")),
        "dict_of_any_keys": ({1: "a", (2, 3): None, None: 4},),
        "set": {1, 2, 3},
        "frozenset": frozenset({"a", "b"}),
        "complex": 1 - 2j,
        "bytearray": bytearray(b"xyz"),
        "ordered": (OrderedDict([("z", 1), ("a", 2)]),),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "big_endian": np.array([1, 2], dtype=">i4"),
        "texts": np.array(["ä", "bc"]),
        "numpy_scalar": np.int16(-7),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 3),
        "datetime": datetime.datetime(2024, 2, 29, 12, 30, 15, 7, tzinfo=datetime.timezone.utc),
        "date": datetime.date(2024, 2, 29),
        "time": datetime.time(23, 59, 58),
        "timedelta": datetime.timedelta(days=-1, seconds=3, microseconds=5),
        "tensor_in_a_set": {torch.tensor([1.5, 2.5])},
    }


def full_tensors() -> dict[str, torch.Tensor]:
    """What the sharded tensors hold, whole."""
    return {
        "both": torch.arange(35, dtype=torch.float32).reshape(5, 7),
        "rows": torch.arange(18, dtype=torch.bfloat16).reshape(6, 3),
        "columns": torch.arange(10, dtype=torch.int32).reshape(2, 5),
        "uneven": torch.arange(5, dtype=torch.float64),
        "whole": torch.arange(4, dtype=torch.float16),
    }


PLACEMENTS = {
    "both": (Shard(0), Shard(1)),
    "rows": (Shard(0), Shard(0)),
    "columns": (Replicate(), Shard(1)),
    "uneven": (Shard(0), Shard(0)),
    "whole": (Replicate(), Replicate()),
}


def plain_state() -> dict[str, Any]:
    """Everything in `v1` that is not sharded; the same on all ranks."""
    tied = torch.arange(3, dtype=torch.float32)
    return {
        "dtypes": {name: of_dtype(name) for name in DTYPES},
        "shapes": {
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 3),
            "empty_in_the_middle": torch.zeros(2, 0, 3, dtype=torch.int8),
            "five": torch.arange(2 * 1 * 3 * 1 * 2, dtype=torch.uint8).reshape(2, 1, 3, 1, 2),
            "transposed": torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        },
        "tied": {"one": tied, "other": tied},
        "optim": {
            "state": {0: {"step": torch.tensor(3)}, 1: {"step": torch.tensor(4)}},
            "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}, {"lr": 0.2}],
            "moments": (torch.tensor([1.0]), [torch.tensor([2.0]), "in a list"]),
        },
        "模型": {"слой.é/☃": torch.tensor([7, 8]), "": "an empty name"},
        "[0:1]": torch.tensor([1]),
        "values": values(),
    }


def sharded_state(rank: int) -> dict[str, Any]:
    mesh = mesh_of(2, 2)
    sharded = {
        name: distributed(full, mesh, PLACEMENTS[name]) for name, full in full_tensors().items()
    }
    return {"sharded": sharded, **plain_state()}


def parts_state(rank: int) -> dict[str, Any]:
    mesh = mesh_of(2)
    full = full_tensors()
    tied = distributed(full["uneven"], mesh, [Shard(0)])
    return {
        "columns": distributed(full["both"], mesh, [Shard(1)]),
        "tied": {"one": tied, "other": tied},
        "replicated": full["whole"],
        "step": 7,
        "pickled": decimal.Decimal("1.5"),
        "of": reshard.per_rank(f"rank {rank}"),
    }


def layered_state(step: int, mesh: Any = None) -> dict[str, Any]:
    """Weights that never change, an adapter that does."""
    frozen = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    tied = torch.arange(10, dtype=torch.int16)
    adapter = torch.full((4, 2), float(step))
    if mesh is not None:
        frozen = distributed(frozen, mesh, [Shard(0)])
        adapter = distributed(adapter, mesh, [Shard(0)])
    model = {"frozen": frozen, "tied": tied, "also": tied, "adapter": adapter}
    return {"model": model, "step": step}


def compressible_state(mesh: Any = None) -> dict[str, Any]:
    """Tensors of one, two and eight bytes an element, of several frames; and some too small."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 1 << 15, (1000, 1100), generator=generator, dtype=torch.int16)
    state = {
        "wide": (noise & 3).to(torch.int64)[:200],
        "weights": (noise & 15 | 16000)[:400].contiguous().view(torch.bfloat16),
        "bytes": (noise & 1).to(torch.uint8),
        "noise": noise[:40].contiguous(),
        "small": torch.arange(5),
    }
    if mesh is not None:
        state["weights"] = distributed(state["weights"], mesh, [Shard(1)])
    return {**state, "value": "as it is"}


def fingerprinted_tensors() -> dict[str, torch.Tensor]:
    """Shapes for which rows, words and blocks differ."""
    generator = torch.Generator().manual_seed(1)

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)

    return {
        "matrix": bits(6, 4 * 150).view(torch.float32),
        "narrow": bits(30, 3 * 2).view(torch.bfloat16),
        "long": bits(9000 * 2).view(torch.int16),
        "odd": bits(7, 5, 13),
        "scalar": bits(8).view(torch.int64).reshape(()),
        "cube": bits(4, 6, 8 * 8).view(torch.complex64),
    }


def fingerprinted_state(rank: int) -> dict[str, Any]:
    mesh = mesh_of(2, 2)
    placements = {"matrix": (Shard(0), Shard(1)), "long": (Shard(0), Shard(0)),
                  "cube": (Shard(2), Shard(0)), "narrow": (Shard(1), Replicate())}  # fmt: skip
    return {
        name: distributed(full, mesh, placements[name]) if name in placements else full
        for name, full in fingerprinted_tensors().items()
    }


def save_on_ranks(
    path: Path,
    world_size: int,
    build: Callable[[int], dict[str, Any]],
    use_collectives: bool,
    save_id: str = SAVE_ID,
    **settings: Any,
) -> None:
    """A save of several ranks, one after the other, in the order of a real one."""
    planners = [reshard.DefaultSavePlanner() for _ in range(world_size)]
    writers = [reshard.FileSystemWriter(path, thread_count=1) for _ in range(world_size)]
    writers[0].save_id = save_id
    for writer in writers:
        vars(writer).update(settings)
    plans = []
    for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
        with as_rank(rank, world_size):
            state = name_rank_values(build(rank), rank, world_size)
            planner.set_up_planner(state, writer.storage_meta(), rank == 0)
            writer.set_up_storage_writer(
                rank == 0, rank=rank, world_size=world_size, use_collectives=use_collectives
            )
            if not use_collectives:
                writer.join_save(writers[0].begin_save(), rank)
            plan = writer.prepare_local_plan(planner.create_local_plan())
            if not use_collectives:
                answers, metadata = planner.create_global_plan([plan])
                _write(planner, writer, writer.prepare_global_plan(answers)[0], metadata)
            plans.append(plan)
    if not use_collectives:
        writers[0].finish_parts()
        return
    answers, metadata = planners[0].create_global_plan(plans)
    answers = writers[0].prepare_global_plan(answers)
    results = []
    for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
        with as_rank(rank, world_size):
            results.append(writer.write_data(planner.finish_plan(answers[rank]), planner).wait())
    writers[0].finish(metadata, results)


def _write(planner: Any, writer: Any, plan: Any, metadata: Any) -> None:
    result = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [result])


def make(directory: Path) -> None:
    save_on_ranks(directory / "v1", 4, sharded_state, use_collectives=True)
    save_on_ranks(directory / "v1-parts", 2, parts_state, use_collectives=False)
    make_references(directory / "v1-references")
    save_on_ranks(
        directory / "v1-codecs", 2, lambda rank: compressible_state(mesh_of(2)), True,
        compress="zstd",
    )  # fmt: skip
    save_on_ranks(directory / "v1-fingerprints", 4, fingerprinted_state, True, fingerprint=True)


def make_references(directory: Path) -> None:
    def build(step: int) -> Callable[[int], dict[str, Any]]:
        return lambda rank: layered_state(step, mesh_of(2))

    save_on_ranks(directory / "base", 2, build(1), True)
    other = "11234567-89ab-4cde-8f01-23456789abcd"
    save_on_ranks(directory / "step", 2, build(2), True, other, base=directory / "base")
    model = layered_state(1)["model"]
    (directory / "model").mkdir()
    save_file({"frozen": model["frozen"]}, directory / "model" / "model.safetensors")
    tuned, parts = (number + SAVE_ID[1:] for number in "23")
    save_on_ranks(directory / "tuned", 2, build(3), True, tuned, base=directory / "model")
    save_on_ranks(directory / "tuned-parts", 2, build(4), False, parts, base=directory / "tuned")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)

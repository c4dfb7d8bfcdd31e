"""How long it takes until a checkpoint can be used: mapped, beside other ways to read the same.

One process, files in the page cache, best of several, the ways in turns. Reading the manifest is
counted apart: the bar is for what comes after it. Memory is what a process has more of afterwards,
at most; what was freed before may be used again, so the figure of a way that copies may be low.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import options, record
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import reshard
from reshard.filesystem import FileSystemReader

ROUNDS = 7
BAR_SECONDS = 0.05
BLOCK = ("q", "k", "v", "o", "up", "down", "norm")


def make_state(megabytes: int, tensors: int) -> dict[str, torch.Tensor]:
    """bf16 weights of a transformer: mostly matrices, one vector in seven."""
    blocks = tensors // len(BLOCK)
    elements = megabytes * 500_000 // (blocks * (len(BLOCK) - 1))
    columns = max(8, int(elements**0.5) // 8 * 8)
    matrix = torch.randn(max(1, elements // columns), columns).to(torch.bfloat16)
    return {
        f"layers.{block}.{name}.weight": matrix[0].clone() if name == "norm" else matrix.clone()
        for block in range(blocks)
        for name in BLOCK
    }


def module_like(state: dict[str, torch.Tensor]) -> nn.Module:
    """A module on the meta device with the same parameters."""
    root = nn.Module()
    for path, tensor in state.items():
        *above, last = path.split(".")
        owner = root
        for name in above:
            if not hasattr(owner, name):
                owner.add_module(name, nn.Module())
            owner = getattr(owner, name)
        owner.register_parameter(last, nn.Parameter(torch.empty_like(tensor, device="meta")))
    return root


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def get_all(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def measure(megabytes: int, tensors: int, box: Path) -> dict[str, Any]:
    state = make_state(megabytes, tensors)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    checkpoint, plain, pickled = box / "reshard", box / "plain.safetensors", box / "plain.pt"
    reshard.save({"model": state}, checkpoint_id=checkpoint)
    save_file(state, plain)
    torch.save(state, pickled)
    templates = [module_like(state) for _ in range(2 * ROUNDS)]
    blanks = templates[0].state_dict()
    del state
    views = reshard.read_state_dict(checkpoint, mmap=True)["model"]

    def fill_dict() -> dict[str, Any]:
        target = {"model": dict(blanks)}
        reshard.load(target, checkpoint_id=checkpoint, assign=True)
        return target

    def assign() -> nn.Module:
        model = templates.pop()
        reshard.load({"model": model}, checkpoint_id=checkpoint, assign=True)
        return model

    ways: dict[str, Callable[[], Any]] = {
        "manifest alone": FileSystemReader(checkpoint).read_metadata,
        "read_state_dict(mmap=True)": lambda: reshard.read_state_dict(checkpoint, mmap=True),
        "load(meta tensors, assign=True)": fill_dict,
        "load(meta model, assign=True)": assign,
        "torch's load_state_dict of that": lambda: templates.pop().load_state_dict(
            views, assign=True
        ),
        "safetensors load_file": lambda: load_file(plain),
        "safetensors safe_open": lambda: get_all(plain),
        "torch.load(mmap=True)": lambda: torch.load(pickled, mmap=True),
        "read_state_dict()": lambda: reshard.read_state_dict(checkpoint, verify="off"),
    }
    best = dict.fromkeys(ways, float("inf"))
    grown = dict.fromkeys(ways, 0)
    for _ in range(ROUNDS):
        for name, work in ways.items():
            gc.collect()
            before, begin = resident_bytes(), time.perf_counter()
            result = work()
            best[name] = min(best[name], time.perf_counter() - begin)
            grown[name] = max(grown[name], resident_bytes() - before)
            del result
    return {"bytes": nbytes, "tensors": tensors, "seconds": best, "resident_bytes": grown}


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['bytes'] / 1e9:.1f} GB in {found['tensors']} tensors")
    manifest = found["seconds"]["manifest alone"]
    for name, seconds in found["seconds"].items():
        ours = name.startswith(("read_state_dict(mmap", "load("))
        beyond = f"{1e3 * (seconds - manifest):8.1f} ms beyond the manifest" if ours else ""
        memory = found["resident_bytes"][name] / 1e6
        print(f"  {name:30} {1e3 * seconds:9.1f} ms {memory:8.0f} MB {beyond}")
    mapped = found["seconds"]["read_state_dict(mmap=True)"] - manifest
    verdict = "holds" if mapped < BAR_SECONDS else "MISSED"
    print(f"  usable in under {1e3 * BAR_SECONDS:.0f} ms beyond the manifest: {verdict}")


def main() -> None:
    arguments = options(__doc__, ["300", "3000"])
    results = {}
    for tensors in arguments.jobs:
        box = Path(tempfile.mkdtemp(prefix="reshard-mapped-"))
        try:
            results[tensors] = measure(arguments.megabytes, int(tensors), box)
        finally:
            shutil.rmtree(box)
        show(results[tensors])
    record("mapped_reading", results)


if __name__ == "__main__":
    main()

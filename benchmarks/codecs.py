"""What `compress="zstd"` saves and costs, on the state of a GPT that is trained for it.

`make bench-codecs` prints tables and writes docs/benchmarks/codecs.json. A small GPT learns the
sources of torch for a minute; random numbers of the same scale stand beside it. The codec is
measured in one thread, in CPU time, on frames that come from memory; saves go to a disk and to a
store that takes 200 MB a second. Raw and compressed take turns, and the best of several rounds
counts.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import record
from rich.console import Console
from rich.table import Table
from torch import nn

import reshard
from reshard.format import codec
from reshard.stores.local import LocalStore

LAYERS, WIDTH, HEADS, CONTEXT = 6, 256, 4, 64
ROUNDS = 12
STORE_BYTES_PER_SECOND = 200e6
BARS = {
    "bf16 weights": (0.68, 0.8, 1.5),
    "AdamW state": (0.84, 0.8, 1.5),
}
"""Most of the bytes left, and least GB/s in and out a core."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.attend(self.norms[0](x)).chunk(3, -1)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def train(seconds: float) -> tuple[dict[str, list[torch.Tensor]], dict[str, Any]]:
    """Weights and optimizer states after some time, and how far it came."""
    torch.manual_seed(0)
    sources = sorted(Path(nn.__file__).parent.rglob("*.py"))
    text = torch.frombuffer(
        bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8
    )
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    begin, steps, loss = time.monotonic(), 0, torch.zeros(())
    while time.monotonic() - begin < seconds:
        starts = torch.randint(len(text) - CONTEXT - 1, (16,)).tolist()
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
        logits = model(batch[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    weights = [parameter.detach() for parameter in model.parameters()]
    states = list(optimizer.state.values())
    trained = {
        "fp32 weights": weights,
        "exp_avg": [state["exp_avg"] for state in states],
        "exp_avg_sq": [state["exp_avg_sq"] for state in states],
        "bf16 weights": [weight.bfloat16() for weight in weights],
    }
    trained["AdamW state"] = [*weights, *trained["exp_avg"], *trained["exp_avg_sq"]]
    parameters = sum(weight.numel() for weight in weights)
    return trained, {"parameters": parameters, "steps": steps, "loss": loss.item()}


def normal(dtype: torch.dtype) -> list[torch.Tensor]:
    return [(torch.randn(4 << 20) * 0.02).to(dtype)]


def measure_codec(tensors: Sequence[torch.Tensor]) -> dict[str, float]:
    """The part of the bytes that is left, and GB in a second of CPU time of one thread."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    content = memoryview(flat.view(torch.uint8).numpy())
    best_in = best_out = float("inf")
    for _ in range(ROUNDS):
        index = codec.make_index(codec.plane_width(flat.itemsize, len(content)), len(content))
        out, stored_bytes, seconds_in, seconds_out = bytearray(codec.FRAME_BYTES), 0, 0.0, 0.0
        for number in range(len(index.rows)):
            begin, end = index.content_range(number)
            start = time.thread_time()
            frame = codec.encode_frame(content[begin:end], index.width)
            seconds_in += time.thread_time() - start
            index.rows[number] = frame.row()
            stored = memoryview(b"".join(frame.parts))
            stored_bytes += len(stored)
            decoded = memoryview(out)[: end - begin]
            start = time.thread_time()
            codec.decode_frame(stored, index, number, decoded, "here")
            seconds_out += time.thread_time() - start
            if decoded != content[begin:end]:
                raise AssertionError("decoded to other bytes")
        best_in, best_out = min(best_in, seconds_in), min(best_out, seconds_out)
    return {
        "left": (stored_bytes + len(index.encode())) / len(content),
        "in": len(content) / best_in / 1e9,
        "out": len(content) / best_out / 1e9,
    }


def measure_copy() -> float:
    """GB a second of CPU time to copy frames: how fast this machine is, while others use it."""
    source, target = (
        torch.ones(64 << 20, dtype=torch.uint8),
        torch.zeros(1 << 20, dtype=torch.uint8),
    )
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.thread_time()
        for frame in source.split(1 << 20):
            target.copy_(frame)
        best = min(best, time.thread_time() - start)
    return source.nbytes / best / 1e9


class SlowStore(LocalStore):
    """A directory that takes a limited number of bytes a second, however many threads write."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._free_at = time.monotonic()
        self._pace = threading.Lock()

    def open_writer(self, key: str, nbytes: int | None) -> Any:
        writer = super().open_writer(key, nbytes)
        write = writer.write

        def slow_write(offset: int, buffers: Sequence[memoryview]) -> None:
            size = sum(map(len, buffers))
            with self._pace:
                now = time.monotonic()
                self._free_at = max(self._free_at, now) + size / STORE_BYTES_PER_SECOND
                pause = self._free_at - now
            write(offset, buffers)
            time.sleep(pause)

        writer.write = slow_write  # type: ignore[method-assign]
        return writer


class SlowWriter(reshard.FileSystemWriter):
    def open_store(self) -> LocalStore:
        return SlowStore(self.path)


def large_state(tensors: Sequence[torch.Tensor], megabytes: int) -> dict[str, torch.Tensor]:
    """Trained tensors, one copy after the other, until there are `megabytes`."""
    state: dict[str, torch.Tensor] = {}
    nbytes = 0
    while nbytes < megabytes * 1e6:
        for tensor in tensors:
            state[f"t{len(state)}"] = tensor.clone()
            nbytes += tensor.nbytes
    return state


def measure_end_to_end(state: dict[str, torch.Tensor], box: Path) -> dict[str, dict[str, float]]:
    """Seconds of saves and loads, raw and compressed."""
    nbytes = sum(tensor.nbytes for tensor in state.values())
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    jobs: dict[str, Callable[[Path, Any], object]] = {
        "save to disk": lambda folder, how: reshard.save(
            state, checkpoint_id=folder, no_dist=True, compress=how
        ),
        "load, cached": lambda folder, how: reshard.load(
            target, checkpoint_id=folder, no_dist=True
        ),
        "save at 0.2 GB/s": lambda folder, how: reshard.save(
            state, storage_writer=SlowWriter(folder), no_dist=True, compress=how
        ),
    }
    seconds: dict[str, dict[str, float]] = {job: {} for job in jobs}
    for _ in range(3):
        for job, work in jobs.items():
            for name, how in (("raw", None), ("zstd", "zstd")):
                folder = box / name
                if "save" in job:
                    shutil.rmtree(folder, ignore_errors=True)
                begin = time.perf_counter()
                work(folder, how)
                took = time.perf_counter() - begin
                seconds[job][name] = min(took, seconds[job].get(name, took))
    for found in seconds.values():
        found["raw over zstd"] = found["raw"] / found["zstd"]
    sizes = {
        name: sum(path.stat().st_size for path in (box / name).iterdir()) / nbytes
        for name in ("raw", "zstd")
    }
    return {
        "bytes, of the state": sizes | {"raw over zstd": sizes["raw"] / sizes["zstd"]}
    } | seconds


def rows_of(found: dict[str, dict[str, float]]) -> Iterator[list[str]]:
    for name, numbers in found.items():
        yield [name, *(f"{number:.3f}" for number in numbers.values())]


def show(title: str, columns: Sequence[str], found: dict[str, dict[str, float]]) -> None:
    table = Table("", *columns, title=title)
    for row in rows_of(found):
        table.add_row(*row)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    parser.add_argument("--megabytes", type=int, default=600, help="of state to save and load")
    chosen = parser.parse_args()
    trained, about = train(chosen.seconds)
    print(f"trained: {about}")
    torch.set_num_threads(1)
    samples = trained | {
        "bf16 random normal": normal(torch.bfloat16),
        "fp32 random normal": normal(torch.float32),
    }
    codecs = {name: measure_codec(tensors) for name, tensors in samples.items()}
    about["copy"] = measure_copy()
    show("one thread", ["left", "GB/s in", "GB/s out"], codecs)
    print(f"a copy of memory: {about['copy']:.1f} GB/s")
    for name, (most_left, least_in, least_out) in BARS.items():
        found = codecs[name]
        meets = found["left"] <= most_left and found["in"] >= least_in and found["out"] >= least_out
        print(f"{name}: bars {'met' if meets else 'MISSED'} ({most_left}, {least_in}, {least_out})")
    saves: dict[str, dict[str, dict[str, float]]] = {}
    for name in ("AdamW state", "bf16 weights"):
        box = Path(tempfile.mkdtemp(prefix="reshard-codecs-"))
        try:
            state = large_state(trained[name], chosen.megabytes)
            saves[name] = measure_end_to_end(state, box)
        finally:
            shutil.rmtree(box)
        show(f"{name}, {chosen.megabytes} MB, seconds", ["raw", "zstd", "ratio"], saves[name])
    record("codecs", {"trained": about, "codec": codecs, "saves": saves})


if __name__ == "__main__":
    main()

"""Which files a process has mapped, and how much of its memory is its own."""

from __future__ import annotations

from pathlib import Path

import torch


def mapped_files(folder: Path) -> list[str]:
    """The shard files of a folder that this process has mapped: once for each map."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [line.split(maxsplit=5)[-1] for line in lines if line.count(" ") >= 5]
    names = (path.removesuffix(" (deleted)") for path in paths if path.startswith(str(folder)))
    return sorted(Path(name).name for name in names if name.endswith(".safetensors"))


def is_mapped(tensor: torch.Tensor, folder: Path) -> bool:
    """Whether the memory of a tensor belongs to a file below a folder."""
    place = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if begin <= place < end:
            return str(folder) in line
    return False


def memory_of(pid: int | str = "self") -> dict[str, int]:
    """What `smaps_rollup` says about a process, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}

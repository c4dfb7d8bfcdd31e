"""Checkpoints of torch.distributed.checkpoint taken apart, changed, and put together again."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

METADATA = ".metadata"
DATA = "__0_0.distcp"


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.arange(4)},
        "step": 7,
        "note": "a value",
    }


def blank() -> dict[str, Any]:
    return {
        "model": {"weight": torch.zeros(3, 4), "bias": torch.zeros(4, dtype=torch.int64)},
        "step": 0,
        "note": "",
    }


def save(directory: Path) -> Path:
    dcp.save(state(), checkpoint_id=directory, no_dist=True)
    return directory


def edit_metadata(directory: Path, edit: Callable[[Any], Any], protocol: int = 4) -> None:
    """Change the metadata as an object; `edit` may return another in its place."""
    path = directory / METADATA
    metadata = pickle.loads(path.read_bytes())
    changed = edit(metadata)
    path.write_bytes(pickle.dumps(metadata if changed is None else changed, protocol))


def edit_text(directory: Path, *changes: tuple[bytes, bytes]) -> None:
    """Change names in the metadata, which has to be of protocol 2: they are plain text there."""
    path = directory / METADATA
    data = path.read_bytes()
    for before, after in changes:
        assert before in data
        data = data.replace(before, after)
    path.write_bytes(data)


def replace_record(directory: Path, name: str, record: bytes) -> None:
    """Put other bytes in the place of what is stored for a name."""
    path = directory / DATA

    def point_to(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                info.offset, info.length = path.stat().st_size, len(record)

    edit_metadata(directory, point_to)
    with path.open("ab") as file:
        file.write(record)


def record_of(directory: Path, name: str) -> bytes:
    metadata = pickle.loads((directory / METADATA).read_bytes())
    info = next(i for index, i in metadata.storage_data.items() if index.fqn == name)
    return (directory / DATA).read_bytes()[info.offset : info.offset + info.length]


def torch_file(thing: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def with_member(record: bytes, name: str, data: bytes) -> bytes:
    """An archive with another content of a member."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(record)) as old,
        zipfile.ZipFile(buffer, "w") as new,
    ):
        for info in old.infolist():
            is_it = info.filename.endswith(f"/{name}")
            new.writestr(info.filename, data if is_it else old.read(info))
    return buffer.getvalue()

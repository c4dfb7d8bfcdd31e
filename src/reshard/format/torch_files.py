"""Stored values of any planner: our own encoding, or torch.save files."""

from __future__ import annotations

import io
import pickletools
import zipfile
from typing import Any

import torch

from reshard.api import CorruptCheckpointError, UnsafeValueError
from reshard.format.values import MAGIC, decode_value


def decode_stored(fqn: str, data: bytes, allow_pickle: bool) -> Any:
    """A value in our own encoding, or in a torch.save file as planners written for DCP store."""
    if data[: len(MAGIC)] == MAGIC:
        return decode_value(data, fqn, allow_pickle)
    if not allow_pickle:
        _check_torch_file(fqn, data)
    try:
        return torch.load(io.BytesIO(data), weights_only=not allow_pickle)
    except Exception as error:
        raise UnsafeValueError(
            f"{fqn!r} is stored as a pickled object that could run code when it is read. Pass "
            "allow_pickle=True to load it, if you trust where the checkpoint comes from"
        ) from error


def _check_torch_file(fqn: str, data: bytes) -> None:
    """Refuse what would not be a torch.save file, or would unpack to more than it is."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
            names = [] if unpacked > len(data) else archive.namelist()
            pickles = [archive.read(name) for name in names if name.endswith(".pkl")]
            asks_for_memory = any(_asks_for_memory(each, len(data)) for each in pickles)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError) as error:
        raise UnsafeValueError(
            f"{fqn!r} is stored in a way that only pickle could read. Pass allow_pickle=True to "
            "load it, if you trust where the checkpoint comes from"
        ) from error
    if unpacked > len(data):
        raise CorruptCheckpointError(f"{fqn!r} claims {unpacked} bytes, but has {len(data)}")
    if asks_for_memory:
        raise CorruptCheckpointError(
            f"{fqn!r} asks for more memory than the {len(data)} bytes of it"
        )


def _asks_for_memory(pickled: bytes, most: int) -> bool:
    """Whether a pickle calls for a bytearray of some length; torch would make any."""
    if b"bytearray" not in pickled:
        return False
    return any(
        isinstance(argument, int) and argument > most
        for _, argument, _ in pickletools.genops(pickled)
    )

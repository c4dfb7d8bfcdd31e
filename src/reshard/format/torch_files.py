"""Stored values of any planner: our own encoding, or torch.save files."""

from __future__ import annotations

import io
import pickletools
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from reshard.api import CorruptCheckpointError, UnsafeValueError, UnsupportedFormatError
from reshard.format.container import BytesSource
from reshard.format.torch_trees import Closed, read_tree, to_objects
from reshard.format.torch_zip import ZIP_MAGIC, Archive, StoredTensor
from reshard.format.values import MAGIC, decode_value, encode_value, is_pickled, pickle_of
from reshard.tensors.storages import check_sparse


def encode_stored(value: Any) -> bytes:
    """The bytes to store for a value.

    Our own encoding holds dense tensors only. Others go through torch.save, whose files torch reads
    without running code; a pickle of them would need that.
    """
    data = encode_value(value)
    if not is_pickled(data):
        return data
    others = [leaf for leaf in _leaves(value) if not _is_unusual(leaf)]
    if any(is_pickled(encode_value(other)) for other in others):
        return data
    saved = io.BytesIO()
    torch.save(value, saved)
    return saved.getvalue()


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (dict, OrderedDict):
        value = list(value.values())
    if type(value) in (list, tuple, set, frozenset):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _is_unusual(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and (
        value.layout is not torch.strided or value.is_quantized or value.is_meta
    )


def decode_stored(fqn: str, data: bytes, allow_pickle: bool) -> Any:
    """A value in our own encoding, or in a torch.save file as planners written for DCP store."""
    if data[: len(MAGIC)] == MAGIC:
        return decode_value(data, fqn, allow_pickle)
    asked = ""
    if not allow_pickle:
        try:
            return _decode_plainly(fqn, data)
        except Closed as closed:
            # Torch may know it, or have been told that it is safe.
            asked = f" (it asks for {closed.name})"
        _check_torch_file(fqn, data)
    try:
        value = torch.load(io.BytesIO(data), weights_only=not allow_pickle)
    except Exception as error:
        raise UnsafeValueError(
            f"{fqn!r} is stored as a pickled object that could run code when it is read{asked}. "
            "Pass allow_pickle=True to load it, if you trust where the checkpoint comes from"
        ) from error
    if not allow_pickle:
        _check_sparse_in(fqn, value)
    return value


def _check_sparse_in(fqn: str, value: Any) -> None:
    for leaf in _leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout in _SPARSE:
            try:
                check_sparse(leaf)
            except RuntimeError as error:
                raise CorruptCheckpointError(
                    f"the stored value of {fqn!r} is a malformed sparse tensor: {str(error)[:200]}"
                ) from error


_SPARSE = {
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
}


def _decode_plainly(fqn: str, data: bytes) -> Any:
    """A value that is made of numbers, texts and containers. Raises `Closed` for others."""
    if data[: len(ZIP_MAGIC)] != ZIP_MAGIC:
        raise Closed("another format")
    where = f"the stored value of {fqn!r}"
    try:
        tree, nbytes = read_tree(Archive(BytesSource(data), 0, len(data), where), where)
    except UnsupportedFormatError as error:
        raise Closed("another format") from error
    return to_objects(tree, where, nbytes, _leave_closed)


def _leave_closed(tensor: StoredTensor) -> NoReturn:
    raise Closed("a tensor")


def to_torch_file(fqn: str, data: bytes, allow_pickle: bool) -> bytes:
    """A stored value as a torch.save file, which DCP and planners written for it expect.

    A pickle is not opened; without `allow_pickle` it is refused.
    """
    if data[: len(MAGIC)] != MAGIC:
        return data
    made = io.BytesIO()
    if not (is_pickled(data) and allow_pickle):
        torch.save(decode_value(data, fqn), made)
        return made.getvalue()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", pickle_of(data, fqn))
        archive.writestr("archive/byteorder", sys.byteorder)
        archive.writestr("archive/version", "3\n")
    return made.getvalue()


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

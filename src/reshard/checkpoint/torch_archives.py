"""What a file of `torch.save` holds, by flat names: tensors described, other values as they are."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from reshard.api import CorruptCheckpointError, UnsafeValueError, UnsupportedFormatError
from reshard.checkpoint.unusual_tensors import Unusual, make_unusual
from reshard.engine.streams import source_stream
from reshard.format.torch_files import encode_stored
from reshard.format.torch_trees import read_tree, to_objects
from reshard.format.torch_zip import (
    ZIP_MAGIC,
    Archive,
    BlankTensor,
    SparseTensor,
    StoredTensor,
    check_tensor,
    describe,
)
from reshard.stores.protocol import Reader
from reshard.tensors.flatten import flatten_state_dict
from reshard.tensors.paths import PathMap, get_element

VALUE = "torch-value"
"""The codec of values that are a part of the pickle of a file."""


class ClosedValue:
    """Something that is not made yet: a sparse tensor, or what only running code could make."""

    def __init__(self, name: str, tree: Any) -> None:
        self.name = name
        self.tensor = tree if isinstance(tree, SparseTensor | BlankTensor) else None


@dataclass(frozen=True)
class FlatArchive:
    """The content of a file, flattened as any state dict is."""

    archive: Archive
    tensors: dict[str, StoredTensor]
    values: dict[str, Any]
    paths: PathMap

    def closed_in(self, name: str) -> str | None:
        """What in a value only running code could make, if anything."""
        return next(_closed(self.values[name]), None)


def read_archive(source: Reader, where: str) -> FlatArchive:
    """Look into a file of torch.save. Nothing in it is run."""
    start = bytearray(min(len(ZIP_MAGIC), source.nbytes))
    source.read_into(0, [memoryview(start)] if start else [])
    archive = Archive(source, 0, source.nbytes, where) if start == ZIP_MAGIC else None
    if archive is None or "data.pkl" not in archive:
        raise UnsupportedFormatError(
            f"{where} is not a file that torch.save wrote since torch 1.6. Read it with "
            "torch.load, and save it again"
        )
    tree, nbytes = read_tree(archive, where)
    if not isinstance(tree, dict):
        raise UnsupportedFormatError(
            f"{where} holds {describe(tree)}, not a state dict. Read it with torch.load"
        )
    described: dict[int, StoredTensor] = {}

    def stand_in(tensor: StoredTensor) -> torch.Tensor:
        check_tensor(tensor, where)
        try:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        except RuntimeError as error:
            raise CorruptCheckpointError(f"{where} has a malformed tensor: {error}") from error
        described[id(made)] = tensor
        return made

    nested = to_objects(tree, where, nbytes, stand_in, ClosedValue)
    try:
        flat, paths = flatten_state_dict(nested)
    except (TypeError, ValueError) as error:
        raise UnsupportedFormatError(
            f"{where} does not hold a state dict: {error}. Read it with torch.load"
        ) from error
    is_tensor = {name: isinstance(value, torch.Tensor) for name, value in flat.items()}
    return FlatArchive(
        archive,
        {name: described[id(value)] for name, value in flat.items() if is_tensor[name]},
        {name: value for name, value in flat.items() if not is_tensor[name]},
        paths,
    )


def _closed(value: Any) -> Iterator[str]:
    if isinstance(value, ClosedValue):
        if value.tensor is None:
            yield value.name
    elif isinstance(value, dict):
        for part in value.values():
            yield from _closed(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _closed(part)


def _opened(value: Any, make: Callable[[Unusual], torch.Tensor]) -> Any:
    """A value with the tensors in place of what stands for them."""
    if isinstance(value, ClosedValue):
        return value if value.tensor is None else make(value.tensor)
    if isinstance(value, dict):
        return type(value)((key, _opened(part, make)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return type(value)([_opened(part, make) for part in value])
    return value


def encode_from(flat: FlatArchive, name: str, source: Reader, allow_pickle: bool) -> bytes:
    """A value of a file as the bytes of a stored one."""
    closed = flat.closed_in(name)
    if closed is None:
        where = f"the stored value of {name!r}"
        value = _opened(flat.values[name], partial(make_unusual, flat.archive, source, where))
        return encode_stored(value)
    if not allow_pickle:
        raise UnsafeValueError(
            f"{name!r} is stored as a pickled object that could run code when it is read (it asks "
            f"for {closed}). Pass allow_pickle=True to load it, if you trust where the file comes "
            "from"
        )
    # The caller trusts the file: a pickle can only be run as a whole.
    loaded = torch.load(source_stream(source), map_location="cpu", weights_only=False)
    saved = io.BytesIO()
    torch.save(get_element(loaded, flat.paths[name]), saved)
    return saved.getvalue()

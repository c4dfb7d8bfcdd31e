"""What a file of `torch.save` holds, by flat names: tensors described, other values as they are."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from reshard.api import CorruptCheckpointError, UnsafeValueError, UnsupportedFormatError
from reshard.checkpoint.value_tensors import Unusual, ValueTensors
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
from reshard.tensors.flatten import Rules, flatten_state_dict
from reshard.tensors.paths import PathMap, get_element

VALUE = "torch-value"
"""The codec of values that are a part of the pickle of a file. `rules_of` says which part."""


def value_codec(rules: Rules) -> str:
    """The codec of values in a file that was flattened by some rules."""
    return f"{VALUE},{rules.value}"


def rules_of(codec: str) -> Rules | None:
    """What `value_codec` made a codec of; None if it is another one."""
    kind, _, rules = codec.partition(",")
    return Rules(rules) if kind == VALUE else None


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
    """With tensors that have no data in place of those that are part of a value."""
    paths: PathMap
    described: dict[int, StoredTensor]
    """What the file says of tensors, by the identity of what stands for them."""

    def closed_in(self, name: str) -> str | None:
        """What in a value only running code could make, if anything."""
        return next(_closed(self.values[name]), None)


def read_archive(source: Reader, where: str, rules: Rules = Rules.CURRENT) -> FlatArchive:
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
        flat, paths = flatten_state_dict(nested, rules)
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
        described,
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


def _opened(
    value: Any, make: Callable[[StoredTensor | Unusual], torch.Tensor], flat: FlatArchive
) -> Any:
    """A value with the tensors in place of what stands for them."""
    if isinstance(value, ClosedValue):
        return value if value.tensor is None else make(value.tensor)
    if isinstance(value, torch.Tensor):
        return make(flat.described[id(value)])
    if isinstance(value, dict):
        return type(value)((key, _opened(part, make, flat)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return type(value)([_opened(part, make, flat) for part in value])
    return value


def encode_from(flat: FlatArchive, name: str, source: Reader, allow_pickle: bool) -> bytes:
    """A value of a file as the bytes of a stored one."""
    closed = flat.closed_in(name)
    if closed is None:
        tensors = ValueTensors(flat.archive, source, f"the stored value of {name!r}")
        return encode_stored(_opened(flat.values[name], tensors.make, flat))
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

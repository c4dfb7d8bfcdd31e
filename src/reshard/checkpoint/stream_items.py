"""Items as records of a stream, as DCP stores them: for storages of users that write such files.

Our own storages write safetensors files, and none of this.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from reshard.planner import ReadItem, WriteItem, WriteItemType
from reshard.storage import StorageInfo, WriteResult
from reshard.tensors.dcp_types import default_extension_registry

DEFAULT_SUFFIX = ".distcp"


class SerializationFormat(Enum):
    """What the tensors in a file of DCP are stored as."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


@dataclass
class _StoragePrefix:
    """What the names of the files of a rank begin with; sent with its plan."""

    prefix: str


class _StorageWriterTransforms:
    """Sends what is written through extensions."""

    def __init__(self, extensions: Sequence[Any] | None = None) -> None:
        self.extensions = () if extensions is None else extensions

    def transform_save_stream(
        self, write_item: WriteItem, raw_stream: Any
    ) -> tuple[Any, list[str]]:
        """A stream to write one item to, and the extensions it goes through, the last one first.

        To close it ends the item, and leaves `raw_stream` open for the next.
        """
        stream: Any = _Unclosed(raw_stream)
        for extension in self.extensions:
            stream = extension.transform_to(stream)
        return stream, [extension.get_descriptor() for extension in reversed(self.extensions)]


class _StorageReaderTransforms:
    """Sends what is read through extensions, by default those that torch knows."""

    def __init__(self, extension_registry: Any = None) -> None:
        self._registry = extension_registry

    @property
    def extension_registry(self) -> Any:
        # Not before it is needed: it takes an import of torch's own package.
        if self._registry is None:
            self._registry = default_extension_registry()
        return self._registry

    def transform_load_stream(
        self, read_item: ReadItem, transform_descriptors: Sequence[str], raw_stream: Any
    ) -> Any:
        """A stream that gives what was stored, as it was before it went through extensions."""
        stream = raw_stream
        if transform_descriptors:
            for extension in self.extension_registry.from_descriptor_list(transform_descriptors):
                if hasattr(extension, "transform_from"):
                    stream = extension.transform_from(stream)
        return stream


class _Unclosed(io.RawIOBase):
    """A stream that others may close without closing the one below."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count = self._raw.write(data)
        return len(data) if count is None else int(count)

    def flush(self) -> None:
        self._raw.flush()


class StreamSlice(io.RawIOBase):
    """A range of a stream that can seek, as a stream to read."""

    def __init__(self, raw: Any, offset: int, length: int) -> None:
        self._raw = raw
        self._offset = offset
        self._length = length
        self._position = 0

    @classmethod
    def buffered(cls, raw: Any, offset: int, length: int) -> io.BufferedReader:
        return io.BufferedReader(cls(raw, offset, length))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}
        self._position = max(0, begins[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._length - self._position))
        self._raw.seek(self._offset + self._position)
        data = self._raw.read(wanted)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _write_item(
    transforms: _StorageWriterTransforms,
    stream: Any,
    data: io.BytesIO | torch.Tensor,
    write_item: WriteItem,
    storage_key: str,
    serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
) -> WriteResult:
    """Append an item to a stream: a value as it is, a tensor as a `torch.save` file.

    In the safetensors format tensors are left to the caller, who writes all of them at once.
    """
    begin = stream.tell()
    target, descriptors = transforms.transform_save_stream(write_item, stream)
    fqn = write_item.index.fqn
    if write_item.type is WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise TypeError(f"{fqn!r} is planned as a value, but is a {type(data).__name__}")
        target.write(data.getbuffer())
    elif not isinstance(data, torch.Tensor) or data.device.type != "cpu":
        raise TypeError(f"{fqn!r} is planned as a tensor: pass a tensor on the CPU to be written")
    elif _is_torch_save(serialization_format):
        torch.save(data, target)
    target.close()
    length = stream.tell() - begin
    if isinstance(data, torch.Tensor) and not _is_torch_save(serialization_format):
        length = data.nbytes
    return WriteResult(
        write_item.index, length, StorageInfo(storage_key, begin, length, descriptors or None)
    )


def _is_torch_save(serialization_format: Any) -> bool:
    # By its value: torch's own enum means the same.
    return bool(serialization_format.value == SerializationFormat.TORCH_SAVE.value)


def _item_size(item: WriteItem) -> int:
    """The bytes of the whole tensor that an item belongs to."""
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn!r} is planned as a value, which has no size yet")
    return math.prod(item.tensor_data.size) * item.tensor_data.properties.dtype.itemsize


def _split_by_size_and_type(bins: int, items: Sequence[WriteItem]) -> list[Sequence[WriteItem]]:
    """Items for each of several writers: values in turn, tensors so that sizes are alike."""
    if bins == 1:
        return [items]
    buckets: list[list[WriteItem]] = [[] for _ in range(bins)]
    values = [item for item in items if item.type is WriteItemType.BYTE_IO]
    tensors = [item for item in items if item.type is not WriteItemType.BYTE_IO]
    for number, item in enumerate(values):
        buckets[number % bins].append(item)
    loads = [0] * bins
    for item in sorted(tensors, key=_item_size, reverse=True):
        lightest = loads.index(min(loads))
        buckets[lightest].append(item)
        loads[lightest] += _item_size(item)
    return [*buckets]


def narrow_tensor_by_index(
    tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """A region of a tensor, as a view. Dimensions that are not smaller are left as they are."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size < tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor

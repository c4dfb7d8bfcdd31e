"""Chunks that are records of `torch.save`, or lie in a safetensors file within a file.

What the manifest says of such a chunk is where its record is. Looking into the record tells
where its elements are; from then on it is a chunk like any other, if they lie there in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from reshard.api import CorruptCheckpointError
from reshard.engine.records import DecodedRecord, read_strided
from reshard.engine.streams import StreamExtension, decode_value
from reshard.format.container import (
    MOST_PLAIN_HEADER_BYTES,
    BytesSource,
    Entry,
    parse_header,
    read_header,
)
from reshard.format.plain_dtypes import PLAIN_DTYPES, torch_shape
from reshard.format.torch_zip import (
    KnownRecords,
    Storage,
    StoredTensor,
    TensorPlace,
    read_tensor_record,
)
from reshard.stores.protocol import CutShortError, Reader

RECORD, SAFETENSORS_RECORD, _STRIDED = "torch", "safetensors", "strided"
"""Codecs of chunks: a record of torch.save, perhaps through extensions; a safetensors blob;
elements in another order."""

_SHARDING_NOTE = "DCP_SHARDING_INFO"
_MOST_OVERHEAD_BYTES = 1 << 20
"""How much longer than its content a record may be that went through extensions."""


class Chunk(NamedTuple):
    """What the manifest says of a chunk."""

    name: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    stored_nbytes: int
    content_nbytes: int
    codec: str


def is_record(codec: str) -> bool:
    return codec.split(",", 1)[0] in (RECORD, SAFETENSORS_RECORD, _STRIDED)


def strided_codec(tensor: StoredTensor, place: TensorPlace) -> str:
    """The codec of a tensor that was looked into already, and is not in order."""
    flags = (tensor.is_conj, tensor.is_neg, place.is_big_endian)
    return ",".join([_STRIDED, *(str(int(flag)) for flag in flags), *map(str, tensor.strides)])


class TorchRecords:
    """The records of the files of a checkpoint, each looked into once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._blobs: dict[tuple[str, int], _Blob] = {}
        self._known = KnownRecords()

    def open(
        self,
        chunk: Chunk,
        path: str,
        source: Reader,
        extensions: Callable[[str], Sequence[StreamExtension]],
    ) -> int | DecodedRecord:
        """Where the elements of a chunk begin, or a reader of them if they are not in order."""
        where = f"the record of {chunk.name!r} at byte {chunk.begin} of {path!r} in {self._where}"
        kind, _, transforms = chunk.codec.partition(",")
        try:
            if kind == SAFETENSORS_RECORD:
                return self._in_blob(chunk, path, source, where)
            if kind == _STRIDED:
                return DecodedRecord(_strided(chunk, source), chunk.content_nbytes, where)
            if transforms:
                decode = _Streamed(chunk, source, extensions(transforms), where)
                return DecodedRecord(decode, chunk.content_nbytes, where)
            tensor, place = read_tensor_record(
                source, chunk.begin, chunk.stored_nbytes, where, self._known
            )
        except CutShortError as error:
            raise CorruptCheckpointError(f"{where} is cut short at byte {error.end}") from error
        _check(chunk, tensor, place, where)
        if place.is_dense:
            return place.begin
        return DecodedRecord(_Strided(source, tensor, place), chunk.content_nbytes, where)

    def _in_blob(self, chunk: Chunk, path: str, source: Reader, where: str) -> int:
        key = path, chunk.begin
        if key not in self._blobs:
            self._blobs[key] = _read_blob(source, chunk.begin, where)
        blob = self._blobs[key]
        entry = blob.entries.get(chunk.name)
        if entry is None:
            raise CorruptCheckpointError(f"{where} does not hold that tensor")
        if (
            torch_shape(entry) != chunk.shape
            or entry.end - entry.begin != chunk.content_nbytes
            or PLAIN_DTYPES.get(entry.dtype, chunk.dtype) is not chunk.dtype
        ):
            raise CorruptCheckpointError(
                f"{where} holds a tensor of shape {list(entry.shape)} and dtype {entry.dtype}, but "
                f"the metadata says {list(chunk.shape)} and {chunk.dtype}"
            )
        if blob.offsets.get(chunk.name, chunk.offsets) != chunk.offsets:
            # Of several chunks of one name in one file, only one can be there.
            raise CorruptCheckpointError(
                f"{where} was never stored: in its place there is the chunk at "
                f"{list(blob.offsets[chunk.name])}. Save it with reshard, or as torch.save records"
            )
        return blob.data_begin + entry.begin


class _Blob(NamedTuple):
    entries: Mapping[str, Entry]
    data_begin: int
    offsets: Mapping[str, tuple[int, ...]]


def _read_blob(source: Reader, begin: int, where: str) -> _Blob:
    """The header of a safetensors file that lies in a file from `begin` on."""
    blob = _Tail(source, begin)
    head, data_begin = read_header(blob, where, MOST_PLAIN_HEADER_BYTES)
    entries, notes, _ = parse_header(head, blob.nbytes, where)
    try:
        said = msgspec.json.decode(notes.get(_SHARDING_NOTE, "{}"), type=dict[str, _Region])
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where} has a malformed note: {error}") from error
    offsets = {name: region.saved_offsets for name, region in said.items()}
    return _Blob(entries, begin + data_begin, offsets)


class _Region(msgspec.Struct):
    saved_offsets: tuple[int, ...]


def _check(chunk: Chunk, tensor: StoredTensor, place: TensorPlace, where: str) -> None:
    if tensor.dtype is not chunk.dtype or tensor.shape != chunk.shape:
        raise CorruptCheckpointError(
            f"{where} holds a tensor of shape {list(tensor.shape)[:64]} and dtype {tensor.dtype}, "
            f"but the metadata says {list(chunk.shape)} and {chunk.dtype}. The files are of "
            "different saves, or damaged; load another checkpoint"
        )
    if place.span < chunk.content_nbytes:
        raise CorruptCheckpointError(f"{where} holds a tensor whose elements overlap")


def read_stored(source: Reader, tensor: StoredTensor, place: TensorPlace) -> memoryview:
    """The elements of a tensor, one after the other, however they are stored."""
    return read_strided(
        source,
        place.begin,
        place.span,
        tensor.dtype,
        tensor.shape,
        tensor.strides,
        tensor.is_conj,
        tensor.is_neg,
        place.is_big_endian,
    )


class _Strided:
    """Decodes a tensor whose elements are not in order."""

    def __init__(self, source: Reader, tensor: StoredTensor, place: TensorPlace) -> None:
        self._source, self._tensor, self._place = source, tensor, place

    def __call__(self) -> memoryview:
        return read_stored(self._source, self._tensor, self._place)


def _strided(chunk: Chunk, source: Reader) -> _Strided:
    is_conj, is_neg, is_big_endian, *strides = map(int, chunk.codec.split(",")[1:])
    storage = Storage(chunk.dtype, "", 0)
    tensor = StoredTensor(
        storage, chunk.dtype, 0, chunk.shape, tuple(strides), False, bool(is_conj), bool(is_neg)
    )
    place = TensorPlace(chunk.begin, chunk.stored_nbytes, False, bool(is_big_endian))
    return _Strided(source, tensor, place)


class _Streamed:
    """Decodes a record that went through extensions."""

    def __init__(
        self, chunk: Chunk, source: Reader, extensions: Sequence[StreamExtension], where: str
    ) -> None:
        self._chunk, self._source, self._extensions = chunk, source, extensions
        self._where = where

    def __call__(self) -> memoryview:
        chunk, where = self._chunk, self._where
        stored = bytearray(chunk.stored_nbytes)
        self._source.read_into(chunk.begin, [memoryview(stored)] if stored else [])
        most = chunk.content_nbytes + _MOST_OVERHEAD_BYTES
        record = BytesSource(decode_value(bytes(stored), self._extensions, where, most))
        tensor, place = read_tensor_record(record, 0, record.nbytes, where)
        _check(chunk, tensor, place, where)
        if place.is_dense:
            return memoryview(record.data)[place.begin : place.begin + place.span]
        return _Strided(record, tensor, place)()


class _Tail:
    """A file from some byte on."""

    def __init__(self, source: Reader, begin: int) -> None:
        self._source, self._begin = source, begin

    @property
    def nbytes(self) -> int:
        return max(0, self._source.nbytes - self._begin)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._source.read_into(self._begin + offset, buffers)

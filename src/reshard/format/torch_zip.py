"""Archives of `torch.save`, looked into where they lie: which bytes are which tensor.

An archive may be a whole file or a part of one. It is a zip file whose members are not
compressed, so that the elements of a tensor can be read from where they are. Nothing is
unpacked here, and nothing in an archive is trusted.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from reshard.api import CorruptCheckpointError, UnsupportedFormatError
from reshard.format.container import Source
from reshard.format.pickles import Maker, Ordered, Record, Table, Unknown, maker_of, read_pickle

ZIP_MAGIC = b"PK\x03\x04"

_END = struct.Struct("<4s4H2LH")
_END_MAGIC, _END64_MAGIC, _LOCATOR_MAGIC = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s4x2H8x2L3H8xL")
_ENTRY_MAGIC = b"PK\x01\x02"
_LOCAL = struct.Struct("<4s22x2H")
_WIDE = 0xFFFFFFFF
_IS_ENCRYPTED = 1
_EDGE_BYTES = 2048
"""How much is read of the head and the tail: all that describes an archive of one tensor."""
_MOST_COMMENT_BYTES = 1 << 16
_MOST_KNOWN = 4096


class Member(NamedTuple):
    """A file in an archive; `begin` is where its bytes are in the file around it."""

    begin: int
    nbytes: int


class _Entry(NamedTuple):
    header: int
    nbytes: int
    problem: str


class Archive:
    """The members of an archive that lies at `begin` of a file, `nbytes` bytes long."""

    def __init__(self, source: Source, begin: int, nbytes: int, where: str) -> None:
        if not 0 <= begin <= begin + nbytes <= source.nbytes:
            raise CorruptCheckpointError(
                f"{where} should be {nbytes} bytes from byte {begin} on, but the file has "
                f"{source.nbytes}"
            )
        self._source, self._begin, self._nbytes, self._where = source, begin, nbytes, where
        if nbytes <= 2 * _EDGE_BYTES:
            self._head = self._tail = self._fetch(0, nbytes)
        else:
            self._head = self._fetch(0, _EDGE_BYTES)
            self._tail = self._fetch(nbytes - _EDGE_BYTES, _EDGE_BYTES)
        self._entries = self._read_directory()
        first = next(iter(self._entries), "")
        self._folder = first.partition("/")[0]

    @property
    def names(self) -> list[str]:
        """Members, without the folder that all of them are in."""
        prefix = f"{self._folder}/"
        return [n.removeprefix(prefix) for n in self._entries if n.startswith(prefix)]

    def __contains__(self, name: str) -> bool:
        return f"{self._folder}/{name}" in self._entries

    def locate(self, name: str) -> Member:
        """Where the bytes of a member lie in the file."""
        entry = self._entries.get(f"{self._folder}/{name}")
        if entry is None:
            raise CorruptCheckpointError(f"{self._where} lacks its member {name!r}")
        if entry.problem:
            raise UnsupportedFormatError(
                f"{self._where} has its member {name!r} {entry.problem}, which torch.save does "
                "not do. Load it with torch.load, and save it again"
            )
        magic, name_nbytes, extra_nbytes = _LOCAL.unpack(self._read(entry.header, _LOCAL.size))
        begin = entry.header + _LOCAL.size + name_nbytes + extra_nbytes
        if magic != ZIP_MAGIC or begin + entry.nbytes > self._nbytes:
            raise self._malformed(f"its member {name!r} is not where it should be")
        return Member(self._begin + begin, entry.nbytes)

    def read(self, name: str) -> bytes:
        """The content of a member."""
        member = self.locate(name)
        return self._read(member.begin - self._begin, member.nbytes)

    def prefix(self, begin: int) -> bytes | None:
        """All that lies in the archive before a place of the file, if it is not much."""
        length = begin - self._begin
        return self._head[:length] if 0 < length <= min(_EDGE_BYTES, len(self._head)) else None

    def _read_directory(self) -> dict[str, _Entry]:
        begin, nbytes, count = self._find_directory()
        if begin + nbytes > self._nbytes or count * _ENTRY.size > nbytes:
            raise self._malformed("its directory does not fit into it")
        directory = self._read(begin, nbytes)
        entries: dict[str, _Entry] = {}
        unpack, entry_nbytes, most = _ENTRY.unpack_from, _ENTRY.size, begin - _LOCAL.size
        position = 0
        for _ in range(count):
            if position + entry_nbytes > nbytes:
                raise self._malformed("its directory is cut short")
            magic, flags, method, stored, size, in_name, in_extra, in_comment, header = unpack(
                directory, position
            )
            name_end = position + entry_nbytes + in_name
            name = directory[position + entry_nbytes : name_end].decode("utf-8", "replace")
            position = name_end + in_extra + in_comment
            if magic != _ENTRY_MAGIC or position > nbytes:
                raise self._malformed("its directory is damaged")
            if _WIDE in (stored, size, header):
                extra = directory[name_end : name_end + in_extra]
                size, stored, header = self._widen((size, stored, header), extra)
            problem = "compressed" if method else "encrypted" if flags & _IS_ENCRYPTED else ""
            if header + stored > most or (stored != size and not problem):
                raise self._malformed("a member reaches out of it")
            if name in entries:
                raise self._malformed(f"it has two members {name!r}")
            entries[name] = _Entry(header, size, problem)
        return entries

    def _widen(self, numbers: Sequence[int], extra: bytes) -> list[int]:
        """Numbers that need more than 32 bits stand in an extra field, in this order."""
        position = 0
        while position + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, position)
            if kind == 1:
                wide = iter(struct.iter_unpack("<Q", extra[position + 4 :][: length // 8 * 8]))
                try:
                    return [next(wide)[0] if n == _WIDE else n for n in numbers]
                except StopIteration:
                    break
            position += 4 + length
        raise self._malformed("a member has no size")

    def _find_directory(self) -> tuple[int, int, int]:
        """Where the directory begins, how long it is, and of how many members."""
        tail, at = self._tail, len(self._tail) - _END.size
        if tail[at : at + 4] != _END_MAGIC:
            # There may be a comment behind.
            most = min(self._nbytes, _MOST_COMMENT_BYTES + _END.size)
            tail = self._read(self._nbytes - most, most)
            at = tail.rfind(_END_MAGIC)
        if at < 0 or at + _END.size > len(tail):
            raise self._malformed("it has no directory at its end")
        *_, count, nbytes, begin, _ = _END.unpack_from(tail, at)
        end = self._nbytes - len(tail) + at
        if end >= _LOCATOR.size:
            locator = _LOCATOR.unpack(self._read(end - _LOCATOR.size, _LOCATOR.size))
            if locator[0] == _LOCATOR_MAGIC:
                wide = self._read(locator[2], _END64.size) if locator[2] <= end else b""
                if wide[:4] != _END64_MAGIC:
                    raise self._malformed("it has no directory where it says")
                *_, count, nbytes, begin = _END64.unpack(wide)
        return begin, nbytes, count

    def _read(self, begin: int, nbytes: int) -> bytes:
        """A part of the archive, from what was read already if it is there."""
        if begin + nbytes <= len(self._head):
            return self._head[begin : begin + nbytes]
        tail_begin = self._nbytes - len(self._tail)
        if begin >= tail_begin and begin + nbytes <= self._nbytes:
            return self._tail[begin - tail_begin : begin - tail_begin + nbytes]
        return self._fetch(begin, nbytes)

    def _fetch(self, begin: int, nbytes: int) -> bytes:
        if begin + nbytes > self._nbytes:
            raise self._malformed("it is cut short")
        data = bytearray(nbytes)
        self._source.read_into(self._begin + begin, [memoryview(data)] if nbytes else [])
        return bytes(data)

    def _malformed(self, found: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._where} is not an archive of torch.save: {found}. The file is damaged, or was "
            "replaced; load another checkpoint"
        )


# Tensors


class Storage(NamedTuple):
    """A storage outside of the pickle; `dtype` is None for one of bytes."""

    dtype: torch.dtype | None
    key: str
    numel: int


class StoredTensor(NamedTuple):
    """A tensor as the pickle of an archive describes it. Nothing of it was checked."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    is_conj: bool = False
    is_neg: bool = False
    is_parameter: bool = False


class SparseTensor(NamedTuple):
    """A sparse tensor as a pickle describes it: its layout, and the dense tensors in it."""

    layout: str
    parts: tuple[StoredTensor, ...]
    shape: tuple[int, ...]
    is_coalesced: bool | None = None

    @property
    def kind(self) -> str:
        return "sparse tensor"


class BlankTensor(NamedTuple):
    """A tensor on the meta device: it has no elements anywhere."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool

    @property
    def kind(self) -> str:
        return "tensor without data"


class TensorPlace(NamedTuple):
    """Which bytes of a file are the elements of a tensor.

    `begin` is the place of the first element, and `span` how many bytes there are from the
    first element to the end of the last one. If it `is_dense`, the elements lie there one after
    the other in row-major order, as in memory.
    """

    begin: int
    span: int
    is_dense: bool
    is_big_endian: bool


class KnownRecords:
    """How archives of one tensor begin that were looked into before.

    Up to its elements, the archive of another tensor of the same dtype and shape is the same, byte
    for byte: it has the same pickle, and the same members at the same places.
    """

    def __init__(self) -> None:
        self._found: dict[bytes, tuple[StoredTensor, TensorPlace]] = {}
        self._lengths: list[int] = []

    def find(self, head: bytes, begin: int, nbytes: int) -> tuple[StoredTensor, TensorPlace] | None:
        """What an archive at `begin` holds that starts with `head`, if that is known."""
        for length in self._lengths:
            found = self._found.get(head[:length])
            if found is not None:
                tensor, (_, span, is_dense, is_big_endian) = found
                if length + span + _END.size > nbytes:
                    return None
                return tensor, TensorPlace(begin + length, span, is_dense, is_big_endian)
        return None

    def add(self, archive: Archive, tensor: StoredTensor, place: TensorPlace) -> None:
        storage = archive.locate(f"data/{tensor.storage.key}")
        prefix = archive.prefix(storage.begin)
        if (
            (place.begin, place.span) == storage
            and len(self._found) < _MOST_KNOWN
            and prefix is not None
            # All that matters is in there.
            and "byteorder" in archive
            and archive.locate("byteorder").begin < storage.begin
            and archive.locate("data.pkl").begin < storage.begin
        ):
            self._found[prefix] = tensor, place
            if len(prefix) not in self._lengths:
                self._lengths.append(len(prefix))


def read_tensor_record(
    source: Source, begin: int, nbytes: int, where: str, known: KnownRecords | None = None
) -> tuple[StoredTensor, TensorPlace]:
    """The one tensor in an archive, and where it lies."""
    if known is not None and nbytes > _EDGE_BYTES and 0 <= begin <= source.nbytes - nbytes:
        head = bytearray(_EDGE_BYTES)
        source.read_into(begin, [memoryview(head)])
        found = known.find(bytes(head), begin, nbytes)
        if found is not None:
            return found
    archive = Archive(source, begin, nbytes, where)
    tensor = read_pickle(archive.read("data.pkl"), TORCH_TABLE, where, find_storage)
    if not isinstance(tensor, StoredTensor):
        raise UnsupportedFormatError(
            f"{where} holds {describe(tensor)} in place of a dense tensor, which cannot be read "
            "without running code. Load it with torch.distributed.checkpoint"
        )
    place = place_tensor(archive, tensor, where)
    if known is not None:
        known.add(archive, tensor, place)
    return tensor, place


def place_tensor(archive: Archive, tensor: StoredTensor, where: str) -> TensorPlace:
    """Where a tensor of an archive lies, once it is known to lie within its storage."""
    check_tensor(tensor, where)
    storage, itemsize = tensor.storage, tensor.dtype.itemsize
    member = archive.locate(f"data/{storage.key}")
    count = math.prod(tensor.shape)
    last = sum(
        (extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.strides, strict=True)
    )
    span = (last + 1) * itemsize if count else 0
    if tensor.offset * itemsize + span > member.nbytes:
        raise CorruptCheckpointError(
            f"{where} has a tensor of shape {tensor.shape} that reaches out of its storage of "
            f"{member.nbytes} bytes. Load another checkpoint"
        )
    is_big_endian = (
        itemsize > 1 and "byteorder" in archive and archive.read("byteorder").strip() == b"big"
    )
    is_dense = _is_row_major(tensor.shape, tensor.strides) and not (
        tensor.is_conj or tensor.is_neg or is_big_endian
    )
    begin = member.begin + tensor.offset * itemsize
    return TensorPlace(begin if count else member.begin, span, is_dense, is_big_endian)


def check_tensor(tensor: StoredTensor, where: str) -> None:
    """Refuse a description that cannot be one of a tensor."""
    check_extents(tensor.shape, tensor.strides, tensor.offset, where)


def check_extents(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, where: str
) -> None:
    """Refuse numbers that cannot be the shape and the strides of a tensor."""
    numbers = (*shape, *strides, offset)
    if (
        len(shape) != len(strides)
        or len(shape) > _MOST_DIMS
        or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
        or math.prod(shape) >= 1 << 62
    ):
        raise CorruptCheckpointError(
            f"{where} has a malformed tensor: shape {str(shape)[:100]}, strides "
            f"{str(strides)[:100]}"
        )


def describe(found: Any) -> str:
    """What was found in place of a tensor, in a few words."""
    if isinstance(found, Unknown):
        return f"an object of {found.name}"
    if isinstance(found, Record | SparseTensor | BlankTensor):
        return f"a {found.kind}"
    return f"a {type(found).__name__}"


_MOST_DIMS = 64


def _is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    if 0 in shape:
        return True
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True


# What pickles of torch.save ask for


def find_storage(key: Any) -> Storage | Unknown:
    """The storage that a persistent id names; unknown, if its type is."""
    if type(key) is not tuple or len(key) < 5 or key[0] != "storage":
        raise ValueError("an object outside of the pickle that is not a storage")
    _, kind, name, _, count = key[:5]
    if type(kind) is Unknown:
        return kind
    if type(kind) is not _StorageType or type(name) is not str or type(count) is not int:
        raise ValueError("a malformed storage")
    if not name or not name.replace("_", "").isalnum():
        raise ValueError("a storage with an odd name")
    return Storage(kind.dtype, name, count)


class _StorageType:
    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype


def _tensor_v2(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> StoredTensor | Unknown:
    if type(storage) is Unknown:
        # Such as one within a pickle of another library, which torch unpickles by running code.
        return storage
    if type(storage) is not Storage or storage.dtype is None:
        raise ValueError("a tensor without a storage")
    return _tensor(storage, storage.dtype, offset, size, stride, requires_grad, metadata)


def _tensor_v3(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> StoredTensor | Unknown:
    if type(storage) is Unknown or type(dtype) is Unknown:
        return storage if type(storage) is Unknown else dtype
    if type(storage) is not Storage or type(dtype) is not torch.dtype:
        raise ValueError("a tensor without a storage")
    return _tensor(storage, dtype, offset, size, stride, requires_grad, metadata)


def _tensor(
    storage: Storage,
    dtype: torch.dtype,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    metadata: Any,
) -> StoredTensor:
    if type(size) is not tuple or type(stride) is not tuple or type(offset) is not int:
        raise ValueError("a malformed tensor")
    flags = metadata if type(metadata) in (dict, Ordered) else {}
    return StoredTensor(
        storage,
        dtype,
        offset,
        size,
        stride,
        requires_grad is True,
        flags.get("conj") is True,
        flags.get("neg") is True,
    )


def _parameter(data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None) -> Any:
    if type(data) in (SparseTensor, BlankTensor, Record, Unknown):
        return data
    if type(data) is not StoredTensor:
        raise ValueError("a parameter that is no tensor")
    return data._replace(is_parameter=True, requires_grad=requires_grad is True)


def _layout(name: Any) -> str:
    if type(name) is not str:
        raise ValueError("a malformed layout")
    return name


def _sparse_tensor(layout: Any, data: Any) -> SparseTensor | Record:
    count = 2 if layout == "torch.sparse_coo" else 3
    if type(layout) is not str or type(data) is not tuple or not count < len(data) <= 4:
        raise ValueError("a malformed sparse tensor")
    parts, shape, flag = data[:count], data[count], data[-1] if count == 2 else None
    if any(type(part) in (Record, Unknown) for part in parts):
        return Record("sparse tensor of unusual ones")
    if not all(type(part) is StoredTensor for part in parts) or not isinstance(shape, tuple):
        raise ValueError("a malformed sparse tensor")
    return SparseTensor(layout, parts, shape, flag if type(flag) is bool else None)


def _blank_tensor(dtype: Any, shape: Any, strides: Any, requires_grad: Any = False) -> Any:
    if type(dtype) is Unknown:
        return dtype
    if type(dtype) is not torch.dtype or type(strides) is not tuple or not isinstance(shape, tuple):
        raise ValueError("a malformed tensor without data")
    return BlankTensor(dtype, shape, strides, requires_grad is True)


def read_size(extents: Any = ()) -> tuple[int, ...]:
    """A `torch.Size`, as a plain tuple. Whoever makes use of it looks at the numbers."""
    if type(extents) is not tuple:
        raise ValueError("a size that is not a tuple")
    return extents


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
_QUANTISED_STORAGES = {
    "QInt8Storage": torch.qint8,
    "QUInt8Storage": torch.quint8,
    "QInt32Storage": torch.qint32,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
}
_UNUSUAL = {
    ("torch._utils", "_rebuild_sparse_csr_tensor"): "sparse tensor",
    ("torch._utils", "_rebuild_nested_tensor"): "nested tensor",
    ("torch._utils", "_rebuild_qtensor"): "quantised tensor",
    ("torch._utils", "_rebuild_wrapper_subclass"): "tensor subclass",
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): "tensor of another device",
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): "tensor of another device",
    ("torch._tensor", "_rebuild_from_type_v2"): "tensor subclass",
}

DTYPE_GLOBALS: Table = {
    ("torch", name): value for name, value in vars(torch).items() if type(value) is torch.dtype
}
TORCH_TABLE: Table = {
    **DTYPE_GLOBALS,
    **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{
        (module, name): _StorageType(None)
        for module in ("torch", "torch.storage")
        for name in ("UntypedStorage", "_UntypedStorage")
    },
    **{name: maker_of(kind) for name, kind in _UNUSUAL.items()},
    **{("torch", name): _StorageType(dtype) for name, dtype in _QUANTISED_STORAGES.items()},
    **{
        ("torch", name): Record("torch.qscheme")
        for name, value in vars(torch).items()
        if type(value) is torch.qscheme
    },
    ("torch._utils", "_rebuild_tensor"): Maker(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v2"): Maker(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Maker(_tensor_v3),
    ("torch._utils", "_rebuild_sparse_tensor"): Maker(_sparse_tensor),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): Maker(_blank_tensor),
    ("torch._utils", "_rebuild_parameter"): Maker(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Maker(_parameter),
    ("torch", "Size"): Maker(read_size),
    ("torch", "device"): maker_of("torch.device"),
    ("torch.serialization", "_get_layout"): Maker(_layout),
    ("collections", "OrderedDict"): Maker(lambda: Ordered()),
}
"""Tensors, and what is part of every state dict."""

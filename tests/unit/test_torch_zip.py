"""Archives of torch.save, looked into where they lie."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from reshard.api import CheckpointException, CorruptCheckpointError, UnsupportedFormatError
from reshard.format.torch_zip import Archive, KnownRecords, read_tensor_record

_BEFORE, _AFTER = b"before " * 5, b"after"


class _Bytes:
    """A file in memory that counts how often it is read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads = 0

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self.reads += 1
        for buffer in buffers:
            buffer[:] = self.data[offset : offset + len(buffer)]
            offset += len(buffer)


def _saved(thing: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer, **options)
    return buffer.getvalue()


def _read(record: bytes) -> tuple[Any, Any, _Bytes]:
    source = _Bytes(_BEFORE + record + _AFTER)
    return *read_tensor_record(source, len(_BEFORE), len(record), "the record"), source


_DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
        and not str(dtype).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1"))
        and not str(dtype)[:-1].endswith(("torch.int", "torch.uint"))
    }
    | {torch.int8, torch.int16, torch.uint8, torch.uint16},
    key=str,
)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_the_bytes_of_a_tensor_of_any_dtype_are_found(dtype: torch.dtype) -> None:
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = raw.view(dtype).reshape(2, 3)
    stored, place, source = _read(_saved(tensor))
    assert (stored.dtype, stored.shape) == (dtype, (2, 3))
    assert place.is_dense
    assert source.data[place.begin : place.begin + place.span] == bytes(raw.numpy())


@pytest.mark.parametrize(
    ("tensor", "is_dense"),
    [
        (torch.tensor(3.5), True),
        (torch.zeros(0, 4), True),
        (torch.rand(10)[3:7], True),
        (torch.rand(1, 5).t(), True),
        (torch.nn.Parameter(torch.rand(3)), True),
        (torch.rand(4, 5).t(), False),
        (torch.rand(5)[::2], False),
        (torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), False),
        (torch.rand(1).expand(3), False),
        (torch.rand(2, dtype=torch.complex64).conj(), False),
        (torch.rand(2, dtype=torch.complex64).conj().imag, False),
    ],
)
def test_elements_that_do_not_lie_in_order_are_told(tensor: Any, is_dense: bool) -> None:
    stored, place, source = _read(_saved(tensor))
    assert stored.shape == tensor.shape
    assert stored.dtype == tensor.dtype
    assert place.is_dense is is_dense
    if is_dense and tensor.numel():
        data = bytearray(source.data[place.begin : place.begin + place.span])
        assert torch.equal(torch.frombuffer(data, dtype=tensor.dtype), tensor.detach().flatten())


def test_a_record_costs_two_small_reads_however_large_it_is() -> None:
    _, _, small = _read(_saved(torch.zeros(3)))
    _, _, large = _read(_saved(torch.zeros(1 << 20)))
    assert (small.reads, large.reads) == (1, 2)


def test_records_that_begin_like_a_known_one_are_placed_by_that() -> None:
    known = KnownRecords()
    tensors = [torch.rand(20, 50), torch.rand(20, 50), torch.rand(50, 20), torch.rand(20, 50).t()]
    for tensor in (*tensors, *tensors):
        record = _saved(tensor)
        source = _Bytes(_BEFORE + record + _AFTER)
        found = read_tensor_record(source, len(_BEFORE), len(record), "the record", known)
        again = _Bytes(source.data)
        assert found == read_tensor_record(again, len(_BEFORE), len(record), "the record")
    assert source.reads == 1
    assert again.reads == 2
    # What is cut off is not taken for whole.
    for end in (100, 3000, len(record) - 1000):
        cut = _Bytes(record[:end])
        with pytest.raises(CorruptCheckpointError, match=r"^the record"):
            read_tensor_record(cut, 0, end, "the record", known)
    changed = record.replace(b"byteorderFB", b"byteorderFC")
    assert changed != record
    source = _Bytes(changed)
    read_tensor_record(source, 0, len(changed), "the record", known)
    assert source.reads > 1


def _rewritten(record: bytes, change: Any = lambda name, data: data, method: int = 0) -> bytes:
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(record)) as old,
        zipfile.ZipFile(buffer, "w", compression=method) as new,
    ):
        for info in old.infolist():
            data = change(info.filename.partition("/")[2], old.read(info))
            if data is not None:
                new.writestr(info.filename, data)
    return buffer.getvalue()


def test_an_archive_of_another_tool_is_read_too() -> None:
    tensor = torch.rand(100, 7)
    _, place, source = _read(_rewritten(_saved(tensor)))
    assert place.is_dense
    data = bytearray(source.data[place.begin : place.begin + place.span])
    assert torch.equal(torch.frombuffer(data, dtype=torch.float32), tensor.flatten())


def test_big_endian_and_compressed_archives_are_told_apart() -> None:
    record = _saved(torch.rand(100))
    big = _rewritten(record, lambda name, data: b"big" if name == "byteorder" else data)
    _, place, _ = _read(big)
    assert place.is_big_endian
    assert not place.is_dense
    with pytest.raises(UnsupportedFormatError, match="compressed"):
        _read(_rewritten(record, method=zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize(
    ("thing", "named"),
    [
        (torch.eye(3).to_sparse(), "sparse tensor"),
        ({"a": 1}, "dict"),
        ([torch.zeros(1)], "list"),
        (None, "NoneType"),
        (torch.zeros(2, device="meta"), "tensor without data"),
    ],
)
def test_what_is_not_one_dense_tensor_is_refused_by_name(thing: Any, named: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=named):
        _read(_saved(thing))


def test_every_cut_is_a_clear_error() -> None:
    record = _saved(torch.zeros(3))
    for end in range(0, len(record), 7):
        with pytest.raises(CorruptCheckpointError, match=r"^the record"):
            _read(record[:end])
    with pytest.raises(CorruptCheckpointError, match=r"^the record should be"):
        read_tensor_record(_Bytes(record), 5, len(record), "the record")


def test_damage_never_leads_out_of_the_record() -> None:
    record = _saved(torch.zeros(3))
    for at in range(len(record)):
        for value in (0, 1, 0x7F, 0xFF):
            damaged = record[:at] + bytes([value]) + record[at + 1 :]
            try:
                _, place, _ = _read(damaged)
            except CheckpointException as error:
                assert str(error).startswith("the record")  # noqa: PT017
                continue
            assert len(_BEFORE) <= place.begin
            assert place.begin + place.span <= len(_BEFORE) + len(record)


def _with_storage_key(record: bytes, key: bytes) -> bytes:
    return _rewritten(
        record,
        lambda name, data: (
            data.replace(b"X\x01\x00\x00\x000", struct.pack("<cI", b"X", len(key)) + key)
            if name == "data.pkl"
            else data
        ),
    )


@pytest.mark.parametrize("key", [b"../../x", b"", b"1"])
def test_storages_outside_of_the_archive_are_refused(key: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"odd name|lacks its member"):
        _read(_with_storage_key(_saved(torch.zeros(3)), key))


def test_a_tensor_larger_than_its_storage_is_refused() -> None:
    larger = lambda name, data: data.replace(b"K\x03\x85", b"K\x7f\x85")  # noqa: E731
    with pytest.raises(CorruptCheckpointError, match="reaches out of its storage"):
        _read(_rewritten(_saved(torch.zeros(3)), larger))
    gone = lambda name, data: None if name == "data/0" else data  # noqa: E731
    with pytest.raises(CorruptCheckpointError, match="lacks its member 'data/0'"):
        _read(_rewritten(_saved(torch.zeros(3)), gone))


def test_sizes_beyond_32_bits_are_read_from_the_wide_directory() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, archive.open("a/x", "w", force_zip64=True) as x:
        x.write(b"content")
    record = bytearray(buffer.getvalue())
    # The sizes in the directory, moved to an extra field.
    at = record.rindex(b"PK\x01\x02")
    sizes = struct.pack("<HHQQ", 1, 16, 7, 7)
    end = record.rindex(b"PK\x05\x06")
    struct.pack_into("<II", record, at + 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", record, at + 30, len(sizes))
    struct.pack_into("<I", record, end + 12, end - at + len(sizes))
    record[at + 46 + 3 : at + 46 + 3] = sizes
    assert zipfile.ZipFile(io.BytesIO(record)).read("a/x") == b"content"
    read = Archive(_Bytes(bytes(record)), 0, len(record), "it")
    assert read.read("x") == b"content"
    assert read.names == ["x"]

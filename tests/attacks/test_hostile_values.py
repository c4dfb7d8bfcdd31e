"""Stored values with a sound checksum and hostile content."""

from __future__ import annotations

import collections
import datetime
import io
import pickle
import struct
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import reshard
from reshard.api import CorruptCheckpointError, UnsafeValueError
from reshard.format.values import decode_value, encode_value
from support.hostile import check_refused, memory_limit, refusal, replace_value

pack = msgspec.msgpack.encode


def load_step(checkpoint: Path, **options: Any) -> Any:
    state = {"step": None}
    reshard.load(state, checkpoint_id=checkpoint, no_dist=True, **options)
    return state["step"]


def read_step(checkpoint: Path, **options: Any) -> Any:
    return reshard.read_state_dict(checkpoint, "step", **options)["step"]


def tagged(tree: Any) -> bytes:
    return b"RSV1M" + (tree if isinstance(tree, bytes) else pack(tree))


def ext(tag: int, content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(tag, content if isinstance(content, bytes) else pack(content))


def nested_tuples(depth: int) -> bytes:
    data = b"\xc0"
    for _ in range(depth):
        data = pack(ext(1, b"\x91" + data))
    return data


ATTACKS: dict[str, bytes] = {
    "half a magic": b"RS",
    "a magic and no kind": b"RSV1",
    "an unknown kind": b"RSV1X\xc0",
    "no content": b"RSV1M",
    "two values": b"RSV1M\xc0\xc0",
    "a byte that MessagePack never uses": b"RSV1M\xc1",
    "an unknown tag": tagged(ext(99, None)),
    "a negative tag": tagged(ext(-2, None)),
    "a tag without content": tagged(ext(1, b"")),
    "an array of 2^32 items": tagged(b"\xdd\xff\xff\xff\xff"),
    "a map of 2^32 items": tagged(b"\xdf\xff\xff\xff\xff"),
    "a text of 2^32 bytes": tagged(b"\xdb\xff\xff\xff\xff"),
    "bytes of 2^32 bytes": tagged(b"\xc6\xff\xff\xff\xff"),
    "an extension of 2^32 bytes": tagged(b"\xc9\xff\xff\xff\xff\x01"),
    "text that is not UTF-8": tagged(b"\xa2\xff\xfe"),
    "lists 100000 deep": tagged(b"\x91" * 100_000 + b"\xc0"),
    "maps 100000 deep": tagged(b"\x81\xa1a" * 100_000 + b"\xc0"),
    "tuples 300 deep": tagged(nested_tuples(300)),
    "a tuple of nothing": tagged(ext(1, None)),
    "a dict of no pairs": tagged(ext(2, [1, 2])),
    "a dict with a key that cannot be one": tagged(ext(2, [[[1], 2]])),
    "a set of lists": tagged(ext(3, [[1]])),
    "a number of words": tagged(ext(5, "many")),
    "a number of 5000 digits": tagged(ext(5, "9" * 5000)),
    "a complex number of three": tagged(ext(6, [1.0, 2.0, 3.0])),
    "an array of objects": tagged(ext(16, ["|O", [1], b"\0" * 8])),
    "an array of objects within a structure": tagged(ext(16, ["i4,O", [1], b"\0" * 12])),
    "an array of an unknown dtype": tagged(ext(16, ["<q99", [1], b"\0" * 8])),
    "an array of more than it has": tagged(ext(16, ["<f8", [1 << 40], b"\0" * 8])),
    "an array of 2^62": tagged(ext(16, ["<f8", [0, 1 << 62], b""])),
    "an array of half an element": tagged(ext(16, ["<f8", [1], b"\0" * 4])),
    "an array of no content": tagged(ext(16, [])),
    "a size of texts": tagged(ext(32, ["a"])),
    "a dtype that is a function": tagged(ext(33, "load")),
    "a dtype that is a module": tagged(ext(33, "nn")),
    "a dtype with dots": tagged(ext(33, "nn.functional")),
    "a dtype that is a number": tagged(ext(33, 5)),
    "a device that is none": tagged(ext(34, "toaster:0")),
    "a tensor of more than it has": tagged(ext(35, ["float32", [1 << 40], b"\0" * 8])),
    "a tensor of a negative shape": tagged(ext(35, ["float32", [-2], b""])),
    "a tensor of half an element": tagged(ext(35, ["float32", [1], b"\0" * 2])),
    "a tensor of an unknown dtype": tagged(ext(35, ["float33", [1], b"\0" * 4])),
    "a moment that never was": tagged(ext(48, "2024-13-45T00:00:00")),
    "a day that never was": tagged(ext(49, "2023-02-29")),
    "a time that never was": tagged(ext(50, "25:00:00")),
    "a time span beyond all time": tagged(ext(51, [10**12, 0, 0])),
    "a map with a key that is a number": tagged({1: 2}),
    "a map with a key that is a list": tagged({(1, 2): 3}),
    "a map with a key that is an extension": tagged(b"\x81\xc7\x02\x01\x91\x01\x02"),
    "an extension longer than its data": tagged(b"\xc7\x09\x01\x90"),
    "an extension shorter than its data": tagged(b"\xc7\x01\x01\x90\x90"),
    "a tuple of a dict": tagged(ext(1, {"a": 1})),
    "a dict of texts": tagged(ext(2, ["ab"])),
    "a deque of a text": tagged(ext(11, ["ab", None])),
    "a defaultdict of a number": tagged(ext(12, [ext(5, b"\xc5\x40\x00" + b"\1" * 16384), []])),
    "an array of a million dimensions": tagged(ext(16, ["|u1", [2**61] * 1_000_000, b""])),
    "an array of 1000 dimensions": tagged(ext(16, ["|u1", [1] * 1000, b"\0"])),
    "a tensor of a million dimensions": tagged(ext(35, ["uint8", [2**61] * 1_000_000, b""])),
    "no texts of 4 GB": tagged(ext(16, ["<U999999999", [0], b""])),
    "a size beyond 64 bits": tagged(ext(32, [2**64 - 1])),
    "a zone that climbs": tagged(ext(48, ["2024-01-01T00:00:00", 0, "../../etc/passwd"])),
    "a zone without end": tagged(ext(48, ["2024-01-01T00:00:00", 0, "A" * 100_000])),
    "a moment of four parts": tagged(ext(48, ["2024-01-01T00:00:00", 0, "UTC", 1])),
    "a timestamp that never was": tagged(b"\xc7\x0c\xff" + b"\xff" * 12),
}


@pytest.mark.parametrize("read", [load_step, read_step])
@pytest.mark.parametrize("data", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_hostile_value_is_refused_and_its_key_is_named(
    data: bytes, read: Any, checkpoint: Path
) -> None:
    replace_value(checkpoint, "step", data)
    with memory_limit():
        check_refused(lambda: read(checkpoint), "'step'")


BUGS: dict[str, tuple[bytes, str]] = {
    "a bytearray of 2^40": (
        tagged(ext(7, 1 << 40)),
        "bytearray(int) allocates that many bytes; MemoryError comes through",
    ),
    "a bytearray of a list": (
        tagged(ext(7, [1, 2, 3])),
        "a bytearray is made of whatever is there",
    ),
    "an array of a negative shape": (
        tagged(ext(16, ["<f8", [-2], b"\0" * 8])),
        "numpy takes a negative extent for one that it is to find out",
    ),
    "a tensor of 2^40 elements without bytes": (
        tagged(ext(35, ["float32", [1 << 40], b""])),
        "a tensor without data is allocated by its shape alone",
    ),
    "an array of dates": (
        tagged(ext(16, ["<M8[s]", [1], b"\0" * 8])),
        "dtypes of other kinds than the format has are let through",
    ),
    "a quantised tensor": (
        tagged(ext(35, ["qint8", [1], b"\0"])),
        "makes a quantised tensor without a quantiser, which nothing can print or use",
    ),
}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(
            data,
            id=name,
        )
        for name, (data, reason) in BUGS.items()
    ],
)
def test_a_hostile_value_that_is_not_refused_yet(data: bytes, checkpoint: Path) -> None:
    replace_value(checkpoint, "step", data)
    with memory_limit():
        check_refused(lambda: type(load_step(checkpoint)), "'step'")


def test_an_error_about_a_hostile_value_stays_short(checkpoint: Path) -> None:
    for content in (["|u1", [2**61] * 200, b""], ["x" * 1_000_000, [], b""]):
        replace_value(checkpoint, "step", tagged(ext(16, content)))
        assert len(check_refused(lambda: load_step(checkpoint), "'step'")) < 500


# Everything that a file says takes time in proportion to it. What these take is a tenth of a
# second or less; without the checks, from ten seconds to for ever.

_SECONDS = 5.0
_HASH = sys.hash_info.modulus


def _big(number: int) -> msgspec.msgpack.Ext:
    return ext(5, pack(number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)))


def _deep(depth: int, inside: bytes, wrap: Any) -> bytes:
    for _ in range(depth):
        inside = wrap(inside)
    return inside


SLOW: dict[str, bytes] = {
    "a dict of numbers with one hash": tagged(
        ext(2, [[_big(_HASH * n), None] for n in range(1, 20_000)])
    ),
    "a set of numbers with one hash": tagged(ext(3, [_big(_HASH * n) for n in range(1, 20_000)])),
    "a set of tuples with one hash": tagged(
        ext(4, [ext(1, [_big(_HASH * n)]) for n in range(1, 20_000)])
    ),
    "a set of complex numbers with one hash": tagged(
        ext(3, [ext(6, [-1000003.0 * n, float(n)]) for n in range(20_000)])
    ),
    "a Counter of numbers with one hash": tagged(
        ext(10, [[_big(_HASH * n), 1] for n in range(1, 20_000)])
    ),
    "a map of lists with one hash": tagged(
        b"\xde\x4e\x20" + b"".join(b"\x91" + pack(_HASH * (n % 8)) + b"\0" for n in range(20_000))
    ),
    "a tuple 60 deep with an unknown dtype at its bottom": tagged(
        _deep(60, pack(ext(33, 5)), lambda inside: pack(ext(1, b"\x91" + inside)))
    ),
    "lists 60 deep with bytes, texts and an unknown tag at their bottom": tagged(
        _deep(60, pack(ext(99, None)), lambda inside: b"\x93\xa1a\xc4\x01b" + inside)
    ),
}


@pytest.mark.parametrize("data", SLOW.values(), ids=SLOW.keys())
def test_a_value_made_to_take_long_is_refused_at_once(data: bytes) -> None:
    began = time.thread_time()
    with pytest.raises(CorruptCheckpointError, match="'step'"):
        decode_value(data, "step")
    assert time.thread_time() - began < _SECONDS


def test_a_million_ordinary_elements_are_read_at_once() -> None:
    values: list[Any] = [
        list(range(1_000_000)),
        [n / 3 for n in range(1_000_000)],
        set(range(1_000_000)),
        {n: n for n in range(300_000)},
        [{"a": n, "b": [1.5, "x"]} for n in range(100_000)],
    ]
    for value in values:
        data = encode_value(value)
        began = time.thread_time()
        assert decode_value(data, "step") == value
        assert time.thread_time() - began < _SECONDS


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def _as_torch_save(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("read", [load_step, read_step])
@pytest.mark.parametrize("form", ["RSV1P", "torch.save", "bare"])
def test_a_pickled_value_is_only_run_when_the_caller_says_so(
    form: str, read: Any, checkpoint: Path, tmp_path: Path
) -> None:
    trap = tmp_path / "executed"
    bomb = _Bomb(trap)
    data = {
        "RSV1P": lambda: b"RSV1P\xa4Bomb" + pickle.dumps(bomb),
        "torch.save": lambda: _as_torch_save(bomb),
        "bare": lambda: pickle.dumps(bomb, protocol=2),
    }[form]()
    replace_value(checkpoint, "step", data)
    reason = refusal(lambda: read(checkpoint))
    assert isinstance(reason, UnsafeValueError)
    assert "'step'" in str(reason)
    assert not trap.exists()
    if form != "bare":
        read(checkpoint, allow_pickle=True)
        assert trap.exists()


def test_a_mark_that_a_value_is_no_pickle_does_not_open_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    trap = tmp_path / "executed"
    replace_value(checkpoint, "step", b"RSV1P\xa4Bomb" + pickle.dumps(_Bomb(trap)))
    # `values.pickled` still says 0.
    assert isinstance(refusal(lambda: load_step(checkpoint)), UnsafeValueError)
    assert not trap.exists()


def _zip_that_claims(nbytes: int) -> bytes:
    """A torch.save file whose one record says that it is `nbytes` long once inflated."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 4096)
        archive.writestr("archive/version", "3\n")
    data = bytearray(buffer.getvalue())
    for signature, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        at = data.index(signature) + offset
        data[at : at + 4] = struct.pack("<I", nbytes)
    return bytes(data)


@pytest.mark.parametrize("claimed", [3 << 30, 0xFFFFFFFE])
def test_a_zip_bomb_in_place_of_a_value_does_not_fill_the_memory(
    claimed: int, checkpoint: Path
) -> None:
    replace_value(checkpoint, "step", _zip_that_claims(claimed))
    with memory_limit():
        check_refused(lambda: load_step(checkpoint), "'step'")


def test_a_bytearray_bomb_in_a_torch_file_does_not_fill_the_memory(checkpoint: Path) -> None:
    # bytearray(2 ** 40), which torch's own safe unpickler lets through.
    code = b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\x01\x85R."
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", code)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    replace_value(checkpoint, "step", buffer.getvalue())
    with memory_limit():
        check_refused(lambda: load_step(checkpoint), "'step'")


def test_a_bytearray_in_a_torch_file_is_read(checkpoint: Path) -> None:
    buffer = io.BytesIO()
    torch.save([bytearray(b"some bytes"), 5], buffer)
    replace_value(checkpoint, "step", buffer.getvalue())
    assert load_step(checkpoint) == [bytearray(b"some bytes"), 5]


EVERYTHING: dict[str, Any] = {
    "plain": [None, True, 7, -1.5, "text", b"bytes", {"a": [1]}],
    "containers": ((1, (2,)), {3: 4, (5, 6): {7}}, frozenset({8}), collections.OrderedDict(a=1)),
    "numbers": (1 << 80, 3 + 4j, bytearray(b"x")),
    "numpy": (np.arange(3, dtype=np.int16), np.float32(1.5), np.array(["ab"])),
    "torch": (torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.ones(2)),
    "times": (
        datetime.datetime(2024, 2, 29, 1, 2, 3),
        datetime.date(2024, 2, 29),
        datetime.time(1, 2, 3),
        datetime.timedelta(1, 2, 3),
    ),
}


@pytest.mark.parametrize("kind", [*EVERYTHING])
def test_a_value_with_any_byte_changed_or_cut_off_is_a_value_or_a_clear_error(kind: str) -> None:
    data = encode_value(EVERYTHING[kind])
    refused = 0
    with memory_limit():
        for position in range(len(data)):
            refused += _is_refused(data[:position])
            for change in range(1, 256, 7):
                changed = bytearray(data)
                changed[position] ^= change
                refused += _is_refused(bytes(changed))
    assert refused > len(data)


def _is_refused(data: bytes) -> bool:
    try:
        decode_value(data, "the.key")
    except (CorruptCheckpointError, UnsafeValueError) as error:
        if "'the.key'" not in str(error) or isinstance(error.__cause__, MemoryError):
            raise AssertionError(f"not a clear error: {error}") from error
        return True
    return False

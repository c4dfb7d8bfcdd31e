"""Values as bytes: every type comes back as itself, and nothing is executed."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import math
import sys
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard.format.values as values_module
from reshard.api import CorruptCheckpointError, UnsafeValueError, UnsupportedFormatError
from reshard.format.values import decode_value, encode_value, is_pickled
from reshard.planning.columns import DTYPES

HOUR = datetime.timezone(datetime.timedelta(hours=1))

KNOWN: list[Any] = [
    collections.Counter("abb"),
    collections.deque([1, (2,)], maxlen=3),
    collections.defaultdict(list, {1: [2]}),
    collections.defaultdict(None, {"a": 1}),
    argparse.Namespace(lr=0.1, names=["a"]),
    Path("a/b"),
    None,
    *(True, False, 0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**4000),
    *(0.0, -0.0, 1.5, 5e-324, math.inf, -math.inf),
    *("", "text", "zażółć ☃ 🜁 \0", b"", b"\x00\xff", bytearray(), bytearray(b"xyz")),
    *([], [1, [2, ["x"]]], (), (1,), ((), [()]), {}, {"a": {"b": [1]}}),
    *({1: 2}, {(1, "x"): {None: True}}, {True: 1, 2.5: 3, b"k": 4, frozenset({1}): 5}),
    *(collections.OrderedDict(), collections.OrderedDict([("z", 1), ("a", 2), (3, 4)])),
    *(set(), {1, "a", (2, 3)}, frozenset(), frozenset({frozenset({1})})),
    *(1 - 2j, complex(-0.0, math.inf)),
    *(torch.Size([]), torch.Size([2, 3]), torch.bfloat16, torch.float8_e4m3fn),
    *(torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")),
    datetime.datetime(2024, 2, 29, 12, 30, 15, 7),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone.utc),
    datetime.datetime(2024, 2, 29, tzinfo=HOUR),
    *(datetime.date(1, 1, 1), datetime.time(23, 59, 58, 1), datetime.time(1, tzinfo=HOUR)),
    *(datetime.timedelta(days=-1, seconds=3, microseconds=5), datetime.timedelta.max),
]

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(12)[::-3],
    np.array(5, dtype=np.uint8),
    np.zeros((0, 3), dtype=np.complex128),
    np.array([1, 2], dtype=">i4"),
    np.array([True, False]),
    np.array(["ä", "bcd"]),
    np.array([b"x", b"yz"]),
    np.arange(2, dtype=np.float16),
    np.arange(2, dtype=np.longdouble),
]

SCALARS = [
    *(np.float64(0.1), np.float32(-0.0), np.int8(-7), np.uint64(2**64 - 1), np.bool_(True)),
    *(np.complex64(1 + 2j), np.str_("ä"), np.str_(""), np.bytes_(b"x"), np.longdouble(1)),
]


def round_trip(value: Any) -> Any:
    data = encode_value(value)
    assert not is_pickled(data)
    return decode_value(data, "key")


def check_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert found == expected
    if isinstance(expected, float | complex):
        assert repr(found) == repr(expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for one, other in zip(found.items(), expected.items(), strict=True):
            check_same(one, other)
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            check_same(one, other)
    elif isinstance(expected, set | frozenset):
        assert sorted(map(_spelled, found)) == sorted(map(_spelled, expected))
    elif isinstance(expected, datetime.datetime | datetime.time):
        assert found.tzinfo == expected.tzinfo


def _spelled(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_spelled, value))}"
    if isinstance(value, tuple):
        return f"tuple {[*map(_spelled, value)]}"
    return f"{type(value).__name__} {value!r}"


@pytest.mark.parametrize("value", KNOWN, ids=[type(value).__name__ for value in KNOWN])
def test_a_known_value_comes_back_with_its_exact_type(value: Any) -> None:
    check_same(round_trip(value), value)


def test_not_a_number_stays_not_a_number() -> None:
    assert math.isnan(round_trip(math.nan))


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_a_numpy_array_comes_back_with_its_dtype_and_byte_order(array: Any) -> None:
    found = round_trip([array])[0]
    assert type(found) is np.ndarray
    assert found.dtype.str == array.dtype.str
    np.testing.assert_array_equal(found, array, strict=True)
    found[...] = found


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_a_numpy_scalar_comes_back_with_its_type(scalar: Any) -> None:
    check_same(round_trip(scalar), scalar)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3),
        torch.zeros(0, 4, dtype=torch.bool),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j, 3j]).conj().imag,
        torch.arange(4.0)[::4],
        torch.arange(4, dtype=torch.bfloat16)[::2],
        torch.ones(2, requires_grad=True),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_a_tensor_within_a_value_comes_back(tensor: torch.Tensor) -> None:
    found = round_trip([tensor])[0]
    assert type(found) is torch.Tensor
    assert found.dtype is tensor.dtype
    assert torch.equal(found, tensor)


def test_equal_sets_are_stored_as_equal_bytes() -> None:
    # 0 and 8 collide, so the first to come stands first.
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other)
    assert encode_value(one) == encode_value(other)
    assert encode_value(frozenset(one)) == encode_value(frozenset(other))


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int


class Text(str):
    __slots__ = ()


UNKNOWN = [
    decimal.Decimal("1.5"),
    Colour.RED,
    Point(1),
    Text("x"),
    PurePosixPath("a"),
    collections.defaultdict(collections.OrderedDict),
    range(3),
    np.array([None, 1], dtype=object),
    np.datetime64("2024-02-29"),
    torch.nn.Parameter(torch.ones(1)),
    torch.ones(2).to_sparse(),
]


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [{"a": (v,)}]], ids=["bare", "nested"])
@pytest.mark.parametrize("value", UNKNOWN, ids=lambda value: type(value).__name__)
def test_an_unknown_type_is_pickled_and_refused_until_the_caller_agrees(
    value: Any, wrap: Any
) -> None:
    data = encode_value(wrap(value))
    assert is_pickled(data)
    with pytest.raises(UnsafeValueError, match=r"'the\.key'.*allow_pickle=True"):
        decode_value(data, "the.key")
    found = decode_value(data, "the.key", allow_pickle=True)
    assert type(found) is type(wrap(value))
    assert repr(found) == repr(wrap(value))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_nothing_is_executed_by_decoding_or_refusing(tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    data = encode_value([Bomb(trap)])
    with pytest.raises(UnsafeValueError):
        decode_value(data, "key")
    assert not trap.exists()
    decode_value(data, "key", allow_pickle=True)
    assert trap.exists()


def nested_lists(count: int) -> Any:
    value: Any = None
    for _ in range(count):
        value = [value]
    return value


def test_nesting_is_tagged_as_deep_as_specified_and_pickled_beyond() -> None:
    check_same(round_trip(nested_lists(65)), nested_lists(65))
    assert is_pickled(encode_value(nested_lists(66)))


def test_a_list_that_holds_itself_is_pickled() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert is_pickled(encode_value(loop))


@pytest.mark.parametrize("data", [b"", b"RS", b"RSV1", b"RSV2M\xc0", b"RSV1m\xc0", b"\x80\x04N."])
def test_bytes_that_are_no_value_are_refused_by_name(data: bytes) -> None:
    assert not is_pickled(data)
    with pytest.raises(CorruptCheckpointError, match=r"'the\.key'"):
        decode_value(data, "the.key")


def test_an_integer_of_any_size_can_be_saved() -> None:
    value = 1 << 20_000
    assert decode_value(encode_value(value), "key", allow_pickle=True) == value


@pytest.mark.parametrize("value", ["\ud800", ["\ud800"], {"\ud800": 1}])
def test_a_text_with_half_a_surrogate_pair_can_be_saved(value: Any) -> None:
    assert decode_value(encode_value(value), "key", allow_pickle=True) == value


def test_the_second_of_two_equal_hours_stays_the_second() -> None:
    assert round_trip(datetime.datetime(2024, 10, 27, 2, 30, fold=1)).fold == 1


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2024, 7, 1, 12, 30, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime.time(9, 30, tzinfo=ZoneInfo("America/New_York")),
    ],
)
def test_a_time_keeps_its_zone_by_name(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert back.fold == value.fold
    assert back.tzinfo.key == value.tzinfo.key


def _forget_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(key: str) -> Any:
        raise ZoneInfoNotFoundError(key)

    monkeypatch.setattr(values_module, "ZoneInfo", unknown)


def test_a_datetime_of_an_unknown_zone_keeps_its_offset(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    value = datetime.datetime(2024, 7, 1, 12, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    data = encode_value(value)
    _forget_zones(monkeypatch)
    back = decode_value(data, "when")
    assert back == value
    assert back.utcoffset() == datetime.timedelta(hours=2)
    assert "Europe/Berlin" in caplog.text


def test_a_time_of_an_unknown_zone_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_value(datetime.time(9, 30, tzinfo=ZoneInfo("Europe/Berlin")))
    _forget_zones(monkeypatch)
    with pytest.raises(UnsupportedFormatError, match=r"'when'.*'Europe/Berlin'.*tzdata"):
        decode_value(data, "when")


def test_keys_that_a_reader_would_refuse_are_pickled() -> None:
    assert is_pickled(encode_value({n * sys.hash_info.modulus for n in range(100)}))
    assert not is_pickled(encode_value({n * sys.hash_info.modulus for n in range(50)}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [[2], [0], [1] * 100])
def test_a_tensor_of_any_dtype_is_a_value_or_a_clear_error(
    dtype: torch.dtype, shape: list[int]
) -> None:
    nbytes = math.prod(shape) * dtype.itemsize
    content = (str(dtype).removeprefix("torch."), shape, b"\1" * nbytes)
    extension = msgspec.msgpack.Ext(35, msgspec.msgpack.encode(content))
    try:
        value = decode_value(b"RSV1M" + msgspec.msgpack.encode(extension), "x")
    except CorruptCheckpointError:
        assert str(dtype).startswith(("torch.qint", "torch.quint"))
    else:
        assert (value.dtype, [*value.shape]) == (dtype, shape)


hashables = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.datetimes(timezones=st.none() | st.just(HOUR)).map(lambda when: when.replace(fold=0))
    | st.dates()
    | st.timedeltas(),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
values = st.recursive(
    hashables,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=3).map(collections.OrderedDict)
        | st.sets(hashables, max_size=3)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(values)
def test_any_nesting_of_known_values_comes_back(value: Any) -> None:
    check_same(round_trip(value), value)
    assert encode_value(round_trip(value)) == encode_value(value)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_a_clear_error(data: bytes) -> None:
    try:
        decode_value(b"RSV1M" + data, "the.key")
    except CorruptCheckpointError as error:
        message = str(error)
    else:
        return
    assert "'the.key'" in message

"""Pickles are read as data, and nothing in them runs."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import pickletools
import struct
import time
from typing import Any, NamedTuple

import pytest

from reshard.api import CheckpointException, CorruptCheckpointError, UnsafeValueError
from reshard.format.pickles import Copier, Maker, Ordered, Record, Unknown, maker_of, read_pickle

_TABLE = {
    ("collections", "OrderedDict"): Maker(lambda: Ordered()),
    ("a.module", "Thing"): maker_of("Thing"),
    (__name__, "Thing"): maker_of("Thing"),
}


class Thing:
    """What pickles of these tests hold."""

    def __init__(self, number: int = 0) -> None:
        self.number = number


class _Pair(NamedTuple):
    one: Any
    other: Any


class _Runs:
    """Its pickle makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


_VALUES = [
    None,
    True,
    False,
    0,
    255,
    256,
    65536,
    -1,
    -(2**31),
    2**40,
    -(2**70),
    2**3000,
    1.5,
    float("inf"),
    "",
    "text",
    "ümläut \n 'quoted' \\",
    "\ud800",
    "x" * 300,
    b"",
    b"bytes\x00\xff",
    b"y" * 300,
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    (1, 2, 3, 4),
    [],
    [1, [2, [3]]],
    list(range(2500)),
    {},
    {"a": {"b": [1, (2, 3)]}, 5: None},
    {str(i): i for i in range(2500)},
    {(1, "a"): 2},
]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", _VALUES, ids=lambda value: repr(value)[:20])
def test_what_python_pickles_comes_back(value: object, protocol: int) -> None:
    table = {("_codecs", "encode"): Maker(lambda text, encoding="": text.encode(encoding))}
    table |= {("builtins", "bytes"): Maker(bytes), ("__builtin__", "bytes"): Maker(bytes)}
    read = read_pickle(pickle.dumps(value, protocol), table, "it")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("protocol", [4, 5])
def test_sets_and_byte_arrays_come_back(protocol: int) -> None:
    value = [{1, 2, "a"}, frozenset({3}), set()]
    assert read_pickle(pickle.dumps(value, protocol), {}, "it") == value
    assert read_pickle(pickle.dumps(bytearray(b"abc"), 5), {}, "it") == bytearray(b"abc")


def test_objects_that_occur_twice_stay_one_object() -> None:
    inner = [1]
    inner.append(inner)
    read = read_pickle(pickle.dumps([inner, inner]), {}, "it")
    assert read[0] is read[1]
    assert read[0][1] is read[0]


def test_a_pickle_whose_memo_has_gaps_is_read() -> None:
    # Numbers of objects begin at 1 in what Python 2 wrote.
    read = read_pickle(b"\x80\x02]q\x01(h\x01K\x05e.", {}, "it")
    assert read[0] is read
    assert read[1] == 5


@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_of_the_table_become_records(protocol: int) -> None:
    read = read_pickle(pickle.dumps(Thing(7), protocol), _TABLE, "it")
    assert type(read) is Record
    assert (read.kind, read.state) == ("Thing", {"number": 7})


def test_an_ordered_dict_keeps_its_order_and_attributes() -> None:
    given: Any = collections.OrderedDict(b=1, a=2)
    given.extra = 5
    read = read_pickle(pickle.dumps(given, 2), _TABLE, "it")
    assert list(read.items()) == [("b", 1), ("a", 2)]
    assert read.state == {"extra": 5}


def test_persistent_ids_are_given_to_the_caller() -> None:
    class _Pickler(pickle.Pickler):
        def persistent_id(self, thing: Any) -> Any:
            return ("storage", 3) if isinstance(thing, Thing) else None

    for protocol in (1, 4):
        buffer = io.BytesIO()
        _Pickler(buffer, protocol).dump([Thing()])
        assert read_pickle(buffer.getvalue(), {}, "it", lambda key: key[1]) == [3]
    with pytest.raises(CorruptCheckpointError, match="outside of the pickle"):
        read_pickle(buffer.getvalue(), {}, "it")


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_runs_and_what_was_asked_for_is_named(tmp_path: Any, protocol: int) -> None:
    mark = tmp_path / "made"
    data = pickle.dumps({"a": [_Runs(str(mark))]}, protocol)
    with pytest.raises(UnsafeValueError, match=r"posix\.mkdir.*Nothing was run"):
        read_pickle(data, _TABLE, "it")
    pickle.loads(data)
    assert mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.",
        b"cos\nsystem\n(S'id'\ntR.",
        b"(S'id'\nios\nsystem\n.",
        b"(cos\nsystem\nS'id'\no.",
        b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85\x81.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93)}\x92.",
        b"\x80\x02\x82\x01.",
        b"\x80\x05\x97.",
        # Attributes of what the table has are not looked up either.
        b"\x80\x04\x8c\x08a.module\x8c\x0eThing.__init__\x93.",
    ],
)
def test_no_way_to_ask_for_code_is_followed(data: bytes) -> None:
    with pytest.raises((UnsafeValueError, CorruptCheckpointError)):
        read_pickle(data, _TABLE, "it")


@pytest.mark.parametrize(
    ("data", "table"),
    [
        (b"\x80\x02K\x05)R.", {}),
        (b"\x80\x02X\x01\x00\x00\x00a)\x81.", {}),
        (b"\x80\x02]}b.", {}),
        (b"\x80\x02}K\x01a.", {}),
        (b"\x80\x02](K\x01K\x02u.", {}),
        (b"\x80\x02]K\x01K\x02s.", {}),
        (b"\x80\x02}](K\x01u.", {}),
        (b"\x80\x02}]K\x01s.", {}),
        (b"\x80\x02}}K\x01s.", {}),
        (b"\x80\x04\x8f(]\x90.", {}),
        (b"\x80\x04(]\x91.", {}),
        (b"\x80\x02ca.module\nThing\nK\x01R.", _TABLE),
        (b"\x80\x02ca.module\nThing\n)}K\x01K\x02s\x92.", _TABLE),
        (b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.", _TABLE),
    ],
)
def test_instructions_on_the_wrong_things_are_errors(data: bytes, table: Any) -> None:
    with pytest.raises((CorruptCheckpointError, UnsafeValueError), match=r"[Nn]othing was run"):
        read_pickle(data, table, "it")


def test_every_cut_and_most_damage_is_a_clear_error() -> None:
    whole = pickle.dumps({"a": [1.5, "b" * 300, (1, 2)], "c": Thing(2**80)}, 4)
    assert read_pickle(whole, _TABLE, "it")["a"][0] == 1.5
    for end in range(len(whole)):
        with pytest.raises(CorruptCheckpointError, match=r"^it is"):
            read_pickle(whole[:end], _TABLE, "it")
    for at in range(len(whole)):
        for value in (0, 0x28, 0x52, 0x68, 0x75, 0x81, 0x94, 0xFF):
            data = whole[:at] + bytes([value]) + whole[at + 1 :]
            with contextlib.suppress(CheckpointException):
                read_pickle(data, _TABLE, "it")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x02\x8b" + struct.pack("<I", 1 << 31) + b"x.",
        b"\x80\x02X" + struct.pack("<I", 1 << 31) + b"x.",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
        b"\x80\x02Nr" + struct.pack("<I", 0xFFFFFFFF) + b".",
        b"Np999999999999\n.",
        b"Nj\xff\xff\xff\xff.",
        b"L" + b"9" * 100_000 + b"L\n.",
        b"I" + b"9" * 100_000 + b"\n.",
        b"\x80\x09N.",
        b"",
        b".",
        b"NN.",
        b"(N.",
        b"t.",
        b"g-1\n.",
    ],
)
def test_lengths_and_numbers_are_bounded_by_the_input(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^it .*Nothing was run"):
        read_pickle(data, {}, "it")


def test_nesting_and_doubling_cost_no_more_than_their_bytes() -> None:
    deep = b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."
    assert len(read_pickle(deep, {}, "it")) == 1
    # 2**60 elements, if each were made anew.
    doubled = b"\x80\x02]q\x000" + b"".join(
        b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) + b"0" for i in range(60)
    )
    read = read_pickle(doubled + b"h\x3c.", {}, "it")
    assert read[0] is read[1]


def test_keys_that_would_take_long_to_hash_are_refused() -> None:
    doubled = b")q\x000" + b"".join(
        b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) + b"0" for i in range(60)
    )
    begin = time.perf_counter()
    with pytest.raises(CorruptCheckpointError, match="nested tuple"):
        read_pickle(b"\x80\x02}" + doubled + b"h\x3cNs.", {}, "it")
    # The same within what a table makes, such as the description of a tensor; 2**18 of them.
    few = b")q\x000" + b"".join(
        b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) + b"0" for i in range(18)
    )
    with pytest.raises(CorruptCheckpointError, match="nested tuple"):
        read_pickle(
            b"\x80\x02}" + few + b"ca\npair\nh\x12h\x12\x86RNs.",
            {("a", "pair"): Maker(_Pair)},
            "it",
        )
    # Equal hashes: each key would be compared with all before.
    alike = {((1 << 61) - 1) * i: None for i in range(1 << 61, (1 << 61) + 5000)}
    with pytest.raises(CorruptCheckpointError, match="keys of unusual types"):
        read_pickle(pickle.dumps(alike), {}, "it")
    assert time.perf_counter() - begin < 5


def test_parts_are_not_copied_again_and_again() -> None:
    table = {("a", "copy"): Copier(lambda text: text.encode())}
    once = b"X" + struct.pack("<I", 100_000) + b"x" * 100_000 + b"q\x000"
    copy = b"ca\ncopy\nh\x00\x85R0"
    assert read_pickle(b"\x80\x02" + once + 2 * copy + b"N.", table, "it") is None
    with pytest.raises(CorruptCheckpointError, match="again and again"):
        read_pickle(b"\x80\x02" + once + 1000 * copy + b"N.", table, "it")


def test_objects_and_sizes_are_the_same_read_fast_or_slowly() -> None:
    """What stands in metadata of torch is read by several instructions at once."""
    table = {**_TABLE, ("a", "size"): Maker(lambda numbers: numbers)}
    names = b"\x8c\x01a\x8c\x04size\x93\x940"
    size = b"h\x00K\x01K\x02\x86\x94\x85\x94R\x94"
    fields = b"\x8c\x05sizes" + size + b"\x8c\x05again" + b"h\x03"
    thing = b"\x8c\x08a.module\x8c\x05Thing\x93)\x81\x94}\x94("
    fast = read_pickle(b"\x80\x04" + names + thing + fields + b"ub.", table, "it")
    slow = names + thing + fields
    for together in (b"\x94\x85\x94R\x94", b"\x81\x94}\x94("):
        # Something without an effect in between.
        slow = slow.replace(together, together[:1] + b"N0" + together[1:])
    apart = read_pickle(b"\x80\x04" + slow + b"uN0b.", table, "it")
    assert (fast.kind, fast.state) == (apart.kind, apart.state)
    assert fast.state == {"sizes": (1, 2), "again": (1, 2)}


def test_unknown_objects_can_be_kept_closed() -> None:
    given = {"good": 1, "bad": [_Runs("x")], "worse": Thing()}
    read = read_pickle(pickle.dumps(given), {}, "it", keep_unknown=True)
    assert read["good"] == 1
    assert type(read["bad"][0]) is Unknown
    assert read["bad"][0].name.endswith(".mkdir")
    assert type(read["worse"]) is Unknown


def test_every_instruction_of_the_protocol_is_either_read_or_refused() -> None:
    for instruction in pickletools.opcodes:
        with pytest.raises(CheckpointException):
            read_pickle(instruction.code.encode("latin-1"), {}, "it")

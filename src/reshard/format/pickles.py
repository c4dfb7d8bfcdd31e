"""Pickles as data: what they describe is built, and nothing in them is run.

A pickle is a program for a small stack machine. This one has the instructions that make data,
and knows no objects but those of a table that the caller gives. It never imports anything,
looks up no attributes, and calls no functions but those of the table. What it makes is
bounded by the size of its input.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

from reshard.api import CheckpointException, CorruptCheckpointError, UnsafeValueError


class Maker:
    """A function of the table: the pickle may ask for what it makes of some arguments."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


class Copier(Maker):
    """A function that copies its arguments, which a pickle may ask for again and again."""

    __slots__ = ()


class Record:
    """An object of a class that the table knows: which one, and its attributes.

    What the object was made from is not kept.
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: str, *args: Any) -> None:
        self.kind = kind
        self.state: Any = None

    def __repr__(self) -> str:
        # Not what is in it, which may be nested without end.
        return f"<{self.kind}>"


class Ordered(dict[Any, Any]):
    """An OrderedDict. Attributes that it had are in `state`."""

    state: Any = None


class Unknown:
    """Something that the table does not know, or that was made of it; it stays closed."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}, not loaded>"


Table: TypeAlias = Mapping[tuple[str, str], Any]
"""What names in a pickle stand for: a `Maker`, or the thing itself.

What a maker makes takes no more memory than a small object; otherwise it is a `Copier`.
"""


def maker_of(kind: str) -> Maker:
    """Makes records of a class."""
    return Maker(partial(Record, kind))


def read_pickle(
    data: bytes,
    table: Table,
    where: str,
    persistent: Callable[[Any], Any] | None = None,
    keep_unknown: bool = False,
) -> Any:
    """What a pickle describes, with the names of `table` only.

    Other names are an `UnsafeValueError`, or with `keep_unknown` an `Unknown` in their place.
    `persistent` gives the objects that are kept outside of the pickle, by their ids.
    """
    machine = _Machine(data, table, where, persistent, keep_unknown)
    try:
        return machine.run()
    except CheckpointException:
        raise
    except (
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        struct.error,
    ) as error:
        found = "is cut short" if machine.is_at_end else f"is malformed near byte {machine.pos}"
        raise CorruptCheckpointError(
            f"{where} {found}: it is not a pickle that can be read ({type(error).__name__}: "
            f"{error}). Nothing was run. Load another checkpoint"
        ) from error


_EMPTY: Any = object()
"""A place of the memo that nothing was put into."""
_NEW_WITH_FIELDS, _CALL_ON_TUPLE = b"\x81\x94}\x94(", b"\x94\x85\x94R\x94"
"""What objects and sizes are made by, in metadata of torch; together they are read faster."""
_PLAIN_KEYS = frozenset({str, bytes, bool, type(None), Record, Maker, Copier})
"""Types whose hashes cannot be chosen by whoever wrote the pickle."""
_SMALL = 1 << 60
_MOST_ODD_KEYS, _MOST_PARTS = 4096, 64
_MOST_DIGITS = 4300
_SIZED = frozenset({str, bytes, bytearray, list, tuple, dict, set, frozenset})
_COPIED_AT_LEAST = 1 << 12
_NEWEST_PROTOCOL = 5


class _Machine:
    """Runs one pickle. Frequent instructions are in `run`, the others in methods."""

    def __init__(
        self,
        data: bytes,
        table: Table,
        where: str,
        persistent: Callable[[Any], Any] | None,
        keep_unknown: bool,
    ) -> None:
        self.data = bytes(data)
        self.pos = 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        """The stacks below each mark."""
        self.memo: list[Any] = []
        self._table = table
        self._where = where
        self._persistent = persistent
        self._keep_unknown = keep_unknown
        self._odd_keys = 0
        self._copied = 0

    @property
    def is_at_end(self) -> bool:
        return self.pos >= len(self.data)

    def run(self) -> Any:
        data, stack, outer, memo = self.data, self.stack, self.outer, self.memo
        remember = memo.append
        others = _INSTRUCTIONS
        from_bytes = int.from_bytes
        pos = 0
        try:
            while True:
                op = data[pos]
                pos += 1
                if op == 0x68:  # BINGET
                    stack.append(memo[data[pos]])
                    pos += 1
                elif op == 0x6A:  # LONG_BINGET
                    stack.append(memo[from_bytes(data[pos : pos + 4], "little")])
                    pos += 4
                elif op == 0x4D:  # BININT2
                    stack.append(data[pos] | data[pos + 1] << 8)
                    pos += 2
                elif op == 0x4B:  # BININT1
                    stack.append(data[pos])
                    pos += 1
                elif op == 0x4A:  # BININT
                    stack.append(from_bytes(data[pos : pos + 4], "little", signed=True))
                    pos += 4
                elif op == 0x86:  # TUPLE2
                    second = stack.pop()
                    stack[-1] = (stack[-1], second)
                    if data[pos : pos + 5] == _CALL_ON_TUPLE and type(stack[-2]) is Maker:
                        # MEMOIZE, TUPLE1, MEMOIZE, REDUCE, MEMOIZE: a torch.Size.
                        pos += 5
                        remember(stack[-1])
                        args = (stack.pop(),)
                        remember(args)
                        stack[-1] = made = stack[-1].make(*args)
                        remember(made)
                elif op == 0x29:  # EMPTY_TUPLE
                    if data[pos : pos + 5] == _NEW_WITH_FIELDS and type(stack[-1]) is Maker:
                        # NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK: the start of an object.
                        pos += 5
                        stack[-1] = made = stack[-1].make()
                        remember(made)
                        fields: dict[Any, Any] = {}
                        stack.append(fields)
                        remember(fields)
                        outer.append(stack)
                        stack = []
                    else:
                        stack.append(())
                elif op == 0x75:  # SETITEMS
                    items = stack
                    stack = outer.pop()
                    target = stack[-1]
                    if type(target) is not dict or len(items) > 8 or len(items) % 2:
                        self.put(target, items)
                    else:
                        pairs = iter(items)
                        for key in pairs:
                            if type(key) is not str:
                                self.check_keys((key,))
                            target[key] = next(pairs)
                    if data[pos] == 0x62 and len(stack) > 1 and type(stack[-2]) is Record:
                        # BUILD
                        pos += 1
                        stack.pop()
                        stack[-1].state = target
                elif op == 0x94:  # MEMOIZE
                    remember(stack[-1])
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                elif op == 0x52 or op == 0x81:  # REDUCE, NEWOBJ
                    args = stack.pop()
                    maker = stack[-1]
                    if type(maker) is Maker and type(args) is tuple:
                        stack[-1] = maker.make(*args)
                    else:
                        stack[-1] = self.call(maker, args)
                elif op == 0x28:  # MARK
                    outer.append(stack)
                    stack = []
                elif op == 0x7D:  # EMPTY_DICT
                    stack.append({})
                elif op == 0x62:  # BUILD
                    state = stack.pop()
                    if type(stack[-1]) is Record:
                        stack[-1].state = state
                    else:
                        self.build(stack[-1], state)
                elif op == 0x8C:  # SHORT_BINUNICODE
                    end = pos + 1 + data[pos]
                    stack.append(str(data[pos + 1 : end], "utf-8", "surrogatepass"))
                    pos = end
                elif op == 0x71:  # BINPUT
                    index = data[pos]
                    pos += 1
                    if index == len(memo):
                        remember(stack[-1])
                    else:
                        self.remember_at(index, stack[-1])
                elif op == 0x58:  # BINUNICODE
                    begin = pos + 4
                    pos = begin + from_bytes(data[pos:begin], "little")
                    if pos > len(data):
                        raise IndexError("a text reaches beyond the end")
                    stack.append(str(data[begin:pos], "utf-8", "surrogatepass"))
                elif op == 0x2E:  # STOP
                    if outer or len(stack) != 1:
                        raise ValueError("it ends before everything is put together")
                    return stack[0]
                else:
                    self.pos, self.stack = pos, stack
                    others[op](self)
                    pos, stack = self.pos, self.stack
        finally:
            self.pos = pos

    # What instructions act on: nothing but data, and what the table knows.

    def find(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise TypeError("it asks for something that has no name")
        found = self._table.get((module, name), _EMPTY)
        if found is not _EMPTY:
            return found
        asked = f"{module}.{name}"[:200]
        if self._keep_unknown:
            return Unknown(asked)
        raise UnsafeValueError(
            f"{self._where} asks for {asked}, which is not one of the data types that are read "
            "without running code. Nothing was run. Load it with what wrote it, if you trust "
            "where it comes from"
        )

    def call(self, maker: Any, args: Any) -> Any:
        if type(args) is not tuple:
            raise TypeError("it calls something with arguments that are not a tuple")
        if type(maker) is Maker:
            return maker.make(*args)
        if type(maker) is Copier:
            self._copied += sum(len(arg) for arg in args if type(arg) in _SIZED)
            if self._copied > 2 * len(self.data) + _COPIED_AT_LEAST:
                raise ValueError("it copies its own parts again and again")
            return maker.make(*args)
        if type(maker) is Unknown:
            return Unknown(maker.name)
        raise UnsafeValueError(
            f"{self._where} calls a {type(maker).__name__}, which is not one of the data types "
            "that are read without running code. Nothing was run. Load it with what wrote it, if "
            "you trust where it comes from"
        )

    def build(self, thing: Any, state: Any) -> None:
        if type(thing) in (Record, Ordered):
            thing.state = state
        elif type(thing) is not Unknown:
            raise TypeError(f"it gives attributes to a {type(thing).__name__}")

    def put(self, mapping: Any, items: Sequence[Any]) -> None:
        if type(mapping) is Unknown:
            return
        if type(mapping) not in (dict, Ordered):
            raise TypeError(f"it puts keys into a {type(mapping).__name__}")
        if len(items) % 2:
            raise ValueError("it has a key without a value")
        keys = items[::2]
        if not _PLAIN_KEYS.issuperset(map(type, keys)):
            self.check_keys(keys)
        mapping.update(zip(keys, items[1::2], strict=True))

    def extend(self, sequence: Any, items: Sequence[Any]) -> None:
        if type(sequence) is list:
            sequence.extend(items)
        elif type(sequence) is not Unknown:
            raise TypeError(f"it appends to a {type(sequence).__name__}")

    def check_keys(self, keys: Sequence[Any]) -> None:
        """Refuse keys that cannot be hashed, or whose hashes may be chosen to be slow."""
        for key in keys:
            kind = type(key)
            if kind in _PLAIN_KEYS or (kind is int and -_SMALL < key < _SMALL):
                continue
            self._odd_keys += 1
            if self._odd_keys > _MOST_ODD_KEYS:
                raise ValueError(f"more than {_MOST_ODD_KEYS} keys of unusual types")
            if isinstance(key, tuple) and len(key) <= _MOST_PARTS:
                # No nested tuples: their hash is computed for each path to a part.
                if any(isinstance(part, tuple | list | dict | set | frozenset) for part in key):
                    raise TypeError("a key that is a nested tuple")
                self.check_keys(key)
            elif isinstance(key, tuple | list | dict | set | bytearray | frozenset):
                raise TypeError(f"a key that is a {kind.__name__}")

    def remember_at(self, index: int, value: Any) -> None:
        memo = self.memo
        if not 0 <= index < len(self.data):
            raise ValueError(f"it remembers object number {index}, more than it can have")
        if index >= len(memo):
            memo.extend([_EMPTY] * (index + 1 - len(memo)))
        memo[index] = value

    def recall(self, index: int) -> Any:
        value = self.memo[index] if index >= 0 else _EMPTY
        if value is _EMPTY:
            raise ValueError(f"it refers to object number {index}, which it does not have")
        return value

    def by_id(self, key: Any) -> Any:
        if self._persistent is None:
            raise ValueError("it refers to objects outside of the pickle")
        return self._persistent(key)

    # Reading of arguments

    def take(self, nbytes: int) -> bytes:
        end = self.pos + nbytes
        if nbytes < 0 or end > len(self.data):
            self.pos = len(self.data)
            raise IndexError(f"{nbytes} bytes reach beyond the end")
        taken, self.pos = self.data[self.pos : end], end
        return taken

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            self.pos = len(self.data)
            raise IndexError("a line without an end")
        taken, self.pos = self.data[self.pos : end], end + 1
        return taken

    def decimal(self) -> int:
        digits = self.line().removesuffix(b"L")
        if len(digits) > _MOST_DIGITS:
            raise ValueError(f"a number of {len(digits)} digits")
        return int(digits)

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items


def _refuse(machine: _Machine) -> NoReturn:
    machine.pos -= 1
    raise ValueError(f"an instruction that data does not need: {machine.data[machine.pos]:#04x}")


def _check_protocol(machine: _Machine) -> None:
    protocol = machine.number(1)
    if protocol > _NEWEST_PROTOCOL:
        raise ValueError(f"version {protocol} of the protocol")


def _skip_frame(machine: _Machine) -> None:
    length = machine.number(8)
    if length > len(machine.data) - machine.pos:
        machine.pos = len(machine.data)
        raise IndexError(f"a frame of {length} bytes")


def _pop(machine: _Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _push(read: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def push(machine: _Machine) -> None:
        # Evaluated first: it may replace the stack.
        value = read(machine)
        machine.stack.append(value)

    return push


def _text_integer(machine: _Machine) -> int | bool:
    line = machine.line()
    if line in (b"00", b"01"):
        return line == b"01"
    if len(line) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(line)} digits")
    return int(line)


def _quoted(machine: _Machine) -> str:
    line = machine.line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise ValueError("a text without quotes")
    unescaped, _ = codecs.escape_decode(line[1:-1])
    return str(unescaped, "utf-8")


def _utf8(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _tuple3(machine: _Machine) -> tuple[Any, ...]:
    last = machine.stack.pop()
    middle = machine.stack.pop()
    return machine.stack.pop(), middle, last


def _dict(machine: _Machine) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    machine.put(made, machine.pop_mark())
    return made


def _frozenset(machine: _Machine) -> frozenset[Any]:
    items = machine.pop_mark()
    machine.check_keys(items)
    return frozenset(items)


def _stack_global(machine: _Machine) -> Any:
    name = machine.stack.pop()
    return machine.find(machine.stack.pop(), name)


def _line_global(machine: _Machine) -> Any:
    module = _utf8(machine.line())
    return machine.find(module, _utf8(machine.line()))


def _new_with_keywords(machine: _Machine) -> Any:
    keywords, args = machine.stack.pop(), machine.stack.pop()
    maker = machine.stack.pop()
    if keywords != {} and type(maker) is not Unknown:
        raise TypeError("it makes an object from keyword arguments")
    return machine.call(maker, args)


def _instance(machine: _Machine) -> Any:
    maker = _line_global(machine)
    return machine.call(maker, tuple(machine.pop_mark()))


def _object(machine: _Machine) -> Any:
    maker, *args = machine.pop_mark()
    return machine.call(maker, tuple(args))


def _append(machine: _Machine) -> None:
    item = machine.stack.pop()
    machine.extend(machine.stack[-1], (item,))


def _append_many(machine: _Machine) -> None:
    items = machine.pop_mark()
    machine.extend(machine.stack[-1], items)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.put(machine.stack[-1], (key, value))


def _add_many(machine: _Machine) -> None:
    items = machine.pop_mark()
    into = machine.stack[-1]
    if type(into) is Unknown:
        return
    if type(into) is not set:
        raise TypeError(f"it adds elements to a {type(into).__name__}")
    machine.check_keys(items)
    into.update(items)


def _put(index: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    return lambda machine: machine.remember_at(index(machine), machine.stack[-1])


def _long(machine: _Machine, nbytes: int) -> int:
    return int.from_bytes(machine.take(nbytes), "little", signed=True)


_NAMED: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _check_protocol,
    b"\x95": _skip_frame,
    b"0": _pop,
    b"1": lambda m: (m.pop_mark(), None)[1],
    b"2": lambda m: m.stack.append(m.stack[-1]),
    b"N": lambda m: m.stack.append(None),
    b"\x88": lambda m: m.stack.append(True),
    b"\x89": lambda m: m.stack.append(False),
    b"I": _push(_text_integer),
    b"L": _push(_Machine.decimal),
    b"\x8a": _push(lambda m: _long(m, m.number(1))),
    b"\x8b": _push(lambda m: _long(m, m.number(4))),
    b"F": _push(lambda m: float(m.line())),
    b"G": _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    b"S": _push(_quoted),
    b"T": _push(lambda m: str(m.take(m.number(4)), "utf-8")),
    b"U": _push(lambda m: str(m.take(m.number(1)), "utf-8")),
    b"V": _push(lambda m: str(m.line(), "raw-unicode-escape")),
    b"\x8d": _push(lambda m: _utf8(m.take(m.number(8)))),
    b"B": _push(lambda m: m.take(m.number(4))),
    b"C": _push(lambda m: m.take(m.number(1))),
    b"\x8e": _push(lambda m: m.take(m.number(8))),
    b"\x96": _push(lambda m: bytearray(m.take(m.number(8)))),
    b"]": lambda m: m.stack.append([]),
    b"l": _push(lambda m: m.pop_mark()),
    b"a": _append,
    b"e": _append_many,
    b"t": _push(lambda m: tuple(m.pop_mark())),
    b"\x87": _push(_tuple3),
    b"d": _push(_dict),
    b"s": _set_item,
    b"\x8f": lambda m: m.stack.append(set()),
    b"\x90": _add_many,
    b"\x91": _push(_frozenset),
    b"g": _push(lambda m: m.recall(m.decimal())),
    b"p": _put(_Machine.decimal),
    b"r": _put(lambda m: m.number(4)),
    b"c": _push(_line_global),
    b"\x93": _push(_stack_global),
    b"\x92": _push(_new_with_keywords),
    b"i": _push(_instance),
    b"o": _push(_object),
    b"P": _push(lambda m: m.by_id(_utf8(m.line()))),
    b"Q": _push(lambda m: m.by_id(m.stack.pop())),
}
_INSTRUCTIONS: list[Callable[[_Machine], None]] = [
    _NAMED.get(bytes([code]), _refuse) for code in range(256)
]
"""By code. Missing are extension codes, and buffers outside of the pickle."""

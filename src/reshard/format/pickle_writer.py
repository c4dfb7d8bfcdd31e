"""Writing pickles opcode by opcode, with classes by name: they need not be there.

`pickle` itself looks each class up under its name and refuses if that is another object, as it is
for those of `torch.distributed.checkpoint` under `reshard.patch()`.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any

_PROTOCOL = 3
"""The newest one without frames, so that a pickle can be a part of another."""
_TUPLES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)


class PickleWriter:
    """One pickle. Each method appends what pushes an object, or puts pushed ones together."""

    def __init__(self) -> None:
        self._parts = [pickle.PROTO + bytes([_PROTOCOL])]
        self._memo: dict[Any, bytes] = {}
        self._memo_begin = 0

    def finish(self) -> bytes:
        """The pickle of the one object that is left."""
        return b"".join([*self._parts, pickle.STOP])

    # Plain objects

    def text(self, value: str, once: bool = False) -> None:
        """A text. It is stored the first time only, unless it is known to be there `once`."""
        if value in self._memo:
            self._parts.append(self._memo[value])
            return
        encoded = value.encode("utf-8", "surrogatepass")
        self._parts.append(pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded)
        if not once:
            self._remember(value)

    def integer(self, value: int) -> None:
        self._parts.append(_integer(value))

    def boolean(self, value: bool) -> None:
        self._parts.append(pickle.NEWTRUE if value else pickle.NEWFALSE)

    def none(self) -> None:
        self._parts.append(pickle.NONE)

    def integers(self, values: Sequence[int]) -> None:
        """A tuple of integers."""
        ends_short = len(values) < len(_TUPLES)
        self._parts += [
            b"" if ends_short else pickle.MARK,
            *map(_integer, values),
            _TUPLES[len(values)] if ends_short else pickle.TUPLE,
        ]

    def keep(self, key: Any, value: Any) -> None:
        """Make any object, by `pickle` itself, to be recalled later. Comes before all else."""
        if self._memo:
            raise ValueError("the memo of the pickle is in use")
        made = io.BytesIO()
        pickler = pickle.Pickler(made, _PROTOCOL)
        pickler.dump(value)
        self._memo_begin = len(pickler.memo.copy())
        self._parts.append(made.getvalue()[2:-1])
        self._remember(key)
        self._parts.append(pickle.POP)

    def recall(self, key: Any) -> None:
        self._parts.append(self._memo[key])

    # What consists of others

    def begin_tuple(self) -> None:
        self._parts.append(pickle.MARK)

    def end_tuple(self) -> None:
        self._parts.append(pickle.TUPLE)

    def begin_list(self) -> None:
        self._parts.append(pickle.EMPTY_LIST + pickle.MARK)

    def end_list(self) -> None:
        self._parts.append(pickle.APPENDS)

    def begin_dict(self) -> None:
        """Keys and values follow."""
        self._parts.append(pickle.EMPTY_DICT + pickle.MARK)

    def end_dict(self) -> None:
        self._parts.append(pickle.SETITEMS)

    # What is found by name

    def name(self, module: str, name: str) -> None:
        """A class, function or another thing that can be imported."""
        key = (module, name)
        if key in self._memo:
            self._parts.append(self._memo[key])
            return
        self._parts.append(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        self._remember(key)

    def call(self) -> None:
        """The result of the function that was pushed last but one, for the tuple pushed last."""
        self._parts.append(pickle.REDUCE)

    def new(self, module: str, name: str) -> None:
        """An object of a class, made without arguments."""
        self.name(module, name)
        self._parts.append(pickle.EMPTY_TUPLE + pickle.NEWOBJ)

    def build(self) -> None:
        """Give the object that was pushed last but one the state that was pushed last."""
        self._parts.append(pickle.BUILD)

    def begin_object(self, module: str, name: str) -> None:
        """An object of a class. Its attributes follow, as keys and values."""
        self.new(module, name)
        self.begin_dict()

    def end_object(self) -> None:
        self._parts.append(pickle.SETITEMS + pickle.BUILD)

    def _remember(self, key: Any) -> None:
        number = self._memo_begin + len(self._memo)
        if number < 256:
            self._parts.append(pickle.BINPUT + bytes([number]))
            self._memo[key] = pickle.BINGET + bytes([number])
        else:
            self._parts.append(pickle.LONG_BINPUT + struct.pack("<I", number))
            self._memo[key] = pickle.LONG_BINGET + struct.pack("<I", number)


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return pickle.BININT1 + bytes([value])
    if 0 <= value < 1 << 16:
        return pickle.BININT2 + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return pickle.BININT + struct.pack("<i", value)
    return pickle.LONG1 + b"\x08" + struct.pack("<q", value)

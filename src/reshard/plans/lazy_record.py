"""Records whose fields are made on demand."""

from __future__ import annotations

import threading
from typing import Any

from reshard.engine.process_wide import ProcessWide


def lazy_fields(*names: str) -> Any:
    """A class decorator for a subclass of a dataclass with the given fields.

    The subclass has a method `make`, which returns an instance of the dataclass. When a
    field is first looked at, the record takes over the fields of that instance and becomes
    a plain one: for ==, repr, pickle and dataclasses.replace.
    """

    def decorate(cls: Any) -> Any:
        for name in names:
            setattr(cls, name, _field(name))
        cls.__new__ = _new
        cls.__eq__ = _eq
        cls.__hash__ = None
        for name, method in (("__repr__", _repr), ("__reduce_ex__", _reduce_ex)):
            if name not in vars(cls):
                setattr(cls, name, method)
        return cls

    return decorate


def become_plain(record: Any) -> None:
    """Make the fields of a lazy record now, unless another thread has."""
    with _making():
        if not hasattr(type(record), "make"):
            return
        own, made = list(vars(record)), record.make()
        vars(record).update(vars(made))
        record.__class__ = type(made)
        for name in own:
            del vars(record)[name]


_making = ProcessWide(threading.RLock)


def _new(cls: Any, *args: Any, **fields: Any) -> Any:
    # Fields by name come from dataclasses.replace, if it replaces all of them.
    return cls.__base__(**fields) if fields else object.__new__(cls)


def _field(name: str) -> Any:
    def get(self: Any) -> Any:
        become_plain(self)
        return getattr(self, name)

    def put(self: Any, value: Any) -> None:
        become_plain(self)
        setattr(self, name, value)

    return property(get, put)


def _eq(self: Any, other: object) -> Any:
    become_plain(self)
    return self == other


def _repr(self: Any) -> str:
    become_plain(self)
    return repr(self)


def _reduce_ex(self: Any, protocol: Any) -> Any:
    become_plain(self)
    return self.__reduce_ex__(protocol)

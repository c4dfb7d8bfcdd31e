"""Records whose fields are made on demand."""

from __future__ import annotations

from typing import Any


def lazy_fields(*names: str) -> Any:
    """A class decorator for a subclass of a dataclass with the given fields.

    The subclass has a method `make`, which returns an instance of the dataclass. When a
    field is first looked at, the record takes over the fields of that instance and becomes
    a plain one: for ==, repr, pickle and dataclasses.replace.
    """

    def decorate(cls: Any) -> Any:
        for name in names:
            setattr(cls, name, _field(name))
        cls.__eq__ = _eq
        cls.__hash__ = None
        for name, method in (("__repr__", _repr), ("__reduce_ex__", _reduce_ex)):
            if name not in vars(cls):
                setattr(cls, name, method)
        return cls

    return decorate


def become_plain(record: Any) -> None:
    """Make the fields of a lazy record now."""
    made, own = record.make(), list(vars(record))
    # In this order, so that another thread that looks at the same time finds it whole.
    vars(record).update(vars(made))
    record.__class__ = type(made)
    for name in own:
        vars(record).pop(name, None)


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

"""A list that makes its elements from columns on demand."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from typing import Any, Generic, SupportsIndex, TypeVar, overload

T = TypeVar("T")

_MOST_SHOWN = 10
"""How many elements a repr shows; a list may have a million."""


class LazyList(MutableSequence[T], Generic[T]):
    """Behaves like a list; costs a Python object per element only for those looked at.

    An element that was handed out may be changed in place by its user (a planner that
    rewrites the dtype of each item, say). So the elements that were handed out are
    kept, and count: a subclass must not go back to its columns once `untouched` is
    false, but derive them anew from the elements.
    """

    def __init__(self) -> None:
        self._handed_out: dict[int, T] = {}
        self._elements: list[T] | None = None

    @abstractmethod
    def _column_length(self) -> int:
        """How many elements the columns describe."""

    @abstractmethod
    def _make_one(self, position: int) -> T:
        """The element at `position`, from the columns."""

    def _make_all(self) -> list[T]:
        """All elements, from the columns."""
        return [self._make_one(position) for position in range(self._column_length())]

    @property
    def untouched(self) -> bool:
        """Whether the columns still say everything."""
        return self._elements is None and not self._handed_out

    def _list(self) -> list[T]:
        if self._elements is None:
            elements = self._make_all()
            for position, element in self._handed_out.items():
                elements[position] = element
            self._elements = elements
            self._handed_out = {}
        return self._elements

    def __len__(self) -> int:
        return self._column_length() if self._elements is None else len(self._elements)

    def __iter__(self) -> Iterator[T]:
        return iter(self._list())

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> T | list[T]:
        if self._elements is not None or isinstance(index, slice):
            return self._list()[index]
        position = index.__index__()
        length = self._column_length()
        if not -length <= position < length:
            raise IndexError(f"index {position} is out of range for {length} elements")
        position %= length
        if position not in self._handed_out:
            self._handed_out[position] = self._make_one(position)
        return self._handed_out[position]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._list()[index] = value

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        del self._list()[index]

    def insert(self, index: SupportsIndex, value: T) -> None:
        self._list().insert(index, value)

    def sort(self, *, key: Callable[[T], Any] | None = None, reverse: bool = False) -> None:
        self._list().sort(key=key, reverse=reverse)

    def copy(self) -> list[T]:
        return list(self._list())

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self._list(), *other]

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self._list()]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyList):
            return bool(self._list() == other._list())
        if isinstance(other, list):
            return bool(self._list() == other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable, as a list is

    def __repr__(self) -> str:
        shown = [self.look_at(position) for position in range(min(len(self), _MOST_SHOWN))]
        rest = len(self) - len(shown)
        return f"{repr(shown)[:-1]}, ... and {rest} more]" if rest else repr(shown)

    def look_at(self, position: int) -> T:
        """An element for reading only. It is not kept, so the columns stay in charge."""
        if self._elements is not None:
            return self._elements[position]
        return self._handed_out.get(position) or self._make_one(position)

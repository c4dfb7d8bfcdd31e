"""The walk through nested containers that everything here is built on.

It does not recurse: state dicts may be nested deeper than Python's stack allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from reshard.api import StateDictError

PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types without anything inside, which most walks skip."""
_LEAF, _KEYED, _MARK = range(3)
_MOST_SPELLED = 32
_OPEN = object()


class _Frame:
    """A container on the stack of a walk, and the elements that were replaced so far."""

    __slots__ = ("changed", "container", "elements", "is_keyed", "key")

    def __init__(self, container: Any, elements: Iterable[tuple[Any, Any]], is_keyed: bool) -> None:
        self.container = container
        self.elements: Iterator[tuple[Any, Any]] = iter(elements)
        self.is_keyed = is_keyed
        self.key: Any = None
        self.changed: dict[Any, Any] = {}


class Walk:
    """One pass over nested containers, depth first, which can replace what it finds.

    Containers are mappings, lists and tuples, and marks: values whose type has a method
    `__replace_value__`, around another value that has the same path. Subclasses override
    what they need. `path` is where the walk is; it changes as the walk goes on.
    """

    skipped: frozenset[type] = PLAIN
    """Types of values that `leaf` is not called for."""
    enters_once: bool | None = None
    """Whether a container that is met again has the same result; None: if nothing changed."""

    def __init__(self) -> None:
        self.path: list[Any] = []

    def enter(self, container: Any) -> Iterable[tuple[Any, Any]] | None:
        """Keys and elements to visit; None to make the container a leaf."""
        if isinstance(container, (dict, Mapping)):
            return container.items()
        if isinstance(container, list | tuple):
            return () if PLAIN.issuperset(map(type, container)) else enumerate(container)
        return ((None, container.value),)

    def leaf(self, value: Any) -> Any:
        """What to put in the place of a value."""
        return value

    def leave(self, container: Any, changed: dict[Any, Any]) -> Any:
        """What to put in the place of a container, given the new elements by key."""
        return replace_elements(container, changed) if changed else container

    def cycle(self, container: Any) -> Any:
        """What to put in the place of a container that is met inside of itself."""
        raise StateDictError(f"the container at {spell_path(self.path)} contains itself")

    def run(self, root: Any) -> Any:
        """Walk through `root`; returns what is to take its place."""
        path = self.path
        path.clear()
        leaf, skipped = self.leaf, self.skipped
        kinds: dict[type, int] = {}
        # Containers by identity, kept alive so that it stays theirs.
        seen: dict[int, tuple[Any, Any]] = {}
        frames = [_Frame(None, [(None, root)], False)]
        while True:
            frame = frames[-1]
            is_keyed, changed = frame.is_keyed, frame.changed
            for key, value in frame.elements:
                kind = type(value)
                if kind in skipped:
                    continue
                if is_keyed:
                    path[-1] = key
                form = kinds.get(kind)
                if form is None:
                    form = _form(value)
                    # A proxy has the class of what it stands for.
                    if value.__class__ is kind:
                        kinds[kind] = form
                if form == _LEAF:
                    new = leaf(value)
                elif (known := seen.get(id(value))) is not None:
                    new = self.cycle(value) if known[1] is _OPEN else known[1]
                elif (elements := self.enter(value)) is None:
                    new = leaf(value)
                else:
                    seen[id(value)] = value, _OPEN
                    frame.key = key
                    frames.append(_Frame(value, elements, form == _KEYED))
                    if form == _KEYED:
                        path.append(None)
                    break
                if new is not value:
                    changed[key] = new
            else:
                frames.pop()
                if not frames:
                    return changed.get(None, root)
                if is_keyed:
                    path.pop()
                container, above = frame.container, frames[-1]
                new = self.leave(container, changed)
                if self.enters_once or (self.enters_once is None and not changed):
                    seen[id(container)] = container, new
                else:
                    del seen[id(container)]
                # Also if it was changed in place: what it lies in may have to know.
                if changed or new is not container:
                    above.changed[above.key] = new


def _form(value: Any) -> int:
    if isinstance(value, Mapping | list | tuple):
        return _KEYED
    return _MARK if hasattr(type(value), "__replace_value__") else _LEAF


def replace_elements(container: Any, changed: Mapping[Any, Any]) -> Any:
    """A copy of a container with other elements; mappings become dicts."""
    if isinstance(container, Mapping):
        return {**container, **changed}
    if isinstance(container, list | tuple):
        elements = [*container]
        for place, value in changed.items():
            elements[place] = value
        return elements if isinstance(container, list) else tuple_like(container, elements)
    return container.__replace_value__(changed[None])


def put_elements(container: Any, changed: Mapping[Any, Any]) -> Any:
    """Put other elements into a container; returns a copy if it cannot be changed."""
    if not isinstance(container, MutableMapping | list):
        return replace_elements(container, changed)
    for key, value in changed.items():
        container[key] = value
    return container


def tuple_like(original: tuple[Any, ...], elements: list[Any]) -> tuple[Any, ...]:
    """A tuple of the type of `original`, with other elements."""
    if hasattr(original, "_fields"):
        return type(original)(*elements)
    return type(original)(elements)


def spell_path(path: Iterable[Any]) -> str:
    """A path as it is written in Python, shortened if it is long."""
    keys = list(path)
    text = "".join(f"[{key!r}]" for key in keys[:_MOST_SPELLED])
    return text if len(keys) <= _MOST_SPELLED else f"{text}..."

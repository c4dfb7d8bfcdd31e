"""Going through nested containers and putting other values in their place.

Without recursion, since state dicts may be nested deeper than Python's stack allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["replace_values", "tuple_like"]

Path = tuple[Any, ...]
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


def tuple_like(original: tuple[Any, ...], elements: list[Any]) -> tuple[Any, ...]:
    """A tuple of the type of `original`, with other elements."""
    if hasattr(original, "_fields"):
        return type(original)(*elements)
    return type(original)(elements)


class _Frame:
    """A container that is being gone through, and what its elements have become."""

    def __init__(self, container: Any) -> None:
        self.container = container
        self.elements: Iterator[tuple[Any, Any]] = iter(())
        if isinstance(container, Mapping):
            self.elements = iter(container.items())
        elif not _PLAIN.issuperset(map(type, container)):
            self.elements = enumerate(container)
        self.key: Any = None
        self.changed: dict[Any, Any] = {}


def replace_values(
    root: Any,
    change: Callable[[Path, Any], Any],
    combine: Callable[[Path, Any, dict[Any, Any]], Any],
) -> Any:
    """`root` with `change(path, value)` for each value that is no dict, list or tuple.

    A container of which an element changed becomes `combine(path, container, changed)`,
    where `changed` has the new elements by key or position; they may be the same objects,
    changed in place. Other containers are left alone.
    A container that contains itself is not entered again.
    """
    if not isinstance(root, Mapping | list | tuple):
        return change((), root)
    path: list[Any] = []
    frames = [_Frame(root)]
    # Containers known to have nothing to change: entering them once is enough.
    done: dict[int, Any] = {}
    inside = {id(root)}
    while True:
        frame = frames[-1]
        step = next(frame.elements, None)
        if step is not None:
            frame.key, value = step
            path.append(frame.key)
            if isinstance(value, Mapping | list | tuple):
                if id(value) not in done and id(value) not in inside:
                    inside.add(id(value))
                    frames.append(_Frame(value))
                    continue
            elif type(value) not in _PLAIN:
                new = change(tuple(path), value)
                if new is not value:
                    frame.changed[frame.key] = new
            path.pop()
            continue
        new = container = frame.container
        inside.discard(id(container))
        frames.pop()
        if frame.changed:
            new = combine(tuple(path), container, frame.changed)
            if frames:
                frames[-1].changed[frames[-1].key] = new
        else:
            done[id(container)] = container
        if not frames:
            return new
        path.pop()

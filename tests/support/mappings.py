"""Mappings that are not dicts."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any


class View(MutableMapping[str, Any]):
    """A mapping over a dict that somebody else owns."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.content[key] = value

    def __delitem__(self, key: str) -> None:
        del self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)

"""Loading under other names: the metadata of a checkpoint with the names of a state dict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

from reshard.metadata import STORAGE_TYPES, Metadata

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]


def renamed(metadata: Metadata, rename: Rename | None) -> Metadata:
    """Metadata with the names of the state dict; data stays under the stored names."""
    if rename is None:
        return metadata
    change = name_changer(rename)
    entries: dict[str, STORAGE_TYPES] = {}
    for name, entry in metadata.state_dict_metadata.items():
        new = change(name)
        if new in entries:
            raise ValueError(f"rename gives two keys of the checkpoint the name {new!r}")
        entries[new] = (
            entry if new == name else dataclasses.replace(entry, alias_of=entry.alias_of or name)
        )
    return dataclasses.replace(metadata, state_dict_metadata=entries)


def name_changer(rename: Rename) -> Callable[[str], str]:
    """What gives a stored name its new one."""
    return rename if callable(rename) else _prefix_rename(rename)


def _prefix_rename(rename: Mapping[str, str]) -> Callable[[str], str]:
    def change(name: str) -> str:
        parts = name.split(".")
        for depth in range(len(parts), -1, -1):
            prefix = ".".join(parts[:depth])
            if prefix in rename:
                new = rename[prefix]
                return ".".join([new, *parts[depth:]] if new else parts[depth:])
        return name

    return change

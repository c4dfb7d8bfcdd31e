"""Counting what becomes of manifests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from reshard import filesystem
from reshard.checkpoint import directory


@contextmanager
def counted_manifests() -> Iterator[dict[str, int]]:
    """How many manifests are encoded and decoded within the block."""
    counts = {"encoded": 0, "decoded": 0}

    def counted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counts[what] += 1
            return function(*args)

        return call

    encode, decode = filesystem.encode_manifest, directory.decode_manifest
    with (
        patch.object(filesystem, "encode_manifest", counted("encoded", encode)),
        patch.object(directory, "decode_manifest", counted("decoded", decode)),
    ):
        yield counts

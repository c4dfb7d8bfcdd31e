"""How names nest, or what a custom planner keeps: `planner_data` as bytes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from reshard.api import CorruptCheckpointError
from reshard.format.values import decode_value, encode_value, is_pickled
from reshard.tensors.paths import IntKey, PathMap, check_paths

logger = logging.getLogger(__name__)

_PATHS, _VALUE = b"N", b"V"


def pack_planner_data(data: Any) -> bytes:
    """The bytes that a manifest stores for `planner_data`."""
    if data is None:
        return b""
    if type(data) is PathMap and data.is_regular:
        return _PATHS + data.pack()
    encoded = encode_value(without_own_types(data))
    if is_pickled(encoded):
        logger.warning(
            "the planner_data of the checkpoint, a %s, can only be stored as a pickle, which a "
            "reader leaves closed unless it allows pickles",
            type(data).__name__,
        )
    return _VALUE + encoded


def without_own_types(data: Any) -> Any:
    """`data` with plain dicts and strings in place of our own types."""
    if isinstance(data, IntKey):
        return str(data)
    if type(data) in (dict, PathMap):
        return {without_own_types(k): without_own_types(v) for k, v in data.items()}
    if type(data) in (list, tuple):
        return type(data)(map(without_own_types, data))
    return data


def unpack_planner_data(data: bytes, where: str, allow_pickle: bool) -> Any:
    if not data:
        return None
    if data[:1] == _PATHS:
        try:
            paths = PathMap.unpack(data[1:])
            check_paths(paths)
            return paths
        except (ValueError, msgspec.DecodeError) as error:
            raise CorruptCheckpointError(f"{where} has damaged names: {error}") from error
    if is_pickled(data[1:]) and not allow_pickle:
        # Kept closed rather than refused: a load may not need it.
        return None
    return decode_value(data[1:], "planner_data", allow_pickle)


def merge_planner_data(parts: Sequence[bytes], where: str) -> bytes:
    """The paths of all parts. Custom planner_data: the first part wins."""
    if not all(part[:1] == _PATHS for part in parts):
        return parts[0]
    merged = PathMap()
    for part in parts:
        merged.add(unpack_planner_data(part, where, allow_pickle=False))
    return pack_planner_data(merged)

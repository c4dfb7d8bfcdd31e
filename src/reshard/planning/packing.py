"""Columns as bytes: how plans travel, and what their fingerprints are taken of.

Each column is stored in the narrowest integer type that holds it, or as a single number
where all rows are equal. Encoding is deterministic: equal columns give equal bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from reshard.planning.columns import Ints, Schema, WriteColumns

_WIDTHS = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<i8")
_RANGES = [(np.iinfo(width).min, np.iinfo(width).max) for width in _WIDTHS]
_CONSTANT = len(_WIDTHS)

Packed = tuple[int, Any]


def pack_array(array: npt.NDArray[Any]) -> list[Packed]:
    """One entry per column of a one- or two-dimensional array of integers."""
    columns = [array] if array.ndim == 1 else list(array.T)
    return [_pack_column(column) for column in columns]


def _pack_column(column: npt.NDArray[Any]) -> Packed:
    if not len(column):
        return _CONSTANT, 0
    low, high = int(column.min()), int(column.max())
    if low == high:
        return _CONSTANT, low
    code = next(i for i, (least, most) in enumerate(_RANGES) if least <= low and high <= most)
    return code, column.astype(_WIDTHS[code]).tobytes()


def unpack_array(packed: Sequence[Packed], rows: int, one_dimensional: bool = False) -> Ints:
    """The array that `pack_array` packed, as int64."""
    array = np.empty((rows, len(packed)), dtype=np.int64)
    for column, (code, data) in enumerate(packed):
        array[:, column] = data if code == _CONSTANT else np.frombuffer(data, dtype=_WIDTHS[code])
    return array[:, 0] if one_dimensional else array


def pack_compressed(value: Any) -> bytes:
    """A value of lists, numbers and strings, compressed."""
    return zlib.compress(msgspec.msgpack.encode(value), 1)


def unpack_compressed(data: bytes) -> Any:
    return msgspec.msgpack.decode(zlib.decompress(data))


def pack_schema(schema: Schema) -> bytes:
    return pack_compressed(
        (
            schema.names,
            [
                pack_array(column)
                for column in (schema.kinds, schema.dtypes, schema.flags, schema.ndims)
            ],
            pack_array(schema.shapes),
        )
    )


def unpack_schema(data: bytes) -> Schema:
    names, codes, shapes = unpack_compressed(data)
    kinds, dtypes, flags, ndims = (
        unpack_array(column, len(names), one_dimensional=True).astype(np.uint8) for column in codes
    )
    return Schema(tuple(names), kinds, dtypes, flags, ndims, unpack_array(shapes, len(names)))


def pack_regions(columns: WriteColumns) -> bytes:
    """What a plan says beyond its schema: which regions, and where they go."""
    return msgspec.msgpack.encode(
        [
            pack_array(column)
            for column in (
                columns.offsets,
                columns.sizes,
                columns.hints,
                columns.nbytes,
                columns.aliases,
            )
        ]
    )


def unpack_regions(data: bytes, schema: Schema) -> WriteColumns:
    offsets, sizes, hints, nbytes, aliases = msgspec.msgpack.decode(data)
    rows = len(schema)
    return WriteColumns(
        schema,
        unpack_array(offsets, rows),
        unpack_array(sizes, rows),
        unpack_array(hints, rows, one_dimensional=True),
        unpack_array(nbytes, rows, one_dimensional=True),
        unpack_array(aliases, rows, one_dimensional=True),
    )

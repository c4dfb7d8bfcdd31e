"""One sortable integer for a point of one of many tensors."""

from __future__ import annotations

import numpy as np

from reshard.planning.columns import Ints

_LARGEST = float(1 << 62)


def rank_points(tensors: Ints, points: Ints, shapes: Ints) -> Ints:
    """Keys that order points by tensor and then by coordinates; equal iff both are.

    Coordinates lie between 0 and the extent, both included. Usually the key is the
    linear position of the point in all tensors laid end to end. Where that does not
    fit 63 bits (absurdly large shapes), it is the rank of the point after a sort.
    """
    extents = shapes + 1
    volumes = np.prod(extents, axis=1, dtype=np.float64)
    if volumes.sum() < _LARGEST:
        strides = np.ones_like(extents)
        np.cumprod(extents[:, :0:-1], axis=1, out=strides[:, -2::-1])
        bases = np.zeros(len(shapes), dtype=np.int64)
        np.cumsum(extents.prod(axis=1)[:-1], out=bases[1:])
        keys = bases[tensors]
        for dim in range(points.shape[1]):
            keys += points[:, dim] * strides[tensors, dim]
        return keys
    order = np.lexsort((*points.T[::-1], tensors))
    differs = np.zeros(len(order), dtype=np.int64)
    differs[1:] = (tensors[order][1:] != tensors[order][:-1]) | (
        points[order][1:] != points[order][:-1]
    ).any(axis=1)
    keys = np.empty(len(order), dtype=np.int64)
    keys[order] = np.cumsum(differs)
    return keys

"""Two regions of one tensor: whether they overlap, and where. For planners of users.

Plans of our own intersect all chunks of a tensor at once, as columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.metadata import ChunkStorageMetadata


def _check_box_overlap(box0: ChunkStorageMetadata, box1: ChunkStorageMetadata) -> bool:
    """Whether two regions have elements in common."""
    return all(
        max(begin0, begin1) < min(begin0 + size0, begin1 + size1)
        for begin0, size0, begin1, size1 in zip(
            box0.offsets, box0.sizes, box1.offsets, box1.sizes, strict=True
        )
    )


def _check_shard_metadata_pair_overlap(
    shard1: ChunkStorageMetadata, shard2: ChunkStorageMetadata
) -> bool:
    """The same, under the name that it has in `resharding`."""
    return _check_box_overlap(shard1, shard2)


def _check_box_bounds(outer_box_size: Sequence[int], inner_box: ChunkStorageMetadata) -> bool:
    """Whether a region lies within a tensor of the given shape."""
    return all(
        begin >= 0 and size >= 0 and begin + size <= extent
        for begin, size, extent in zip(
            inner_box.offsets, inner_box.sizes, outer_box_size, strict=True
        )
    )


def _shards_get_overlap_region_wrt_saved_tensor(
    saved_shard: ChunkStorageMetadata, current_shard: ChunkStorageMetadata
) -> list[tuple[int, int, int, int]]:
    """What two regions have in common.

    For each dimension: its number, where the common part begins in the saved and in the current
    shard, counted from their own beginnings, and its length. That is not positive if there is no
    common part.
    """
    common = []
    places = zip(
        saved_shard.offsets,
        saved_shard.sizes,
        current_shard.offsets,
        current_shard.sizes,
        strict=True,
    )
    for dim, (saved, saved_size, current, current_size) in enumerate(places):
        begin = max(saved, current)
        end = min(saved + saved_size, current + current_size)
        common.append((dim, begin - saved, begin - current, end - begin))
    return common

"""What two shards have in common, under the module name that DCP users import from."""

from reshard.plans.chunk_pairs import (
    _check_shard_metadata_pair_overlap,
    _shards_get_overlap_region_wrt_saved_tensor,
)

__all__ = ["_check_shard_metadata_pair_overlap", "_shards_get_overlap_region_wrt_saved_tensor"]

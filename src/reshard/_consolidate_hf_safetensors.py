"""Whole tensors from the files of a `HuggingFaceStorageWriter` with `save_distributed`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from reshard.convert.consolidation import files_by_name
from reshard.hf_storage import more_than_one
from reshard.operations.consolidation import consolidate_alone, consolidate_together
from reshard.operations.ranks import Ranks

__all__ = ["consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"]


def consolidate_safetensors_files(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
) -> None:
    """Put the regions of tensors in `input_dir` together to files of whole tensors, with an index.

    `fqn_to_index_mapping` says which file each tensor goes to, counted from 1; what it does not
    name is left out, and a name that is not there is a `MissingKeyError`. Called by one process,
    which needs memory for a few regions only. All files or none: an older model in `output_dir` is
    replaced when the new one is complete. More threads than one may be asked for;
    otherwise it is as many as there are cores, up to a few.
    """
    files = files_by_name(fqn_to_index_mapping)
    consolidate_alone(input_dir, output_dir, files, more_than_one(num_threads), is_all=True)


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """The same, with the files shared out to the ranks of `process_group`.

    Called by all of them. If one fails, all raise, and nothing is left behind.
    """
    ranks = Ranks(process_group)
    consolidate_together(
        input_dir, output_dir, fqn_to_index_mapping, more_than_one(num_threads), ranks
    )


def _consolidate_safetensors_files(
    input_dir: str,
    output_dir: str,
    fqn_to_file_mapping: dict[str, str],
    num_threads: int,
) -> None:
    """Some of the files, by name, without an index; others in `output_dir` stay as they are."""
    consolidate_alone(
        input_dir, output_dir, fqn_to_file_mapping, more_than_one(num_threads), is_all=False
    )


def _write_sub_tensor_to_file_optimized(
    full_tensor_mv: memoryview,
    sub_tensor_bytes: bytes,
    element_size: int,
    tensor_shape: Sequence[int],
    sub_tensor_offsets: Sequence[int],
    sub_tensor_shape: Sequence[int],
) -> None:
    """Copy the bytes of a region to their places in those of the whole tensor."""
    element = np.dtype((np.void, element_size))
    whole = np.frombuffer(full_tensor_mv, element).reshape(tuple(tensor_shape))
    part = np.frombuffer(sub_tensor_bytes, element).reshape(tuple(sub_tensor_shape))
    begins = zip(sub_tensor_offsets, sub_tensor_shape, strict=True)
    whole[tuple(slice(begin, begin + size) for begin, size in begins)] = part

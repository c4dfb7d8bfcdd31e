"""Stored checkpoints as wholes: convert one, make one whole, delete one, compare two."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from reshard.operations.comparison import Comparison, compare
from reshard.operations.conversion import ConversionSettings
from reshard.operations.conversion import convert as convert_checkpoint
from reshard.operations.ranks import Ranks
from reshard.operations.upkeep import delete as _delete
from reshard.operations.upkeep import make_whole

__all__ = ["Comparison", "convert", "delete", "materialise", "same"]


def materialise(
    checkpoint_id: str | os.PathLike[str],
    destination: str | os.PathLike[str] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> bool:
    """Make a checkpoint whole again: copy what it refers to in other checkpoints.

    In place, or as a new checkpoint at `destination`, where there must be none. Data is streamed
    and checked on the way. Atomic as a save is; readers see the checkpoint before or after.
    Returns whether there was anything to copy.
    """
    return make_whole(checkpoint_id, destination, storage_options)


def delete(
    checkpoint_id: str | os.PathLike[str],
    *,
    materialise: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Delete a checkpoint, unless another one refers to it.

    Looked at are all checkpoints in the same folder, those of the same name in folders beside it
    (`step-2/model` for `step-1/model`), and saves to them that are under way. With
    `materialise`, those that refer to it are made whole first; otherwise a `CheckpointInUseError`
    names them. What is not of a checkpoint stays; checkpoints of other formats, and links to
    checkpoints, are refused.
    """
    _delete(checkpoint_id, materialise, storage_options)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    format: Literal["reshard", "huggingface", "dcp", "torch"],
    *,
    keys: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str = (),
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    allow_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Write what a checkpoint holds in another format, or under other names.

    The source is any checkpoint that `load` reads: ours, one of DCP, a directory of safetensors
    files such as one of Hugging Face, or a single file of safetensors or of `torch.save`. Both may
    be URLs, with `storage_options` as for `load`. Formats:

    - `"reshard"`: a checkpoint of ours.
    - `"huggingface"`: safetensors files of at most `max_shard_size`, with an index if there are
      several. They hold tensors only. Of names that shared memory, the first is kept.
    - `"dcp"`: a checkpoint that `torch.distributed.checkpoint` loads.
    - `"torch"`: one file, as `torch.save` writes the nested state dict. One process writes it.

    `keys` chooses names, or what names begin with up to a dot; `exclude` leaves out those that
    match a pattern (`*` and `?` as in a shell). `rename` is as for `load`: `{"model": ""}` takes a
    prefix away. `dtype` is what floating-point tensors are converted to. Values that have to be
    decoded, since the formats keep them in different ways, need `allow_pickle` if they are stored
    as pickles.

    Data is streamed: memory does not depend on the size of the model, some hundreds of megabytes
    at most. Checksums that the source has are compared on the way. With a process group, all of
    its ranks call this and share the work. If anything fails, or is interrupted, nothing is left
    behind and what was at the destination before is still there. With `overwrite`, that is replaced
    when the new one is complete: a file, or a checkpoint of ours or of DCP with all of its files.
    Plain safetensors files are replaced by `"huggingface"`, and otherwise stay beside the new
    checkpoint. Ctrl-C is raised as `KeyboardInterrupt`.

    Raises `StateDictError` for names that collide, `PlanError` for other arguments that cannot be
    used, `UnsupportedFormatError` for what the format cannot hold, and `CheckpointExistsError` for
    a destination that is taken: before anything is written, and the same for every format.
    """
    settings = ConversionSettings(
        keys, exclude, rename, dtype, max_shard_size, overwrite, allow_pickle, storage_options
    )
    convert_checkpoint(source, destination, format, settings, Ranks(process_group, no_dist))


def same(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> Comparison:
    """Whether two checkpoints hold the same data, whatever their layouts.

    Only the manifests are read. Tensors that are cut in the same way on both sides are compared
    by the digests of their chunks, others by their fingerprints (`save(..., fingerprint=True)`),
    values by their checksums. The result is true if everything is there on both sides and equal,
    and names what is not.
    """
    return compare(first, second, storage_options)

"""Files with regions of tensors, which ranks wrote, put together to files with whole tensors."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reshard.api import CheckpointNotFoundError, CoverageError, MissingKeyError
from reshard.checkpoint.stored_tensors import StoredTensors
from reshard.convert.drafts import new_token
from reshard.convert.plain_saves import PlainLayout, is_shard_file
from reshard.convert.safetensors import Export, OutputFile, make_index
from reshard.convert.selection import Picked, Selection, pick_tensors
from reshard.coordination.channel import Channel
from reshard.coordination.exchange import TextExchange
from reshard.engine.reading import Verify
from reshard.foreign.safetensors import SUFFIX, read_files
from reshard.format.checks import is_plain_path
from reshard.format.tables import Manifest
from reshard.plans.mismatches import describe_missing
from reshard.stores.local import LocalStore
from reshard.stores.protocol import Store

logger = logging.getLogger(__name__)

Place = str | os.PathLike[str]


def files_by_name(numbers: Mapping[str, int]) -> dict[str, str]:
    """The file that each tensor goes to, as Hugging Face names files."""
    layout = PlainLayout(numbers, is_sharded=False)
    return {name: layout.file(name, None) for name in numbers}


def consolidate(
    source: Place,
    target: Place,
    file_of: Mapping[str, str],
    channel: Channel,
    threads: int = 0,
    is_all: bool = True,
) -> None:
    """Write each tensor to the file that `file_of` has for its name; all files or none.

    The files are shared out to the ranks of the channel. Unless they are all that there is to be
    at the target, there will be no index, and other files stay.
    """
    token = channel.exchange(
        TextExchange("open"), lambda: "", lambda texts: [new_token()] * len(texts)
    )
    plans: list[_Plan] = []

    def open_source() -> None:
        store = LocalStore(source)
        tensors = StoredTensors(store, _open(store), Verify.OFF)
        opened.callback(tensors.close)
        plans.append(_plan(tensors, file_of))

    with contextlib.ExitStack() as opened:
        channel.do_together("open", open_source)
        (plan,) = plans
        store, index = LocalStore(target), make_index(plan.files) if is_all else None
        export = Export(plan.source, store, plan.files, token, threads, keeps_older=not is_all)
        export.run(channel, plan.notes, index)


class _Plan(NamedTuple):
    """The files to write, the notes in them, and where their tensors come from."""

    source: StoredTensors
    files: Sequence[OutputFile]
    notes: Mapping[str, str]


def _open(store: Store) -> Manifest:
    paths = [key for key in store.list() if key.endswith(SUFFIX) and is_plain_path(key)]
    # Older results may lie beside what is to be put together.
    paths = [path for path in paths if is_shard_file(path)] or paths
    if not paths:
        raise CheckpointNotFoundError(
            f"there are no safetensors files at {store.location} to put together. Save with "
            "HuggingFaceStorageWriter(..., save_distributed=True) first"
        )
    return read_files(store, paths)


def _plan(source: StoredTensors, file_of: Mapping[str, str]) -> _Plan:
    stored = source.manifest.tensor_names
    missing = [name for name in file_of if name not in source.manifest.table.row_of]
    if missing:
        raise MissingKeyError(
            f"{describe_missing(missing, stored)}\nLeave names out of fqn_to_index_mapping that "
            f"are not in the files at {source.location}"
        )
    left_out = [name for name in stored if name not in file_of]
    if left_out:
        logger.info("%d tensors of %s are not wanted", len(left_out), source.location)
    # Of several names of one tensor, the one that it is stored under stays.
    aliases, rows = source.manifest.aliases, source.manifest.table.row_of
    names = sorted(file_of, key=lambda name: aliases[rows[name]] >= 0)
    picked, ties = pick_tensors(source, {name: name for name in names}, Selection())
    groups: dict[str, list[Picked]] = {}
    for tensor in picked:
        _check_whole(source, tensor.tensor)
        groups.setdefault(file_of[tensor.name], []).append(tensor)
    files = [OutputFile(name, group) for name, group in sorted(groups.items())]
    # Names that are left out, since others have the same tensor, as safetensors notes them.
    return _Plan(source, files, ties | {"format": "pt"})


def _check_whole(source: StoredTensors, tensor: int) -> None:
    """Refuse tensors that have gaps; chunks do not overlap, or they could not be opened."""
    m = source.manifest
    rows = source.rows(tensor)
    held = int(m.chunk_sizes[rows.start : rows.stop].prod(axis=1).sum())
    if held != math.prod(source.shape(tensor)):
        raise CoverageError(
            f"the files at {source.location} do not hold all of {m.tensor_names[tensor]!r}: "
            f"{held} elements of shape {list(source.shape(tensor))}. Are files of some ranks not "
            "there?"
        )

"""Loading: `load`, and reading without a template."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from reshard.coordination.store_channel import DEFAULT_TIMEOUT_SECONDS
from reshard.engine.reading import Verify
from reshard.logger import _dcp_method_logger
from reshard.operations.load import LoadSettings, load_now
from reshard.operations.load_report import LoadReport
from reshard.operations.ranks import Ranks
from reshard.operations.read import read_all_keys, read_keys, read_region
from reshard.operations.receipts import LoadReceipt
from reshard.operations.renaming import Rename
from reshard.operations.sharing import ReplicatedReads
from reshard.operations.targets import LoadSource, open_reader
from reshard.operations.user_calls import _api_bc_check
from reshard.planner import LoadPlanner
from reshard.stateful import Stateful as Stateful
from reshard.storage import StorageReader

__all__ = [
    "LoadReceipt",
    "LoadReport",
    "load",
    "load_state_dict",
    "read_state_dict",
    "read_tensor",
]


@_api_bc_check
@_dcp_method_logger(log_exceptions=True)
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    strict: bool | Literal["exact", "receipt"] = True,
    rename: Rename | None = None,
    exclude: Sequence[str] = (),
    verify: Literal["off", "chunks", "full", "fingerprint"] | None = None,
    allow_pickle: bool = False,
    assign: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    replicated_reads: ReplicatedReads = "auto",
    dtype: Literal["cast", "same"] = "cast",
    receipt: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> LoadReport:
    """Load a checkpoint into `state_dict`, in place, whatever mesh it was saved on.

    Called by all ranks of `process_group` (of the default group if there is one; without
    one, or with `no_dist`, this process loads on its own). Everything that can be wrong
    with the request is found on all ranks before the first byte changes. If any rank
    fails, every rank raises a `CheckpointException` with the reasons.

    `checkpoint_id` is a path, or a URL such as `s3://bucket/run/step-100`, whose store takes
    `storage_options` (see `ObjectStoreReader`) and otherwise the usual environment variables.
    `LoadReport.requests` says how many requests this rank made to it.

    Tensors are filled where they are, other values are replaced, `Stateful` values are
    given their state. `strict=False` leaves keys that the checkpoint does not have as
    they are; `strict="exact"` also refuses keys of the checkpoint that nobody asked for.
    Keys that match a pattern of `exclude` (`*` and `?` as in a shell) stay as they are.
    `rename` maps names of the checkpoint, or their dotted prefixes, to names of the state
    dict: `{"model": ""}` takes a prefix away, `{"": "model"}` puts one before all names.
    `verify` says which chunks are checked against their checksums: those read whole
    (`"chunks"`, the default), all that are touched (`"full"`), or none (`"off"`). With
    `"fingerprint"`, which needs a checkpoint saved with `fingerprint=True`, no chunk is checked
    while it is read; instead all ranks together compare what is in memory afterwards with what
    was saved, whatever the layouts. A difference is a `CorruptCheckpointError` that names the
    tensors, whose memory then holds what was loaded. `LoadReport.verified` says for how many
    tensors it held: not for those that were cast, loaded in part, or filled by code of a custom
    planner. A rank that does not answer for `timeout_seconds` counts as failed; 0 means no limit.

    With `assign`, tensors are not filled but replaced, which is for templates on the meta
    device and for those that nobody needs any more. The new tensors are views of the files
    where possible, as `read_state_dict` describes for `mmap`: on the CPU or the meta device,
    with the stored dtype, in one piece in one file. Others are read. Containers stay the same
    objects, and tensors keep `requires_grad`. Modules, and others whose `load_state_dict` takes
    `assign`, are given their state with `assign=True`; other `Stateful` values are filled in
    place. Chunks that are viewed are checked only if `verify` is given.

    Tensors whose dtype is not the stored one are filled by a cast, and `LoadReport.casts` names
    them; `dtype="same"` refuses them with a `DtypeMismatchError` instead. Quantised weights that
    a reader turns into its `target_dtype` count as stored in that.

    `LoadReport.receipt()` says what became of every value, grouped by the keys of the state dict:
    restored, missing, cast, excluded, left as it was, or stored and not used. With `receipt`, it
    is that of all ranks, merged. `strict="receipt"` makes anything but "restored" a
    `NotRestoredError` that shows it: before anything is loaded, but for the parameters and groups
    of optimizers in a `TrainState` that were in no optimizer when it was saved, which are found
    when all else is loaded.

    Ranks that want the same bytes can read them once and send them to each other:
    `replicated_reads="share"`; with `"direct"` each rank reads for itself. `"auto"` shares
    where reads are dear: on stores that are not local. It takes connections between the ranks,
    a storage and a planner that read as the default ones do, and the same choice on all
    ranks; otherwise each rank reads for itself. `LoadReport` says how much came from where.
    """
    began = time.perf_counter()
    report = load_now(
        state_dict,
        LoadSource(storage_reader, checkpoint_id, storage_options),
        planner,
        Ranks(process_group, no_dist, timeout_seconds=timeout_seconds),
        LoadSettings(
            strict=strict,
            rename=rename,
            exclude=exclude,
            verify=verify,
            allow_pickle=allow_pickle or None,
            assign=assign,
            replicated_reads=replicated_reads,
            dtype=dtype,
            receipt=receipt,
        ),
    )
    report.seconds = time.perf_counter() - began
    return report


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Deprecated; use `load`."""
    warnings.warn("load_state_dict is deprecated; use load", FutureWarning, stacklevel=2)
    storage_reader.reset()
    _load_state_dict(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)


def _load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Load into a state dict without `Stateful` values, as tools of other projects do."""
    load_now(
        state_dict,
        LoadSource(storage_reader, None),
        planner,
        Ranks(process_group, no_dist, coordinator_rank),
        LoadSettings(),
    )


def read_state_dict(
    checkpoint_id: str | os.PathLike[str],
    keys: set[str] | str | None = None,
    *,
    mmap: bool = False,
    verify: Literal["off", "chunks", "full", "fingerprint"] | None = None,
    allow_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A checkpoint, or what lies at or below `keys` in it, as whole CPU tensors.

    Needs no template and no process group; each process that calls it reads for itself. The place
    is a path or a URL, as for `load`.
    Names that shared one memory when they were saved, such as tied weights, share it again.

    With `mmap`, tensors are views of the files where possible: those that were saved as one
    piece. Nothing is read until it is used, and all processes of a machine share one copy in
    memory. Writing to such a tensor is allowed, and changes neither the file nor what others
    see. It stays as it is when the checkpoint is replaced or deleted; but whoever shortens a
    file in place ends this process with SIGBUS. What cannot be viewed is read.

    `verify` says which chunks are checked against their checksums: those read whole
    (`"chunks"`, the default), all that are touched (`"full"`), or none (`"off"`). Sizes and
    headers of files are always checked. Views are not read, so their chunks are checked only
    if `verify` is given; that reads them once.
    """
    reader = open_reader(checkpoint_id, storage_options)
    reader.verify, reader.allow_pickle = Verify(verify or "chunks"), allow_pickle
    if verify is not None:
        reader.verify_views = reader.verify
    return read_all_keys(keys, reader, mmap)


def read_tensor(
    checkpoint_id: str | os.PathLike[str],
    fqn: str,
    region: Sequence[slice] | None = None,
    *,
    verify: Literal["off", "chunks", "full"] = "chunks",
    storage_options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """One tensor of a checkpoint, or a region of it; only those bytes are read.

    `region` has a slice of step 1 for each dimension, or for the first few. The place is a path or
    a URL, as for `load`.
    """
    reader = open_reader(checkpoint_id, storage_options)
    reader.verify = Verify(verify)
    return read_region(reader, fqn, region or ())


def _load_state_dict_from_keys(
    keys: set[str] | str | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """What lies at or below `keys`, or everything, as whole CPU tensors on every rank."""
    return read_keys(keys, LoadSource(storage_reader, checkpoint_id), Ranks(process_group))

"""Converting a stored checkpoint into another format."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from reshard.api import UnsupportedFormatError
from reshard.background.queue import save_queue
from reshard.checkpoint.stored_tensors import StoredTensors
from reshard.convert.checkpoint import StoredPlanner
from reshard.convert.drafts import new_token
from reshard.convert.safetensors import (
    Export,
    OutputFile,
    check_holdable,
    check_may_export,
    make_index,
    parse_size,
    split_into_files,
)
from reshard.convert.selection import Selection, pick_tensors
from reshard.convert.torch_save import TorchFile, check_may_write
from reshard.coordination.channel import Channel
from reshard.coordination.exchange import TextExchange
from reshard.coordination.pairing import Intent
from reshard.filesystem import FileSystemWriter
from reshard.foreign.opening import open_manifest
from reshard.format.plain_dtypes import PACKED_DTYPES
from reshard.operations.ranks import Ranks
from reshard.operations.renaming import Rename, name_changer
from reshard.operations.save import Save, SaveJob, SaveSettings
from reshard.operations.targets import Place, SaveTarget, comparable_place
from reshard.stores.local import LocalStore
from reshard.stores.protocol import Store
from reshard.tensors.flatten import Rules

_THREADS = 4
"""Some of them wait for the disk."""
_FORMAT_NOTE = {"format": "pt"}
"""What other tools look for: tensors of PyTorch."""


@dataclass(frozen=True)
class ConversionSettings:
    """How to convert, as `convert` documents it."""

    keys: Sequence[str] | str | None = None
    exclude: Sequence[str] | str = ()
    rename: Rename | None = None
    dtype: torch.dtype | str | None = None
    max_shard_size: int | str = "5GB"
    overwrite: bool = False
    allow_pickle: bool = False

    def selection(self) -> Selection:
        return Selection(
            None if self.keys is None else _texts(self.keys),
            _texts(self.exclude),
            None if self.rename is None else name_changer(self.rename),
            _dtype(self.dtype),
        )


def _texts(texts: Sequence[str] | str) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{dtype!r} is not the name of a dtype of torch, such as 'bfloat16'")
        dtype = found
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is a floating-point dtype of torch, not {dtype!r}")
    if dtype in PACKED_DTYPES:
        raise ValueError(
            f"torch converts nothing to {dtype}, of which an element is two numbers. Quantise the "
            "model, and save it"
        )
    return dtype


def export_safetensors(
    source: Place, target: Place, settings: ConversionSettings, ranks: Ranks
) -> None:
    """Write the tensors of a checkpoint as safetensors files. Called by all ranks."""
    channel = ranks.open_channel(Intent("export", f"export to {comparable_place(target)!r}"))
    with channel:
        token = channel.exchange(
            TextExchange("open"), lambda: "", lambda texts: [new_token()] * len(texts)
        )
        with _opened(source, channel) as tensors:
            store = LocalStore(target)
            files, notes = _plan(tensors, settings, store)
            index = make_index(files) if len(files) > 1 else None
            Export(tensors, store, files, token).run(channel, notes, index)


def export_torch_file(
    source: Place, target: Place, settings: ConversionSettings, ranks: Ranks
) -> None:
    """Write what a checkpoint holds as one file of torch.save. The coordinator does it."""
    path = Path(target)
    channel = ranks.open_channel(Intent("export", f"export to {comparable_place(target)!r}"))
    with channel, _opened(source, channel, settings.allow_pickle) as tensors:

        def export() -> None:
            check_may_write(path, settings.overwrite)
            file = TorchFile(tensors, settings.selection(), path, settings.allow_pickle)
            file.write(new_token(), shows_progress=True)

        channel.do_together("export", export if channel.is_coordinator else lambda: None)


def save_again(
    source: Place, target: Place, settings: ConversionSettings, ranks: Ranks, format: str
) -> None:
    """Save a checkpoint of any kind as one of ours, or of DCP. Called by all ranks."""
    save_to = SaveTarget(
        FileSystemWriter(target, thread_count=_THREADS, overwrite=settings.overwrite), None
    )
    channel = ranks.open_channel(save_to.intent("convert", True))
    # In DCP's checkpoints a tuple is a value, and only so does its load find it.
    rules = Rules.DCP if format == "dcp" else Rules.CURRENT
    with channel, _opened(source, channel, settings.allow_pickle, rules) as tensors:
        planner = StoredPlanner(tensors, settings.selection())
        job = SaveJob({}, save_to.choose_writer(), planner, SaveSettings(format=format))
        Save(job, channel).run()


@contextlib.contextmanager
def _opened(
    source: Place, channel: Channel, allow_pickle: bool = False, rules: Rules = Rules.CURRENT
) -> Iterator[StoredTensors]:
    found: list[StoredTensors] = []

    def open_source() -> None:
        save_queue().settle(comparable_place(source))
        store, manifest = open_manifest(LocalStore(source), rules=rules)
        found.append(StoredTensors(store, manifest, allow_pickle=allow_pickle))

    channel.do_together("open", open_source)
    with contextlib.closing(found[0]):
        yield found[0]


def _plan(
    source: StoredTensors, settings: ConversionSettings, target: Store
) -> tuple[list[OutputFile], dict[str, str]]:
    """The files to write, and their notes; what cannot be written is refused."""
    selection = settings.selection()
    m = source.manifest
    names = selection.names([*m.tensor_names, *m.value_names])
    values = [name for name in m.value_names if name in names]
    if values:
        raise UnsupportedFormatError(
            f"safetensors holds tensors only, and {values[0]!r} of {source.location} is a value"
            f"{f', as are {len(values) - 1} others' if len(values) > 1 else ''}. Choose tensors "
            "with keys, or leave values out with exclude"
        )
    picked, others = pick_tensors(source, names, selection)
    check_holdable(picked, names.values(), source.location)
    check_may_export(target, settings.overwrite)
    files = split_into_files(picked, parse_size(settings.max_shard_size))
    # As safetensors notes tensors that it leaves out because they share memory.
    return files, _FORMAT_NOTE | {name: kept for name, kept in others.items() if name != "format"}

"""Converting a stored checkpoint into another format."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from reshard.api import PlanError, UnsupportedFormatError
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
from reshard.coordination.channel import Channel, checking_arguments
from reshard.coordination.exchange import TextExchange
from reshard.filesystem import FileSystemWriter
from reshard.foreign.opening import open_manifest
from reshard.format.plain_dtypes import PACKED_DTYPES
from reshard.fsspec_filesystem import FsspecWriter
from reshard.object_storage import ObjectStoreWriter
from reshard.operations.ranks import Ranks
from reshard.operations.renaming import Rename, name_changer
from reshard.operations.save import Save, SaveJob, SaveSettings
from reshard.operations.targets import Place, SaveTarget, comparable_place
from reshard.stores.places import is_object_url, open_place
from reshard.stores.protocol import Store
from reshard.stores.urls import scheme_of, without_secrets
from reshard.tensors.flatten import Rules

_FORMATS = ("reshard", "huggingface", "dcp", "torch")
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
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def check(self) -> None:
        """Refuse what no checkpoint could be converted by."""
        self.selection()
        parse_size(self.max_shard_size)

    def selection(self) -> Selection:
        return Selection(
            None if self.keys is None else _texts("keys", self.keys),
            _texts("exclude", self.exclude),
            None if self.rename is None else name_changer(_rename(self.rename)),
            _dtype(self.dtype),
        )


def _texts(argument: str, texts: Sequence[str] | str) -> tuple[str, ...]:
    if isinstance(texts, str):
        return (texts,)
    found = tuple(texts) if isinstance(texts, Iterable) else (texts,)
    if not all(isinstance(text, str) for text in found):
        raise PlanError(f"{argument} is a name, or a list of names, not {texts!r}")
    return found


def _rename(rename: Rename) -> Rename:
    if not callable(rename) and not isinstance(rename, Mapping):
        raise PlanError(f"rename is a dict of names, or a function of a name, not {rename!r}")
    return rename


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise PlanError(
                f"dtype={dtype!r} is not the name of a dtype of torch, such as 'bfloat16'"
            )
        dtype = found
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise PlanError(f"dtype is a floating-point dtype of torch, not {dtype!r}")
    if dtype in PACKED_DTYPES:
        raise PlanError(
            f"torch converts nothing to {dtype}, of which an element is two numbers. Quantise the "
            "model, and save it"
        )
    return dtype


def _open_writer(target: Place, settings: ConversionSettings) -> FileSystemWriter:
    if is_object_url(target):
        return ObjectStoreWriter(
            target,
            thread_count=_THREADS,
            overwrite=settings.overwrite,
            storage_options=settings.storage_options,
        )
    if scheme_of(target):
        options = settings.storage_options or {}
        return FsspecWriter(target, overwrite=settings.overwrite, **options)
    return FileSystemWriter(target, thread_count=_THREADS, overwrite=settings.overwrite)


def convert(
    source: Place, target: Place, format: str, settings: ConversionSettings, ranks: Ranks
) -> None:
    """Convert a checkpoint. Called by all ranks."""
    writer = _open_writer(target, settings)
    save_to = SaveTarget(writer, None)
    channel = ranks.open_channel(save_to.intent("convert", True))
    with checking_arguments(channel):
        if format not in _FORMATS:
            raise UnsupportedFormatError(
                f"format is {', '.join(map(repr, _FORMATS[:-1]))} or {_FORMATS[-1]!r}, not "
                f"{format!r}"
            )
        settings.check()
    # In DCP's checkpoints a tuple is a value, and only so does its load find it.
    rules = Rules.DCP if format == "dcp" else Rules.CURRENT
    with channel, _opened(source, settings, channel, rules) as tensors:
        if format == "huggingface":
            _export_safetensors(tensors, target, settings, channel)
        elif format == "torch":
            _export_torch_file(tensors, target, settings, channel)
        else:
            planner = StoredPlanner(tensors, settings.selection())
            job = SaveJob({}, save_to.choose_writer(), planner, SaveSettings(format=format))
            Save(job, channel).run()


def _export_safetensors(
    source: StoredTensors, target: Place, settings: ConversionSettings, channel: Channel
) -> None:
    """Write the tensors of a checkpoint as safetensors files. All ranks write some."""
    token = channel.exchange(
        TextExchange("open"), lambda: "", lambda texts: [new_token()] * len(texts)
    )
    store = open_place(target, settings.storage_options)
    planned: list[tuple[list[OutputFile], dict[str, str]]] = []
    channel.do_together("plan", lambda: planned.append(_plan(source, settings, store)))
    files, notes = planned[0]
    index = make_index(files) if len(files) > 1 else None
    Export(source, store, files, token, replaces_checkpoint=True).run(channel, notes, index)


def _export_torch_file(
    source: StoredTensors, target: Place, settings: ConversionSettings, channel: Channel
) -> None:
    """Write what a checkpoint holds as one file of torch.save. The coordinator does it."""
    if scheme_of(target):
        raise UnsupportedFormatError(
            f"a file of torch.save is written to a path only, not to {comparable_place(target)!r}. "
            "Write it here, and copy it there"
        )
    path = Path(target)

    def export() -> None:
        check_may_write(path, settings.overwrite)
        file = TorchFile(source, settings.selection(), path, settings.allow_pickle)
        file.write(new_token(), shows_progress=True)

    channel.do_together("export", export if channel.is_coordinator else lambda: None)


@contextlib.contextmanager
def _opened(
    source: Place, settings: ConversionSettings, channel: Channel, rules: Rules
) -> Iterator[StoredTensors]:
    found: list[StoredTensors] = []
    storage_options = settings.storage_options if scheme_of(source) else None

    def open_source() -> None:
        save_queue().settle(comparable_place(source))
        store, manifest = open_manifest(open_place(source, storage_options), rules=rules)
        place = without_secrets(str(source)) if scheme_of(source) else str(Path(source))
        pickles = settings.allow_pickle
        found.append(StoredTensors(store, manifest, allow_pickle=pickles, location=place))

    channel.do_together("open", open_source)
    with contextlib.closing(found[0]):
        yield found[0]


def _plan(
    source: StoredTensors, settings: ConversionSettings, target: Store
) -> tuple[list[OutputFile], dict[str, str]]:
    """The files to write, and their notes; what cannot be written is refused."""
    selection = settings.selection()
    m = source.manifest
    names = selection.names(source)
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

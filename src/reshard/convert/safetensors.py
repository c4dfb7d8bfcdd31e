"""Tensors of a checkpoint as plain safetensors files, as Hugging Face lays them out."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from reshard.api import CheckpointExistsError, PlanError, UnsupportedFormatError
from reshard.checkpoint.debris import check_deletable, delete_checkpoint
from reshard.checkpoint.directory import (
    MANIFEST,
    check_may_be_made,
    delete_quietly,
    has_foreign_manifest,
    put_new,
)
from reshard.checkpoint.stored_tensors import StoredTensors
from reshard.convert.copying import Destination, copy_tasks
from reshard.convert.drafts import draft_name, publish, remove_dead_drafts
from reshard.convert.selection import Picked
from reshard.coordination.channel import Channel
from reshard.coordination.exchange import TextExchange
from reshard.engine.progress import watched
from reshard.engine.workers import default_threads, run_all, run_uninterrupted
from reshard.foreign.dcp import part_keys, replaceable_files
from reshard.foreign.safetensors import INDEX, SUFFIX
from reshard.format.container import Entry, build_header
from reshard.format.manifest import MANIFEST_LIMIT_BYTES
from reshard.format.plain_dtypes import plain_entry, why_not_plain
from reshard.stores.protocol import Store

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(size: int | str) -> int:
    """A number of bytes, which may be spelled "5GB" or "500 MiB"."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise PlanError(
            f"max_shard_size={size!r} is not a size: pass a number of bytes, or a text such as "
            "'5GB'"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True)
class OutputFile:
    """A file to write, and the tensors in it."""

    name: str
    tensors: Sequence[Picked]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def split_into_files(tensors: Sequence[Picked], most_bytes: int) -> list[OutputFile]:
    """Files of at most `most_bytes`, or one tensor, named as Hugging Face names them."""
    groups: list[list[Picked]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return [OutputFile(f"model{SUFFIX}", groups[0])]
    return [
        OutputFile(f"model-{number:05d}-of-{len(groups):05d}{SUFFIX}", group)
        for number, group in enumerate(groups, 1)
    ]


def check_holdable(tensors: Sequence[Picked], names: Collection[str], where: str) -> None:
    """Refuse what a safetensors file cannot hold, before anything is written."""
    for tensor in tensors:
        reason = why_not_plain(tensor.dtype, len(tensor.shape))
        if reason:
            raise UnsupportedFormatError(
                f"safetensors cannot hold {tensor.name!r} of {where}, which {reason}. Leave it out "
                "with exclude, or pass another dtype"
            )
    if "__metadata__" in names:
        raise UnsupportedFormatError(
            "safetensors cannot hold a tensor with the name '__metadata__': rename it"
        )


class Export:
    """Writing files under temporary names; they get their own when all are complete.

    The files are shared out to the ranks of the channel. The index comes last: whoever looks for
    it sees all or nothing.
    """

    def __init__(
        self,
        source: StoredTensors,
        target: Store,
        files: Sequence[OutputFile],
        token: str,
        threads: int = 0,
        keeps_older: bool = False,
        replaces_checkpoint: bool = False,
    ) -> None:
        self._replaces_checkpoint = replaces_checkpoint
        self._keeps_older = keeps_older
        # While one waits for the disk, another reads.
        self._threads = threads or max(2, default_threads())
        if target.remote is not None:
            # An object is written in order.
            self._threads = 1
        self._source = source
        self._target = target
        self._files = files
        self._token = token
        self._written: list[str] = []
        self._made_place = False

    def run(self, channel: Channel, notes: Mapping[str, str], index: bytes | None) -> None:
        """Write the files with `notes` in them, and `index` beside them; all or nothing.

        The coordinator must have checked that they may be replaced.
        """
        try:
            # All try to remove a place that they made, since the last to leave can.
            made = channel.exchange(
                TextExchange("create"),
                lambda: run_uninterrupted(self._create),
                lambda each: [max(each)] * len(each),
            )
            self._made_place = bool(made)
            own = _share(self._files, channel.world_size)[channel.rank]
            channel.do_together("export", lambda: self._write(own, notes, channel.is_coordinator))
            channel.do_together(
                "publish",
                # All of it, so that an older checkpoint does not stay beside the new files.
                lambda: (
                    run_uninterrupted(lambda: self._publish(index))
                    if channel.is_coordinator
                    else None
                ),
            )
        except BaseException:
            run_uninterrupted(self._discard)
            raise

    def _create(self) -> str:
        """Make the place; some text if it was not there."""
        self._made_place = self._target.create()
        remove_dead_drafts(self._target)
        return "made" if self._made_place else ""

    def _draft(self, name: str) -> str:
        return draft_name(self._token, name)

    def _write(
        self, files: Sequence[OutputFile], notes: Mapping[str, str], shows_progress: bool
    ) -> None:
        total = sum(file.nbytes for file in files)
        what = f"exporting {self._target.location}"
        with watched(what, total, shows_progress) as progress, contextlib.ExitStack() as opened:
            writers, places = [], []
            for file in files:
                header, begins = _lay_out(file.tensors, notes)
                draft = self._draft(file.name)
                self._written.append(draft)
                writer = self._target.open_writer(draft, len(header) + file.nbytes)
                opened.callback(writer.close)
                writer.write(0, [memoryview(header)])
                writers.append(writer)
                places += [
                    Destination(tensor, writer, begin)
                    for tensor, begin in zip(file.tensors, begins, strict=True)
                ]
            if self._threads == 1:
                places.sort(key=lambda place: (writers.index(place.writer), place.begin))
            tasks = copy_tasks(self._source, places, progress.advance)
            run_all(lambda task: task(), tasks, self._threads)
            for writer in writers:
                writer.sync()

    def _publish(self, index: bytes | None) -> None:
        """Give all files their names. Of an older export nothing is left over."""
        names = [file.name for file in self._files]
        if index is not None:
            self._written.append(self._draft(INDEX))
            put_new(self._target, self._draft(INDEX), index, durable=True)
            names.append(INDEX)
        older = set() if self._keeps_older else set(filter(is_export, self._target.list()))
        publish(self._target, {self._draft(name): name for name in names}, older)
        self._written.clear()
        if self._replaces_checkpoint:
            # Until its manifest is gone, readers find what was there before.
            _remove_checkpoint(self._target)

    def _discard(self) -> None:
        delete_quietly(self._target, self._written)
        if self._made_place:
            self._target.remove()


_EXPORTED = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|" + re.escape(INDEX))


def is_export(key: str) -> bool:
    """Whether a file has a name that exports give."""
    return _EXPORTED.fullmatch(key) is not None


def check_may_export(target: Store, overwrite: bool) -> None:
    """Refuse to replace an older export, or a checkpoint, unless that is wanted."""
    check_may_be_made(target.location)
    keys = target.list()
    found = [key for key in keys if is_export(key)]
    if found and not overwrite:
        raise CheckpointExistsError(
            f"there are safetensors files at {target.location} already, such as {found[0]!r}. Pass "
            "overwrite=True to replace them, or export to another place"
        )
    if MANIFEST not in keys and not part_keys(keys):
        return
    if not overwrite:
        raise CheckpointExistsError(
            f"there is a checkpoint at {target.location} already, which readers would find "
            "instead of the safetensors files. Pass overwrite=True to replace it, or export to "
            "another place"
        )
    if MANIFEST in keys and not has_foreign_manifest(target):
        check_deletable(target)


def _remove_checkpoint(target: Store) -> None:
    """Remove a checkpoint, of ours or of DCP, that stands beside an export which replaces it."""
    keys = target.list()
    files = replaceable_files(target, MANIFEST_LIMIT_BYTES)
    if MANIFEST in keys and not has_foreign_manifest(target):
        delete_checkpoint(target, None)
    elif MANIFEST in keys:
        target.delete(MANIFEST)
        target.sync()
    delete_quietly(target, files)


def make_index(files: Sequence[OutputFile]) -> bytes:
    """The file that says where each tensor is."""
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    content = {
        "metadata": {"total_size": sum(file.nbytes for file in files)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def _lay_out(tensors: Sequence[Picked], notes: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """The header of a file, and where each of its tensors begins in it."""
    entries: dict[str, Entry] = {}
    begins = [0] * len(tensors)
    position = 0
    # Large elements first, so that each tensor begins at a multiple of its own.
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i].dtype.itemsize):
        tensor = tensors[i]
        begins[i], end = position, position + tensor.nbytes
        entries[tensor.name] = plain_entry(tensor.dtype, tensor.shape, position, end)
        position = end
    header = build_header(entries, notes)
    return header, [begin + len(header) for begin in begins]


def _share(files: Sequence[OutputFile], ranks: int) -> list[list[OutputFile]]:
    """The files of each rank: the largest first, each to who has least."""
    shares: list[list[OutputFile]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for file in sorted(files, key=lambda file: -file.nbytes):
        rank = loads.index(min(loads))
        shares[rank].append(file)
        loads[rank] += file.nbytes
    return shares

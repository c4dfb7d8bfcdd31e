"""What a checkpoint holds as one file of torch.save, streamed.

torch.save itself writes the file first, of tensors that have no memory, and leaves out their
bytes. These are then read from the checkpoint and written to where they belong.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from reshard.api import CheckpointException, CheckpointExistsError
from reshard.checkpoint.directory import file_above
from reshard.checkpoint.planner_data import unpack_planner_data
from reshard.checkpoint.stored_tensors import StoredTensors
from reshard.convert.checkpoint import renamed_paths
from reshard.convert.copying import Destination, copy_tasks
from reshard.convert.selection import (
    Picked,
    Selection,
    check_plain,
    check_savable,
    pick_tensors,
)
from reshard.engine.memory import ReservedAddresses, byte_view, tensor_in
from reshard.engine.progress import watched
from reshard.engine.workers import default_threads, run_all, run_uninterrupted
from reshard.format.torch_files import decode_stored
from reshard.stores.owners import OWNER, is_alive
from reshard.tensors.flatten import put_empties
from reshard.tensors.paths import set_elements
from reshard.tensors.storages import storages_in_order

_ALIGNMENT = 64
_DRAFT = re.compile(rf"\.[0-9a-f]{{8}}\.({OWNER})\.partial")
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_CRC_IN_ENTRY = 16
_DESCRIPTOR_MAGIC, _HAS_DESCRIPTOR = b"PK\x07\x08", 8


class TorchFile:
    """The file to write, as it will be: nothing is written before `write`."""

    def __init__(
        self, source: StoredTensors, selection: Selection, target: Path, allow_pickle: bool
    ) -> None:
        self._source = source
        self._target = target
        m = source.manifest
        names = selection.names(source)
        self._picked, others = pick_tensors(source, names, selection)
        check_savable(self._picked, source.location)
        check_plain(names, source.location, "a file of torch.save")
        # Must live as long as the tensors in it.
        self._addresses = ReservedAddresses(sum(map(_room_for, self._picked)))
        blanks = _make_blanks(self._picked, self._addresses)
        flat: dict[str, Any] = dict(blanks)
        flat |= {name: blanks[kept] for name, kept in others.items()}
        for row, name in enumerate(m.value_names):
            if name in names:
                flat[names[name]] = decode_stored(name, source.value(row), allow_pickle)
        stored = unpack_planner_data(m.planner_data, source.location, allow_pickle=False)
        paths = renamed_paths(stored, names, selection)
        self._state: dict[str, Any] = {}
        # In the order in which it was saved, as far as that is known.
        order = [*(name for name in paths if name in flat), *(n for n in flat if n not in paths)]
        set_elements(self._state, ((paths.get(name, (name,)), flat[name]) for name in order))
        put_empties(self._state, paths, paths.empties)
        self._by_address = {
            blanks[tensor.name].untyped_storage().data_ptr(): tensor
            for tensor in self._picked
            if tensor.nbytes
        }

    def write(self, token: str, shows_progress: bool) -> None:
        """Write the file under a temporary name, and give it its own when it is complete.

        If anything fails, nothing is left behind and an older file stays.
        """
        folder = self._target.parent
        _remove_dead_drafts(folder)
        # torch.save gives the archive the name of its file, so only the folder is another.
        draft = folder / f".{token}.partial"
        try:
            os.mkdir(draft)
            path = draft / self._target.name
            with torch.serialization.skip_data():
                torch.save(self._state, path)
            with _Archive(path) as archive:
                self._fill(archive, shows_progress)
                archive.sync()
            run_uninterrupted(lambda: self._publish(draft))
        except BaseException:
            run_uninterrupted(lambda: shutil.rmtree(draft, ignore_errors=True))
            raise

    def _publish(self, draft: Path) -> None:
        """Give the file its name. An interrupt comes before or after."""
        os.replace(draft / self._target.name, self._target)
        shutil.rmtree(draft, ignore_errors=True)
        _sync_folder(self._target.parent)

    def _fill(self, archive: _Archive, shows_progress: bool) -> None:
        total = sum(tensor.nbytes for tensor in self._picked)
        with watched(f"exporting {self._target}", total, shows_progress) as progress:
            run_all(
                lambda storage: self._fill_storage(archive, *storage, progress.advance),
                enumerate(storages_in_order(self._state)),
                max(2, default_threads()),
            )

    def _fill_storage(
        self,
        archive: _Archive,
        number: int,
        storage: torch.UntypedStorage,
        advance: Callable[[int], None],
    ) -> None:
        member = archive.open_member(number, storage.nbytes())
        picked = self._by_address.get(storage.data_ptr())
        if picked is None:
            # Of a tensor within a value, which is in memory.
            content = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            view = byte_view(content)
            member.write(member.begin, [view] if view else [])
        else:
            # In order, one after the other, for the checksum.
            place = Destination(picked, member, member.begin)
            for task in copy_tasks(self._source, [place], advance):
                task()
        member.finish()


def check_may_write(target: Path, overwrite: bool) -> None:
    """Refuse a place where no file can be, or where there is one that is to stay."""
    if target.is_dir():
        raise CheckpointExistsError(
            f"{target} is a directory: a file of torch.save needs a name, such as "
            f"{str(target / 'model.pt')!r}"
        )
    if above := file_above(target):
        raise CheckpointExistsError(
            f"{str(above)!r} is a file, so that {target} cannot be. Choose another place"
        )
    if not target.parent.is_dir():
        raise CheckpointException(
            f"there is no directory {str(target.parent)!r} for {target.name!r}: make it first"
        )
    if target.exists() and not overwrite:
        raise CheckpointExistsError(
            f"there is a file {target} already. Pass overwrite=True to replace it"
        )


def _room_for(tensor: Picked) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _make_blanks(picked: Sequence[Picked], addresses: ReservedAddresses) -> dict[str, torch.Tensor]:
    """A tensor without memory for each; all have storages of their own."""
    blanks, begin = {}, 0
    for tensor in picked:
        blanks[tensor.name] = tensor_in(addresses.view, begin, tensor.dtype, tensor.shape)
        begin += _room_for(tensor)
    return blanks


class _Entry(NamedTuple):
    """Where a member of an archive begins, and where its entry in the directory does."""

    header: int
    nbytes: int
    entry: int
    has_descriptor: bool


class _Archive:
    """A file of torch.save whose storages are yet to be written."""

    def __init__(self, path: Path) -> None:
        self._entries = dict(_storage_entries(path))
        self.descriptor = os.open(path, os.O_RDWR)

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)

    def open_member(self, number: int, nbytes: int) -> _Member:
        """The place of a storage. Safe to use from several threads."""
        entry = self._entries[number]
        *_, name_nbytes, extra_nbytes = _LOCAL.unpack(
            os.pread(self.descriptor, _LOCAL.size, entry.header)
        )
        if entry.nbytes != nbytes:
            raise RuntimeError(
                f"torch.save has left {entry.nbytes} bytes for a storage of {nbytes}: this version "
                "of torch numbers storages in another way"
            )
        return _Member(
            self.descriptor, entry, entry.header + _LOCAL.size + name_nbytes + extra_nbytes
        )

    def sync(self) -> None:
        os.fsync(self.descriptor)


class _Member:
    """The bytes of one storage. They are written in order; their checksum is put in last."""

    def __init__(self, descriptor: int, entry: _Entry, begin: int) -> None:
        self.begin = begin
        self._descriptor = descriptor
        self._entry = entry
        self._next = begin
        self._crc = 0

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if buffers and offset != self._next:
            raise RuntimeError(f"byte {offset} of a storage comes where {self._next} should")
        for view in buffers:
            self._crc = zlib.crc32(view, self._crc)
            _write_all(self._descriptor, view, self._next)
            self._next += len(view)

    def finish(self) -> None:
        crc = struct.pack("<L", self._crc)
        end = self.begin + self._entry.nbytes
        if self._next != end:
            raise RuntimeError(f"{end - self._next} bytes of a storage were not written")
        _write_all(self._descriptor, memoryview(crc), self._entry.entry + _CRC_IN_ENTRY)
        if self._entry.has_descriptor:
            if os.pread(self._descriptor, 4, end) != _DESCRIPTOR_MAGIC:
                raise RuntimeError("this version of torch writes archives in another way")
            _write_all(self._descriptor, memoryview(crc), end + len(_DESCRIPTOR_MAGIC))

    # The whole file is synced and closed, once.

    def start_sync(self, offset: int, nbytes: int) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


def _storage_entries(path: Path) -> Iterator[tuple[int, _Entry]]:
    """The members of an archive that are storages, by their numbers."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        position = archive.start_dir
        for member in archive.infolist():
            file.seek(position)
            fields = _ENTRY.unpack(file.read(_ENTRY.size))
            folder, _, name = member.filename.rpartition("/data/")
            if folder and name.isdecimal():
                has_descriptor = bool(member.flag_bits & _HAS_DESCRIPTOR)
                yield (
                    int(name),
                    _Entry(member.header_offset, member.file_size, position, has_descriptor),
                )
            position += _ENTRY.size + sum(fields[10:13])


def _write_all(descriptor: int, view: memoryview, position: int) -> None:
    while len(view):
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_dead_drafts(folder: Path) -> None:
    """Remove what exports have left that were killed."""
    for path in folder.iterdir():
        match = _DRAFT.fullmatch(path.name)
        if match and is_alive(match[1]) is False:
            shutil.rmtree(path, ignore_errors=True)

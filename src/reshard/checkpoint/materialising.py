"""Making a checkpoint whole: copies of what it refers to take the place of the references."""

from __future__ import annotations

import dataclasses
import math
import threading
import uuid
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from reshard.api import CorruptCheckpointError
from reshard.checkpoint.directory import own_files, read_manifest, requirements, shard_name
from reshard.checkpoint.open_save import OpenSave
from reshard.checkpoint.shard_files import ShardFiles
from reshard.checkpoint.to_manifest import check_readable
from reshard.engine.progress import watched
from reshard.engine.reading import Verify
from reshard.engine.workers import default_threads, run_all
from reshard.engine.writing import Content, lay_out, region_key
from reshard.format.checksum import Digester, Hasher, checksum, signed
from reshard.format.manifest import encode_manifest
from reshard.format.tables import PARTS, Manifest
from reshard.planning.columns import DTYPES, Bools
from reshard.stores.protocol import Store, Writer

_PIECE_BYTES = 8 << 20


def materialise(source: Store, target: Store, in_place: bool) -> bool:
    """Copy what a checkpoint refers to, or all of it to another place; whether there was any.

    Chunks are streamed, and checked on the way. In place, the checkpoint is replaced as a save
    replaces one: readers see it before or after.
    """
    manifest = read_manifest(source)
    # Parts that were merged may share bytes, which one manifest does not describe.
    copy_all = not in_place or PARTS in requirements(source)
    foreign = np.array(
        [manifest.origin_of(file) is not None for file in range(len(manifest.files))], dtype=bool
    )
    if in_place and not foreign.any():
        return False
    copied = np.ones_like(foreign) if copy_all else foreign
    save = OpenSave(target, str(uuid.uuid4()))
    files = ShardFiles(source, manifest, Verify.CHUNKS)
    try:
        save.begin(overwrite=in_place)
        whole = _Copying(files, save).run(copied)
        check_readable(whole, f"the manifest of {target.location}")
        save.check_visible(own_files(whole), rank=0)
        save.sync()
        save.commit(encode_manifest(whole), own_files(whole))
    except BaseException:
        save.discard(is_coordinator=True)
        raise
    finally:
        files.close()
    return True


class _Item(NamedTuple):
    """Stored bytes to copy. `digest` is that of a chunk, or the checksum of a value."""

    name: str
    begin: int
    nbytes: int
    digest: bytes | None
    is_value: bool = False


class _Copying:
    def __init__(self, files: ShardFiles, save: OpenSave) -> None:
        self._files = files
        self._manifest = files.manifest
        self._save = save
        self._local = threading.local()
        self._advance: Callable[[int], None] = lambda nbytes: None

    def run(self, copied: Bools) -> Manifest:
        """Copy the contents of some files into new ones; the manifest of what is then there."""
        m = self._manifest
        chunk_files, chunk_begins = m.chunk_files.copy(), m.chunk_begins.copy()
        value_files, value_begins = m.value_files.copy(), m.value_begins.copy()
        kept = np.flatnonzero(~copied)
        numbers = np.full(len(copied), -1, dtype=np.int64)
        numbers[kept] = np.arange(len(kept))
        paths = [m.files[file] for file in kept.tolist()]
        about = [m.file_sizes[kept], m.header_sizes[kept], m.header_checksums[kept]]
        total = int(m.stored_nbytes[copied[m.chunk_files]].sum()) if len(m.chunk_files) else 0
        with watched(f"materialising {self._save.store.location}", total, True) as progress:
            self._advance = progress.advance
            for number, file in enumerate(np.flatnonzero(copied).tolist()):
                chunks = np.flatnonzero(m.chunk_files == file)
                values = np.flatnonzero(m.value_files == file)
                path = shard_name(0, number, self._save.save_id)
                sizes, begins = self._copy_file(file, path, chunks.tolist(), values.tolist())
                numbers[file] = len(paths)
                paths.append(path)
                about = [np.append(c, n) for c, n in zip(about, sizes, strict=True)]
                chunk_begins[chunks] = begins[: len(chunks)]
                value_begins[values] = begins[len(chunks) :]
        return dataclasses.replace(
            m,
            files=paths,
            file_sizes=about[0],
            header_sizes=about[1],
            header_checksums=about[2],
            chunk_files=numbers[chunk_files] if len(chunk_files) else chunk_files,
            chunk_begins=chunk_begins,
            value_files=numbers[value_files] if len(value_files) else value_files,
            value_begins=value_begins,
            file_origins=None,
            origins=(),
            notes={**m.notes, "save_id": self._save.save_id},
        )

    def _copy_file(
        self, file: int, path: str, chunks: list[int], values: list[int]
    ) -> tuple[tuple[int, int, int], np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Copy what lies in one file; size, header size and checksum, and where contents begin."""
        contents = [self._chunk_content(row) for row in chunks]
        contents += [self._value_content(row) for row in values]
        _make_distinct(contents)
        order = sorted(range(len(contents)), key=lambda i: -contents[i].dtype.itemsize)
        header, begins = lay_out(contents, order, self._save.save_id)
        items = [self._chunk(row) for row in chunks] + [self._value(row) for row in values]
        nbytes = len(header) + sum(content.nbytes for content in contents)
        reader_key = self._files.open(file)
        store = self._save.store
        self._save.written.append(path)
        writer = store.open_writer(path, nbytes)
        try:
            writer.write(0, [memoryview(header)])
            run_all(
                lambda i: self._copy(reader_key, items[i], writer, int(begins[i])),
                order,
                max(2, default_threads()),
            )
            writer.sync()
        finally:
            writer.close()
        return (nbytes, len(header), signed(checksum(header))), begins

    def _chunk_content(self, row: int) -> Content:
        m, tensor = self._manifest, self._tensor_of(row)
        dims = int(m.ndims[tensor])
        dtype, sizes = DTYPES[int(m.dtypes[tensor])], m.chunk_sizes[row, :dims].tolist()
        offsets = m.chunk_offsets[row, :dims].tolist()
        key = region_key(m.tensor_names[tensor], m.table.shape_of(tensor), offsets, sizes)
        if m.chunk_codecs is not None and m.chunk_codecs[row]:
            stored = int(m.stored_nbytes[row])
            return Content(key, torch.uint8, (stored,), stored, memoryview(b""))
        nbytes = math.prod(sizes) * dtype.itemsize
        return Content(key, dtype, tuple(sizes), nbytes, memoryview(b""))

    def _value_content(self, row: int) -> Content:
        nbytes = int(self._manifest.value_nbytes[row])
        name = self._manifest.value_names[row]
        return Content(name, torch.uint8, (nbytes,), nbytes, memoryview(b""))

    def _tensor_of(self, row: int) -> int:
        return int(np.searchsorted(self._manifest.chunk_starts, row, side="right")) - 1

    def _chunk(self, row: int) -> _Item:
        m = self._manifest
        is_encoded = m.chunk_codecs is not None and bool(m.chunk_codecs[row])
        return _Item(
            m.tensor_names[self._tensor_of(row)],
            int(m.chunk_begins[row]),
            int(m.stored_nbytes[row]),
            # Encoded chunks have checksums of their own, which are checked when they are decoded.
            None if is_encoded else m.chunk_digests[row].tobytes(),
        )

    def _value(self, row: int) -> _Item:
        m = self._manifest
        return _Item(
            m.value_names[row],
            int(m.value_begins[row]),
            int(m.value_nbytes[row]),
            (int(m.value_checksums[row]) & (1 << 64) - 1).to_bytes(8, "big"),
            is_value=True,
        )

    def _copy(self, key: str, item: _Item, writer: Writer, position: int) -> None:
        reader = self._files.readers[key]
        hasher = Hasher() if item.is_value else Digester()
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = memoryview(bytearray(_PIECE_BYTES))
        for begin in range(0, item.nbytes, _PIECE_BYTES):
            piece = buffer[: min(_PIECE_BYTES, item.nbytes - begin)]
            reader.read_into(item.begin + begin, [piece])
            hasher.update(piece)
            writer.write(position + begin, [piece])
            writer.start_sync(position + begin, len(piece))
            self._advance(len(piece))
        if item.digest is not None and hasher.digest() != item.digest:
            raise CorruptCheckpointError(
                f"the stored bytes of {item.name!r} in {key!r} of {self._files.store.location} are "
                "damaged, so that the checkpoint cannot be made whole"
            )


def _make_distinct(contents: list[Content]) -> None:
    taken = {"__metadata__"}
    for content in contents:
        while content.key in taken:
            content.key += "#"
        taken.add(content.key)

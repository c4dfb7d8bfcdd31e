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

from reshard.api import CheckpointExistsError, CorruptCheckpointError
from reshard.checkpoint.directory import has_checkpoint, own_files, read_manifest, shard_name
from reshard.checkpoint.open_save import OpenSave
from reshard.checkpoint.shard_files import ShardFiles
from reshard.checkpoint.to_manifest import check_readable
from reshard.engine.progress import watched
from reshard.engine.reading import Verify
from reshard.engine.workers import default_threads, run_all
from reshard.engine.writing import Content, lay_out, region_key
from reshard.format.checksum import Digester, Hasher, checksum, signed
from reshard.format.manifest import encode_manifest
from reshard.format.tables import Manifest
from reshard.planning.columns import DTYPES
from reshard.stores.protocol import Store, Writer

_PIECE_BYTES = 8 << 20


def materialise(source: Store, target: Store, in_place: bool) -> bool:
    """Copy a checkpoint with all that it refers to; whether there was anything to copy.

    Chunks are streamed, and checked on the way. In place, the checkpoint is replaced as a save
    replaces one: readers see it before or after. Its own files are copied, too: the files of a
    checkpoint all carry the id of one save, which is how others refer to them.
    """
    manifest = read_manifest(source)
    if in_place and not manifest.origins:
        return False
    if not in_place and has_checkpoint(target):
        raise CheckpointExistsError(
            f"there is a checkpoint at {target.location} already: name a place where there is "
            "none, or delete it first"
        )
    save = OpenSave(target, str(uuid.uuid4()))
    files = ShardFiles(source, manifest, Verify.CHUNKS)
    try:
        save.begin(overwrite=in_place)
        whole = _Copying(files, save).run()
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
    """Stored bytes to copy. `digest` is that of a chunk, or the checksum of a value.

    The digest of an encoded chunk is of its content; `encoded_row` says which one it is.
    """

    name: str
    begin: int
    nbytes: int
    digest: bytes
    is_value: bool = False
    encoded_row: int | None = None


class _Copying:
    def __init__(self, files: ShardFiles, save: OpenSave) -> None:
        self._files = files
        self._manifest = files.manifest
        self._save = save
        self._local = threading.local()
        self._advance: Callable[[int], None] = lambda nbytes: None

    def run(self) -> Manifest:
        """Copy the contents of each file into a new one; the manifest of what is then there."""
        m = self._manifest
        chunk_begins, value_begins = m.chunk_begins.copy(), m.value_begins.copy()
        paths: list[str] = []
        about: list[tuple[int, int, int]] = []
        with watched(
            f"materialising {self._save.store.location}", int(m.stored_nbytes.sum()), True
        ) as progress:
            self._advance = progress.advance
            for file in range(len(m.files)):
                chunks = np.flatnonzero(m.chunk_files == file)
                values = np.flatnonzero(m.value_files == file)
                paths.append(shard_name(0, file, self._save.save_id))
                sizes, begins = self._copy_file(file, paths[-1], chunks.tolist(), values.tolist())
                about.append(sizes)
                chunk_begins[chunks] = begins[: len(chunks)]
                value_begins[values] = begins[len(chunks) :]
        columns = np.array(about, dtype=np.int64).reshape(-1, 3)
        return dataclasses.replace(
            m,
            files=paths,
            file_sizes=columns[:, 0],
            header_sizes=columns[:, 1],
            header_checksums=columns[:, 2],
            chunk_begins=chunk_begins,
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
            m.chunk_digests[row].tobytes(),
            encoded_row=row if is_encoded else None,
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
        for begin in range(0, item.nbytes, _PIECE_BYTES):
            piece = self._buffer()[: min(_PIECE_BYTES, item.nbytes - begin)]
            reader.read_into(item.begin + begin, [piece])
            hasher.update(piece)
            writer.write(position + begin, [piece])
            writer.start_sync(position + begin, len(piece))
            self._advance(len(piece))
        try:
            found = hasher.digest()
            if item.encoded_row is not None:
                found = self._decoded_digest(item.encoded_row)
            cause = None
        except CorruptCheckpointError as error:
            found, cause = b"", error
        if found != item.digest:
            raise CorruptCheckpointError(
                f"the stored bytes of {item.name!r} in {key!r} of {self._files.store.location} are "
                "damaged, so that the checkpoint cannot be made whole"
                + ("" if cause is None else f": {cause}")
            ) from cause

    def _decoded_digest(self, row: int) -> bytes:
        """The digest of what an encoded chunk decodes to."""
        key, _ = self._files.open_chunk(row)
        reader, digester = self._files.readers[key], Digester()
        for begin in range(0, reader.nbytes, _PIECE_BYTES):
            piece = self._buffer()[: min(_PIECE_BYTES, reader.nbytes - begin)]
            reader.read_into(begin, [piece])
            digester.update(piece)
        return digester.digest()

    def _buffer(self) -> memoryview:
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = memoryview(bytearray(_PIECE_BYTES))
        return buffer


def _make_distinct(contents: list[Content]) -> None:
    taken = {"__metadata__"}
    for content in contents:
        while content.key in taken:
            content.key += "#"
        taken.add(content.key)

"""Writing one shard file whose larger tensors are encoded.

How long an encoded chunk becomes turns out while it is encoded. So frames are encoded in
several threads, take their places in the file in turns, and are then written at the same
time. A thread holds one frame, whatever the size of its chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

import torch

from reshard.engine.growing import GrowingFile
from reshard.engine.memory import BounceBuffer, byte_view, copy_elements, is_direct
from reshard.engine.workers import run_all
from reshard.engine.writing import ChunkSums, Content, Written, check_planned, gather
from reshard.format import codec
from reshard.stores.protocol import Store

LEAST_ENCODED_BYTES = 64 << 10
"""Smaller contents are stored as they are."""
_BATCH_BYTES = 8 << 20
_BATCH_ITEMS = 1000


def write_encoded_file(
    store: Store,
    key: str,
    contents: Sequence[Content],
    threads: int,
    durable: bool,
    advance: Callable[[int], None] = lambda nbytes: None,
    save_id: str = "",
    fingerprint: bool = False,
) -> Written:
    """Write `contents` as one safetensors file, tensors encoded where that saves bytes.

    An encoded tensor is an entry of bytes. `advance` is called with the bytes of content that
    were written, from several threads.
    """
    with closing(GrowingFile(store, key, contents, save_id, fingerprint)) as file:
        job = _Job(file, durable, advance)
        run_all(job.work, range(threads), threads)
        return file.finish(durable)


def is_encoded(content: Content) -> bool:
    """Whether to try to encode a content: a tensor that is large enough, and no value."""
    return content.nbytes >= LEAST_ENCODED_BYTES and not isinstance(content.source, memoryview)


class _Step(NamedTuple):
    """What a thread does at once: small contents, or one frame of a chunk."""

    turn: int
    small: Sequence[int]
    chunk: _Chunk | None
    frame: int


class _Chunk:
    """A content that is taken apart into frames. Nobody keeps it but the steps that write it."""

    def __init__(self, number: int, content: Content, sums: ChunkSums) -> None:
        self.number = number
        self.content = content
        self.width = codec.plane_width(content.dtype.itemsize, content.nbytes)
        self.index = codec.make_index(self.width, content.nbytes)
        self.sums = sums
        self.frames = len(self.index.rows)
        self._lock = threading.Lock()
        self._data: torch.Tensor | None = None
        self._encodes = False

    def open(self, bounce: BounceBuffer) -> bool:
        """Get the data, once; whether to encode it."""
        with self._lock:
            if self._data is None:
                data = self.content.resolve()
                if not isinstance(data, torch.Tensor):
                    raise TypeError(f"{self.content.key!r} is a value and cannot be encoded")
                check_planned(self.content, data.nbytes)
                self._data = data.detach()
                # What becomes of a single frame is seen when it is encoded.
                self._encodes = self.frames == 1 or self._is_worthwhile(bounce)
            return self._encodes

    def _is_worthwhile(self, bounce: BounceBuffer) -> bool:
        """Judge a chunk by small parts of it."""
        ranges = codec.sample_ranges(self.content.nbytes)
        samples = (self._between(begin, end, bounce) for begin, end in ranges)
        stored = sum(codec.encode_frame(sample, self.width).nbytes for sample in samples)
        return stored < codec.saving_limit(sum(end - begin for begin, end in ranges))

    def take(self, frame: int, bounce: BounceBuffer) -> memoryview:
        """The content of a frame of an open chunk, valid until the bounce buffer is used again."""
        return self._between(*self.index.content_range(frame), bounce)

    def _between(self, begin: int, end: int, bounce: BounceBuffer) -> memoryview:
        data = self._data
        if data is None:
            raise RuntimeError(f"{self.content.key!r} is not open")
        if is_direct(data):
            return byte_view(data)[begin:end]
        buffer = bounce.take(end - begin)
        first, last = begin // data.itemsize, end // data.itemsize
        copy_elements(data, first, last, buffer.view(data.dtype))
        return byte_view(buffer)


class _Abandoned(Exception):  # noqa: N818 - control flow between threads
    """Another thread has failed, and its error is the one to raise."""


class _Turns:
    """Steps take their places one after the other, in order, whoever is done first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._abandoned = False

    @contextmanager
    def take(self, turn: int) -> Iterator[None]:
        with self._changed:
            while self._next != turn and not self._abandoned:
                self._changed.wait()
            if self._abandoned:
                raise _Abandoned
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def abandon(self) -> None:
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()


class _Job:
    def __init__(self, file: GrowingFile, durable: bool, advance: Callable[[int], None]) -> None:
        self._file = file
        self._durable = durable
        self._advance = advance
        self._steps = self._make_steps()
        self._steps_lock = threading.Lock()
        self._turns = _Turns()

    def _make_steps(self) -> Iterator[_Step]:
        turn, small, small_bytes = 0, list[int](), 0
        for i in self._file.order:
            content = self._file.contents[i]
            large = is_encoded(content)
            if small and (large or small_bytes >= _BATCH_BYTES or len(small) >= _BATCH_ITEMS):
                yield _Step(turn, small, None, 0)
                turn, small, small_bytes = turn + 1, [], 0
            if not large:
                small.append(i)
                small_bytes += content.nbytes
                continue
            chunk = _Chunk(i, content, self._file.sums.start_chunk(i))
            for frame in range(chunk.frames):
                yield _Step(turn, (), chunk, frame)
                turn += 1
        if small:
            yield _Step(turn, small, None, 0)

    def work(self, thread: int) -> None:
        """Take steps, in one of several threads, until there are none."""
        bounce = BounceBuffer(codec.FRAME_BYTES)
        try:
            while True:
                with self._steps_lock:
                    step = next(self._steps, None)
                if step is None:
                    return
                if step.chunk is None:
                    self._write_small(step)
                else:
                    self._write_frame(step, step.chunk, bounce)
        except _Abandoned:
            return
        except BaseException:
            self._turns.abandon()
            raise

    def _write_small(self, step: _Step) -> None:
        file = self._file
        gathered = gather(file.contents, step.small, file.sums)
        with self._turns.take(step.turn):
            begin = file.position
            for i in step.small:
                file.begin_content(i)
                file.position += file.contents[i].nbytes
        self._write(begin, gathered.views)
        self._advance(gathered.nbytes)

    def _write_frame(self, step: _Step, chunk: _Chunk, bounce: BounceBuffer) -> None:
        encodes = chunk.open(bounce)
        content = chunk.take(step.frame, bounce)
        index, is_first, is_last = chunk.index, not step.frame, step.frame + 1 == chunk.frames
        frame = codec.encode_frame(content, chunk.width) if encodes else None
        if frame is not None and is_first and is_last:
            saves = index.nbytes + frame.nbytes < codec.saving_limit(len(content))
            frame = frame if saves else None
        parts = [content] if frame is None else list(frame.parts)
        file, i = self._file, chunk.number
        with self._turns.take(step.turn):
            if is_first:
                file.begin_content(i)
                file.position += 0 if frame is None else index.nbytes
            # In order, since digest and fingerprint are of the whole content.
            chunk.sums.update(content)
            begin = file.position
            if frame is not None:
                index.rows[step.frame] = frame.row()
                if is_last:
                    parts.append(memoryview(index.padding))
            file.position += sum(map(len, parts))
        if is_last:
            file.sums.end_chunk(i, chunk.sums)
            if frame is not None:
                file.note_encoded(i, index.stored_nbytes)
                head = [memoryview(index.encode())]
                if is_first:
                    begin, parts = file.begin_of(i), head + parts
                else:
                    self._write(file.begin_of(i), head)
        self._write(begin, parts)
        self._advance(len(content))

    def _write(self, begin: int, parts: Sequence[memoryview]) -> None:
        self._file.writer.write(begin, parts)
        if self._durable:
            self._file.writer.start_sync(begin, sum(map(len, parts)))

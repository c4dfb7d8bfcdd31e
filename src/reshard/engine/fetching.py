"""Bytes that are asked for before they are needed, of a store that takes a while to answer.

What a load wants of each file becomes a few large requests. Some of them are under way at any
time; whoever reads takes the bytes from those that were answered.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from reshard.engine.reading import WIDEST_GAP_BYTES, Request, Verify, wanted_ranges
from reshard.stores.protocol import Reader, Remote

_BUDGET_BYTES = 256 << 20
"""How much may be in memory that was asked for and not used yet."""
_LAST_SECONDS = 0.1
"""How long a load that fails waits for each of its threads."""


Wanted: TypeAlias = tuple[Request | None, str, npt.NDArray[np.int64]]
"""Who reads, in which file, from where to where. Without a request it is kept to the end."""


@runtime_checkable
class Fetching(Protocol):
    """A reader that hands over the memory that its answers come in. Optional."""

    def fetch(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the file."""


@dataclass(eq=False)
class _Piece:
    path: str
    begin: int
    end: int
    users: int = 0
    wanted_bytes: int = 0
    wanted_end: int = 0
    used_bytes: int = 0
    taken: bool = False
    data: memoryview | None = None
    error: BaseException | None = None
    arrived: threading.Event = field(default_factory=threading.Event)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Prefetch:
    """Asks for what some requests want, in the order in which they are read."""

    def __init__(
        self,
        readers: Mapping[str, Reader],
        wanted: Sequence[Wanted],
        remote: Remote,
    ) -> None:
        self._readers = readers
        self._remote = remote
        self._pieces: dict[str, list[_Piece]] = _cut(wanted, remote)
        self._begins = {
            path: [piece.begin for piece in pieces] for path, pieces in self._pieces.items()
        }
        for request, path, ranges in wanted:
            self._follow(request, path, ranges)
        self._waiting = [piece for path in sorted(self._pieces) for piece in self._pieces[path]]
        self._waiting.reverse()
        self._changed = threading.Condition()
        self._held_bytes = 0
        self._is_closed = False
        self._error: BaseException | None = None
        """What went wrong first: nothing is asked for any more."""
        self._threads: list[threading.Thread] = []

    def _follow(self, request: Request | None, path: str, ranges: npt.NDArray[np.int64]) -> None:
        """Let go of pieces when the last request that wants some of them is done."""
        begins = self._begins.get(path, [])
        chosen: set[int] = set()
        for begin, end in ranges.tolist():
            numbers = range(bisect_right(begins, begin) - 1, bisect_right(begins, end - 1))
            chosen.update(numbers)
            for piece in (self._pieces[path][number] for number in numbers):
                until = min(end, piece.end)
                piece.wanted_bytes += until - max(begin, piece.begin)
                piece.wanted_end = max(piece.wanted_end, until)
        pieces = [self._pieces[path][number] for number in chosen]
        for piece in pieces:
            piece.users += 1
        if request is not None:
            request.done = partial(self._finish, request.done, pieces)

    def _finish(self, done: Callable[[], None] | None, pieces: Sequence[_Piece]) -> None:
        with self._changed:
            for piece in pieces:
                piece.users -= 1
                if not piece.users:
                    self._let_go(piece)
            self._changed.notify_all()
        if done is not None:
            done()

    def _let_go(self, piece: _Piece) -> None:
        if piece.data is not None:
            self._held_bytes -= piece.nbytes
            piece.data = None

    def _use(self, piece: _Piece, nbytes: int, until: int) -> None:
        """Let go of a piece before its last request is done, which may want many more of them.

        A request reads from the beginning to the end. What it reads again all the same is asked
        for again.
        """
        with self._changed:
            piece.used_bytes += nbytes
            is_read = until >= piece.wanted_end and piece.used_bytes >= piece.wanted_bytes
            if piece.users == 1 and is_read:
                self._let_go(piece)
                self._changed.notify_all()

    def __enter__(self) -> Prefetch:
        count = min(self._remote.concurrency, len(self._waiting))
        for _ in range(count):
            thread = threading.Thread(target=self._work, name="reshard-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            # A request that is under way may take minutes, and nobody wants its answer any more.
            thread.join(None if kind is None else _LAST_SECONDS)

    def _work(self) -> None:
        while (piece := self._next()) is not None:
            self._fetch(piece)

    def _next(self) -> _Piece | None:
        with self._changed:
            while not self._is_closed and self._error is None:
                while self._waiting and (self._waiting[-1].taken or not self._waiting[-1].users):
                    self._waiting.pop()
                if not self._waiting:
                    return None
                piece = self._waiting[-1]
                if not self._held_bytes or self._held_bytes + piece.nbytes <= _BUDGET_BYTES:
                    self._waiting.pop()
                    self._take(piece)
                    return piece
                self._changed.wait()
        return None

    def _take(self, piece: _Piece) -> None:
        piece.taken = True
        self._held_bytes += piece.nbytes

    def _fetch(self, piece: _Piece) -> None:
        try:
            reader = self._readers[piece.path]
            if isinstance(reader, Fetching):
                data = reader.fetch(piece.begin, piece.nbytes)
            else:
                data = memoryview(bytearray(piece.nbytes))
                reader.read_into(piece.begin, [data])
            with self._changed:
                if piece.users:
                    piece.data = data
                else:
                    self._held_bytes -= piece.nbytes
        except BaseException as error:  # noqa: BLE001 - raised by whoever needs a piece
            piece.error = error
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
        piece.arrived.set()

    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> bool:
        """Fill `buffers` from what was asked for; False if that is not all of it."""
        pieces, begins = self._pieces.get(path), self._begins.get(path)
        end = offset + sum(map(len, buffers))
        if pieces is None or begins is None or offset == end:
            return False
        number, position = bisect_right(begins, offset) - 1, offset
        rest = [np.frombuffer(buffer, dtype=np.uint8) for buffer in reversed(buffers)]
        while position < end:
            if number < 0 or number >= len(pieces) or not _covers(pieces[number], position):
                return False
            piece = pieces[number]
            data = self._wait_for(piece)
            if data is None:
                return False
            until = min(end, piece.end)
            _scatter(data[position - piece.begin : until - piece.begin], rest)
            del data
            self._use(piece, until - position, until)
            number, position = number + 1, until
        return True

    def _wait_for(self, piece: _Piece) -> memoryview | None:
        """The bytes of a piece; None if they were let go of."""
        with self._changed:
            is_own = not piece.taken
            if is_own and self._error is not None:
                # A store that does not answer would be waited for once more.
                raise self._error
            if is_own:
                # Later ones fill the memory that there is: this one must not wait for it.
                self._take(piece)
        if is_own:
            self._fetch(piece)
        piece.arrived.wait()
        if piece.error is not None:
            raise piece.error
        return piece.data


def _covers(piece: _Piece, position: int) -> bool:
    return piece.begin <= position < piece.end


def _scatter(data: memoryview, rest: list[npt.NDArray[np.uint8]]) -> None:
    """Copy bytes into targets, the last one first, and drop what is filled. Without the GIL."""
    content = np.frombuffer(data, dtype=np.uint8)
    while len(content):
        target = rest.pop()
        count = min(len(content), len(target))
        np.copyto(target[:count], content[:count])
        content = content[count:]
        if count < len(target):
            rest.append(target[count:])


def _cut(wanted: Sequence[Wanted], remote: Remote) -> dict[str, list[_Piece]]:
    """What to ask for of each file: neighbours together, large spans in pieces."""
    by_path: dict[str, list[npt.NDArray[np.int64]]] = {}
    for _, path, ranges in wanted:
        by_path.setdefault(path, []).append(ranges)
    # Whoever reads reads such gaps, too.
    gap = max(remote.gap_bytes, WIDEST_GAP_BYTES)
    pieces: dict[str, list[_Piece]] = {}
    for path, arrays in by_path.items():
        ranges = np.concatenate(arrays)
        ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
        ends = np.maximum.accumulate(ranges[:, 1])
        is_first = np.concatenate([[True], ranges[1:, 0] - ends[:-1] > gap])
        starts = np.flatnonzero(is_first)
        lasts = np.concatenate([starts[1:] - 1, [len(ranges) - 1]])
        spans = zip(ranges[starts, 0].tolist(), ends[lasts].tolist(), strict=True)
        step = remote.piece_bytes
        pieces[path] = [
            _Piece(path, position, min(position + step, end))
            for begin, end in spans
            for position in range(begin, end, step)
        ]
    return pieces


def plan_fetches(
    requests: Sequence[Request],
    verify: Verify,
    stored: Callable[[Request], tuple[str, int, int] | None],
) -> list[Wanted]:
    """What each request reads: in which file, from where to where.

    `stored` says where all of an encoded chunk lies, and None for others.
    """
    found: list[Wanted] = []
    for request in requests:
        if not request.nbytes:
            continue
        place = stored(request)
        if place is None:
            found.append((request, request.file, wanted_ranges(request, verify)))
        elif request.whole:
            path, begin, end = place
            found.append((request, path, np.array([[begin, end]], dtype=np.int64)))
    return found

"""Tensors over a connection to another rank.

A message is a few regions of stored chunks, each for one want of the receiver: a table of what
comes, then the elements of one region after the other, without gaps. Bytes go from memory to
memory: they are copied only where the tensor at either end is not contiguous or has another dtype.
"""

from __future__ import annotations

import itertools
import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import torch

from reshard.engine.memory import BounceBuffer, byte_view, is_direct

PIECE_BYTES = 8 << 20
"""No region of a message is larger, unless it is one element."""
_MOST_BUFFERS = 1000
"""How many buffers one call of sendmsg or recvmsg takes, at least (IOV_MAX on Linux is 1024)."""
_HEAD = struct.Struct("<I")
_MOST_TABLE_BYTES = 64 << 20

Extents = tuple[int, ...]
_Table = list[tuple[int, Extents, Extents]]


class LinkBroken(ConnectionError):  # noqa: N818 - what happened to the link, for the error that says so
    """The rank at the other end closed the connection, or cannot be reached any more."""


class Part(NamedTuple):
    """Elements for want `want` of the receiver: that region of the chunk."""

    want: int
    offsets: Extents
    lengths: Extents
    content: torch.Tensor


class Outbox:
    """Sends messages over a link, in a thread of its own, in the order in which they are put."""

    def __init__(self, link: socket.socket, on_error: Callable[[BaseException], None]) -> None:
        self._link = link
        self._on_error = on_error
        self._messages: queue.SimpleQueue[tuple[Sequence[Part], Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._serve, name="reshard-send", daemon=True)
        self._thread.start()

    def put(self, parts: Sequence[Part], sent: Callable[[], None]) -> None:
        """Send a message; `sent` is called when its memory is not needed any more."""
        self._messages.put((parts, sent))

    def finish(self) -> None:
        """No more messages will be put."""
        self._messages.put(None)

    def join(self) -> None:
        self._thread.join()

    def _serve(self) -> None:
        is_sound = True
        while (message := self._messages.get()) is not None:
            parts, sent = message
            try:
                if is_sound:
                    _send(self._link, parts)
            except BaseException as error:  # noqa: BLE001 - told to whoever reads
                is_sound = False
                self._on_error(error)
            finally:
                sent()


class Inbox:
    """Receives from a link until `nbytes` have come, in a thread of its own.

    `target_of` gives the tensor to be filled with a region of a want, and the dtype in which its
    elements come.
    """

    def __init__(
        self,
        link: socket.socket,
        nbytes: int,
        target_of: Callable[[int, Extents, Extents], tuple[torch.Tensor, torch.dtype]],
        advance: Callable[[int], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._link = link
        self._left_bytes = nbytes
        self._target_of = target_of
        self._advance = advance
        self._on_error = on_error
        self._bounce = BounceBuffer(PIECE_BYTES)
        self._thread = threading.Thread(target=self._serve, name="reshard-receive", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._left_bytes:
                nbytes = self._receive()
                self._left_bytes -= nbytes
                self._advance(nbytes)
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            self._on_error(error)

    def _receive(self) -> int:
        head = bytearray(_HEAD.size)
        receive_into(self._link, [memoryview(head)])
        (table_bytes,) = _HEAD.unpack(head)
        if table_bytes > _MOST_TABLE_BYTES:
            raise LinkBroken(f"it sent a table of {table_bytes} bytes")
        table = bytearray(table_bytes)
        receive_into(self._link, [memoryview(table)])
        nbytes, direct = 0, []
        for want, offsets, lengths in msgspec.msgpack.decode(table, type=_Table):
            target, dtype = self._target_of(want, offsets, lengths)
            nbytes += target.numel() * dtype.itemsize
            if target.dtype is dtype and is_direct(target):
                direct.append(byte_view(target))
                continue
            # Those before it come first.
            receive_into(self._link, direct)
            direct = []
            staged = self._bounce.take(target.numel() * dtype.itemsize)
            receive_into(self._link, [byte_view(staged)])
            target.copy_(staged.view(dtype).view(lengths))
        receive_into(self._link, direct)
        if nbytes > self._left_bytes:
            raise LinkBroken(f"it sent {nbytes - self._left_bytes} bytes too many")
        return nbytes


def _send(link: socket.socket, parts: Sequence[Part]) -> None:
    table = msgspec.msgpack.encode([part[:3] for part in parts])
    # Kept until they are sent: a view does not keep its tensor alive.
    packed = [part.content.contiguous() for part in parts]
    heads = memoryview(_HEAD.pack(len(table)) + table)
    send_all(link, [heads, *map(byte_view, packed)])


def send_all(link: socket.socket, buffers: Iterable[memoryview]) -> None:
    """Send buffers one after the other."""
    left = deque(buffer for buffer in buffers if len(buffer))
    while left:
        try:
            done = link.sendmsg(list(itertools.islice(left, _MOST_BUFFERS)))
        except OSError as error:
            raise LinkBroken(f"sending to it failed ({error})") from error
        _drop(left, done)


def receive_into(link: socket.socket, buffers: Iterable[memoryview]) -> None:
    """Fill buffers one after the other."""
    left = deque(buffer for buffer in buffers if len(buffer))
    while left:
        some = list(itertools.islice(left, _MOST_BUFFERS))
        try:
            done = link.recvmsg_into(some, 0, socket.MSG_WAITALL)[0]
        except OSError as error:
            raise LinkBroken(f"receiving from it failed ({error})") from error
        if not done:
            raise LinkBroken("it closed the connection")
        _drop(left, done)


def _drop(buffers: deque[memoryview], nbytes: int) -> None:
    """Take the first `nbytes` off a row of buffers."""
    while nbytes:
        first = buffers.popleft()
        if len(first) > nbytes:
            buffers.appendleft(first[nbytes:])
        nbytes -= min(nbytes, len(first))

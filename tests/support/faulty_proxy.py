"""A proxy on 127.0.0.1 in front of an object server that fails by script.

It passes on what it gets byte for byte, since requests are signed, and counts what it sees.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

BUFFER_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
CREDIT_SECONDS = 0.05

Kind = Literal["delay", "403", "500", "503", "reset", "lost", "truncated", "silent"]
FAILURES: tuple[Kind, ...] = ("500", "503", "reset", "lost", "truncated")
"""What a client has to try again."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request.

    - `delay`: it is answered `seconds` later.
    - `403`, `500`, `503`: an error of the server, which has done nothing.
    - `reset`: the connection is reset; the server has not seen the request.
    - `lost`: the connection is reset; the server has done what was asked.
    - `truncated`: the answer ends in its middle.
    - `silent`: nothing is answered for `seconds`; then the connection is reset.
    """

    kind: Kind
    seconds: float = 0.0


@dataclass(frozen=True)
class Request:
    """A request as it arrived."""

    number: int
    method: str
    path: str
    range: str | None
    """The range of bytes that was asked for, such as `bytes=0-99`."""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.method, self.path, self.range)))


Script = Callable[[Request], Fault | None]


def seeded(seed: int, rate: float, kinds: tuple[Kind, ...] = FAILURES) -> Script:
    """Let each request fail with this probability: the same requests in each run."""
    generator = random.Random(seed)
    lock = threading.Lock()

    def script(request: Request) -> Fault | None:
        with lock:
            fails, kind = generator.random() < rate, generator.choice(kinds)
        return Fault(kind) if fails else None

    return script


@dataclass
class Counts:
    """What went through. Requests that failed are counted, too."""

    requests: list[Request] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    bytes_to_server: int = 0
    """Of bodies, as are those to clients."""
    bytes_to_clients: int = 0

    @property
    def methods(self) -> Counter[str]:
        return Counter(each.method for each in self.requests)


@dataclass
class Killing:
    """Kill a process when a request arrives, or when the server has answered it."""

    at: int
    after: bool
    find_pid: Callable[[], int]


class _Cut(Exception):
    """The connection to the client is to be reset."""


class FaultyProxy:
    """Runs in threads of this process, from `with` until its end, or until `go_away`."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self.counts = Counts()
        self.script: Script = lambda request: None
        self.killing: Killing | None = None
        self.bytes_per_second: float | None = None
        """A limit over all connections and both directions."""
        self._lock = threading.Lock()
        self._paid_until = 0.0
        self._sockets: set[socket.socket] = set()
        self._gone = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = int(self._listener.getsockname()[1])
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._accept, daemon=True, name="faulty-proxy").start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.go_away()

    def go_away(self) -> None:
        """Reset all connections and answer no more: further ones are refused."""
        self._gone.set()
        with contextlib.suppress(OSError):
            # Wakes the thread that accepts, which closing alone would not.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            with contextlib.suppress(OSError):
                _reset_on_close(each)
                each.shutdown(socket.SHUT_RDWR)

    def reset_counts(self) -> None:
        with self._lock:
            self.counts = Counts()

    def _accept(self) -> None:
        while not self._gone.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(client,), daemon=True, name="faulty-proxy"
            ).start()

    def _serve(self, client: socket.socket) -> None:
        stream = _Stream(client)
        upstream = _Upstream(self._server)
        with self._kept(client), contextlib.closing(upstream):
            try:
                while (head := stream.head()) is not None:
                    self._exchange(stream, head, upstream)
            except _Cut:
                _reset_on_close(client)
            except OSError:
                # Either side has hung up, as it may at any time.
                pass

    def _exchange(self, client: _Stream, head: bytes, upstream: _Upstream) -> None:
        """Pass one request on and its answer back, or fail."""
        lines, headers = _parsed(head)
        request = self._noted(lines, headers)
        fault = self.script(request)
        if fault is not None:
            with self._lock:
                self.counts.faults[fault.kind] += 1
        self._kill(request, after=False)
        if headers.get("expect", "").lower() == "100-continue":
            client.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault is not None:
            match fault.kind:
                case "delay":
                    self._gone.wait(fault.seconds)
                case "reset":
                    raise _Cut
                case "silent":
                    self._gone.wait(fault.seconds)
                    raise _Cut
                case "403" | "500" | "503":
                    for _ in _body(client, headers):
                        pass
                    client.socket.sendall(_refusal(fault.kind))
                    return
                case "lost" | "truncated":
                    pass
        server = upstream.connected()
        server.socket.sendall(head)
        for piece in _body(client, headers):
            self._pay(len(piece))
            with self._lock:
                self.counts.bytes_to_server += len(piece)
            server.socket.sendall(piece)
        self._answer(client, server, request, fault)

    def _answer(
        self, client: _Stream, upstream: _Stream, request: Request, fault: Fault | None
    ) -> None:
        while True:
            head = upstream.head()
            if head is None:
                raise _Cut
            line, headers = _parsed(head)
            status = int(line[1])
            if status >= 200:
                break
        if request.method == "HEAD" or status in (204, 304):
            headers = {"content-length": "0"}
        self._kill(request, after=True)
        kind = fault.kind if fault is not None else None
        if kind == "lost":
            raise _Cut
        length = int(headers.get("content-length", "0"))
        if kind == "truncated" and length < 2:
            client.socket.sendall(head[: len(head) // 2])
            raise _Cut
        client.socket.sendall(head)
        left = length // 2 if kind == "truncated" else None
        ends_with_connection = "content-length" not in headers and "chunked" not in headers.get(
            "transfer-encoding", ""
        )
        for piece in _body(upstream, headers, until_end=ends_with_connection):
            if left is not None:
                piece = piece[:left]
                left -= len(piece)
            self._pay(len(piece))
            # Before it is sent: whoever has it looks at the counts.
            with self._lock:
                self.counts.bytes_to_clients += len(piece)
            client.socket.sendall(piece)
            if left == 0:
                # Not a reset, which could take the half away that was sent.
                client.socket.shutdown(socket.SHUT_RDWR)
                raise OSError("cut short")
        if ends_with_connection:
            raise OSError("the end of the connection is the end of the answer")

    def _noted(self, line: list[str], headers: dict[str, str]) -> Request:
        with self._lock:
            request = Request(len(self.counts.requests), line[0], line[1], headers.get("range"))
            self.counts.requests.append(request)
        return request

    def _kill(self, request: Request, after: bool) -> None:
        killing = self.killing
        if killing is not None and (killing.at, killing.after) == (request.number, after):
            os.kill(killing.find_pid(), signal.SIGKILL)
            raise _Cut

    def _pay(self, nbytes: int) -> None:
        """Wait until the limit lets these bytes through."""
        if self.bytes_per_second is None:
            return
        with self._lock:
            now = time.monotonic()
            # What a thread sleeps too long is not lost.
            begin = max(now - CREDIT_SECONDS, self._paid_until)
            self._paid_until = begin + nbytes / self.bytes_per_second
            wait = self._paid_until - now
        if wait > 0:
            self._gone.wait(wait)

    @contextlib.contextmanager
    def _kept(self, client: socket.socket) -> Iterator[None]:
        with self._lock:
            self._sockets.add(client)
        if self._gone.is_set():
            _reset_on_close(client)
            client.shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(client)
            client.close()


class _Stream:
    """A connection, with what was read of it beyond a head."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._early = b""

    def head(self) -> bytes | None:
        """All up to the empty line; None if the connection ends before."""
        found = self._early
        while (end := found.find(b"\r\n\r\n")) < 0:
            if len(found) > HEAD_BYTES:
                raise OSError("a head without an end")
            some = self.socket.recv(HEAD_BYTES)
            if not some:
                return None
            found += some
        self._early = found[end + 4 :]
        return found[: end + 4]

    def some(self, most: int) -> memoryview:
        """The next bytes, at least one; valid until the next call."""
        if self._early:
            some, self._early = self._early[:most], self._early[most:]
            return memoryview(some)
        count = self.socket.recv_into(self._buffer, min(most, BUFFER_BYTES))
        return self._buffer[:count]

    def line(self) -> bytes:
        while (end := self._early.find(b"\r\n")) < 0:
            some = self.socket.recv(HEAD_BYTES)
            if not some:
                raise OSError("the connection ended within a line")
            self._early += some
        line, self._early = self._early[: end + 2], self._early[end + 2 :]
        return line

    def is_closed(self) -> bool:
        """Whether the other side has hung up, as servers do when nothing happens for long."""
        readable, _, _ = select.select([self.socket], [], [], 0)
        return bool(readable)


class _Upstream:
    """The connection to the server, which is used again while it lasts."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._stream: _Stream | None = None

    def connected(self) -> _Stream:
        if self._stream is None or self._stream.is_closed():
            self.close()
            self._stream = _Stream(socket.create_connection(self._server))
        return self._stream

    def close(self) -> None:
        if self._stream is not None:
            self._stream.socket.close()


def _body(
    stream: _Stream, headers: dict[str, str], until_end: bool = False
) -> Iterator[memoryview]:
    """The pieces of a body, as they are on the wire."""
    if "chunked" in headers.get("transfer-encoding", ""):
        while True:
            line = stream.line()
            yield memoryview(line)
            size = int(line.split(b";")[0], 16)
            yield from _exactly(stream, size + 2)
            if not size:
                return
    if until_end:
        while piece := stream.some(BUFFER_BYTES):
            yield piece
        return
    yield from _exactly(stream, int(headers.get("content-length", "0")))


def _exactly(stream: _Stream, nbytes: int) -> Iterator[memoryview]:
    while nbytes:
        piece = stream.some(nbytes)
        if not piece:
            raise OSError("the connection ended within a body")
        nbytes -= len(piece)
        yield piece


def _parsed(head: bytes) -> tuple[list[str], dict[str, str]]:
    """The words of the first line, and the headers with small letters."""
    first, *rest = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in rest)
    return first.split(" "), {name.strip().lower(): value.strip() for name, _, value in pairs}


def _refusal(kind: Literal["403", "500", "503"]) -> bytes:
    code, reason = {
        "403": ("AccessDenied", "Forbidden"),
        "500": ("InternalError", "Internal Server Error"),
        "503": ("SlowDown", "Slow Down"),
    }[kind]
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code>'
        f"<Message>Please try again.</Message></Error>"
    ).encode()
    head = (
        f"HTTP/1.1 {kind} {reason}\r\nContent-Type: application/xml\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _reset_on_close(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

"""Connections between the ranks of one operation, for more bytes than the channel carries.

Each rank listens, says where through the channel, and connects to the ranks below it that it has
something to do with. A connection begins with a token that only the ranks of the operation know.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reshard.coordination.channel import Channel
from reshard.coordination.liveness import SILENCE_SECONDS
from reshard.coordination.meeting import rendezvous_host

CONNECT_SECONDS = 5.0
"""How long ranks try to connect to each other before they do without."""
_TOKEN_BYTES = 16
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sI")
_KEEPALIVE_SECONDS = 10


class PeerAddress(NamedTuple):
    """Where a rank listens, and the token that it expects."""

    host: str
    port: int
    token: bytes


class Listener:
    """Takes connections of other ranks."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            self._socket.bind((host, 0))
            self._socket.listen(128)
        except BaseException:
            self._socket.close()
            raise
        self.address = PeerAddress(host, self._socket.getsockname()[1], self._token)

    def connect(
        self, rank: int, peers: Mapping[int, PeerAddress], idle_seconds: float
    ) -> dict[int, socket.socket]:
        """A connection to each of `peers`; OSError if one cannot be had within a few seconds.

        Of two ranks, the higher one connects and the lower one waits for it. Nobody is silent on a
        connection for longer than `idle_seconds` (0: no limit), or it breaks.
        """
        give_up = time.monotonic() + CONNECT_SECONDS
        links: dict[int, socket.socket] = {}
        try:
            for peer, address in peers.items():
                if peer < rank:
                    links[peer] = _call(address, rank, give_up)
            self._accept({peer for peer in peers if peer > rank}, links, give_up)
        except BaseException:
            close_all(links)
            raise
        for link in links.values():
            _make_watchful(link, idle_seconds)
        return links

    def _accept(self, expected: set[int], links: dict[int, socket.socket], give_up: float) -> None:
        """Wait for ranks to connect. Whoever does not know the token is turned away."""
        greetings: dict[socket.socket, bytes] = {}
        self._socket.setblocking(False)
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as strangers:
            selector.register(self._socket, selectors.EVENT_READ)
            while expected - links.keys():
                left = give_up - time.monotonic()
                if left <= 0:
                    missing = ", ".join(map(str, sorted(expected - links.keys())))
                    raise TimeoutError(f"no connection from rank {missing}")
                for key, _ in selector.select(left):
                    if key.fileobj is self._socket:
                        caller, _ = self._socket.accept()
                        strangers.callback(caller.close)
                        caller.setblocking(False)
                        greetings[caller] = b""
                        selector.register(caller, selectors.EVENT_READ)
                        continue
                    caller = key.fileobj  # type: ignore[assignment]
                    more = _some_of(caller, _GREETING.size - len(greetings[caller]))
                    greetings[caller] += more
                    if more and len(greetings[caller]) < _GREETING.size:
                        continue
                    selector.unregister(caller)
                    peer = self._check(greetings[caller])
                    if peer in expected and peer not in links:
                        # Under another descriptor, since those in `strangers` are closed.
                        links[peer] = caller.dup()

    def _check(self, greeting: bytes) -> int:
        """The rank that a greeting comes from; -1 if it is not one of ours."""
        if len(greeting) != _GREETING.size:
            return -1
        token, rank = _GREETING.unpack(greeting)
        return int(rank) if hmac.compare_digest(token, self._token) else -1

    def close(self) -> None:
        self._socket.close()


def choose_host(channel: Channel, on_one_machine: bool) -> str:
    """The address of this machine as other ranks see it."""
    if on_one_machine:
        return "127.0.0.1"
    host = rendezvous_host(channel) or socket.gethostname()
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Nothing is sent: it tells which interface leads there.
        probe.connect(address)
        return str(probe.getsockname()[0])


def close_all(links: Mapping[int, socket.socket]) -> None:
    for link in links.values():
        link.close()


def _call(address: PeerAddress, rank: int, give_up: float) -> socket.socket:
    left = max(0.1, give_up - time.monotonic())
    link = socket.create_connection((address.host, address.port), left)
    try:
        link.sendall(_GREETING.pack(address.token, rank))
    except BaseException:
        link.close()
        raise
    return link


def _some_of(caller: socket.socket, nbytes: int) -> bytes:
    try:
        return caller.recv(nbytes)
    except OSError:
        return b""


def _make_watchful(link: socket.socket, idle_seconds: float) -> None:
    """Have a connection break when the machine at its other end is gone."""
    link.setblocking(True)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    tcp: Sequence[tuple[str, int]] = (
        ("TCP_KEEPIDLE", _KEEPALIVE_SECONDS),
        ("TCP_KEEPINTVL", _KEEPALIVE_SECONDS),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", int(1000 * SILENCE_SECONDS)),
    )
    for name, value in tcp:
        option: Any = getattr(socket, name, None)
        if option is not None:
            link.setsockopt(socket.IPPROTO_TCP, option, value)
    limit = struct.pack("ll", int(idle_seconds), int(idle_seconds % 1 * 1e6))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

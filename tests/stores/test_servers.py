"""The servers and the proxy that the other tests of object stores rely on."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, BaseError

from support.faulty_proxy import Fault, FaultyProxy, Kind, seeded
from support.object_servers import SECRET_KEY, Place, ServerFailed, _start

ONCE = {"retry_config": {"max_retries": 0}}


def once(place: Place, proxy: FaultyProxy) -> obstore.store.S3Store:
    """A store that goes through the proxy and tries nothing again."""
    return Place(place.url, {**place.options, **ONCE}).through(proxy.endpoint).store()


def test_the_server_keeps_what_is_put_and_creates_only_what_is_absent(s3: Place) -> None:
    key = f"{s3.prefix}/a"
    obstore.put(s3.store(), key, b"first", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(s3.store(), key, b"second", mode="create")

    assert s3.names() == ["a"]
    assert bytes(obstore.get(s3.store(), key).bytes()) == b"first"
    assert SECRET_KEY not in repr(s3)


def test_uploads_that_were_not_ended_are_known(s3: Place) -> None:
    upload = obstore.open_writer(s3.store(), f"{s3.prefix}/a", buffer_size=5 << 20)
    upload.write(bytes(11 << 20))
    assert s3.uploads() == [f"{s3.prefix}/a"]
    upload.close()

    assert s3.uploads() == []
    assert s3.names() == ["a"]


def test_a_server_that_ends_at_once_is_an_error_that_shows_what_it_printed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    command = ["sh", "-c", "echo no room for me; exit 3"]
    with pytest.raises(ServerFailed, match=r"ended with 3[^$]*no room for me"):
        _start(folder, 1, lambda ports: command, lambda ports: "not yet", dict(os.environ))


def test_the_proxy_passes_everything_on_and_counts_it(s3: Place, s3_proxy: FaultyProxy) -> None:
    store, key, data = once(s3, s3_proxy), f"{s3.prefix}/a", os.urandom(12 << 20)
    obstore.put(store, key, data, chunk_size=5 << 20)
    assert bytes(obstore.get(store, key).bytes()) == data
    s3_proxy.reset_counts()
    assert bytes(obstore.get_range(store, key, start=100, length=50)) == data[100:150]

    [request] = s3_proxy.counts.requests
    assert (request.method, request.path, request.range) == (
        "GET",
        f"/checkpoints/{key}",
        "bytes=100-149",
    )
    assert s3_proxy.counts.bytes_to_clients == 50
    obstore.put(store, key, b"123", use_multipart=False)
    assert s3_proxy.counts.bytes_to_server == 3
    assert s3_proxy.counts.methods == {"GET": 1, "PUT": 1}


@pytest.mark.parametrize(
    ("kind", "told", "is_done"),
    [
        ("403", "403 Forbidden", False),
        ("500", "500 Internal Server Error", False),
        ("503", "503 Service Unavailable", False),
        ("reset", "error sending request", False),
        ("lost", "error sending request", True),
        ("truncated", "error sending request", True),
    ],
)
def test_a_request_fails_as_the_script_wants(
    kind: Kind, told: str, is_done: bool, s3: Place, s3_proxy: FaultyProxy
) -> None:
    s3_proxy.script = lambda request: Fault(kind)
    with pytest.raises(BaseError, match=told):
        obstore.put(once(s3, s3_proxy), f"{s3.prefix}/a", b"1" * 1000, use_multipart=False)

    assert s3_proxy.counts.faults == {kind: 1}
    assert s3.names() == (["a"] if is_done else [])


def test_an_answer_is_cut_in_the_middle_of_its_body(s3: Place, s3_proxy: FaultyProxy) -> None:
    obstore.put(s3.store(), f"{s3.prefix}/a", b"1" * 1000)
    s3_proxy.script = lambda request: Fault("truncated")
    with pytest.raises(BaseError, match="response body"):
        obstore.get(once(s3, s3_proxy), f"{s3.prefix}/a").bytes()

    assert s3_proxy.counts.bytes_to_clients == 500


def test_the_same_seed_lets_the_same_requests_fail(s3: Place, s3_proxy: FaultyProxy) -> None:
    found = []
    for _ in range(2):
        s3_proxy.script = seeded(7, 0.3)
        outcome = []
        for _ in range(30):
            try:
                obstore.head(once(s3, s3_proxy), f"{s3.prefix}/missing")
            except FileNotFoundError:
                outcome.append(True)
            except BaseError:
                outcome.append(False)
        found.append(outcome)

    assert found[0] == found[1]
    assert 3 <= found[0].count(False) <= 15


def test_a_proxy_that_went_away_refuses_connections_and_ends_those_it_has(
    s3: Place, s3_proxy: FaultyProxy
) -> None:
    store = once(s3, s3_proxy)
    obstore.put(store, f"{s3.prefix}/a", b"1")
    s3_proxy.go_away()
    with pytest.raises(BaseError, match="error sending request"):
        obstore.head(store, f"{s3.prefix}/a")
    with (
        pytest.raises(ConnectionRefusedError),
        socket.create_connection(("127.0.0.1", s3_proxy.port)),
    ):
        pass


def test_the_proxy_holds_all_connections_together_to_its_limit(
    s3: Place, s3_proxy: FaultyProxy
) -> None:
    key, nbytes = f"{s3.prefix}/a", 4 << 20
    obstore.put(s3.store(), key, bytes(nbytes))
    store = once(s3, s3_proxy)
    s3_proxy.bytes_per_second = 20e6
    began = time.monotonic()
    half = nbytes // 2
    obstore.get_ranges(store, key, starts=[0, half + 1], lengths=[half, half - 1], coalesce=0)

    assert 0.15 < time.monotonic() - began < 2

"""What goes wrong between a client and an object store, and what becomes of it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch

import reshard
from reshard.stores import object_clients, objects
from reshard.stores.objects import ObjectStore
from reshard.stores.protocol import VersionConflict
from support.faulty_proxy import FAILURES, Fault, FaultyProxy, Kind, Request, seeded
from support.object_servers import ACCESS_KEY, BUCKET, SECRET_KEY, Place, closed_port

BUCKETLESS = "s3://no-such-bucket"
SOON_SECONDS = 5.0
"""Within this, what will never work has to be said."""


def through(place: Place, proxy: FaultyProxy, **options: Any) -> ObjectStore:
    return ObjectStore(place.url, {**place.through(proxy.endpoint).options, **options})


def put(store: ObjectStore, key: str, data: bytes, step: int = 1 << 20) -> None:
    writer = store.open_writer(key, len(data))
    try:
        for begin in range(0, len(data), step):
            writer.write(begin, [memoryview(data)[begin : begin + step]])
        writer.sync()
    finally:
        writer.close()


def get(store: ObjectStore, key: str, begin: int = 0, nbytes: int | None = None) -> bytes:
    reader = store.open_reader(key)
    buffer = bytearray(reader.nbytes - begin if nbytes is None else nbytes)
    reader.read_into(begin, [memoryview(buffer)])
    reader.close()
    return bytes(buffer)


def first(wanted: Callable[[Request], bool], kind: Kind) -> Callable[[Request], Fault | None]:
    """Let the first request of a kind fail."""
    lock, seen = threading.Lock(), []

    def script(request: Request) -> Fault | None:
        with lock:
            if seen or not wanted(request):
                return None
            seen.append(request)
            return Fault(kind)

    return script


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest that servers take."""
    monkeypatch.setattr(objects, "_PART_BYTES", 5 << 20)


# What may pass is tried again


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))]
)
def test_with_a_tenth_of_all_requests_failing_everything_is_complete(
    seed: int, s3: Place, s3_proxy: FaultyProxy
) -> None:
    store, data = through(s3, s3_proxy), os.urandom((26 << 20) + 12345)
    s3_proxy.script = seeded(seed, 0.1)
    put(store, "large", data)
    for number in range(20):
        put(store, f"small-{number:02}", data[: 1000 * number])
    assert store.list() == ["large", *(f"small-{number:02}" for number in range(20))]
    begins = range(0, len(data) - 5000, len(data) // 40)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda begin: get(store, "large", begin, 5000), begins))

    assert found == [data[begin : begin + 5000] for begin in begins]
    assert get(store, "large") == data
    assert s3.uploads() == []
    assert len(s3_proxy.counts.faults) >= 4


@pytest.mark.parametrize("kind", FAILURES)
def test_a_commit_is_made_once_although_its_request_failed(
    kind: Kind, s3: Place, s3_proxy: FaultyProxy
) -> None:
    store = through(s3, s3_proxy)
    version = None
    for content in (b"first", b"second"):
        put(store, "draft", b"")
        s3_proxy.script = first(
            lambda request: request.method == "PUT" and "/.metadata" in request.path, kind
        )
        s3_proxy.reset_counts()
        version = store.commit("draft", ".metadata", content, version)
        assert s3_proxy.counts.faults == {kind: 1}
        assert version == store.version(".metadata")
        assert get(store, ".metadata") == content


def test_a_commit_whose_answer_was_lost_does_not_take_the_commit_of_another_for_its_own(
    s3: Place, s3_proxy: FaultyProxy
) -> None:
    store, other = through(s3, s3_proxy), ObjectStore(s3.url, s3.options)
    put(store, "draft", b"")
    seen: list[Request] = []

    def script(request: Request) -> Fault | None:
        if request.method == "PUT" and "/.metadata" in request.path and not seen:
            seen.append(request)
            put(other, "draft-of-another", b"")
            other.commit("draft-of-another", ".metadata", b"another", None)
            return Fault("reset")
        return None

    s3_proxy.script = script
    with pytest.raises(VersionConflict):
        store.commit("draft", ".metadata", b"mine", None)
    assert get(other, ".metadata") == b"another"


@pytest.mark.parametrize("kind", FAILURES)
def test_a_file_is_written_once_although_its_request_failed(
    kind: Kind, s3: Place, s3_proxy: FaultyProxy
) -> None:
    store = through(s3, s3_proxy)
    s3_proxy.script = first(lambda request: request.method == "PUT", kind)
    put(store, "a", b"content")
    assert s3_proxy.counts.faults == {kind: 1}
    assert get(store, "a") == b"content"


@pytest.mark.parametrize("kind", FAILURES)
def test_a_file_is_deleted_although_the_request_failed(
    kind: Kind, s3: Place, s3_proxy: FaultyProxy
) -> None:
    store = through(s3, s3_proxy)
    put(store, "a", b"content")
    s3_proxy.script = first(lambda request: request.method in ("DELETE", "POST"), kind)
    assert store.delete("a")
    assert s3_proxy.counts.faults == {kind: 1}
    assert store.list() == []


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("step", ["?uploads", "partNumber=2", "?uploadId"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "truncated" else pytest.mark.slow)
        for kind in FAILURES
    ],
)
def test_an_upload_ends_well_although_one_of_its_requests_failed(
    kind: Kind, step: str, s3: Place, s3_proxy: FaultyProxy
) -> None:
    store, data = through(s3, s3_proxy), os.urandom((10 << 20) + 5)
    s3_proxy.script = first(lambda request: step in request.path, kind)
    put(store, "a", data, step=4 << 20)
    assert s3_proxy.counts.faults == {kind: 1}
    assert get(store, "a") == data


def test_a_server_that_is_slow_to_answer_is_waited_for(s3: Place, s3_proxy: FaultyProxy) -> None:
    store = through(s3, s3_proxy)
    s3_proxy.script = lambda request: Fault("delay", 0.05)
    put(store, "a", b"content")

    assert get(store, "a") == b"content"


# What will never work is said at once


def wrong_secret(place: Place) -> ObjectStore:
    return ObjectStore(place.url, {**place.options, "secret_access_key": f"{SECRET_KEY}-wrong"})


def no_bucket(place: Place) -> ObjectStore:
    return ObjectStore(place.url.replace(f"s3://{BUCKET}", BUCKETLESS), place.options)


def no_server(place: Place) -> ObjectStore:
    endpoint = f"http://127.0.0.1:{closed_port()}"
    return ObjectStore(place.url, {**place.options, "endpoint": endpoint})


REQUESTS: dict[str, Callable[[ObjectStore], Any]] = {
    "create": lambda store: store.create(),
    "list": lambda store: store.list(),
    "read": lambda store: store.open_reader("a"),
    "write": lambda store: put(store, "a", b"content"),
    "upload": lambda store: put(store, "a", bytes(20 << 20)),
}


@pytest.mark.parametrize(
    ("store_of", "request_of", "kind", "told", "named"),
    [
        *(
            (wrong_secret, each, PermissionError, "Check the credentials", "alone")
            for each in REQUESTS
        ),
        *((no_bucket, each, OSError, "bucket does not exist", BUCKETLESS) for each in REQUESTS),
        # A server that is not there is waited for a little.
        (no_server, "create", OSError, "nothing answers at http://127.0.0.1", "alone"),
        pytest.param(
            *(no_server, "upload", OSError, "nothing answers at http://127.0.0.1", "alone"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_will_never_work_is_an_error_soon_that_says_what_to_do_and_no_secret(
    store_of: Callable[[Place], ObjectStore],
    request_of: str,
    kind: type[OSError],
    told: str,
    named: str,
    s3: Place,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    store = store_of(s3)
    began = time.monotonic()
    with pytest.raises(kind, match=told) as caught:
        REQUESTS[request_of](store)

    assert time.monotonic() - began < SOON_SECONDS
    assert named in str(caught.value)
    causes, error = [], caught.value
    while error is not None:
        causes.append(f"{error!s} {error!r}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    for text in (*causes, repr(store), str(store), repr(store._clients), caplog.text):
        assert SECRET_KEY not in text
        assert ACCESS_KEY not in text


def test_a_server_that_takes_connections_and_never_answers_is_given_up_soon(
    s3: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = object_clients._SILENT_SECONDS
    assert first < SOON_SECONDS
    monkeypatch.setattr(object_clients, "_SILENT_SECONDS", (first / 8, later))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {**s3.options, "endpoint": endpoint, "retry_seconds": 0.1}
        began = time.monotonic()
        with pytest.raises(reshard.CheckpointException, match="nothing answers at"):
            reshard.load({}, checkpoint_id=s3.url, storage_options=options)

    # It was asked, and waited for, once.
    assert time.monotonic() - began < 2 * first / 8


def test_a_server_that_falls_silent_is_waited_for_as_long_as_the_limit_says(
    s3: Place, s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_clients, "_SILENT_SECONDS", (0.5, 0.5))
    store = through(s3, s3_proxy, retry_seconds=0.5)
    store.create()
    s3_proxy.script = lambda request: Fault("silent", 2 * SOON_SECONDS)
    began = time.monotonic()
    with pytest.raises(OSError, match="did not list this"):
        store.list()

    assert time.monotonic() - began < SOON_SECONDS


def test_an_object_that_is_missing_is_asked_for_once(s3: Place, s3_proxy: FaultyProxy) -> None:
    store = through(s3, s3_proxy)
    with pytest.raises(FileNotFoundError, match=r"s3://.*/missing"):
        store.open_reader("missing")

    assert len(s3_proxy.counts.requests) == 1


def test_an_option_with_a_wrong_name_is_an_error_that_shows_no_value(s3: Place) -> None:
    with pytest.raises(ValueError, match="secret_acess_key") as caught:
        ObjectStore(s3.url, {**s3.options, "secret_acess_key": SECRET_KEY})

    assert SECRET_KEY not in str(caught.value)


# The end of a server


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("nbytes", [1000, 24 << 20], ids=["small", "large"])
def test_a_server_that_is_gone_for_good_is_an_error_within_the_limit(
    nbytes: int, s3: Place, s3_proxy: FaultyProxy
) -> None:
    store = through(s3, s3_proxy, retry_seconds=1.0)
    store.create()
    writer = store.open_writer("a", nbytes)
    half = nbytes // 2
    writer.write(0, [memoryview(bytes(half))])
    s3_proxy.go_away()
    began = time.monotonic()
    with pytest.raises(OSError, match=r"within 1 s.*s3://.*/a"):  # noqa: PT012 - either may notice
        writer.write(half, [memoryview(bytes(nbytes - half))])
        writer.sync()
    writer.close()

    # obstore itself gives an upload up, with a limit of its own for that.
    assert time.monotonic() - began < 3
    assert s3.names() == []


def test_a_server_that_was_given_up_is_not_waited_for_as_long_again(
    s3: Place, s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_clients, "_FIRST_SECONDS", 0.1)
    store = through(s3, s3_proxy, retry_seconds=1.0)
    store.create()
    s3_proxy.go_away()
    with pytest.raises(OSError, match="within 1 s"):
        store.list()
    began = time.monotonic()
    with pytest.raises(OSError, match="nothing answers at"):
        store.list()

    assert time.monotonic() - began < 0.7


def test_a_save_is_made_although_nothing_can_be_cleared_up_behind_it(
    s3: Place, s3_proxy: FaultyProxy, caplog: pytest.LogCaptureFixture
) -> None:
    def script(request: Request) -> Fault | None:
        is_commit = request.method == "PUT" and request.path.endswith("/.metadata")
        if is_commit:
            s3_proxy.script = lambda request: Fault("403")
        return None

    s3_proxy.script = script
    options = s3.through(s3_proxy.endpoint).options
    reshard.save({"a": torch.ones(2)}, checkpoint_id=s3.url, storage_options=options)

    assert s3_proxy.counts.faults["403"] >= 2
    assert "a draft is left" in caplog.text
    assert reshard.read_tensor(s3.url, "a", storage_options=s3.options).tolist() == [1, 1]


@pytest.mark.usefixtures("small_parts")
def test_an_upload_that_is_refused_in_the_middle_leaves_nothing(
    s3: Place, s3_proxy: FaultyProxy
) -> None:
    store = through(s3, s3_proxy)
    s3_proxy.script = lambda request: Fault("403") if "partNumber=3" in request.path else None
    with pytest.raises(PermissionError, match="Check the credentials"):
        put(store, "a", bytes(24 << 20))

    assert s3_proxy.counts.faults["403"] == 1
    assert s3.names() == []
    assert s3.uploads() == []


@pytest.mark.usefixtures("small_parts")
def test_an_upload_that_is_closed_in_the_middle_leaves_nothing(s3: Place) -> None:
    store = ObjectStore(s3.url, s3.options)
    writer = store.open_writer("a", 24 << 20)
    writer.write(0, [memoryview(bytes(11 << 20))])
    writer.close()

    assert s3.names() == []
    assert s3.uploads() == []


def test_an_object_that_is_replaced_while_it_is_read_is_no_mixture(s3: Place) -> None:
    store, size = ObjectStore(s3.url, s3.options), 100_000
    obstore.put(s3.store(), f"{s3.prefix}/a", b"1" * size)
    reader = store.open_reader("a")
    obstore.put(s3.store(), f"{s3.prefix}/a", b"2" * (size + 1))
    buffer = bytearray(size)
    with pytest.raises(OSError, match=r"replaced.*s3://.*/a"):
        reader.read_into(0, [memoryview(buffer)])


def test_options_may_be_a_store_of_obstore(s3: Place) -> None:
    store = ObjectStore(s3.url, {"store": s3.store()})
    put(store, "a", b"content")

    assert s3.names() == ["a"]
    assert get(store, "a") == b"content"
    assert SECRET_KEY not in repr(store)


def test_options_come_from_the_environment(
    s3: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.options["endpoint"])
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    store = ObjectStore(s3.url)
    put(store, "a", b"content")

    assert s3.names() == ["a"]


@pytest.mark.parametrize("nbytes", [50, 1000, 2000])
def test_an_answer_that_breaks_off_is_not_completed_by_another_object(
    nbytes: int, s3: Place, s3_proxy: FaultyProxy
) -> None:
    obstore.put(s3.store(), f"{s3.prefix}/a", b"1" * 1000)
    seen: list[Request] = []

    def script(request: Request) -> Fault | None:
        if not seen:
            seen.append(request)
            return Fault("truncated")
        # Whoever asks for the rest finds another object.
        obstore.put(s3.store(), f"{s3.prefix}/a", b"2" * nbytes)
        return None

    s3_proxy.script = script
    assert get(through(s3, s3_proxy), "a") == b"2" * nbytes


@pytest.mark.parametrize(
    "options", [{"concurrency": -3}, {"retry_seconds": "x"}, {"retry_seconds": 0.0}]
)
def test_a_setting_that_is_no_number_to_use_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is a positive number"):
        ObjectStore("s3://bucket/run", options)

"""Which place a URL of an object store means, and which server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from obstore.store import MemoryStore, S3Store

import reshard
from reshard.stores.objects import ObjectStore
from reshard.stores.urls import object_url
from support.object_servers import BUCKET, Place


def put(store: ObjectStore, key: str = "a") -> None:
    writer = store.open_writer(key, 7)
    writer.write(0, [memoryview(b"content")])
    writer.close()


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3://bucket/run/", "s3://bucket/run"),
        ("s3://bucket/run//step", "s3://bucket/run/step"),
        ("s3://bucket//run", "s3://bucket/run"),
        ("S3://Bucket/Run", "s3://Bucket/Run"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a b/50%/ü", "s3://bucket/a b/50%/ü"),
        (
            "abfss://box@account.dfs.core.windows.net/x",
            "abfss://box@account.dfs.core.windows.net/x",
        ),
    ],
)
def test_urls_that_mean_one_place_are_one(url: str, meant: str) -> None:
    assert object_url(url) == meant


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://bucket/run?versionId=3/step", "question mark"),
        ("s3://bucket/run/../step", r"'\.' or '\.\.'"),
        ("s3://bucket/./run", r"'\.' or '\.\.'"),
        ("s3://", "no bucket"),
        ("s3:///run", "no bucket"),
    ],
)
def test_a_url_that_would_lead_elsewhere_is_refused(url: str, why: str) -> None:
    with pytest.raises(reshard.CheckpointException, match=why):
        reshard.save({"a": torch.ones(2)}, checkpoint_id=url, storage_options={"region": "x"})


MISTAKEN: dict[str, Callable[[str], object]] = {
    "writer": lambda url: reshard.save({}, storage_writer=reshard.FileSystemWriter(url)),
    "writer for Hugging Face": lambda url: reshard.save(
        {}, storage_writer=reshard.HuggingFaceStorageWriter(url)
    ),
    "place of a writer": lambda url: reshard.save(
        {}, checkpoint_id=url, storage_writer=reshard.FileSystemWriter("here")
    ),
    "path": lambda url: reshard.save({}, checkpoint_id=Path(url)),
    "path in the background": lambda url: reshard.async_save({}, checkpoint_id=Path(url)).result(),
    "reader": lambda url: reshard.load({}, storage_reader=reshard.FileSystemReader(url)),
    "reader for Hugging Face": lambda url: reshard.load(
        {}, storage_reader=reshard.HuggingFaceStorageReader(url)
    ),
    "path to read from": lambda url: reshard.read_tensor(Path(url), "a"),
    "path to delete": lambda url: reshard.delete(Path(url)),
}


@pytest.mark.parametrize("how", MISTAKEN)
def test_a_url_that_would_become_a_local_directory_is_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, reshard.CheckpointException), match="'s3://b/run' is a URL"):
        MISTAKEN[how]("s3://b/run")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("form", ["{}//step", "S3{}/step/"])
def test_a_place_is_found_by_any_form_of_its_url(form: str, s3: Place) -> None:
    url = form.format(s3.url if form.startswith("{}") else s3.url.removeprefix("s3"))
    reshard.save({"a": torch.ones(2)}, checkpoint_id=url, storage_options=s3.options)

    found = reshard.read_tensor(f"{s3.url}/step", "a", storage_options=s3.options)
    assert found.tolist() == [1, 1]


def test_a_bucket_itself_is_a_place_that_can_be_overwritten() -> None:
    options = {"store": MemoryStore()}
    for value in range(3):
        reshard.save(
            {"a": torch.tensor([value])}, checkpoint_id="s3://b/x", storage_options=options
        )
        reshard.save({"a": torch.tensor([value])}, checkpoint_id="s3://b", storage_options=options)

    assert reshard.read_tensor("s3://b", "a", storage_options=options).tolist() == [2]


def test_a_base_in_another_bucket_is_refused_with_the_reason() -> None:
    options = {"store": MemoryStore()}
    reshard.save({"a": torch.ones(2)}, checkpoint_id="s3://one/x", storage_options=options)
    with pytest.raises(reshard.CheckpointException, match="another bucket"):
        reshard.save(
            {"a": torch.ones(2)},
            checkpoint_id="s3://two/x",
            base="s3://one/x",
            storage_options=options,
        )


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"bucket": "other"}, "bucket 'other'.*'checkpoints'"), ({"prefix": "runs"}, "prefix 'runs'")],
)
def test_a_ready_store_of_another_place_is_refused(
    changes: dict[str, Any], why: str, s3: Place
) -> None:
    ready = S3Store(**{"bucket": BUCKET, **s3.options, **changes})
    with pytest.raises(ValueError, match=why):
        ObjectStore(s3.url, {"store": ready})


@pytest.mark.parametrize(
    "name", ["endpoint_url", "aws_endpoint", "AWS_ENDPOINT_URL", "config", "environment"]
)
def test_an_endpoint_without_tls_is_used_by_whatever_name_it_is_given(
    name: str, s3: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(s3.options)
    endpoint = options.pop("endpoint")
    del options["client_options"]
    if name == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    else:
        options[name] = {"endpoint": endpoint} if name == "config" else endpoint
    put(ObjectStore(s3.url, {**options, "retry_seconds": 1}))

    assert s3.names() == ["a"]


@pytest.mark.parametrize("endpoint", ["not an address", "127.0.0.1:9000", "http://"])
def test_an_endpoint_that_is_no_address_is_an_error(endpoint: str) -> None:
    with pytest.raises(reshard.CheckpointException, match="is no address"):
        reshard.load({}, checkpoint_id="s3://b/run", storage_options={"endpoint": endpoint})

"""Storages that others publish, as they are: they derive from torch's classes and know only those.

Packages that are not installed are skipped: `pip install s3torchconnector 'moto[server]'`, and
`pip install ai2-olmo-core bettermap`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from support.ranks import run_ranks

pytestmark = pytest.mark.slow
REGION, BUCKET = "us-east-1", "checkpoints"
WEIGHTS = torch.arange(24.0).reshape(6, 4)


def state(dim: int, factor: float = 1.0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = distribute_tensor(WEIGHTS * factor, mesh, [Shard(dim)])
    return {"model": {"w": weights, "bias": torch.full((3,), factor)}, "step": int(7 * factor)}


def is_as_saved(found: dict[str, Any]) -> bool:
    whole = found["model"]["w"].full_tensor()
    bias = found["model"]["bias"]
    return torch.equal(whole, WEIGHTS) and bias.tolist() == [1.0] * 3 and found["step"] == 7


# s3torchconnector


@pytest.fixture
def endpoint() -> Iterator[str]:
    """An S3 server of our own, on this machine."""
    pytest.importorskip("s3torchconnector", reason="s3torchconnector is not installed")
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": REGION}
    boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket=BUCKET)
    yield url
    server.stop()


def s3(endpoint: str, kind: str, path: str) -> Any:
    """A storage of s3torchconnector, told where the server is."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    storage = {"writer": S3StorageWriter, "reader": S3StorageReader}[kind](REGION, path)
    config = S3ClientConfig(force_path_style=True)
    storage.fs._client = S3Client(region=REGION, endpoint=endpoint, s3client_config=config)
    return storage


def save_to_s3(endpoint: str) -> list[bool]:
    place = f"s3://{BUCKET}/step-7"
    reshard.save(state(0), storage_writer=s3(endpoint, "writer", place))
    found = []
    for planner in (None, dcp.DefaultLoadPlanner()):
        target = state(1, 0.0)
        reshard.load(target, storage_reader=s3(endpoint, "reader", place), planner=planner)
        found.append(is_as_saved(target))
    theirs = state(1, 0.0)
    dcp.load(theirs, storage_reader=s3(endpoint, "reader", place))
    later = f"s3://{BUCKET}/step-8"
    reshard.async_save(state(0), storage_writer=s3(endpoint, "writer", later)).result()
    again = state(1, 0.0)
    reshard.load(again, storage_reader=s3(endpoint, "reader", later))
    with reshard.patch():
        patched = state(0, 0.0)
        dcp.save(state(0), storage_writer=s3(endpoint, "writer", f"{later}-patched"))
        dcp.load(patched, storage_reader=s3(endpoint, "reader", f"{later}-patched"))
    return [*found, *map(is_as_saved, (theirs, again, patched))]


def test_s3torchconnector_saves_and_loads(endpoint: str) -> None:
    assert run_ranks(2, save_to_s3, endpoint) == [[True] * 5] * 2


# OLMo-core


def save_with_olmo(folder: str) -> list[bool]:
    from olmo_core.distributed.checkpoint.filesystem import (
        RemoteFileSystemReader,
        RemoteFileSystemWriter,
    )

    found = []
    for number, planner in enumerate(
        (None, dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    ):
        place = f"{folder}/{number}"
        writer = RemoteFileSystemWriter(place, thread_count=2)
        reshard.save(state(0), storage_writer=writer, planner=planner)
        target, theirs = state(1, 0.0), state(1, 0.0)
        reshard.load(target, storage_reader=RemoteFileSystemReader(place))
        dcp.load(theirs, storage_reader=RemoteFileSystemReader(place))
        found += map(is_as_saved, (target, theirs))
    with reshard.patch():
        # Their module has names of torch's, and classes that derive from torch's.
        place = f"{folder}/patched"
        dcp.save(state(0), storage_writer=RemoteFileSystemWriter(place))
        target = state(1, 0.0)
        dcp.load(target, storage_reader=RemoteFileSystemReader(place))
    theirs = state(1, 0.0)
    dcp.load(theirs, storage_reader=RemoteFileSystemReader(place))
    return [*found, *map(is_as_saved, (target, theirs))]


def test_the_storages_of_olmo_core_save_and_load(tmp_path: Path) -> None:
    pytest.importorskip(
        "olmo_core.distributed.checkpoint.filesystem", reason="ai2-olmo-core is not installed"
    )
    assert run_ranks(2, save_with_olmo, str(tmp_path)) == [[True] * 6] * 2

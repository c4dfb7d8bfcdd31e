"""Saves to an object store and loads from it, beside plain obstore and DCP over others' storages.

`make bench-object` starts SeaweedFS with its data in memory, prints a table and writes
docs/benchmarks/object_store.json. All take turns in the same two processes, on the same bytes,
with the same number of requests at a time; the best of several rounds counts. Server and clients
share the cores, so only ratios within one run mean anything.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import JOBS, options, record, run_ranks, timed
from obstore.store import S3Store
from rich.console import Console
from rich.table import Table
from s3torchconnector import S3ClientConfig
from s3torchconnector._s3client import S3Client
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
from save_load import leaves, make_state
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.tensor import Shard

import reshard

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.object_servers import BUCKET, seaweedfs

ROUNDS = 3
CONCURRENCY = 8
PART_BYTES = 16 << 20
PIECE_BYTES = 8 << 20
CHUNKS = 64
BARS = {"of obstore": 0.85, "times DCP": 2.0, "moved": 1.1, "one tensor": 3, "open": 1}
OPTIONS = ("endpoint", "access_key_id", "secret_access_key")


def storage_options() -> dict[str, Any]:
    given = {name: os.environ[f"BENCH_{name}"] for name in OPTIONS}
    return given | {"region": "us-east-1", "concurrency": CONCURRENCY}


def plain_store() -> Any:
    settings = storage_options()
    settings.pop("concurrency")
    return S3Store(BUCKET, **settings, client_options={"allow_http": True})


def fsspec_options() -> dict[str, Any]:
    key, secret, endpoint = (
        storage_options()[name] for name in ("access_key_id", "secret_access_key", "endpoint")
    )
    return {"key": key, "secret": secret, "client_kwargs": {"endpoint_url": endpoint}}


def connector(kind: Any, path: str) -> Any:
    """A storage of s3torchconnector, told where the server is."""
    settings = storage_options()
    os.environ["AWS_ACCESS_KEY_ID"] = settings["access_key_id"]
    os.environ["AWS_SECRET_ACCESS_KEY"] = settings["secret_access_key"]
    storage, region = kind("us-east-1", path), "us-east-1"
    storage.fs._client = S3Client(
        region=region,
        endpoint=settings["endpoint"],
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    return storage


def put(store: Any, name: str, data: memoryview) -> None:
    """All bytes of a rank as one object, in parts."""
    obstore.put(
        store,
        name,
        data,
        use_multipart=True,
        chunk_size=PART_BYTES,
        max_concurrency=CONCURRENCY,
    )


def get(store: Any, name: str, into: memoryview) -> None:
    """All bytes of a rank, in pieces, each copied to its place."""

    def one(begin: int) -> None:
        end = min(begin + PIECE_BYTES, len(into))
        into[begin:end] = obstore.get_range(store, name, start=begin, end=end)

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(one, range(0, len(into), PIECE_BYTES)))


def measure(mesh: Any, box: Path, megabytes: int) -> dict[str, Any]:
    rank, settings = dist.get_rank(), storage_options()
    state = make_state(mesh, [Shard(0)], megabytes)
    nbytes = sum(tensor.nbytes for tensor in leaves(state)) * dist.get_world_size()
    flat = torch.rand(nbytes // dist.get_world_size() // 4)
    view = memoryview(flat.numpy()).cast("B")  # type: ignore[arg-type]
    store = plain_store()
    ours, theirs = f"s3://{BUCKET}/ours", f"s3://{BUCKET}/theirs"
    connected = f"s3://{BUCKET}/connected"

    def save_with_dcp() -> None:
        writer = FsspecWriter(theirs, sync_files=False, overwrite=True, **fsspec_options())
        dcp.save(state, storage_writer=writer)

    saves: dict[str, Callable[[], Any]] = {
        "obstore": lambda: put(store, f"plain/{rank}", view),
        "reshard": lambda: reshard.save(state, checkpoint_id=ours, storage_options=settings),
        "DCP over s3fs": save_with_dcp,
        "DCP over s3torchconnector": lambda: dcp.save(
            state, storage_writer=connector(S3StorageWriter, connected)
        ),
    }
    loads: dict[str, Callable[[], Any]] = {
        "obstore": lambda: get(store, f"plain/{rank}", view),
        "reshard": lambda: reshard.load(state, checkpoint_id=ours, storage_options=settings),
        "DCP over s3fs": lambda: dcp.load(
            state, storage_reader=FsspecReader(theirs, **fsspec_options())
        ),
        "DCP over s3torchconnector": lambda: dcp.load(
            state, storage_reader=connector(S3StorageReader, connected)
        ),
    }
    results: dict[str, Any] = {"bytes": nbytes, "seconds": {}}
    for what, ways in (("save", saves), ("load", loads)):
        rounds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, work in ways.items():
                rounds[name].append(timed(work))
        results["seconds"][what] = {name: min(each) for name, each in rounds.items()}
    other = make_state(mesh, [Shard(1)], megabytes)
    report = reshard.load(other, checkpoint_id=ours, storage_options=settings)
    moved = torch.tensor([float(getattr(report, "bytes_read", 0)), float(report.requests)])
    dist.all_reduce(moved)
    results["moved"], results["requests"] = moved[0].item() / nbytes, int(moved[1].item())
    return results


def save_many(mesh: Any, box: Path, tensors: int) -> dict[str, Any]:
    """Tensors in as many chunks as 64 ranks would save, for what it takes to open them."""
    state = {f"layers.{i}.weight": in_chunks(torch.zeros(CHUNKS, 4)) for i in range(tensors)}
    reshard.save(state, checkpoint_id=f"s3://{BUCKET}/many", storage_options=storage_options())
    return {}


def in_chunks(tensor: Any) -> Any:
    """The same tensor, each of whose rows is a chunk of its own."""
    rows = tuple((row, 0) for row in range(len(tensor)))
    tensor.global_shape = tuple(tensor.shape)
    tensor.global_offsets = tensor.local_offsets = rows
    tensor.local_sizes = ((1, tensor.shape[1]),) * len(tensor)
    return tensor


def look() -> dict[str, int]:
    """How many requests it takes to read one tensor, and to open and list a checkpoint."""
    found = {}
    reader = reshard.ObjectStoreReader(f"s3://{BUCKET}/ours", storage_options=storage_options())
    name = next(iter(reader.read_metadata().state_dict_metadata))
    wanted = {name: torch.empty(reader.read_metadata().state_dict_metadata[name].size)}
    found["one tensor"] = reshard.load(
        wanted, checkpoint_id=f"s3://{BUCKET}/ours", storage_options=storage_options(), no_dist=True
    ).requests
    many = reshard.ObjectStoreReader(f"s3://{BUCKET}/many", storage_options=storage_options())
    entries = many.read_metadata().state_dict_metadata
    found["tensors"], found["chunks"] = len(entries), sum(len(e.chunks) for e in entries.values())
    found["open"] = many.requests_made
    return found


JOBS["object-store"] = measure
JOBS["many"] = save_many


def verdict(holds: bool) -> str:
    return "holds" if holds else "MISSED"


def show(found: dict[str, Any]) -> None:
    table = Table(title=f"{found['bytes'] / 1e9:.1f} GB on SeaweedFS, 2 ranks")
    systems = [*found["seconds"]["save"]]
    for column in ("what", *systems, "of obstore", "times s3fs", ""):
        table.add_column(column, justify="left" if column == "what" else "right")
    for what, seconds in found["seconds"].items():
        of_raw = seconds["obstore"] / seconds["reshard"]
        times = seconds["DCP over s3fs"] / seconds["reshard"]
        holds = of_raw >= BARS["of obstore"] and times >= BARS["times DCP"]
        table.add_row(
            what,
            *(f"{seconds[name]:.2f} s" for name in systems),
            f"{of_raw:.2f}",
            f"{times:.1f}",
            verdict(holds),
        )
    console = Console()
    console.print(table)
    lines = {
        f"Shard(0) to Shard(1): {found['moved']:.2f} of the wanted bytes in {found['requests']} "
        "requests": found["moved"] <= BARS["moved"],
        f"one tensor: {found['one tensor']} requests": found["one tensor"] <= BARS["one tensor"],
        f"open and list {found['tensors']} tensors in {found['chunks']} chunks: {found['open']} "
        "requests": found["open"] <= BARS["open"],
    }
    for line, holds in lines.items():
        console.print(f"  {line}: {verdict(holds)}")


def main() -> None:
    arguments = options(__doc__, ["object-store"])
    box = Path(tempfile.mkdtemp(prefix="reshard-object-"))
    try:
        with seaweedfs() as server:
            os.environ.update({f"BENCH_{name}": str(server.options[name]) for name in OPTIONS})
            found = run_ranks("object-store", 2, box, min(arguments.megabytes, 1000))
            run_ranks("many", 1, box, 1000)
            found |= look()
    finally:
        shutil.rmtree(box)
    show(found)
    record("object_store", found)


if __name__ == "__main__":
    main()

"""A storage of a user's own, in the way of OLMo-core: buckets behind an URL, threads, torch.save.

Nothing here knows which library calls it. Classes are made for one by its name.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.recipes import part

SCHEME = "bucket://"
THREADS = 3


def put(url: str, data: bytes) -> None:
    """Upload an object; it appears as a whole."""
    path = _path(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f"{path.name}.{uuid.uuid4()}")
    hidden.write_bytes(data)
    hidden.rename(path)


def get(url: str, offset: int = 0, length: int | None = None) -> bytes:
    with open(_path(url), "rb") as file:
        file.seek(offset)
        return file.read() if length is None else file.read(length)


def names(url: str) -> list[str]:
    return sorted(os.listdir(_path(url)))


def _path(url: str) -> Path:
    if not url.startswith(SCHEME):
        raise ValueError(f"not in a bucket: {url}")
    return Path(url.removeprefix(SCHEME))


@dataclass
class Prefix:
    prefix: str


@dataclass
class Place:
    name: str
    offset: int
    length: int


def narrow(tensor: torch.Tensor, offsets: Any, lengths: Any) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def writer_class(library: str) -> type:
    """A `StorageWriter` with all hooks, and none of the optional parameters."""
    dist_cp, storage, planner_module = (
        part(library, module) for module in ("", "storage", "planner")
    )

    class BucketWriter(dist_cp.StorageWriter):
        def __init__(self, url: str, process_group: Any = None) -> None:
            super().__init__()
            self.url = url
            # Holds what no other process could be sent.
            self.process_group = process_group
            self.save_id = str(uuid.uuid4())
            self.calls: list[str] = []

        def reset(self, checkpoint_id: Any = None) -> None:
            self.calls.append("reset")
            if checkpoint_id:
                self.url = str(checkpoint_id)
            self.save_id = str(uuid.uuid4())

        def set_up_storage_writer(self, is_coordinator: bool) -> None:
            self.calls.append("set_up_storage_writer")

        def prepare_local_plan(self, plan: Any) -> Any:
            self.calls.append("prepare_local_plan")
            return plan

        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            self.calls.append("prepare_global_plan")
            return [
                dataclasses.replace(plan, storage_data=Prefix(f"__{rank}_"))
                for rank, plan in enumerate(plans)
            ]

        def write_data(self, plan: Any, planner: Any) -> Any:
            self.calls.append("write_data")
            buckets = self._deal_out(plan.items)
            with ThreadPoolExecutor(THREADS) as pool:
                uploads = [
                    pool.submit(self._upload, f"{plan.storage_data.prefix}{n}.pt", items, planner)
                    for n, items in enumerate(buckets)
                ]
                results = [result for upload in uploads for result in upload.result()]
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(results)
            return future

        def _deal_out(self, items: Any) -> list[list[Any]]:
            """The largest first, each to the emptiest bucket."""
            kind = planner_module.WriteItemType.BYTE_IO
            values = [item for item in items if item.type == kind]
            tensors = [item for item in items if item.type != kind]
            tensors.sort(key=lambda item: item.tensor_data.size.numel(), reverse=True)
            buckets: list[list[Any]] = [values[n::THREADS] for n in range(THREADS)]
            loads = [0] * THREADS
            for item in tensors:
                least = loads.index(min(loads))
                buckets[least].append(item)
                loads[least] += item.tensor_data.size.numel()
            return buckets

        def _upload(self, name: str, items: list[Any], planner: Any) -> list[Any]:
            file, results = io.BytesIO(), []
            for item in items:
                begin = file.tell()
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    torch.save(data.detach().cpu().clone(), file)
                else:
                    file.write(data.getbuffer())
                place = Place(name, begin, file.tell() - begin)
                results.append(storage.WriteResult(item.index, place.length, place))
            put(f"{self.url}/{name}", file.getvalue())
            return results

        def finish(self, metadata: Any, results: list[list[Any]]) -> None:
            self.calls.append("finish")
            metadata.storage_data = {
                result.index: result.storage_data for some in results for result in some
            }
            metadata.storage_meta = self.storage_meta()
            put(f"{self.url}/.metadata", pickle.dumps(metadata))

        def storage_meta(self) -> Any:
            metadata = part(library, "metadata")
            return metadata.StorageMeta(checkpoint_id=self.url, save_id=self.save_id)

        @property
        def checkpoint_id(self) -> str:
            return self.url

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return str(checkpoint_id).startswith(SCHEME)

    return BucketWriter


def reader_class(library: str) -> type:
    """A `StorageReader` with all hooks, and none of the optional parameters."""
    dist_cp, planner_module = part(library), part(library, "planner")

    class BucketReader(dist_cp.StorageReader):
        def __init__(self, url: str) -> None:
            super().__init__()
            self.url = url
            self.storage_data: dict[Any, Place] = {}
            self.calls: list[str] = []
            self._metadata: Any = None

        def reset(self, checkpoint_id: Any = None) -> None:
            self.calls.append("reset")
            self.storage_data = {}
            if checkpoint_id:
                self.url = str(checkpoint_id)

        def read_metadata(self) -> Any:
            self.calls.append("read_metadata")
            if self._metadata is None:
                self._metadata = pickle.loads(get(f"{self.url}/.metadata"))
            return self._metadata

        def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:
            self.calls.append("set_up_storage_reader")
            self.storage_data = metadata.storage_data

        def prepare_local_plan(self, plan: Any) -> Any:
            self.calls.append("prepare_local_plan")
            return plan

        def prepare_global_plan(self, global_plan: list[Any]) -> list[Any]:
            self.calls.append("prepare_global_plan")
            return global_plan

        def read_data(self, plan: Any, planner: Any) -> Any:
            self.calls.append("read_data")
            with ThreadPoolExecutor(THREADS) as pool:
                contents = list(pool.map(self._download, plan.items))
            for item, content in zip(plan.items, contents, strict=True):
                if item.type == planner_module.LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(content))
                    continue
                stored = torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
                target = planner.resolve_tensor(item).detach()
                target.copy_(narrow(stored, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
            future: torch.futures.Future[None] = torch.futures.Future()
            future.set_result(None)
            return future

        def _download(self, item: Any) -> bytes:
            place = self.storage_data[item.storage_index]
            return get(f"{self.url}/{place.name}", place.offset, place.length)

        @property
        def checkpoint_id(self) -> str:
            return self.url

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return str(checkpoint_id).startswith(SCHEME)

    return BucketReader

"""Manifests and shard files taken apart, changed, and put together again with a sound checksum.

Nothing here uses the code under test to read or write a manifest, so that what an attacker
could write can be written.
"""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

import reshard
from reshard.api import CheckpointException

MANIFEST = ".metadata"
SAVE_ID = "feedface-feed-face-feed-facefeedface"
SHARD = "__0_0_feedfacefeedface.safetensors"


class Part(NamedTuple):
    """One entry of a container, with its bytes."""

    dtype: str
    shape: list[int]
    data: bytes


class OpenManifest:
    """The entries of a manifest, free to be changed; `write` seals it again."""

    def __init__(self, directory: Path, name: str = MANIFEST) -> None:
        self.path = Path(directory) / name
        raw = self.path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        self.notes: Any = header.pop("__metadata__")
        self.parts: dict[str, Part] = {}
        for entry, form in header.items():
            begin, end = (8 + length + at for at in form["data_offsets"])
            self.parts[entry] = Part(form["dtype"], form["shape"], raw[begin:end])
        del self.parts["checksum"]
        # Merged into the description of an entry when it is written, to tell lies.
        self.lies: dict[str, dict[str, Any]] = {}

    def ints(self, name: str) -> list[int]:
        part = self.parts[name]
        size = {"I64": 8, "U8": 1}[part.dtype]
        letter = {"I64": "q", "U8": "B"}[part.dtype]
        return list(struct.unpack(f"<{len(part.data) // size}{letter}", part.data))

    def set_ints(
        self, name: str, numbers: Sequence[int], shape: Sequence[int] | None = None
    ) -> None:
        part = self.parts[name]
        letter = {"I64": "q", "U8": "B"}[part.dtype]
        data = struct.pack(f"<{len(numbers)}{letter}", *numbers)
        kept = part.shape if len(numbers) * struct.calcsize(letter) == len(part.data) else None
        self.parts[name] = Part(part.dtype, list(shape or kept or [len(numbers)]), data)

    def change(self, name: str, position: int, number: int) -> None:
        numbers = self.ints(name)
        numbers[position] = number
        self.set_ints(name, numbers)

    def texts(self, name: str) -> list[str]:
        return msgspec.msgpack.decode(self.parts[name].data, type=list[str])

    def set_texts(self, name: str, texts: Sequence[str]) -> None:
        self.set_bytes(name, msgspec.msgpack.encode(list(texts)))

    def set_bytes(self, name: str, data: bytes) -> None:
        self.parts[name] = Part("U8", [len(data)], data)

    def tensor_row(self, name: str) -> int:
        return self.texts("tensors.names").index(name)

    def chunk_row(self, name: str) -> int:
        return self.ints("tensors.chunk_starts")[self.tensor_row(name)]

    def encode(self) -> bytes:
        header: dict[str, Any] = {"__metadata__": self.notes}
        position = 0
        ordered = sorted(self.parts.items(), key=lambda item: item[1].dtype != "I64")
        for name, part in [*ordered, ("checksum", Part("U8", [8], b"\0" * 8))]:
            end = position + len(part.data)
            header[name] = {
                "dtype": part.dtype,
                "shape": part.shape,
                "data_offsets": [position, end],
                **self.lies.get(name, {}),
            }
            position = end
        text = json.dumps(header).encode()
        return seal(with_header(text) + b"".join(part.data for _, part in ordered))

    def write(self) -> None:
        self.path.write_bytes(self.encode())


def with_header(text: bytes) -> bytes:
    """A container's header of the given JSON, padded as the format says."""
    text += b" " * (-(8 + len(text)) % 4096)
    return struct.pack("<Q", len(text)) + text


def seal(body: bytes) -> bytes:
    """`body` followed by its checksum, as a manifest ends."""
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def reseal(manifest: bytes) -> bytes:
    """A manifest that was changed, with the checksum that it now should have."""
    return seal(manifest[:-8])


def replace_value(directory: Path, name: str, data: bytes) -> None:
    """Store other bytes for a value, with everything that refers to them made right."""
    manifest = OpenManifest(directory)
    row = manifest.texts("values.names").index(name)
    file = manifest.ints("values.files")[row]
    path = Path(directory) / manifest.texts("files.paths")[file]
    manifest.change("values.begins", row, path.stat().st_size)
    with path.open("ab") as shard:
        shard.write(data)
    manifest.change("values.nbytes", row, len(data))
    manifest.change("values.checksums", row, signed(xxhash.xxh3_64_intdigest(data)))
    manifest.change("files.nbytes", file, path.stat().st_size)
    manifest.write()


def signed(number: int) -> int:
    return struct.unpack("<q", struct.pack("<Q", number))[0]


STEP = 123456789


def small_state() -> dict[str, Any]:
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    return {
        "model": {"weight": weight, "bias": torch.arange(4, dtype=torch.int64), "tied": weight},
        "step": STEP,
        "note": "a value",
    }


def blank_state() -> dict[str, Any]:
    """A template for `small_state`."""
    return {
        "model": {
            "weight": torch.zeros(3, 4),
            "bias": torch.zeros(4, dtype=torch.int64),
            "tied": torch.zeros(3, 4),
        },
        "step": 0,
        "note": "",
    }


def save_small(directory: Path) -> Path:
    """A checkpoint of two tensors, one tied to the first, and two values."""
    writer = reshard.FileSystemWriter(directory)
    writer.save_id = SAVE_ID
    reshard.save(small_state(), storage_writer=writer, no_dist=True)
    return directory


def load_all(directory: Path) -> dict[str, Any]:
    state = blank_state()
    reshard.load(state, checkpoint_id=directory, no_dist=True)
    return state


DOORS: dict[str, Callable[[Path], Any]] = {
    "load": load_all,
    "read_state_dict": lambda directory: reshard.read_state_dict(directory),
    "read_tensor": lambda directory: reshard.read_tensor(directory, "model.weight"),
}


def reason_of(error: BaseException) -> BaseException:
    """What went wrong on rank 0, without the envelope that every failure travels in."""
    while isinstance(error, CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    return error


def refusal(call: Callable[[], Any]) -> CheckpointException:
    """The reason for which `call` is refused, which must be one of ours."""
    try:
        result = call()
    except Exception as error:  # noqa: BLE001 - which one is the question
        reason = reason_of(error)
        if not isinstance(reason, CheckpointException) or type(reason) is CheckpointException:
            # Without the original, whose frames may hold more than pytest can print.
            raise AssertionError(
                f"refused for no reason of ours: {type(reason).__name__}: {str(reason)[:300]}"
            ) from None
        chain: BaseException | None = reason
        while chain is not None:
            text = str(chain)
            if isinstance(chain, MemoryError) or "allocate memory" in text:
                raise AssertionError(f"memory was asked for first: {text[:300]}") from None
            chain = chain.__cause__ or chain.__context__
        return reason
    raise AssertionError(f"accepted; the result is {str(result)[:200]}")


def check_refused(call: Callable[[], Any], *names: str) -> str:
    """`call` is refused with a reason that has one of `names` in it; the reason."""
    text = str(refusal(call))
    assert any(name in text for name in names), f"{text!r} names none of {names}"
    return text


@contextmanager
def memory_limit(nbytes: int = 1 << 30) -> Iterator[None]:
    """No more than `nbytes` of address space beyond what this process has now.

    Threads reserve some of it too, so it cannot be much tighter.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * os.sysconf("SC_PAGE_SIZE") + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

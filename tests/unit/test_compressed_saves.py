"""Saves with `compress` or with stream extensions, and what is read back from them."""

from __future__ import annotations

import builtins
import io
from pathlib import Path
from typing import IO, Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
    ZStandard,
)

import reshard
from reshard.api import CheckpointException, CorruptCheckpointError, UnsupportedFormatError
from reshard.checkpoint.directory import read_manifest
from reshard.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from reshard.engine import streams
from reshard.stores.local import LocalStore
from support.background import PROCESS, THREAD
from support.hostile import OpenManifest, check_refused


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.02

    return {
        "model": {
            "weight": weights(900, 1100),
            "half": weights(300, 1000).bfloat16(),
            "bias": weights(100),
            "turned": weights(400, 500).t(),
        },
        "noise": torch.randint(0, 256, (1 << 20,), generator=generator, dtype=torch.uint8),
        "step": 7,
        "text": "a" * 100_000,
    }


def blank() -> dict[str, Any]:
    model = {name: torch.zeros_like(tensor) for name, tensor in state()["model"].items()}
    return {"model": model, "noise": torch.zeros(1 << 20, dtype=torch.uint8), "step": 0, "text": ""}


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    assert torch.equal(found["noise"], expected["noise"])
    assert (found["step"], found["text"]) == (expected["step"], expected["text"])


def shard_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("verify", ["off", "chunks", "full"])
@pytest.mark.parametrize("single_file", [True, False])
def test_a_compressed_save_is_smaller_and_loads_as_it_was(
    verify: Any, single_file: bool, tmp_path: Path
) -> None:
    writer = reshard.FileSystemWriter(tmp_path / "packed", single_file_per_rank=single_file)
    reshard.save(state(), storage_writer=writer, compress="zstd")
    reshard.save(state(), checkpoint_id=tmp_path / "plain")

    loaded = blank()
    reshard.load(loaded, checkpoint_id=tmp_path / "packed", verify=verify)
    check_same(loaded, state())
    check_same(reshard.read_state_dict(tmp_path / "packed"), state())
    assert shard_bytes(tmp_path / "packed") < 0.9 * shard_bytes(tmp_path / "plain")
    assert writer.compress is None


def test_compressed_files_are_valid_safetensors_files(tmp_path: Path) -> None:
    reshard.save(state(), checkpoint_id=tmp_path, compress="zstd")
    (path,) = tmp_path.glob("*.safetensors")
    loaded = safetensors.torch.load_file(path)

    assert loaded["model.weight"].dtype is torch.uint8
    assert torch.equal(loaded["noise"], state()["noise"])
    assert torch.equal(loaded["model.bias"], state()["model"]["bias"])


def test_the_manifest_says_which_chunks_are_encoded_and_that_a_reader_must_know(
    tmp_path: Path,
) -> None:
    metadata = reshard.save(state(), checkpoint_id=tmp_path, compress="zstd")
    manifest = read_manifest(LocalStore(tmp_path))

    assert manifest.features == ["codecs"]
    assert manifest.codec_names == ["planes-zstd"]
    assert manifest.value_codecs is None
    assert manifest.chunk_codecs is not None
    encoded = dict(zip(manifest.tensor_names, manifest.chunk_codecs.tolist(), strict=True))
    assert encoded == {
        "model.weight": 1,
        "model.half": 1,
        "model.bias": 0,
        "model.turned": 1,
        "noise": 0,
    }
    lengths = {index.fqn: info.length for index, info in metadata.storage_data.items()}
    assert lengths["model.half"] <= 0.69 * state()["model"]["half"].nbytes
    assert lengths["noise"] == 1 << 20


def test_a_save_with_nothing_to_compress_requires_nothing(tmp_path: Path) -> None:
    reshard.save({"noise": state()["noise"], "step": 1}, checkpoint_id=tmp_path, compress="zstd")
    manifest = read_manifest(LocalStore(tmp_path))

    assert manifest.features == []
    assert manifest.chunk_codecs is None


@pytest.mark.parametrize("verify", ["chunks", "full"])
@pytest.mark.parametrize(
    "region",
    [
        (slice(0, 1),),
        (slice(899, 900), slice(1099, 1100)),
        (slice(10, 700), slice(3, 900)),
        (slice(None), slice(500, 501)),
        (slice(5, 5),),
    ],
)
def test_any_region_is_read_by_itself(verify: Any, region: Any, tmp_path: Path) -> None:
    reshard.save(state(), checkpoint_id=tmp_path, compress="zstd")
    found = reshard.read_tensor(tmp_path, "model.weight", region, verify=verify)

    assert torch.equal(found, state()["model"]["weight"][region])


def test_a_small_region_reads_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = state()["model"]["weight"].repeat(8, 1)
    reshard.save({"t": tensor}, checkpoint_id=tmp_path, compress="zstd")
    taken: list[int] = []
    real = LocalStore.open_reader

    def open_reader(self: LocalStore, key: str, ahead: int = 0, nbytes: int | None = None) -> Any:
        reader = real(self, key)
        read_into = reader.read_into

        def counted(offset: int, buffers: Any) -> None:
            taken.append(sum(map(len, buffers)))
            read_into(offset, buffers)

        reader.read_into = counted  # type: ignore[method-assign]
        return reader

    monkeypatch.setattr(LocalStore, "open_reader", open_reader)
    reshard.read_tensor(tmp_path, "t", (slice(4000, 4001),))

    assert sum(taken) < 2 << 20


@pytest.mark.parametrize("kind", [THREAD, PROCESS])
def test_a_background_save_can_be_compressed(kind: Any, tmp_path: Path) -> None:
    reshard.async_save(
        state(), checkpoint_id=tmp_path, compress="zstd", async_checkpointer_type=kind
    ).result()

    assert read_manifest(LocalStore(tmp_path)).codec_names == ["planes-zstd"]
    check_same(reshard.read_state_dict(tmp_path), state())


def test_a_save_without_collectives_can_be_compressed(tmp_path: Path) -> None:
    reshard.save(state(), checkpoint_id=tmp_path, compress="zstd", use_collectives=False)

    assert read_manifest(LocalStore(tmp_path)).codec_names == ["planes-zstd"]
    check_same(reshard.read_state_dict(tmp_path), state())


class OwnSavePlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item)


class OwnLoadPlanner(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> Any:
        return super().resolve_tensor(read_item)


def test_custom_planners_save_and_load_compressed(tmp_path: Path) -> None:
    reshard.save(state(), checkpoint_id=tmp_path, planner=OwnSavePlanner(), compress="zstd")
    loaded = blank()
    reshard.load(loaded, checkpoint_id=tmp_path, planner=OwnLoadPlanner())

    check_same(loaded, state())


def test_an_unknown_way_to_compress_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for call in (reshard.save, reshard.async_save):
        with pytest.raises(ValueError, match=r"compress='lz77' is not known\. Choose one of"):
            call(state(), checkpoint_id=tmp_path / "new", compress="lz77")  # type: ignore[operator]

    assert not (tmp_path / "new").exists()


def without_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "zstandard":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)


def test_without_its_package_nothing_is_written_and_nothing_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reshard.save(state(), checkpoint_id=tmp_path / "old", compress="zstd")
    without_zstandard(monkeypatch)
    needs = r"needs the package zstandard: pip install 'reshard\[compress\]'"
    with pytest.raises(ImportError, match=f"^compress='zstd' {needs}"):
        reshard.save(state(), checkpoint_id=tmp_path / "new", compress="zstd")
    loaded = blank()
    with pytest.raises(Exception, match=needs):
        reshard.load(loaded, checkpoint_id=tmp_path / "old")

    assert not (tmp_path / "new").exists()
    assert not loaded["model"]["bias"].any()


# Stream extensions


class _Xor(io.RawIOBase):
    def __init__(self, stream: IO[bytes], key: int) -> None:
        super().__init__()
        self._stream, self._table = stream, bytes(byte ^ key for byte in range(256))

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data).translate(self._table))
        return len(data)

    def read(self, size: int = -1) -> bytes:
        return self._stream.read(size).translate(self._table)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


class Cipher(StreamTransformExtension):
    """Hides every byte, better than nothing."""

    @staticmethod
    def registry_name() -> str:
        return "cipher"

    @staticmethod
    def from_descriptor(version: str) -> Cipher:
        return Cipher()

    def get_descriptor(self) -> str:
        return "cipher/1"

    def transform_to(self, output: IO[bytes]) -> Any:
        return _Xor(output, 0x5A)

    def transform_from(self, input: IO[bytes]) -> Any:
        return _Xor(input, 0x5A)


def ciphers() -> ExtensionRegistry:
    registry = ExtensionRegistry()
    registry.register(Cipher)
    return registry


def save_through(folder: Path, *extensions: StreamTransformExtension) -> None:
    writer = reshard.FileSystemWriter(folder, _extensions=extensions)
    reshard.save(state(), storage_writer=writer)


@pytest.mark.parametrize("verify", ["off", "chunks", "full"])
@pytest.mark.parametrize(
    "extensions", [(ZStandard(),), (Cipher(),), (Cipher(), ZStandard()), (ZStandard(), Cipher())]
)
def test_what_went_through_stream_extensions_loads_as_it_was(
    extensions: Any, verify: str, tmp_path: Path
) -> None:
    save_through(tmp_path, *extensions)
    reader = reshard.FileSystemReader(tmp_path, ciphers(), verify=verify)
    loaded = blank()
    reshard.load(loaded, storage_reader=reader)

    check_same(loaded, state())
    manifest = read_manifest(LocalStore(tmp_path))
    assert manifest.features == ["codecs"]
    assert manifest.codec_names == [",".join(e.get_descriptor() for e in extensions)]
    (path,) = tmp_path.glob("*.safetensors")
    assert all(t.dtype is torch.uint8 for t in safetensors.torch.load_file(path).values())


def test_values_go_through_stream_extensions_too(tmp_path: Path) -> None:
    save_through(tmp_path, Cipher())
    (path,) = tmp_path.glob("*.safetensors")

    assert b"aaaa" not in path.read_bytes()


def test_regions_are_read_through_stream_extensions(tmp_path: Path) -> None:
    save_through(tmp_path, ZStandard())
    for region in [(slice(800, 850), slice(3, 9)), (slice(0, 2),), (slice(899, 900),)]:
        found = reshard.read_tensor(tmp_path, "model.weight", region)
        assert torch.equal(found, state()["model"]["weight"][region])


def test_a_reader_that_does_not_know_the_extension_refuses_by_name(tmp_path: Path) -> None:
    save_through(tmp_path, Cipher())
    loaded = blank()
    with pytest.raises(UnsupportedFormatError, match=r"'cipher/1'.*stream\.zstd; pass a"):
        reshard.load(loaded, checkpoint_id=tmp_path)

    assert not loaded["model"]["bias"].any()


def test_compress_and_stream_extensions_exclude_each_other(tmp_path: Path) -> None:
    writer = reshard.FileSystemWriter(tmp_path, _extensions=[ZStandard()])
    with pytest.raises(CheckpointException, match="exclude each other"):
        reshard.save(state(), storage_writer=writer, compress="zstd")

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", [4, -4])
def test_a_stream_that_decodes_to_another_size_is_refused(change: int, tmp_path: Path) -> None:
    save_through(tmp_path, ZStandard())
    manifest = OpenManifest(tmp_path)
    row = manifest.tensor_row("model.bias")
    width = manifest.parts["tensors.shapes"].shape[1]
    manifest.change("tensors.shapes", row * width, 100 + change)
    manifest.change("chunks.sizes", manifest.chunk_row("model.bias") * width, 100 + change)
    manifest.write()
    text = check_refused(lambda: reshard.read_tensor(tmp_path, "model.bias"), "decodes to")
    assert str(400 + 4 * change) in text


def test_a_value_that_explodes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_through(tmp_path, ZStandard())
    monkeypatch.setattr(streams, "_MOST_VALUE_BYTES", 50_000)
    monkeypatch.setattr(streams, "_PIECE_BYTES", 1000)
    with pytest.raises(CorruptCheckpointError, match="too many for a value"):
        reshard.load({"text": ""}, checkpoint_id=tmp_path)


# With a base


@pytest.mark.parametrize(("before", "after"), [("zstd", "zstd"), ("zstd", None), (None, "zstd")])
def test_references_and_codecs_go_together(before: Any, after: Any, tmp_path: Path) -> None:
    changed = state()
    changed["model"]["half"] = changed["model"]["half"] + 1
    reshard.save(state(), checkpoint_id=tmp_path / "1", compress=before)
    reshard.save(changed, checkpoint_id=tmp_path / "2", compress=after, base=tmp_path / "1")

    manifest = read_manifest(LocalStore(tmp_path / "2"))
    assert "references" in manifest.features
    assert manifest.codec_names == ["planes-zstd"]
    assert shard_bytes(tmp_path / "2") < changed["model"]["half"].nbytes + 200_000
    for verify in ("chunks", "full"):
        loaded = blank()
        reshard.load(loaded, checkpoint_id=tmp_path / "2", verify=verify)
        check_same(loaded, changed)
    reshard.materialise(tmp_path / "2", tmp_path / "3")
    check_same(reshard.read_state_dict(tmp_path / "3"), changed)


def test_chunks_of_several_codecs_are_told_apart(tmp_path: Path) -> None:
    changed = state()
    changed["model"]["half"] = changed["model"]["half"] + 1
    save_through(tmp_path / "1", ZStandard())
    reshard.save(changed, checkpoint_id=tmp_path / "2", compress="zstd", base=tmp_path / "1")

    assert read_manifest(LocalStore(tmp_path / "2")).codec_names == ["stream.zstd/1", "planes-zstd"]
    check_same(reshard.read_state_dict(tmp_path / "2"), changed)


# With fingerprints, and with views of files


def codecs(folder: Path, kind: str) -> None:
    if kind == "streams":
        writer = reshard.FileSystemWriter(folder, _extensions=[ZStandard()])
        reshard.save(state(), storage_writer=writer, fingerprint=True)
    else:
        compress: Any = "zstd" if kind == "zstd" else None
        reshard.save(state(), checkpoint_id=folder, compress=compress, fingerprint=True)


@pytest.mark.parametrize("kind", ["zstd", "streams"])
def test_fingerprints_are_those_of_a_plain_save(kind: str, tmp_path: Path) -> None:
    codecs(tmp_path / "encoded", kind)
    codecs(tmp_path / "plain", "plain")
    encoded, plain = (read_manifest(LocalStore(tmp_path / name)) for name in ("encoded", "plain"))

    assert encoded.chunk_fingerprints is not None
    assert plain.chunk_fingerprints is not None
    assert encoded.chunk_fingerprints.tolist() == plain.chunk_fingerprints.tolist()
    assert encoded.chunk_digests.tolist() == plain.chunk_digests.tolist()
    assert encoded.chunk_probes.tolist() == plain.chunk_probes.tolist()
    loaded = blank()
    reshard.load(loaded, checkpoint_id=tmp_path / "encoded", verify="fingerprint")
    check_same(loaded, state())


def test_encoded_tensors_are_read_where_others_are_viewed(tmp_path: Path) -> None:
    reshard.save(state(), checkpoint_id=tmp_path, compress="zstd")

    check_same(reshard.read_state_dict(tmp_path, mmap=True), state())

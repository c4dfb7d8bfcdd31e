"""Bases that cannot be used, and directories of Hugging Face as bases."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import reshard
from reshard.api import (
    BaseError,
    CheckpointException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from reshard.checkpoint.bases import PlainFiles, open_base
from reshard.checkpoint.directory import deletion_name, deletion_text, read_manifest
from reshard.engine.writing import Content
from reshard.stores.local import LocalStore
from support.samples import same_bits


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(3000, dtype=torch.float32), "b": torch.ones(5)}


def refusal(kind: type[CheckpointException], folder: Path, base: Any) -> str:
    """What a person reads when a save with a base is refused, before anything is made."""
    told = []
    for save in (reshard.save, reshard.async_save):
        with pytest.raises(kind) as raised:
            save(tensors(), checkpoint_id=folder, base=base)
        assert type(raised.value) is kind
        told.append(str(raised.value))
        assert not folder.exists()
    assert told[0] == told[1]
    return told[0]


# Bad input


def test_a_base_that_is_not_there(tmp_path: Path) -> None:
    assert refusal(CheckpointNotFoundError, tmp_path / "b", tmp_path / "a") == (
        f"the base cannot be used: there is no checkpoint at {tmp_path / 'a'}: nothing is there. "
        "Check the path. Pass another base, or none"
    )


def test_a_base_that_was_never_committed(tmp_path: Path) -> None:
    reshard.save(tensors(), checkpoint_id=tmp_path / "a")
    (tmp_path / "a" / ".metadata").unlink()

    assert refusal(CheckpointNotFoundError, tmp_path / "b", tmp_path / "a") == (
        f"the base cannot be used: the checkpoint at {tmp_path / 'a'} was never committed: it has "
        "shard files but no .metadata. A save that was cut off leaves these; use an older "
        "checkpoint. Pass another base, or none"
    )


def test_a_base_of_dcp(tmp_path: Path) -> None:
    dcp.save(tensors(), checkpoint_id=str(tmp_path / "a"))

    assert refusal(UnsupportedFormatError, tmp_path / "b", tmp_path / "a") == (
        f"the base cannot be used: .metadata of {tmp_path / 'a'} was written by "
        "torch.distributed.checkpoint; load it, and save it with reshard. Pass another base, or "
        "none"
    )


def test_a_base_that_is_a_file(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")

    assert refusal(BaseError, tmp_path / "b", tmp_path / "model.safetensors") == (
        f"the base cannot be used: {tmp_path / 'model.safetensors'} is a file. Pass the directory "
        "of a checkpoint or of safetensors files"
    )


def test_a_base_that_is_being_deleted(tmp_path: Path) -> None:
    reshard.save(tensors(), checkpoint_id=tmp_path / "a")
    (tmp_path / "a" / deletion_name()).write_bytes(deletion_text())

    assert re.fullmatch(
        rf"the base cannot be used: {tmp_path / 'a'} is being deleted \({socket.gethostname()}, "
        rf"process {os.getpid()}, since 2.*\)\. Save without a base, or with another\. If that "
        rf"process is gone, remove '{deletion_name()}' from {tmp_path / 'a'}; after a day .*",
        refusal(BaseError, tmp_path / "b", tmp_path / "a"),
    )


def test_a_base_whose_manifest_is_damaged(tmp_path: Path) -> None:
    reshard.save(tensors(), checkpoint_id=tmp_path / "a")
    path = tmp_path / "a" / ".metadata"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")

    text = refusal(CorruptCheckpointError, tmp_path / "b", tmp_path / "a")
    assert text.startswith(f"the base cannot be used: .metadata of {tmp_path / 'a'}")


def test_a_base_whose_manifest_was_cut_short(tmp_path: Path) -> None:
    reshard.save(tensors(), checkpoint_id=tmp_path / "a")
    path = tmp_path / "a" / ".metadata"
    path.write_bytes(path.read_bytes()[:2000])

    text = refusal(CorruptCheckpointError, tmp_path / "b", tmp_path / "a")
    assert text.startswith(f"the base cannot be used: .metadata of {tmp_path / 'a'} announces a")
    assert text.endswith("is 2000 bytes long. Pass another base, or none")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("base", "kind", "text"),
    [
        ("s3://x/y", BaseError, "the base 's3://x/y' and the new checkpoint"),
        ("", ValueError, "base is empty: pass the directory of a checkpoint, or None"),
        (3, TypeError, "base is a path, as text or a pathlib.Path, not 3"),
    ],
)
def test_what_is_no_base(
    base: Any, kind: type[Exception], text: str, is_async: bool, tmp_path: Path
) -> None:
    save: Any = reshard.async_save if is_async else reshard.save
    with pytest.raises(kind, match=text):
        save(tensors(), checkpoint_id=tmp_path / "a", base=base)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["a\nb", "a\\b", "a\tb", os.fsdecode(b"a\xffb")])
def test_a_base_whose_name_no_manifest_can_hold(name: str, tmp_path: Path) -> None:
    reshard.save(tensors(), checkpoint_id=tmp_path / name)

    text = refusal(BaseError, tmp_path / "new", tmp_path / name)
    assert text.startswith(f"the base cannot be referred to as {'../' + name!r}")


@pytest.mark.parametrize(
    ("base", "text"),
    [
        ("a", "a checkpoint cannot be its own base: {base!r} is where the save goes"),
        ("link", "a checkpoint cannot be its own base: {base!r} is where the save goes"),
        ("a/inside", "the new checkpoint cannot refer to the base: {base} lies within"),
    ],
)
def test_a_base_that_is_the_checkpoint_itself_or_in_it(
    base: str, text: str, tmp_path: Path
) -> None:
    reshard.save(tensors(), checkpoint_id=tmp_path / "a")
    reshard.save(tensors(), checkpoint_id=tmp_path / "a" / "inside")
    (tmp_path / "link").symlink_to("a")
    before = sorted(path.name for path in (tmp_path / "a").iterdir())

    with pytest.raises(BaseError) as raised:
        reshard.save(tensors(), checkpoint_id=tmp_path / "a", base=str(tmp_path / base))

    assert str(raised.value).startswith(text.format(base=str(tmp_path / base)))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == before


def delete_file(path: Path) -> None:
    path.unlink()


def cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [delete_file, cut_file, change_header])
@pytest.mark.parametrize("is_chain", [False, True])
def test_a_base_whose_files_are_not_as_they_were_fails_the_save(
    damage: Callable[[Path], None], is_chain: bool, tmp_path: Path
) -> None:
    reshard.save(tensors(), checkpoint_id=tmp_path / "a")
    base = tmp_path / "a"
    if is_chain:
        reshard.save(tensors(), checkpoint_id=tmp_path / "b", base=tmp_path / "a")
        base = tmp_path / "b"
    [shard] = (tmp_path / "a").glob("*.safetensors")
    damage(shard)

    with pytest.raises(CorruptCheckpointError) as raised:
        reshard.save(tensors(), checkpoint_id=tmp_path / "c", base=base)

    assert str(raised.value) == (
        f"the base cannot be used: {tmp_path / 'a'} lacks its file {shard.name!r}. Pass another "
        "base, or none"
        if damage is delete_file and not is_chain
        else f"{shard.name!r} of {tmp_path / 'a'}, which the new checkpoint was to refer to, is "
        "gone or was replaced. Nothing was saved; save with another base, or without one"
    )
    assert not (tmp_path / "c").exists()


# Hugging Face


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A directory of two files with an index, and things that are not weights."""
    folder = tmp_path / "hf"
    folder.mkdir()
    weights = {f"model.layers.{n}.w": torch.randn(8, 6) for n in range(4)}
    names = list(weights)
    files = {"model-00001-of-00002.safetensors": names[:2]}
    files["model-00002-of-00002.safetensors"] = names[2:]
    for file, held in files.items():
        save_file({name: weights[name] for name in held}, folder / file, {"format": "pt"})
    index = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text("{}")
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        name: tensor.clone()
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def own_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("prefix", "wrapper"),
    [
        ("", ""),
        ("module.", ""),
        ("_orig_mod.", ""),
        ("base_model.model.", "base_layer."),
        ("app.policy.", ""),
    ],
)
def test_weights_are_referred_to_under_the_names_of_trainers(
    prefix: str, wrapper: str, hf: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in hf.iterdir()}
    state_dict = {
        f"{prefix}{name[:-1]}{wrapper}w": tensor for name, tensor in weights_of(hf).items()
    }
    state_dict["lora.w"] = torch.ones(3)

    reshard.save(state_dict, checkpoint_id=tmp_path / "a", base=hf)

    # The header alone is a page.
    assert own_bytes(tmp_path / "a") == 4096 + 12
    for verify in ("chunks", "full", "off"):
        for name, tensor in state_dict.items():
            assert same_bits(reshard.read_tensor(tmp_path / "a", name, verify=verify), tensor)
    assert {path.name: path.read_bytes() for path in hf.iterdir()} == before


def test_other_weights_are_written(hf: Path, tmp_path: Path) -> None:
    state_dict = weights_of(hf)
    names = sorted(state_dict)
    state_dict[names[0]][7, 5] += 1
    state_dict[names[1]] = state_dict[names[1]].bfloat16()
    state_dict[names[2]] = state_dict[names[2]].t().contiguous()

    reshard.save(state_dict, checkpoint_id=tmp_path / "a", base=hf)

    m = read_manifest(LocalStore(tmp_path / "a"))
    held = {m.tensor_names[n] for n in range(4) if m.origin_of(int(m.chunk_files[n])) is not None}
    assert held == {names[3]}
    for name, tensor in state_dict.items():
        assert same_bits(reshard.read_tensor(tmp_path / "a", name), tensor)


def test_rows_of_a_tensor_are_found_and_columns_are_not(hf: Path, tmp_path: Path) -> None:
    base = open_base(LocalStore(tmp_path / "a"), "../hf")
    assert isinstance(base, PlainFiles)
    whole = weights_of(hf)["model.layers.1.w"]

    def found(offsets: tuple[int, int], sizes: tuple[int, int]) -> Any:
        nbytes = sizes[0] * sizes[1] * 4
        source = memoryview(bytes(nbytes))
        name = "model.layers.1.w"
        return base.find(Content(name, torch.float32, sizes, nbytes, source, name, offsets, (8, 6)))

    for offsets, sizes in [((0, 0), (4, 6)), ((4, 0), (4, 6)), ((3, 0), (1, 6)), ((3, 2), (1, 2))]:
        candidate = found(offsets, sizes)
        data = (hf / candidate.file.path).read_bytes()
        stored = data[candidate.begin : candidate.begin + candidate.stored_nbytes]
        rows, columns = (slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        assert stored == whole[rows, columns].contiguous().numpy().tobytes()
    assert found((0, 0), (8, 3)) is None
    assert found((0, 3), (2, 3)) is None


def test_a_checkpoint_refers_on_to_the_directory_that_its_base_refers_to(
    hf: Path, tmp_path: Path
) -> None:
    state_dict = weights_of(hf)
    reshard.save(state_dict, checkpoint_id=tmp_path / "runs" / "a", base=hf)

    reshard.save(state_dict, checkpoint_id=tmp_path / "b", base=tmp_path / "runs" / "a")

    assert [tuple(o) for o in read_manifest(LocalStore(tmp_path / "b")).origins] == [("../hf", "")]
    reshard.delete(tmp_path / "runs" / "a")
    assert reshard.materialise(tmp_path / "b")
    for path in hf.iterdir():
        path.unlink()
    for name, tensor in state_dict.items():
        assert same_bits(reshard.read_tensor(tmp_path / "b", name), tensor)


def test_other_data_under_the_same_header_is_found_by_any_read(hf: Path, tmp_path: Path) -> None:
    state_dict = weights_of(hf)
    reshard.save(state_dict, checkpoint_id=tmp_path / "a", base=hf)
    path = hf / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    name = sorted(state_dict)[1]

    for verify in ("chunks", "full", "off"):
        with pytest.raises(CorruptCheckpointError, match=r"layers\.1\.w"):
            # Not the byte that differs.
            reshard.read_tensor(tmp_path / "a", name, (slice(0, 1), slice(0, 2)), verify=verify)
    with pytest.raises(CorruptCheckpointError):
        reshard.materialise(tmp_path / "a")


@pytest.mark.parametrize("is_link", [False, True])
def test_other_data_in_the_directory_is_seen_by_the_next_save(
    is_link: bool, hf: Path, tmp_path: Path
) -> None:
    """As in the cache of the hub, where the files are links."""
    path = hf / "model-00001-of-00002.safetensors"
    if is_link:
        path.rename(tmp_path / "blob")
        path.symlink_to(tmp_path / "blob")
    state_dict = weights_of(hf)
    reshard.save(state_dict, checkpoint_id=tmp_path / "a", base=hf)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    reshard.save(state_dict, checkpoint_id=tmp_path / "b", base=hf)

    for name, tensor in state_dict.items():
        assert same_bits(reshard.read_tensor(tmp_path / "b", name), tensor)


def test_files_that_are_no_safetensors_are_named(hf: Path, tmp_path: Path) -> None:
    (hf / "extra.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:")

    text = refusal(CorruptCheckpointError, tmp_path / "a", hf)
    assert text.startswith("the base cannot be used: ")
    assert f"'extra.safetensors' of {hf}" in text


def test_of_two_files_with_the_same_tensor_that_of_the_model_counts(
    hf: Path, tmp_path: Path
) -> None:
    name = "model.layers.0.w"
    state_dict = {name: weights_of(hf)[name]}
    save_file({name: torch.ones(8, 6)}, hf / "consolidated.safetensors")
    reshard.save(state_dict, checkpoint_id=tmp_path / "a", base=hf)

    manifest = read_manifest(LocalStore(tmp_path / "a"))
    assert manifest.files == ["model-00001-of-00002.safetensors"]


def test_comparing_with_plain_files_leaves_none_of_them_open(hf: Path, tmp_path: Path) -> None:
    state_dict = weights_of(hf)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        reshard.save(state_dict, checkpoint_id=tmp_path / str(number), base=hf)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_empty_directory_is_no_base(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")

    text = refusal(CheckpointNotFoundError, tmp_path / "a", tmp_path / "hf")
    assert text.startswith(f"the base cannot be used: there is no checkpoint at {tmp_path / 'hf'}")

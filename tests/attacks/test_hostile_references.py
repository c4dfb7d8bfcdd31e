"""References that lead astray, and files that are not the ones that were referred to.

Each goes through every public way to read a checkpoint, and is an error in words, never other data.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reshard
from support.hostile import (
    DOORS,
    SAVE_ID,
    OpenManifest,
    check_refused,
    load_all,
    save_small,
    small_state,
)

Attack = Callable[[OpenManifest], None]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint whose tensors lie in the one beside it."""
    save_small(tmp_path / "base")
    reshard.save(small_state(), checkpoint_id=tmp_path / "ckpt", base=tmp_path / "base")
    manifest = OpenManifest(tmp_path / "ckpt")
    assert manifest.texts("origins.locations") == ["../base"]
    assert manifest.texts("origins.save_ids") == [SAVE_ID]
    return tmp_path / "ckpt"


def referred_file(manifest: OpenManifest) -> int:
    return manifest.ints("files.origins").index(0)


def locations(*places: str) -> Attack:
    return lambda manifest: manifest.set_texts("origins.locations", places)


def path_of_file(path: str) -> Attack:
    def attack(manifest: OpenManifest) -> None:
        paths = manifest.texts("files.paths")
        paths[referred_file(manifest)] = path
        manifest.set_texts("files.paths", paths)

    return attack


def origin_of_all(number: int) -> Attack:
    return lambda manifest: manifest.set_ints(
        "files.origins", [number] * len(manifest.ints("files.origins"))
    )


def twice(manifest: OpenManifest) -> None:
    manifest.set_texts("origins.locations", ["../base", "../base"])
    manifest.set_texts("origins.save_ids", [SAVE_ID, SAVE_ID])


def more_ids(manifest: OpenManifest) -> None:
    manifest.set_texts("origins.save_ids", [SAVE_ID, "another"])


def no_ids(manifest: OpenManifest) -> None:
    manifest.set_texts("origins.save_ids", [])


def without(name: str) -> Attack:
    return lambda manifest: manifest.parts.pop(name) and None


def without_the_feature(manifest: OpenManifest) -> None:
    manifest.notes.pop("requires")


def unknown_feature(manifest: OpenManifest) -> None:
    manifest.notes["requires"] += " telepathy"


LOCATION = "which is not a plain relative path"
ATTACKS: dict[str, tuple[Attack, str]] = {
    "absolute": (locations("/etc"), LOCATION),
    "home": (locations("~/x"), LOCATION),
    "url": (locations("s3://bucket/x"), LOCATION),
    "empty": (locations(""), LOCATION),
    "here": (locations("."), LOCATION),
    "beside nothing": (locations("base"), LOCATION),
    "only up": (locations(".."), LOCATION),
    "up with a slash": (locations("../"), LOCATION),
    "up to nowhere": (locations("../../"), LOCATION),
    "up again": (locations("../base/../base"), LOCATION),
    "up at the end": (locations("../base/.."), LOCATION),
    "dots within": (locations("../base/./x"), LOCATION),
    "two slashes": (locations("..//base"), LOCATION),
    "slash at the end": (locations("../base/"), LOCATION),
    "backslash": (locations("..\\base"), LOCATION),
    "zero byte": (locations("../ba\0se"), LOCATION),
    "line": (locations("../ba\nse"), LOCATION),
    "itself": (locations("../ckpt"), "refers to itself as '../ckpt'"),
    "itself by a detour": (locations("../../{parent}/ckpt"), "refers to itself"),
    "within itself": (locations("../ckpt/inside"), "refers to itself as '../ckpt/inside'"),
    "itself by a link": (locations("../link"), "refers to itself as '../link'"),
    "loop of links": (locations("../loop"), "cannot be opened"),
    "missing": (locations("../missing"), "/missing, which is not there"),
    "a file": (locations("../file"), "/file, which is not there"),
    "far up": (locations("../" * 99 + "nothing"), "/nothing, which is not there"),
    "file above": (path_of_file("../base/x.safetensors"), "not inside the checkpoint"),
    "absolute file": (path_of_file("/etc/passwd"), "not inside the checkpoint"),
    "file with dots": (path_of_file("x/../y"), "not inside the checkpoint"),
    "missing file": (path_of_file("nothing.safetensors"), "which is not there"),
    "a pipe": (path_of_file("pipe"), "cannot be opened"),
    "folder": (path_of_file("folder"), "cannot be opened"),
    "another origin": (origin_of_all(1), "an origin that it does not list"),
    "negative origin": (origin_of_all(-2), "an origin that it does not list"),
    "no origin": (origin_of_all(-1), "lacks its file"),
    "the same origin twice": (twice, "the same origin twice"),
    "more ids than locations": (more_ids, "origin"),
    "no ids": (no_ids, "origin"),
    "no list of ids": (without("origins.save_ids"), "origin"),
    "no list of locations": (without("origins.locations"), "origin"),
    "no origins of files": (without("files.origins"), "lacks its file"),
    "references that are not announced": (without_the_feature, "references"),
    "unknown feature": (unknown_feature, "telepathy"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_reference_is_refused_by_every_door(attack: str, checkpoint: Path) -> None:
    root = checkpoint.parent
    (root / "link").symlink_to("ckpt")
    (root / "loop").symlink_to("loop")
    (root / "file").write_text("x")
    os.mkfifo(root / "base" / "pipe")
    (root / "base" / "folder").mkdir()
    (checkpoint / "inside").mkdir()
    change, reason = ATTACKS[attack]
    manifest = OpenManifest(checkpoint)
    change(manifest)
    if attack == "itself by a detour":
        manifest.set_texts("origins.locations", [f"../../{root.name}/ckpt"])
    manifest.write()

    for door in DOORS.values():
        text = check_refused(lambda: door(checkpoint), reason)  # noqa: B023
        assert str(checkpoint) in text or str(root) in text
    if attack not in ("no origin", "no origins of files"):
        check_refused(lambda: reshard.materialise(checkpoint), reason)
    assert not list(checkpoint.glob("*.draft"))


@pytest.mark.parametrize("attack", ["absolute", "up again", "no ids", "unknown feature"])
def test_a_hostile_manifest_is_no_base(attack: str, checkpoint: Path) -> None:
    change, reason = ATTACKS[attack]
    manifest = OpenManifest(checkpoint)
    change(manifest)
    manifest.write()
    new = checkpoint.parent / "new"

    text = check_refused(
        lambda: reshard.save(small_state(), checkpoint_id=new, base=checkpoint), reason
    )

    assert text.startswith("the base cannot be used: ")
    assert not new.exists()


def test_a_reference_without_an_id_is_verified_whatever_is_asked_for(checkpoint: Path) -> None:
    manifest = OpenManifest(checkpoint)
    manifest.set_texts("origins.save_ids", [""])
    manifest.write()
    assert torch.equal(load_all(checkpoint)["model"]["weight"], small_state()["model"]["weight"])
    [shard] = (checkpoint.parent / "base").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    weight = small_state()["model"]["weight"].numpy().tobytes()
    data[data.index(weight) + 47] ^= 1
    shard.write_bytes(data)

    region = (slice(0, 1), slice(0, 1))
    for verify in ("off", "chunks", "full"):
        check_refused(
            lambda: reshard.read_tensor(checkpoint, "model.weight", region, verify=verify),  # noqa: B023
            "damaged",
        )


# Files that are not the ones that were referred to


def replaced_by_another_save(shard: Path) -> str:
    """By a file of the same size, layout and tensors."""
    other = shard.parents[1] / "other"
    state = small_state()
    state["model"]["weight"] += 1
    reshard.save(state, checkpoint_id=other)
    [twin] = other.glob("*.safetensors")
    assert twin.stat().st_size == shard.stat().st_size
    shutil.copy(twin, shard)
    return "belongs to another save"


def deleted(shard: Path) -> str:
    shard.unlink()
    return "which is not there: it was deleted or moved"


def moved_away(shard: Path) -> str:
    shard.parent.rename(shard.parents[1] / "elsewhere")
    return "which is not there: it was deleted or moved"


def cut_short(shard: Path) -> str:
    shard.write_bytes(shard.read_bytes()[:-1])
    return "It was replaced since"


def made_longer(shard: Path) -> str:
    shard.write_bytes(shard.read_bytes() + b"\0")
    return "It was replaced since"


def other_header(shard: Path) -> str:
    data = bytearray(shard.read_bytes())
    data[12] ^= 1
    shard.write_bytes(data)
    return "is damaged or was replaced"


@pytest.mark.parametrize(
    "happens",
    [replaced_by_another_save, deleted, moved_away, cut_short, made_longer, other_header],
)
def test_a_file_that_is_not_the_one_that_was_referred_to_is_named(
    happens: Callable[[Path], str], checkpoint: Path
) -> None:
    [shard] = (checkpoint.parent / "base").glob("*.safetensors")
    reason = happens(shard)

    for verify in ("off", "chunks", "full"):
        text = check_refused(
            lambda: reshard.read_tensor(checkpoint, "model.weight", verify=verify),  # noqa: B023
            reason,
        )
        assert repr(shard.name) in text
        assert str(shard.parent) in text
        assert str(checkpoint) in text
    for door in DOORS.values():
        check_refused(lambda: door(checkpoint), reason)  # noqa: B023
    check_refused(lambda: reshard.materialise(checkpoint), reason)
    assert {path.name for path in checkpoint.iterdir() if ".draft" in path.name} == set()


def test_what_lies_in_the_checkpoint_itself_is_read_without_the_base(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint.parent / "base")
    state = {"step": 0, "note": ""}

    reshard.load(state, checkpoint_id=checkpoint)

    assert state == {"step": small_state()["step"], "note": "a value"}

"""Manifests with a sound checksum and hostile content: refused, in words, before anything else.

Each attack goes through every public way to read a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash

import reshard
from support.hostile import (
    DOORS,
    SHARD,
    OpenManifest,
    check_refused,
    load_all,
    memory_limit,
    small_state,
)

LARGEST = (1 << 63) - 1
SMALLEST = -(1 << 63)

Attack = Callable[[OpenManifest], None]


def put(name: str, position: int, number: int) -> Attack:
    return lambda manifest: manifest.change(name, position, number)


def ints(name: str, numbers: list[int], shape: list[int] | None = None) -> Attack:
    return lambda manifest: manifest.set_ints(name, numbers, shape)


def texts(name: str, content: list[str]) -> Attack:
    return lambda manifest: manifest.set_texts(name, content)


def raw(name: str, data: bytes) -> Attack:
    return lambda manifest: manifest.set_bytes(name, data)


def lie(name: str, **fields: Any) -> Attack:
    return lambda manifest: manifest.lies.update({name: fields})


def note(name: str, text: Any) -> Attack:
    return lambda manifest: manifest.notes.update({name: text})


def without(name: str) -> Attack:
    return lambda manifest: manifest.parts.pop(name)


def shape_of_weight(*extents: int) -> Attack:
    def attack(manifest: OpenManifest) -> None:
        row, shapes = manifest.tensor_row("model.weight"), manifest.ints("tensors.shapes")
        for name in ("model.weight", "model.tied"):
            row = manifest.tensor_row(name)
            shapes[2 * row : 2 * row + 2] = extents
        manifest.set_ints("tensors.shapes", shapes)

    return attack


def no_chunks(*extents: int) -> Attack:
    """Tensors of any size, and not one byte stored for them."""

    def attack(manifest: OpenManifest) -> None:
        shape_of_weight(*extents)(manifest)
        manifest.set_ints("tensors.chunk_starts", [0] * len(manifest.ints("tensors.chunk_starts")))
        for name in ("chunks.files", "chunks.begins", "chunks.probes"):
            manifest.set_ints(name, [], [0])
        manifest.set_ints("chunks.digests", [], [0, 16])
        for name in ("chunks.offsets", "chunks.sizes"):
            manifest.set_ints(name, [], [0, 2])

    return attack


def padding_of_bias(extent: int, size: int) -> Attack:
    """`bias` has one dimension; the second column of its rows is padding."""

    def attack(manifest: OpenManifest) -> None:
        row, chunk = manifest.tensor_row("model.bias"), manifest.chunk_row("model.bias")
        manifest.change("tensors.shapes", 2 * row, extent)
        manifest.change("tensors.shapes", 2 * row + 1, 0)
        manifest.change("chunks.sizes", 2 * chunk, size)
        manifest.change("chunks.sizes", 2 * chunk + 1, 0)

    return attack


def one_bias_chunk_twice(manifest: OpenManifest) -> None:
    """Two chunks of `bias` at the same place of the tensor, none for its second half."""
    row, chunk = manifest.tensor_row("model.bias"), manifest.chunk_row("model.bias")
    starts = manifest.ints("tensors.chunk_starts")
    manifest.set_ints("tensors.chunk_starts", [s + (t > row) for t, s in enumerate(starts)])
    for name, width in (
        ("chunks.offsets", 2),
        ("chunks.sizes", 2),
        ("chunks.files", 1),
        ("chunks.begins", 1),
        ("chunks.probes", 1),
        ("chunks.digests", 16),
    ):
        numbers = manifest.ints(name)
        at = width * chunk
        own = numbers[at : at + width]
        numbers[at:at] = own
        count = len(numbers) // width
        manifest.set_ints(name, numbers, [count, width] if width > 1 else [count])
    manifest.change("chunks.sizes", 2 * chunk, 2)
    manifest.change("chunks.sizes", 2 * chunk + 2, 2)
    begin = manifest.ints("chunks.begins")[chunk]
    manifest.change("chunks.begins", chunk + 1, begin + 16)
    # The same bytes in both, so that it does not matter which one is read last.
    path = manifest.path.parent / SHARD
    shard = bytearray(path.read_bytes())
    shard[begin + 16 : begin + 32] = shard[begin : begin + 16]
    path.write_bytes(shard)
    digests = manifest.ints("chunks.digests")
    digests[16 * chunk : 16 * chunk + 32] = xxhash.xxh3_128_digest(shard[begin : begin + 16]) * 2
    manifest.set_ints("chunks.digests", digests)


def same_file_twice(nbytes: int) -> Attack:
    """A second entry for the same file, of another size, that only a value uses."""

    def attack(manifest: OpenManifest) -> None:
        manifest.set_texts("files.paths", [*manifest.texts("files.paths")] * 2)
        manifest.set_ints("files.nbytes", [*manifest.ints("files.nbytes"), nbytes])
        manifest.change("values.files", 0, 1)
        manifest.change("values.nbytes", 0, nbytes - manifest.ints("values.begins")[0])

    return attack


def same_bytes_through_two_entries(manifest: OpenManifest) -> None:
    manifest.set_texts("files.paths", [*manifest.texts("files.paths")] * 2)
    manifest.set_ints("files.nbytes", manifest.ints("files.nbytes") * 2)
    manifest.change("values.files", 0, 1)
    for name in ("values.begins", "values.nbytes", "values.checksums"):
        manifest.change(name, 0, manifest.ints(name)[1])


def paths(names: list[str], cuts: list[list[int]]) -> Attack:
    return raw("planner_data", b"N" + msgspec.msgpack.encode((names, cuts)))


def alias_of_other_dims(manifest: OpenManifest) -> None:
    manifest.change("tensors.ndims", manifest.tensor_row("model.tied"), 1)


def renamed_bias(name: str, cuts: list[int]) -> Attack:
    """A path of our choice for a tensor that is there."""

    def attack(manifest: OpenManifest) -> None:
        names = manifest.texts("tensors.names")
        names[manifest.tensor_row("model.bias")] = name
        manifest.set_texts("tensors.names", names)
        paths([name], [cuts])(manifest)

    return attack


def columns_of_65_dimensions(manifest: OpenManifest) -> None:
    for name in ("tensors.shapes", "chunks.sizes", "chunks.offsets"):
        numbers, fill = manifest.ints(name), 0 if name == "chunks.offsets" else 1
        rows = [numbers[at : at + 2] + [fill] * 63 for at in range(0, len(numbers), 2)]
        manifest.set_ints(name, [n for row in rows for n in row], [len(rows), 65])
    manifest.change("tensors.ndims", manifest.tensor_row("model.weight"), 65)


def no_width(manifest: OpenManifest) -> None:
    for name in ("tensors.shapes", "chunks.sizes", "chunks.offsets"):
        manifest.set_ints(name, [], [len(manifest.ints(name)) // 2, 0])


def endless_width(manifest: OpenManifest) -> None:
    """No tensors at all, of 2^62 dimensions each."""
    for name in ("tensors.shapes", "chunks.sizes", "chunks.offsets"):
        manifest.set_ints(name, [], [0, 1 << 62])
    for name in ("tensors.dtypes", "tensors.flags", "tensors.ndims", "tensors.aliases"):
        manifest.set_ints(name, [], [0])
    for name in ("chunks.files", "chunks.begins", "chunks.probes"):
        manifest.set_ints(name, [], [0])
    manifest.set_ints("chunks.digests", [], [0, 16])
    manifest.set_ints("tensors.chunk_starts", [0])
    manifest.set_texts("tensors.names", [])


def two_dimensional(name: str) -> Attack:
    """A column of numbers as a table of one column."""

    def attack(manifest: OpenManifest) -> None:
        numbers = manifest.ints(name)
        manifest.set_ints(name, numbers, [len(numbers), 1])

    return attack


def names_of(checkpoint: Path) -> list[str]:
    """What an error may name: where the checkpoint is, or a key of it."""
    return [str(checkpoint), "model.", "step", "note"]


ATTACKS: dict[str, Any] = {
    # Where files are.
    "a path that climbs out": texts("files.paths", ["../__0_0.safetensors"]),
    "a path that climbs out late": texts("files.paths", ["a/../../__0_0.safetensors"]),
    "a path that climbs out at its end": texts("files.paths", ["a/.."]),
    "an absolute path": texts("files.paths", ["/etc/passwd"]),
    "a path with a NUL": texts("files.paths", ["__0_0.safetensors\0.txt"]),
    "a path with a backslash": texts("files.paths", ["..\\__0_0.safetensors"]),
    "a path with a drive letter": texts("files.paths", ["C:secret"]),
    "a path of an alternate stream": texts("files.paths", ["__0_0.safetensors:stream"]),
    "an empty path": texts("files.paths", [""]),
    "a path of the directory": texts("files.paths", ["."]),
    "a path with an empty part": texts("files.paths", ["a//b"]),
    "a path with a part that stays": texts("files.paths", ["./__0_0.safetensors"]),
    "a path of a file that is not there": texts("files.paths", ["__0_1.safetensors"]),
    # Where bytes are.
    "a chunk before its file": put("chunks.begins", 0, -8),
    "a chunk after its file": put("chunks.begins", 0, 1 << 20),
    "a chunk far after its file": put("chunks.begins", 0, LARGEST),
    "a chunk at the smallest number": put("chunks.begins", 0, SMALLEST),
    "a value before its file": put("values.begins", 0, -1),
    "a value that is larger than its file": put("values.nbytes", 0, 1 << 20),
    "a value of 2^63 - 1 bytes": put("values.nbytes", 0, LARGEST),
    "a value of less than no bytes": put("values.nbytes", 0, -1),
    "a value of the smallest number of bytes": put("values.nbytes", 0, SMALLEST),
    "a file of less than no bytes": put("files.nbytes", 0, -1),
    "a file of 2^63 - 1 bytes": put("files.nbytes", 0, LARGEST),
    "two chunks in the same bytes": lambda m: m.change(
        "chunks.begins", 0, m.ints("chunks.begins")[1]
    ),
    "a value in the bytes of a chunk": lambda m: m.change(
        "values.begins", 0, m.ints("chunks.begins")[0]
    ),
    "a chunk in another file": put("chunks.files", 0, 1),
    "a chunk in file -1": put("chunks.files", 0, -1),
    "a value in file 2^63 - 1": put("values.files", 0, LARGEST),
    # What tensors are.
    "a shape of 2^63 - 1": shape_of_weight(LARGEST, 1),
    "a shape whose volume wraps around to a small number": shape_of_weight(1 << 32, 1 << 32),
    "a shape whose volume wraps around below zero": shape_of_weight((1 << 62) + 3, 4),
    "a negative shape": shape_of_weight(-3, -4),
    "a shape of the smallest number": shape_of_weight(SMALLEST, 1),
    "a shape larger than its chunks": shape_of_weight(3, 8),
    "a chunk outside of its tensor": put("chunks.offsets", 0, 1),
    "a chunk at a negative offset": put("chunks.offsets", 0, -1),
    "a chunk at 2^63 - 1": put("chunks.offsets", 0, LARGEST),
    "a chunk of a negative size": put("chunks.sizes", 0, -3),
    "a chunk of 2^63 - 1": put("chunks.sizes", 0, LARGEST),
    "65 dimensions": columns_of_65_dimensions,
    "255 dimensions in two columns": put("tensors.ndims", 0, 255),
    "a table without columns": no_width,
    "a dtype that is not listed": put("tensors.dtypes", 0, 200),
    "a dtype that does not exist": texts("tensors.dtype_names", ["float32", "float1024"]),
    "a dtype that is an attribute of torch": texts("tensors.dtype_names", ["nn", "load"]),
    "no dtypes": texts("tensors.dtype_names", []),
    # How rows belong together.
    "chunk starts that fall": lambda m: m.set_ints("tensors.chunk_starts", [0, 2, 1, 2]),
    "chunk starts that begin late": lambda m: m.set_ints("tensors.chunk_starts", [1, 1, 2, 2]),
    "chunk starts that end early": lambda m: m.set_ints("tensors.chunk_starts", [0, 1, 1, 1]),
    "chunk starts beyond all chunks": lambda m: m.set_ints("tensors.chunk_starts", [0, 1, 2, 99]),
    "chunk starts of 2^63 - 1": put("tensors.chunk_starts", 1, LARGEST),
    "chunk starts that wrap around": put("tensors.chunk_starts", 1, SMALLEST),
    "too few chunk starts": ints("tensors.chunk_starts", [0, 2]),
    "no chunk starts": ints("tensors.chunk_starts", [], [0]),
    "an alias of itself": lambda m: m.change(
        "tensors.aliases", m.tensor_row("model.tied"), m.tensor_row("model.tied")
    ),
    "aliases in a loop": lambda m: (
        m.change("tensors.aliases", m.tensor_row("model.tied"), m.tensor_row("model.weight")),
        m.change("tensors.aliases", m.tensor_row("model.weight"), m.tensor_row("model.tied")),
    ),
    "an alias of nobody": put("tensors.aliases", 0, 99),
    "an alias of -2": put("tensors.aliases", 0, -2),
    "an alias of another shape": lambda m: m.change(
        "tensors.aliases", m.tensor_row("model.tied"), m.tensor_row("model.bias")
    ),
    "a name twice": lambda m: m.set_texts("tensors.names", ["model.weight"] * 3),
    "a tensor and a value of one name": lambda m: m.set_texts(
        "values.names", ["model.weight", "note"]
    ),
    "too few names": lambda m: m.set_texts("tensors.names", m.texts("tensors.names")[:2]),
    "too many names": lambda m: m.set_texts("tensors.names", [*m.texts("tensors.names"), "more"]),
    "too few value names": texts("values.names", ["step"]),
    "too many files": texts("files.paths", ["__0_0.safetensors", "b"]),
    "too few probes": ints("chunks.probes", [0]),
    "too few digests": lambda m: m.set_ints("chunks.digests", [0] * 16, [1, 16]),
    "digests of another width": lambda m: m.set_ints(
        "chunks.digests", m.ints("chunks.digests"), [len(m.ints("chunks.digests")) // 8, 8]
    ),
    "too few begins": ints("chunks.begins", [4096]),
    "a table of the wrong width": lambda m: m.set_ints(
        "chunks.offsets", m.ints("chunks.offsets"), [1, 4]
    ),
    "a table as a list": lambda m: m.set_ints("chunks.sizes", m.ints("chunks.sizes"), [4]),
    # How columns are described.
    "a column that is missing": without("chunks.begins"),
    "a list that is missing": without("tensors.names"),
    "a column of another dtype": lie("chunks.begins", dtype="F64"),
    "a column of another shape": lie("chunks.begins", shape=[3]),
    "a column of 2^62 rows": lie("chunks.begins", shape=[1 << 62]),
    "a column of 2^64 rows": lie("chunks.begins", shape=[1 << 64]),
    "a column of three dimensions": lie("chunks.begins", shape=[2, 1, 1]),
    "a column without a shape": lie("chunks.begins", shape=[]),
    "a column with a negative shape": lie("chunks.begins", shape=[-2]),
    "a column with a shape of fractions": lie("chunks.begins", shape=[2.0]),
    "a column with a shape of text": lie("chunks.begins", shape="22"),
    "a column with a shape of truths": lie("chunks.begins", shape=[True, True]),
    "a column outside of the file": lie("chunks.begins", data_offsets=[1 << 40, (1 << 40) + 16]),
    "a column that ends before it begins": lie("chunks.begins", data_offsets=[16, 0]),
    "a column at three offsets": lie("chunks.begins", data_offsets=[0, 8, 16]),
    "a column at offsets of text": lie("chunks.begins", data_offsets=["0", "16"]),
    "a column at no offsets": lie("chunks.begins", data_offsets=None),
    "a checksum of another size": lie("checksum", data_offsets=[0, 9]),
    # Texts.
    "names that are not UTF-8": raw("tensors.names", b"\x93\xa1a\xa2\xff\xfe\xa1b"),
    "paths that are not UTF-8": raw("files.paths", b"\x91\xa1\xff"),
    "names that are a number": raw("tensors.names", b"\x07"),
    "names that are numbers": raw("tensors.names", b"\x93\x01\x02\x03"),
    "names that are a map": raw("tensors.names", b"\x81\xa1a\xa1b"),
    "names of which there are 2^32": raw("tensors.names", b"\xdd\xff\xff\xff\xff"),
    "a name of 2^32 bytes": raw("tensors.names", b"\x91\xdb\xff\xff\xff\xff"),
    "names that are nested deeply": raw("tensors.names", b"\x91" * 100_000),
    "names that are cut off": raw("tensors.names", b"\x93\xa1a\xa1b"),
    "names with something after them": raw("tensors.names", b"\x93\xa1a\xa1b\xa1c\xc0"),
    "no names at all": raw("tensors.names", b""),
    # Notes.
    "another format": note("format", "safetensors"),
    "no format": lambda m: m.notes.pop("format"),
    "version 0": note("version", "0"),
    "version 2": note("version", "2"),
    "version -1": note("version", "-1"),
    "version 1.0": note("version", "1.0"),
    "no version": lambda m: m.notes.pop("version"),
    "a version of superscripts": note("version", "\u00b9"),
    "notes that are numbers": note("created", 5),
    "notes that are a list": lambda m: setattr(m, "notes", ["format", "reshard"]),
    "no notes": lambda m: setattr(m, "notes", None),
    # How names nest.
    "paths that are not MessagePack": raw("planner_data", b"N\xc1"),
    "paths that are a number": raw("planner_data", b"N\x07"),
    "paths of which there are 2^32": raw("planner_data", b"N\x92\xdd\xff\xff\xff\xff"),
    "more names than paths": paths(["model.weight", "step"], [[5, 6]]),
    "a position that is not a number": paths(["model.weight"], [[5, -6]]),
}


ALL = tuple(DOORS)
WHOLE = ("load", "read_state_dict")
BARE = ("read_state_dict",)

# Seen only by those who ask for what these lie about.
FOR_SOME: dict[str, tuple[Attack, tuple[str, ...]]] = {
    "a path through a file": (texts("files.paths", ["__0_0.safetensors/inside"]), ALL),
    "a path too long for any file system": (texts("files.paths", ["x" * 300]), ALL),
    "a tensor of 2^40 bytes without chunks": (
        no_chunks(1 << 38, 1),
        ("read_state_dict", "read_tensor"),
    ),
    "padding that hides a huge shape": (padding_of_bias(1 << 62, 0), BARE),
    "padding that hides bytes outside of the file": (padding_of_bias(1 << 16, 1 << 16), BARE),
    "two chunks in one place and none in another": (one_bias_chunk_twice, WHOLE),
    "a file that is listed twice, larger the second time": (same_file_twice(1 << 40), WHOLE),
    "bytes that two entries of one file share": (same_bytes_through_two_entries, WHOLE),
    "an alias of other dimensions": (alias_of_other_dims, BARE),
    "no tensor of 2^62 dimensions": (endless_width, ALL),
    "a version of 5000 digits": (note("version", "1" * 5000), ALL),
    "a quantised dtype": (texts("tensors.dtype_names", ["qint32", "int64"]), ("load",)),
    "a position of 10^10 in a list": (renamed_bias("a.9999999999", [1, -10]), BARE),
    "a negative position in a list": (renamed_bias("a.-5", [1, -2]), BARE),
    "a position at the top": (renamed_bias("1", [-1]), BARE),
    "a path of no parts": (renamed_bias("a", []), BARE),
    "a path of 2000 parts": (renamed_bias("a", [0] * 2000), BARE),
    **{
        f"{name} as a table": (two_dimensional(name), WHOLE)
        for name in (
            "tensors.dtypes",
            "tensors.ndims",
            "tensors.flags",
            "tensors.aliases",
            "tensors.chunk_starts",
            "chunks.files",
            "chunks.begins",
            "chunks.probes",
            "values.files",
            "values.begins",
            "values.nbytes",
            "values.checksums",
            "files.nbytes",
        )
    },
}


@pytest.mark.parametrize(
    ("attack", "door"),
    [
        pytest.param(attack, door, id=f"{name}-{door}")
        for name, (attack, doors) in ({n: (a, ALL) for n, a in ATTACKS.items()} | FOR_SOME).items()
        for door in doors
    ],
)
def test_a_hostile_manifest_is_refused_and_the_error_names_the_place(
    attack: Attack, door: str, checkpoint: Path
) -> None:
    manifest = OpenManifest(checkpoint)
    attack(manifest)
    manifest.write()
    with memory_limit():
        check_refused(lambda: DOORS[door](checkpoint), *names_of(checkpoint))


def test_the_manifest_that_all_attacks_begin_with_loads(checkpoint: Path) -> None:
    OpenManifest(checkpoint).write()
    expected = small_state()
    for loaded in (load_all(checkpoint), reshard.read_state_dict(checkpoint)):
        for name, tensor in expected["model"].items():
            assert torch.equal(loaded["model"][name], tensor)
        assert (loaded["step"], loaded["note"]) == (expected["step"], expected["note"])


def test_what_a_reader_does_not_know_is_ignored(checkpoint: Path) -> None:
    manifest = OpenManifest(checkpoint)
    manifest.notes["mood"] = "sunny"
    manifest.set_bytes("chunks.colours", b"\1\2\3")
    manifest.parts["tensors.weather"] = manifest.parts["tensors.shapes"]
    manifest.write()
    assert reshard.read_state_dict(checkpoint)["step"] == small_state()["step"]


def test_a_newer_version_is_refused_in_words_that_say_which(checkpoint: Path) -> None:
    manifest = OpenManifest(checkpoint)
    manifest.notes["version"] = "7"
    manifest.write()
    for door in DOORS.values():
        text = check_refused(lambda door=door: door(checkpoint), "'7'")
        assert "reads version 1" in text

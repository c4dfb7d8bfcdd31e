"""Checkpoints that format version 1 wrote: they load, and the specification is enough to read them.

The second half is a reader written from `docs/format.md` alone. It must never import the
package.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
import zstandard

import reshard
from reshard.api import UnsafeValueError

HERE = Path(__file__).parent
V1, V1_PARTS = HERE / "v1", HERE / "v1-parts"

# torch announces once in a process that complex32 is young.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def _load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_v1", HERE / "make_v1.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_v1 = _load_generator()


def expected_v1() -> dict[str, Any]:
    return {"sharded": make_v1.full_tensors(), **make_v1.plain_state()}


def expected_parts() -> dict[str, Any]:
    full = make_v1.full_tensors()
    return {
        "columns": full["both"],
        "tied": {"one": full["uneven"], "other": full["uneven"]},
        "replicated": full["whole"],
        "step": 7,
        "of": {"rank-0-of-2": "rank 0", "rank-1-of-2": "rank 1"},
    }


def check_same(found: Any, expected: Any, at: str = "") -> None:
    """Equal, bit for bit, and of the same types all the way down."""
    assert type(found) is type(expected), f"{at}: {type(found)} in place of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert found.dtype is expected.dtype, at
        assert found.shape == expected.shape, at
        assert bits(found) == bits(expected), at
    elif isinstance(expected, np.ndarray | np.generic):
        assert found.dtype == expected.dtype, at
        assert found.shape == expected.shape, at
        assert found.tobytes() == expected.tobytes(), at
    elif isinstance(expected, dict):
        assert list(found) == list(expected), at
        for key, inner in expected.items():
            check_same(found[key], inner, f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), at
        for number, inner in enumerate(expected):
            check_same(found[number], inner, f"{at}.{number}")
    elif isinstance(expected, set) and any(isinstance(e, torch.Tensor) for e in expected):
        check_same([*found], [*expected], at)
    else:
        assert found == expected, at


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def blank(value: Any) -> Any:
    """A template of the same structure that holds nothing of the same content."""
    if isinstance(value, dict):
        return type(value)((key, blank(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(blank(inner) for inner in value)
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else "not loaded"


def as_read(value: Any) -> Any:
    """A state dict as it is read without a template: containers that were entered are plain."""
    if isinstance(value, dict):
        return {key: as_read(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) and _is_entered(value):
        return [as_read(inner) for inner in value]
    return value


def _is_entered(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, list):
        return any(isinstance(inner, dict) or _is_entered(inner) for inner in value)
    if isinstance(value, dict):
        return any(map(_is_entered, value.values()))
    return isinstance(value, tuple) and any(map(_is_entered, value))


def test_the_golden_checkpoint_loads_into_a_template_as_it_was_saved() -> None:
    expected = expected_v1()
    state = blank(expected)
    reshard.load(state, checkpoint_id=V1, no_dist=True, strict="exact", verify="full")
    check_same(state, {key: expected[key] for key in state})


def test_the_golden_checkpoint_is_read_without_a_template() -> None:
    check_same(reshard.read_state_dict(V1), as_read(expected_v1()))


def test_a_region_of_the_golden_checkpoint_is_read_across_its_chunks() -> None:
    full = make_v1.full_tensors()["both"]
    region = (slice(1, 5), slice(2, 6))
    assert torch.equal(reshard.read_tensor(V1, "sharded.both", region), full[region])


def test_the_golden_parts_load_as_one_checkpoint() -> None:
    for key, value in expected_parts().items():
        check_same(reshard.read_state_dict(V1_PARTS, key), {key: value})


def test_the_golden_pickle_stays_closed_until_the_caller_opens_it() -> None:
    with pytest.raises(UnsafeValueError, match=r"'pickled' .* of type decimal\.Decimal"):
        reshard.read_state_dict(V1_PARTS, "pickled")
    opened = reshard.read_state_dict(V1_PARTS, "pickled", allow_pickle=True)["pickled"]
    assert str(opened) == "1.5"


def test_the_generator_still_makes_what_is_kept(tmp_path: Path) -> None:
    make_v1.make(tmp_path)
    for kept in (V1, V1_PARTS):
        made = tmp_path / kept.name
        assert sorted(p.name for p in made.iterdir()) == sorted(p.name for p in kept.iterdir())
        check_same(
            reshard.read_state_dict(made, allow_pickle=True),
            reshard.read_state_dict(kept, allow_pickle=True),
        )


# A reader of docs/format.md. Nothing below this line may use reshard.


class Damaged(Exception):
    pass


ITEMSIZES = {
    **dict.fromkeys(["float64", "int64", "uint64", "complex64"], 8),
    **dict.fromkeys(["float32", "int32", "uint32", "complex32"], 4),
    **dict.fromkeys(["float16", "bfloat16", "int16", "uint16"], 2),
    "complex128": 16,
}


class StoredTensor(tuple):
    """dtype, shape, and bytes in row-major order."""


class Pickle(bytes):
    """Left closed."""


class PlainReader:
    """A checkpoint directory, by the specification."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifests = [self._manifest(".metadata")]
        notes = self.manifests[0]["notes"]
        assert set(notes.get("requires", "").split()) <= {"parts", "references", "codecs"}
        if "parts" in notes:
            world, save = int(notes["parts"]), notes["save_id"].replace("-", "")[:16]
            names_of_parts = [f".metadata.{r}-of-{world}.{save}" for r in range(world)]
            self.manifests = [self._manifest(name) for name in names_of_parts]
            assert {m["notes"]["save_id"] for m in self.manifests} == {notes["save_id"]}

    def _manifest(self, name: str) -> dict[str, Any]:
        raw = (self.directory / name).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        if 8 + length > len(raw) or (8 + length) % 4096:
            raise Damaged("header")
        header = json.loads(raw[8 : 8 + length])
        notes = header.pop("__metadata__")
        if (notes["format"], notes["version"]) != ("reshard", "1"):
            raise Damaged("not version 1")
        if struct.unpack("<Q", raw[-8:])[0] != xxhash.xxh3_64_intdigest(raw[:-8]):
            raise Damaged("checksum")
        columns: dict[str, Any] = {}
        for entry, form in header.items():
            begin, end = (8 + length + offset for offset in form["data_offsets"])
            data = raw[begin:end]
            if form["dtype"] == "I64":
                assert begin % 8 == 0
                numbers = struct.unpack(f"<{len(data) // 8}q", data)
                width = form["shape"][1] if len(form["shape"]) == 2 else 0
                columns[entry] = (
                    [numbers[i : i + width] for i in range(0, len(numbers), width)]
                    if width
                    else list(numbers)
                )
            else:
                columns[entry] = data
        lists = ("tensors.names", "tensors.dtype_names", "values.names", "files.paths")
        for entry in (*lists, "codecs.names", "origins.locations", "origins.save_ids"):
            if entry in columns:
                columns[entry] = msgspec.msgpack.decode(columns[entry])
        required = notes.get("requires", "").split()
        assert ("origins.locations" in columns) == ("references" in required)
        assert ("chunks.codecs" in columns) == ("codecs" in required)
        columns["notes"] = notes
        return columns

    def tensors(self) -> dict[str, StoredTensor]:
        forms: dict[str, tuple[str, tuple[int, ...], str]] = {}
        chunks: dict[str, dict[tuple[int, ...], tuple[tuple[int, ...], bytes]]] = {}
        for manifest in self.manifests:
            for row, name in enumerate(manifest["tensors.names"]):
                dims = manifest["tensors.ndims"][row]
                dtype = manifest["tensors.dtype_names"][manifest["tensors.dtypes"][row]]
                shape = manifest["tensors.shapes"][row]
                assert set(shape[dims:]) <= {1}, "padding"
                alias = manifest["tensors.aliases"][row]
                source = manifest["tensors.names"][alias if alias >= 0 else row]
                form = forms.setdefault(name, (dtype, tuple(shape[:dims]), source))
                assert form[:2] == (dtype, tuple(shape[:dims]))
                own = chunks.setdefault(name, {})
                for offsets, sizes, data in self._chunks(
                    manifest, row, dims, ITEMSIZES.get(dtype, 1)
                ):
                    own.setdefault(offsets, (sizes, data))
        return {
            name: StoredTensor((dtype, shape, _assemble(shape, dtype, chunks[source])))
            for name, (dtype, shape, source) in forms.items()
        }

    def _chunks(
        self, manifest: dict[str, Any], row: int, dims: int, itemsize: int
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], bytes]]:
        for chunk in range(*manifest["tensors.chunk_starts"][row : row + 2]):
            offsets, sizes = manifest["chunks.offsets"][chunk], manifest["chunks.sizes"][chunk]
            assert set(offsets[dims:]) <= {0}, "padding"
            assert set(sizes[dims:]) <= {1}, "padding"
            nbytes = stored = math.prod(sizes) * itemsize
            codec = manifest["chunks.codecs"][chunk] if "chunks.codecs" in manifest else 0
            if codec:
                stored = manifest["chunks.stored_nbytes"][chunk]
            data = self._bytes(
                manifest,
                manifest["chunks.files"][chunk],
                manifest["chunks.begins"][chunk],
                stored,
            )
            if codec:
                assert manifest["codecs.names"][codec - 1] == "planes-zstd"
                data = _decode_planes(data, nbytes)
            probe = xxhash.xxh3_64_intdigest(data[:4096])
            if probe != manifest["chunks.probes"][chunk] % (1 << 64):
                raise Damaged("probe")
            if xxhash.xxh3_128_digest(data) != manifest["chunks.digests"][16 * chunk :][:16]:
                raise Damaged("digest")
            assert manifest["chunks.begins"][chunk] % itemsize == 0, "alignment"
            yield tuple(offsets[:dims]), tuple(sizes[:dims]), data

    def _bytes(self, manifest: dict[str, Any], file: int, begin: int, nbytes: int) -> bytes:
        directory, save_id = self.directory, manifest["notes"]["save_id"]
        origin = manifest["files.origins"][file] if "files.origins" in manifest else -1
        if origin >= 0:
            location = manifest["origins.locations"][origin]
            names = re.fullmatch(r"(?:\.\./)+([^\\\x00-\x1f]+)", location)
            assert names is not None
            assert not {"", ".", ".."} & {*names[1].split("/")}
            directory, save_id = directory / location, manifest["origins.save_ids"][origin]
        raw = (directory / manifest["files.paths"][file]).read_bytes()
        header = raw[: manifest["files.header_nbytes"][file]]
        if xxhash.xxh3_64_intdigest(header) != manifest["files.header_checksums"][file] % (1 << 64):
            raise Damaged("header")
        notes = json.loads(header[8:]).get("__metadata__", {})
        assert notes.get("save_id", "") == save_id
        if len(raw) != manifest["files.nbytes"][file] or begin + nbytes > len(raw):
            raise Damaged("size")
        return raw[begin : begin + nbytes]

    def fingerprints(self) -> dict[str, tuple[int, int]]:
        """The sums of what the manifest says of the chunks of each tensor."""
        (manifest,) = self.manifests
        found = {}
        for row, name in enumerate(manifest["tensors.names"]):
            chunks = range(*manifest["tensors.chunk_starts"][row : row + 2])
            parts = [manifest["chunks.fingerprints"][chunk] for chunk in chunks]
            found[name] = tuple(sum(column) % (1 << 64) for column in zip(*parts, strict=True))
        return found

    def values(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for manifest in self.manifests:
            for row, name in enumerate(manifest["values.names"]):
                data = self._bytes(
                    manifest,
                    *(manifest[f"values.{c}"][row] for c in ("files", "begins", "nbytes")),
                )
                if xxhash.xxh3_64_intdigest(data) != manifest["values.checksums"][row] % (1 << 64):
                    raise Damaged("checksum")
                assert data[:4] == b"RSV1"
                assert (data[4:5] == b"P") == manifest["values.pickled"][row]
                value = Pickle(data[5:]) if data[4:5] == b"P" else _decode(data[5:])
                found.setdefault(name, value)
        return found

    def paths(self) -> dict[str, list[str | int]]:
        found: dict[str, list[str | int]] = {}
        for manifest in self.manifests:
            packed = manifest["planner_data"]
            assert packed[:1] == b"N"
            for name, cuts in zip(*msgspec.msgpack.decode(packed[1:]), strict=True):
                path: list[str | int] = []
                at = 0
                for cut in cuts:
                    length = cut - 2**32 if cut >= 2**32 else abs(cut)
                    piece = name[at : at + length]
                    was_int = int(piece) if cut >= 2**32 else piece
                    path.append(Position(piece) if cut < 0 else was_int)
                    at += length + 1
                found.setdefault(name, path)
        return found

    def nested(self) -> dict[str, Any]:
        content = {**self.tensors(), **self.values()}
        root: dict[str, Any] = {}
        for name, path in self.paths().items():
            place: Any = root
            for key, following in itertools.pairwise(path):
                place = _step_into(place, key, [] if isinstance(following, Position) else {})
            _put(place, path[-1], content.pop(name))
        assert not content, "names without a path"
        return root


def _decode_planes(data: bytes, nbytes: int) -> bytes:
    """What an encoded chunk stands for."""
    assert data[:5] == b"RSPL\x01"
    width, (frame_bytes,) = data[5], struct.unpack("<I", data[8:12])
    (content_bytes,) = struct.unpack("<Q", data[16:24])
    count = -(-nbytes // frame_bytes)
    row_bytes = 16 + 4 * width
    rows = data[32 : 32 + count * row_bytes]
    if content_bytes != nbytes or struct.unpack("<Q", data[24:32])[0] != xxhash.xxh3_64_intdigest(
        data[:24] + rows
    ):
        raise Damaged("index")
    content, at = b"", 32 + len(rows)
    for number in range(count):
        row = rows[number * row_bytes :][:row_bytes]
        stored, decoded, *words = struct.unpack(f"<QQ{width}I", row)
        length = min(frame_bytes, nbytes - number * frame_bytes)
        begin, planes = at, []
        for word in words:
            kind, size = word >> 24, word & 0xFFFFFF
            plane = data[at : at + size]
            if kind == 1:
                plane = zstandard.ZstdDecompressor().decompress(plane)
            assert len(plane) == length // width
            planes.append(plane)
            at += size
        frame = bytes(itertools.chain.from_iterable(zip(*planes, strict=True)))
        if (xxhash.xxh3_64_intdigest(data[begin:at]), xxhash.xxh3_64_intdigest(frame)) != (
            stored,
            decoded,
        ):
            raise Damaged("frame")
        content += frame
    assert len(data) == -(-at // 8) * 8
    assert not any(data[at:])
    return content


def _fingerprint(tensor: StoredTensor) -> tuple[int, int]:
    """By the definition in the specification, one word after the other."""
    dtype, shape, data = tensor
    itemsize, modulus = ITEMSIZES.get(dtype, 1), 1 << 64

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % modulus
        z = (z ^ z >> 27) * 0x94D049BB133111EB % modulus
        return z ^ z >> 31

    def weight(stream: int, position: int) -> int:
        return mix((mix(stream) + (position + 1) * 0x9E3779B97F4A7C15) % modulus)

    dims = len(shape)
    first = next((d for d in range(dims, -1, -1) if math.prod(shape[d:]) * itemsize >= 512), 0)
    row_bytes = math.prod(shape[first:]) * itemsize
    blocks = -(-row_bytes // 8192)
    sums = [0, 0]
    for row in range(len(data) // row_bytes):
        whole = data[row * row_bytes :][:row_bytes]
        whole += b"\0" * (-row_bytes % 8)
        for block in range(blocks):
            words = whole[8192 * block :][:8192]
            number = row * blocks + block
            a = b = 0
            for position in range(len(words) // 8):
                word = words[8 * position :][:8]
                a += weight(1, position) * int.from_bytes(word, "little")
                b += weight(2, position) * int.from_bytes(word, "big")
            sums[0] += weight(3, number) * a + weight(4, number) * b
            sums[1] += weight(5, number) * a + weight(6, number) * b
    return sums[0] % modulus, sums[1] % modulus


class Position(int):
    """A place in a list, and not the key of a dict."""


def _step_into(place: Any, key: str | int, new: Any) -> Any:
    if isinstance(place, dict):
        return place.setdefault(key, new)
    if key == len(place):
        place.append(new)
    return place[key]


def _put(place: Any, key: str | int, value: Any) -> None:
    if isinstance(place, dict):
        place[key] = value
    else:
        assert key == len(place)
        place.append(value)


def _assemble(
    shape: tuple[int, ...], dtype: str, chunks: dict[tuple[int, ...], tuple[tuple[int, ...], bytes]]
) -> bytes:
    """Chunks put where they belong, one element after the other."""
    itemsize = ITEMSIZES.get(dtype, 1)
    whole = bytearray(math.prod(shape) * itemsize)
    filled = 0
    for offsets, (sizes, data) in chunks.items():
        for number in range(len(data) // itemsize):
            place, rest, stride = 0, number, 1
            for extent, offset, size in zip(shape[::-1], offsets[::-1], sizes[::-1], strict=True):
                place += (rest % size + offset) * stride
                rest //= size
                stride *= extent
            element = data[number * itemsize : (number + 1) * itemsize]
            whole[place * itemsize : (place + 1) * itemsize] = element
            filled += itemsize
    assert filled == len(whole), "the chunks do not cover the tensor"
    return bytes(whole)


class Tagged(tuple):
    """A type that this reader has no own form for: its tag, and its content."""


def _decode(data: bytes | memoryview) -> Any:
    return msgspec.msgpack.decode(data, ext_hook=lambda tag, content: _tagged(tag, content))


def _tagged(tag: int, data: memoryview) -> Any:
    content = _decode(data)
    make = {
        1: tuple,
        2: dict,
        3: set,
        4: frozenset,
        5: lambda number: int.from_bytes(number, "little", signed=True),
        6: lambda pair: complex(*pair),
        7: bytearray,
        8: OrderedDict,
        35: lambda triple: StoredTensor((triple[0], tuple(triple[1]), triple[2])),
    }.get(tag, lambda inner: Tagged((tag, inner)))
    return make(content)


def as_plain(value: Any) -> Any:
    """What the reader above should find for a value of a state dict that was read."""
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return StoredTensor((name, tuple(value.shape), bits(value)))
    if isinstance(value, np.ndarray | np.generic):
        tag = 16 if isinstance(value, np.ndarray) else 17
        return Tagged((tag, [value.dtype.str, list(value.shape), value.tobytes()]))
    tags = {
        "Size": (32, list),
        "dtype": (33, lambda v: str(v).removeprefix("torch.")),
        "device": (34, str),
        "datetime": (48, lambda v: [v.isoformat(), v.fold]),
        "date": (49, lambda v: v.isoformat()),
        "time": (50, lambda v: [v.isoformat(), v.fold]),
        "timedelta": (51, lambda v: [v.days, v.seconds, v.microseconds]),
    }
    if type(value).__name__ in tags:
        tag, content = tags[type(value).__name__]
        return Tagged((tag, content(value)))
    if isinstance(value, dict):
        return type(value)((key, as_plain(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(as_plain(inner) for inner in value)
    return value


def check_same_plain(found: Any, expected: Any, at: str = "") -> None:
    assert type(found) is type(expected), f"{at}: {found!r} in place of {expected!r}"
    assert found == expected, at
    if isinstance(expected, dict):
        assert list(found) == list(expected), at
        for key in expected:
            check_same_plain(found[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_same_plain(one, other, f"{at}.{number}")


def test_a_reader_written_from_the_specification_reads_the_golden_checkpoint() -> None:
    check_same_plain(PlainReader(V1).nested(), as_plain(as_read(expected_v1())))


def test_a_reader_written_from_the_specification_reads_the_golden_parts() -> None:
    found = PlainReader(V1_PARTS).nested()
    assert isinstance(found.pop("pickled"), Pickle)
    assert found == as_plain(expected_parts())


def test_every_golden_shard_file_is_laid_out_as_specified() -> None:
    for path in [*V1.glob("*.safetensors"), *V1_PARTS.glob("*.safetensors")]:
        assert path.name.endswith(f"_{make_v1.SAVE_ID.replace('-', '')[:16]}.safetensors")
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt", "save_id": make_v1.SAVE_ID}
        assert (8 + length) % 4096 == 0
        end = 0
        for entry in header.values():
            begin, new_end = entry["data_offsets"]
            assert begin == end
            end = new_end
        assert 8 + length + end == len(raw)


def test_the_keys_of_golden_shard_files_name_regions() -> None:
    keys = set()
    for path in V1.glob("*.safetensors"):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        keys |= json.loads(raw[8 : 8 + length]).keys()
    assert {f"sharded.both[{r},{c}]" for r in ("0:3", "3:5") for c in ("0:4", "4:7")} <= keys
    assert {"sharded.whole", "shapes.scalar", "values.none", "模型.слой.é/☃"} <= keys
    assert "tied.other" not in keys


REFERENCES, CODECS, FINGERPRINTS = (
    HERE / f"v1-{feature}" for feature in ("references", "codecs", "fingerprints")
)


@pytest.mark.parametrize(
    ("name", "step"), [("base", 1), ("step", 2), ("tuned", 3), ("tuned-parts", 4)]
)
def test_golden_references_load(name: str, step: int) -> None:
    expected = make_v1.layered_state(step)
    check_same(reshard.read_state_dict(REFERENCES / name), expected)
    assert PlainReader(REFERENCES / name).nested() == as_plain(expected)


def test_golden_references_are_references() -> None:
    def holds(name: str) -> list[bool]:
        files = (REFERENCES / name).glob("*.safetensors")
        return [b"frozen" in path.read_bytes() for path in files]

    assert holds("base") == [True, True]
    assert not any(holds("step") + holds("tuned") + holds("tuned-parts"))


def test_the_golden_codecs_load() -> None:
    expected = make_v1.compressible_state()
    check_same(reshard.read_state_dict(CODECS), expected)
    assert PlainReader(CODECS).nested() == as_plain(expected)


def test_the_golden_fingerprints_are_those_of_the_specification() -> None:
    reader = PlainReader(FINGERPRINTS)
    tensors = reader.tensors()
    assert reader.fingerprints() == {name: _fingerprint(each) for name, each in tensors.items()}
    state = blank(make_v1.fingerprinted_tensors())
    report = reshard.load(state, checkpoint_id=FINGERPRINTS, verify="fingerprint", no_dist=True)
    assert report.verified == len(tensors)
    check_same(state, make_v1.fingerprinted_tensors())


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("name", ["plain", "run-12:30:00", ".hidden", "a b"])
def test_a_reader_written_from_the_specification_reads_what_refers_to_a_checkpoint_made_whole(
    name: str, compress: Any, tmp_path: Path
) -> None:
    states = [make_v1.layered_state(step) for step in range(3)]
    places = [tmp_path / str(step) for step in range(2)] + [tmp_path / name]
    for step, place in enumerate(places):
        base = places[step - 1] if step else None
        reshard.save(states[step], checkpoint_id=place, base=base, compress=compress)
    assert reshard.materialise(places[1])
    assert reshard.materialise(places[2])
    reshard.save(states[0], checkpoint_id=tmp_path / "last", base=places[2])

    for step, place in enumerate(places):
        assert PlainReader(place).nested() == as_plain(states[step])
    assert PlainReader(tmp_path / "last").nested() == as_plain(states[0])
    assert PlainReader(tmp_path / "last").manifests[0]["origins.locations"] == [f"../{name}"]

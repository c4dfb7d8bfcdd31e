"""reshard.convert: what a checkpoint holds, in another format or under other names."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import SerializationFormat

import reshard
from reshard.api import (
    CheckpointExistsError,
    CorruptCheckpointError,
    CoverageError,
    MissingKeyError,
    PlanError,
    StateDictError,
    UnsupportedFormatError,
)
from reshard.checkpoint.stored_tensors import StoredTensors
from reshard.convert import copying, safetensors
from reshard.convert.drafts import new_token
from reshard.format.plain_dtypes import PACKED_DTYPES, PLAIN_DTYPES
from reshard.stores.local import LocalStore
from support.ranks import run_ranks

PAIRS: Any = getattr(torch, "float4_e2m1fn_x2", None)
needs_pairs = pytest.mark.skipif(PAIRS is None, reason="this torch has no 4-bit floats")


def bits(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Any bits, so that NaNs and the like are among them."""
    generator = torch.Generator().manual_seed(len(shape) + dtype.itemsize)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = dtype.itemsize * torch.Size(shape).numel()
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def save(folder: Path, **state: Any) -> Path:
    reshard.save(state, checkpoint_id=folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("dtype", list(PLAIN_DTYPES.values()), ids=str)
def test_every_dtype_that_safetensors_has_goes_there_and_back(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    tensors = {"m": bits(7, 5, dtype=dtype), "none": bits(0, 3, dtype=dtype)}
    if dtype not in PACKED_DTYPES:
        tensors["scalar"] = bits(1, dtype=dtype)[0]
    place = save(tmp_path, **tensors)

    reshard.convert(place, tmp_path / "hf", "huggingface")
    reshard.convert(tmp_path / "hf", tmp_path / "back", "reshard")

    by_safetensors = load_file(tmp_path / "hf/model.safetensors")
    back = reshard.read_state_dict(tmp_path / "back")
    assert by_safetensors.keys() == back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for found in (by_safetensors[name], back[name]):
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert same_bits(found, tensor)


def test_a_dtype_that_safetensors_lacks_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    place = save(tmp_path, z=torch.zeros(2, dtype=torch.complex128))

    with pytest.raises(UnsupportedFormatError, match=r"cannot hold 'z'.*complex128.*exclude"):
        reshard.convert(place, tmp_path / "hf", "huggingface")

    assert not (tmp_path / "hf").exists()


@needs_pairs
def test_pairs_of_4_bit_floats_are_the_bytes_that_safetensors_itself_writes(tmp_path: Path) -> None:
    packed = bits(6, 4, dtype=PAIRS)
    save_file({"w": packed}, tmp_path / "theirs.safetensors")
    target = {"w": torch.zeros(6, 4, dtype=torch.uint8).view(PAIRS)}
    reshard.load(target, checkpoint_id=tmp_path / "theirs.safetensors")
    assert same_bits(target["w"], packed)

    reshard.convert(tmp_path / "theirs.safetensors", tmp_path / "hf", "huggingface")
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as opened:
        stored = opened.get_slice("w")
        assert (stored.get_dtype(), stored.get_shape()) == ("F4", [6, 8])


@needs_pairs
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pairs_of_4_bit_floats_are_found_in_safetensors_files_of_dcp(tmp_path: Path) -> None:
    packed = bits(6, 4, dtype=PAIRS)
    writer = dcp.FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"w": packed}, storage_writer=writer, no_dist=True)
    assert same_bits(reshard.read_state_dict(tmp_path)["w"], packed)


@needs_pairs
def test_pairs_of_4_bit_floats_stay_as_they_are_when_others_are_cast(tmp_path: Path) -> None:
    packed = bits(6, 4, dtype=PAIRS)
    place = save(tmp_path, packed=packed, plain=torch.ones(2))

    reshard.convert(place, tmp_path / "hf", "huggingface", dtype="bfloat16")

    found = load_file(tmp_path / "hf/model.safetensors")
    assert same_bits(found["packed"], packed)
    assert found["plain"].dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"converts nothing to torch\.float4"):
        reshard.convert(place, tmp_path / "other", "huggingface", dtype=PAIRS)


@needs_pairs
def test_pairs_without_a_dimension_are_refused_and_so_are_halves_of_a_pair(tmp_path: Path) -> None:
    place = save(tmp_path, one=bits(1, dtype=PAIRS)[0])
    with pytest.raises(UnsupportedFormatError, match=r"'one'.*is a scalar of .*float4"):
        reshard.convert(place, tmp_path / "hf", "huggingface")

    entry = {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}
    header = json.dumps({"odd": entry}).encode()
    file = tmp_path / "odd.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(UnsupportedFormatError, match=r"'odd'.*F4.*\[2, 3\].*must be even"):
        reshard.read_state_dict(file)


def test_a_value_is_refused_by_its_name_unless_it_is_left_out(tmp_path: Path) -> None:
    place = save(tmp_path, model={"w": torch.ones(2)}, step=7, epoch=1)

    with pytest.raises(UnsupportedFormatError, match=r"'step'.* is a value, as are 1 others"):
        reshard.convert(place, tmp_path / "hf", "huggingface")
    assert not (tmp_path / "hf").exists()
    reshard.convert(place, tmp_path / "hf", "huggingface", exclude=["step", "ep*"])

    assert load_file(tmp_path / "hf/model.safetensors").keys() == {"model.w"}


def test_files_are_no_larger_than_asked_for_and_the_index_says_what_is_where(
    tmp_path: Path,
) -> None:
    tensors = {f"layer.{i}": bits(100, i + 1) for i in range(9)}
    place = save(tmp_path, **tensors)

    reshard.convert(place, tmp_path / "hf", "huggingface", max_shard_size="6KB")

    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, 4 + 1)]
    for file in files:
        found = load_file(tmp_path / "hf" / file)
        assert sum(t.nbytes for t in found.values()) <= 6000
        for name, tensor in found.items():
            assert index["weight_map"][name] == file
            assert same_bits(tensor, tensors[name])
    assert reshard.read_state_dict(tmp_path / "hf").keys() == tensors.keys()


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [(5, 5), ("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("200mb", 2 * 10**8), ("7", 7)],
)
def test_sizes_are_numbers_or_texts(size: int | str, nbytes: int) -> None:
    assert safetensors.parse_size(size) == nbytes


@pytest.mark.parametrize("size", ["", "GB", "-1GB", "5 parsecs", 0, -3, True, None])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        safetensors.parse_size(size)


def test_only_floating_point_tensors_are_cast(tmp_path: Path) -> None:
    place = save(tmp_path, f=torch.tensor([1.5, 1e-9]), i=torch.tensor([3]), b=torch.tensor([True]))

    reshard.convert(place, tmp_path / "hf", "huggingface", dtype="bfloat16")
    reshard.convert(place, tmp_path / "again", "reshard", dtype=torch.float16)

    found = load_file(tmp_path / "hf/model.safetensors")
    assert torch.equal(found["f"], torch.tensor([1.5, 1e-9]).bfloat16())
    assert (found["i"].dtype, found["b"].dtype) == (torch.int64, torch.bool)
    assert reshard.read_tensor(tmp_path / "again", "f").dtype is torch.float16


def test_names_are_chosen_and_changed_and_nesting_stays(tmp_path: Path) -> None:
    state = {"model": {"layers": [{"w": torch.ones(1)}, {"w": torch.ones(2)}]}, "opt": {"lr": 0.1}}
    place = save(tmp_path, **state)

    reshard.convert(place, tmp_path / "net", "reshard", keys="model", rename={"model": "net"})
    reshard.convert(
        place, tmp_path / "hf", "huggingface", keys=["model.layers.1"], rename={"model": ""}
    )

    found = reshard.read_state_dict(tmp_path / "net")
    assert [layer["w"].shape for layer in found["net"]["layers"]] == [(1,), (2,)]
    assert found.keys() == {"net"}
    assert load_file(tmp_path / "hf/model.safetensors").keys() == {"layers.1.w"}


FORMATS = ["huggingface", "reshard", "dcp", "torch"]
of_every_format = pytest.mark.parametrize("format", FORMATS)


@of_every_format
@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"keys": "alphas"}, MissingKeyError, r"saved: .*alphas.*\s+.*alpha"),
        (
            {"rename": lambda name: "x"},
            StateDictError,
            r"'alpha' and 'beta' the same name 'x', and .*saved has both.*Choose other names",
        ),
        ({"rename": lambda name: None}, StateDictError, "'alpha' the name None: return a text"),
        ({"rename": 5}, PlanError, "rename is a dict of names, or a function"),
        ({"keys": 5}, PlanError, "keys is a name, or a list of names, not 5"),
        ({"exclude": [5]}, PlanError, r"exclude is a name, or a list of names, not \[5\]"),
        ({"dtype": "bf16"}, PlanError, "dtype='bf16' is not the name of a dtype"),
        ({"dtype": torch.int32}, PlanError, "dtype is a floating-point dtype"),
        ({"max_shard_size": "much"}, PlanError, "max_shard_size='much' is not a size"),
    ],
)
def test_wrong_arguments_are_the_same_error_for_every_format(
    tmp_path: Path, format: Any, options: Any, kind: type[Exception], text: str
) -> None:
    place = save(tmp_path, alpha=torch.ones(1), beta=torch.ones(1))

    with pytest.raises(reshard.CheckpointException, match=text) as raised:
        reshard.convert(place, tmp_path / "out", format, **options)

    assert raised.type is kind
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    place = save(tmp_path, w=torch.ones(1))

    with pytest.raises(UnsupportedFormatError, match=r"format is 'reshard'.*not 'onnx'"):
        reshard.convert(place, tmp_path / "out", "onnx")  # type: ignore[arg-type]

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("format", "below"),
    [
        *((format, below) for format in FORMATS for below in ("/below", "/far/below")),
        *((format, "") for format in FORMATS if format != "torch"),
    ],
)
def test_a_file_is_no_place_for_a_directory_and_stays(
    tmp_path: Path, format: Any, below: str
) -> None:
    place = save(tmp_path, w=torch.ones(1))
    (tmp_path / "notes").write_text("mine")

    with pytest.raises(CheckpointExistsError, match=r"notes' is a file.*another place"):
        reshard.convert(place, f"{tmp_path}/notes{below}", format, overwrite=True)

    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("format", ["huggingface", "reshard", "dcp"])
def test_a_link_to_nowhere_is_no_place_for_a_directory(tmp_path: Path, format: Any) -> None:
    place = save(tmp_path, w=torch.ones(1))
    (tmp_path / "link").symlink_to("nowhere")

    with pytest.raises(CheckpointExistsError, match=r"link' is a file"):
        reshard.convert(place, tmp_path / "link", format)


@pytest.mark.parametrize("format", ["dcp", "torch"])
def test_a_dtype_that_torch_cannot_save_is_the_same_error(tmp_path: Path, format: Any) -> None:
    place = save(tmp_path, w=torch.ones(2, dtype=torch.uint8).view(torch.int4))

    with pytest.raises(UnsupportedFormatError, match=r"cannot write 'w' of .*saved.*exclude"):
        reshard.convert(place, tmp_path / "out", format)

    assert not (tmp_path / "out").exists()


def test_a_source_that_is_one_file_is_called_by_its_name(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "step": 5}, tmp_path / "model.pt")

    for options in ({}, {"keys": "b"}, {"rename": lambda name: "x"}):
        with pytest.raises(reshard.CheckpointException, match=r"model\.pt"):
            reshard.convert(tmp_path / "model.pt", tmp_path / "hf", "huggingface", **options)


@of_every_format
@pytest.mark.parametrize("rename", [{"model.c": "x.y"}, {"x": "model"}], ids=str)
def test_names_that_would_be_a_value_and_a_container_are_refused(
    tmp_path: Path, format: Any, rename: dict[str, str]
) -> None:
    place = save(tmp_path, model={"c": torch.ones(1)}, x=torch.ones(1))

    with pytest.raises(StateDictError, match=r"rename puts .* below"):
        reshard.convert(place, tmp_path / "out", format, rename=rename)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["reshard", "dcp", "torch"])
@pytest.mark.parametrize("new", ["items.9", "items.0.q"])
def test_a_new_name_does_not_turn_a_list_into_a_dict(tmp_path: Path, new: str, format: Any) -> None:
    place = save(tmp_path, items=[torch.ones(1), 3], x=torch.ones(1))

    with pytest.raises(StateDictError, match="rename"):
        reshard.convert(place, tmp_path / "out", format, rename={"x": new})

    assert not (tmp_path / "out").exists()


def test_no_keys_are_not_all_keys(tmp_path: Path) -> None:
    place = save(tmp_path, w=torch.ones(1))

    reshard.convert(place, tmp_path / "out", "reshard", keys=[])

    assert reshard.read_state_dict(tmp_path / "out") == {}


@pytest.mark.parametrize("format", ["reshard", "dcp", "torch"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keys": ["a"]}, {"a": {"w": 1, "none": {}}}),
        ({"keys": ["a", "b"]}, {"a": {"w": 1, "none": {}}, "b": {}}),
        ({"keys": ["a.w"]}, {"a": {"w": 1}}),
        ({"exclude": ["b", "*.none"]}, {"a": {"w": 1}, "c": 2}),
        (
            {"rename": {"a": "x.y", "b": "z"}},
            {"x": {"y": {"w": 1, "none": {}}}, "z": {}, "c": 2},
        ),
        ({"rename": {"b": "c"}, "keys": ["b"]}, {"c": {}}),
    ],
    ids=str,
)
def test_empty_dicts_are_chosen_and_renamed_like_anything_else(
    tmp_path: Path, format: Any, options: Any, expected: Any
) -> None:
    place = save(tmp_path, a={"w": 1, "none": {}}, b={}, c=2)

    reshard.convert(place, tmp_path / "out", format, **options)

    found = reshard.read_state_dict(tmp_path / "out")
    if format == "dcp":
        # Which has no place for them.
        expected = without_empty_dicts(expected)
    assert found == expected


def without_empty_dicts(state: dict[str, Any]) -> dict[str, Any]:
    cleared = {
        key: without_empty_dicts(value) if isinstance(value, dict) else value
        for key, value in state.items()
    }
    return {key: value for key, value in cleared.items() if value != {}}


def save_a_part(folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    if torch.distributed.get_rank() == 0:
        reshard.save(state, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("format", ["huggingface", "reshard", "dcp", "torch"])
def test_a_checkpoint_that_lacks_a_part_is_not_converted(tmp_path: Path, format: Any) -> None:
    folder = str(tmp_path / "saved")
    run_ranks(2, save_a_part, folder)

    with pytest.raises(CoverageError, match="does not hold all of 'w'"):
        reshard.convert(folder, tmp_path / "out", format)

    assert not (tmp_path / "out").exists()


def test_of_tied_weights_the_first_is_kept_and_the_other_noted(tmp_path: Path) -> None:
    weight = torch.ones(3)
    place = save(tmp_path, embed=weight, head=weight)

    reshard.convert(place, tmp_path / "hf", "huggingface")
    reshard.convert(place, tmp_path / "again", "reshard")

    with safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        assert set(file.keys()) == {"embed"}
        assert file.metadata() == {"format": "pt", "head": "embed"}
    again = reshard.read_state_dict(tmp_path / "again")
    assert again["head"] is again["embed"]


def test_values_are_copied_as_they_are_without_opening_a_pickle(tmp_path: Path) -> None:
    state = {"when": {"step": 7, "name": "x"}, "odd": Path, "w": torch.ones(2)}
    reshard.save(state, checkpoint_id=tmp_path / "saved")

    reshard.convert(tmp_path / "saved", tmp_path / "again", "reshard")

    assert reshard.read_state_dict(tmp_path / "again", allow_pickle=True)["odd"] is Path
    assert reshard.read_state_dict(tmp_path / "again", {"when"}) == {"when": state["when"]}
    with pytest.raises(reshard.CheckpointException, match="allow_pickle"):
        reshard.read_state_dict(tmp_path / "again")


def test_an_older_export_is_replaced_only_if_that_is_wanted(tmp_path: Path) -> None:
    place = save(tmp_path, **{str(i): bits(100) for i in range(4)})
    reshard.convert(place, tmp_path / "hf", "huggingface", max_shard_size=400)
    (tmp_path / "hf/config.json").write_text("{}")

    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        reshard.convert(place, tmp_path / "hf", "huggingface")
    reshard.convert(place, tmp_path / "hf", "huggingface", overwrite=True)

    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("format", ["huggingface", "reshard"])
def test_an_interrupt_leaves_nothing_behind_and_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: Any
) -> None:
    place = save(tmp_path, **{str(i): bits(100) for i in range(4)})
    reshard.convert(place, tmp_path / "out", format, keys="0")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    read, calls = StoredTensors.read, []

    def interrupted(self: StoredTensors, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        read(self, *args)

    monkeypatch.setattr(StoredTensors, "read", interrupted)
    for target in ("out", "new"):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            reshard.convert(place, tmp_path / target, format, overwrite=True)

    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("at", range(1, 4))
def test_an_export_that_is_interrupted_while_it_is_published_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    place = save(tmp_path, a=bits(100), b=bits(100))
    reshard.convert(place, tmp_path / "hf", "huggingface", keys="a")
    rename, calls = LocalStore.rename, []

    def interrupted(self: LocalStore, key: str, new_key: str) -> None:
        rename(self, key, new_key)
        calls.append(key)
        if len(calls) == at:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(LocalStore, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reshard.convert(place, tmp_path / "hf", "huggingface", max_shard_size=400, overwrite=True)

    assert len(list((tmp_path / "hf").iterdir())) == 3
    assert same_bits(reshard.read_state_dict(tmp_path / "hf")["b"], bits(100))


def test_what_a_killed_export_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    place = save(tmp_path, w=bits(10))
    (tmp_path / "hf").mkdir()
    machine = new_token().split(".")[1].split("-")[0]
    dead = tmp_path / f"hf/.0123abcd.{machine}-999999999-1.model.safetensors.partial"
    elsewhere = tmp_path / "hf/.0123abcd.00000000-1-1.model.safetensors.partial"
    dead.touch()
    elsewhere.touch()

    reshard.convert(place, tmp_path / "hf", "huggingface")

    assert not dead.exists()
    assert elsewhere.exists()


@pytest.mark.parametrize("whole_bytes", [1 << 20, 1000], ids=["at once", "in pieces"])
@pytest.mark.parametrize("format", ["huggingface", "reshard"])
def test_damage_is_found_on_the_way_and_nothing_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_bytes: int, format: Any
) -> None:
    monkeypatch.setattr(copying, "_WHOLE_BYTES", whole_bytes)
    place = save(tmp_path, w=bits(50, 40))
    file = next(place.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)

    with pytest.raises(CorruptCheckpointError, match="'w'"):
        reshard.convert(place, tmp_path / "out", format)

    assert not (tmp_path / "out").exists()


def test_a_single_file_is_a_source(tmp_path: Path) -> None:
    save_file({"a.b": bits(3), "c": bits(2, 2)}, tmp_path / "some.safetensors")

    reshard.convert(tmp_path / "some.safetensors", tmp_path / "saved", "reshard")

    state = {"a": {"b": torch.zeros(3)}, "c": torch.zeros(2, 2)}
    reshard.load(state, checkpoint_id=tmp_path / "saved")
    assert same_bits(state["a"]["b"], bits(3))


def save_by_columns(folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    tensor = torch.arange(60 * 90, dtype=torch.float32).view(60, 90)
    stack = torch.arange(6 * 7 * 8).view(6, 7, 8)
    state = {
        "columns": distribute_tensor(tensor, mesh, [Shard(1)]),
        "rows": distribute_tensor(tensor, mesh, [Shard(0)]),
        "stack": distribute_tensor(stack, mesh, [Shard(2)]),
    }
    reshard.save(state, checkpoint_id=folder)


def export_together(folder: str, whole_bytes: int) -> None:
    copying._WHOLE_BYTES = whole_bytes  # type: ignore[misc]
    for name, size in (("one", "1GB"), ("many", "10KB")):
        reshard.convert(folder, f"{folder}-{name}", "huggingface", max_shard_size=size)
    reshard.convert(folder, f"{folder}-again", "reshard")


@pytest.mark.parametrize("whole_bytes", [1 << 20, 300], ids=["at once", "in pieces"])
def test_ranks_share_the_work_whatever_the_layout_of_the_source(
    tmp_path: Path, whole_bytes: int
) -> None:
    folder = str(tmp_path / "saved")
    run_ranks(2, save_by_columns, folder)

    run_ranks(2, export_together, folder, whole_bytes)

    for name in ("one", "many", "again"):
        found = reshard.read_state_dict(f"{folder}-{name}")
        expected = torch.arange(60 * 90, dtype=torch.float32).view(60, 90)
        assert torch.equal(found["columns"], expected)
        assert torch.equal(found["rows"], expected)
        assert torch.equal(found["stack"], torch.arange(6 * 7 * 8).view(6, 7, 8))
    assert len(list(Path(f"{folder}-many").glob("*.safetensors"))) == 3


def fail_on_one_rank(folder: str) -> str:
    if torch.distributed.get_rank() == 1:

        def fail(self: StoredTensors, *args: Any) -> None:
            raise OSError("the disk is on fire")

        StoredTensors.read = fail  # type: ignore[method-assign]
    with pytest.raises(reshard.CheckpointException) as caught:
        reshard.convert(folder, f"{folder}-out", "huggingface", max_shard_size="10KB")
    return str(caught.value)


def test_a_rank_that_fails_fails_the_export_on_all(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    run_ranks(2, save_by_columns, folder)

    texts = run_ranks(2, fail_on_one_rank, folder)

    assert all("the disk is on fire" in text for text in texts)
    assert not Path(f"{folder}-out").exists()

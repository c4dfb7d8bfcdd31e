"""Directories of safetensors files, written and read under the names of DCP."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import reshard
from reshard.api import (
    CheckpointExistsError,
    MissingKeyError,
    PlanError,
    StateDictError,
    UnsupportedFormatError,
)
from reshard.format.plain_dtypes import PLAIN_DTYPES
from reshard.stores.local import LocalStore
from support.plain_files import INDEX, write_shard, write_tensors
from support.torch_version import needs_hugging_face_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ONE_FILE = "model-00001-of-00001.safetensors"


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "layer.weight": torch.randn(5, 3),
        "layer.bias": torch.randn(5).to(torch.bfloat16),
        "count": torch.arange(4),
        "scale": torch.tensor(2.5),
        "none": torch.empty(0, 7),
        "eight": torch.randn(6).to(torch.float8_e4m3fn),
        "turned": torch.randn(4, 6).t(),
    }


def save(path: Path, state_dict: dict[str, Any], **options: Any) -> Any:
    writer = reshard.HuggingFaceStorageWriter(path, **options)
    return reshard.save(state_dict, storage_writer=writer, no_dist=True)


def blank(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state_dict.items()}


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    as_bytes = (t.contiguous().flatten().view(torch.uint8) for t in (ours, theirs))
    return ours.dtype is theirs.dtype and ours.shape == theirs.shape and torch.equal(*as_bytes)


def files_in(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def index_of(path: Path) -> dict[str, str]:
    return json.loads((path / INDEX).read_text())["weight_map"]


# Writing


def test_a_save_is_one_file_that_safetensors_opens_and_an_index(tmp_path: Path) -> None:
    save(tmp_path, state())
    assert files_in(tmp_path) == [ONE_FILE, INDEX]
    found = load_file(tmp_path / ONE_FILE)
    assert found.keys() == state().keys()
    assert all(same(found[name], tensor) for name, tensor in state().items())
    assert index_of(tmp_path) == dict.fromkeys(state(), ONE_FILE)


def test_tensors_go_to_the_files_that_the_mapping_says(tmp_path: Path) -> None:
    numbers = {name: 1 + position % 3 for position, name in enumerate(state())}
    save(tmp_path, state(), fqn_to_index_mapping=numbers)
    for name, number in numbers.items():
        file = f"model-0000{number}-of-00003.safetensors"
        assert index_of(tmp_path)[name] == file
        assert name in load_file(tmp_path / file)


@needs_hugging_face_shards
@pytest.mark.parametrize("library", [dcp, reshard], ids=["dcp", "reshard"])
def test_what_is_written_is_read_by_both_libraries(library: Any, tmp_path: Path) -> None:
    save(tmp_path, state(), fqn_to_index_mapping={name: 1 + len(name) % 2 for name in state()})
    target = blank(state())
    library.load(target, storage_reader=library.HuggingFaceStorageReader(tmp_path), no_dist=True)
    assert all(same(target[name], tensor) for name, tensor in state().items())


@needs_hugging_face_shards
def test_what_dcp_writes_is_read(tmp_path: Path) -> None:
    given = {name: tensor.contiguous() for name, tensor in state().items()}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(given, storage_writer=writer, no_dist=True)
    target = blank(given)
    reshard.load(target, storage_reader=reshard.HuggingFaceStorageReader(tmp_path), no_dist=True)
    assert all(same(target[name], tensor) for name, tensor in given.items())


def test_files_say_where_regions_begin_and_what_wrote_them(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2, 3)}, save_distributed=True)
    (name,) = files_in(tmp_path)
    assert name == "shard-00001-model-00001-of-00001.safetensors"
    header = (tmp_path / name).read_bytes()
    notes = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]
    assert json.loads(notes["DCP_SHARDING_INFO"]) == {"w": {"saved_offsets": [0, 0]}}
    assert (notes["DCP_VERSION"], notes["format"]) == ("1.0", "pt")


def test_whole_tensors_are_put_together_beside_the_shards(tmp_path: Path) -> None:
    writer = {"save_distributed": True, "enable_consolidation": True}
    save(tmp_path / "model", state(), **writer, fqn_to_index_mapping=None)
    assert files_in(tmp_path / "model") == [ONE_FILE, INDEX, "sharded"]
    found = load_file(tmp_path / "model" / ONE_FILE)
    assert all(same(found[name], tensor) for name, tensor in state().items())


def test_a_place_that_is_given_later_has_its_shards_below_it_too(tmp_path: Path) -> None:
    writer = reshard.HuggingFaceStorageWriter(
        tmp_path / "first", save_distributed=True, enable_consolidation=True
    )
    reshard.save(state(), storage_writer=writer, checkpoint_id=tmp_path / "then", no_dist=True)
    assert files_in(tmp_path) == ["then"]
    assert files_in(tmp_path / "then") == [ONE_FILE, INDEX, "sharded"]


def test_a_background_save_puts_tensors_together_where_it_was_told_to(tmp_path: Path) -> None:
    writer = reshard.HuggingFaceStorageWriter(
        tmp_path / "model", save_distributed=True, enable_consolidation=True
    )
    assert writer.checkpoint_id == tmp_path / "model"
    for _ in range(2):
        reshard.async_save(state(), storage_writer=writer, no_dist=True).result()
        assert files_in(tmp_path / "model") == [ONE_FILE, INDEX, "sharded"]
        assert files_in(tmp_path / "model" / "sharded") == [f"shard-00001-{ONE_FILE}"]


def test_tied_weights_are_stored_under_one_name_and_load_under_both(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    save(tmp_path, {"embed": weight, "head": weight})
    assert [*index_of(tmp_path)] == [*load_file(tmp_path / ONE_FILE)] == ["embed"]
    target = {"embed": torch.zeros(3, 2), "head": torch.zeros(3, 2)}
    reshard.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(target["head"], weight)
    loaded = reshard.read_state_dict(tmp_path)
    assert loaded["head"] is loaded["embed"]


def test_names_that_safetensors_left_out_are_read(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"a": torch.ones(2)}, {"b": "a", "c": "nothing"})
    assert reshard.read_state_dict(tmp_path).keys() == {"a", "b"}


# What is refused


@pytest.mark.parametrize(
    ("extra", "error", "reason"),
    [
        ({"step": 3}, StateDictError, "'step' is no tensor"),
        ({"a": 1, "b": {"c": "x"}}, StateDictError, "'a', 'b.c' are no tensors"),
        ({"z": torch.zeros(1, dtype=torch.complex128)}, UnsupportedFormatError, "'z'.*complex128"),
        ({"__metadata__": torch.zeros(1)}, StateDictError, "__metadata__"),
    ],
)
def test_what_the_files_cannot_hold_is_refused_before_anything_is_written(
    extra: dict[str, Any], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        save(tmp_path / "model", state() | extra)
    assert files_in(tmp_path) == []


def test_a_tensor_that_the_mapping_does_not_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="'count'"):
        save(tmp_path, {"a": torch.ones(1), "count": torch.ones(1)}, fqn_to_index_mapping={"a": 1})


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("dtype", list(PLAIN_DTYPES.values()), ids=str)
def test_every_dtype_that_safetensors_has_is_saved_and_loaded(
    dtype: torch.dtype, is_sharded: bool, tmp_path: Path
) -> None:
    stored = (torch.arange(6 * 8) % 2).to(torch.uint8).view(dtype).view(6, -1)
    save(tmp_path, {"w": stored}, save_distributed=is_sharded, enable_consolidation=is_sharded)
    target = {"w": torch.zeros(6 * 8, dtype=torch.uint8).view(dtype).view(6, -1)}
    reshard.load(target, storage_reader=reshard.HuggingFaceStorageReader(tmp_path), no_dist=True)
    (whole,) = tmp_path.glob("model-*.safetensors")
    assert same(load_file(whole)["w"], stored)
    assert same(target["w"], stored)


@pytest.mark.parametrize("number", [0, -1, "1", None])
def test_a_file_number_that_is_none_is_refused(number: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="counted from 1"):
        save(tmp_path, {"a": torch.ones(1)}, fqn_to_index_mapping={"a": number})


def test_options_of_other_writers_are_refused(tmp_path: Path) -> None:
    writer = reshard.HuggingFaceStorageWriter(tmp_path)
    with pytest.raises(ValueError, match="takes no compress"):
        reshard.save(state(), storage_writer=writer, compress="zstd", no_dist=True)
    with pytest.raises(reshard.CheckpointException, match="use_collectives"):
        reshard.save(state(), storage_writer=writer, use_collectives=False, no_dist=True)


@pytest.mark.parametrize("is_sharded", [True, False])
def test_shards_and_whole_tensors_do_not_share_a_directory(
    is_sharded: bool, tmp_path: Path
) -> None:
    save(tmp_path, state(), save_distributed=is_sharded)
    before = files_in(tmp_path)
    with pytest.raises(CheckpointExistsError, match="cannot hold both"):
        save(tmp_path, state(), save_distributed=not is_sharded)
    assert files_in(tmp_path) == before


# All or nothing


class Failing(reshard.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "count":
            raise RuntimeError("the data is gone")
        return super().resolve_data(write_item)


@pytest.mark.parametrize("options", [{}, {"save_distributed": True, "enable_consolidation": True}])
def test_a_save_that_fails_leaves_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    writer = reshard.HuggingFaceStorageWriter(tmp_path / "model", **options)
    with pytest.raises(reshard.CheckpointException, match="the data is gone"):
        reshard.save(state(), storage_writer=writer, planner=Failing(), no_dist=True)
    assert files_in(tmp_path) == []


def test_a_save_that_fails_leaves_the_model_that_was_there(tmp_path: Path) -> None:
    save(tmp_path, state())
    writer = reshard.HuggingFaceStorageWriter(tmp_path)
    new, planner = {"count": torch.ones(9)}, Failing()
    with pytest.raises(reshard.CheckpointException, match="the data is gone"):
        reshard.save(new, storage_writer=writer, planner=planner, no_dist=True)
    assert files_in(tmp_path) == [ONE_FILE, INDEX]
    assert same(load_file(tmp_path / ONE_FILE)["count"], state()["count"])


class StuckStore(LocalStore):
    renames_left = 1

    def rename(self, key: str, new_key: str) -> None:
        if not self.renames_left:
            raise OSError("no more names")
        self.renames_left -= 1
        super().rename(key, new_key)


def test_files_that_cannot_all_get_their_names_get_none(tmp_path: Path) -> None:
    class Stuck(reshard.HuggingFaceStorageWriter):
        def open_store(self) -> LocalStore:
            return StuckStore(self.path)

    numbers = {name: 1 + len(name) % 2 for name in state()}
    writer = Stuck(tmp_path / "model", numbers)
    with pytest.raises(reshard.CheckpointException, match="no more names"):
        reshard.save(state(), storage_writer=writer, no_dist=True)
    assert files_in(tmp_path) == []


def test_an_older_model_is_replaced_with_all_of_its_files(tmp_path: Path) -> None:
    save(tmp_path, state(), fqn_to_index_mapping={name: 1 + len(name) % 3 for name in state()})
    write_tensors(tmp_path / "model.safetensors", {"old": torch.ones(1)})
    (tmp_path / "config.json").write_text("{}")
    save(tmp_path, {"w": torch.ones(2)})
    assert files_in(tmp_path) == ["config.json", ONE_FILE, INDEX]
    assert [*reshard.read_state_dict(tmp_path)] == ["w"]


def test_what_a_killed_process_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    from reshard.stores.owners import owner_tag

    machine, pid, began = owner_tag().split("-")
    (tmp_path / f".01234567.{machine}-{pid}-{int(began) + 1}.{ONE_FILE}.partial").write_text("x")
    (tmp_path / f".01234567.00000000-1-1.{ONE_FILE}.partial").write_text("of another machine")
    save(tmp_path, {"w": torch.ones(2)})
    assert files_in(tmp_path) == [f".01234567.00000000-1-1.{ONE_FILE}.partial", ONE_FILE, INDEX]


# Reading


@needs_hugging_face_shards
def test_places_of_chunks_are_told_as_dcp_tells_them(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2, 3)})
    ours, theirs = (
        library.HuggingFaceStorageReader(str(tmp_path)).read_metadata().storage_data
        for library in (reshard, dcp)
    )
    ((index, place),) = ours.items()
    ((their_index, their_place),) = theirs.items()
    assert (index.fqn, index.offset) == (their_index.fqn, their_index.offset)
    assert dataclasses.asdict(place) == dataclasses.asdict(their_place)


def test_a_reader_of_safetensors_files_does_not_look_at_a_checkpoint_beside_them(
    tmp_path: Path,
) -> None:
    reshard.save({"ours": torch.ones(1)}, checkpoint_id=tmp_path, no_dist=True)
    write_tensors(tmp_path / "model.safetensors", {"plain": torch.ones(1)})
    assert [*reshard.read_state_dict(tmp_path)] == ["ours"]
    reader = reshard.HuggingFaceStorageReader(tmp_path)
    assert [*reader.read_metadata().state_dict_metadata] == ["plain"]


def test_a_reader_may_read_each_item_by_itself(tmp_path: Path) -> None:
    class Doubling(reshard.HuggingFaceStorageReader):
        def _process_read_request(self, f: Any, req: Any, planner: Any) -> None:
            super()._process_read_request(f, req, planner)
            planner.resolve_tensor(req).mul_(2)

    save(tmp_path, {"a": torch.ones(3, 2), "b": torch.tensor(4.0)})
    target = {"a": torch.zeros(3, 2), "b": torch.tensor(0.0)}
    reshard.load(target, storage_reader=Doubling(tmp_path), no_dist=True)
    assert torch.equal(target["a"], torch.full((3, 2), 2.0))
    assert target["b"] == 8


def test_a_reader_may_have_metadata_of_its_own(tmp_path: Path) -> None:
    """As readers do that show packed tensors under other names and shapes."""

    class Stacked(reshard.HuggingFaceStorageReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            stored = super().read_metadata()
            (entry,) = stored.state_dict_metadata.values()
            ((index, place),) = stored.storage_data.items()
            chunk = reshard.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
            wide = dataclasses.replace(entry, size=torch.Size([2, 3]), chunks=[chunk])
            index = dataclasses.replace(index, fqn="wide", offset=torch.Size([0, 0]))
            place = dataclasses.replace(place, shape=torch.Size([2, 3]))
            return dataclasses.replace(
                stored, state_dict_metadata={"wide": wide}, storage_data={index: place}
            )

        def _process_read_request(self, f: Any, req: Any, planner: Any) -> None:
            target = planner.resolve_tensor(req)
            target.copy_(f.get_tensor("flat").view(2, 3)[:, : target.shape[1]])
            planner.commit_tensor(req, target)

    save(tmp_path, {"flat": torch.arange(6)})
    target = {"wide": torch.zeros(2, 3, dtype=torch.int64)}
    reshard.load(target, storage_reader=Stacked(tmp_path), no_dist=True)
    assert torch.equal(target["wide"], torch.arange(6).view(2, 3))


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2)})
    reader = reshard.HuggingFaceStorageReader(tmp_path)
    with pytest.raises(MissingKeyError, match="other"):
        reshard.load({"other": torch.ones(2)}, storage_reader=reader, no_dist=True)


# Putting together


def shard_files(directory: Path) -> dict[str, torch.Tensor]:
    """Two shards of some tensors, cut in different ways."""
    torch.manual_seed(1)
    rows, columns = torch.randn(5, 4), torch.randn(6, 3).to(torch.bfloat16)
    name = "shard-0000{}-model-00001-of-00001.safetensors"
    first = {"rows": ([0, 0], rows[:3]), "columns": ([0, 0], columns[:, :1])}
    second = {"rows": ([3, 0], rows[3:]), "columns": ([0, 1], columns[:, 1:])}
    write_shard(directory / name.format(1), first)
    write_shard(directory / name.format(2), second)
    return {"rows": rows, "columns": columns}


@pytest.fixture(
    params=[
        "reshard",
        pytest.param("torch.distributed.checkpoint", marks=needs_hugging_face_shards),
    ]
)
def consolidation(request: pytest.FixtureRequest) -> Any:
    """Of both libraries: what one can do, the other can."""
    import importlib

    return importlib.import_module(f"{request.param}._consolidate_hf_safetensors")


def test_shards_are_put_together(consolidation: Any, tmp_path: Path) -> None:
    wanted = shard_files(tmp_path / "in")
    (tmp_path / "out").mkdir()
    places = str(tmp_path / "in"), str(tmp_path / "out")
    consolidation.consolidate_safetensors_files(*places, {"rows": 1, "columns": 2}, num_threads=2)
    for name, number in {"rows": 1, "columns": 2}.items():
        found = load_file(tmp_path / "out" / f"model-0000{number}-of-00002.safetensors")
        assert found.keys() == {name}
        assert same(found[name], wanted[name])
        assert index_of(tmp_path / "out")[name] == f"model-0000{number}-of-00002.safetensors"


def test_some_files_can_be_put_together_while_others_stay(
    consolidation: Any, tmp_path: Path
) -> None:
    shard_files(tmp_path / "in")
    places = {"input_dir": str(tmp_path / "in"), "output_dir": str(tmp_path / "out")}
    (tmp_path / "out").mkdir()
    for name in ("rows", "columns"):
        mapping = {name: f"{name}.safetensors"}
        consolidation._consolidate_safetensors_files(
            **places, fqn_to_file_mapping=mapping, num_threads=1
        )
    assert files_in(tmp_path / "out") == ["columns.safetensors", "rows.safetensors"]


def test_regions_can_be_copied_to_their_places_in_a_buffer(consolidation: Any) -> None:
    whole, part = torch.zeros(4, 5, 2), torch.randn(2, 3, 2)
    buffer = bytearray(whole.numel() * 4)
    consolidation._write_sub_tensor_to_file_optimized(
        memoryview(buffer), part.numpy().tobytes(), 4, [4, 5, 2], [1, 2, 0], [2, 3, 2]
    )
    whole[1:3, 2:5] = part
    assert torch.equal(torch.frombuffer(buffer, dtype=torch.float32).view(4, 5, 2), whole)


def test_what_torch_cannot_put_together_is(tmp_path: Path) -> None:
    from reshard._consolidate_hf_safetensors import consolidate_safetensors_files

    given = {"count": torch.arange(4), "scale": torch.tensor(1.5), "none": torch.empty(0, 3)}
    weight = torch.randn(2)
    save(tmp_path / "in", given | {"a": weight, "b": weight}, save_distributed=True)
    mapping = {"b": 1, "a": 1, "count": 1, "scale": 2, "none": 2}
    consolidate_safetensors_files(str(tmp_path / "in"), str(tmp_path / "out"), mapping)
    found = reshard.read_state_dict(tmp_path / "out")
    assert all(same(found[name], tensor) for name, tensor in given.items())
    assert same(found["b"], weight)
    # The name that Hugging Face libraries would leave out.
    assert "b" not in index_of(tmp_path / "out")


def test_shards_can_be_put_together_where_they_are_and_again(tmp_path: Path) -> None:
    from reshard._consolidate_hf_safetensors import consolidate_safetensors_files

    wanted = shard_files(tmp_path)
    for number in (1, 2):
        mapping = {"rows": 1, "columns": number}
        consolidate_safetensors_files(str(tmp_path), str(tmp_path), mapping)
        found = reshard.HuggingFaceStorageReader(tmp_path)
        target = blank(wanted)
        reshard.load(target, storage_reader=found, no_dist=True)
        assert all(same(target[name], tensor) for name, tensor in wanted.items())
        assert len(files_in(tmp_path)) == 3 + number


def test_a_name_that_no_shard_has_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    from reshard._consolidate_hf_safetensors import consolidate_safetensors_files

    shard_files(tmp_path / "in")
    with pytest.raises(MissingKeyError, match="rowz"):
        consolidate_safetensors_files(str(tmp_path / "in"), str(tmp_path / "out"), {"rowz": 1})
    with pytest.raises(FileNotFoundError, match="no safetensors files"):
        consolidate_safetensors_files(str(tmp_path / "no"), str(tmp_path / "out"), {"rows": 1})
    assert files_in(tmp_path) == ["in"]


# Names


def test_the_names_of_files_and_fields_are_those_of_dcp() -> None:
    import torch.distributed.checkpoint._hf_utils as theirs

    import reshard._hf_utils as ours

    constants = [name for name in vars(theirs) if name.isupper() and name != "DTYPE_MAP"]
    assert len(constants) > 10
    for name in [*constants, "_metadata_fn"]:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert theirs.DTYPE_MAP.items() <= ours.DTYPE_MAP.items()
    for arguments in [(1, 2), (3, 12, 7), (123456, 654321, None)]:
        assert ours._gen_file_name(*arguments) == theirs._gen_file_name(*arguments)


def test_the_header_of_a_file_is_read_as_dcp_reads_it(tmp_path: Path) -> None:
    import torch.distributed.checkpoint._hf_utils as theirs

    import reshard._hf_utils as ours

    save_file({"w": torch.ones(2)}, tmp_path / "plain.safetensors")
    write_shard(tmp_path / "shard.safetensors", {"w": ([3], torch.ones(2))})
    for path in tmp_path.iterdir():
        found = []
        for library in (ours, theirs):
            with path.open("rb") as file:
                header, begin = library._get_safetensors_file_metadata(file)
            found.append(
                SimpleNamespace(
                    header=header, begin=begin, regions=library._get_dcp_custom_metadata(header)
                )
            )
        assert vars(found[0]) == vars(found[1])

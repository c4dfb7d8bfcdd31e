"""Metadata as releases of torch from 1.13 on pickled it, and what loads of such checkpoints do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

import reshard
from reshard.api import CheckpointException, CoverageError
from support import dcp_files
from support.dcp_files import edit_metadata, edit_text

NEW, OLD = b"ctorch.distributed.checkpoint", b"ctorch.distributed._shard.checkpoint"


def _without(*names: str) -> Any:
    def edit(metadata: Any) -> None:
        for name in names:
            # Older torch writes no version to begin with.
            vars(metadata).pop(name, None)

    return edit


def _check(directory: Path) -> None:
    loaded = dcp_files.blank()
    reshard.load(loaded, checkpoint_id=directory, no_dist=True)
    expected = dcp_files.state()
    assert torch.equal(loaded["model"]["weight"], expected["model"]["weight"])
    assert torch.equal(loaded["model"]["bias"], expected["model"]["bias"])
    assert (loaded["step"], loaded["note"]) == (7, "a value")
    assert reshard.read_state_dict(directory).keys() == expected.keys()


def test_metadata_of_torch_1_13_is_read(tmp_path: Path) -> None:
    """All classes live elsewhere, and there is neither a version nor a storage_meta."""
    dcp_files.save(tmp_path)
    edit_metadata(tmp_path, _without("version", "storage_meta"), protocol=2)
    edit_text(
        tmp_path,
        (
            NEW + b".metadata\nTensorProperties",
            b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties",
        ),
        (
            NEW + b".metadata\n_MEM_FORMAT_ENCODING",
            b"ctorch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING",
        ),
        (NEW + b".metadata", OLD + b".metadata"),
        (NEW + b".filesystem", OLD + b".filesystem"),
    )
    _check(tmp_path)


def test_metadata_of_torch_2_0_to_2_2_is_read(tmp_path: Path) -> None:
    dcp_files.save(tmp_path)
    edit_metadata(tmp_path, _without("version", "storage_meta"), protocol=2)
    edit_text(
        tmp_path,
        (
            NEW + b".metadata\nTensorProperties",
            b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties",
        ),
        (
            NEW + b".metadata\n_MEM_FORMAT_ENCODING",
            b"ctorch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING",
        ),
    )
    _check(tmp_path)


def test_properties_with_more_fields_or_as_a_dict_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp_files.save(tmp_path)
    before = TensorProperties.__getstate__
    with monkeypatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", lambda self: (*before(self), (4, 1)))
        edit_metadata(tmp_path, lambda metadata: None)
    _check(tmp_path)

    dcp_files.save(tmp_path / "dict")
    with monkeypatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", lambda self: {"dtype": self.dtype})
        edit_metadata(tmp_path / "dict", lambda metadata: None)
    _check(tmp_path / "dict")


def test_who_saved_is_kept(tmp_path: Path) -> None:
    dcp_files.save(tmp_path)
    metadata = reshard.FileSystemReader(tmp_path).read_metadata()
    theirs = dcp.FileSystemReader(tmp_path).read_metadata()
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.save_id == theirs.storage_meta.save_id
    assert list(metadata.state_dict_metadata) == list(theirs.state_dict_metadata)
    for name, entry in theirs.state_dict_metadata.items():
        if hasattr(entry, "size"):
            ours: Any = metadata.state_dict_metadata[name]
            assert ours.size == entry.size
            assert ours.properties.dtype == entry.properties.dtype
            assert [(c.offsets, c.sizes) for c in ours.chunks] == [
                (c.offsets, c.sizes) for c in entry.chunks
            ]
    place = theirs.storage_data[MetadataIndex("model.weight", (0, 0))]
    ours = metadata.storage_data[reshard.metadata.MetadataIndex("model.weight", (0, 0))]
    assert (ours.relative_path, ours.offset, ours.length) == (
        place.relative_path,
        place.offset,
        place.length,
    )


def test_replicas_that_were_stored_twice_and_empty_chunks_are_one(tmp_path: Path) -> None:
    dcp_files.save(tmp_path)

    def edit(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["model.weight"]
        entry.chunks.append(entry.chunks[0])
        empty = type(entry.chunks[0])(torch.Size([3, 0]), torch.Size([0, 4]))
        entry.chunks.append(empty)
        place = metadata.storage_data[MetadataIndex("model.weight", (0, 0))]
        metadata.storage_data[MetadataIndex("model.weight", (3, 0))] = place

    edit_metadata(tmp_path, edit)
    _check(tmp_path)


def _old_state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(6.0)},
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(6)}},
            "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0]}],
        },
        "plain": {"a": 1, "b": [1, 2]},
    }


def test_lists_that_were_kept_whole_before_torch_2_4_load_into_nested_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint import _version

    monkeypatch.setattr(_version, "_derived_version", "2_3")
    dcp.save(_old_state(), checkpoint_id=tmp_path, no_dist=True)
    monkeypatch.undo()
    names = reshard.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert "optim.param_groups" in names

    loaded = _old_state()
    loaded["model"]["weight"].zero_()
    loaded["optim"]["state"][0]["exp_avg"].zero_()
    loaded["optim"]["param_groups"] = [{"lr": 0.0, "betas": (0.0, 0.0), "params": [0]}]
    loaded["plain"] = {"a": 0, "b": []}
    reshard.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert loaded["optim"]["param_groups"] == _old_state()["optim"]["param_groups"]
    assert loaded["plain"] == {"a": 1, "b": [1, 2]}
    assert torch.equal(loaded["model"]["weight"], torch.arange(6.0))
    assert torch.equal(loaded["optim"]["state"][0]["exp_avg"], torch.ones(6))

    read = reshard.read_state_dict(tmp_path)
    assert read["optim"]["param_groups"] == _old_state()["optim"]["param_groups"]


class _KeepsMore(DefaultSavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {"theirs": complex(1, 2)}
        return plans, metadata


def test_planner_data_of_a_custom_planner_stays_closed(tmp_path: Path) -> None:
    dcp.save(dcp_files.state(), checkpoint_id=tmp_path, planner=_KeepsMore(), no_dist=True)
    assert reshard.FileSystemReader(tmp_path).read_metadata().planner_data is None
    loaded = dcp_files.blank()
    reshard.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert loaded["step"] == 7
    # Without paths, names are not nested.
    assert "model.weight" in reshard.read_state_dict(tmp_path)


def test_what_dcp_and_torch_save_wrote_can_be_converted(tmp_path: Path) -> None:
    expected = dcp_files.state()
    dcp_files.save(tmp_path / "dcp")
    torch.save(expected, tmp_path / "file.pt")
    for source in ("dcp", "file.pt"):
        converted = tmp_path / f"{source}-converted"
        reshard.convert(tmp_path / source, converted, format="reshard")
        found = reshard.read_state_dict(converted, verify="full")
        assert torch.equal(found["model"]["weight"], expected["model"]["weight"])
        assert (found["step"], found["note"]) == (7, "a value")


def test_names_of_one_record_stay_tied(tmp_path: Path) -> None:
    weight = torch.arange(12.0).view(3, 4)
    state = {"in": weight, "out": weight, "like": weight.clone(), "none": weight[:0]}
    reshard.save(state | {"no": state["none"]}, checkpoint_id=tmp_path / "dcp", format="dcp")
    reshard.convert(tmp_path / "dcp", tmp_path / "ours", "reshard")
    reshard.convert(tmp_path / "dcp", tmp_path / "hf", "huggingface")
    for folder in ("dcp", "ours", "hf"):
        found = reshard.read_state_dict(tmp_path / folder)
        assert found["in"] is not found["like"]
        assert found["in"].data_ptr() == found["out"].data_ptr() != found["like"].data_ptr()
        assert all(torch.equal(found[name], value) for name, value in state.items())
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["in", "like", "no", "none"]
        assert file.metadata()["out"] == "in"


def test_a_tensor_of_which_nothing_was_stored_is_told_when_it_is_read(tmp_path: Path) -> None:
    dcp_files.save(tmp_path)
    edit_metadata(
        tmp_path, lambda metadata: metadata.state_dict_metadata["model.weight"].chunks.clear()
    )
    assert reshard.read_tensor(tmp_path, "model.bias").tolist() == [0, 1, 2, 3]
    with pytest.raises(CoverageError, match=r"model\.weight"):
        reshard.read_tensor(tmp_path, "model.weight")


def test_tensors_of_one_safetensors_record_are_not_tied(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"a": torch.ones(3), "b": torch.zeros(3)}, storage_writer=writer, no_dist=True)
    found = reshard.read_state_dict(tmp_path)
    assert found["a"].tolist() == [1, 1, 1]
    assert found["b"].tolist() == [0, 0, 0]


def test_a_rank_that_a_cast_planner_wrote_is_told(tmp_path: Path) -> None:
    """Metadata says what was planned; a record of another dtype contradicts it."""
    dcp_files.save(tmp_path)
    half = dcp_files.torch_file(dcp_files.state()["model"]["weight"].half())
    dcp_files.replace_record(tmp_path, "model.weight", half)
    with pytest.raises(CheckpointException, match=r"torch\.float16.*torch\.float32"):
        reshard.read_tensor(tmp_path, "model.weight")


def test_checksums_that_are_not_there_are_not_promised(tmp_path: Path) -> None:
    dcp_files.save(tmp_path)
    with pytest.raises(CheckpointException, match="has no checksums to verify"):
        reshard.read_state_dict(tmp_path, verify="full")

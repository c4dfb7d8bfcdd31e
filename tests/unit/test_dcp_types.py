"""Objects of torch's checkpoint modules become ours, and ours theirs, without loss."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard
from reshard import metadata as ours_metadata
from reshard import planner as ours_planner
from reshard.api import PlanError
from reshard.background.handover import pack, unpack
from reshard.tensors import dcp_types
from reshard.tensors.dcp_modules import dumps, originals, torch_class, torch_module
from reshard.tensors.flatten import flatten_state_dict
from support.torch_version import forget_strides, properties_in

STATE = {"w": torch.ones(2, 3), "n": 5, "d": {"x": torch.zeros(4, dtype=torch.bfloat16)}}


def planned(library: Any) -> tuple[Any, Any]:
    planner = library.DefaultSavePlanner()
    planner.set_up_planner(STATE, is_coordinator=True)
    return planner.create_global_plan([planner.create_local_plan()])


def test_a_save_plan_goes_to_torch_and_back() -> None:
    [plan], _ = planned(reshard)
    theirs = dcp_types.to_torch_save_plan(plan)
    assert type(theirs) is dcp.SavePlan
    assert {type(item) for item in theirs.items} == {dcp.planner.WriteItem}
    [expected], _ = planned(dcp)
    forget_strides(item.tensor_data.properties for item in expected.items if item.tensor_data)
    assert theirs.items == expected.items
    assert list(dcp_types.to_save_plan(theirs, b"mark").items) == list(plan.items)
    assert dcp_types.to_save_plan(theirs, b"mark").fingerprint == b"mark"


def test_metadata_goes_to_torch_and_back() -> None:
    _, metadata = planned(reshard)
    metadata.storage_meta = ours_metadata.StorageMeta("here", "a save")
    theirs = dcp_types.to_torch_metadata(metadata)
    _, expected = planned(dcp)
    forget_strides(properties_in(expected))
    assert theirs.state_dict_metadata == expected.state_dict_metadata
    assert theirs.planner_data == expected.planner_data
    assert theirs.storage_meta == dcp.metadata.StorageMeta("here", "a save")
    again = dcp_types.to_metadata(theirs)
    assert again.storage_meta == metadata.storage_meta
    assert again.state_dict_metadata.keys() == metadata.state_dict_metadata.keys()
    for name, entry in again.state_dict_metadata.items():
        stored = metadata.state_dict_metadata[name]
        assert type(entry).__module__ == "reshard.metadata"
        assert getattr(entry, "size", None) == getattr(stored, "size", None)
        assert list(getattr(entry, "chunks", ())) == list(getattr(stored, "chunks", ()))
        assert getattr(entry, "properties", None) == getattr(stored, "properties", None)


def test_paths_are_handed_over_in_plain_types() -> None:
    _, paths = flatten_state_dict({"a": {3: torch.ones(1)}, "l": [torch.ones(1)]})
    theirs = dcp_types.to_torch_metadata(ours_metadata.Metadata({}, planner_data=paths))
    assert theirs.planner_data == {"a.3": ("a", "3"), "l.0": ("l", 0)}
    assert b"reshard" not in pickle.dumps(theirs)


def test_a_read_item_goes_to_torch_and_back() -> None:
    index = ours_metadata.MetadataIndex("w", (1, 0), 2)
    item = ours_planner.ReadItem(
        ours_planner.LoadItemType.TENSOR,
        index,
        torch.Size([0, 0]),
        ours_metadata.MetadataIndex("v", (0, 0)),
        torch.Size([1, 1]),
        torch.Size([1, 2]),
    )
    theirs = dcp_types.to_torch_read_item(item)
    assert type(theirs) is dcp.planner.ReadItem
    assert theirs.dest_index.index == 2
    assert dcp_types.to_read_item(theirs) == item
    plan = dcp_types.to_load_plan(dcp.LoadPlan([theirs, item], "stored", "planned"))
    assert plan == ours_planner.LoadPlan([item, item], "stored", "planned")


def test_where_a_storage_of_torch_put_things_can_be_asked_with_our_names() -> None:
    index = dcp.metadata.MetadataIndex("w", (0,))
    info = dcp.filesystem._StorageInfo("a file", 3, 4, ["zstd"])
    found = dcp_types.to_storage_data({index: info, "other": 5})
    key = ours_metadata.MetadataIndex("w", (0,))
    assert found == {key: reshard.storage.StorageInfo("a file", 3, 4, ["zstd"]), "other": 5}
    assert dcp_types.to_storage_data("its own") == "its own"


def test_something_else_than_a_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="dict stands for the SavePlan of torch"):
        dcp_types.to_save_plan({"items": []})


def test_kinds_of_items_of_both_libraries_are_equal() -> None:
    for ours, theirs in (
        (ours_planner.WriteItemType, dcp.planner.WriteItemType),
        (ours_planner.LoadItemType, dcp.planner.LoadItemType),
    ):
        for member in ours:
            assert member == theirs[member.name]
            assert theirs[member.name] == member
            assert hash(member) == hash(theirs[member.name])
            assert member in {theirs[member.name]}
    assert ours_planner.WriteItemType.TENSOR != dcp.planner.LoadItemType.TENSOR
    assert ours_planner.WriteItemType.TENSOR != dcp.planner.WriteItemType.SHARD
    assert ours_planner.WriteItemType.TENSOR != "TENSOR"


# Modules


def test_the_modules_of_torch_are_found_under_a_patch() -> None:
    theirs, info = dcp.planner, dcp.filesystem._StorageInfo("a", 1, 2)
    with reshard.patch():
        assert torch_module("planner") is theirs
        assert sys.modules["torch.distributed.checkpoint.planner"] is reshard.planner
        with originals.in_place(), originals.in_place():
            assert sys.modules["torch.distributed.checkpoint.planner"] is theirs
            pickled = pickle.dumps(theirs.SavePlan([]))
        assert sys.modules["torch.distributed.checkpoint.planner"] is reshard.planner
        assert type(pickle.loads(dumps(info))) is type(info)
        assert torch_class("torch.distributed.checkpoint.planner", "SavePlan") is theirs.SavePlan
    assert type(pickle.loads(pickled)) is theirs.SavePlan
    assert torch_module("planner") is theirs


def test_a_storage_of_torch_is_handed_to_a_worker_under_a_patch() -> None:
    writer, memory = dcp.FileSystemWriter("here"), torch.zeros(8, dtype=torch.uint8)
    kind = type(writer)
    with reshard.patch():
        packed = pack({"writer": writer}, memory)
    assert type(unpack(packed, memory, lambda: None)["writer"]) is kind


def test_a_patch_may_end_while_code_of_torch_runs() -> None:
    theirs = dcp.planner
    patch = reshard.patch()
    with originals.in_place():
        patch.undo()
    assert sys.modules["torch.distributed.checkpoint.planner"] is theirs

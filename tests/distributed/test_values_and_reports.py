"""What is not a sharded tensor: values, objects, values per rank; and what a load reports."""

from __future__ import annotations

import os
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard
from reshard.api import CoverageError, MissingKeyError, UnsafeValueError
from reshard.stores.local import LocalStore
from support.ranks import run_ranks
from support.samples import same_bits


class Counter:
    """An object that gives its state and takes it back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.weight = torch.full((3,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weight": self.weight}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        self.weight = state_dict["weight"]


PLAIN: dict[str, Any] = {
    "none": None,
    "flag": True,
    "number": 2**80,
    "real": float("-inf"),
    "text": "ä\x00b",
    "bytes": b"\x00\xff",
    "list": [1, [2, "x"], None],
    "tuple": (1, (2,)),
    "set": {1, 2},
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "nested": {"lr": 1e-3, "betas": (0.9, 0.95), "groups": [{"params": [0, 1]}]},
}


def emptied(value: Any) -> Any:
    """A template of the same form, with other values."""
    if isinstance(value, dict):
        return {key: emptied(inner) for key, inner in value.items()}
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        return [emptied(inner) for inner in value]
    return "not loaded"


def save_values(folder: str) -> None:
    reshard.save({"plain": PLAIN, "counter": Counter(7)}, checkpoint_id=folder)


def load_values(folder: str) -> Any:
    counter = Counter(0)
    state_dict = {"plain": emptied(PLAIN), "counter": counter}
    reshard.load(state_dict, checkpoint_id=folder)
    assert state_dict["counter"] is counter
    return state_dict["plain"], counter.count, counter.weight.tolist()


def test_values_and_objects_come_back_as_they_were_on_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    run_ranks(2, save_values, str(tmp_path))

    for plain, count, weight in run_ranks(3, load_values, str(tmp_path)):
        assert plain == PLAIN
        assert [type(value) for value in plain.values()] == [type(v) for v in PLAIN.values()]
        assert count == 7
        assert weight == [7.0] * 3


# Values per rank


def save_per_rank(folder: str) -> None:
    rank = dist.get_rank()
    reshard.save(
        {
            "rng": reshard.per_rank(torch.full((4,), rank, dtype=torch.uint8)),
            "loader": {"position": reshard.per_rank({"file": f"part-{rank}", "line": rank})},
            "list": [reshard.per_rank(rank), {"common": 5}],
            "tuple": ("common", (reshard.per_rank(rank), 5)),
            "step": 3,
        },
        checkpoint_id=folder,
    )


def load_per_rank(folder: str, on_resize: Any) -> Any:
    def mark(value: Any) -> Any:
        return reshard.per_rank(value, on_resize)

    state_dict = {
        "rng": mark(torch.full((4,), 99, dtype=torch.uint8)),
        "loader": {"position": mark({"file": "none", "line": -1})},
        "list": [mark(-1), {"common": 0}],
        "tuple": ("", (mark(-1), 0)),
        "step": 0,
    }
    try:
        reshard.load(state_dict, checkpoint_id=folder)
    except reshard.CheckpointException as error:
        return sorted(error.failures), str(error)
    return {**state_dict, "rng": state_dict["rng"].tolist()}


def of_rank(rank: int) -> dict[str, Any]:
    return {
        "rng": [rank] * 4,
        "loader": {"position": {"file": f"part-{rank}", "line": rank}},
        "list": [rank, {"common": 5}],
        "tuple": ("common", (rank, 5)),
        "step": 3,
    }


@pytest.mark.parametrize("on_resize", ["error", "drop", "first"])
def test_each_rank_gets_its_own_value_back(on_resize: str, tmp_path: Path) -> None:
    run_ranks(3, save_per_rank, str(tmp_path))

    loaded = run_ranks(3, load_per_rank, str(tmp_path), on_resize)

    assert loaded == [of_rank(0), of_rank(1), of_rank(2)]


@pytest.mark.parametrize("loaded_on", [2, 4])
def test_values_per_rank_are_refused_by_another_number_of_ranks(
    loaded_on: int, tmp_path: Path
) -> None:
    run_ranks(3, save_per_rank, str(tmp_path))

    for ranks, message in run_ranks(loaded_on, load_per_rank, str(tmp_path), "error"):
        assert ranks == list(range(loaded_on))
        assert "differs by rank" in message
        assert "on_resize" in message


@pytest.mark.parametrize("loaded_on", [2, 4])
def test_values_per_rank_are_left_alone_on_another_number_of_ranks_if_asked(
    loaded_on: int, tmp_path: Path
) -> None:
    run_ranks(3, save_per_rank, str(tmp_path))

    kept = {
        "rng": [99] * 4,
        "loader": {"position": {"file": "none", "line": -1}},
        "list": [-1, {"common": 5}],
        "tuple": ("common", (-1, 5)),
        "step": 3,
    }
    assert run_ranks(loaded_on, load_per_rank, str(tmp_path), "drop") == [kept] * loaded_on


@pytest.mark.parametrize("loaded_on", [2, 4])
def test_values_per_rank_are_those_of_rank_0_on_another_number_of_ranks_if_asked(
    loaded_on: int, tmp_path: Path
) -> None:
    run_ranks(3, save_per_rank, str(tmp_path))

    loaded = run_ranks(loaded_on, load_per_rank, str(tmp_path), "first")

    assert loaded == [of_rank(0)] * loaded_on


def load_per_rank_exactly(folder: str) -> Any:
    mark = reshard.per_rank
    state_dict = {
        "rng": mark(torch.zeros(4, dtype=torch.uint8)),
        "loader": {"position": mark({"file": "", "line": 0})},
        "list": [mark(0), {"common": 0}],
        "tuple": ("", (mark(0), 0)),
        "step": 0,
    }
    report = reshard.load(state_dict, checkpoint_id=folder, strict="exact")
    return report.unexpected


def test_values_of_other_ranks_are_not_unexpected(tmp_path: Path) -> None:
    run_ranks(2, save_per_rank, str(tmp_path))

    assert run_ranks(2, load_per_rank_exactly, str(tmp_path)) == [[], []]


# Strictness and reports


def save_sharded(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    w = distribute_tensor(torch.arange(20.0).view(10, 2), mesh, [Shard(0)], src_data_rank=None)
    reshard.save({"model": {"w": w, "b": torch.ones(2)}, "step": 4}, checkpoint_id=folder)


def load_with(folder: str, template: dict[str, Any], options: dict[str, Any]) -> Any:
    """The report and the state dict of a load, or the errors of all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state_dict: dict[str, Any] = {}
    for name, value in template.items():
        state_dict[name] = value
        if name.endswith("w"):
            local = torch.full(value, -1.0)
            state_dict[name] = distribute_tensor(local, mesh, [Shard(1)], src_data_rank=None)
    try:
        report = reshard.load(state_dict, checkpoint_id=folder, **options)
    except reshard.CheckpointException as error:
        return {
            rank: (type(reason).__name__, str(reason))
            for rank, (reason, _) in error.failures.items()
        }
    values = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in state_dict.items()
    }
    return report, values


def test_a_report_tells_what_was_loaded(tmp_path: Path) -> None:
    run_ranks(3, save_sharded, str(tmp_path))

    template = {"model.w": (10, 2), "step": 0}
    for report, values in run_ranks(2, load_with, str(tmp_path), template, {}):
        assert report.loaded == ["model.w", "step"]
        assert report.missing == []
        assert report.unexpected == ["model.b"]
        # Half of the matrix, and an encoded number.
        assert 40 < report.nbytes < 60
        assert 0 < report.seconds < 60
        assert torch.equal(values["model.w"], torch.arange(20.0).view(10, 2))
        assert values["step"] == 4


def test_a_missing_key_is_refused_with_a_suggestion_and_changes_nothing(tmp_path: Path) -> None:
    run_ranks(3, save_sharded, str(tmp_path))

    template = {"model.w": (10, 2), "model.bb": torch.zeros(2)}
    for failures in run_ranks(2, load_with, str(tmp_path), template, {}):
        assert sorted(failures) == [0, 1]
        for kind, message in failures.values():
            assert kind == "MissingKeyError"
            assert "model.bb" in message
            assert "'model.b'" in message


def test_without_strict_a_missing_key_is_left_alone_and_reported(tmp_path: Path) -> None:
    run_ranks(3, save_sharded, str(tmp_path))

    template = {"model.w": (10, 2), "extra": torch.zeros(2), "more": "kept"}
    options = {"strict": False}
    for report, values in run_ranks(2, load_with, str(tmp_path), template, options):
        assert report.loaded == ["model.w"]
        assert sorted(report.missing) == ["extra", "more"]
        assert values["extra"].tolist() == [0.0, 0.0]
        assert values["more"] == "kept"
        assert torch.equal(values["model.w"], torch.arange(20.0).view(10, 2))


def test_exact_refuses_keys_that_nobody_asked_for(tmp_path: Path) -> None:
    run_ranks(3, save_sharded, str(tmp_path))

    options = {"strict": "exact"}
    for failures in run_ranks(2, load_with, str(tmp_path), {"model.w": (10, 2)}, options):
        assert sorted(failures) == [0]
        for kind, message in failures.values():
            assert kind == "MissingKeyError"
            assert "'model.b'" in message
            assert "2 keys" in message


def save_by_stages(folder: str) -> None:
    reshard.save({f"stage{dist.get_rank()}": torch.ones(2)}, checkpoint_id=folder)


def load_by_stages(folder: str) -> list[str]:
    state_dict = {f"stage{dist.get_rank()}": torch.zeros(2)}
    report = reshard.load(state_dict, checkpoint_id=folder, strict="exact")
    assert state_dict[f"stage{dist.get_rank()}"].tolist() == [1.0, 1.0]
    return report.unexpected


def test_a_key_that_another_rank_asks_for_is_not_unexpected(tmp_path: Path) -> None:
    run_ranks(2, save_by_stages, str(tmp_path))

    assert run_ranks(2, load_by_stages, str(tmp_path)) == [[], []]


# Renaming


def to_new_names(name: str) -> str:
    return name.replace("model.", "net.")


def load_renamed(folder: str, rename: Any) -> Any:
    if rename == "callable":
        rename = to_new_names
    template = {"net.w": (10, 2), "net.b": torch.zeros(2), "step": 0}
    return load_with(folder, template, {"rename": rename, "strict": "exact"})


@pytest.mark.parametrize(
    "rename",
    [
        "callable",
        {"model": "net"},
        {"model.w": "net.w", "model.b": "net.b"},
        {"model": "net", "x": "y"},
    ],
    ids=["function", "prefix", "whole-names", "a-name-that-is-not-there"],
)
def test_names_of_the_checkpoint_are_mapped_to_those_of_the_state_dict(
    rename: Any, tmp_path: Path
) -> None:
    run_ranks(3, save_sharded, str(tmp_path))

    for report, values in run_ranks(2, load_renamed, str(tmp_path), rename):
        assert sorted(report.loaded) == ["net.b", "net.w", "step"]
        assert report.unexpected == []
        assert torch.equal(values["net.w"], torch.arange(20.0).view(10, 2))
        assert values["net.b"].tolist() == [1.0, 1.0]
        assert values["step"] == 4


def test_the_longest_prefix_decides_and_prefixes_end_at_dots(tmp_path: Path) -> None:
    stored = {"a.b.c": 1, "a.bb": 2, "ab": 3, "a": {"d": 4}}
    reshard.save(stored, checkpoint_id=tmp_path)
    state_dict = {"y.c": 0, "x.bb": 0, "ab": 0, "x.d": 0}

    reshard.load(state_dict, checkpoint_id=tmp_path, rename={"a": "x", "a.b": "y"}, strict="exact")

    assert state_dict == {"y.c": 1, "x.bb": 2, "ab": 3, "x.d": 4}


def test_two_names_that_become_one_are_refused(tmp_path: Path) -> None:
    reshard.save({"a": 1, "b": 2}, checkpoint_id=tmp_path)

    with pytest.raises(reshard.CheckpointException, match="two keys"):
        reshard.load({"c": 0}, checkpoint_id=tmp_path, rename={"a": "c", "b": "c"})


def test_names_can_be_exchanged(tmp_path: Path) -> None:
    reshard.save({"a": torch.zeros(2), "b": torch.ones(2), "c": 1, "d": 2}, checkpoint_id=tmp_path)
    state_dict = {"a": torch.full((2,), 9.0), "b": torch.full((2,), 9.0), "c": 0, "d": 0}

    swap = {"a": "b", "b": "a", "c": "d", "d": "c"}
    reshard.load(state_dict, checkpoint_id=tmp_path, rename=swap)

    assert state_dict["a"].tolist() == [1.0, 1.0]
    assert state_dict["b"].tolist() == [0.0, 0.0]
    assert (state_dict["c"], state_dict["d"]) == (2, 1)


# Reading without a template


def test_a_state_dict_is_read_without_a_template(tmp_path: Path) -> None:
    run_ranks(3, save_sharded, str(tmp_path))

    whole = reshard.read_state_dict(tmp_path)
    part = reshard.read_state_dict(tmp_path, {"model"})
    one = reshard.read_state_dict(tmp_path, "model.b")

    assert list(whole) == ["model", "step"]
    assert torch.equal(whole["model"]["w"], torch.arange(20.0).view(10, 2))
    assert list(part) == ["model"]
    assert list(part["model"]) == ["w", "b"]
    assert list(one) == ["model"]
    assert list(one["model"]) == ["b"]


def read_on_every_rank(folder: str) -> Any:
    """Only rank 1 reads: nobody else has to take part."""
    if dist.get_rank() != 1:
        return None
    return reshard.read_state_dict(folder)["step"], reshard.read_tensor(folder, "model.b").tolist()


def test_reading_without_a_template_needs_no_other_rank(tmp_path: Path) -> None:
    run_ranks(3, save_sharded, str(tmp_path))

    assert run_ranks(2, read_on_every_rank, str(tmp_path))[1] == (4, [1.0, 1.0])


class CountingSystem:
    """The os module; counts the bytes that are read of shard files, without their headers."""

    header_bytes = 4096

    def __init__(self) -> None:
        self.nbytes = 0
        self.opened: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, *args: Any) -> int:
        descriptor = os.open(path, *args)
        self.opened[descriptor] = str(path)
        return descriptor

    def preadv(self, descriptor: int, buffers: Any, offset: int) -> int:
        count = os.preadv(descriptor, buffers, offset)
        if self.opened[descriptor].endswith(".safetensors"):
            self.nbytes += max(0, offset + count - max(offset, self.header_bytes))
        return count


def save_matrix(folder: str) -> None:
    """1024 x 65536 bytes in rows over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(256 * 65536, dtype=torch.int32).view(256, 65536)
    w = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    reshard.save({"w": w}, checkpoint_id=folder)


REGIONS = [
    (None, 256 * 65536),
    ((slice(3, 5),), 2 * 65536),
    ((slice(120, 140),), 20 * 65536),
    ((slice(7, 8), slice(100, 228)), 128),
    ((slice(None), slice(0, 4)), 256 * 4),
    ((slice(-1, None), slice(-2, None)), 2),
    ((slice(9, 9),), 0),
    ((slice(100, 300), slice(65535, 70000)), 156),
]


def test_a_region_of_a_tensor_is_read_and_no_other_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(3, save_matrix, str(tmp_path))
    whole = torch.arange(256 * 65536, dtype=torch.int32).view(256, 65536)
    stored = reshard.FileSystemReader(tmp_path).read_metadata().storage_data.values()
    assert {info.offset for info in stored} == {CountingSystem.header_bytes}

    for region, elements in REGIONS:
        system = CountingSystem()
        monkeypatch.setattr(
            "reshard.filesystem.LocalStore",
            lambda path, system=system: LocalStore(path, system=system),
        )
        found = reshard.read_tensor(tmp_path, "w", region)
        assert same_bits(found, whole[region] if region else whole)
        assert system.nbytes == 4 * elements, region


def test_regions_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    reshard.save({"w": torch.zeros(4, 4), "step": 1}, checkpoint_id=tmp_path)

    with pytest.raises(ValueError, match="'w'"):
        reshard.read_tensor(tmp_path, "w", (slice(0, 4, 2),))
    with pytest.raises(ValueError, match="at most 2"):
        reshard.read_tensor(tmp_path, "w", (slice(None),) * 3)
    with pytest.raises(MissingKeyError, match="'w'"):
        reshard.read_tensor(tmp_path, "ww")
    with pytest.raises(MissingKeyError):
        reshard.read_tensor(tmp_path, "step")


# One process


def test_one_process_without_a_group_saves_and_loads_without_a_warning(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reshard.save({"w": torch.ones(2), "step": 1}, checkpoint_id=tmp_path)
        state_dict = {"w": torch.zeros(2), "step": 0}
        reshard.load(state_dict, checkpoint_id=tmp_path)

    assert state_dict["w"].tolist() == [1.0, 1.0]
    assert state_dict["step"] == 1


class Custom:
    """A value that only pickle can store."""


def test_a_pickled_value_is_refused_before_anything_changes(tmp_path: Path) -> None:
    reshard.save({"w": torch.ones(2), "object": Custom}, checkpoint_id=tmp_path)
    state_dict = {"w": torch.zeros(2), "object": None}

    with pytest.raises(reshard.CheckpointException, match="object") as caught:
        reshard.load(state_dict, checkpoint_id=tmp_path)

    assert isinstance(caught.value.failures[0][0], UnsafeValueError)
    assert state_dict["w"].tolist() == [0.0, 0.0]


def save_part(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    w = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)], src_data_rank=None)
    if dist.get_rank() == 0:
        reshard.save({"w": w}, checkpoint_id=folder, no_dist=True)


def test_what_one_rank_saved_of_a_sharded_tensor_is_not_taken_for_the_whole(
    tmp_path: Path,
) -> None:
    run_ranks(2, save_part, str(tmp_path))

    assert reshard.read_tensor(tmp_path, "w", (slice(0, 4),)).tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(CoverageError, match="'w'"):
        reshard.read_tensor(tmp_path, "w")
    with pytest.raises(reshard.CheckpointException, match="'w'") as caught:
        reshard.load({"w": torch.zeros(8)}, checkpoint_id=tmp_path)
    assert isinstance(caught.value.failures[0][0], CoverageError)


@pytest.mark.parametrize("verify", ["off", "chunks", "full"])
@pytest.mark.parametrize("side", [3, 1500])
def test_of_two_stored_tensors_for_one_memory_the_last_one_stays(
    side: int, verify: Any, tmp_path: Path
) -> None:
    stored = {"embed": torch.full((side, side), 1.0), "head": torch.full((side, side), 2.0)}
    reshard.save(stored, checkpoint_id=tmp_path)
    for _ in range(3):
        tied = torch.zeros(side, side)
        reshard.load({"embed": tied, "head": tied}, checkpoint_id=tmp_path, verify=verify)
        assert tied.unique().tolist() == [2.0]
        reshard.load({"head": tied, "embed": tied}, checkpoint_id=tmp_path, verify=verify)
        assert tied.unique().tolist() == [1.0]


def test_stored_tensors_for_overlapping_views_are_read_one_after_the_other(tmp_path: Path) -> None:
    reshard.save({"a": torch.full((6,), 1.0), "b": torch.full((6,), 2.0)}, checkpoint_id=tmp_path)
    memory = torch.zeros(8)
    reshard.load({"a": memory[:6], "b": memory[2:]}, checkpoint_id=tmp_path)
    assert memory.tolist() == [1.0] * 2 + [2.0] * 6


def test_an_optimizer_takes_what_is_read_without_a_template(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    reshard.save({"optim": optimizer.state_dict()}, checkpoint_id=tmp_path)
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(reshard.read_state_dict(tmp_path)["optim"])
    for parameter in model.parameters():
        for name, value in optimizer.state[parameter].items():
            assert torch.equal(fresh.state[parameter][name], value)
    assert fresh.param_groups[0]["lr"] == 0.1


def test_a_save_says_which_values_it_has_to_pickle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reshard.save({"a": 1, "deep": {"b": Fraction(1, 2)}}, checkpoint_id=tmp_path)
    (record,) = caplog.records
    assert "1 value at" in record.getMessage()
    assert record.getMessage().endswith(
        "is stored as a pickle (load with allow_pickle=True): deep.b"
    )

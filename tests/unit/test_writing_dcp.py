"""`save(format="dcp")`: what unpatched torch.distributed.checkpoint reads."""

from __future__ import annotations

import io
import logging
import re
import signal
import threading
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

import reshard
from reshard.api import UnsupportedFormatError, UnsupportedLayoutError
from reshard.checkpoint.directory import is_committed
from reshard.engine.torch_writing import _GrowingFile
from reshard.planner import WriteItemType
from reshard.planning.columns import DTYPES
from reshard.stores.local import LocalStore
from support.dcp import is_for_dcp, load_with_dcp, metadata_of, read_with_dcp
from support.samples import SHAPES, same_bits, sample
from support.subclasses import Scaled
from support.torch_version import PINNED, TORCH, forget_strides, properties_in


def save(state_dict: dict[str, Any], folder: Path, **options: Any) -> Any:
    return reshard.save(state_dict, checkpoint_id=folder, format="dcp", no_dist=True, **options)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_tensors_of_every_shape_have_the_same_bits(tmp_path: Path) -> None:
    state = {name: sample(name) for name in SHAPES}
    save(state, tmp_path)

    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load_with_dcp(found, tmp_path, no_dist=True)

    assert [name for name in state if not same_bits(found[name], state[name])] == []


SMALL_INTEGERS = [dtype for dtype in DTYPES if re.fullmatch(r"torch\.u?int[1-7]", str(dtype))]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_that_torch_can_save_has_the_same_bits(tmp_path: Path) -> None:
    state = {}
    for dtype in DTYPES:
        if dtype not in SMALL_INTEGERS and not str(dtype).startswith(("torch.qint", "torch.quint")):
            noise = torch.arange(1, 1 + 4 * dtype.itemsize, dtype=torch.uint8)
            state[str(dtype)] = (noise % 2 if dtype is torch.bool else noise).view(dtype)
    if TORCH < PINNED:
        # Its own load cannot copy them.
        state.pop("torch.float4_e2m1fn_x2")
    save(state, tmp_path)

    found = {
        name: tensor.view(torch.uint8).mul(0).view(tensor.dtype) for name, tensor in state.items()
    }
    load_with_dcp(found, tmp_path, no_dist=True)
    assert len(state) > 24
    assert [name for name in state if not same_bits(found[name], state[name])] == []


def test_a_dtype_that_torch_cannot_save_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    assert len(SMALL_INTEGERS) == 14
    for dtype in SMALL_INTEGERS:
        with pytest.raises(UnsupportedLayoutError, match=f"'small' has the dtype {dtype}"):
            save({"small": torch.ones(3, dtype=torch.uint8).view(dtype)}, tmp_path / "step")
    assert not (tmp_path / "step").exists()


VALUES: dict[str, Any] = {
    "none": None,
    "step": 7,
    "large": 2**80,
    "rate": 0.1,
    "text": "é",
    "bytes": b"\0\1",
    "list": [1, "two", None],
    "tuple": (1, (2.5, "three")),
    "set": {1, 2},
    "deque": deque([1, 2], maxlen=3),
    "array": np.arange(3),
    "scalar": np.float32(2.5),
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "path": Path("some/where"),
}


def test_values_of_all_kinds_are_what_they_were(tmp_path: Path) -> None:
    save({**VALUES, "nested": {"deep": VALUES}}, tmp_path)

    found = read_with_dcp(tmp_path)

    for values in (found, found["nested"]["deep"]):
        assert {k: v for k, v in values.items() if k not in ("array", "nested")} == {
            k: v for k, v in VALUES.items() if k != "array"
        }
        assert [type(values[name]) for name in VALUES] == [*map(type, VALUES.values())]
        assert values["array"].tolist() == [0, 1, 2]


class Custom:
    """A value that can only be pickled."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def test_values_of_unknown_classes_are_stored_like_any_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        save({"custom": Custom(3)}, tmp_path)

    assert caplog.messages == []
    assert read_with_dcp(tmp_path)["custom"] == Custom(3)


def nested_state() -> dict[str, Any]:
    weight = torch.randn(4, 3)
    return {
        "model": OrderedDict(weight=weight, bias=torch.randn(3, requires_grad=True)),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "moments": [torch.ones(2), torch.zeros(2)]}},
            "groups": [{"lr": 0.1, "params": [0, 1]}],
            "pair": (torch.ones(2), 3),
            "empty": {},
        },
        "step": 5,
    }


def test_the_metadata_is_what_dcp_itself_would_write(tmp_path: Path) -> None:
    state = nested_state()
    save(state, tmp_path / "ours")
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)

    ours, theirs = metadata_of(tmp_path / "ours"), metadata_of(tmp_path / "theirs")
    forget_strides(properties_in(theirs))

    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert [*map(type, ours.storage_data.values())] == [*map(type, theirs.storage_data.values())]
    # Older torch writes no version.
    assert ours.version == getattr(theirs, "version", "1.0.0")
    assert type(ours.storage_meta) is type(theirs.storage_meta)
    assert {type(name) for path in ours.planner_data.values() for name in path} == {str, int}


def test_dcp_loads_a_nested_state_dict_with_tuples_into_its_own_template(tmp_path: Path) -> None:
    state = nested_state()
    save(state, tmp_path)
    found = {
        "model": {"weight": torch.zeros(4, 3), "bias": torch.zeros(3)},
        "optimizer": {
            "state": {"0": {"step": torch.tensor(0.0), "moments": [torch.zeros(2), torch.ones(2)]}},
            "groups": [{"lr": 0.0, "params": []}],
            "pair": None,
        },
        "step": 0,
    }
    load_with_dcp(found, tmp_path, no_dist=True)

    assert torch.equal(found["model"]["weight"], state["model"]["weight"])
    moments = found["optimizer"]["state"]["0"]["moments"]
    assert [moment.tolist() for moment in moments] == [[1.0, 1.0], [0.0, 0.0]]
    assert found["optimizer"]["groups"] == [{"lr": 0.1, "params": [0, 1]}]
    assert torch.equal(found["optimizer"]["pair"][0], torch.ones(2))
    assert found["step"] == 5


def test_stored_tensors_that_consist_of_others_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    state = {"scaled": Scaled(torch.ones(4), torch.ones(1)), "plain": torch.ones(2)}
    reshard.save(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    with pytest.raises(UnsupportedFormatError, match=r"'scaled'.*exclude='scaled\.\*'.*dequant"):
        reshard.convert(tmp_path / "ours", tmp_path / "saved", "dcp")
    assert not (tmp_path / "saved").exists()

    reshard.convert(tmp_path / "ours", tmp_path / "saved", "dcp", exclude="scaled.*")
    assert dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata.keys() == {
        "plain"
    }


def _with_tuples(scale: float) -> dict[str, Any]:
    weight = torch.arange(1.0, 7.0).view(2, 3) * scale
    pair = (weight, weight.t(), torch.ones(1).expand(3) * scale, torch.eye(2).to_sparse() * scale)
    return {"model": {"pair": pair, "list": [weight, 5]}, "plain": (1, "x")}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tuples_of_a_torch_save_file_load_with_dcp_into_the_same_template(tmp_path: Path) -> None:
    torch.save(_with_tuples(1), tmp_path / "state.pt")
    reshard.convert(tmp_path / "state.pt", tmp_path / "dcp", "dcp")
    by_dcp = _with_tuples(0)
    load_with_dcp(by_dcp, tmp_path / "dcp", no_dist=True)
    expected = _with_tuples(1)
    for found in (by_dcp, reshard.read_state_dict(tmp_path / "dcp")):
        assert found["plain"] == (1, "x")
        assert torch.equal(found["model"]["list"][0], expected["model"]["list"][0])
        pair = found["model"]["pair"]
        assert type(pair) is tuple
        for one, other in zip(pair, expected["model"]["pair"], strict=True):
            assert one.layout is other.layout
            assert torch.equal(one.to_dense(), other.to_dense())


def test_a_tuple_that_was_flattened_in_a_checkpoint_of_ours_is_a_list_for_dcp(
    tmp_path: Path,
) -> None:
    state = {"pair": (torch.ones(2), 5)}
    reshard.save(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    reshard.convert(tmp_path / "ours", tmp_path / "dcp", "dcp")
    as_list, as_tuple = {"pair": [torch.zeros(2), 0]}, {"pair": (torch.zeros(2), 0)}
    load_with_dcp(as_list, tmp_path / "dcp", no_dist=True)
    reshard.load(as_tuple, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert as_list["pair"][1] == as_tuple["pair"][1] == 5
    assert torch.equal(as_list["pair"][0], state["pair"][0])
    assert torch.equal(as_tuple["pair"][0], state["pair"][0])


def test_views_in_a_tuple_that_take_much_more_than_the_file_are_refused(tmp_path: Path) -> None:
    whole = torch.zeros(10_000)
    views = tuple(whole[begin:] for begin in range(9))
    torch.save({"views": views, "step": 3}, tmp_path / "state.pt")
    with pytest.raises(UnsupportedFormatError, match=r"'views'.*more than 4 times the .* clones"):
        reshard.convert(tmp_path / "state.pt", tmp_path / "dcp", "dcp")
    assert not (tmp_path / "dcp").exists()
    reshard.convert(tmp_path / "state.pt", tmp_path / "dcp", "dcp", exclude="views")


def test_tied_weights_are_written_once_and_loaded_under_both_names(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    save({"embedding": weight, "head": weight}, tmp_path)

    (shard,) = (path for path in tmp_path.iterdir() if path.suffix == ".distcp")
    assert shard.stat().st_size < 1.5 * weight.nbytes
    places = metadata_of(tmp_path).storage_data.values()
    assert len({(place.relative_path, place.offset) for place in places}) == 1
    found = read_with_dcp(tmp_path)
    assert torch.equal(found["embedding"], weight)
    assert torch.equal(found["head"], weight)


def test_a_view_takes_no_more_space_than_its_own_elements(tmp_path: Path) -> None:
    whole = torch.randn(1000, 1000)
    state = {"part": whole[3:5], "column": whole[:, 7], "conjugate": torch.randn(3, 2).mT}
    save(state, tmp_path)

    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 50_000
    found = read_with_dcp(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_large_and_small_records_begin_at_multiples_of_their_alignment(tmp_path: Path) -> None:
    state = {f"small.{n}": torch.full((n,), n) for n in range(50)}
    state |= {"large": torch.randn(700, 700), "scalar": torch.tensor(1.0)}
    save(state, tmp_path)

    places = metadata_of(tmp_path).storage_data.values()
    assert {place.offset % 64 for place in places} == {0}
    found = read_with_dcp(tmp_path)
    assert torch.equal(found["large"], state["large"])
    assert all(torch.equal(found[f"small.{n}"], state[f"small.{n}"]) for n in range(50))


def test_a_patched_process_writes_the_classes_of_torch(tmp_path: Path) -> None:
    state = nested_state()
    with reshard.patch():
        import torch.distributed.checkpoint as patched

        assert patched.save is reshard.save
        save(state, tmp_path)

    assert type(metadata_of(tmp_path)).__module__ == "torch.distributed.checkpoint.metadata"
    assert torch.equal(read_with_dcp(tmp_path)["model"]["weight"], state["model"]["weight"])


def test_saves_of_the_two_formats_replace_each_other_and_leave_nothing_behind(
    tmp_path: Path,
) -> None:
    for round_ in range(2):
        save({"weight": torch.full((3,), round_)}, tmp_path)
        assert is_for_dcp(tmp_path)
        assert [name.rpartition(".")[2] for name in names_in(tmp_path)] == ["metadata", "distcp"]
        assert read_with_dcp(tmp_path)["weight"].tolist() == [round_] * 3

        reshard.save({"weight": torch.full((3,), -round_)}, checkpoint_id=tmp_path, no_dist=True)
        assert not is_for_dcp(tmp_path)
        assert len(names_in(tmp_path)) == 2
        assert reshard.read_state_dict(tmp_path)["weight"].tolist() == [-round_] * 3


def test_files_of_a_save_that_was_cut_off_are_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / f"__0_0_{'a' * 16}.distcp"
    left.write_bytes(b"cut off")
    of_others = tmp_path / "__0_0.distcp"
    of_others.write_bytes(b"not ours to delete")
    save({"weight": torch.ones(3)}, tmp_path)

    assert not left.exists()
    assert of_others.exists()


def test_a_checkpoint_can_be_deleted(tmp_path: Path) -> None:
    save({"weight": torch.ones(3)}, tmp_path / "step")
    reshard.delete(tmp_path / "step")

    assert not (tmp_path / "step").exists()


def test_two_saves_of_the_same_state_are_told_apart(tmp_path: Path) -> None:
    store, versions = LocalStore(tmp_path), []
    for _ in range(2):
        metadata = save({"weight": torch.ones(3)}, tmp_path)
        versions.append(store.version(".metadata"))
        assert is_committed(store, metadata.storage_meta.save_id)

    assert versions[0] != versions[1]
    assert not is_committed(store, "another")


@pytest.mark.parametrize(
    "options",
    [
        {"base": "elsewhere"},
        {"compress": "zstd"},
        {"fingerprint": True},
        {"use_collectives": False},
    ],
)
def test_what_dcp_has_no_place_for_is_refused_before_anything_is_written(
    options: dict[str, Any], tmp_path: Path
) -> None:
    place = tmp_path / "step"
    for call in (reshard.save, reshard.async_save):
        with pytest.raises(ValueError, match="format='dcp' takes no") as caught:
            call(
                {"weight": torch.ones(3)},
                checkpoint_id=place,
                no_dist=True,
                format="dcp",
                **options,
            )
        assert next(iter(options)) in str(caught.value)
    assert not place.exists()


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'reshard' or 'dcp', not 'tar'"):
        reshard.save({}, checkpoint_id=tmp_path, no_dist=True, format="tar")  # type: ignore[arg-type]


def test_a_tensor_that_consists_of_others_is_refused_by_name(tmp_path: Path) -> None:
    scaled = Scaled(torch.ones(3), torch.ones(1))

    with pytest.raises(UnsupportedLayoutError, match=r"'model.scaled' is a .*Scaled"):
        save({"model": {"scaled": scaled}}, tmp_path / "step")
    assert not (tmp_path / "step").exists()


def test_a_background_save_writes_it_too(tmp_path: Path) -> None:
    weight = torch.ones(3)
    future = reshard.async_save(
        {"weight": weight}, checkpoint_id=tmp_path, no_dist=True, format="dcp"
    )
    weight.zero_()
    future.result()

    assert read_with_dcp(tmp_path)["weight"].tolist() == [1.0, 1.0, 1.0]


class WrittenForDcp(reshard.DefaultSavePlanner):
    """Makes torch.save files of values itself, and keeps planner data of its own."""

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {"kept": Counter("abba"), "names": ["weight"]}
        return plans, metadata

    def transform_object(self, write_item: Any, object: Any) -> Any:
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        made = io.BytesIO()
        torch.save(("theirs", object), made)
        return made


def test_a_planner_of_a_user_is_asked_for_values_and_planner_data(tmp_path: Path) -> None:
    save({"weight": torch.ones(3), "step": 3}, tmp_path, planner=WrittenForDcp())
    metadata = metadata_of(tmp_path)

    assert metadata.planner_data == {"kept": Counter("abba"), "names": ["weight"]}
    found: dict[str, Any] = {"weight": torch.zeros(3), "step": 0}
    load_with_dcp(found, tmp_path, no_dist=True)
    assert found["step"] == ("theirs", 3)
    assert found["weight"].tolist() == [1.0, 1.0, 1.0]


def test_what_goes_through_an_extension_is_read_back_through_it(tmp_path: Path) -> None:
    writer = reshard.FileSystemWriter(tmp_path, _extensions=[ZStandard()])
    state = {"weight": torch.zeros(1000, 100), "step": 3}
    reshard.save(state, storage_writer=writer, no_dist=True, format="dcp")

    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 20_000
    assert {
        tuple(place.transform_descriptors) for place in metadata_of(tmp_path).storage_data.values()
    } == {("stream.zstd/1",)}
    found = {"weight": torch.ones(1000, 100), "step": 0}
    load_with_dcp(found, tmp_path, no_dist=True)
    assert torch.equal(found["weight"], state["weight"])
    assert found["step"] == 3


def test_each_tensor_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    writer = reshard.FileSystemWriter(tmp_path, single_file_per_rank=False)
    state = {"a": torch.ones(3), "b": torch.zeros(2)}
    reshard.save(state, storage_writer=writer, no_dist=True, format="dcp")

    assert len(names_in(tmp_path)) == 3
    assert torch.equal(read_with_dcp(tmp_path)["b"], torch.zeros(2))


def test_the_metadata_of_the_save_says_where_things_are(tmp_path: Path) -> None:
    metadata = save({"weight": torch.ones(3), "step": 3}, tmp_path)
    stored = metadata_of(tmp_path)

    assert metadata.version == stored.version == "1.0.0"
    assert {
        (index.fqn, info.relative_path, info.offset, info.length)
        for index, info in metadata.storage_data.items()
    } == {
        (index.fqn, info.relative_path, info.offset, info.length)
        for index, info in stored.storage_data.items()
    }


def test_what_was_written_for_dcp_is_read_here_as_well(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    state = {"samples": {name: sample(name) for name in SHAPES}, "step": 3, "text": ["é"]}
    save({**state, "embedding": weight, "head": weight}, tmp_path)

    found = reshard.read_state_dict(tmp_path)

    samples = found["samples"]
    assert [name for name in SHAPES if not same_bits(samples[name], sample(name))] == []
    assert found["step"] == 3
    assert found["text"] == ["é"]
    assert torch.equal(found["embedding"], weight)
    assert torch.equal(found["head"], weight)


@pytest.mark.parametrize("reason", [KeyboardInterrupt, OSError(28, "No space left")], ids=repr)
def test_what_stops_a_write_is_raised_and_not_what_torch_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: Any
) -> None:
    state = {"w": torch.ones(1000), "large": torch.ones(1 << 19)}
    write, calls = _GrowingFile.append, [0]
    cut_at = [0]

    def failing(self: _GrowingFile, piece: memoryview) -> None:
        calls[0] += 1
        if calls == cut_at:
            raise reason
        write(self, piece)

    monkeypatch.setattr(_GrowingFile, "append", failing)
    save(state, tmp_path / "whole")
    count = calls[0]
    for last in range(1, count + 1):
        calls[0], cut_at[0] = 0, last
        try:
            raise LookupError
        except LookupError:
            # What the caller is dealing with is no part of it.
            with pytest.raises((KeyboardInterrupt, reshard.CheckpointException)) as raised:
                save(state, tmp_path / "cut")

        if reason is KeyboardInterrupt:
            assert raised.type is KeyboardInterrupt
        else:
            assert str(raised.value).startswith("No space left")
    assert count > 10
    assert not (tmp_path / "cut").exists()


@pytest.mark.parametrize("before", ["reshard", "dcp"])
@pytest.mark.parametrize("after", ["reshard", "dcp"])
def test_an_interrupt_of_the_commit_comes_when_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Any, after: Any
) -> None:
    reshard.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "older", format=before)
    rename = LocalStore.commit

    def interrupted(self: LocalStore, *args: Any) -> str:
        version = rename(self, *args)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return version

    monkeypatch.setattr(LocalStore, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reshard.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "older", format=after)

    assert torch.equal(reshard.read_tensor(tmp_path / "older", "w"), torch.ones(2))
    assert len(names_in(tmp_path / "older")) == 2


def test_an_interrupt_right_after_the_place_was_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = LocalStore.create

    def interrupted(self: LocalStore) -> bool:
        made = create(self)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return made

    monkeypatch.setattr(LocalStore, "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save({"w": torch.ones(2)}, tmp_path / "new")

    assert not (tmp_path / "new").exists()

"""What a save with a base writes, what it refers to, and that all of it can be read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reshard
from reshard.api import CorruptCheckpointError
from reshard.checkpoint.directory import read_manifest
from reshard.default_planner import DefaultSavePlanner
from reshard.format.tables import Manifest
from reshard.planner import SavePlan, WriteItem
from reshard.stores.local import LocalStore
from support.samples import SHAPES, same_bits, sample


def manifest(folder: Path) -> Manifest:
    return read_manifest(LocalStore(folder))


def referred(folder: Path) -> set[str]:
    """The tensors of which no byte was written."""
    m = manifest(folder)
    names = set()
    for tensor, name in enumerate(m.tensor_names):
        begin, end = m.chunk_starts[tensor : tensor + 2].tolist()
        files = m.chunk_files[begin:end].tolist()
        if files and all(m.origin_of(file) is not None for file in files):
            names.add(name)
    return names


def origins(folder: Path) -> list[str]:
    return [origin.location for origin in manifest(folder).origins]


def save(state_dict: dict[str, Any], folder: Path, **options: Any) -> Path:
    reshard.save(state_dict, checkpoint_id=folder, **options)
    return folder


def tensors() -> dict[str, Any]:
    return {
        "w": torch.arange(3000, dtype=torch.float32).reshape(60, 50),
        "b": torch.arange(10.0),
        "scalar": torch.tensor(2.5),
    }


# What is written


def test_what_is_unchanged_is_referred_to_and_the_rest_is_written(tmp_path: Path) -> None:
    before = tensors()
    before |= {"dtype": torch.zeros(8), "shape": torch.ones(8), "old name": torch.ones(9)}
    before |= {"step": 1, "empty": torch.zeros(0, 4)}
    after = tensors()
    after["b"] = after["b"] + 1
    after |= {"dtype": torch.zeros(8, dtype=torch.int32), "shape": torch.ones(2, 4)}
    after |= {"new name": torch.ones(9), "step": 1, "empty": torch.zeros(0, 4)}
    after |= {"w again": after["w"].clone()}
    base = save(before, tmp_path / "a")

    save(after, tmp_path / "b", base=base)

    assert referred(tmp_path / "b") == {"w", "scalar"}
    found = reshard.read_state_dict(tmp_path / "b")
    assert found.keys() == after.keys()
    assert all(same_bits(found[name], after[name]) for name in after if name != "step")
    assert found["step"] == 1


def test_a_save_in_which_nothing_has_changed_writes_no_shard_file(tmp_path: Path) -> None:
    save(tensors(), tmp_path / "a")

    save(tensors(), tmp_path / "b", base=tmp_path / "a")

    assert [path.name for path in (tmp_path / "b").iterdir()] == [".metadata"]
    assert same_bits(reshard.read_state_dict(tmp_path / "b")["w"], tensors()["w"])


@pytest.mark.parametrize("position", [0, 1500, 2999])
def test_one_other_element_is_another_tensor(position: int, tmp_path: Path) -> None:
    save(tensors(), tmp_path / "a")
    after = tensors()
    after["w"].view(-1)[position] += 1

    save(after, tmp_path / "b", base=tmp_path / "a")

    assert referred(tmp_path / "b") == {"b", "scalar"}
    assert same_bits(reshard.read_state_dict(tmp_path / "b")["w"], after["w"])


def test_bits_decide_and_not_numbers(tmp_path: Path) -> None:
    before = {"zero": torch.zeros(5), "nan": torch.full((5,), torch.nan)}
    save(before, tmp_path / "a")

    save({"zero": -torch.zeros(5), "nan": before["nan"]}, tmp_path / "b", base=tmp_path / "a")

    assert referred(tmp_path / "b") == {"nan"}


def test_tensors_of_every_dtype_are_referred_to(tmp_path: Path) -> None:
    state_dict = {name: sample(name) for name in SHAPES}
    save(state_dict, tmp_path / "a")

    save(state_dict, tmp_path / "b", base=tmp_path / "a")

    assert referred(tmp_path / "b") == {name for name, value in state_dict.items() if value.numel()}
    found = reshard.read_state_dict(tmp_path / "b")
    assert all(same_bits(found[name], value) for name, value in state_dict.items())


def test_the_layout_in_memory_does_not_matter(tmp_path: Path) -> None:
    save(tensors(), tmp_path / "a")
    after = {**tensors(), "w": tensors()["w"].t().contiguous().t()}
    assert not after["w"].is_contiguous()

    save(after, tmp_path / "b", base=tmp_path / "a")

    assert referred(tmp_path / "b") == {"w", "b", "scalar"}
    assert same_bits(reshard.read_state_dict(tmp_path / "b")["w"], tensors()["w"])


def test_tied_weights_may_be_untied_and_tied_again(tmp_path: Path) -> None:
    weight = torch.arange(500.0)
    save({"in": weight, "out": weight}, tmp_path / "tied")
    save({"in": weight, "out": weight.clone()}, tmp_path / "untied", base=tmp_path / "tied")
    save({"in": weight, "out": weight + 1}, tmp_path / "apart", base=tmp_path / "untied")
    save({"in": weight, "out": weight}, tmp_path / "again", base=tmp_path / "untied")
    save({"out": weight}, tmp_path / "alone", base=tmp_path / "tied")

    assert referred(tmp_path / "untied") == {"in", "out"}
    assert referred(tmp_path / "apart") == {"in"}
    assert referred(tmp_path / "alone") == {"out"}
    for name in ("tied", "untied", "again"):
        found = reshard.read_state_dict(tmp_path / name)
        assert same_bits(found["in"], weight)
        assert same_bits(found["out"], weight)
        assert len(list((tmp_path / name).glob("*.safetensors"))) == (name == "tied")
    assert same_bits(reshard.read_state_dict(tmp_path / "apart")["out"], weight + 1)
    assert reshard.materialise(tmp_path / "again")
    assert same_bits(reshard.read_state_dict(tmp_path / "again")["out"], weight)


@pytest.mark.parametrize("single_file", [True, False])
def test_either_side_may_have_a_file_for_each_tensor(single_file: bool, tmp_path: Path) -> None:
    writer = reshard.FileSystemWriter(tmp_path / "a", single_file_per_rank=single_file)
    reshard.save(tensors(), storage_writer=writer)
    writer = reshard.FileSystemWriter(tmp_path / "b", single_file_per_rank=not single_file)
    after = {**tensors(), "b": torch.zeros(10), "c": torch.ones(3)}

    reshard.save(after, storage_writer=writer, base=tmp_path / "a")

    assert referred(tmp_path / "b") == {"w", "scalar"}
    assert len(list((tmp_path / "b").glob("*.safetensors"))) == (2 if single_file else 1)
    found = reshard.read_state_dict(tmp_path / "b")
    assert all(same_bits(found[name], value) for name, value in after.items())


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_a_custom_planner_would_write_is_compared(one_by_one: bool, tmp_path: Path) -> None:
    class Halving(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def resolve_data(self, write_item: WriteItem) -> Any:
            data = super().resolve_data(write_item)
            return data.half() if isinstance(data, torch.Tensor) else data

    save(tensors(), tmp_path / "a", planner=Halving())
    after = tensors()
    # Not seen in half precision.
    after["w"][1:] += 1e-6
    after["b"][3] = 100
    writer = reshard.FileSystemWriter(tmp_path / "b", single_file_per_rank=not one_by_one)

    reshard.save(after, storage_writer=writer, planner=Halving(), base=tmp_path / "a")
    save(after, tmp_path / "c", base=tmp_path / "a")

    assert referred(tmp_path / "b") == {"w", "scalar"}
    assert referred(tmp_path / "c") == set()
    found = reshard.read_state_dict(tmp_path / "b")
    assert found["w"].dtype is torch.float16
    assert same_bits(found["w"], after["w"].half())


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_history_of_changes_is_read_back(data: st.DataObject, tmp_path: Path) -> None:
    root = tmp_path / str(len(list(tmp_path.iterdir())))
    current = {f"t{n}": torch.full((n, 3), float(n)) for n in range(4)}
    states: list[dict[str, torch.Tensor]] = []
    for step in range(data.draw(st.integers(2, 5))):
        for name in data.draw(st.sets(st.sampled_from(sorted(current)))):
            current[name] = current[name] + 1
        names = data.draw(st.sets(st.sampled_from(sorted(current)), min_size=1))
        states.append({name: current[name].clone() for name in sorted(names)})
        bases = [root / str(n) for n in range(step)]
        base = data.draw(st.sampled_from([None, *bases]))
        reshard.save(states[-1], checkpoint_id=root / str(step), base=base)
    for step, state_dict in enumerate(states):
        found = reshard.read_state_dict(root / str(step))
        assert found.keys() == state_dict.keys()
        assert all(same_bits(found[name], value) for name, value in state_dict.items())
        m = manifest(root / str(step))
        held = {origin.location for origin in m.origins}
        assert all((root / str(step) / place).is_dir() for place in held)


# Chains


@pytest.mark.parametrize("parts", [(), (0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_a_chain_is_flat(parts: tuple[int, ...], tmp_path: Path) -> None:
    places = [tmp_path / str(n) for n in range(4)]
    for number, place in enumerate(places):
        state_dict = {**tensors(), "b": torch.full((10,), float(number))}
        base = places[number - 1] if number else None
        save(state_dict, place, base=base, use_collectives=number not in parts)

    for number, place in enumerate(places[1:], 1):
        assert origins(place) == ["../0"]
        assert referred(place) == {"w", "scalar"}
        found = reshard.read_state_dict(place)
        assert same_bits(found["w"], tensors()["w"])
        assert found["b"].unique().tolist() == [number]
    # Those in between are not needed.
    for place in places[1:3]:
        reshard.delete(place)
    assert same_bits(reshard.read_state_dict(places[3])["w"], tensors()["w"])


def test_a_chain_through_several_folders_is_flat(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("a", "x/b", "x/y/c", "z/d")]
    for number, place in enumerate(places):
        save(tensors(), place, base=places[number - 1] if number else None)

    assert [origins(place) for place in places[1:]] == [["../../a"], ["../../../a"], ["../../a"]]
    for place in places:
        assert same_bits(reshard.read_state_dict(place)["w"], tensors()["w"])


def test_a_checkpoint_may_refer_to_several(tmp_path: Path) -> None:
    state_dict: dict[str, torch.Tensor] = {}
    for number in range(5):
        state_dict[f"t{number}"] = torch.full((100,), float(number))
        base = tmp_path / str(number - 1) if number else None
        save(state_dict, tmp_path / str(number), base=base)

    assert sorted(origins(tmp_path / "4")) == ["../0", "../1", "../2", "../3"]
    found = reshard.read_state_dict(tmp_path / "4")
    assert all(same_bits(found[name], value) for name, value in state_dict.items())


# Doors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose `w` and `scalar` lie elsewhere."""
    save({**tensors(), "step": 1}, tmp_path / "a")
    return save({**tensors(), "b": torch.ones(10), "step": 2}, tmp_path / "b", base=tmp_path / "a")


@pytest.mark.parametrize("verify", ["chunks", "full", "off"])
def test_a_load_follows_references(verify: str, folder: Path) -> None:
    state_dict = {"w": torch.zeros(60, 50), "b": torch.zeros(10), "scalar": torch.zeros(())}

    reshard.load({**state_dict, "step": 0}, checkpoint_id=folder, verify=verify)

    assert same_bits(state_dict["w"], tensors()["w"])
    assert same_bits(state_dict["b"], torch.ones(10))
    assert same_bits(state_dict["scalar"], tensors()["scalar"])


def test_names_may_be_left_out_renamed_and_missing(folder: Path) -> None:
    state_dict = {"other": torch.zeros(60, 50), "missing": torch.zeros(3)}

    reshard.load(
        state_dict, checkpoint_id=folder, strict=False, rename={"w": "other"}, exclude=["b"]
    )

    assert same_bits(state_dict["other"], tensors()["w"])


@pytest.mark.parametrize("verify", ["chunks", "full", "off"])
def test_regions_are_read_through_references(verify: str, folder: Path) -> None:
    region = (slice(7, 23), slice(11, 31))

    found = reshard.read_tensor(folder, "w", region, verify=verify)

    assert same_bits(found, tensors()["w"][region])


def test_a_reader_reads_through_references(folder: Path) -> None:
    state_dict = {"w": torch.zeros(60, 50)}

    reshard.load(state_dict, storage_reader=reshard.FileSystemReader(folder))

    assert same_bits(state_dict["w"], tensors()["w"])


# Places

WAYS: dict[str, Callable[[Path], Any]] = {
    "absolute": str,
    "path": Path,
    "relative": os.path.relpath,
    "relative path": lambda path: Path(os.path.relpath(path)),
    "dots": lambda path: f"{path}/../{path.name}/.",
    "slash": lambda path: f"{path}/",
    "through a link": lambda path: path.parent / "link",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_background", [False, True])
def test_a_base_may_be_named_in_any_way(
    way: str, in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tensors(), tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    base = WAYS[way](tmp_path / "a")
    if in_background:
        future = reshard.async_save(tensors(), checkpoint_id=tmp_path / "b", base=base)
        monkeypatch.chdir(tmp_path)
        future.result()
    else:
        save(tensors(), tmp_path / "b", base=base)

    assert origins(tmp_path / "b") == ["../a"]
    assert same_bits(reshard.read_state_dict(tmp_path / "b")["w"], tensors()["w"])


@pytest.mark.parametrize(
    ("base", "place", "location"),
    [
        ("x/y/a", "b", "../x/y/a"),
        ("a", "x/y/b", "../../../a"),
        ("one/a", "two/b", "../../one/a"),
        ("a", "a-1", "../a"),
        ("above", "above/b", "../../above"),
        ("above", "above/x/b", "../../../above"),
        ("2026-11-16T10:00:00", "2026-11-16T11:00:00", "../2026-11-16T10:00:00"),
        ("with space", "mit Ümläut", "../with space"),
        ("a%20b", "b", "../a%20b"),
    ],
)
def test_a_base_may_lie_anywhere_else(base: str, place: str, location: str, tmp_path: Path) -> None:
    save(tensors(), tmp_path / base)

    save(tensors(), tmp_path / place, base=tmp_path / base)

    assert origins(tmp_path / place) == [location]
    assert same_bits(reshard.read_state_dict(tmp_path / place)["w"], tensors()["w"])
    assert reshard.materialise(tmp_path / place)
    assert same_bits(reshard.read_state_dict(tmp_path / place)["w"], tensors()["w"])


def test_a_folder_of_checkpoints_may_be_moved_as_a_whole(tmp_path: Path) -> None:
    save(tensors(), tmp_path / "old" / "a")
    save(tensors(), tmp_path / "old" / "b", base=tmp_path / "old" / "a")

    shutil.move(tmp_path / "old", tmp_path / "somewhere" / "else")

    found = reshard.read_state_dict(tmp_path / "somewhere" / "else" / "b")
    assert same_bits(found["w"], tensors()["w"])


def test_a_checkpoint_is_read_through_links(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "link").symlink_to(folder)
    (tmp_path / "link to all").symlink_to(tmp_path)

    for place in (tmp_path / "far" / "link", tmp_path / "link to all" / "b"):
        assert same_bits(reshard.read_state_dict(place)["w"], tensors()["w"])


def test_a_save_through_a_link_refers_to_what_is_beside_the_real_place(tmp_path: Path) -> None:
    save(tensors(), tmp_path / "a")
    (tmp_path / "far").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "far" / "link").symlink_to(tmp_path / "b")

    save(tensors(), tmp_path / "far" / "link", base=tmp_path / "a")

    assert origins(tmp_path / "b") == ["../a"]
    assert same_bits(reshard.read_state_dict(tmp_path / "far" / "link")["w"], tensors()["w"])
    assert same_bits(reshard.read_state_dict(tmp_path / "b")["w"], tensors()["w"])


def test_a_checkpoint_that_refers_to_the_new_place_is_a_base_for_the_rest(tmp_path: Path) -> None:
    save(tensors(), tmp_path / "a")
    save({**tensors(), "more": torch.ones(99)}, tmp_path / "b", base=tmp_path / "a")

    save({**tensors(), "more": torch.ones(99)}, tmp_path / "a", base=tmp_path / "b")

    assert referred(tmp_path / "a") == {"more"}
    for name in "ab":
        assert same_bits(reshard.read_state_dict(tmp_path / name)["w"], tensors()["w"])


def test_a_base_that_refers_into_the_new_place_is_a_base_for_the_rest(tmp_path: Path) -> None:
    save(tensors(), tmp_path / "new" / "inside")
    save({**tensors(), "more": torch.ones(9)}, tmp_path / "b", base=tmp_path / "new" / "inside")

    save({**tensors(), "more": torch.ones(9)}, tmp_path / "new", base=tmp_path / "b")

    assert referred(tmp_path / "new") == {"more"}
    assert same_bits(reshard.read_state_dict(tmp_path / "new")["w"], tensors()["w"])


@pytest.mark.parametrize("mmap", [False, True])
def test_plain_files_that_were_replaced_are_not_only_called_damaged(
    mmap: bool, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    (tmp_path / "hf").mkdir()
    tensors = {"w": torch.arange(5000.0)}
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    reshard.save(tensors, checkpoint_id=tmp_path / "a", base=tmp_path / "hf")
    save_file({"w": torch.ones(5000)}, tmp_path / "hf" / "model.safetensors")

    text = r"are damaged, or the file was replaced since .* Put the original file back, or load an"
    with pytest.raises(CorruptCheckpointError, match=text):
        reshard.read_state_dict(tmp_path / "a", mmap=mmap)
